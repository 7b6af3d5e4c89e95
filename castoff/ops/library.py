"""Every op of the table that one device computes as a torch.library op, `torch.ops.castoff.NAME`.

torch.compile traces the reference of most ops. An opaque one stays one node of the graph, with the shapes that a cast
records. All take the same arguments: the inputs that are only read (None where absent or mutated), the mutated ones,
and the attributes as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import lazy_loader as lazy

from castoff.ops.attention import AttentionSizes
from castoff.ops.dsa_indexer import IndexerSizes
from castoff.ops.expert_load import ExpertLayer
from castoff.ops.mlapo import MlapoSizes
from castoff.ops.offload_plan import PoolSizes
from castoff.ops.program import Op, Tensor, torch_dtype
from castoff.ops.table import OPS
from castoff.spec.quant import CacheFormat, LinearFormat

torch = lazy.load("torch")

_CLASSES = {
    cls.__name__: cls
    for cls in (AttentionSizes, CacheFormat, ExpertLayer, IndexerSizes, LinearFormat, MlapoSizes, PoolSizes)
}


@cache
def register() -> Tensor:
    """Register the ops that have a reference, once; returns torch's library, which must be kept."""
    library = torch.library.Library("castoff", "DEF")
    # Two ops may share a name, and then a reference: dense and sparse attention.
    for op in {op.name: op for op in OPS if op.reference is not None and op.family != "collective"}.values():
        returns = ", ".join(["Tensor"] * op.outputs)
        written = "Tensor(a!)[] mutated" if op.mutates else "Tensor[] mutated"
        library.define(f"{op.name}(Tensor?[] inputs, {written}, str attributes) -> ({returns})")
        library.impl(op.name, _real(op), "CompositeExplicitAutograd")
        torch.library.register_fake(f"castoff::{op.name}", _fake(op), lib=library)
    return library


def attributes_of(text: str) -> dict[str, Any]:
    """The attributes whose `literal` this is."""
    values = json.loads(text, object_hook=_value)
    return {name: _tuples(value) for name, value in values.items()}


def _value(values: dict[str, Any]) -> Any:
    if "class" not in values:
        return values
    return _CLASSES[values.pop("class")](**{name: _tuples(value) for name, value in values.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _joined(op: Op, inputs: list[Tensor | None], mutated: list[Tensor]) -> list[Tensor | None]:
    given = list(inputs)
    for index, tensor in zip(op.mutates, mutated, strict=True):
        given[index] = tensor
    return given


def _real(op: Op) -> Callable[..., Any]:
    def compute(inputs: list[Tensor | None], mutated: list[Tensor], attributes: str) -> Any:
        outputs = op.compute(*_joined(op, inputs, mutated), **attributes_of(attributes))
        return _result(op, outputs)

    return compute


def _fake(op: Op) -> Callable[..., Any]:
    def shapes(inputs: list[Tensor | None], mutated: list[Tensor], attributes: str) -> Any:
        given = _joined(op, inputs, mutated)
        like = next(tensor for tensor in given if tensor is not None)
        results = op.shapes(*given, **attributes_of(attributes))
        wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in given)
        return _result(op, tuple(like.new_empty(shape, dtype=_dtype(dtype, wide=wide)) for shape, dtype in results))

    return shapes


def _dtype(name: str, *, wide: bool) -> Tensor:
    """torch's dtype of a result; fp32 means no less than that, so a run in float64 has float64."""
    return torch.float64 if name == "fp32" and wide else torch_dtype(name)


def _result(op: Op, outputs: tuple[Tensor, ...]) -> Any:
    assert len(outputs) == op.outputs, f"{op.name} has {op.outputs} results, not {len(outputs)}"
    return outputs[0] if op.outputs == 1 else outputs or None
