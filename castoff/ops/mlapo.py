"""mlapo: the part of multi-head latent attention before the scores, as one op.

Axes: T tokens, D hidden, H heads of this rank, Q q_lora_rank, R kv_lora_rank, N qk_nope, P qk_rope.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from castoff.dims import Dim
from castoff.ops.linear import Weight
from castoff.ops.program import Abstract, Op, OpCall, Shapes
from castoff.ops.work import Part, Work

# cos·a − sin·b per rotated value.
ROPE_OPERATIONS = 3


@dataclass(frozen=True, slots=True)
class MlapoWeights:
    """q_b is the whole q projection (H·(N+P), D) where the model has no q_lora_rank; q_a and its norm are then None."""

    q_a: Weight | None
    q_a_norm: Weight | None
    q_b: Weight
    kv_a: Weight
    kv_a_norm: Weight


@dataclass(frozen=True, slots=True)
class MlapoSizes:
    """Sizes on this rank; cache_row_bytes is one latent row as stored."""

    heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    kv_lora_rank: int
    q_lora_rank: int
    cache_row_bytes: int


def _shapes(hidden_TD: Abstract, *_: Abstract | None, weights: MlapoWeights, sizes: MlapoSizes, eps: float) -> Shapes:
    tokens = hidden_TD.shape[0]
    head_dim = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
    return (
        ((tokens, sizes.heads, head_dim), "bf16"),
        ((tokens, sizes.kv_lora_rank), "bf16"),
        ((tokens, sizes.qk_rope_head_dim), "bf16"),
        ((tokens, sizes.q_lora_rank), "bf16"),
    )


def _work(call: OpCall) -> Work:
    weights: MlapoWeights = call.attributes["weights"]
    sizes: MlapoSizes = call.attributes["sizes"]
    hidden_TD, cos_TP = call.tensor(0), call.tensor(1)
    q_states, kv_c_normed, k_rot, qa_normed = call.outputs
    tokens = hidden_TD.shape[0]
    parts = []
    if weights.q_a is not None and weights.q_a_norm is not None:
        parts += [
            _product("q_a_proj", hidden_TD, weights.q_a),
            Part("q_a_norm", vector_flops=4 * qa_normed.elements, bytes=weights.q_a_norm.bytes + qa_normed.bytes),
        ]
    q_input = hidden_TD if weights.q_a is None else qa_normed
    parts += [
        _product("q_b_proj", q_input, weights.q_b, reads_input=weights.q_a is None),
        _product("kv_a_proj", hidden_TD, weights.kv_a, reads_input=False),
        Part(
            "kv_a_norm",
            vector_flops=4 * kv_c_normed.elements,
            bytes=weights.kv_a_norm.bytes + kv_c_normed.bytes + k_rot.bytes,
        ),
        Part(
            "rope",
            vector_flops=ROPE_OPERATIONS * tokens * (sizes.heads + 1) * sizes.qk_rope_head_dim,
            bytes=2 * cos_TP.bytes,
        ),
        Part("q_states", bytes=q_states.bytes),
        Part("kv_cache_write", bytes=tokens * sizes.cache_row_bytes),
    ]
    # Each input is quantised once, whichever of its readers asks for it.
    readers = [weight for weight in (weights.q_a or weights.q_b, weights.kv_a) if weight.quantizes_activations]
    quantize = readers[0].quantize_operations * hidden_TD.elements if readers else 0
    if weights.q_a is not None:
        quantize = quantize + weights.q_b.quantize_operations * qa_normed.elements
    if isinstance(quantize, np.ndarray) or quantize:
        parts.append(Part("quantize", vector_flops=quantize))
    return Work(tuple(parts))


def _product(name: str, x_TI: Abstract, weight: Weight, *, reads_input: bool = True) -> Part:
    """A projection inside the op: its result stays on chip; its input is read once, by the first that needs it."""
    tokens, inputs = x_TI.shape[-2], x_TI.shape[-1]
    out_features = weight.values.shape[0]
    moved: Dim = weight.bytes + (x_TI.bytes if reads_input else 0)
    return Part(name, 2 * tokens * inputs * out_features, weight.matrix_dtype, bytes=moved)


MLAPO = Op("mlapo", "matmul", _shapes, _work)
MLAPO_QUANT = Op("mlapo_quant", "matmul", _shapes, _work)


def mlapo(
    hidden_TD: Abstract,
    cos_TP: Abstract,
    sin_TP: Abstract,
    slot_mapping_T: Abstract,
    kv_cache: Abstract,
    weights: MlapoWeights,
    sizes: MlapoSizes,
    eps: float,
) -> tuple[Abstract, Abstract, Abstract, Abstract]:
    """Low-rank q and kv projections, their norms, RoPE, and the write of the latent rows to the KV cache.

        qa          = rms_norm(hidden · q_aᵀ, q_a_norm, eps)
        q           = qa · q_bᵀ as (T, H, N + P), the last P rotated by position
        latent, key = split(hidden · kv_aᵀ, [R, P]);  latent = rms_norm(latent, kv_a_norm, eps);  key = rotate(key)
        kv_cache[slot_mapping] = concat(latent, key)

    Returns q_states (T, H, N+P), kv_c_normed (T, R), k_rot (T, P), qa_normed (T, Q); Q is 0 without q_lora_rank.
    Mutates kv_cache. Quantised weights make it `mlapo_quant`, which quantises its activations itself.
    """
    op = MLAPO if weights.q_b.format is None or weights.q_b.format.action == "DISABLED" else MLAPO_QUANT
    q_states, kv_c_normed, k_rot, qa_normed = op(
        hidden_TD, cos_TP, sin_TP, slot_mapping_T, kv_cache, *_weight_tensors(weights),
        weights=weights, sizes=sizes, eps=eps,
    )  # fmt: skip
    return q_states, kv_c_normed, k_rot, qa_normed


def _weight_tensors(weights: MlapoWeights) -> tuple[Abstract | None, ...]:
    ordered = (weights.q_a, weights.q_a_norm, weights.q_b, weights.kv_a, weights.kv_a_norm)
    return tuple(None if weight is None else weight.values for weight in ordered)
