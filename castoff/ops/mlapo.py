"""mlapo: the part of multi-head latent attention before the scores, as one op.

Axes: T tokens, D hidden, H heads of this rank, Q q_lora_rank, R kv_lora_rank, N qk_nope, P qk_rope.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import lazy_loader as lazy
import numpy as np

from castoff.dims import Dim
from castoff.ops.cache_rows import latent_rows
from castoff.ops.linear import Weight, product
from castoff.ops.norm import rms_norm_reference
from castoff.ops.program import Abstract, Op, OpCall, Shapes, Tensor, dtype_name
from castoff.ops.work import Kernel, Part, Work
from castoff.spec.quant import CacheFormat, LinearFormat

torch = lazy.load("torch")

# cos·a − sin·b per rotated value.
ROPE_OPERATIONS = 3


Formats = tuple[LinearFormat | None, LinearFormat | None, LinearFormat | None]


@dataclass(frozen=True, slots=True)
class MlapoWeights:
    """q_b is the whole q projection (H·(N+P), D) where the model has no q_lora_rank; q_a and its norm are then None."""

    q_a: Weight | None
    q_a_norm: Weight | None
    q_b: Weight
    kv_a: Weight
    kv_a_norm: Weight

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The weights as op inputs: values, then scales."""
        weights = (self.q_a, self.q_a_norm, self.q_b, self.kv_a, self.kv_a_norm)
        values = (None if weight is None else weight.values for weight in weights)
        return (*values, *(None if weight is None else weight.scales for weight in self.projections))

    @property
    def formats(self) -> Formats:
        """Number formats of q_a, q_b and kv_a; the norms are never quantised."""
        q_a, q_b, kv_a = self.projections
        return None if q_a is None else q_a.format, q_b.format, kv_a.format

    @property
    def projections(self) -> tuple[Weight | None, Weight, Weight]:
        """q_a, q_b and kv_a."""
        return self.q_a, self.q_b, self.kv_a


def _weights_of(tensors: tuple[Tensor | None, ...], formats: Formats) -> MlapoWeights:
    """The weights whose `tensors` these are."""
    q_a, q_a_norm, q_b, kv_a, kv_a_norm, *scales = tensors
    return MlapoWeights(
        None if q_a is None else Weight(q_a, scales[0], formats[0]),
        None if q_a_norm is None else Weight(q_a_norm),
        Weight(q_b, scales[1], formats[1]),
        Weight(kv_a, scales[2], formats[2]),
        Weight(kv_a_norm),
    )


@dataclass(frozen=True, slots=True)
class MlapoSizes:
    """Sizes on this rank, and how a latent row is stored."""

    heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    kv_lora_rank: int
    q_lora_rank: int
    cache: CacheFormat


def _shapes(
    hidden_TD: Abstract, *_: Abstract | None, formats: Formats, sizes: MlapoSizes, eps: float, mode: str = "prefill"
) -> Shapes:
    tokens, dtype = hidden_TD.shape[0], dtype_name(hidden_TD)
    head_dim = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
    return (
        ((tokens, sizes.heads, head_dim), dtype),
        ((tokens, sizes.kv_lora_rank), dtype),
        ((tokens, sizes.qk_rope_head_dim), dtype),
        ((tokens, sizes.q_lora_rank), dtype),
    )


def _work(call: OpCall) -> Work:
    weights = _weights_of(call.inputs[5:], call.attributes["formats"])
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
        Part("kv_cache_write", bytes=tokens * sizes.cache.latent_row_bytes),
    ]
    # Each input is quantised once, whichever of its readers asks for it.
    readers = [weight for weight in (weights.q_a or weights.q_b, weights.kv_a) if weight.quantizes_activations]
    quantize = readers[0].quantize_operations * hidden_TD.elements if readers else 0
    if weights.q_a is not None:
        quantize = quantize + weights.q_b.quantize_operations * qa_normed.elements
    if isinstance(quantize, np.ndarray) or quantize:
        parts.append(Part("quantize", vector_flops=quantize))
    kernel = Kernel(
        f"mlapo_{weights.q_b.format_name}_{call.attributes['mode']}",
        tuple(part.name for part in parts),
        {"tokens": tokens, **weight_sizes(weights.projections), "outputs": sizes.heads * q_states.shape[-1]},
    )
    is_uniform = len({weight.format_name for weight in weights.projections if weight is not None}) == 1
    return Work(tuple(parts), kernels=(kernel,) if is_uniform else ())


def weight_sizes(weights: Iterable[Weight | None]) -> dict[str, Dim]:
    """Sizes of kernels that multiply several weights: their elements, and bytes of each, scales included."""
    present = [weight for weight in weights if weight is not None]
    elements = sum(float(weight.values.elements) for weight in present)
    return {"elements": elements, "element_bytes": sum(weight.bytes for weight in present) / elements}


def _product(name: str, x_TI: Abstract, weight: Weight, *, reads_input: bool = True) -> Part:
    """A projection inside the op: its result stays on chip; its input is read once, by the first that needs it."""
    tokens, inputs = x_TI.shape[-2], x_TI.shape[-1]
    out_features = weight.values.shape[0]
    moved: Dim = weight.bytes + (x_TI.bytes if reads_input else 0)
    return Part(name, 2 * tokens * inputs * out_features, weight.matrix_dtype, bytes=moved)


def rotate_interleaved(x_TXP: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotate pairs (x_0, x_1), (x_2, x_3), … by the angles in the first half of cos and sin.

    x: (T, …, P). Returns the first members of all pairs, then the second ones: only products of two vectors rotated
    alike are meaningful.
    """
    cos, sin = _half_angles(x_TXP, cos_TP, sin_TP)
    first, second = x_TXP[..., 0::2], x_TXP[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotate_half_split(x_TXP: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotate pairs (x_0, x_P/2), (x_1, x_P/2+1), …; the result keeps their places."""
    cos, sin = _half_angles(x_TXP, cos_TP, sin_TP)
    first, second = x_TXP.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _half_angles(x_TXP: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> tuple[Tensor, Tensor]:
    half = cos_TP.shape[-1] // 2
    shape = (cos_TP.shape[0], *(1,) * (x_TXP.dim() - 2), half)
    return cos_TP[:, :half].reshape(shape), sin_TP[:, :half].reshape(shape)


def write_rows(cache: Tensor, slot_mapping_T: Tensor, rows_TX: Tensor) -> None:
    """Store rows at their slots; cache is (blocks, block tokens, X).

    A negative slot drops its row: it lands in the cache's last row, which no block table names.
    """
    flat = cache.view(-1, cache.shape[-1])
    slots_T = torch.where(slot_mapping_T < 0, flat.shape[0] - 1, slot_mapping_T)
    flat.index_copy_(0, slots_T, rows_TX.to(cache.dtype))


def _reference(
    hidden_TD: Tensor, cos_TP: Tensor, sin_TP: Tensor, slot_mapping_T: Tensor, kv_cache: Tensor,
    *tensors: Tensor | None, formats: Formats, sizes: MlapoSizes, eps: float, mode: str = "prefill",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    weights = _weights_of(tensors, formats)
    tokens = hidden_TD.shape[0]
    if weights.q_a is None or weights.q_a_norm is None:
        qa_TQ, q_input = hidden_TD.new_empty(tokens, 0), hidden_TD
    else:
        (qa_TQ,) = rms_norm_reference(product(hidden_TD, weights.q_a), weights.q_a_norm.values, eps=eps)
        q_input = qa_TQ
    q_THX = product(q_input, weights.q_b).view(tokens, sizes.heads, -1)
    q_nope, q_rope = q_THX.split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=-1)
    latent_TR, key_TP = product(hidden_TD, weights.kv_a).split([sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1)
    (latent_TR,) = rms_norm_reference(latent_TR, weights.kv_a_norm.values, eps=eps)
    key_TP = rotate_interleaved(key_TP, cos_TP, sin_TP)
    write_rows(kv_cache, slot_mapping_T, latent_rows(latent_TR, key_TP, sizes.cache))
    q_THX = torch.cat([q_nope, rotate_interleaved(q_rope, cos_TP, sin_TP)], dim=-1)
    return q_THX, latent_TR, key_TP, qa_TQ


MLAPO = Op("mlapo", "matmul", _shapes, _work, _reference, outputs=4, mutates=(4,))
MLAPO_QUANT = Op("mlapo_quant", "matmul", _shapes, _work, _reference, outputs=4, mutates=(4,))


def mlapo(
    hidden_TD: Tensor,
    cos_TP: Tensor,
    sin_TP: Tensor,
    slot_mapping_T: Tensor,
    kv_cache: Tensor,
    weights: MlapoWeights,
    sizes: MlapoSizes,
    eps: float,
    *,
    mode: str = "prefill",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Low-rank q and kv projections, their norms, RoPE, and the write of the latent rows to the KV cache.

        qa          = rms_norm(hidden · q_aᵀ, q_a_norm, eps)
        q           = qa · q_bᵀ as (T, H, N + P), the last P rotated by position
        latent, key = split(hidden · kv_aᵀ, [R, P]);  latent = rms_norm(latent, kv_a_norm, eps);  key = rotate(key)
        kv_cache[slot_mapping] = concat(latent, key)

    Returns q_states (T, H, N+P), kv_c_normed (T, R), k_rot (T, P), qa_normed (T, Q); Q is 0 without q_lora_rank.
    Mutates kv_cache. Quantised weights make it `mlapo_quant`, which quantises its activations itself. The mode changes
    nothing but which measured kernels price it.
    """
    op = MLAPO if weights.q_b.is_plain else MLAPO_QUANT
    q_states, kv_c_normed, k_rot, qa_normed = op(
        hidden_TD, cos_TP, sin_TP, slot_mapping_T, kv_cache, *weights.tensors,
        formats=weights.formats, sizes=sizes, eps=eps, mode=mode,
    )  # fmt: skip
    return q_states, kv_c_normed, k_rot, qa_normed
