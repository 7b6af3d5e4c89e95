"""Quantised numbers: round trips within half a step, and products equal to those of the numbers they stand for."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from castoff.ops import linear, moe  # noqa: E402
from castoff.ops.linear import Weight  # noqa: E402
from castoff.ops.program import torch_dtype  # noqa: E402
from castoff.ops.quantization import (  # noqa: E402
    dequantize_rows,
    dequantize_weight,
    quantize_activations,
    quantize_rows,
    quantize_weight,
    quantized_product,
)
from castoff.spec.quant import FP8_BLOCK, LinearAction, linear_format  # noqa: E402

pytestmark = pytest.mark.numerics

ACTIONS: tuple[LinearAction, ...] = ("W8A8_DYNAMIC", "FP8", "W8A16_STATIC")
LARGEST = {"int8": 127, "fp8": 448}


def rand(*shape: int, seed: int = 0, dtype: Any = None) -> Any:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype or torch.float64)


def within_a_step(exact: Any, rounded: Any, scales: Any, dtype: str) -> bool:
    """Half a step: of int8, one scale; of e4m3, 1/16 of the value, or half the smallest subnormal (2^-9)."""
    allowed = scales / 2 if dtype == "int8" else torch.maximum(exact.abs() / 16, scales * 2**-10)
    return bool(((exact - rounded).abs() <= allowed * (1 + 1e-9)).all())


@pytest.mark.property
@given(
    st.integers(1, 5), st.integers(1, 300), st.sampled_from(["int8", "fp8"]), st.sampled_from([None, 16, 128]),
    st.floats(-30, 30), st.integers(0, 9),
)  # fmt: skip
def test_rows(rows: int, width: int, dtype: str, tile: int | None, exponent: float, seed: int) -> None:
    x = rand(rows, width, seed=seed) * 10**exponent
    values, scales = quantize_rows(x, torch_dtype(dtype), tile)
    size = tile or width
    assert scales.shape == (rows, -(-width // size))
    per_value = scales.repeat_interleave(size, dim=-1)[:, :width]
    back = dequantize_rows(values, scales, tile)
    torch.testing.assert_close(back, values.double() * per_value)
    assert within_a_step(x, back, per_value, dtype)
    # The largest value of every tile is the largest of the format.
    assert values.double().abs().max() == LARGEST[dtype]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("shape", [(130, 300), (128, 128), (1, 1), (3, 257, 129)])
def test_weights(action: LinearAction, shape: tuple[int, ...]) -> None:
    form, weight = linear_format(action), rand(*shape)
    values, scales = quantize_weight(weight, form)
    assert values.shape == weight.shape
    assert scales.shape == (*shape[:-2], *form.weight_scales(*shape[-2:]))
    back = dequantize_weight(values, scales, form)
    blocks = scales
    if action == "FP8":
        blocks = scales.repeat_interleave(FP8_BLOCK, -2).repeat_interleave(FP8_BLOCK, -1)
        blocks = blocks[..., : shape[-2], : shape[-1]]
    assert within_a_step(weight, back, blocks.expand_as(weight), form.weight_dtype)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-5), ("bf16", 1e-2)])
def test_products_are_those_of_the_numbers_they_stand_for(action: LinearAction, dtype: str, tolerance: float) -> None:
    form, x = linear_format(action), rand(7, 300)
    values, scales = quantize_weight(rand(130, 300, seed=1), form)
    weight = dequantize_weight(values, scales, form)
    x_values, x_scales, x_whole = x, None, x
    if form.quantizes_activations:
        x_values, x_scales = quantize_activations(x, form)
        x_whole = dequantize_rows(x_values, x_scales, FP8_BLOCK if action == "FP8" else None)
    own = quantized_product(x_values, x_scales, values, scales, form, dtype)
    expected = x_whole @ weight.T
    assert (own.double() - expected).abs().max() <= tolerance * expected.abs().max()
    # And near the exact product: three bits of mantissa, or seven of a row's largest.
    exact = x @ rand(130, 300, seed=1).T
    assert (own.double() - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.parametrize("action", ACTIONS)
def test_grouped_products_are_those_of_each_expert(action: LinearAction) -> None:
    form, rows = linear_format(action), rand(9, 140, dtype=torch.float32)
    stacked = rand(4, 260, 140, seed=2, dtype=torch.float32)
    weight = Weight(*quantize_weight(stacked, form), form)
    counts = torch.tensor([4, 0, 3, 2], dtype=torch.int32)
    own = moe.grouped_matmul(linear.quantize(rows, weight), weight, counts, None)
    start = 0
    for expert, count in enumerate(counts.tolist()):
        alone = Weight(*quantize_weight(stacked[expert], form), form)
        torch.testing.assert_close(own[start : start + count], linear.linear(rows[start : start + count], alone))
        start += count
    fused = moe.grouped_matmul_swiglu(linear.quantize(rows, weight), weight, counts, None)
    expected = linear.quantize(moe.swiglu(own), weight)
    if not form.quantizes_activations:
        torch.testing.assert_close(fused, expected)
        return
    torch.testing.assert_close(fused.values.float(), expected.values.float())
    torch.testing.assert_close(fused.scales, expected.scales)
