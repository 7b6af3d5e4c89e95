"""Tables of step times against casts at the same sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castoff.casting.deployment import Deployment, resolve
from castoff.casting.rank import cast_batch
from castoff.serving.serve import as_served
from castoff.serving.steps import DecodeTable, Extent, StackSteps, decode_table, prefill_table, without_host
from castoff.spec.backend import load_backend
from castoff.spec.device import load_device
from castoff.spec.model import load_model
from castoff.spec.scenario import Mtp, Parallel, RequestClass, Workload

MODEL, DEVICE = load_model("zai-org/GLM-5-FP8"), load_device("h200_sxm")
TP8 = Parallel(num_devices=8, tp_size=8)
EXTENT = Extent(longest_tokens=9000, requests=64, chunk_tokens=8192)
TOY = DecodeTable((1, 2, 4, 8), (0.0, 10.0, 40.0), ((1, 2, 3), (2, 3, 5), (4, 6, 7), (8, 9, 12)), 4)


def deployment(workload: Workload, parallel: Parallel = TP8, drafts: int = 0) -> Deployment:
    scenario = as_served("sglang", DEVICE, MODEL, parallel, mtp=Mtp(num_mtp_tokens=drafts))
    # Of a backend without steps in its times, such as attention that turns sparse at some length.
    return without_host(resolve(MODEL, DEVICE, replace(scenario, workload=workload, backend="nvidia")))


def seconds(deployment: Deployment, requests: float, context: float, query: float) -> float:
    return float(cast_batch(deployment, [RequestClass(requests, context, query)]).latency_s)


def alike(tokens: int, context: int, requests: int) -> list[tuple[int, int]]:
    """Prompts as equal as whole tokens allow."""
    return [(len(range(first, tokens, requests)), context) for first in range(requests)]


@pytest.mark.property
@given(st.integers(1, 8), st.floats(0, 60), st.sampled_from([0.0, 1.0, 2.7]), st.integers(1, 90))
def test_a_sum_is_its_steps(requests: int, context: float, growth: float, steps: int) -> None:
    single = [TOY.sum_s(requests, context + growth * step, growth, 1) for step in range(steps)]
    assert TOY.sum_s(requests, context, growth, steps) == pytest.approx(sum(single))


def test_padding_keeps_the_rows() -> None:
    # Three requests of 12 rows run as four of 9.
    assert TOY.sum_s(3, 12, 0, 1) == pytest.approx(TOY.sum_s(4, 9, 0, 1))
    # Beyond the graphs, times lie between.
    assert TOY.sum_s(6, 10, 0, 1) == pytest.approx((6 + 9) / 2)


@pytest.mark.parametrize("drafts", [0, 3])
def test_decode_table_is_the_cast(drafts: int) -> None:
    own = deployment(Workload(decode=True), drafts=drafts)
    table, *_ = decode_table(own, EXTENT, (1, 2, 4, 8, 16, 32, 48, 64, 128))
    assert table.requests == (1, 2, 4, 8, 16, 32, 48, 64)
    for requests, context in ((1, 300), (16, 1500), (48, 5000), (64, 9000)):
        wanted = seconds(own, requests, context, 1 + drafts)
        assert table.sum_s(requests, context, 0, 1) == pytest.approx(wanted, rel=0.005)


def test_batches_without_a_graph() -> None:
    table, *_ = decode_table(deployment(Workload(decode=True)), replace(EXTENT, requests=100), (1, 2, 4, 8))
    assert (table.graphs, table.requests) == (8, (1, 2, 4, 8, 16, 32, 64, 100))
    own = load_backend("sglang").serving
    assert own is not None
    prefill, origin, _ = prefill_table(deployment(Workload(query_length=1)), EXTENT)
    system = own.system("h200_sxm")
    steps = StackSteps(
        decode=table,
        prefill=prefill,
        setup=deployment(Workload(decode=True)).setup,
        serving=own,
        system=system,
        origin=origin,
    )
    assert steps.decode_s(9, 100, 1, 2) >= 2 * (steps.floor_s(9) + system.host_s_per_decode_step)
    assert steps.decode_s(8, 100, 1, 2) < steps.decode_s(9, 100, 1, 2)
    stall = own.host_prefill_stall_share * system.host_s_per_prefill
    assert steps.prefill_s([(1, 0)]) == pytest.approx(steps.floor_s(1) + stall)
    assert steps.delay_s + stall == pytest.approx(system.host_s_per_prefill)


def test_ranks_of_attention_data_parallelism_fill_evenly() -> None:
    own = deployment(Workload(decode=True), Parallel(num_devices=8, dp_size=8, ep_size=8))
    table, *_ = decode_table(own, EXTENT, (1, 2, 4, 8))
    assert table.requests == (8, 16, 32, 64)
    assert table.sum_s(64, 1000, 0, 1) == pytest.approx(seconds(own, 64, 1000, 1), rel=0.005)


@pytest.mark.parametrize(
    ("tokens", "context", "requests"),
    [(8192, 0, 1), (8192, 0, 8), (3000, 0, 3), (900, 0, 1), (4096, 4096, 1), (1000, 7000, 1), (7000, 500, 5)],
)
def test_prefill_table_is_near_the_cast(tokens: int, context: int, requests: int) -> None:
    own = deployment(Workload(query_length=1))
    table, *_ = prefill_table(own, EXTENT)
    wanted = seconds(own, float(requests), float(context), tokens / requests)
    assert table.pass_s(alike(tokens, context, requests)) == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize(
    ("tokens", "context", "requests"),
    [
        (2040, 0, 1), (2048, 0, 1), (2049, 0, 1), (2100, 0, 1), (6300, 0, 3), (6000, 0, 3), (8192, 100, 5),
        (8192, 200, 5), (8192, 409, 5), (8192, 411, 5), (1000, 1040, 1), (1000, 1060, 1), (1900, 120, 1),
        (600, 1440, 1), (600, 1500, 1), (64, 1990, 1),
    ],
)  # fmt: skip
def test_prompts_about_as_long_as_the_selection(tokens: int, context: int, requests: int) -> None:
    scenario = replace(as_served("sglang", DEVICE, MODEL, TP8), workload=Workload(query_length=1))
    own = without_host(resolve(MODEL, DEVICE, scenario))
    table, *_ = prefill_table(own, EXTENT)
    wanted = seconds(own, float(requests), float(context), tokens / requests)
    assert table.pass_s(alike(tokens, context, requests)) == pytest.approx(wanted, rel=0.06)


def test_one_prompt_beyond_the_selection_makes_the_pass_sparse() -> None:
    scenario = replace(as_served("sglang", DEVICE, MODEL, TP8), workload=Workload(query_length=1))
    own = without_host(resolve(MODEL, DEVICE, scenario))
    table, *_ = prefill_table(own, EXTENT)
    ragged = [RequestClass(1, 0, 2060), RequestClass(3, 0, 1000)]
    wanted = float(cast_batch(own, ragged).latency_s)
    assert table.pass_s([(2060, 0), *[(1000, 0)] * 3]) == pytest.approx(wanted, rel=0.06)


@pytest.mark.parametrize("prompts", [(8000, *[1] * 15), (6000, *[10] * 15), (3000, 3000, 2192), (512,) * 16, (2040, 8)])
def test_the_busiest_attention_rank_counts(prompts: tuple[int, ...]) -> None:
    scenario = as_served("sglang", DEVICE, MODEL, Parallel(num_devices=16, dp_size=16, ep_size=16))
    own = without_host(resolve(MODEL, DEVICE, replace(scenario, workload=Workload(query_length=1))))
    table, *_ = prefill_table(own, EXTENT)
    counts = {length: prompts.count(length) for length in prompts}
    wanted = float(cast_batch(own, [RequestClass(count, 0, length) for length, count in counts.items()]).latency_s)
    assert table.pass_s([(length, 0) for length in prompts], 16) == pytest.approx(wanted, rel=0.1)


@pytest.mark.property
@settings(max_examples=20)
@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 9000), st.data())
def test_every_pass_has_a_time(longest: int, most: int, chunk: int, data: st.DataObject) -> None:
    table, *_ = prefill_table(
        deployment(Workload(query_length=1)), Extent(longest_tokens=longest, requests=most, chunk_tokens=chunk)
    )
    for _ in range(50):
        tokens = data.draw(st.integers(1, chunk))
        requests = data.draw(st.integers(1, min(most, tokens)))
        context = data.draw(st.integers(0, longest))
        assert table.pass_s(alike(tokens, context, requests), data.draw(st.integers(1, 8))) > 0


def test_longer_passes_take_longer() -> None:
    table, *_ = prefill_table(deployment(Workload(query_length=1)), EXTENT)
    times = [table.pass_s([(tokens, 1000)]) for tokens in range(64, 8192, 61)]
    assert (np.diff(times) > 0).all()
    contexts = [table.pass_s([(2048, context)]) for context in range(0, 9000, 97)]
    assert (np.diff(contexts) >= 0).all()
