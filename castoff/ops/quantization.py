"""Quantised numbers: symmetric rounding with scales, and the product of quantised activations and weights.

Axes: T tokens, I inputs, O outputs, N tiles of a row. Everything is computed at no less than fp32.
"""

from __future__ import annotations

import lazy_loader as lazy

from castoff.ops.program import Tensor, torch_dtype
from castoff.spec.quant import FP8_BLOCK, LinearFormat

torch = lazy.load("torch")

_LARGEST = {"int8": 127.0, "fp8": 448.0}
RUNNABLE_ACTIONS = ("DISABLED", "W8A16_STATIC", "W8A16_DYNAMIC", "W8A8_DYNAMIC", "FP8")
"""Formats with reference maths; the others need stored activation scales or four-bit values, and are cast only."""


def quantize_rows(x_XI: Tensor, dtype: str, tile: int | None = None) -> tuple[Tensor, Tensor]:
    """Symmetric quantisation of the last axis, one scale per `tile` values (None: one per row).

        scale = max |x| over the tile / largest value of dtype;  q = round(x / scale), ties to even

    dtype: int8 or fp8 (e4m3). Returns q (…, I) and scales (…, N), at no less than fp32. A tile of zeros has scale 1.
    """
    wide_XI = widened(x_XI)
    tiles_XNT = _tiled(wide_XI, tile or x_XI.shape[-1])
    scales_XN = _scales(tiles_XNT.abs().amax(dim=-1), dtype)
    values = _rounded(tiles_XNT / scales_XN[..., None], dtype)
    return values.flatten(-2)[..., : x_XI.shape[-1]], scales_XN


def dequantize_rows(values_XI: Tensor, scales_XN: Tensor, tile: int | None = None) -> Tensor:
    """values · scale of their tile, in the dtype of the scales: (…, I)."""
    width = values_XI.shape[-1]
    tiles = _tiled(values_XI.to(scales_XN.dtype), tile or width) * scales_XN[..., None]
    return tiles.flatten(-2)[..., :width]


def quantize_activations(x_TI: Tensor, format: LinearFormat) -> tuple[Tensor, Tensor]:
    """Activations in the format's number format, scaled per token (FP8: per 128 values)."""
    return quantize_rows(x_TI, format.activation_dtype, FP8_BLOCK if format.action == "FP8" else None)


def quantize_weight(weight_XOI: Tensor, format: LinearFormat) -> tuple[Tensor, Tensor]:
    """A weight in the format's number format: int8 with a scale per output channel, (…, O, 1); FP8 with one per block
    of 128 outputs by 128 inputs, (…, ⌈O/128⌉, ⌈I/128⌉)."""
    if format.weight_dtype == "int8":
        return quantize_rows(weight_XOI, "int8")
    rows, columns = weight_XOI.shape[-2:]
    blocks = _blocks(widened(weight_XOI))
    scales = _scales(blocks.abs().amax(dim=(-3, -1)), "fp8")
    values = _rounded(blocks / scales[..., :, None, :, None], "fp8")
    return values.flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous(), scales


def dequantize_weight(values_XOI: Tensor, scales: Tensor, format: LinearFormat) -> Tensor:
    """What `quantize_weight` stands for, in the dtype of the scales."""
    wide = values_XOI.to(scales.dtype)
    if format.weight_dtype == "int8":
        return wide * scales
    rows, columns = values_XOI.shape[-2:]
    per_row = scales.repeat_interleave(FP8_BLOCK, dim=-2)[..., :rows, :]
    return wide * per_row.repeat_interleave(FP8_BLOCK, dim=-1)[..., :columns]


def quantized_product(
    x_TI: Tensor, x_scales: Tensor | None, weight_OI: Tensor, weight_scales: Tensor, format: LinearFormat, dtype: str
) -> Tensor:
    """y_to = sum_i x_ti · W_oi of the numbers that values and scales stand for, (T, O) of `dtype`.

    x_scales: None where activations are not quantised.
    """
    wide = torch.promote_types(torch_dtype(dtype), torch.float32)
    scales = weight_scales.to(wide)
    if format.weight_dtype == "int8":
        # Scales of whole rows come out of the sum.
        product = torch.nn.functional.linear(x_TI.to(wide), weight_OI.to(wide)) * scales[:, 0]
        product = product if x_scales is None else product * x_scales
    else:
        assert x_scales is not None
        x_wide = dequantize_rows(x_TI, x_scales.to(wide), FP8_BLOCK)
        product = torch.nn.functional.linear(x_wide, dequantize_weight(weight_OI, scales, format))
    return product.to(torch_dtype(dtype))


def widened(x: Tensor) -> Tensor:
    """x at no less than fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scales(largest: Tensor, dtype: str) -> Tensor:
    return torch.where(largest == 0, 1.0, largest / _LARGEST[dtype])


def _rounded(x: Tensor, dtype: str) -> Tensor:
    # A scale that was rounded down lets the largest value pass the end of the range by an ulp.
    bounded = x.clamp(-_LARGEST[dtype], _LARGEST[dtype])
    return bounded.round().to(torch.int8) if dtype == "int8" else bounded.to(torch.float8_e4m3fn)


def _tiled(x_XI: Tensor, tile: int) -> Tensor:
    """The last axis cut into tiles, the last one filled up with zeros: (…, N, tile)."""
    missing = -x_XI.shape[-1] % tile
    padded = torch.nn.functional.pad(x_XI, (0, missing)) if missing else x_XI
    return padded.unflatten(-1, (-1, tile))


def _blocks(weight_XOI: Tensor) -> Tensor:
    """Blocks of 128 by 128, filled up with zeros: (…, ⌈O/128⌉, 128, ⌈I/128⌉, 128)."""
    rows, columns = weight_XOI.shape[-2:]
    padded = torch.nn.functional.pad(weight_XOI, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    return padded.unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))
