"""Quantised numbers: symmetric rounding with scales, and the product of quantised activations and weights.

Axes: T tokens, I inputs, O outputs, N tiles of a row. Everything is computed at no less than fp32.
"""

from __future__ import annotations

import lazy_loader as lazy

from castoff.ops.program import Tensor, torch_dtype
from castoff.spec.quant import FP8_BLOCK, LinearFormat

torch = lazy.load("torch")

RUNNABLE_ACTIONS = ("DISABLED", "W8A16_STATIC", "W8A16_DYNAMIC", "W8A8_DYNAMIC", "FP8")
"""Formats with reference maths; the others need stored activation scales or four-bit values, and are cast only."""


def quantize_rows(
    x_XI: Tensor, dtype: Tensor, tile: int | None = None, *, scale_dtype: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One-byte values (…, I) and the scale of every `tile` of them (None: of each row), (…, ⌈I / tile⌉).

        scale = max |x| / limit        limit: 127 for int8, 448 for float8_e4m3fn; rounded to scale_dtype
        value = round(clamp(x / scale, −limit, limit))        to the nearest, ties to even

    scale_dtype: None for no less than fp32. A scale is at least the smallest normal number of its dtype: zeros give
    zeros, and nothing is divided by zero. It is at most the largest power of two: numbers beyond limit times that
    saturate. A tile with a NaN or an infinity gets scale NaN: all of it reads back as NaN, rather than as numbers that
    look sound.
    """
    tiles_XNT = _tiled(widened(x_XI), tile or x_XI.shape[-1])
    values, scales_XN1 = _quantize(tiles_XNT, (-1,), dtype, scale_dtype)
    return values.flatten(-2)[..., : x_XI.shape[-1]], scales_XN1.squeeze(-1)


def dequantize_rows(values_XI: Tensor, scales_XN: Tensor, tile: int | None = None) -> Tensor:
    """values · scale of their tile, (…, I), in the dtype of the scales and no less than fp32."""
    width, scales = values_XI.shape[-1], widened(scales_XN)
    return (_tiled(values_XI.to(scales.dtype), tile or width) * scales[..., None]).flatten(-2)[..., :width]


def quantize_activations(x_TI: Tensor, format: LinearFormat) -> tuple[Tensor, Tensor]:
    """Activations in the format's number format, scaled per token (FP8: per 128 values)."""
    return quantize_rows(x_TI, torch_dtype(format.activation_dtype), FP8_BLOCK if format.action == "FP8" else None)


def quantize_weight(weight_XOI: Tensor, format: LinearFormat) -> tuple[Tensor, Tensor]:
    """A weight in the format's number format: int8 with a scale per output channel, (…, O, 1); FP8 with one per block
    of 128 outputs by 128 inputs, (…, ⌈O/128⌉, ⌈I/128⌉)."""
    if format.weight_dtype == "int8":
        return quantize_rows(weight_XOI, torch.int8)
    rows, columns = weight_XOI.shape[-2:]
    values, scales = _quantize(_blocks(widened(weight_XOI)), (-3, -1), torch.float8_e4m3fn, None)
    return values.flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous(), scales.squeeze((-3, -1))


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


def _quantize(x: Tensor, dims: tuple[int, ...], dtype: Tensor, scale_dtype: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values and scales, one for all that differ in `dims` alone."""
    limit = float(torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max)
    scales = _stored_scales(x.abs().amax(dim=dims, keepdim=True) / limit, scale_dtype or x.dtype)
    # By the scale as stored, not by the exact one: what reads the row back knows no other.
    scaled = (x / scales.to(x.dtype)).clamp(-limit, limit).nan_to_num(0.0)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def _stored_scales(exact: Tensor, dtype: Tensor) -> Tensor:
    """Scales as stored: positive normal numbers, or NaN where the exact one is not finite."""
    numbers = torch.finfo(dtype)
    # The largest power of two of a float dtype.
    largest = numbers.max / (2 - numbers.eps)
    return torch.where(exact.isfinite(), exact.clamp(numbers.tiny, largest), torch.nan).to(dtype)


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
