"""Linear layers: weights with their format, activation quantisation, and the product.

Axes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import lazy_loader as lazy

from castoff.dims import Dim
from castoff.ops.program import Abstract, Op, OpCall, Shapes, Tensor, dtype_name
from castoff.ops.quantization import quantize_activations, quantized_product
from castoff.ops.work import DTYPE_BYTES, Kernel, Part, Work
from castoff.spec.quant import LinearFormat

torch = lazy.load("torch")


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight as it lies in memory.

    values: (..., O, I). scales: as the format has them, (..., O, 1) per output channel; None where it has none.
    format: None for weights that are never quantised (bf16 or fp32).
    """

    values: Tensor
    scales: Tensor | None = None
    format: LinearFormat | None = None

    @property
    def bytes(self) -> float:
        """Values and scales, of an abstract weight."""
        return float(self.values.bytes) + (float(self.scales.bytes) if self.scales is not None else 0)

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
    def format_name(self) -> str:
        """What kernels that multiply it are called after."""
        return dtype_name(self.values) if self.format is None or self.is_plain else self.format.name

    @property
    def matrix_dtype(self) -> str:
        """The rate at which the product runs."""
        return self.format.activation_dtype if self.format is not None else dtype_name(self.values)


@dataclass(frozen=True, slots=True)
class Quantized:
    """Activations in a number format: values (..., I), the scales found for them (None where those are stored), and
    the dtype that they had before, in which products of them come out."""

    values: Tensor
    scales: Tensor | None
    dtype: str

    @property
    def shape(self) -> tuple[Dim, ...]:
        """Shape of the values."""
        return tuple(self.values.shape)


Activations = Tensor | Quantized
"""What a product takes: a tensor, or values that are quantised already."""


def product_part(
    name: str, x_TI: Abstract, x_scales: Abstract | None, weight: Weight, out_features: Dim, out_bytes: float = 2
) -> Part:
    """Part of a product of (T, I) with a weight (O, I): 2·T·O·I FLOPs; input, weight, scales and output in bytes."""
    tokens, inputs = x_TI.shape[-2], x_TI.shape[-1]
    return Part(
        name,
        matrix_flops=2 * tokens * inputs * out_features,
        matrix_dtype=weight.matrix_dtype,
        bytes=sum_bytes((x_TI, x_scales)) + weight.bytes + tokens * out_features * out_bytes,
    )


def _quantize_shapes(x_TI: Abstract, *, format: LinearFormat) -> Shapes:
    *tokens, inputs = x_TI.shape
    assert isinstance(inputs, int)
    shapes: Shapes = ((tuple(x_TI.shape), format.activation_dtype),)
    scales = format.activation_scales(inputs)
    return (*shapes, ((*tokens, scales), format.scale_dtype)) if scales else shapes


def _quantize_work(call: OpCall) -> Work:
    x_TI = call.tensor(0)
    form: LinearFormat = call.attributes["format"]
    moved = x_TI.bytes + sum_bytes(call.outputs)
    curve = f"quantize_{form.name if form.dynamic else form.activation_dtype}"
    return Work(
        (Part("quantize", vector_flops=form.quantize_operations * x_TI.elements, bytes=moved),),
        kernels=(Kernel(curve, ("quantize",), {"bytes": moved}),),
    )


def _dynamic_quantize_reference(x_TI: Tensor, *, format: LinearFormat) -> tuple[Tensor, Tensor]:
    return quantize_activations(x_TI, format)


QUANTIZE = Op("quantize", "elementwise", _quantize_shapes, _quantize_work)
DYNAMIC_QUANTIZE = Op(
    "dynamic_quantize", "elementwise", _quantize_shapes, _quantize_work, _dynamic_quantize_reference, outputs=2
)


def _linear_shapes(x_TI: Abstract, weight_OI: Abstract) -> Shapes:
    return (((*x_TI.shape[:-1], weight_OI.shape[0]), dtype_name(x_TI)),)


def _linear_work(call: OpCall) -> Work:
    return _product_work(call, None, Weight(call.tensor(1)))


def _linear_reference(x_TI: Tensor, weight_OI: Tensor) -> tuple[Tensor]:
    return (torch.nn.functional.linear(x_TI, weight_OI),)


def _linear_quant_shapes(
    x_TI: Abstract, weight_OI: Abstract, x_scales: Abstract | None, weight_scales: Abstract,
    *, format: LinearFormat, dtype: str,
) -> Shapes:  # fmt: skip
    return (((*x_TI.shape[:-1], weight_OI.shape[0]), dtype),)


def _linear_quant_work(call: OpCall) -> Work:
    return _product_work(call, call.inputs[2], Weight(call.tensor(1), call.tensor(3), call.attributes["format"]))


def _product_work(call: OpCall, x_scales: Abstract | None, weight: Weight) -> Work:
    x_TI, out_features = call.tensor(0), weight.values.shape[0]
    out_bytes = DTYPE_BYTES[call.outputs[0].dtype]
    sizes = {"m": x_TI.elements / x_TI.shape[-1], "n": out_features, "k": x_TI.shape[-1]}
    return Work(
        (product_part("matmul", x_TI, x_scales, weight, out_features, out_bytes),),
        kernels=(Kernel(f"matmul_{weight.format_name}", ("matmul",), sizes),),
    )


def _linear_quant_reference(
    x_TI: Tensor, weight_OI: Tensor, x_scales: Tensor | None, weight_scales: Tensor,
    *, format: LinearFormat, dtype: str,
) -> tuple[Tensor]:  # fmt: skip
    return (quantized_product(x_TI, x_scales, weight_OI, weight_scales, format, dtype),)


LINEAR = Op("linear", "matmul", _linear_shapes, _linear_work, _linear_reference)
LINEAR_QUANT = Op("linear_quant", "matmul", _linear_quant_shapes, _linear_quant_work, _linear_quant_reference)


def sum_bytes(tensors: Iterable[Abstract | None]) -> Dim:
    """Bytes of several tensors together, absent ones left out."""
    total: Dim = 0
    for tensor in tensors:
        if tensor is not None:
            total = total + tensor.bytes
    return total


def quantize(x_TI: Activations, weight: Weight) -> Activations:
    """x in the number format that `weight` multiplies; x itself where it already is, or needs no quantisation.

    scale_t = max_i |x_ti| / largest value (dynamic) or a stored scale (static); q_ti = round(x_ti / scale_t).
    """
    if isinstance(x_TI, Quantized) or not weight.quantizes_activations:
        return x_TI
    assert weight.format is not None
    op = DYNAMIC_QUANTIZE if weight.format.dynamic else QUANTIZE
    values, *scales = op(x_TI, format=weight.format)
    return Quantized(values, scales[0] if scales else None, dtype_name(x_TI))


def linear(x_TI: Activations, weight: Weight) -> Tensor:
    """y_to = sum_i x_ti · W_oi, quantising x first where the weight's format asks for it.

    x_TI: (T, I). Returns (T, O) in the dtype that x has, or had before it was quantised.
    """
    if weight.is_plain:
        return LINEAR(x_TI, weight.values)[0]
    x, scales, dtype = parts_of(quantize(x_TI, weight))
    return LINEAR_QUANT(x, weight.values, scales, weight.scales, format=weight.format, dtype=dtype)[0]


def product(x_TI: Tensor, weight: Weight) -> Tensor:
    """`linear` of real tensors as a part of another op, which quantises its input itself: (T, O) in x's dtype."""
    if weight.is_plain:
        return torch.nn.functional.linear(x_TI, weight.values)
    assert weight.format is not None
    values, scales = quantize_activations(x_TI, weight.format) if weight.quantizes_activations else (x_TI, None)
    return quantized_product(values, scales, weight.values, weight.scales, weight.format, dtype_name(x_TI))


def parts_of(x: Activations) -> tuple[Tensor, Tensor | None, str]:
    """Values, scales and the dtype in which a product comes out."""
    return (x.values, x.scales, x.dtype) if isinstance(x, Quantized) else (x, None, dtype_name(x))
