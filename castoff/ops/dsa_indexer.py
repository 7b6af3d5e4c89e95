"""dsa_indexer: which cached tokens a query attends to, as one op; and the key write of a call that reuses a top-k.

Axes: T tokens, D hidden, Q q_lora_rank, H index heads, E index_head_dim, P rope dims, K selected tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import lazy_loader as lazy

from castoff.dims import Dim, where
from castoff.ops.cache_rows import index_rows, index_scores
from castoff.ops.lengths import Lengths
from castoff.ops.linear import Weight, product, sum_bytes
from castoff.ops.mlapo import ROPE_OPERATIONS, rotate_half_split, rotate_interleaved, weight_sizes, write_rows
from castoff.ops.program import Abstract, Op, OpCall, Shapes, Tensor
from castoff.ops.quantization import widened
from castoff.ops.work import Kernel, Part, Work
from castoff.spec.quant import CacheFormat, LinearFormat

torch = lazy.load("torch")

K_NORM_EPS = 1e-6
# A radix selection over 32-bit keys looks at every score once per 8-bit digit.
TOPK_PASSES = 4
# Where −inf comes in the order of `_best`.
_LOWEST = -0x7F800001


Formats = tuple[LinearFormat | None, LinearFormat | None]


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """wq_b (H·E, Q), wk (E, D), weights_proj (H, D), k_norm (E) with its bias."""

    wq_b: Weight
    wk: Weight
    weights_proj: Weight
    k_norm: Weight
    k_norm_bias: Weight

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The weights as op inputs: values, then scales."""
        weights = (self.wq_b, self.wk, self.weights_proj, self.k_norm, self.k_norm_bias)
        return (*(weight.values for weight in weights), self.wq_b.scales, self.wk.scales)

    @property
    def formats(self) -> Formats:
        """Number formats of wq_b and wk; the other weights are never quantised."""
        return self.wq_b.format, self.wk.format


def _weights_of(tensors: tuple[Tensor | None, ...], formats: Formats) -> IndexerWeights:
    """The weights whose `tensors` these are."""
    wq_b, wk, weights_proj, k_norm, k_norm_bias, wq_b_scales, wk_scales = tensors
    return IndexerWeights(
        Weight(wq_b, wq_b_scales, formats[0]), Weight(wk, wk_scales, formats[1]),
        Weight(weights_proj), Weight(k_norm), Weight(k_norm_bias),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class IndexerSizes:
    """Sizes of the indexer; every rank of a TP group computes all heads. `shards` ranks split the keys by token."""

    heads: int
    head_dim: int
    qk_rope_head_dim: int
    topk_limit: int
    rope_interleave: bool
    cache: CacheFormat
    shards: int = 1


def _shapes(
    hidden_TD: Abstract,
    *_: Abstract | None,
    formats: Formats,
    sizes: IndexerSizes,
    topk: Dim,
    lengths: Lengths | None,
    mode: str = "prefill",
) -> Shapes:
    chosen = (hidden_TD.shape[0], topk)
    return ((chosen, "int32"),) if sizes.shards == 1 else ((chosen, "int32"), (chosen, "fp32"))


def _work(call: OpCall) -> Work:
    weights = _weights_of(call.inputs[8:], call.attributes["formats"])
    sizes: IndexerSizes = call.attributes["sizes"]
    lengths: Lengths = call.attributes["lengths"]
    hidden_TD, qa_TQ = call.tensor(0), call.tensor(1)
    tokens, heads = hidden_TD.shape[0], sizes.heads
    quantized = sizes.cache.index_dtype != "bf16"
    pairs = lengths.visible / sizes.shards
    keys_read = lengths.total_tokens / sizes.shards
    parts = [
        _projection("q_proj", qa_TQ, weights.wq_b, reads_input=True),
        *_key_parts(hidden_TD, weights.wk, weights.k_norm.bytes + weights.k_norm_bias.bytes, sizes),
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
    return Work(tuple(parts), kernels=_kernels(call, tuple(part.name for part in parts), weights))


SCORE_PARTS = ("score", "relu", "head_reduce", "key_cache_read", "scale_cache_read")


def _kernels(call: OpCall, parts: tuple[str, ...], weights: IndexerWeights) -> tuple[Kernel, ...]:
    """What comes before the scores, the scores, and the selection."""
    sizes: IndexerSizes = call.attributes["sizes"]
    lengths: Lengths = call.attributes["lengths"]
    phase, width, limit = call.attributes["mode"], sizes.heads * sizes.head_dim, sizes.topk_limit
    queries, pairs = lengths.tokens, lengths.visible / sizes.shards
    sparse = attends_sparsely(lengths, limit, phase)
    keys, for_scores = weight_sizes((weights.wk,)), weight_sizes((weights.wq_b, weights.weights_proj))
    project = Kernel(
        f"indexer_project_{weights.wq_b.format_name}_{phase}",
        tuple(name for name in parts if name not in (*SCORE_PARTS, "topk")),
        # Dense attention asks for no scores, so that keys alone are made.
        {
            "tokens": queries,
            "elements": keys["elements"] + sparse * for_scores["elements"],
            "element_bytes": for_scores["element_bytes"],
            "outputs": sizes.head_dim + sparse * width,
            "sparse": sparse,
        },
    )
    logits = Kernel(
        f"indexer_logits_{sizes.cache.index_dtype}_{phase}",
        tuple(name for name in parts if name in SCORE_PARTS),
        {"queries": queries, "requests": lengths.requests, "pairs": pairs, "width": width, "sparse": sparse},
    )
    selection = Kernel(
        f"topk_{phase}",
        ("topk",),
        {
            "queries": queries,
            "selecting": lengths.beyond(limit),
            "excess": (lengths.visible - lengths.selected(limit)) / sizes.shards,
            "topk": limit,
            "sparse": sparse,
        },
    )
    return project, logits, selection


def attends_sparsely(lengths: Lengths, topk_limit: int, phase: str) -> Dim:
    """0 where stacks prefill requests that are all no longer than a selection as dense attention; else 1."""
    return where(lengths.longest > topk_limit, 1.0, 0.0) if phase == "prefill" else 1.0


def _key_write_shapes(
    hidden_TD: Abstract, *_: Abstract | None, format: LinearFormat | None, sizes: IndexerSizes
) -> Shapes:
    return ()


def _key_write_work(call: OpCall) -> Work:
    wk, k_norm, k_norm_bias, wk_scales = call.inputs[5:]
    assert wk is not None
    return Work(
        tuple(
            _key_parts(
                call.tensor(0),
                Weight(wk, wk_scales, call.attributes["format"]),
                float(sum_bytes((k_norm, k_norm_bias))),
                call.attributes["sizes"],
            )
        )
    )


def _key_parts(hidden_TD: Abstract, wk: Weight, norm_bytes: float, sizes: IndexerSizes) -> list[Part]:
    """Key projection, LayerNorm, RoPE and the write to the cache: what every call does, top-k reused or not."""
    tokens = hidden_TD.shape[0]
    elements = tokens * sizes.head_dim
    parts = [
        _projection("k_proj", hidden_TD, wk, reads_input=True),
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


def _reference(
    hidden_TD: Tensor, qa_TQ: Tensor, cos_TP: Tensor, sin_TP: Tensor, indexer_cache: Tensor, slot_mapping_T: Tensor,
    block_tables: Tensor, seq_lens_B: Tensor, *tensors: Tensor | None,
    formats: Formats, sizes: IndexerSizes, topk: int, lengths: Lengths | None, mode: str = "prefill",
) -> tuple[Tensor]:  # fmt: skip
    weights = _weights_of(tensors, formats)
    tokens, requests = hidden_TD.shape[0], seq_lens_B.shape[0]
    queries = tokens // requests
    norm, bias = weights.k_norm.values, weights.k_norm_bias.values
    key_TE = _keys(product(hidden_TD, weights.wk), cos_TP, sin_TP, norm, bias, sizes)
    write_rows(indexer_cache, slot_mapping_T, index_rows(key_TE, sizes.cache))
    q_THE = product(qa_TQ, weights.wq_b).view(tokens, sizes.heads, sizes.head_dim)
    q_BSHE = _rotate(q_THE, cos_TP, sin_TP, sizes).view(requests, queries, sizes.heads, sizes.head_dim)
    head_weights_TH = widened(torch.nn.functional.linear(hidden_TD, weights.weights_proj.values)) * sizes.heads**-0.5
    weights_BSH = head_weights_TH.view(requests, queries, sizes.heads)
    rows_BLX = gather_request_rows(indexer_cache, block_tables)
    scores_BSL = index_scores(q_BSHE, weights_BSH, rows_BLX, sizes.cache)
    visible_BSL = visible_positions(seq_lens_B, queries, rows_BLX.shape[1])
    return (_best(scores_BSL.masked_fill(~visible_BSL, -torch.inf), topk).view(tokens, topk),)


def _best(scores_BSL: Tensor, topk: int) -> Tensor:
    """Ids of the topk largest scores, the best first, equals by id; −1 for a score of −inf. int32 (B, S, topk)."""
    # NaN, of either sign, comes first, as in torch's own sort.
    scores_BSL = torch.where(scores_BSL.isnan(), torch.inf, scores_BSL)
    columns = scores_BSL.shape[-1]
    width = min(topk, columns)
    if scores_BSL.dtype == torch.float64:
        # A stable sort: among equal scores the lowest id comes first.
        best, ids = scores_BSL.sort(dim=-1, descending=True, stable=True)
        ids = ids[..., :width].masked_fill(best[..., :width] == -torch.inf, -1)
    else:
        # One integer holds score and id, so that no two are equal and a selection without a full sort does.
        # Adding zero turns −0 into 0; flipping the low bits of negatives gives the order of the floats.
        bits = (scores_BSL + 0.0).view(torch.int32).long()
        ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        from_the_end = torch.arange(columns - 1, -1, -1, device=scores_BSL.device)
        keys = (ordered << 32 | from_the_end).topk(width, dim=-1).values
        ids = columns - 1 - (keys & 0xFFFFFFFF)
        ids = ids.masked_fill(keys >> 32 == _LOWEST, -1)
    return torch.nn.functional.pad(ids, (0, topk - width), value=-1).to(torch.int32)


def _key_write_reference(
    hidden_TD: Tensor, cos_TP: Tensor, sin_TP: Tensor, indexer_cache: Tensor, slot_mapping_T: Tensor,
    wk: Tensor, k_norm: Tensor, k_norm_bias: Tensor, wk_scales: Tensor | None,
    *, format: LinearFormat | None, sizes: IndexerSizes,
) -> tuple[()]:  # fmt: skip
    key_TE = product(hidden_TD, Weight(wk, wk_scales, format))
    key_TE = _keys(key_TE, cos_TP, sin_TP, k_norm, k_norm_bias, sizes)
    write_rows(indexer_cache, slot_mapping_T, index_rows(key_TE, sizes.cache))
    return ()


def _keys(
    key_TE: Tensor, cos_TP: Tensor, sin_TP: Tensor, k_norm: Tensor, k_norm_bias: Tensor, sizes: IndexerSizes
) -> Tensor:
    """Normed and rotated keys of projected ones."""
    normed_TE = torch.nn.functional.layer_norm(key_TE, (sizes.head_dim,), k_norm, k_norm_bias, K_NORM_EPS)
    return _rotate(normed_TE, cos_TP, sin_TP, sizes)


def _rotate(x_TXE: Tensor, cos_TP: Tensor, sin_TP: Tensor, sizes: IndexerSizes) -> Tensor:
    """The first qk_rope_head_dim values of every index head are rotated, the others pass."""
    rope, plain = x_TXE.split([sizes.qk_rope_head_dim, sizes.head_dim - sizes.qk_rope_head_dim], dim=-1)
    rotate = rotate_interleaved if sizes.rope_interleave else rotate_half_split
    return torch.cat([rotate(rope, cos_TP, sin_TP), plain], dim=-1)


def gather_request_rows(cache: Tensor, block_tables: Tensor) -> Tensor:
    """All rows that each request's block table names, (B, blocks · block tokens, X); unused blocks repeat block 0."""
    rows = cache[block_tables.clamp(min=0)]
    return rows.view(block_tables.shape[0], -1, cache.shape[-1])


def visible_positions(seq_lens_B: Tensor, queries: int, columns: int) -> Tensor:
    """Which of `columns` positions each of the last `queries` tokens of a request sees: (B, S, L)."""
    own_BS = seq_lens_B[:, None] - queries + torch.arange(queries, device=seq_lens_B.device)
    return torch.arange(columns, device=seq_lens_B.device) <= own_BS[..., None]


DSA_INDEXER = Op("dsa_indexer", "indexer", _shapes, _work, _reference, mutates=(4,), opaque=True)
INDEXER_KEY_WRITE = Op(
    "indexer_key_write",
    "indexer",
    _key_write_shapes,
    _key_write_work,
    _key_write_reference,
    outputs=0,
    mutates=(3,),
    opaque=True,
)


def dsa_indexer(
    hidden_TD: Tensor,
    qa_normed_TQ: Tensor,
    cos_TP: Tensor,
    sin_TP: Tensor,
    indexer_cache: Tensor,
    slot_mapping_T: Tensor,
    block_tables: Tensor,
    seq_lens_B: Tensor,
    weights: IndexerWeights,
    sizes: IndexerSizes,
    topk: Dim,
    lengths: Lengths | None,
    *,
    mode: str = "prefill",
) -> tuple[Tensor, ...]:
    """Ids of the cached tokens that each query attends to.

        q_h = rotate(qa · wq_bᵀ)_h;  k = rotate(layer_norm(hidden · wkᵀ));  indexer_cache[slot_mapping] = k
        w   = hidden · weights_projᵀ · heads^-0.5
        score(t, j) = head_dim^-0.5 · sum_h w_th · relu(q_th · k_j)      for j up to the query's own position
        topk_t = ids of the topk largest scores, ties to the lowest id

    A quantised cache (FP8, INT8) also rotates q and k by a Hadamard matrix and scores in that format.
    topk: columns of the result, at most topk_limit; as many as the longest request has tokens are enough.
    Returns int32 (T, topk), the best first; unused columns come last and hold −1. Where several ranks split the keys,
    these are the best of this rank's, and their scores, fp32, come with them. Mutates indexer_cache.
    The mode changes nothing but which measured kernels price it.
    What must not change the result: the block size of the cache and the allocated length, only the real lengths count.
    """
    return DSA_INDEXER(
        hidden_TD, qa_normed_TQ, cos_TP, sin_TP, indexer_cache, slot_mapping_T, block_tables, seq_lens_B,
        *weights.tensors, formats=weights.formats, sizes=sizes, topk=topk, lengths=lengths,
        mode=mode,
    )  # fmt: skip


def indexer_key_write(
    hidden_TD: Tensor,
    cos_TP: Tensor,
    sin_TP: Tensor,
    indexer_cache: Tensor,
    slot_mapping_T: Tensor,
    weights: IndexerWeights,
    sizes: IndexerSizes,
) -> None:
    """Write the indexer keys of new tokens in a call that reuses an earlier top-k. Mutates indexer_cache."""
    INDEXER_KEY_WRITE(
        hidden_TD, cos_TP, sin_TP, indexer_cache, slot_mapping_T, weights.wk.values, weights.k_norm.values,
        weights.k_norm_bias.values, weights.wk.scales, format=weights.wk.format, sizes=sizes,
    )  # fmt: skip


def _merge_shapes(scores_TC: Abstract, ids_TC: Abstract, *, topk: Dim) -> Shapes:
    return (((ids_TC.shape[0], topk), "int32"),)


def _merge_work(call: OpCall) -> Work:
    scores_TC, ids_TC = call.tensor(0), call.tensor(1)
    moved = scores_TC.bytes + ids_TC.bytes + call.outputs[0].bytes
    return Work((Part("topk", vector_flops=TOPK_PASSES * scores_TC.elements, bytes=moved),))


MERGE_TOPK = Op("merge_topk", "indexer", _merge_shapes, _merge_work)


def merge_topk(scores_TC: Tensor, ids_TC: Tensor, topk: Dim) -> Tensor:
    """Ids of the topk best among the candidates (T, C) that several ranks selected from their own keys."""
    return MERGE_TOPK(scores_TC, ids_TC, topk=topk)[0]
