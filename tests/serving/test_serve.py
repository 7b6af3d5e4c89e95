"""`castoff.serve`: deployments under load."""

from __future__ import annotations

from dataclasses import replace

import pytest

import castoff
from castoff import Arrivals, ClosedLoop, Mtp, Offload, Parallel, Quant, Scenario, Workload
from castoff.serving.serve import as_served
from castoff.spec.device import load_device
from castoff.spec.hit_profile import Hits
from castoff.spec.model import load_model

GLM5, H200 = load_model("zai-org/GLM-5-FP8"), load_device("h200_sxm")
TP8 = as_served("sglang", H200, GLM5, Parallel(num_devices=8, tp_size=8))
LOAD = ClosedLoop(concurrency=8, prompt_tokens=1024, output_tokens=256, num_requests=24)


def serve(scenario: Scenario = TP8, workload: ClosedLoop | Arrivals = LOAD) -> castoff.ServeResult:
    return castoff.serve(GLM5, H200, scenario, workload=workload)


def test_defaults_of_a_backend() -> None:
    assert TP8.quant.quantize_linear_action == "FP8"
    assert (TP8.quant.quantize_attention_action, TP8.quant.quantize_indexer_action) == ("DISABLED", "FP8")
    b200 = as_served("sglang", load_device("b200_sxm"), GLM5, TP8.parallel)
    assert b200.quant.quantize_attention_action == "FP8"


def test_capacity_follows_the_cache_format() -> None:
    assert serve().kv_capacity_tokens == pytest.approx(307_000, rel=0.02)
    fp8 = replace(TP8, quant=replace(TP8.quant, quantize_attention_action="FP8"))
    rows = 78 * (1152 + 132), 78 * (656 + 132)
    assert serve(fp8).kv_capacity_tokens / serve().kv_capacity_tokens == pytest.approx(rows[0] / rows[1], rel=1e-4)
    less = serve(replace(TP8, reserved_memory_gb=10.0))
    assert serve().kv_capacity_tokens - less.kv_capacity_tokens == pytest.approx(10 * 2**30 / rows[0], abs=2)


def test_one_request_is_a_prefill_and_its_steps() -> None:
    result = serve(workload=Arrivals(arrival_s=[0.0], prompt_tokens=[1000], output_tokens=[100]))
    plain = replace(TP8, workload=Workload(query_length=1000))
    prefill_s = castoff.cast(GLM5, H200, plain)
    host = prefill_s.backend.serving
    assert host is not None
    system = host.system("h200_sxm")
    device_s = host.prefill_factor * (prefill_s.latency_s - prefill_s.cast.host_s)
    wanted = max(device_s, 78 * system.prefill_floor_s_per_layer) + system.host_s_per_prefill
    assert result.summary.ttft_mean_s == pytest.approx(wanted, rel=0.02)
    step = castoff.cast(GLM5, H200, replace(TP8, workload=Workload(context_length=1050, decode=True)))
    decode_s = step.latency_s - step.backend.host_s_per_step["decode"] + system.host_s_per_decode_step
    assert result.summary.tpot_mean_s == pytest.approx(decode_s, rel=0.01)


def test_more_clients_wait_longer_and_get_more() -> None:
    few, many = serve(), serve(workload=replace(LOAD, concurrency=24))
    assert many.summary.tpot_mean_s is not None
    assert few.summary.tpot_mean_s is not None
    assert many.summary.tpot_mean_s > few.summary.tpot_mean_s
    assert many.summary.output_tokens_per_s > few.summary.output_tokens_per_s
    assert many.output_tokens_per_s_per_device == many.summary.output_tokens_per_s / 8


def test_memory_bounds_long_answers() -> None:
    load = ClosedLoop(concurrency=64, prompt_tokens=1024, output_tokens=8192)
    result = serve(workload=load)
    assert result.summary.capacity_bound
    assert result.summary.queue_mean_s > 5
    assert result.served.kv_peak_tokens <= result.kv_capacity_tokens
    assert not serve(workload=replace(load, concurrency=16)).summary.capacity_bound


def test_accepted_drafts_shorten_answers() -> None:
    def tpot_s(accepted: float) -> float:
        drafts = replace(TP8, mtp=Mtp(num_mtp_tokens=3, mtp_acceptance_length=accepted))
        found = serve(drafts).summary.tpot_mean_s
        assert found is not None
        return found

    assert tpot_s(3.0) < tpot_s(2.0) < tpot_s(1.0)


def test_attention_data_parallelism_and_vllm() -> None:
    ranks = replace(TP8, parallel=Parallel(num_devices=8, dp_size=8, ep_size=8))
    result = serve(ranks)
    assert result.kv_capacity_tokens % 8 == 0
    assert result.prefill_chunk_tokens == 8192
    mixed = serve(replace(ranks, backend="vllm"))
    assert mixed.prefill_chunk_tokens == 8 * 8192
    assert (mixed.backend, mixed.origin) == ("vllm", "assumed")


def test_pipeline_stages_hold_what_the_fullest_does() -> None:
    two = serve(replace(TP8, parallel=Parallel(num_devices=16, tp_size=8, pp_size=2)))
    # Half the layers and half the weights a device.
    assert two.kv_capacity_tokens > 4 * serve().kv_capacity_tokens
    fuller = castoff.cast(
        GLM5,
        H200,
        replace(
            TP8,
            parallel=Parallel(num_devices=16, tp_size=8, pp_size=2),
            workload=Workload(context_length=two.kv_capacity_tokens, decode=True),
        ),
    ).footprint
    held = float(fuller.used_bytes - fuller.activation_bytes)
    assert held == pytest.approx(0.85 * float(fuller.device_bytes_capacity), rel=1e-4)


def test_offload_holds_more_requests() -> None:
    glm52 = load_model("zai-org/GLM-5.2-FP8")
    plain = as_served("sglang", H200, glm52, Parallel(num_devices=8, tp_size=8))
    offloaded = replace(plain, offload=Offload(offload="direct", pool_tokens=8192), hits=Hits(hit_rate=0.9))
    load = ClosedLoop(concurrency=24, prompt_tokens=32768, output_tokens=128, num_requests=24)
    here = castoff.serve(glm52, H200, plain, workload=load)
    there = castoff.serve(glm52, H200, offloaded, workload=load)
    assert here.summary.capacity_bound
    assert not there.summary.capacity_bound


def test_a_name_of_each_and_the_default_scenario() -> None:
    with pytest.raises(castoff.CastoffError, match="no cache fits: weights and buffers take"):
        castoff.serve("zai-org/GLM-5-FP8", "h200_sxm", workload=LOAD)


@pytest.mark.parametrize(
    ("scenario", "load", "message"),
    [
        (replace(TP8, backend="nvidia"), LOAD, "nvidia does not say how it serves.*sglang or vllm"),
        (replace(TP8, quant=Quant(quantize_linear_action="DISABLED")), LOAD, "no cache fits"),
        (TP8, replace(LOAD, prompt_tokens=400_000, concurrency=1), "can never run.*cache rows fit on 8 x h200_sxm"),
        (replace(TP8, parallel=Parallel(num_devices=8, tp_size=7)), LOAD, "tp_size|--tp-size"),
        (TP8, replace(LOAD, concurrency=0), "concurrency must be at least 1"),
        (TP8, replace(LOAD, output_tokens=0), "output_tokens must be at least 1"),
        (TP8, replace(LOAD, least_share=0.0), "least_share must be greater than 0"),
        (TP8, Arrivals(arrival_s=[0.0], prompt_tokens=[], output_tokens=[1]), "one time, one prompt_tokens"),
        (TP8, Arrivals(arrival_s=[-1.0], prompt_tokens=[1], output_tokens=[1]), "arrival_s must be seconds"),
        (TP8, Arrivals(arrival_s=[0.0], prompt_tokens=[0], output_tokens=[1]), "prompt_tokens must be at least 1"),
    ],
)
def test_refusals(scenario: Scenario, load: ClosedLoop | Arrivals, message: str) -> None:
    with pytest.raises(castoff.CastoffError, match=message):
        serve(scenario, load)


def test_another_format_than_the_checkpoints_is_noted() -> None:
    assert serve().notes == ()
    as_int8 = replace(TP8, quant=replace(TP8.quant, quantize_linear_action="W8A8_DYNAMIC"))
    assert any("is published in FP8 and is priced as W8A8_DYNAMIC" in note for note in serve(as_int8).notes)


def test_passes_beyond_the_fits_are_noted() -> None:
    long = ClosedLoop(concurrency=16, prompt_tokens=200_000, output_tokens=4, num_requests=2)
    assert any("beyond the sizes that were fitted" in note for note in serve(workload=long).notes)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (ClosedLoop(concurrency=10**9, prompt_tokens=1, output_tokens=1), "more than the 1,000,000"),
        (Arrivals(arrival_s=[1e17], prompt_tokens=[1], output_tokens=[1]), "from 0 to 3.2e"),
        (Arrivals(arrival_s=["a"], prompt_tokens=[1], output_tokens=[1]), "must be numbers"),  # type: ignore[list-item]
        (Arrivals(arrival_s=[0.0], prompt_tokens=5, output_tokens=[1]), "as lists of numbers"),  # type: ignore[arg-type]
    ],
)
def test_loads_that_cannot_be(load: ClosedLoop | Arrivals, message: str) -> None:
    with pytest.raises(castoff.CastoffError, match=message):
        serve(workload=load)


def test_another_cache_than_the_stack_s_is_noted() -> None:
    fp8 = replace(TP8, quant=replace(TP8.quant, quantize_attention_action="FP8"))
    note = "sglang serves from a bf16 KV cache on h200_sxm; this one is in FP8"
    assert note in serve(fp8).notes
    assert not any("KV cache" in note for note in serve().notes)
