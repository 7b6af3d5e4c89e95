"""Mixture of experts: router, token permutation, grouped products and the weighted sum.

Axes: T tokens, D hidden, E routed experts, K experts per token, R rows (token copies) on this rank, I expert width.
"""

from __future__ import annotations

from castoff.dims import Dim, minimum
from castoff.ops.linear import Weight, sum_bytes
from castoff.ops.program import Abstract, Op, OpCall, Shapes
from castoff.ops.work import Part, Work

# SiLU (4) and the product with the up half.
SWIGLU_OPERATIONS = 5


def expected_experts_touched(tokens: Dim, experts: int, experts_per_token: int, local_experts: int) -> Dim:
    """Experts of this rank that get a row when `tokens` tokens choose uniformly: E_local·(1 − (1 − k/E)^t)."""
    return local_experts * (1 - (1 - experts_per_token / experts) ** tokens)


def _gate_shapes(x_TD: Abstract, *_: Abstract, experts_per_token: int, groups: int, appended: int) -> Shapes:
    chosen = (x_TD.shape[0], experts_per_token + appended)
    return ((chosen, "fp32"), (chosen, "int32"))


def _gate_work(call: OpCall) -> Work:
    x_TD, gate_ED = call.tensor(0), call.tensor(1)
    tokens, experts = x_TD.shape[0], gate_ED.shape[0]
    chosen = call.attributes["experts_per_token"]
    # Sigmoid (3), bias (1), one pass of comparisons per chosen expert; grouped routers sum two scores per group more.
    per_token = experts * (4 + chosen) + 3 * chosen + (2 * experts if call.attributes["groups"] > 1 else 0)
    return Work(
        (
            Part("router", 2 * tokens * x_TD.shape[1] * experts, gate_ED.dtype, bytes=x_TD.bytes + gate_ED.bytes),
            Part("select", vector_flops=tokens * per_token, bytes=sum_bytes(call.outputs)),
        )
    )


MOE_GATE = Op("moe_gate", "moe_routing", _gate_shapes, _gate_work)


def moe_gate(
    x_TD: Abstract, gate: Weight, bias: Weight, *, experts_per_token: int, groups: int, appended: int = 0
) -> tuple[Abstract, Abstract]:
    """Experts of each token and their weights.

        score = sigmoid(x · gateᵀ) in fp32; choose by score + bias, within the best groups only
        (a group scores the sum of its two best); weights = chosen scores / their sum · routed_scaling_factor

    appended: shared experts that every token takes beside, with weight 1, counted in K.
    Returns weights fp32 (T, K) and expert ids int32 (T, K).
    """
    weights_TK, experts_TK = MOE_GATE(
        x_TD, gate.values, bias.values, experts_per_token=experts_per_token, groups=groups, appended=appended
    )
    return weights_TK, experts_TK


def _permute_shapes(x_TD: Abstract, experts_TK: Abstract) -> Shapes:
    return (((x_TD.shape[0] * experts_TK.shape[1], x_TD.shape[1]), x_TD.dtype),)


def _permute_work(call: OpCall) -> Work:
    x_TD, experts_TK = call.tensor(0), call.tensor(1)
    moved = x_TD.bytes + experts_TK.bytes + call.outputs[0].bytes
    return Work((Part("permute", vector_flops=experts_TK.elements, bytes=moved),))


MOE_PERMUTE = Op("moe_permute", "moe_routing", _permute_shapes, _permute_work)


def moe_permute(x_TD: Abstract, experts_TK: Abstract) -> Abstract:
    """Copies of the tokens in expert order: (T·K, D)."""
    return MOE_PERMUTE(x_TD, experts_TK)[0]


def _unpermute_shapes(rows_RD: Abstract, weights_TK: Abstract) -> Shapes:
    return (((weights_TK.shape[0], rows_RD.shape[1]), "bf16"),)


def _unpermute_work(call: OpCall) -> Work:
    rows_RD, weights_TK = call.tensor(0), call.tensor(1)
    moved = rows_RD.bytes + weights_TK.bytes + call.outputs[0].bytes
    return Work((Part("weighted_sum", vector_flops=2 * rows_RD.elements, bytes=moved),))


MOE_UNPERMUTE = Op("moe_unpermute", "moe_routing", _unpermute_shapes, _unpermute_work)


def moe_unpermute(rows_RD: Abstract, weights_TK: Abstract) -> Abstract:
    """y_t = sum_k weight_tk · row of token t at its k-th expert: (T, D)."""
    return MOE_UNPERMUTE(rows_RD, weights_TK)[0]


def _grouped_shapes(rows_RI: Abstract, weight_EOI: Abstract, *, weight: Weight, touched: Dim) -> Shapes:
    return (((rows_RI.shape[0], weight_EOI.shape[1]), "bf16"),)


def _swiglu_width(weight_EOI: Abstract) -> int:
    doubled = weight_EOI.shape[-2]
    assert isinstance(doubled, int)
    return doubled // 2


def _grouped_swiglu_shapes(rows_RI: Abstract, weight_EOI: Abstract, *, weight: Weight, touched: Dim) -> Shapes:
    return (((rows_RI.shape[0], _swiglu_width(weight_EOI)), weight.matrix_dtype),)


def grouped_part(rows_RI: Abstract, weight: Weight, touched: Dim, out_bytes: Dim) -> Part:
    """Part of a grouped product; only the experts that got rows are read."""
    experts, out_features, inputs = weight.values.shape
    read = weight.bytes / experts * minimum(touched, experts)
    return Part(
        "grouped_matmul",
        2 * rows_RI.shape[0] * inputs * out_features,
        weight.matrix_dtype,
        bytes=rows_RI.bytes + read + out_bytes,
    )


def _grouped_work(call: OpCall) -> Work:
    weight, touched = call.attributes["weight"], call.attributes["touched"]
    return Work((grouped_part(call.tensor(0), weight, touched, call.outputs[0].bytes),))


def _grouped_swiglu_work(call: OpCall) -> Work:
    weight: Weight = call.attributes["weight"]
    output = call.outputs[0]
    part = grouped_part(call.tensor(0), weight, call.attributes["touched"], output.bytes)
    operations = SWIGLU_OPERATIONS + weight.quantize_operations
    return Work((part, Part("swiglu", vector_flops=operations * output.elements)))


GROUPED_MATMUL = Op("grouped_matmul", "grouped_matmul", _grouped_shapes, _grouped_work)
GROUPED_MATMUL_QUANT = Op("grouped_matmul_quant", "grouped_matmul", _grouped_shapes, _grouped_work)
GROUPED_MATMUL_SWIGLU = Op("grouped_matmul_swiglu", "grouped_matmul", _grouped_swiglu_shapes, _grouped_swiglu_work)
GROUPED_MATMUL_QUANT_SWIGLU = Op(
    "grouped_matmul_quant_swiglu", "grouped_matmul", _grouped_swiglu_shapes, _grouped_swiglu_work
)


def _is_plain(weight: Weight) -> bool:
    return weight.format is None or weight.format.action == "DISABLED"


def grouped_matmul(rows_RI: Abstract, weight: Weight, touched: Dim) -> Abstract:
    """Rows of each expert times that expert's weight (E, O, I); `touched` experts are read. Returns bf16 (R, O)."""
    op = GROUPED_MATMUL if _is_plain(weight) else GROUPED_MATMUL_QUANT
    return op(rows_RI, weight.values, weight=weight, touched=touched)[0]


def grouped_matmul_swiglu(rows_RI: Abstract, weight: Weight, touched: Dim) -> Abstract:
    """grouped_matmul with (gate | up) weights and SwiGLU in one kernel; the result is in the weight's input format."""
    op = GROUPED_MATMUL_SWIGLU if _is_plain(weight) else GROUPED_MATMUL_QUANT_SWIGLU
    return op(rows_RI, weight.values, weight=weight, touched=touched)[0]


def _swiglu_shapes(x_T2I: Abstract) -> Shapes:
    *tokens, doubled = x_T2I.shape
    return (((*tokens, doubled // 2), "bf16"),)


def _swiglu_work(call: OpCall) -> Work:
    x_T2I, y_TI = call.tensor(0), call.outputs[0]
    return Work((Part("swiglu", vector_flops=SWIGLU_OPERATIONS * y_TI.elements, bytes=x_T2I.bytes + y_TI.bytes),))


SWIGLU = Op("swiglu", "elementwise", _swiglu_shapes, _swiglu_work)


def swiglu(x_T2I: Abstract) -> Abstract:
    """silu(gate) · up, where x is (gate | up): (T, I)."""
    return SWIGLU(x_T2I)[0]
