"""Linear layers: weights with their format, activation quantisation, and the product.

Axes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import lazy_loader as lazy

from castoff.dims import Dim
from castoff.ops.program import Abstract, Op, OpCall, Shapes, Tensor, dtype_name
from castoff.ops.work import DTYPE_BYTES, Part, Work
from castoff.spec.quant import LinearFormat

torch = lazy.load("torch")


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight as it lies in memory: values and the bytes of its scales.

    values: (..., O, I). `format` is None for weights that are never quantised (bf16 or fp32).
    """

    values: Tensor
    scale_bytes: float = 0
    format: LinearFormat | None = None

    @property
    def bytes(self) -> float:
        """Values and scales."""
        return float(self.values.bytes) + self.scale_bytes

    @property
    def is_plain(self) -> bool:
        """Whether values are stored and multiplied as they are."""
        return self.format is None or self.format.action == "DISABLED"

    @property
    def quantizes_activations(self) -> bool:
        """Whether the input must be quantised before the product."""
        return self.format is not None and self.format.quantizes_activations

    @property
    def quantize_operations(self) -> int:
        """Vector operations to quantise one value of the input."""
        return self.format.quantize_operations if self.format is not None else 0

    @property
    def matrix_dtype(self) -> str:
        """The rate at which the product runs."""
        return self.format.activation_dtype if self.format is not None else dtype_name(self.values)


def product_part(name: str, tokens_in: Abstract, weight: Weight, out_features: int, out_bytes: float = 2) -> Part:
    """Part of a product of (T, I) with a weight (O, I): 2·T·O·I FLOPs; input, weight, scales and output in bytes."""
    tokens, inputs = tokens_in.shape[-2], tokens_in.shape[-1]
    return Part(
        name,
        matrix_flops=2 * tokens * inputs * out_features,
        matrix_dtype=weight.matrix_dtype,
        bytes=tokens_in.bytes + weight.bytes + tokens * out_features * out_bytes,
    )


def _quantize_shapes(x_TI: Abstract, *, format: LinearFormat) -> Shapes:
    *tokens, inputs = x_TI.shape
    assert isinstance(inputs, int)
    shapes: Shapes = ((x_TI.shape, format.activation_dtype),)
    scales = format.activation_scales(inputs)
    return (*shapes, ((*tokens, scales), format.activation_scale_dtype)) if scales else shapes


def _quantize_work(call: OpCall) -> Work:
    x_TI = call.tensor(0)
    operations = call.attributes["format"].quantize_operations
    moved = x_TI.bytes + sum_bytes(call.outputs)
    return Work((Part("quantize", vector_flops=operations * x_TI.elements, bytes=moved),))


QUANTIZE = Op("quantize", "elementwise", _quantize_shapes, _quantize_work)
DYNAMIC_QUANTIZE = Op("dynamic_quantize", "elementwise", _quantize_shapes, _quantize_work)


def _linear_shapes(x_TI: Abstract, weight_OI: Abstract, *, weight: Weight, dtype: str) -> Shapes:
    return (((*x_TI.shape[:-1], weight_OI.shape[0]), dtype),)


def _linear_work(call: OpCall) -> Work:
    x_TI, weight_OI = call.tensor(0), call.tensor(1)
    out_features = weight_OI.shape[0]
    assert isinstance(out_features, int)
    out_bytes = DTYPE_BYTES[call.attributes["dtype"]]
    return Work((product_part("matmul", x_TI, call.attributes["weight"], out_features, out_bytes),))


def _linear_reference(x_TI: Tensor, weight_OI: Tensor, *, weight: Weight, dtype: str) -> tuple[Tensor]:
    return (torch.nn.functional.linear(x_TI, weight_OI),)


LINEAR = Op("linear", "matmul", _linear_shapes, _linear_work, _linear_reference)
LINEAR_QUANT = Op("linear_quant", "matmul", _linear_shapes, _linear_work)


def sum_bytes(tensors: tuple[Abstract, ...]) -> Dim:
    """Bytes of several tensors together."""
    total: Dim = 0
    for tensor in tensors:
        total = total + tensor.bytes
    return total


def quantize(x_TI: Tensor, weight: Weight) -> Tensor:
    """x in the number format that `weight` multiplies; x itself where it already is, or needs no quantisation.

    scale_t = max_i |x_ti| / largest value (dynamic) or a stored scale (static); q_ti = round(x_ti / scale_t).
    """
    if not weight.quantizes_activations or dtype_name(x_TI) == weight.matrix_dtype:
        return x_TI
    assert weight.format is not None
    op = DYNAMIC_QUANTIZE if weight.format.dynamic else QUANTIZE
    return op(x_TI, format=weight.format)[0]


def linear(x_TI: Tensor, weight: Weight, *, dtype: str = "bf16") -> Tensor:
    """y_to = sum_i x_ti · W_oi, quantising x first where the weight's format asks for it.

    x_TI: (T, I). Returns (T, O) of `dtype`.
    """
    x_TI = quantize(x_TI, weight)
    op = LINEAR if weight.is_plain else LINEAR_QUANT
    return op(x_TI, weight.values, weight=weight, dtype=dtype)[0]
