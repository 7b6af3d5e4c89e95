"""A prefill takes at least what the host needs to launch its layers, where a backend says what that is."""

from dataclasses import replace

import numpy as np
import pytest

import castoff
from castoff import Offload, Parallel, Prediction, Quant, Scenario, Workload
from castoff.ops.collectives import ExpertExchange
from castoff.report.step import step_report
from castoff.report.words import verdict
from castoff.spec.device import load_device
from tests.generators import GLM_5

H200 = "h200_sxm"
QUANT = Quant(quantize_linear_action="FP8", quantize_indexer_action="FP8")
TP8 = Scenario(parallel=Parallel(num_devices=8, tp_size=8), quant=QUANT, backend="sglang")
LAYERS, LAYER_S, STEP_S = 78, 1.04e-3, 2e-3


def prefill(tokens: int, scenario: Scenario = TP8, **lengths: int) -> Prediction:
    return castoff.cast(GLM_5, H200, replace(scenario, workload=Workload(query_length=tokens, **lengths)))


def test_short_prompts_take_the_host_s_time_and_long_ones_the_device_s() -> None:
    short, long = prefill(64), prefill(8192)
    assert short.latency_s == pytest.approx(LAYERS * LAYER_S + STEP_S)
    assert any("the host launches this prefill op by op" in note for note in short.notes)
    assert long.latency_s == pytest.approx(long.cast.timeline.end_s + STEP_S)
    assert not any("host" in note for note in long.notes)


def test_a_decode_step_has_none() -> None:
    step = castoff.cast(GLM_5, H200, replace(TP8, workload=Workload(context_length=100)))
    assert step.latency_s < LAYERS * LAYER_S / 2


def test_every_stage_launches_its_layers_for_every_micro_batch() -> None:
    pipelined = replace(TP8, parallel=Parallel(num_devices=8, tp_size=2, pp_size=4))
    one, four = prefill(16, pipelined), prefill(16, pipelined, num_queries=4)
    assert one.latency_s == pytest.approx(LAYERS * LAYER_S + STEP_S)
    assert four.latency_s == pytest.approx((1 + 3 / 4) * LAYERS * LAYER_S + STEP_S)


def test_a_sweep_has_the_floor_of_every_scenario() -> None:
    swept = castoff.sweep(GLM_5, H200, TP8, num_queries=1, query_length=np.array([64, 512, 8192]))
    assert np.ravel(swept.latency_s) == pytest.approx([prefill(tokens).latency_s for tokens in (64, 512, 8192)])


def test_a_link_that_the_host_hides_stalls_nothing() -> None:
    offloading = replace(TP8, offload=Offload(offload="gather"))
    assert prefill(64, offloading).stall_s == 0.0
    slow = load_device(H200)
    slow = replace(slow, host_link=replace(slow.host_link, to_host_bytes_per_s=1e7))
    found = castoff.cast(GLM_5, slow, replace(offloading, workload=Workload(query_length=64)))
    assert found.stall_s == pytest.approx(found.latency_s - prefill(64).latency_s, rel=0.05)


def test_redundant_experts_are_among_those_that_exchanges_know() -> None:
    parallel = Parallel(num_devices=8, dp_size=8, ep_size=8, enable_redundant_experts=True)
    step = castoff.cast(GLM_5, H200, replace(TP8, parallel=parallel, workload=Workload(num_queries=64)))
    calls = [call for block in step.cast.program.blocks for call in block.calls]
    found = {call.attributes["exchange"] for call in calls if call.attributes.get("exchange")}
    assert {(each.way, each.phase, each.experts) for each in found} == {
        ("dispatch", "decode", 264),
        ("combine", "decode", 264),
    }
    assert all(isinstance(each, ExpertExchange) for each in found)


def test_the_verdict_names_the_host_where_it_takes_longest() -> None:
    assert verdict(step_report(prefill(64))).startswith("Bound by the host, which takes ")
    assert verdict(step_report(prefill(8192))).startswith("Bound by ")
    assert "the host" not in verdict(step_report(prefill(8192)))


def test_figures_of_another_vendor_s_stack_are_assumed() -> None:
    ours, theirs = (
        castoff.cast(GLM_5, H200, replace(TP8, backend=backend, workload=Workload(context_length=4096)))
        for backend in ("nvidia", "cann-ge")
    )
    assert not any("devices of" in note for note in ours.notes)
    assert "cann-ge is for devices of ascend; on h200_sxm all its figures are assumed" in theirs.notes
    origins = {price.origin for block in theirs.cast.prices.values() for price in block}
    assert origins == {"assumed"}


def test_more_prompts_are_never_faster_in_a_pipeline() -> None:
    pipelined = replace(TP8, parallel=Parallel(num_devices=8, tp_size=2, pp_size=4))
    latencies = [prefill(32, pipelined, num_queries=requests).latency_s for requests in range(1, 18)]
    assert (np.diff(latencies) >= -1e-12).all()
    decodes = [
        castoff.cast(GLM_5, H200, replace(pipelined, workload=Workload(num_queries=requests, context_length=4096)))
        for requests in range(1, 18)
    ]
    assert (np.diff([step.latency_s for step in decodes]) >= -1e-12).all()
