"""What must hold of a prediction for any valid scenario, and what each option means."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff import cast
from castoff.errors import CastoffError
from castoff.spec.device import Device
from castoff.spec.model import ModelSpec
from castoff.spec.scenario import Scenario
from tests.casting.predictions import FEW, H200, ROUNDING, calls_of, decode, latency
from tests.casting.strategies import Case, cases, cast_step, scaled, scenario
from tests.generators import ASCEND, GLM_52, device, model


def used(*case: ModelSpec | Device | Scenario) -> float:
    return float(cast_step(*case).footprint.used_bytes)  # type: ignore[arg-type]


@pytest.mark.property
class TestBetterHardwareIsNeverSlower:
    @FEW
    @given(cases(), st.floats(1, 50))
    def test_rates(self, case: Case, factor: float) -> None:
        spec, where, step = case
        as_it_is = latency(*case)
        for better in ("compute", "vector", "memory", "links"):
            assert latency(spec, scaled(where, **{better: factor}), step) <= as_it_is * ROUNDING, better

    @FEW
    @given(cases(), st.floats(1, 50))
    def test_latency_of_links(self, case: Case, factor: float) -> None:
        spec, where, step = case
        assert latency(spec, scaled(where, latency=1 / factor), step) <= latency(*case) * ROUNDING

    @FEW
    @given(cases(), st.floats(1, 50))
    def test_everything_faster_is_bounded_by_the_factor(self, case: Case, factor: float) -> None:
        spec, where, step = case
        every = scaled(where, compute=factor, vector=factor, memory=factor, links=factor, latency=1 / factor)
        assert latency(*case) / factor <= latency(spec, every, step) * ROUNDING

    @FEW
    @given(cases(), st.sampled_from([0.5, 2.0]))
    def test_no_rate_changes_memory(self, case: Case, factor: float) -> None:
        spec, where, step = case
        assert used(spec, scaled(where, memory=factor, links=factor), step) == used(*case)


@pytest.mark.property
class TestLengths:
    @FEW
    @given(cases(), st.integers(1, 100_000))
    def test_longer_context_never_needs_less(self, case: Case, more: int) -> None:
        spec, where, step = case
        longer = scenario(step, context_length=step.workload.context_length + more)
        assert used(*case) < used(spec, where, longer)
        assert latency(*case) <= latency(spec, where, longer) * ROUNDING

    @FEW
    @given(cases(keep=decode), st.integers(1, 100_000))
    def test_longer_context_never_decodes_faster(self, case: Case, more: int) -> None:
        spec, where, step = case
        longer = scenario(step, context_length=step.workload.context_length + more)
        assert latency(*case) <= latency(spec, where, longer) * ROUNDING

    @FEW
    @given(cases(), st.integers(1, 300))
    def test_bigger_batch_never_needs_less(self, case: Case, more: int) -> None:
        spec, where, step = case
        bigger = scenario(step, num_queries=step.workload.num_queries + more)
        assert used(*case) <= used(spec, where, bigger)
        # Ranks that had nothing to do may take the new requests, so equal is possible.
        assert latency(*case) <= latency(spec, where, bigger) * ROUNDING

    @FEW
    @given(cases(), st.integers(1, 4096))
    def test_longer_query_never_needs_less(self, case: Case, more: int) -> None:
        spec, where, step = case
        query = step.workload.query_length or 1 + step.mtp.num_mtp_tokens
        short, long = (
            scenario(step, query_length=length, decode=step.workload.mode == "decode", prefix_cache_hit_rate=0.0)
            for length in (query, query + more)
        )
        assert used(spec, where, short) < used(spec, where, long)
        assert latency(spec, where, short) <= latency(spec, where, long) * ROUNDING

    @FEW
    @given(cases(), st.integers(1, 12), st.integers(0, 50_000), st.integers(4, 3000))
    def test_equal_lengths_are_a_uniform_batch(self, case: Case, requests: int, context: int, query: int) -> None:
        spec, where, step = case
        base = scenario(step, num_queries=requests, query_length=query, context_length=context)
        uniform = cast_step(spec, where, base)
        for lengths in (
            {"context_length": [context] * requests},
            {"query_length": [query] * requests},
            {"context_length": [context] * requests, "query_length": [query] * requests, "num_queries": None},
        ):
            ragged = cast_step(spec, where, scenario(base, **lengths))
            assert ragged.latency_s == uniform.latency_s
            assert ragged.footprint == uniform.footprint
            assert ragged.tokens_per_s == uniform.tokens_per_s

    @FEW
    @given(cases(keep=decode), st.lists(st.integers(0, 100_000), min_size=2, max_size=8))
    def test_a_ragged_batch_lies_between_its_extremes(self, case: Case, contexts: list[int]) -> None:
        spec, where, step = case
        ragged = cast_step(spec, where, scenario(step, num_queries=len(contexts), context_length=contexts))
        least, most = (
            cast_step(spec, where, scenario(step, num_queries=len(contexts), context_length=context))
            for context in (min(contexts), max(contexts))
        )
        assert least.latency_s <= ragged.latency_s * ROUNDING
        assert ragged.latency_s <= most.latency_s * ROUNDING
        assert least.footprint.used_bytes <= ragged.footprint.used_bytes * ROUNDING
        assert ragged.footprint.used_bytes <= most.footprint.used_bytes * ROUNDING

    def test_a_long_context_counts_though_another_rank_has_more_new_tokens(self) -> None:
        base = scenario(num_devices=16, tp_size=8, ep_size=16)
        ragged = cast_step(
            model(GLM_52), device(ASCEND), scenario(base, context_length=[0, 1_000_000], query_length=[1000, 999])
        )
        alone = cast_step(model(GLM_52), device(ASCEND), scenario(base, context_length=1_000_000, query_length=999))
        assert ragged.latency_s >= alone.latency_s
        staged = scenario(
            num_devices=4, pp_size=4, context_length=[1_000_000, 0, 0, 0], query_length=[100, 101, 102, 103]
        )
        short = scenario(num_devices=4, pp_size=4, context_length=0, query_length=103, num_queries=4)
        slow, quick = (cast_step(model(GLM_52), device(ASCEND), step).latency_s for step in (staged, short))
        assert slow > 1.1 * quick

    @pytest.mark.parametrize(("queries", "touched"), [(1, 0.5), (4, 1.9065), (16, 6.3726), (17, 6.6735)])
    def test_experts_see_the_tokens_that_there_are(self, queries: int, touched: float) -> None:
        # Sixteen experts a rank; padding of a token split over ranks chooses none.
        step = scenario(num_devices=16, tp_size=16, ep_size=16, num_queries=queries, compile=True)
        result = cast_step(model(GLM_52), device(ASCEND), step)
        call = next(call for call, _ in calls_of(result) if call.op.name == "grouped_matmul_quant")
        assert call.attributes["touched"] == pytest.approx(touched, rel=1e-3)
        assert call.tensor(0).shape[0] == pytest.approx(queries * 8 / 16)

    def test_memory_and_time_may_peak_on_different_ranks(self) -> None:
        # One rank holds the long context, the other computes the long chunk.
        base = scenario(num_devices=16, tp_size=8, ep_size=16)
        step = scenario(base, context_length=[200_000, 0], query_length=[10, 4000])
        ragged = cast_step(model(GLM_52), device(ASCEND), step)
        chunk = cast_step(model(GLM_52), device(ASCEND), scenario(base, query_length=4000))
        assert ragged.footprint.kv_bytes == 200_010 * 78 * 1152
        # The experts see the ten tokens of the other rank too.
        assert chunk.latency_s < ragged.latency_s < 1.001 * chunk.latency_s
        assert ragged.tokens_per_s == pytest.approx(4010 / ragged.latency_s)

    @FEW
    @given(cases(keep=decode), st.lists(st.integers(0, 100_000), min_size=2, max_size=8), st.randoms())
    def test_order_of_requests_does_not_matter(self, case: Case, contexts: list[int], random: object) -> None:
        spec, where, step = case
        shuffled = list(contexts)
        random.shuffle(shuffled)  # type: ignore[attr-defined]
        one, other = (
            cast_step(spec, where, scenario(step, num_queries=len(contexts), context_length=lengths))
            for lengths in (contexts, shuffled)
        )
        assert one.latency_s == other.latency_s
        assert one.footprint == other.footprint

    @FEW
    @given(cases(), st.integers(64, 8192), st.floats(0, 0.99), st.floats(0, 0.99))
    def test_prefix_cache_hits_save_time(self, case: Case, query: int, a: float, b: float) -> None:
        spec, where, step = case
        fewer, more = (
            cast_step(spec, where, scenario(step, query_length=query, decode=False, prefix_cache_hit_rate=rate))
            for rate in sorted((a, b))
        )
        assert more.latency_s <= fewer.latency_s * ROUNDING
        assert more.batch.computed_tokens <= fewer.batch.computed_tokens
        # The cache holds the same rows in the end.
        assert more.footprint.kv_bytes == fewer.footprint.kv_bytes
        assert more.footprint.activation_bytes <= fewer.footprint.activation_bytes


class TestPrefixCache:
    def test_hits_are_context(self) -> None:
        base = {"num_devices": 16, "tp_size": 16, "ep_size": 16}
        hit = cast(GLM_52, ASCEND, scenario(**base, query_length=4000, context_length=100, prefix_cache_hit_rate=0.25))
        same = cast(GLM_52, ASCEND, scenario(**base, query_length=3000, context_length=1100))
        assert hit.latency_s == same.latency_s
        assert hit.tokens_per_s == same.tokens_per_s == 3000 / same.latency_s
        assert hit.footprint == same.footprint

    def test_one_token_is_always_computed(self) -> None:
        step = scenario(num_devices=16, tp_size=16, query_length=10, prefix_cache_hit_rate=0.99)
        assert cast_step(model(GLM_52), device(ASCEND), step).batch.computed_tokens == 1

    @pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
    def test_out_of_range(self, rate: float) -> None:
        with pytest.raises(CastoffError, match=r"--prefix-cache-hit-rate must be in \[0, 1\)"):
            cast(GLM_52, ASCEND, scenario(num_devices=16, tp_size=16, query_length=10, prefix_cache_hit_rate=rate))

    def test_not_for_decode(self) -> None:
        with pytest.raises(CastoffError, match="for prefill"):
            cast(GLM_52, ASCEND, scenario(num_devices=16, tp_size=16, prefix_cache_hit_rate=0.5))


class TestFits:
    def test_a_step_that_does_not_fit_is_priced_and_says_what_would(self) -> None:
        prediction = cast(GLM_52, ASCEND, scenario(num_devices=16, tp_size=16, ep_size=16, num_queries=400))
        assert prediction.fits
        prediction = cast(
            GLM_52, ASCEND, scenario(num_devices=16, tp_size=16, ep_size=16, num_queries=400, context_length=32_768)
        )
        assert not prediction.fits
        assert prediction.latency_s > 0
        assert 0 < prediction.largest.max_batch_per_device < 400
        assert 0 < prediction.largest.max_context_length < 32_768

    def test_beyond_the_positions_is_a_note(self) -> None:
        step = scenario(num_devices=16, tp_size=16, ep_size=16, dcp_size=16, context_length=1_048_576)
        (note,) = cast(GLM_52, ASCEND, step).notes
        assert "1048577 tokens, beyond max_position_embeddings 1048576 of zai-org/GLM-5.2" in note
        assert cast(GLM_52, ASCEND, scenario(step, context_length=1_048_575)).notes == ()

    def test_fp8_checkpoint_in_another_format_is_a_note(self) -> None:
        step = scenario(num_devices=8, tp_size=8, ep_size=8, backend="nvidia")
        (note,) = cast("zai-org/GLM-5.2-FP8", H200, step).notes
        assert "--quantize-linear-action FP8" in note
        assert cast("zai-org/GLM-5.2-FP8", H200, scenario(step, quantize_linear_action="FP8")).notes == ()


Refusal = tuple[dict[str, object], str]


REFUSALS: tuple[Refusal, ...] = (
    ({"num_devices": 16, "tp_size": 5}, r"--tp-size 5 does not divide the 16 devices .*\[1, 2, 4, 8, 16\]"),
    ({"num_devices": 16, "pp_size": 3}, r"--pp-size 3 does not divide --num-devices 16"),
    ({"num_devices": 16, "tp_size": 8, "dp_size": 4}, r"--tp-size 8 x --dp-size 4 .*is not --num-devices 16.*use 2"),
    ({"num_devices": 24, "tp_size": 3}, r"--tp-size 3 does not divide the 64 attention heads"),
    ({"num_devices": 24, "tp_size": 8, "ep_size": 3}, r"--ep-size 3 does not divide the 256 routed experts"),
    ({"num_devices": 16, "tp_size": 8, "dcp_size": 3}, r"--dcp-size 3 must divide --tp-size 8"),
    (
        {"num_devices": 1024, "tp_size": 16, "ep_size": 256},
        "--num-devices 1024: ATLAS_800_A3_752T_128G_DIE connects at most 768",
    ),
    ({"num_devices": 22, "tp_size": 1, "pp_size": 22}, "--pp-size 22 needs as many groups"),
    ({"num_devices": 0}, "--num-devices must be a whole number of at least 1, got 0"),
    ({"num_queries": 0}, "--num-queries must be at least 1, got 0"),
    ({"num_queries": 1.5}, "--num-queries must be whole numbers, got 1.5"),
    ({"context_length": -1}, "--context-length must be at least 0, got -1"),
    ({"query_length": 0}, "--query-length must be at least 1, got 0"),
    ({"context_length": [5, 6], "query_length": [1, 2, 3]}, "one length per request"),
    ({"num_queries": 3, "context_length": [5, 6]}, "--num-queries 3, --context-length with 2 values"),
    ({"context_length": [5, -6]}, "--context-length must be at least 0, got -6"),
    ({"num_mtp_tokens": 17}, "--num-mtp-tokens must be from 0 to 16, got 17"),
    ({"num_mtp_tokens": 3, "query_length": 3, "decode": True}, "verifies 4 tokens per request"),
    ({"num_mtp_tokens": 3, "mtp_acceptance_length": 4.5}, r"from 1 to 1 \+ --num-mtp-tokens = 4; got 4.5"),
    ({"mtp_acceptance_length": 2.0}, "= 1; got 2"),
    ({"expert_load_imbalance": 0.5}, "at least 1; got 0.5"),
    ({"reserved_memory_gb": -1.0}, "--reserved-memory-gb must be from 0 to 1048576, got -1"),
    ({"backend": "ascent"}, "unknown backend 'ascent' .did you mean 'ascend'"),
    ({"backend": "nvidia", "enable_matmul_allreduce": True}, "the backend nvidia has no matmul_all_reduce kernel"),
    ({"host_external_shared_experts": True}, "needs --enable-external-shared-experts"),
    ({"word_embedding_tp_size": 2}, "say how with --word-embedding-tp"),
)


@pytest.mark.parametrize(("values", "says"), REFUSALS)
def test_refusals(values: dict[str, object], says: str) -> None:
    with pytest.raises(CastoffError, match=says) as caught:
        cast(GLM_52, ASCEND, scenario(**values))
    assert "\n" not in str(caught.value)


def test_no_mtp_block() -> None:
    spec = replace(model(GLM_52), num_nextn_predict_layers=0)
    with pytest.raises(CastoffError, match="has no MTP block"):
        cast(spec, ASCEND, scenario(num_mtp_tokens=1))


def test_arrays_are_for_sweep() -> None:
    with pytest.raises(CastoffError, match=r"give arrays to castoff\.sweep"):
        cast(GLM_52, ASCEND, scenario(num_queries=np.array([1, 2])))


@pytest.mark.parametrize(
    "build", [lambda: cast("zai-org/GLM-5.3", ASCEND), lambda: cast(GLM_52, "ATLAS_800_A3"), lambda: cast("", ASCEND)]
)
def test_unknown_names(build: Callable[[], object]) -> None:
    with pytest.raises(CastoffError, match="unknown"):
        build()
