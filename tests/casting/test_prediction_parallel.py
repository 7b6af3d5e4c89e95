"""What parallel sizes change in a prediction: throughput, work of a rank."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff import cast
from castoff.casting.price import BOUNDS
from castoff.spec.backend import weakest
from tests.casting.predictions import FEW, H200, ROUNDING, calls_of, latency
from tests.casting.strategies import Case, backend_of, cases, cast_step, scenario
from tests.generators import ASCEND, GLM_52, MODELS, device, model


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
        assert result.origin == weakest(
            [backend.host_origins[result.setup.mode], *(price.origin for _, price in calls_of(result))]
        )

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
