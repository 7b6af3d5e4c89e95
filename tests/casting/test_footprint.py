"""Memory: closed forms written from the published sizes, the fullest stage, and the largest batch and context."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from castoff import cast
from castoff.casting.footprint import Footprint, StageShare, peak_activation_bytes, stage_shares
from castoff.casting.prediction import GIB, Cast
from castoff.model.weights import model_parameters
from castoff.ops.program import Abstract, Op, Recorder
from castoff.ops.work import Work
from castoff.spec.device import Device, DeviceMemory
from castoff.spec.quant import AttentionAction, LinearAction
from castoff.spec.scenario import Scenario
from tests.casting.strategies import Case, cases, cast_step, scenario
from tests.generators import ASCEND, DEEPSEEK_V3, DEEPSEEK_V32, GLM_5, GLM_52, device, model, setup_of

H200 = "h200_sxm"
WITH_FP8 = "ATLAS_350_425T_112G"
# Bytes of one token in one layer: 512 latent and 64 rope values in bf16, or 512 bytes, 4 fp32 scales, 64 in bf16.
LATENT_ROW: dict[AttentionAction, int] = {"DISABLED": 1152, "FP8": 656, "INT8": 656}
INDEX_ROW: dict[AttentionAction, int] = {"DISABLED": 256, "FP8": 128 + 4, "INT8": 128 + 2}


def shares(spec_name: str, step: Scenario, *, on: str = ASCEND) -> tuple[StageShare, ...]:
    return stage_shares(setup_of(model(spec_name), step, on=on))


def step_of(*, on: str = ASCEND, spec_name: str = GLM_52, **values: object) -> Cast:
    return cast_step(model(spec_name), device(on), scenario(**values))


class TestCaches:
    @pytest.mark.parametrize("action", ["DISABLED", "FP8", "INT8"])
    @pytest.mark.parametrize(("mtp", "latent", "full"), [(0, 78, 21), (3, 79, 22)])
    def test_glm_52(self, action: AttentionAction, mtp: int, latent: int, full: int) -> None:
        step = step_of(
            on=H200,
            num_devices=8,
            tp_size=8,
            num_queries=5,
            context_length=1000,
            num_mtp_tokens=mtp,
            quantize_attention_action=action,
        )
        # TP ranks all hold the whole cache; the new tokens are in it after the step.
        tokens = 5 * (1000 + 1 + mtp)
        assert step.footprint.kv_bytes == tokens * latent * LATENT_ROW[action]
        assert step.footprint.indexer_cache_bytes == tokens * full * INDEX_ROW[action]

    @pytest.mark.parametrize(
        ("action", "kv_bytes", "indexer_bytes"), [("DISABLED", 89_856, 21 * 256), ("FP8", 51_168, 2_772)]
    )
    def test_published_bytes_per_token(self, action: AttentionAction, kv_bytes: int, indexer_bytes: int) -> None:
        step = step_of(on=H200, num_devices=8, tp_size=8, context_length=0, quantize_attention_action=action)
        assert step.footprint.kv_bytes == kv_bytes
        assert step.footprint.indexer_cache_bytes == indexer_bytes

    @pytest.mark.parametrize(
        ("spec_name", "latent", "full"), [(GLM_5, 78, 78), (DEEPSEEK_V32, 61, 61), (DEEPSEEK_V3, 61, 0)]
    )
    def test_every_layer_owns_its_caches_elsewhere(self, spec_name: str, latent: int, full: int) -> None:
        step = step_of(on=H200, spec_name=spec_name, num_devices=8, tp_size=8, context_length=99)
        assert step.footprint.kv_bytes == 100 * latent * 1152
        assert step.footprint.indexer_cache_bytes == 100 * full * 256

    def test_draft_calls_share_one_cache(self) -> None:
        one, three = (
            step_of(num_devices=16, tp_size=16, ep_size=16, num_mtp_tokens=drafts, query_length=8, decode=True)
            for drafts in (1, 3)
        )
        assert one.footprint.kv_bytes == three.footprint.kv_bytes
        assert one.footprint.weights_bytes == three.footprint.weights_bytes

    @pytest.mark.parametrize("dcp", [1, 2, 4, 8])
    def test_dcp_divides_the_caches(self, dcp: int) -> None:
        step = step_of(on=H200, num_devices=8, tp_size=8, dcp_size=dcp, num_queries=3, context_length=7999)
        assert step.footprint.kv_bytes == 24_000 * 78 * 1152 / dcp
        assert step.footprint.indexer_cache_bytes == 24_000 * 21 * 256 / dcp

    @pytest.mark.parametrize(("queries", "held"), [(1, 1), (4, 1), (5, 2), (8, 2)])
    def test_attention_dp_ranks_share_the_requests(self, queries: int, held: int) -> None:
        step = step_of(on=H200, num_devices=8, tp_size=2, ep_size=8, num_queries=queries, context_length=99)
        assert step.footprint.kv_bytes == held * 100 * 78 * 1152

    def test_the_heaviest_rank_of_a_ragged_batch(self) -> None:
        # Longest first, round robin over two ranks: 900 and 300 on rank 0, 500 and 100 on rank 1.
        step = step_of(on=H200, num_devices=8, tp_size=4, ep_size=8, num_queries=4, context_length=[99, 899, 299, 499])
        assert step.footprint.kv_bytes == (900 + 300) * 78 * 1152

    def test_pipeline_micro_batches_are_all_resident(self) -> None:
        whole = step_of(num_devices=8, tp_size=8, num_queries=6, context_length=999)
        cut = step_of(num_devices=16, tp_size=8, pp_size=2, num_queries=6, context_length=999)
        assert whole.footprint.kv_bytes == 6000 * 78 * 1152
        first, last = shares(GLM_52, scenario(num_devices=16, tp_size=8, pp_size=2))
        assert cut.footprint.kv_bytes in (6000 * first.latent_layers * 1152, 6000 * last.latent_layers * 1152)


class TestWeights:
    """GLM-5.2 by hand."""

    hidden, vocabulary, experts = 6144, 154_880, 256

    def int_bytes(self, rows: int, columns: int, bits: int) -> float:
        """An integer weight with one fp32 scale per output."""
        return rows * columns * bits / 8 + 4 * rows

    def attention(self, tp: int, bits: int) -> float:
        return (
            self.int_bytes(2048, self.hidden, bits)
            + 2048 * 2
            + self.int_bytes(64 * 256 // tp, 2048, bits)
            + self.int_bytes(576, self.hidden, bits)
            + 512 * 2
            + 64 * (192 + 256) // tp * 512 * 2
            + self.int_bytes(self.hidden, 64 * 256 // tp, bits)
            + 2 * self.hidden * 2
        )

    def indexer(self, bits: int) -> float:
        return (
            self.int_bytes(32 * 128, 2048, bits)
            + self.int_bytes(128, self.hidden, bits)
            + 32 * self.hidden * 2
            + 2 * 128 * 2
        )

    def dense(self, tp: int, bits: int) -> float:
        return self.int_bytes(2 * 12_288 // tp, self.hidden, bits) + self.int_bytes(self.hidden, 12_288 // tp, bits)

    def expert(self, bits: int, tp: int = 1) -> float:
        return self.int_bytes(2 * 2048 // tp, self.hidden, bits) + self.int_bytes(self.hidden, 2048 // tp, bits)

    def router(self) -> float:
        return self.experts * (self.hidden + 1) * 4

    def ends(self, tp: int) -> float:
        return self.vocabulary * self.hidden * 2 * (1 + 1 / tp) + self.hidden * 2

    def main_stack(self, tp: int, local_experts: int, bits: int) -> float:
        sparse = self.router() + (local_experts + 1) * self.expert(bits)
        return 78 * self.attention(tp, bits) + 21 * self.indexer(bits) + 3 * self.dense(tp, bits) + 75 * sparse

    def mtp_block(self, tp: int, local_experts: int, bits: int) -> float:
        projections = 2 * self.hidden * self.hidden * 2 + 3 * self.hidden * 2
        sparse = self.router() + (local_experts + 1) * self.expert(bits)
        return self.attention(tp, bits) + self.indexer(bits) + sparse + projections

    @pytest.mark.parametrize(("action", "bits"), [("W4A8_STATIC", 4), ("W8A8_DYNAMIC", 8), ("W8A16_STATIC", 8)])
    @pytest.mark.parametrize(("tp", "ep"), [(16, 16), (4, 16), (1, 16), (16, 8)])
    @pytest.mark.parametrize("mtp", [0, 3])
    def test_a_rank(self, action: LinearAction, bits: int, tp: int, ep: int, mtp: int) -> None:
        # moe_dp keeps the experts whole where ep is smaller than the stage.
        (own,) = shares(
            GLM_52,
            scenario(
                num_devices=16,
                tp_size=tp,
                ep_size=ep,
                moe_dp_size=16 // ep,
                quantize_linear_action=action,
                num_mtp_tokens=mtp,
            ),
        )
        expected = self.main_stack(tp, 256 // ep, bits) + self.ends(tp)
        if mtp:
            expected += self.mtp_block(tp, 256 // ep, bits)
        assert own.weights_bytes == pytest.approx(expected, rel=1e-12)
        assert (own.latent_layers, own.indexer_layers) == ((79, 22) if mtp else (78, 21))

    def test_experts_split_over_tp_have_the_shared_one_split_too(self) -> None:
        (own,) = shares(GLM_52, scenario(num_devices=8, tp_size=8, quantize_linear_action="W8A8_STATIC"))
        expected = (
            78 * self.attention(8, 8)
            + 21 * self.indexer(8)
            + 3 * self.dense(8, 8)
            + 75 * (self.router() + 257 * self.expert(8, tp=8))
            + self.ends(8)
        )
        assert own.weights_bytes == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("spec_name", [GLM_5, GLM_52, DEEPSEEK_V32, DEEPSEEK_V3])
    def test_one_rank_in_bf16_holds_every_parameter(self, spec_name: str) -> None:
        spec = model(spec_name)
        (own,) = shares(spec_name, scenario(quantize_linear_action="DISABLED"), on=H200)
        expected = sum((4 if p.role == "router" else 2) * p.elements for p in model_parameters(spec))
        assert own.weights_bytes == expected

    @pytest.mark.parametrize("spec_name", [GLM_52, DEEPSEEK_V32])
    def test_ranks_together_hold_the_experts_once(self, spec_name: str) -> None:
        spec = model(spec_name)
        one, eight = (
            shares(
                spec_name,
                scenario(num_devices=ep, tp_size=1, ep_size=ep, quantize_linear_action="DISABLED"),
                on=H200,
            )[0].weights_bytes
            for ep in (1, 8)
        )
        experts = sum(2 * p.elements for p in model_parameters(spec) if ".mlp.experts." in p.name)
        assert one - eight == experts * 7 / 8

    def test_redundant_expert(self) -> None:
        plain, more = (
            shares(GLM_52, scenario(num_devices=16, tp_size=16, ep_size=16, enable_redundant_experts=redundant))[0]
            for redundant in (False, True)
        )
        assert more.weights_bytes - plain.weights_bytes == 75 * self.expert(8)

    def test_a_rank_of_external_shared_experts_holds_no_routed_one(self) -> None:
        options = {"num_devices": 16, "tp_size": 16, "ep_size": 16, "enable_external_shared_experts": True}
        (routed,) = shares(GLM_52, scenario(**options))
        (host,) = shares(GLM_52, scenario(**options, host_external_shared_experts=True))
        # Two of sixteen ranks hold the shared expert, fourteen the 256 routed ones.
        assert routed.weights_bytes - host.weights_bytes == 75 * (19 - 1) * self.expert(8)

    def test_a_tied_head_is_not_held_twice(self) -> None:
        spec = replace(model(GLM_52), tie_word_embeddings=True)
        (own,) = stage_shares(setup_of(spec, scenario(quantize_linear_action="DISABLED"), on=H200))
        assert own.weights_bytes == sum((4 if p.role == "router" else 2) * p.elements for p in model_parameters(spec))


class TestPipeline:
    @pytest.mark.parametrize("spec_name", [GLM_5, GLM_52, DEEPSEEK_V32, DEEPSEEK_V3])
    @pytest.mark.parametrize("pp", [1, 2, 4, 8])
    @pytest.mark.parametrize("mtp", [0, 1])
    def test_stages_together_hold_the_model_once(self, spec_name: str, pp: int, mtp: int) -> None:
        spec = model(spec_name)
        (whole,) = shares(spec_name, scenario(num_devices=2, tp_size=2, num_mtp_tokens=mtp), on=H200)
        parts = shares(spec_name, scenario(num_devices=2 * pp, tp_size=2, pp_size=pp, num_mtp_tokens=mtp), on=H200)
        assert len(parts) == pp
        assert sum(part.latent_layers for part in parts) == whole.latent_layers == spec.num_hidden_layers + mtp
        assert sum(part.indexer_layers for part in parts) == whole.indexer_layers
        # The last stage embeds its draft tokens with a copy of the table.
        copies = 2 * spec.vocab_size * spec.hidden_size if mtp and pp > 1 else 0
        assert sum(part.weights_bytes for part in parts) == pytest.approx(whole.weights_bytes + copies, rel=1e-12)

    @pytest.mark.parametrize("pp", [2, 3, 4])
    @pytest.mark.parametrize("context", [0, 500_000])
    def test_the_fullest_stage_is_reported(self, pp: int, context: int) -> None:
        options = {"num_devices": 8 * pp, "tp_size": 8, "pp_size": pp, "num_mtp_tokens": 1}
        step = step_of(on=H200, **options, num_queries=4, context_length=context)
        tokens = 4 * (context + 2)
        held = [
            (
                share.weights_bytes + tokens * (share.latent_layers * 1152 + share.indexer_layers * 256),
                share.weights_bytes,
            )
            for share in shares(GLM_52, scenario(**options), on=H200)
        ]
        memory = step.footprint
        assert memory.weights_bytes + memory.kv_bytes + memory.indexer_cache_bytes == pytest.approx(max(held)[0])
        assert memory.weights_bytes == max(held)[1]

    def test_which_stage_is_fullest_depends_on_the_lengths(self) -> None:
        options = {"num_devices": 24, "tp_size": 8, "pp_size": 3, "num_mtp_tokens": 1}
        short, long = (step_of(on=H200, **options, context_length=context) for context in (0, 1_000_000))
        assert {short.footprint.weights_bytes, long.footprint.weights_bytes} <= {
            share.weights_bytes for share in shares(GLM_52, scenario(**options), on=H200)
        }

    def test_per_scenario(self) -> None:
        # In one pass each scenario takes its own fullest stage.
        options = {"num_devices": 16, "tp_size": 4, "pp_size": 4, "num_mtp_tokens": 1, "num_queries": 64}
        contexts = np.array([0.0, 10_000.0, 200_000.0])
        together = step_of(on=H200, **options, context_length=contexts)
        for index, context in enumerate(contexts):
            alone = step_of(on=H200, **options, context_length=int(context)).footprint
            for name in ("weights_bytes", "kv_bytes", "indexer_cache_bytes", "used_bytes"):
                values = np.broadcast_to(getattr(together.footprint, name), contexts.shape)
                assert values[index] == pytest.approx(getattr(alone, name), rel=1e-12)


class TestActivations:
    prefill = {"num_devices": 16, "tp_size": 16, "ep_size": 16, "compile": True}  # noqa: RUF012

    def peak(self, **values: object) -> float:
        return float(step_of(**{**self.prefill, **values}).footprint.activation_bytes)

    def test_prefill_peak_grows_with_the_chunk(self) -> None:
        peaks = [self.peak(query_length=chunk) for chunk in (1, 64, 512, 4096, 16_384)]
        assert peaks[0] > 0
        assert peaks == sorted(set(peaks))
        # Nearly in proportion once the chunk is long.
        assert peaks[-1] == pytest.approx(4 * peaks[-2], rel=0.01)

    def test_a_chunk_holds_its_hidden_state_and_residual(self) -> None:
        assert self.peak(query_length=4096) >= 2 * 4096 * 6144 * 2

    def test_the_logits_of_a_large_decode(self) -> None:
        # One bf16 row of the whole vocabulary per request, gathered over the TP group.
        assert self.peak(num_queries=4096) >= 4096 * 154_880 * 2

    def test_expert_rows(self) -> None:
        # A rank of EP 16 without TP dispatches 8 copies of each of its tokens.
        peak = self.peak(tp_size=1, num_queries=16, query_length=4096)
        assert peak >= 8 * 4096 * 6144 * 2

    def test_dense_prefill_expands_keys_and_values(self) -> None:
        # 128 heads of 128 key and 128 value dims for each cached token, in bf16; one new token needs little else.
        step = step_of(on=H200, spec_name=DEEPSEEK_V3, query_length=1, context_length=99_999)
        expanded = 100_000 * 128 * (128 + 128) * 2
        assert expanded <= step.footprint.activation_bytes <= 1.01 * expanded

    def test_context_alone_adds_little(self) -> None:
        short, long = (
            self.peak(query_length=4096, context_length=4096),
            self.peak(query_length=4096, context_length=10**6),
        )
        assert short <= long < 1.05 * short


def made(*inputs: Abstract | None, bytes: int, workspace: int = 0) -> Abstract:
    """A tensor of so many bytes, made from `inputs` by an op that needs so much scratch memory."""
    op = Op("op", "elementwise", lambda *_: (((bytes,), "int8"),), lambda call: Work(workspace_bytes=workspace))
    return op(*inputs)[0]


class TestPeakByHand:
    @staticmethod
    def peak(body: Callable[[Abstract], Sequence[Abstract | None]], *, given: int = 100) -> object:
        recorder = Recorder()
        recorder.block("block", "block", lambda x: tuple(body(x)), recorder.tensor(given, dtype="int8"))
        return peak_activation_bytes(recorder.program)

    def test_a_value_lives_until_its_last_reader(self) -> None:
        assert self.peak(lambda x: [made(made(x, bytes=50), bytes=30)]) == 150
        assert self.peak(lambda x: [made(made(x, bytes=50), bytes=130)]) == 180

    def test_a_result_lives_until_the_end(self) -> None:
        assert self.peak(lambda x: [x, made(made(x, bytes=50), bytes=30)]) == 180

    def test_an_input_lives_from_the_start(self) -> None:
        def body(x: Abstract) -> Sequence[Abstract]:
            first = made(x.recorder.tensor(7, dtype="int8"), bytes=40)
            return [made(first, x, bytes=1)]

        assert self.peak(body) == 100 + 7 + 40

    def test_a_result_that_nobody_reads(self) -> None:
        def body(x: Abstract) -> Sequence[Abstract]:
            made(x, bytes=500)
            return [made(x, bytes=10)]

        assert self.peak(body) == 600

    def test_scratch_memory_is_of_one_op(self) -> None:
        assert self.peak(lambda x: [made(made(x, bytes=50, workspace=1000), bytes=30, workspace=900)]) == 1150

    def test_a_view_is_no_copy_and_keeps_the_whole_buffer(self) -> None:
        assert self.peak(lambda x: [made(x.view(10, 10), x, bytes=50)]) == 150
        assert self.peak(lambda x: [made(x.view(20), bytes=50)]) == 150

    def test_weights_and_caches_are_counted_elsewhere(self) -> None:
        def body(x: Abstract) -> Sequence[Abstract]:
            weight = x.recorder.tensor(10**6, kind="weight")
            return [made(x, weight, x.recorder.tensor(10**6, kind="cache"), bytes=50)]

        assert self.peak(body) == 150

    def test_the_fullest_block(self) -> None:
        recorder = Recorder()
        x: Abstract | None = recorder.tensor(100, dtype="int8")
        for size in (10, 300, 20):
            (x,) = recorder.block(str(size), "layer", lambda x, size=size: (made(x, bytes=size),), x)
        assert peak_activation_bytes(recorder.program) == 300 + 20

    def test_per_scenario(self) -> None:
        recorder = Recorder()
        sizes = np.array([10.0, 400.0])

        def body(x: Abstract) -> tuple[Abstract]:
            op = Op("op", "elementwise", lambda x: ((x.shape, "int8"),), lambda call: Work(workspace_bytes=200 - sizes))
            return op(x)

        recorder.block("block", "block", body, recorder.tensor(sizes, dtype="int8"))
        np.testing.assert_array_equal(peak_activation_bytes(recorder.program), [20 + 190, 800 - 200])


class TestTotals:
    def test_used_is_the_sum_of_the_parts(self) -> None:
        memory = step_of(num_devices=16, tp_size=16, ep_size=16, context_length=9999, reserved_memory_gb=3).footprint
        parts = [
            memory.weights_bytes, memory.kv_bytes, memory.indexer_cache_bytes, memory.metadata_bytes,
            memory.activation_bytes, memory.communication_bytes, memory.reserved_bytes,
        ]  # fmt: skip
        assert memory.used_bytes == pytest.approx(sum(float(part) for part in parts))
        assert memory.free_bytes == memory.device_bytes_capacity - memory.used_bytes
        assert (memory.pool_bytes, memory.selection_bytes, memory.host_kv_bytes) == (0, 0, 0)
        assert memory.reserved_bytes == 3 * 2**30
        assert memory.device_bytes_capacity == 64 * 2**30

    def test_metadata(self) -> None:
        # Block tables of 128 tokens, lengths and slots, int32; half a head of cos and sin for 2**20 positions, bf16.
        memory = step_of(num_devices=16, tp_size=16, num_queries=3, context_length=1000, num_mtp_tokens=1).footprint
        assert memory.metadata_bytes == 4 * (3 * 8 + 3 + 3 * 2) + 2**20 * 64 * 2

    def test_communication_buffers_need_peers(self) -> None:
        assert step_of(on=H200).footprint.communication_bytes == 0
        assert step_of(on=H200, num_devices=2, tp_size=2).footprint.communication_bytes == 411_041_792
        assert step_of(num_devices=2, tp_size=2).footprint.communication_bytes == 4 * 200 * 2**20

    @pytest.mark.parametrize("more", [-1, 0, 1])
    def test_fits_to_the_byte(self, more: int) -> None:
        step = scenario(num_devices=16, tp_size=16, ep_size=16, num_queries=3, context_length=65_536)
        used = cast_step(model(GLM_52), device(ASCEND), step).footprint.used_bytes
        assert float(used).is_integer()
        where = with_memory(device(ASCEND), int(used) + more)
        assert cast(model(GLM_52), where, step).fits is (more >= 0)


def with_memory(where: Device, size_bytes: int) -> Device:
    return replace(
        where,
        memory=DeviceMemory(
            size_bytes=size_bytes, bandwidth_bytes_per_s=where.memory.bandwidth_bytes_per_s, source="test"
        ),
    )


class TestWhatDoesNotFit:
    """32 requests of 64K on 16 dies with TP 16: every die holds the whole cache."""

    step = scenario(
        num_devices=16,
        tp_size=16,
        dp_size=1,
        ep_size=16,
        num_queries=32,
        context_length=65_536,
        compile=True,
        quantize_linear_action="W4A8_STATIC",
    )

    def test_says_so(self) -> None:
        prediction = cast(GLM_52, ASCEND, self.step)
        assert not prediction.fits
        assert prediction.footprint.kv_bytes == 32 * 65_537 * 89_856
        assert prediction.footprint.kv_bytes > 2 * prediction.footprint.device_bytes_capacity
        assert prediction.footprint.free_bytes < 0
        # It is priced all the same.
        assert prediction.latency_s > 0

    def test_largest_batch_and_context_are_exact(self) -> None:
        largest = cast(GLM_52, ASCEND, self.step).largest
        assert (largest.max_batch_per_device, largest.max_context_length) == (6, 13_089)

        def fits(**values: object) -> bool:
            return cast(GLM_52, ASCEND, scenario(self.step, **values)).fits

        assert fits(num_queries=6)
        assert not fits(num_queries=7)
        assert fits(context_length=13_089)
        assert not fits(context_length=13_134)

    def test_dcp_or_attention_dp_makes_it_fit(self) -> None:
        assert cast(GLM_52, ASCEND, scenario(self.step, dcp_size=16)).fits
        assert cast(GLM_52, ASCEND, scenario(self.step, tp_size=1, dp_size=16)).fits

    def test_weights_that_do_not_fit_leave_nothing(self) -> None:
        prediction = cast(GLM_52, ASCEND, scenario())
        assert not prediction.fits
        assert (prediction.largest.max_batch_per_device, prediction.largest.max_context_length) == (0, None)

    @pytest.mark.parametrize("beyond", [0, 1])
    def test_a_prompt_of_the_longest_length_leaves_no_context(self, beyond: int) -> None:
        step = scenario(num_devices=8, tp_size=8, query_length=163_840 + beyond)
        assert cast(DEEPSEEK_V32, H200, step).largest.max_context_length == 0

    def test_context_is_searched_up_to_what_the_model_can(self) -> None:
        step = scenario(num_devices=8, tp_size=8, query_length=163_839)
        prediction = cast(DEEPSEEK_V32, H200, step)
        assert prediction.fits
        assert prediction.largest.max_context_length == 1

    def test_the_reserve_counts(self) -> None:
        step = scenario(self.step, num_queries=6)
        free = float(cast(GLM_52, ASCEND, step).footprint.free_bytes)
        assert cast(GLM_52, ASCEND, scenario(step, reserved_memory_gb=free / 2**30)).fits
        reserved = cast(GLM_52, ASCEND, scenario(step, reserved_memory_gb=free / 2**30 + 1e-6))
        assert not reserved.fits
        assert reserved.largest.max_batch_per_device == 5


@pytest.mark.property
@settings(max_examples=25)
@given(cases(max_stages=2), st.integers(-40, 200))
def test_largest_is_maximal(case: Case, spare: int) -> None:
    spec, where, step = case
    setup = setup_of(spec, step, on=where.name)
    # Memory that is just enough, or not, so that both limits are within reach.
    needed = float(cast_step(spec, where, step).footprint.used_bytes)
    where = with_memory(where, int(needed * (1 + spare / 1000)))
    prediction = cast(spec, where, step)
    context, batch = prediction.largest.max_context_length, prediction.largest.max_batch_per_device
    # A prefix cache moves tokens from the query to the context.
    longest = prediction.cast.batch.classes[0]
    plain = scenario(
        step, query_length=int(longest.query), context_length=int(longest.context), prefix_cache_hit_rate=0.0,
        decode=prediction.mode == "decode",
    )  # fmt: skip
    most = spec.max_position_embeddings - int(longest.query)
    assume(most >= 0)

    def fits(**values: object) -> bool:
        return bool(cast_step(spec, where, scenario(plain, **values)).footprint.fits)

    ranks = setup.mesh.dp.size
    assert batch == 0 or fits(num_queries=batch * ranks)
    assert not fits(num_queries=(batch + 1) * ranks)
    if context is None:
        assert not fits(context_length=0)
        return
    assert fits(context_length=context)
    assert context == most or (context < most and not fits(context_length=context + 1))
    if prediction.fits and longest.context <= most:
        assert context >= longest.context
        # The largest batch is one of equally full ranks.
        assert step.workload.num_queries % ranks or batch * ranks >= step.workload.num_queries


@pytest.mark.property
@settings(max_examples=40)
@given(cases())
def test_every_part_is_counted_once(case: Case) -> None:
    memory = cast_step(*case).footprint
    for name in Footprint.__dataclass_fields__:
        assert getattr(memory, name) >= 0, name
    assert memory.activation_bytes > 0
    assert memory.weights_bytes > 0


class TestAgainstPublishedFigures:
    """Figures of a public simulator's run; it counts three MTP layers and whole blocks."""

    peer_tokens = 509 * 128

    def prediction(self, **values: object) -> Footprint:
        return cast(
            GLM_52,
            ASCEND,
            scenario(
                num_devices=16,
                tp_size=16,
                dp_size=1,
                ep_size=16,
                query_length=4096,
                context_length=61_000,
                quantize_linear_action="W4A8_STATIC",
                compile=True,
                **values,
            ),
        ).footprint

    def test_weights_per_die(self) -> None:
        assert self.prediction().weights_bytes / GIB == pytest.approx(25.8, rel=0.01)

    def test_caches(self, shared_data: Path) -> None:
        path = shared_data / "peers" / "tensorcast_glm52_a3.csv"
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["case"].startswith("prefill")]
        calls = {row["op"].split(".")[1]: int(row["calls"]) for row in rows if "mla" in row["op"] or "dsa" in row["op"]}
        assert (calls["mla_sparse_attention"], calls["dsa_indexer"]) == (81, 24)
        shapes = next(row["input_shapes_per_device"] for row in rows if "mla_sparse" in row["op"])
        assert "[509, 128, 576]" in shapes
        memory = self.prediction(num_mtp_tokens=3)
        assert memory.kv_bytes == 65_096 * 79 * 1152
        assert memory.kv_bytes * 81 / 79 * self.peer_tokens / 65_096 / GIB == pytest.approx(5.66, abs=0.005)
        assert memory.indexer_cache_bytes == 65_096 * 22 * 256
        assert memory.indexer_cache_bytes * 24 / 22 * self.peer_tokens / 65_096 / GIB == pytest.approx(0.37, abs=0.005)

    def test_the_case_that_the_peer_prints_a_latency_for(self, shared_data: Path) -> None:
        # 186 GiB of caches on a 64 GiB die: 16,385 blocks of 128 tokens, 78 and 21 layers.
        with (shared_data / "peers" / "tensorcast_glm52_a3.csv").open(newline="") as file:
            shapes = [
                row["input_shapes_per_device"] for row in csv.DictReader(file) if row["case"].startswith("decode 32")
            ]
        assert "[16385, 128, 576]" in shapes[0]
        memory = cast(GLM_52, ASCEND, TestWhatDoesNotFit.step).footprint
        ours = (memory.kv_bytes + memory.indexer_cache_bytes) / (32 * 65_537) * 16_385 * 128 / GIB
        assert ours == pytest.approx(186, abs=0.5)
