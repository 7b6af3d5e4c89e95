"""Mixture of experts: router, token permutation, grouped products and the weighted sum.

Axes: T tokens, D hidden, E routed experts, K experts per token, R rows (token copies) on this rank, I expert width.
"""

from __future__ import annotations

import lazy_loader as lazy

from castoff.dims import Dim, minimum
from castoff.ops.expert_load import ExpertLayer
from castoff.ops.linear import Activations, Quantized, Weight, parts_of, sum_bytes
from castoff.ops.program import Abstract, Op, OpCall, Shapes, Tensor, dtype_name, torch_dtype
from castoff.ops.quantization import quantize_activations, quantized_product
from castoff.ops.work import DTYPE_BYTES, Kernel, Part, Work
from castoff.spec.model import MoeSpec
from castoff.spec.quant import LinearFormat

torch = lazy.load("torch")

# SiLU (4) and the product with the up half.
SWIGLU_OPERATIONS = 5


def expected_experts_touched(tokens: Dim, experts: int, experts_per_token: int, local_experts: int) -> Dim:
    """Experts of this rank that get a row when `tokens` tokens choose uniformly: E_local·(1 − (1 − k/E)^t)."""
    return local_experts * (1 - (1 - experts_per_token / experts) ** tokens)


def _stream(part: str, moved: Dim) -> Kernel:
    """A small kernel that streams what it moves, under the name of its part."""
    return Kernel(part, (part,), {"bytes": moved})


def _gate_shapes(x_TD: Abstract, *_: Abstract, experts_per_token: int, appended: int, **__: object) -> Shapes:
    chosen = (x_TD.shape[0], experts_per_token + appended)
    return ((chosen, "fp32"), (chosen, "int32"))


def _gate_work(call: OpCall) -> Work:
    x_TD, gate_ED = call.tensor(0), call.tensor(1)
    tokens, experts = x_TD.shape[0], gate_ED.shape[0]
    chosen = call.attributes["experts_per_token"]
    # Sigmoid (3), bias (1), one pass of comparisons per chosen expert; grouped routers sum two scores per group more.
    per_token = experts * (4 + chosen) + 3 * chosen + (2 * experts if call.attributes["groups"] > 1 else 0)
    # Stacks on GPUs multiply in bf16 and add up in fp32.
    router = Kernel("router", ("router",), {"m": tokens, "n": experts, "k": x_TD.shape[1]}, general="matmul_bf16")
    return Work(
        (
            Part("router", 2 * tokens * x_TD.shape[1] * experts, gate_ED.dtype, bytes=x_TD.bytes + gate_ED.bytes),
            Part("select", vector_flops=tokens * per_token, bytes=sum_bytes(call.outputs)),
        ),
        kernels=(router,),
    )


def _gate_reference(
    x_TD: Tensor, gate_ED: Tensor, bias_E: Tensor, *, experts_per_token: int, groups: int, chosen_groups: int,
    scale: float, normalize: bool, appended: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert not appended, "external shared experts are cast only"
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    scores_TE = torch.nn.functional.linear(x_TD.to(wide), gate_ED.to(wide)).sigmoid()
    choice_TE = scores_TE + bias_E.to(wide)
    if groups > 1:
        by_group = choice_TE.view(choice_TE.shape[0], groups, -1)
        group_scores = by_group.topk(2, dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(1, _largest(group_scores, chosen_groups), True)
        choice_TE = by_group.masked_fill(~kept[..., None], -torch.inf).view_as(choice_TE)
    experts_TK = _largest(choice_TE, experts_per_token)
    weights_TK = scores_TE.gather(1, experts_TK)
    if normalize:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_TK * scale, experts_TK.to(torch.int32)


def _largest(scores_TX: Tensor, count: int) -> Tensor:
    """Places of the largest scores; by a stable sort, so that among equals the lowest comes first on every device."""
    return scores_TX.sort(dim=-1, descending=True, stable=True).indices[..., :count]


MOE_GATE = Op("moe_gate", "moe_routing", _gate_shapes, _gate_work, _gate_reference, outputs=2)


def moe_gate(x_TD: Tensor, gate: Weight, bias: Weight, router: MoeSpec, *, appended: int = 0) -> tuple[Tensor, Tensor]:
    """Experts of each token and their weights.

        score = sigmoid(x · gateᵀ) in fp32; choose by score + bias, ties to the lowest id, within the best groups only
        (a group scores the sum of its two best); weights = chosen scores / their sum · routed_scaling_factor

    appended: shared experts that every token takes beside, with weight 1, counted in K.
    Returns weights fp32 (T, K) and expert ids int32 (T, K).
    """
    weights_TK, experts_TK = MOE_GATE(
        x_TD, gate.values, bias.values,
        experts_per_token=router.num_experts_per_tok, groups=router.n_group, chosen_groups=router.topk_group,
        scale=router.routed_scaling_factor, normalize=router.norm_topk_prob, appended=appended,
    )  # fmt: skip
    return weights_TK, experts_TK


def _permute_shapes(x_TD: Abstract, experts_TK: Abstract, *, num_experts: int) -> Shapes:
    rows = x_TD.shape[0] * experts_TK.shape[1]
    return (((rows, x_TD.shape[1]), dtype_name(x_TD)), ((rows,), "int32"), ((num_experts,), "int32"))


def _permute_work(call: OpCall) -> Work:
    x_TD, experts_TK = call.tensor(0), call.tensor(1)
    moved = x_TD.bytes + experts_TK.bytes + sum_bytes(call.outputs)
    return Work((Part("permute", vector_flops=experts_TK.elements, bytes=moved),), kernels=(_stream("permute", moved),))


def _permute_reference(x_TD: Tensor, experts_TK: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    experts_R = experts_TK.reshape(-1).long()
    order_R = experts_R.argsort(stable=True)
    counts_E = torch.zeros(num_experts, dtype=torch.int32, device=x_TD.device)
    counts_E.scatter_add_(0, experts_R, torch.ones_like(experts_R, dtype=torch.int32))
    return x_TD[order_R // experts_TK.shape[1]], order_R.to(torch.int32), counts_E


MOE_PERMUTE = Op("moe_permute", "moe_routing", _permute_shapes, _permute_work, _permute_reference, outputs=3)


def moe_permute(x_TD: Tensor, experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of the tokens in expert order, (T·K, D); which copy t·K + k each is; how many each expert gets, (E,)."""
    rows_RD, order_R, counts_E = MOE_PERMUTE(x_TD, experts_TK, num_experts=num_experts)
    return rows_RD, order_R, counts_E


def _unpermute_shapes(rows_RD: Abstract, weights_TK: Abstract, order_R: Abstract) -> Shapes:
    return (((weights_TK.shape[0], rows_RD.shape[1]), dtype_name(rows_RD)),)


def _unpermute_work(call: OpCall) -> Work:
    rows_RD, weights_TK, order_R = call.tensor(0), call.tensor(1), call.tensor(2)
    moved = rows_RD.bytes + weights_TK.bytes + order_R.bytes + call.outputs[0].bytes
    return Work(
        (Part("weighted_sum", vector_flops=2 * rows_RD.elements, bytes=moved),),
        kernels=(_stream("weighted_sum", moved),),
    )


def _unpermute_reference(rows_RD: Tensor, weights_TK: Tensor, order_R: Tensor) -> tuple[Tensor]:
    weighted_RD = rows_RD * weights_TK.reshape(-1)[order_R, None]
    in_token_order = torch.empty_like(weighted_RD).index_copy_(0, order_R.long(), weighted_RD)
    summed_TD = in_token_order.view(*weights_TK.shape, -1).sum(dim=1)
    return (summed_TD.to(rows_RD.dtype),)


MOE_UNPERMUTE = Op("moe_unpermute", "moe_routing", _unpermute_shapes, _unpermute_work, _unpermute_reference)


def moe_unpermute(rows_RD: Tensor, weights_TK: Tensor, order_R: Tensor) -> Tensor:
    """y_t = sum_k weight_tk · row of token t at its k-th expert: (T, D). order_R is `moe_permute`'s."""
    return MOE_UNPERMUTE(rows_RD, weights_TK, order_R)[0]


def _grouped_shapes(
    rows_RI: Abstract,
    weight_EOI: Abstract,
    counts_E: Abstract,
    *,
    touched: Dim | None,
    layer: ExpertLayer | None = None,
) -> Shapes:
    return (((rows_RI.shape[0], weight_EOI.shape[1]), dtype_name(rows_RI)),)


def _grouped_swiglu_shapes(
    rows_RI: Abstract,
    weight_EOI: Abstract,
    counts_E: Abstract,
    *,
    touched: Dim | None,
    layer: ExpertLayer | None = None,
) -> Shapes:
    return (((rows_RI.shape[0], _swiglu_width(weight_EOI)), dtype_name(rows_RI)),)


def _grouped_quant_shapes(
    rows_RI: Abstract, weight_EOI: Abstract, counts_E: Abstract, rows_scales: Abstract | None,
    weight_scales: Abstract, *, format: LinearFormat, dtype: str, touched: Dim | None,
    layer: ExpertLayer | None = None,
) -> Shapes:  # fmt: skip
    return (((rows_RI.shape[0], weight_EOI.shape[1]), dtype),)


def _grouped_quant_swiglu_shapes(
    rows_RI: Abstract, weight_EOI: Abstract, counts_E: Abstract, rows_scales: Abstract | None,
    weight_scales: Abstract, *, format: LinearFormat, dtype: str, touched: Dim | None,
    layer: ExpertLayer | None = None,
) -> Shapes:  # fmt: skip
    shape = (rows_RI.shape[0], _swiglu_width(weight_EOI))
    if not format.quantizes_activations:
        return ((shape, dtype),)
    values = (shape, format.activation_dtype)
    scales = format.activation_scales(shape[1])
    return (values, ((shape[0], scales), format.scale_dtype)) if scales else (values,)


def _swiglu_width(weight_EOI: Abstract) -> int:
    doubled = weight_EOI.shape[-2]
    assert isinstance(doubled, int)
    return doubled // 2


def grouped_part(rows_RI: Abstract, rows_scales: Abstract | None, weight: Weight, touched: Dim, out_bytes: Dim) -> Part:
    """Part of a grouped product; only the experts that got rows are read."""
    experts, out_features, inputs = weight.values.shape
    read = weight.bytes / experts * minimum(touched, experts)
    return Part(
        "grouped_matmul",
        2 * rows_RI.shape[0] * inputs * out_features,
        weight.matrix_dtype,
        bytes=sum_bytes((rows_RI, rows_scales)) + read + out_bytes,
    )


def _operands(call: OpCall) -> tuple[Abstract | None, Weight]:
    """Scales of the rows and the weight of a recorded grouped product."""
    form = call.attributes.get("format")
    if form is None:
        return None, Weight(call.tensor(1))
    return call.inputs[3], Weight(call.tensor(1), call.tensor(4), form)


def _grouped_work(call: OpCall) -> Work:
    scales, weight = _operands(call)
    part = grouped_part(call.tensor(0), scales, weight, call.attributes["touched"], call.outputs[0].bytes)
    return Work((part,), kernels=(_grouped_kernel(call, weight),))


def _grouped_kernel(call: OpCall, weight: Weight) -> Kernel:
    """Kernels are tuned per layer: those that were measured for it go before those that were for others."""
    experts, out_features, inputs = weight.values.shape
    layer: ExpertLayer | None = call.attributes.get("layer")
    sizes: dict[str, Dim] = {
        "rows": call.tensor(0).shape[0], "touched": minimum(call.attributes["touched"], experts),
        "n": out_features, "k": inputs, "skew": 1.0 + (layer.skew if layer else 0.0),
    }  # fmt: skip
    general = f"grouped_{weight.format_name}"
    own = f"{general}_{layer.experts}x{layer.hidden_size}" if layer else general
    return Kernel(own, ("grouped_matmul",), sizes, general)


def _grouped_swiglu_work(call: OpCall) -> Work:
    scales, weight = _operands(call)
    part = grouped_part(call.tensor(0), scales, weight, call.attributes["touched"], sum_bytes(call.outputs))
    operations = SWIGLU_OPERATIONS + weight.quantize_operations
    swiglu_part = Part("swiglu", vector_flops=operations * call.outputs[0].elements)
    # A stack that does not fuse them writes both halves, reads them again, and writes their product.
    halves = 2 * DTYPE_BYTES["bf16"] * call.outputs[0].elements
    return Work(
        (part, swiglu_part),
        kernels=(_grouped_kernel(call, weight), _stream("swiglu", halves + sum_bytes(call.outputs))),
    )


def _grouped_reference(
    rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, *, touched: Dim | None, layer: ExpertLayer | None = None
) -> tuple[Tensor]:
    if rows_RI.is_cuda and torch.cuda.is_current_stream_capturing():
        return (_grouped_on_device(rows_RI, weight_EOI, counts_E),)
    pieces = rows_RI.split(counts_E.tolist())
    products = [piece @ weight_EOI[expert].T for expert, piece in enumerate(pieces) if piece.shape[0]]
    return (torch.cat(products) if products else rows_RI.new_empty(0, weight_EOI.shape[1]),)


def _grouped_on_device(rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """The same without counts on the host, for graphs."""
    ends_E = counts_E.cumsum(0)
    if rows_RI.dtype == torch.bfloat16:
        return torch.nn.functional.grouped_mm(rows_RI, weight_EOI.mT, offs=ends_E.to(torch.int32))
    # A copy of the weight for each row: for the few rows of a decode step, and for checks in higher precision.
    rows = torch.arange(rows_RI.shape[0], device=rows_RI.device)
    expert_R = torch.searchsorted(ends_E, rows, right=True).clamp(max=weight_EOI.shape[0] - 1)
    return torch.bmm(rows_RI[:, None], weight_EOI[expert_R].mT)[:, 0]


def _grouped_swiglu_reference(
    rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, *, touched: Dim | None, layer: ExpertLayer | None = None
) -> tuple[Tensor]:
    return _swiglu_reference(*_grouped_reference(rows_RI, weight_EOI, counts_E, touched=touched))


def _grouped_quant_reference(
    rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, rows_scales: Tensor | None, weight_scales: Tensor,
    *, format: LinearFormat, dtype: str, touched: Dim | None,
    layer: ExpertLayer | None = None,
) -> tuple[Tensor]:  # fmt: skip
    products, start = [rows_RI.new_empty(0, weight_EOI.shape[1], dtype=torch_dtype(dtype))], 0
    for expert, count in enumerate(counts_E.tolist()):
        if count:
            own = slice(start, start + count)
            scales = None if rows_scales is None else rows_scales[own]
            weight = (weight_EOI[expert], weight_scales[expert])
            products.append(quantized_product(rows_RI[own], scales, *weight, format, dtype))
            start += count
    return (torch.cat(products),)


def _grouped_quant_swiglu_reference(
    rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, rows_scales: Tensor | None, weight_scales: Tensor,
    *, format: LinearFormat, dtype: str, touched: Dim | None,
    layer: ExpertLayer | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    (hidden_R2I,) = _grouped_quant_reference(
        rows_RI, weight_EOI, counts_E, rows_scales, weight_scales, format=format, dtype=dtype, touched=touched
    )
    (hidden_RI,) = _swiglu_reference(hidden_R2I)
    return quantize_activations(hidden_RI, format) if format.quantizes_activations else (hidden_RI,)


def _swiglu_reference(x_T2I: Tensor) -> tuple[Tensor]:
    gate, up = x_T2I.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up,)


GROUPED_MATMUL = Op("grouped_matmul", "grouped_matmul", _grouped_shapes, _grouped_work, _grouped_reference, opaque=True)
GROUPED_MATMUL_QUANT = Op(
    "grouped_matmul_quant",
    "grouped_matmul",
    _grouped_quant_shapes,
    _grouped_work,
    _grouped_quant_reference,
    opaque=True,
)
GROUPED_MATMUL_SWIGLU = Op(
    "grouped_matmul_swiglu",
    "grouped_matmul",
    _grouped_swiglu_shapes,
    _grouped_swiglu_work,
    _grouped_swiglu_reference,
    opaque=True,
)
GROUPED_MATMUL_QUANT_SWIGLU = Op(
    "grouped_matmul_quant_swiglu", "grouped_matmul", _grouped_quant_swiglu_shapes, _grouped_swiglu_work,
    _grouped_quant_swiglu_reference, outputs=2, opaque=True,
)  # fmt: skip


def grouped_matmul(
    rows_RI: Activations, weight: Weight, counts_E: Tensor, touched: Dim | None, layer: ExpertLayer | None = None
) -> Tensor:
    """Rows of each expert times that expert's weight (E, O, I): (R, O).

    counts_E: rows of each expert, which lie in expert order. touched: experts that are read, and layer: what the
    product is part of, for the cast alone.
    """
    if weight.is_plain:
        return GROUPED_MATMUL(rows_RI, weight.values, counts_E, touched=touched, layer=layer)[0]
    return _call_quantized(GROUPED_MATMUL_QUANT, rows_RI, weight, counts_E, touched, layer)[0]


def grouped_matmul_swiglu(
    rows_RI: Activations, weight: Weight, counts_E: Tensor, touched: Dim | None, layer: ExpertLayer | None = None
) -> Activations:
    """grouped_matmul with (gate | up) weights and SwiGLU in one kernel; the result is in the weight's input format."""
    if weight.is_plain:
        return GROUPED_MATMUL_SWIGLU(rows_RI, weight.values, counts_E, touched=touched, layer=layer)[0]
    values, *scales = _call_quantized(GROUPED_MATMUL_QUANT_SWIGLU, rows_RI, weight, counts_E, touched, layer)
    if not weight.quantizes_activations:
        return values
    return Quantized(values, scales[0] if scales else None, parts_of(rows_RI)[2])


def _call_quantized(
    op: Op,
    rows_RI: Activations,
    weight: Weight,
    counts_E: Tensor,
    touched: Dim | None,
    layer: ExpertLayer | None,
) -> tuple[Tensor, ...]:
    values, scales, dtype = parts_of(rows_RI)
    return op(
        values,
        weight.values,
        counts_E,
        scales,
        weight.scales,
        format=weight.format,
        dtype=dtype,
        touched=touched,
        layer=layer,
    )


def _swiglu_shapes(x_T2I: Abstract) -> Shapes:
    *tokens, doubled = x_T2I.shape
    return (((*tokens, doubled // 2), dtype_name(x_T2I)),)


def _swiglu_work(call: OpCall) -> Work:
    x_T2I, y_TI = call.tensor(0), call.outputs[0]
    moved = x_T2I.bytes + y_TI.bytes
    return Work(
        (Part("swiglu", vector_flops=SWIGLU_OPERATIONS * y_TI.elements, bytes=moved),),
        kernels=(_stream("swiglu", moved),),
    )


SWIGLU = Op("swiglu", "elementwise", _swiglu_shapes, _swiglu_work, _swiglu_reference)


def swiglu(x_T2I: Tensor) -> Tensor:
    """silu(gate) · up, where x is (gate | up): (T, I)."""
    return SWIGLU(x_T2I)[0]
