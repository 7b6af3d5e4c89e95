"""dsa_indexer: which cached tokens a query attends to, as one op; and the key write of a call that reuses a top-k.

Axes: T tokens, D hidden, Q q_lora_rank, H index heads, E index_head_dim, P rope dims, K selected tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from castoff.dims import Dim, ceil_div, minimum
from castoff.ops.lengths import Lengths
from castoff.ops.linear import Weight
from castoff.ops.mlapo import ROPE_OPERATIONS
from castoff.ops.program import Abstract, Op, OpCall, Shapes
from castoff.ops.work import Part, Work
from castoff.spec.quant import CacheFormat

# A radix selection over 32-bit keys looks at every score once per 8-bit digit.
TOPK_PASSES = 4


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """wq_b (H·E, Q), wk (E, D), weights_proj (H, D), k_norm (E) with its bias."""

    wq_b: Weight
    wk: Weight
    weights_proj: Weight
    k_norm: Weight
    k_norm_bias: Weight

    @property
    def tensors(self) -> tuple[Abstract, ...]:
        """The weights as op inputs."""
        weights = (self.wq_b, self.wk, self.weights_proj, self.k_norm, self.k_norm_bias)
        return tuple(weight.values for weight in weights)


@dataclass(frozen=True, slots=True)
class IndexerSizes:
    """Sizes of the indexer; every rank of a TP group computes all heads. `shards` ranks split the keys by token."""

    heads: int
    head_dim: int
    qk_rope_head_dim: int
    topk_limit: int
    cache: CacheFormat
    shards: int = 1


def _shapes(
    hidden_TD: Abstract, *_: Abstract, weights: IndexerWeights, sizes: IndexerSizes, lengths: Lengths
) -> Shapes:
    chosen = (hidden_TD.shape[0], minimum(sizes.topk_limit, ceil_div(lengths.longest, sizes.shards)))
    return ((chosen, "int32"),) if sizes.shards == 1 else ((chosen, "int32"), (chosen, "fp32"))


def _work(call: OpCall) -> Work:
    weights: IndexerWeights = call.attributes["weights"]
    sizes: IndexerSizes = call.attributes["sizes"]
    lengths: Lengths = call.attributes["lengths"]
    hidden_TD, qa_TQ = call.tensor(0), call.tensor(1)
    tokens, heads = hidden_TD.shape[0], sizes.heads
    quantized = sizes.cache.index_dtype != "bf16"
    pairs = lengths.visible / sizes.shards
    keys_read = lengths.total_tokens / sizes.shards
    parts = [
        _projection("q_proj", qa_TQ, weights.wq_b, reads_input=True),
        *_key_parts(hidden_TD, weights, sizes),
        _projection("head_weights_proj", hidden_TD, weights.weights_proj, reads_input=False),
        Part("rope", vector_flops=ROPE_OPERATIONS * tokens * heads * sizes.qk_rope_head_dim),
    ]
    if quantized:
        parts.append(Part("rotate_quantize", vector_flops=_rotate_quantize(tokens * heads, sizes.head_dim)))
    parts += [
        Part("score", 2 * pairs * heads * sizes.head_dim, sizes.cache.index_dtype),
        Part("relu", vector_flops=pairs * heads),
        # Multiply and add per head; a quantised key scales the sum once more, its query scale is in the head weight.
        Part("head_reduce", vector_flops=2 * pairs * heads + (pairs + tokens * heads if quantized else 0)),
        Part("topk", vector_flops=TOPK_PASSES * pairs, bytes=call.outputs[0].bytes),
        Part("key_cache_read", bytes=keys_read * sizes.cache.index_key_bytes),
    ]
    if quantized:
        parts.append(Part("scale_cache_read", bytes=keys_read * sizes.cache.index_scale_bytes))
    return Work(tuple(parts))


def _key_write_shapes(hidden_TD: Abstract, *_: Abstract, weights: IndexerWeights, sizes: IndexerSizes) -> Shapes:
    return ()


def _key_write_work(call: OpCall) -> Work:
    return Work(tuple(_key_parts(call.tensor(0), call.attributes["weights"], call.attributes["sizes"])))


def _key_parts(hidden_TD: Abstract, weights: IndexerWeights, sizes: IndexerSizes) -> list[Part]:
    """Key projection, LayerNorm, RoPE and the write to the cache: what every call does, top-k reused or not."""
    tokens = hidden_TD.shape[0]
    elements = tokens * sizes.head_dim
    norm_bytes = weights.k_norm.bytes + weights.k_norm_bias.bytes
    parts = [
        _projection("k_proj", hidden_TD, weights.wk, reads_input=True),
        Part("k_norm", vector_flops=6 * elements, bytes=norm_bytes),
        Part("k_rope", vector_flops=ROPE_OPERATIONS * tokens * sizes.qk_rope_head_dim),
        Part("key_cache_write", bytes=tokens * sizes.cache.index_key_bytes),
    ]
    if sizes.cache.index_dtype != "bf16":
        parts += [
            Part("k_rotate_quantize", vector_flops=_rotate_quantize(tokens, sizes.head_dim)),
            Part("scale_cache_write", bytes=tokens * sizes.cache.index_scale_bytes),
        ]
    return parts


def _rotate_quantize(vectors: Dim, head_dim: int) -> Dim:
    """Hadamard butterflies, then abs, max, scale and round per value."""
    return vectors * head_dim * (math.ceil(math.log2(head_dim)) + 4)


def _projection(name: str, x_TI: Abstract, weight: Weight, *, reads_input: bool) -> Part:
    flops = 2 * x_TI.shape[0] * x_TI.shape[1] * weight.values.shape[0]
    return Part(name, flops, weight.matrix_dtype, bytes=weight.bytes + (x_TI.bytes if reads_input else 0))


DSA_INDEXER = Op("dsa_indexer", "indexer", _shapes, _work)
INDEXER_KEY_WRITE = Op("indexer_key_write", "indexer", _key_write_shapes, _key_write_work)


def dsa_indexer(
    hidden_TD: Abstract,
    qa_normed_TQ: Abstract,
    cos_TP: Abstract,
    sin_TP: Abstract,
    indexer_cache: Abstract,
    slot_mapping_T: Abstract,
    block_tables: Abstract,
    seq_lens_B: Abstract,
    weights: IndexerWeights,
    sizes: IndexerSizes,
    lengths: Lengths,
) -> tuple[Abstract, ...]:
    """Ids of the cached tokens that each query attends to.

        q_h = rotate(qa · wq_bᵀ)_h;  k = rotate(layer_norm(hidden · wkᵀ));  indexer_cache[slot_mapping] = k
        w   = hidden · weights_projᵀ · heads^-0.5
        score(t, j) = head_dim^-0.5 · sum_h w_th · relu(q_th · k_j)      for j up to the query's own position
        topk_t = ids of the topk_limit largest scores, ties to the lowest id

    A quantised cache (FP8, INT8) also rotates q and k by a Hadamard matrix and scores in that format.
    qa and hidden come quantised from mlapo where wq_b and wk ask for it.
    Returns int32 (T, min(topk_limit, longest request)); unused columns hold −1. Where several ranks split the keys,
    these are the best of this rank's, and their scores, fp32, come with them. Mutates indexer_cache.
    What must not change the result: the block size of the cache and the allocated length, only the real lengths count.
    """
    return DSA_INDEXER(
        hidden_TD, qa_normed_TQ, cos_TP, sin_TP, indexer_cache, slot_mapping_T, block_tables, seq_lens_B,
        *weights.tensors, weights=weights, sizes=sizes, lengths=lengths,
    )  # fmt: skip


def indexer_key_write(
    hidden_TD: Abstract,
    cos_TP: Abstract,
    sin_TP: Abstract,
    indexer_cache: Abstract,
    slot_mapping_T: Abstract,
    weights: IndexerWeights,
    sizes: IndexerSizes,
) -> None:
    """Write the indexer keys of new tokens in a call that reuses an earlier top-k. Mutates indexer_cache."""
    INDEXER_KEY_WRITE(
        hidden_TD, cos_TP, sin_TP, indexer_cache, slot_mapping_T, weights.wk.values, weights.k_norm.values,
        weights.k_norm_bias.values, weights=weights, sizes=sizes,
    )  # fmt: skip


def _merge_shapes(scores_TC: Abstract, ids_TC: Abstract, *, topk: Dim) -> Shapes:
    return (((ids_TC.shape[0], topk), "int32"),)


def _merge_work(call: OpCall) -> Work:
    scores_TC, ids_TC = call.tensor(0), call.tensor(1)
    moved = scores_TC.bytes + ids_TC.bytes + call.outputs[0].bytes
    return Work((Part("topk", vector_flops=TOPK_PASSES * scores_TC.elements, bytes=moved),))


MERGE_TOPK = Op("merge_topk", "indexer", _merge_shapes, _merge_work)


def merge_topk(scores_TC: Abstract, ids_TC: Abstract, topk: Dim) -> Abstract:
    """Ids of the topk best among the candidates (T, C) that several ranks selected from their own keys."""
    return MERGE_TOPK(scores_TC, ids_TC, topk=topk)[0]
