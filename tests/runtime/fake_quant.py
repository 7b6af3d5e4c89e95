"""Quantised numbers by hand: what stored values and scales stand for, and products whose inputs are rounded first.

Written from the formats' definitions alone, so that castoff's own quantisation is compared with something else.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

BLOCK = 128
FP8 = torch.float8_e4m3fn


def dequantized(tensors: Mapping[str, Any], name: str) -> Any:
    """The weight of that name, value by value, whatever it is stored in."""
    values = tensors[name]
    if values.dtype == torch.int8:
        return values.float() * tensors[f"{name}_scale"].float().reshape(-1, 1)
    if values.dtype == FP8:
        scales = tensors[f"{name}_scale_inv"].float()
        rows, columns = values.shape
        return values.float() * scales[torch.arange(rows) // BLOCK][:, torch.arange(columns) // BLOCK]
    return values


def rounded_int8(x: Any) -> Any:
    """Each row with a scale of its own, so that its largest value is 127."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return torch.where(scale > 0, (x / scale).round() * scale, 0)


def rounded_fp8(x: Any) -> Any:
    """Each 128 values of a row with a scale of their own, so that the largest is 448."""
    tiles = []
    for tile in x.split(BLOCK, dim=-1):
        scale = tile.abs().amax(dim=-1, keepdim=True) / 448
        tiles.append(torch.where(scale > 0, (tile / scale).to(FP8).to(x.dtype) * scale, 0))
    return torch.cat(tiles, dim=-1)


ROUNDED = {"W8A8_DYNAMIC": rounded_int8, "FP8": rounded_fp8}


class RoundedInputs(torch.overrides.TorchFunctionMode):
    """Inside, a product with one of these weights, or a part of one, takes its input rounded."""

    PRODUCTS = (torch.nn.functional.linear, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul)

    def __init__(self, weights: Iterable[Any], action: str) -> None:
        super().__init__()
        self._storages = {weight.untyped_storage().data_ptr() for weight in weights}
        self._rounded = ROUNDED[action]
        self.products = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self.PRODUCTS and args[1].untyped_storage().data_ptr() in self._storages:
            self.products += 1
            args = (self._rounded(args[0]), *args[1:])
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Held:
    """Weights for castoff's engine from dicts of them."""

    layers: list[dict[str, Any]]
    outer_weights: dict[str, Any]

    def layer(self, layer: int) -> dict[str, Any]:
        return self.layers[layer]

    def outer(self) -> dict[str, Any]:
        return self.outer_weights
