"""What each quantisation action means, against the formats' definitions."""

from dataclasses import replace
from math import ceil
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.errors import CastoffError
from castoff.spec.quant import AttentionAction, LinearAction, cache_format, linear_format
from tests.generators import ATTENTION_ACTIONS, DEEPSEEK_V3, LINEAR_ACTIONS, model

sizes = st.integers(1, 20_000)


class TestLinearFormat:
    def test_all_actions_are_known(self) -> None:
        assert set(LINEAR_ACTIONS) == set(get_args(LinearAction))
        assert {linear_format(action).action for action in LINEAR_ACTIONS} == set(LINEAR_ACTIONS)

    @pytest.mark.golden
    @pytest.mark.parametrize(
        ("action", "weight", "activation", "dynamic"),
        [
            ("DISABLED", "bf16", "bf16", False),
            ("W8A16_STATIC", "int8", "bf16", False),
            ("W8A16_DYNAMIC", "int8", "bf16", False),
            ("W8A8_STATIC", "int8", "int8", False),
            ("W8A8_DYNAMIC", "int8", "int8", True),
            ("W4A8_STATIC", "int4", "int8", False),
            ("W4A8_DYNAMIC", "int4", "int8", True),
            ("FP8", "fp8", "fp8", True),
            ("MXFP4", "fp4", "fp4", True),
        ],
    )
    def test_dtypes(self, action: LinearAction, weight: str, activation: str, dynamic: bool) -> None:
        form = linear_format(action)
        assert (form.weight_dtype, form.activation_dtype, form.dynamic) == (weight, activation, dynamic)
        # 16-bit activations are never quantised.
        assert form.quantizes_activations == (activation != "bf16")

    @pytest.mark.property
    @given(rows=sizes, columns=sizes, group=st.sampled_from([16, 32, 64, 128]))
    def test_weight_scales(self, rows: int, columns: int, group: int) -> None:
        found = {
            action: linear_format(action, mxfp4_group_size=group).weight_scales(rows, columns)
            for action in LINEAR_ACTIONS
            if linear_format(action).has_scales
        }
        assert "DISABLED" not in found
        # One per block of 128 x 128, the last ones partly empty.
        assert found.pop("FP8") == (ceil(rows / 128), ceil(columns / 128))
        # One per group along the inputs.
        assert found.pop("MXFP4") == (rows, ceil(columns / group))
        # Integers: one per output channel.
        assert set(found.values()) == {(rows, 1)}

    @pytest.mark.golden
    def test_kv_a_proj_has_five_rows_of_fp8_scales(self) -> None:
        assert linear_format("FP8").weight_scales(576, 6144) == (5, 48)

    @pytest.mark.property
    @given(columns=sizes, group=st.sampled_from([16, 32, 64, 128]))
    def test_activation_scales(self, columns: int, group: int) -> None:
        found = {
            action: linear_format(action, mxfp4_group_size=group).activation_scales(columns)
            for action in LINEAR_ACTIONS
        }
        assert found["W8A8_DYNAMIC"] == found["W4A8_DYNAMIC"] == 1
        assert found["FP8"] == ceil(columns / 128)
        assert found["MXFP4"] == ceil(columns / group)
        # A stored scale, or no quantisation.
        assert {found[action] for action in LINEAR_ACTIONS if not linear_format(action).dynamic} == {0}

    @pytest.mark.parametrize(
        ("action", "operations", "scale"),
        [
            ("DISABLED", 0, "fp32"),
            ("W8A16_DYNAMIC", 0, "fp32"),
            ("W4A8_STATIC", 2, "fp32"),
            ("W4A8_DYNAMIC", 4, "fp32"),
            ("FP8", 4, "fp32"),
            ("MXFP4", 4, "e8m0"),
        ],
    )
    def test_quantising_a_value(self, action: LinearAction, operations: int, scale: str) -> None:
        form = linear_format(action)
        assert (form.quantize_operations, form.scale_dtype) == (operations, scale)


class TestCacheFormat:
    def test_all_actions_are_known(self) -> None:
        assert set(ATTENTION_ACTIONS) == set(get_args(AttentionAction))

    @pytest.mark.golden
    @pytest.mark.parametrize(
        ("action", "latent", "key", "scale", "dtype"),
        [
            ("DISABLED", 1152, 256, 0, "bf16"),
            ("FP8", 656, 128, 4, "fp8"),
            ("INT8", 656, 128, 2, "int8"),
        ],
    )
    def test_glm_52(self, action: AttentionAction, latent: int, key: int, scale: int, dtype: str) -> None:
        rows = cache_format(model(), action)
        assert (rows.latent_row_bytes, rows.index_key_bytes, rows.index_scale_bytes) == (latent, key, scale)
        assert rows.index_row_bytes == key + scale
        assert rows.index_dtype == dtype

    @pytest.mark.parametrize("latent", ATTENTION_ACTIONS)
    @pytest.mark.parametrize("keys", ATTENTION_ACTIONS)
    def test_each_cache_has_its_own(self, latent: AttentionAction, keys: AttentionAction) -> None:
        both, rows, index = (
            cache_format(model(), latent, keys),
            cache_format(model(), latent),
            cache_format(model(), keys),
        )
        assert (both.action, both.index_action) == (latent, keys)
        assert both.latent_row_bytes == rows.latent_row_bytes
        assert (both.index_row_bytes, both.index_dtype) == (index.index_row_bytes, index.index_dtype)

    def test_unknown_actions_are_named(self) -> None:
        with pytest.raises(CastoffError, match="quantize_indexer_action must be one of DISABLED, INT8, FP8, got 'FP6'"):
            cache_format(model(), "INT8", "FP6")  # type: ignore[arg-type]

    @pytest.mark.parametrize("action", ATTENTION_ACTIONS)
    def test_a_model_without_an_indexer_has_no_keys(self, action: AttentionAction) -> None:
        assert cache_format(model(DEEPSEEK_V3), action).index_row_bytes == 0

    @pytest.mark.property
    @given(tiles=st.integers(1, 8), half_rope=st.integers(1, 64), action=st.sampled_from(("FP8", "INT8")))
    def test_fewer_bits_never_need_more_bytes(self, tiles: int, half_rope: int, action: AttentionAction) -> None:
        spec = replace(model(), kv_lora_rank=128 * tiles, qk_rope_head_dim=2 * half_rope)
        quantised, plain = cache_format(spec, action), cache_format(spec, "DISABLED")
        assert quantised.latent_row_bytes == 128 * tiles + 4 * tiles + 4 * half_rope < plain.latent_row_bytes
        assert quantised.index_row_bytes < plain.index_row_bytes

    @pytest.mark.parametrize("action", ["FP8", "INT8"])
    def test_tiles_of_scales_must_fit_the_latent(self, action: AttentionAction) -> None:
        odd = replace(model(), kv_lora_rank=500)
        with pytest.raises(CastoffError) as caught:
            cache_format(odd, action)
        message = str(caught.value)
        assert f"--quantize-attention-action {action}" in message
        assert "kv_lora_rank 500" in message
        assert "128" in message
        assert "DISABLED" in message
        assert cache_format(odd, "DISABLED").latent_row_bytes == 2 * (500 + 64)
