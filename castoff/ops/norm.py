"""RMSNorm, alone and fused with the residual addition and with dynamic quantisation.

Axes: T tokens, D hidden. `eps` may be any positive number; it changes no shape and no work.
"""

from __future__ import annotations

import lazy_loader as lazy

from castoff.ops.linear import Quantized, Weight, sum_bytes
from castoff.ops.program import Abstract, Op, OpCall, Shapes, Tensor, dtype_name
from castoff.ops.quantization import quantize_activations
from castoff.ops.work import Part, Work
from castoff.spec.quant import LinearFormat

torch = lazy.load("torch")

# Square, sum, scale and weight per value; the addition and the quantisation come on top.
_NORM_OPERATIONS = 4


def _work(call: OpCall) -> Work:
    x_TD = call.tensor(0)
    added = any(value is not None and value.kind == "activation" for value in call.inputs[1:])
    form: LinearFormat | None = call.attributes.get("format")
    operations = _NORM_OPERATIONS + (1 if added else 0) + (form.quantize_operations if form else 0)
    moved = sum_bytes(call.outputs) + sum_bytes(call.inputs)
    return Work((Part("norm", vector_flops=operations * x_TD.elements, bytes=moved),))


def _normed(x_TD: Abstract, *_: Abstract, eps: float) -> Shapes:
    return ((tuple(x_TD.shape), dtype_name(x_TD)),)


def _normed_and_residual(x_TD: Abstract, *_: Abstract, eps: float) -> Shapes:
    return ((tuple(x_TD.shape), dtype_name(x_TD)),) * 2


def _quantized(x_TD: Abstract, *_: Abstract, eps: float, format: LinearFormat) -> Shapes:
    *tokens, width = x_TD.shape
    assert isinstance(width, int)
    return (
        (tuple(x_TD.shape), format.activation_dtype),
        ((*tokens, format.activation_scales(width)), format.scale_dtype),
    )


def _quantized_and_residual(x_TD: Abstract, *_: Abstract, eps: float, format: LinearFormat) -> Shapes:
    return (*_quantized(x_TD, eps=eps, format=format), (tuple(x_TD.shape), dtype_name(x_TD)))


def _add_shapes(x_TD: Abstract, y_TD: Abstract) -> Shapes:
    return ((tuple(x_TD.shape), dtype_name(x_TD)),)


def _add_work(call: OpCall) -> Work:
    x_TD = call.tensor(0)
    return Work((Part("add", vector_flops=x_TD.elements, bytes=3 * x_TD.bytes),))


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, *, eps: float) -> tuple[Tensor]:
    """The definition, at no less than fp32; the weight multiplies in x's own dtype, as in Hugging Face's models."""
    wide = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight_D * normed.to(x_TD.dtype),)


def _add_rms_norm_reference(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, *, eps: float) -> tuple[Tensor]:
    return rms_norm_reference(x_TD + residual_TD, weight_D, eps=eps)


def _add_rms_norm2_reference(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    sum_TD = x_TD + residual_TD
    return (*rms_norm_reference(sum_TD, weight_D, eps=eps), sum_TD)


def _rms_norm_quant_reference(
    x_TD: Tensor, weight_D: Tensor, *, eps: float, format: LinearFormat
) -> tuple[Tensor, Tensor]:
    return quantize_activations(*rms_norm_reference(x_TD, weight_D, eps=eps), format)


def _add_rms_norm_quant_reference(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, *, eps: float, format: LinearFormat
) -> tuple[Tensor, Tensor]:
    return _rms_norm_quant_reference(x_TD + residual_TD, weight_D, eps=eps, format=format)


def _add_rms_norm2_quant_reference(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, *, eps: float, format: LinearFormat
) -> tuple[Tensor, Tensor, Tensor]:
    sum_TD = x_TD + residual_TD
    return (*_rms_norm_quant_reference(sum_TD, weight_D, eps=eps, format=format), sum_TD)


def _add_reference(x_TD: Tensor, y_TD: Tensor) -> tuple[Tensor]:
    return (x_TD + y_TD,)


RMS_NORM = Op("rms_norm", "norm", _normed, _work, rms_norm_reference)
ADD_RMS_NORM = Op("add_rms_norm", "norm", _normed, _work, _add_rms_norm_reference)
ADD_RMS_NORM2 = Op("add_rms_norm2", "norm", _normed_and_residual, _work, _add_rms_norm2_reference, outputs=2)
RMS_NORM_DYNAMIC_QUANT = Op("rms_norm_dynamic_quant", "norm", _quantized, _work, _rms_norm_quant_reference, outputs=2)
ADD_RMS_NORM_DYNAMIC_QUANT = Op(
    "add_rms_norm_dynamic_quant", "norm", _quantized, _work, _add_rms_norm_quant_reference, outputs=2
)
ADD_RMS_NORM2_DYNAMIC_QUANT = Op(
    "add_rms_norm2_dynamic_quant", "norm", _quantized_and_residual, _work, _add_rms_norm2_quant_reference, outputs=3
)
ADD = Op("add", "elementwise", _add_shapes, _add_work, _add_reference)


def add(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    """x + y, elementwise."""
    return ADD(x_TD, y_TD)[0]


def rms_norm(x_TD: Tensor, weight: Weight, eps: float) -> Tensor:
    """n_td = w_d · x_td / sqrt(mean_d x_td² + eps)."""
    return RMS_NORM(x_TD, weight.values, eps=eps)[0]


def rms_norm_dynamic_quant(x_TD: Tensor, weight: Weight, eps: float, format: LinearFormat) -> Quantized:
    """rms_norm and dynamic quantisation of its result, in one kernel."""
    values, scales = RMS_NORM_DYNAMIC_QUANT(x_TD, weight.values, eps=eps, format=format)
    return Quantized(values, scales, dtype_name(x_TD))


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight: Weight, eps: float) -> Tensor:
    """rms_norm(x + residual); the sum itself is not kept."""
    return ADD_RMS_NORM(x_TD, residual_TD, weight.values, eps=eps)[0]


def add_rms_norm_dynamic_quant(
    x_TD: Tensor, residual_TD: Tensor, weight: Weight, eps: float, format: LinearFormat
) -> Quantized:
    """add_rms_norm and dynamic quantisation of its result, in one kernel."""
    values, scales = ADD_RMS_NORM_DYNAMIC_QUANT(x_TD, residual_TD, weight.values, eps=eps, format=format)
    return Quantized(values, scales, dtype_name(x_TD))


def add_rms_norm2(x_TD: Tensor, residual_TD: Tensor, weight: Weight, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    normed_TD, sum_TD = ADD_RMS_NORM2(x_TD, residual_TD, weight.values, eps=eps)
    return normed_TD, sum_TD


def add_rms_norm2_dynamic_quant(
    x_TD: Tensor, residual_TD: Tensor, weight: Weight, eps: float, format: LinearFormat
) -> tuple[Quantized, Tensor]:
    """(quantised rms_norm(x + residual), x + residual), in one kernel."""
    values, scales, sum_TD = ADD_RMS_NORM2_DYNAMIC_QUANT(x_TD, residual_TD, weight.values, eps=eps, format=format)
    return Quantized(values, scales, dtype_name(x_TD)), sum_TD
