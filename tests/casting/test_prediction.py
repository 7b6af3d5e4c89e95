"""What must hold of a prediction for any valid scenario, and what each option means."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castoff import cast
from castoff.casting.prediction import Cast
from castoff.casting.price import BOUNDS, Measured, Price, call_key
from castoff.casting.summary import kind_summaries, op_spans, op_summaries
from castoff.errors import CastoffError
from castoff.ops.program import OpCall
from castoff.spec.backend import weakest
from castoff.spec.device import Device, shipped_devices
from castoff.spec.model import ModelSpec, shipped_models
from castoff.spec.quant import AttentionAction, LinearAction
from castoff.spec.scenario import Scenario
from tests.casting.strategies import Case, backend_of, cases, cast_step, scaled, scenario
from tests.generators import ASCEND, DEEPSEEK_V3, DEEPSEEK_V32, GLM_5, GLM_52, MODELS, device, model

H200 = "h200_sxm"
WITH_FP4 = "ATLAS_350_425T_112G"
# Sums of the same numbers in another order.
ROUNDING = 1 + 1e-9

FEW = settings(max_examples=30)


def decode(case: Scenario) -> Scenario:
    """The same deployment, decoding."""
    return scenario(case, query_length=None, decode=True, prefix_cache_hit_rate=0.0)


def calls_of(step: Cast) -> list[tuple[OpCall, Price]]:
    return [
        (call, price)
        for entry in step.program.schedule
        for call, price in zip(entry.block.calls, step.prices[entry.block], strict=True)
    ]


def count(step: Cast, name: str) -> int:
    return sum(call.op.name.removesuffix("_quant") == name for call, _ in calls_of(step))


def latency(*case: ModelSpec | Device | Scenario) -> float:
    return float(cast_step(*case).latency_s)  # type: ignore[arg-type]


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


BITS: dict[LinearAction, int] = {
    "DISABLED": 16,
    "W8A16_STATIC": 8,
    "W8A8_STATIC": 8,
    "W8A16_DYNAMIC": 8,
    "W8A8_DYNAMIC": 8,
    "FP8": 8,
    "W4A8_STATIC": 4,
    "W4A8_DYNAMIC": 4,
    "MXFP4": 4,
}


@pytest.mark.property
class TestFewerBits:
    @given(cases(), st.sampled_from(list(BITS)), st.sampled_from(list(BITS)), st.booleans())
    def test_never_more_weight_bytes(self, case: Case, a: LinearAction, b: LinearAction, lm_head: bool) -> None:
        spec, _, step = case
        where = device(WITH_FP4)
        fewer, more = sorted((a, b), key=BITS.__getitem__)

        def weights(action: LinearAction) -> float:
            changed = scenario(
                step, quantize_linear_action=action, quantize_non_expert_linear_action=None, quantize_lmhead=lm_head
            )
            return cast_step(spec, where, fit_to(where, changed)).footprint.weights_bytes

        if BITS[fewer] < BITS[more]:
            assert weights(fewer) < weights(more)

    @FEW
    @given(cases(), st.sampled_from(["FP8", "INT8"]))
    def test_never_more_cache_bytes(self, case: Case, action: AttentionAction) -> None:
        spec, _, step = case
        where = device(WITH_FP4)
        step = fit_to(where, step)
        plain = cast_step(spec, where, scenario(step, quantize_attention_action="DISABLED")).footprint
        quantized = cast_step(spec, where, scenario(step, quantize_attention_action=action)).footprint
        assert quantized.kv_bytes == plain.kv_bytes * 656 / 1152
        assert quantized.indexer_cache_bytes <= plain.indexer_cache_bytes * 132 / 256
        assert quantized.weights_bytes == plain.weights_bytes


def fit_to(where: Device, step: Scenario) -> Scenario:
    """The step on no more devices than there are, with formats and fusions that this device's backend has."""
    plain = scenario(step, enable_matmul_allreduce=False, enable_dispatch_ffn_combine=False)
    if step.parallel.num_devices <= where.max_devices:
        return plain
    return replace(plain, parallel=replace(Scenario().parallel, num_devices=8, tp_size=4, ep_size=8))


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


@pytest.mark.property
class TestRepetition:
    @settings(max_examples=15)
    @given(cases())
    def test_changes_nothing(self, case: Case) -> None:
        spec, where, step = case
        repeated, unrolled = (
            cast_step(spec, where, scenario(step, disable_repetition=disabled)) for disabled in (False, True)
        )
        assert len(unrolled.program.blocks) == len(unrolled.program.schedule)
        assert len(repeated.program.blocks) <= 16
        assert repeated.latency_s == pytest.approx(unrolled.latency_s, rel=1e-12)
        assert repeated.footprint == unrolled.footprint
        assert repeated.bound == unrolled.bound
        assert repeated.origin == unrolled.origin
        assert repeated.timeline.stage_s == pytest.approx(unrolled.timeline.stage_s, rel=1e-9)
        assert repeated.timeline.busy_s == pytest.approx(unrolled.timeline.busy_s, rel=1e-9)
        named, written_out = calls_of(repeated), calls_of(unrolled)
        assert [call.op.name for call, _ in named] == [call.op.name for call, _ in written_out]
        assert [price.seconds for _, price in named] == [price.seconds for _, price in written_out]

    @pytest.mark.parametrize("spec_name", MODELS)
    def test_cut_models(self, spec_name: str) -> None:
        # Every number of layers: the first group of shared layers is cut at each place.
        for layers in range(1, 12):
            spec = model(spec_name).with_num_hidden_layers(layers)
            step = scenario(num_devices=8, tp_size=8, ep_size=8, num_mtp_tokens=1, compile=True)
            repeated, unrolled = (
                cast_step(spec, device(H200), scenario(step, disable_repetition=disabled)) for disabled in (False, True)
            )
            assert repeated.latency_s == pytest.approx(unrolled.latency_s, rel=1e-12)
            assert repeated.footprint == unrolled.footprint
            assert count(repeated, "multihead_latent_attention") == layers + 1


class TestThroughput:
    base = scenario(num_devices=16, tp_size=4, ep_size=16, num_queries=24, context_length=8000)

    def test_decode(self) -> None:
        prediction = cast(GLM_52, ASCEND, self.base)
        assert prediction.mode == "decode"
        assert prediction.tokens_per_s == pytest.approx(24 / prediction.latency_s)
        assert prediction.tokens_per_s_per_device == pytest.approx(prediction.tokens_per_s / 16)

    def test_prefill_counts_computed_tokens(self) -> None:
        prediction = cast(GLM_52, ASCEND, scenario(self.base, query_length=1000))
        assert prediction.mode == "prefill"
        assert prediction.tokens_per_s == pytest.approx(24_000 / prediction.latency_s)

    @pytest.mark.parametrize("accepted", [1.0, 2.25, 4.0])
    def test_decode_counts_accepted_tokens(self, accepted: float) -> None:
        prediction = cast(GLM_52, ASCEND, scenario(self.base, num_mtp_tokens=3, mtp_acceptance_length=accepted))
        assert prediction.tokens_per_s == pytest.approx(24 * accepted / prediction.latency_s)
        assert prediction.cast.throughput_origin == prediction.cast.origin

    def test_three_drafts_give_2_7_tokens_unless_said_otherwise(self) -> None:
        prediction = cast(GLM_52, ASCEND, scenario(self.base, num_mtp_tokens=3))
        assert prediction.tokens_per_s * prediction.latency_s / 24 == pytest.approx(2.7, abs=2e-3)
        assert prediction.cast.throughput_origin == "assumed"

    def test_more_drafts_give_more_tokens_and_take_longer(self) -> None:
        steps = [cast(GLM_52, ASCEND, scenario(self.base, num_mtp_tokens=drafts)) for drafts in range(5)]
        gained = [step.tokens_per_s * step.latency_s / 24 for step in steps]
        assert gained == sorted(set(gained))
        assert [step.latency_s for step in steps] == sorted({step.latency_s for step in steps})
        assert gained[0] == pytest.approx(1)

    def test_acceptance_does_not_change_prefill(self) -> None:
        step = scenario(self.base, query_length=1000, num_mtp_tokens=3)
        assert cast(GLM_52, ASCEND, step).tokens_per_s == pytest.approx(
            cast(GLM_52, ASCEND, scenario(step, mtp_acceptance_length=4.0)).tokens_per_s
        )

    @pytest.mark.property
    @FEW
    @given(cases())
    def test_consistent(self, case: Case) -> None:
        _, _, step = case
        result = cast_step(*case)
        hits = step.workload.prefix_cache_hit_rate
        if result.setup.mode == "decode":
            gained = step.workload.num_queries * step.mtp.tokens_per_step
        else:
            query = step.workload.query_length
            gained = step.workload.num_queries * (query - min(int(query * hits + 1e-9), query - 1))
        assert result.tokens_per_s == pytest.approx(gained / result.latency_s)


@pytest.mark.property
class TestParallel:
    @FEW
    @given(cases(balanced=True), st.floats(1, 8), st.floats(1, 8))
    def test_imbalance_is_never_faster(self, case: Case, a: float, b: float) -> None:
        spec, where, step = case
        less, more = (latency(spec, where, scenario(step, expert_load_imbalance=load)) for load in sorted((a, b)))
        assert less <= more * ROUNDING

    @FEW
    @given(cases(max_stages=1, max_stage_ranks=4), st.integers(2, 4), st.integers(1, 8))
    def test_stages_cost_what_they_send(self, case: Case, stages: int, per_stage: int) -> None:
        # One micro-batch per stage: the first takes as long as on one stage's devices alone, and the messages more.
        spec, where, step = case
        per_rank = per_stage * step.parallel.num_devices // step.parallel.tp_size
        alone = scenario(step, num_queries=per_rank)
        devices = step.parallel.num_devices * stages
        piped = scenario(step, num_queries=per_rank * stages, num_devices=devices, pp_size=stages)
        one, several = cast_step(spec, where, alone), cast_step(spec, where, piped)
        assert several.batch.in_flight == stages
        assert several.batch.micro == one.batch.micro
        assert one.latency_s <= several.latency_s * ROUNDING
        assert several.latency_s <= several.host_s + ROUNDING * (
            sum(several.timeline.stage_s) + (stages - 1) * max(several.timeline.stage_s)
        )

    @FEW
    @given(cases(max_stages=4, keep=lambda case: scenario(case, enable_multistream=False)))
    def test_pipeline_latency(self, case: Case) -> None:
        result = cast_step(*case)
        stages = result.timeline.stage_s
        assert len(stages) == result.setup.mesh.pp.size
        assert 1 <= result.batch.in_flight <= len(stages)
        in_flight = result.batch.in_flight
        prefill = sum(stages) + (in_flight - 1) * max(stages)
        # A decode pipeline does not drain: the next step of a micro-batch starts when its turn comes again.
        decode = max(sum(stages), in_flight * max(stages))
        expected = prefill if result.setup.mode == "prefill" else decode
        assert result.latency_s == pytest.approx(expected + result.host_s, rel=1e-9)

    def test_the_slowest_stage_sets_the_pace(self) -> None:
        # Six stages of GLM-5.2 cannot be equal: the fifth has 16 layers, the last 12.
        step = scenario(num_devices=48, tp_size=8, pp_size=6, ep_size=8, num_queries=60, context_length=50_000)
        result = cast_step(model(GLM_52), device(ASCEND), step)
        stages = result.timeline.stage_s
        assert max(stages) > stages[-1]
        assert result.batch.in_flight == 6
        assert result.latency_s == pytest.approx(6 * max(stages) + result.host_s)

    def test_no_more_micro_batches_than_requests(self) -> None:
        step = scenario(num_devices=48, tp_size=8, pp_size=6, ep_size=8, num_queries=3)
        result = cast_step(model(GLM_52), device(ASCEND), step)
        assert (result.batch.in_flight, result.batch.micro.requests) == (3, 1)

    def test_a_hop_between_stages_takes_the_links_that_it_crosses(self) -> None:
        # Four ranks a stage on nodes of eight: the second hop leaves the node, the others do not.
        step = scenario(num_devices=16, tp_size=4, pp_size=4, num_queries=4, query_length=8192)
        result = cast_step(model(GLM_52), device(H200), step)
        hops = [
            float(price.seconds)
            for block in result.program.blocks
            for call, price in zip(block.calls, result.prices[block], strict=True)
            if call.op.name == "send_recv"
        ]
        inside, outside = hops[0], hops[2]
        assert hops == [inside, inside, outside, outside, inside, inside]
        message = 8192 * 6144 * 2
        assert inside == pytest.approx(message / (450e9 * 0.7) + 1e-6 + 10e-6)
        assert outside == pytest.approx(message / (50e9 * 0.7) + 5e-6 + 10e-6)

    @FEW
    @given(cases())
    def test_no_collective_in_a_group_of_one(self, case: Case) -> None:
        for call, _ in calls_of(cast_step(*case)):
            for collective in call.op.work(call).collectives:
                assert collective.group.size > 1
                assert np.all(np.asarray(collective.bytes) > 0)

    def test_single_device_communicates_nothing(self) -> None:
        for spec_name in MODELS:
            result = cast_step(model(spec_name), device(H200), scenario(num_mtp_tokens=3, compile=True))
            assert not any(call.op.work(call).collectives for call, _ in calls_of(result))


@pytest.mark.property
class TestWork:
    @FEW
    @given(cases())
    def test_nothing_is_negative(self, case: Case) -> None:
        for call, price in calls_of(cast_step(*case)):
            for part in call.op.work(call).parts:
                amounts = (part.matrix_flops, part.vector_flops, part.bytes, part.gather_bytes, part.gather_rows)
                assert min(amounts) >= 0, (call.op.name, part)
            assert min(price.terms) >= 0
            assert price.seconds > 0

    @FEW
    @given(cases())
    def test_bound_is_what_most_time_is_counted_for(self, case: Case) -> None:
        result = cast_step(*case)
        sums = dict.fromkeys(BOUNDS, 0.0)
        for _, price in calls_of(result):
            sums[BOUNDS[int(np.argmax(price.terms))]] += price.seconds
        assert sums[BOUNDS[int(result.bound)]] == pytest.approx(max(sums.values()), rel=1e-9)

    @FEW
    @given(cases())
    def test_origin_is_the_weakest(self, case: Case) -> None:
        _, where, step = case
        result = cast_step(*case)
        backend = backend_of(where, step)
        assert result.origin == weakest([backend.host_origin, *(price.origin for _, price in calls_of(result))])

    @FEW
    @given(cases(), st.sampled_from([1e-5, 1e-6, 1e-3]))
    def test_eps_has_no_effect(self, case: Case, eps: float) -> None:
        spec, where, step = case
        one, other = cast_step(*case), cast_step(replace(spec, rms_norm_eps=eps), where, step)
        assert one.latency_s == other.latency_s
        assert one.footprint == other.footprint

    def test_a_window_longer_than_the_prompt(self) -> None:
        step = scenario(num_devices=16, tp_size=16, query_length=1, num_mtp_tokens=16)
        for call, _ in calls_of(cast_step(model(GLM_52), device(ASCEND), step)):
            for part in call.op.work(call).parts:
                assert min(part.matrix_flops, part.gather_rows) >= 0, (call.op.name, part)


class TestOrigin:
    step = scenario(num_devices=16, tp_size=16, ep_size=16, num_queries=4, context_length=9000)

    def test_all_measured_but_the_host(self) -> None:
        plain = cast_step(model(GLM_52), device(ASCEND), self.step)
        table = {call_key(call): 1e-6 for call, _ in calls_of(plain)}
        prediction = cast(GLM_52, ASCEND, self.step, measured=Measured(table))
        assert {price.origin for _, price in calls_of(prediction.cast)} == {"measured"}
        # Host time is the backend's, and assumed.
        assert prediction.cast.origin == "assumed"
        assert prediction.latency_s == pytest.approx(1e-6 * len(calls_of(plain)) + prediction.cast.host_s)

    def test_one_measured_op(self) -> None:
        plain = cast(GLM_52, ASCEND, self.step)
        slow = next(call for call, _ in calls_of(plain.cast) if call.op.name == "dsa_indexer")
        faster = cast(GLM_52, ASCEND, self.step, measured=Measured({call_key(slow): 0.0}))
        indexer = next(op for op in op_summaries(plain) if op.name == "dsa_indexer")
        assert faster.latency_s == pytest.approx(plain.latency_s - indexer.total_s)
        assert next(op for op in op_summaries(faster) if op.name == "dsa_indexer").origin == "measured"
        assert faster.cast.origin == "assumed"


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
        step = scenario(num_devices=8, tp_size=8, ep_size=8)
        (note,) = cast("zai-org/GLM-5.2-FP8", H200, step).notes
        assert "--quantize-linear-action FP8" in note
        assert cast("zai-org/GLM-5.2-FP8", H200, scenario(step, quantize_linear_action="FP8")).notes == ()


class TestFormats:
    @pytest.mark.parametrize("name", shipped_devices())
    @pytest.mark.parametrize(("action", "dtype"), [("FP8", "fp8"), ("MXFP4", "fp4")])
    def test_a_device_that_cannot_multiply_refuses(self, name: str, action: LinearAction, dtype: str) -> None:
        step = scenario(num_devices=8, tp_size=8, quantize_linear_action=action)
        if device(name).supports(dtype):
            assert cast(GLM_52, name, step).latency_s > 0
        else:
            with pytest.raises(
                CastoffError, match=f"--quantize-linear-action {action} multiplies in {dtype}, which {name}"
            ):
                cast(GLM_52, name, step)

    @pytest.mark.parametrize("action", get_args(LinearAction))
    @pytest.mark.parametrize("spec_name", MODELS)
    def test_every_format_casts(self, spec_name: str, action: LinearAction) -> None:
        step = scenario(num_devices=8, tp_size=4, ep_size=8, quantize_linear_action=action, num_queries=16)
        for compile_ in (False, True):
            result = cast_step(model(spec_name), device(WITH_FP4), scenario(step, compile=compile_))
            quantized = action not in ("DISABLED",)
            assert count(result, "mlapo") == 61 if "DeepSeek" in spec_name else count(result, "mlapo") == 78
            assert any(call.op.name == "mlapo_quant" for call, _ in calls_of(result)) is quantized
            assert any("grouped_matmul_quant" in call.op.name for call, _ in calls_of(result)) is quantized

    @pytest.mark.parametrize(
        ("action", "rate"),
        [
            ("W4A8_STATIC", "int8"),
            ("W4A8_DYNAMIC", "int8"),
            ("W8A8_DYNAMIC", "int8"),
            ("W8A16_STATIC", "bf16"),
            ("DISABLED", "bf16"),
            ("FP8", "fp8"),
            ("MXFP4", "fp4"),
        ],
    )
    def test_products_run_at_the_rate_of_the_activations(self, action: LinearAction, rate: str) -> None:
        step = scenario(num_devices=8, tp_size=8, ep_size=8, quantize_linear_action=action, query_length=2048)
        result = cast_step(model(GLM_52), device(WITH_FP4), step)
        rates = {
            part.matrix_dtype
            for call, _ in calls_of(result)
            if call.op.name.startswith(("grouped_matmul", "mlapo"))
            for part in call.op.work(call).parts
            if part.matrix_flops
        }
        assert rates == {rate}

    def test_w4a8_reads_half_the_weights_of_w8a8(self) -> None:
        def weights_read(action: LinearAction) -> float:
            step = scenario(num_devices=16, tp_size=16, ep_size=16, quantize_linear_action=action, num_queries=2048)
            result = cast_step(model(GLM_52), device(ASCEND), step)
            call = next(call for call, _ in calls_of(result) if call.op.name.startswith("grouped_matmul"))
            return float(call.tensor(1).bytes) + float(call.tensor(4).bytes)

        assert weights_read("W4A8_STATIC") == 16 * (4096 * 6144 / 2 + 4 * 4096)
        assert weights_read("W8A8_STATIC") == 16 * (4096 * 6144 + 4 * 4096)

    @pytest.mark.parametrize("static", ["W8A8", "W4A8"])
    def test_dynamic_scales_are_found_at_run_time(self, static: str) -> None:
        def names(action: str) -> set[str]:
            step = scenario(num_devices=8, tp_size=8, ep_size=8, quantize_linear_action=action)
            return {call.op.name for call, _ in calls_of(cast_step(model(GLM_52), device(ASCEND), step))}

        assert "quantize" in names(f"{static}_STATIC")
        assert "dynamic_quantize" not in names(f"{static}_STATIC")
        assert "dynamic_quantize" in names(f"{static}_DYNAMIC")
        assert "quantize" not in names(f"{static}_DYNAMIC")

    def test_experts_and_the_rest_may_differ(self) -> None:
        step = scenario(
            num_devices=8, tp_size=8, ep_size=8,
            quantize_linear_action="W4A8_DYNAMIC", quantize_non_expert_linear_action="DISABLED",
        )  # fmt: skip
        names = {call.op.name for call, _ in calls_of(cast_step(model(GLM_52), device(ASCEND), step))}
        assert "mlapo" in names
        assert "linear_quant" not in names
        assert "grouped_matmul_quant" in names

    def test_lm_head(self) -> None:
        step = scenario(num_devices=8, tp_size=8, ep_size=8)
        plain, quantized = (
            cast_step(model(GLM_52), device(ASCEND), scenario(step, quantize_lmhead=flag)) for flag in (False, True)
        )
        rows = 154_880 // 8
        saved = plain.footprint.weights_bytes - quantized.footprint.weights_bytes
        assert saved == rows * 6144 * 2 - (rows * 6144 + 4 * rows)

    def test_mxfp4_group_size_is_the_number_of_values_per_scale(self) -> None:
        step = scenario(num_devices=8, tp_size=8, ep_size=8, quantize_linear_action="MXFP4")
        fine, coarse = (
            cast_step(model(GLM_52), device(WITH_FP4), scenario(step, mxfp4_group_size=size)) for size in (16, 32)
        )
        assert fine.footprint.weights_bytes > coarse.footprint.weights_bytes
        with pytest.raises(CastoffError, match="--mxfp4-group-size must be at least 1, got 0"):
            cast(GLM_52, WITH_FP4, scenario(step, mxfp4_group_size=0))


class TestIndexerCaches:
    step = scenario(num_devices=8, tp_size=8, ep_size=8, num_queries=4, context_length=65_535, num_mtp_tokens=1)

    def indexer_parts(self, action: AttentionAction) -> dict[str, tuple[float, str, float]]:
        """FLOPs, rate and bytes of the parts of one dsa_indexer call."""
        result = cast_step(model(GLM_52), device(WITH_FP4), scenario(self.step, quantize_attention_action=action))
        call = next(call for call, _ in calls_of(result) if call.op.name == "dsa_indexer")
        return {
            part.name: (float(part.matrix_flops), part.matrix_dtype, float(part.bytes))
            for part in call.op.work(call).parts
        }

    def test_bf16(self) -> None:
        parts = self.indexer_parts("DISABLED")
        assert not {name for name in parts if "quantize" in name or "scale_cache" in name}
        assert parts["key_cache_read"][2] == 4 * 65_537 * 256
        assert parts["key_cache_write"][2] == 4 * 2 * 256
        assert parts["score"][1] == "bf16"

    @pytest.mark.parametrize(("action", "dtype", "scale"), [("FP8", "fp8", 4), ("INT8", "int8", 2)])
    def test_quantized(self, action: AttentionAction, dtype: str, scale: int) -> None:
        parts = self.indexer_parts(action)
        assert {"rotate_quantize", "k_rotate_quantize", "scale_cache_read", "scale_cache_write"} <= set(parts)
        assert parts["key_cache_read"][2] == 4 * 65_537 * 128
        assert parts["scale_cache_read"][2] == 4 * 65_537 * scale
        assert parts["key_cache_write"][2] == 4 * 2 * 128
        assert parts["scale_cache_write"][2] == 4 * 2 * scale
        # Both queries of each request see every key up to their own: 65,536 and 65,537; 32 heads of 128.
        assert parts["score"] == (2 * 4 * (65_536 + 65_537) * 32 * 128, dtype, 0)

    @pytest.mark.parametrize("name", ["ATLAS_800_A3_752T_128G_DIE", "ATLAS_800_A2_376T_64G"])
    def test_fp8_needs_a_device_that_scores_in_it(self, name: str) -> None:
        with pytest.raises(CastoffError, match=f"--quantize-attention-action FP8 scores in fp8, which {name} cannot"):
            cast(GLM_52, name, scenario(self.step, quantize_attention_action="FP8"))
        assert cast(GLM_52, name, scenario(self.step, quantize_attention_action="INT8")).latency_s > 0

    @pytest.mark.parametrize("action", ["DISABLED", "FP8", "INT8"])
    def test_a_model_without_indexer_has_no_cache(self, action: AttentionAction) -> None:
        step = scenario(self.step, quantize_attention_action=action)
        result = cast_step(model(DEEPSEEK_V3), device(WITH_FP4), step)
        assert result.footprint.indexer_cache_bytes == 0
        assert count(result, "dsa_indexer") == 0


class TestStepsOfTheModel:
    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("query", [None, 4096])
    @pytest.mark.parametrize(
        ("spec_name", "layers", "full"),
        [(GLM_52, 78, 21), (GLM_5, 78, 78), (DEEPSEEK_V32, 61, 61), (DEEPSEEK_V3, 61, 0)],
    )
    def test_indexers_and_attentions(
        self, spec_name: str, layers: int, full: int, query: int | None, compiled: bool
    ) -> None:
        step = scenario(
            num_devices=16, tp_size=16, ep_size=16, query_length=query, context_length=9000, compile=compiled
        )
        plain = cast_step(model(spec_name), device(ASCEND), step)
        assert (count(plain, "multihead_latent_attention"), count(plain, "dsa_indexer")) == (layers, full)
        draft = cast_step(model(spec_name), device(ASCEND), scenario(step, num_mtp_tokens=1))
        owns = 1 if full else 0
        assert (count(draft, "multihead_latent_attention"), count(draft, "dsa_indexer")) == (layers + 1, full + owns)

    def test_drafts_of_one_step_share_the_first_ones_choice(self) -> None:
        step = scenario(num_devices=16, tp_size=16, ep_size=16, num_mtp_tokens=3, context_length=9000)
        result = cast_step(model(GLM_52), device(ASCEND), step)
        assert (count(result, "dsa_indexer"), count(result, "indexer_key_write")) == (22, 2)
        prefill = cast_step(model(GLM_52), device(ASCEND), scenario(step, query_length=4096))
        assert (count(prefill, "dsa_indexer"), count(prefill, "indexer_key_write")) == (24, 0)
        # V3.2 says nothing of sharing.
        other = cast_step(model(DEEPSEEK_V32), device(ASCEND), step)
        assert (count(other, "dsa_indexer"), count(other, "indexer_key_write")) == (64, 0)

    @pytest.mark.parametrize("name", shipped_models())
    @pytest.mark.parametrize("where", shipped_devices())
    def test_every_shipped_pair(self, name: str, where: str) -> None:
        prediction = cast(
            name, where, scenario(num_devices=16, tp_size=8, ep_size=16, num_queries=8, context_length=4096)
        )
        assert 0 < prediction.latency_s < 1
        assert prediction.bound in BOUNDS


class TestSummaries:
    def test_kinds_are_the_same_when_unrolled(self) -> None:
        step = scenario(num_devices=16, tp_size=16, ep_size=16, num_mtp_tokens=3, context_length=9000)
        repeated, unrolled = (
            kind_summaries(cast(GLM_52, ASCEND, scenario(step, disable_repetition=disabled)))
            for disabled in (False, True)
        )
        assert [(kind.name, kind.calls) for kind in repeated] == [(kind.name, kind.calls) for kind in unrolled]
        assert [kind.total_s for kind in repeated] == pytest.approx([kind.total_s for kind in unrolled])
        assert [kind.mean_s for kind in repeated] == pytest.approx([kind.mean_s for kind in unrolled])

    @pytest.mark.property
    @FEW
    @given(cases(max_stages=1, keep=lambda case: scenario(case, enable_multistream=False)))
    def test_ops_and_kinds_add_up_to_the_step(self, case: Case) -> None:
        prediction = cast(*case)
        device_s = prediction.latency_s - prediction.cast.host_s
        ops, kinds = op_summaries(prediction), kind_summaries(prediction)
        by_shapes = op_summaries(prediction, by_shapes=True)
        for groups in (ops, by_shapes, kinds):
            assert sum(group.total_s for group in groups) == pytest.approx(device_s, rel=1e-9)
        assert sum(op.calls for op in ops) == sum(op.calls for op in by_shapes) == len(op_spans(prediction))
        assert sum(op.flops for op in ops) == pytest.approx(sum(op.flops for op in by_shapes))
        assert len({op.name for op in ops}) == len(ops)
        assert [op.total_s for op in ops] == sorted((op.total_s for op in ops), reverse=True)
        assert all(sum(op.shapes.values()) == op.calls for op in ops)
        for op in ops:
            assert sum(op.bound_s.values()) == pytest.approx(op.total_s)
            assert op.mean_s * op.calls == pytest.approx(op.total_s)
            assert sum(bucket.bytes for bucket in op.buckets.values()) == pytest.approx(op.bytes)
            assert sum(bucket.flops for bucket in op.buckets.values()) == pytest.approx(op.flops)


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
