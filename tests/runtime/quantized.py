"""What tests of quantised checkpoints share."""

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
from castoff.ops.linear import Weight
from castoff.ops.quantization import dequantize_weight
from castoff.runtime.stored import WHOLE, Part, Piece
from castoff.spec.quant import linear_format
from tests.runtime.tiny import torch

ACTIONS = ("W8A8_DYNAMIC", "FP8")


SUFFIX = {"W8A8_DYNAMIC": "_scale", "FP8": "_scale_inv"}


WEIGHT = "model.layers.1.self_attn.o_proj.weight"


EXPERT = "model.layers.3.mlp.experts.7.down_proj.weight"


def same(one: Any, other: Any) -> bool:
    """torch.equal, which torch lacks for FP8."""
    return one.dtype == other.dtype and torch.equal(one.double(), other.double())


def plain_weight(weight: Weight, dtype: Any) -> Weight:
    if weight.scales is None:
        return weight
    assert weight.format is not None
    if weight.values.dim() == 2:
        return Weight(dequantize_weight(weight.values, weight.scales.to(dtype), weight.format))
    pairs = zip(weight.values, weight.scales, strict=True)
    return Weight(torch.stack([dequantize_weight(values, scales.to(dtype), weight.format) for values, scales in pairs]))


def form_of(action: str) -> Any:
    return linear_format(action)  # type: ignore[arg-type]


class Given:
    """Tensors in memory as a source."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors

    def read(self, piece: Piece, part: Part = WHOLE) -> Any:
        whole = self._tensors[piece.name]
        rows, columns = (slice(*(extent or (None,))) for extent in (part.rows, part.columns))
        return whole[rows, columns] if whole.dim() > 1 else whole[rows]

    def scales(self, piece: Piece) -> Piece | None:
        for suffix in SUFFIX.values():
            if piece.name + suffix in self._tensors:
                return Piece(piece.name + suffix, tuple(self._tensors[piece.name + suffix].shape))
        return None
