"""Memory: closed forms written from the published sizes, the fullest stage, and the largest batch and context."""

from dataclasses import replace

import numpy as np
import pytest

from castoff.casting.footprint import StageShare, stage_shares
from castoff.model.weights import model_parameters
from castoff.spec.quant import AttentionAction, LinearAction
from castoff.spec.scenario import Scenario
from tests.casting.footprints import H200, step_of
from tests.casting.strategies import scenario
from tests.generators import ASCEND, DEEPSEEK_V3, DEEPSEEK_V32, GLM_5, GLM_52, model, setup_of

WITH_FP8 = "ATLAS_350_425T_112G"


# Bytes of one token in one layer: 512 latent and 64 rope values in bf16, or 512 bytes, 4 fp32 scales, 64 in bf16.
LATENT_ROW: dict[AttentionAction, int] = {"DISABLED": 1152, "FP8": 656, "INT8": 656}


INDEX_ROW: dict[AttentionAction, int] = {"DISABLED": 256, "FP8": 128 + 4, "INT8": 128 + 2}


def shares(spec_name: str, step: Scenario, *, on: str = ASCEND) -> tuple[StageShare, ...]:
    return stage_shares(setup_of(model(spec_name), step, on=on))


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
