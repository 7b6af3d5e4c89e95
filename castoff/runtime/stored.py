"""Weights as a checkpoint stores them, and as a run wants them.

A matrix is stored plain, in INT8 with a scale per output (`X.weight_scale` beside `X.weight`), or in FP8 with a scale
per block of 128 by 128 (`X.weight_scale_inv`); value · scale is the weight in both. What is stored decides how it is
read. A part of a matrix is read as the whole would be, so that ranks hold slices of one and the same weight; where the
blocks of gate and up do not meet at their seam, FP8 is quantised anew for what is joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.ops.program import Tensor
from castoff.ops.quantization import dequantize_weight, quantize_weight, widened
from castoff.spec.quant import FP8_BLOCK, LinearFormat, linear_format

torch = lazy.load("torch")

PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")
SCALE_DTYPES = ("F32", "BF16")
QUANTIZED_DTYPES = {"W8A8_DYNAMIC": "I8", "FP8": "F8_E4M3"}
"""What a checkpoint of an action stores its quantised weights as, in safetensors' words."""
SCALE_SUFFIXES = {"I8": "_scale", "F8_E4M3": "_scale_inv"}
"""What is added to a weight's name to name its scales, by the dtype of its values."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a checkpoint: its name and whole shape. quantizable: whether it may be stored quantised."""

    name: str
    shape: tuple[int, ...]
    quantizable: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Rows and columns of a matrix, each from and to; None for all of them."""

    rows: Range | None = None
    columns: Range | None = None


WHOLE = Part()


class TensorSource(Protocol):
    """Where stored tensors come from."""

    def read(self, piece: Piece, part: Part = WHOLE) -> Tensor:
        """Part of the tensor of that name and shape, its values as they are stored."""

    def scales(self, piece: Piece) -> Piece | None:
        """The scales that are stored beside a quantised tensor; None beside a plain one."""


def scale_shapes(piece: Piece, dtype: str) -> tuple[tuple[int, ...], ...]:
    """Shapes that the scales of a matrix stored as `dtype` may have, the usual one first."""
    rows, columns = piece.shape
    if dtype == "I8":
        return (rows, 1), (rows,)
    return ((-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)),)


def read_weight(source: TensorSource, piece: Piece, part: Part = WHOLE) -> tuple[Tensor, Tensor | None]:
    """Part of a tensor as it is stored: values, and scales in fp32 ((O, 1) or one per block), None where it is plain.

    Raises CastoffError for a part whose edge runs through a block of FP8 values, and for scales that cannot be.
    """
    scales = source.scales(piece)
    if scales is None:
        return source.read(piece, part), None
    if _stored_dtype(scales) == "int8":
        read = source.read(scales, Part(rows=part.rows)).float().reshape(-1, 1)
    else:
        read = source.read(scales, _blocks(piece, part)).float()
    if not bool((read.isfinite() & (read >= 0)).all()):
        raise CastoffError(f"{scales.name} holds scales that are negative or not finite")
    return source.read(piece, part), read


def read_plain(source: TensorSource, piece: Piece, part: Part = WHOLE) -> Tensor:
    """Part of a tensor as plain values: in the stored dtype, or dequantised to fp32."""
    if source.scales(piece) is None:
        return source.read(piece, part)
    rows, columns = part.rows or (0, piece.shape[0]), part.columns or (0, piece.shape[1])
    around = Part(_around(rows, piece.shape[0]), _around(columns, piece.shape[1]))
    values, scales = read_weight(source, piece, around)
    assert scales is not None
    assert around.rows is not None
    assert around.columns is not None
    form = linear_format("W8A8_DYNAMIC" if values.dtype == torch.int8 else "FP8")
    plain = dequantize_weight(values, scales, form)
    row, column = rows[0] - around.rows[0], columns[0] - around.columns[0]
    return plain[row : row + rows[1] - rows[0], column : column + columns[1] - columns[0]]


def read_quantized(
    source: TensorSource, parts: Sequence[tuple[Piece, Part]], form: LinearFormat
) -> tuple[Tensor, Tensor]:
    """Parts of matrices joined along their rows, as values and scales of `form`: those stored where the format is the
    same, else quantised here.

    Raises CastoffError for a part whose edge runs through a block of FP8 values.
    """
    assert form.weight_dtype in ("int8", "fp8")
    if form.weight_dtype == "fp8":
        blocks = [_blocks(piece, part) for piece, part in parts]
        heights = [_length(part.rows, piece.shape[0]) for piece, part in parts]
        if len(blocks) > 1 and any(height % FP8_BLOCK for height in heights[:-1]):
            # A block of the joined matrix reaches over the seam, and no stored scale is the right one for it.
            joined = torch.cat([widened(read_plain(source, piece, part)) for piece, part in parts])
            return _quantized(parts[0][0], joined, form)
    read = [_read_one(source, piece, part, form) for piece, part in parts]
    values, scales = zip(*read, strict=True)
    return torch.cat(values), torch.cat(scales)


def _read_one(source: TensorSource, piece: Piece, part: Part, form: LinearFormat) -> tuple[Tensor, Tensor]:
    stored = source.scales(piece)
    if stored is not None and _stored_dtype(stored) == form.weight_dtype:
        values, scales = read_weight(source, piece, part)
        assert scales is not None
        return values, scales
    if form.weight_dtype == "fp8":
        return _quantized(piece, read_plain(source, piece, part), form)
    # The scale of an output is that of its whole row, whichever columns of it are wanted.
    values, scales = _quantized(piece, read_plain(source, piece, Part(rows=part.rows)), form)
    first, end = part.columns or (0, piece.shape[1])
    return values[:, first:end], scales


def _quantized(piece: Piece, weight_OI: Tensor, form: LinearFormat) -> tuple[Tensor, Tensor]:
    values, scales = quantize_weight(weight_OI, form)
    if not bool(scales.isfinite().all()):
        raise CastoffError(f"{piece.name} holds NaN or infinity, and cannot be quantised")
    return values, scales


def _stored_dtype(scales: Piece) -> str:
    return "fp8" if scales.name.endswith(SCALE_SUFFIXES["F8_E4M3"]) else "int8"


def _length(extent: Range | None, size: int) -> int:
    first, end = extent or (0, size)
    return end - first


def _around(extent: Range, size: int) -> Range:
    """The smallest range of whole blocks that holds another range."""
    first, end = extent
    return first - first % FP8_BLOCK, min(end + -end % FP8_BLOCK, size)


def _blocks(piece: Piece, part: Part) -> Part:
    """The rows and columns of the scales that belong to a part of an FP8 matrix."""
    found: list[Range] = []
    for axis, extent, size in (("rows", part.rows, piece.shape[0]), ("columns", part.columns, piece.shape[1])):
        first, end = extent or (0, size)
        if first % FP8_BLOCK or (end % FP8_BLOCK and end != size):
            raise CastoffError(
                f"{piece.name}: a rank would hold {axis} {first} to {end} of {size}, which cuts an FP8 block of "
                f"{FP8_BLOCK}, whose values share a scale; choose another --tp-size or --quantize-linear-action "
                "DISABLED"
            )
        found.append((first // FP8_BLOCK, -(-end // FP8_BLOCK)))
    return Part(*found)
