"""What number formats change in a prediction, and what its figures say of their origin."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff import cast
from castoff.casting.price import Measured, call_key
from castoff.casting.summary import op_summaries
from castoff.errors import CastoffError
from castoff.spec.device import Device, shipped_devices
from castoff.spec.quant import AttentionAction, LinearAction
from castoff.spec.scenario import Scenario
from tests.casting.predictions import FEW, calls_of, count
from tests.casting.strategies import Case, cases, cast_step, scenario
from tests.generators import ASCEND, DEEPSEEK_V3, GLM_52, MODELS, device, model

WITH_FP4 = "ATLAS_350_425T_112G"


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
