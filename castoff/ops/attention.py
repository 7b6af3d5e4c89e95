"""multihead_latent_attention: scores and values over the latent cache.

Axes: T tokens, H heads of this rank, N qk_nope, P qk_rope, R kv_lora_rank, V v_head_dim, K selected tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import lazy_loader as lazy

from castoff.dims import Dim
from castoff.ops import accelerator
from castoff.ops.cache_rows import SCORE_ELEMENTS, latent_values
from castoff.ops.dsa_indexer import attends_sparsely, gather_request_rows, visible_positions
from castoff.ops.lengths import Lengths
from castoff.ops.linear import Weight
from castoff.ops.program import Abstract, Op, OpCall, Shapes, Tensor, dtype_name
from castoff.ops.work import Kernel, Part, Work
from castoff.spec.quant import AttentionAction, CacheFormat

torch = lazy.load("torch")

# Scale, max, subtract, exponent and sum per score.
SOFTMAX_OPERATIONS = 5
CACHE_DTYPES: Mapping[AttentionAction, str] = {"DISABLED": "bf16", "FP8": "fp8", "INT8": "int8"}
# Prefill reads all rows of a context of up to this many times the selection.
_MASKED_COLUMNS = 4


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Sizes on this rank. topk_limit is None for dense attention; `shards` ranks split the cached rows by token.

    absorbs: whether the op itself brings q into the latent space and the result out of it.
    """

    heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    kv_lora_rank: int
    v_head_dim: int
    cache: CacheFormat
    softmax_scale: float
    topk_limit: int | None
    shards: int = 1
    absorbs: bool = True

    @property
    def absorbed_head_dim(self) -> int:
        """Width of one head's query in the latent space."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def _shapes(q_THX: Abstract, *_: Abstract | None, sizes: AttentionSizes, **__: object) -> Shapes:
    heads = (q_THX.shape[0], sizes.heads)
    if sizes.absorbs:
        return (((*heads, sizes.v_head_dim), dtype_name(q_THX)),)
    return (((*heads, sizes.kv_lora_rank), dtype_name(q_THX)), (heads, "fp32"))


def _absorbed_work(call: OpCall) -> Work:
    sizes: AttentionSizes = call.attributes["sizes"]
    lengths: Lengths = call.attributes["lengths"]
    q_THX, topk_TK = call.tensor(0), call.inputs[2]
    tokens, heads, rank = q_THX.shape[0], sizes.heads, sizes.kv_lora_rank
    if sizes.topk_limit is None:
        rows = lengths.visible / sizes.shards
        reads = Part("kv_read", bytes=lengths.total_tokens / sizes.shards * sizes.cache.latent_row_bytes)
    else:
        rows = lengths.selected(sizes.topk_limit) / sizes.shards
        reads = Part("kv_gather", gather_bytes=rows * sizes.cache.latent_row_bytes, gather_rows=rows)
    output: Dim = call.outputs[0].bytes
    ids = topk_TK.bytes if topk_TK is not None else 0
    core = (
        Part("qk", 2 * rows * heads * sizes.absorbed_head_dim, "bf16", bytes=q_THX.bytes + ids),
        Part("softmax", vector_flops=SOFTMAX_OPERATIONS * rows * heads),
        Part("pv", 2 * rows * heads * rank, "bf16", bytes=output),
        reads,
    )
    kernels = _kernels(call, tuple(part.name for part in core))
    if not sizes.absorbs:
        return Work(core, kernels=kernels[:1])
    q_absorb = Part("q_absorb", 2 * tokens * heads * sizes.qk_nope_head_dim * rank, "bf16", bytes=call.tensor(5).bytes)
    v_up = Part("v_up", 2 * tokens * heads * rank * sizes.v_head_dim, "bf16")
    return Work((q_absorb, *core, v_up), kernels=kernels)


def _kernels(call: OpCall, core: tuple[str, ...]) -> tuple[Kernel, ...]:
    """Attention over selected rows, and the products around it; none where it is dense.

    A prefill of short requests, which stacks compute densely, is all in the second.
    """
    sizes: AttentionSizes = call.attributes["sizes"]
    lengths: Lengths = call.attributes["lengths"]
    if sizes.topk_limit is None:
        return ()
    phase, queries, heads = call.attributes["phase"], lengths.tokens, sizes.heads
    # Queries that are absorbed already cannot attend densely.
    sparse = attends_sparsely(lengths, sizes.topk_limit, phase) if sizes.absorbs else 1.0
    rows = lengths.selected(sizes.topk_limit) / sizes.shards
    widths = sizes.qk_nope_head_dim + sizes.v_head_dim
    attend = Kernel(
        f"sparse_attention_{CACHE_DTYPES[sizes.cache.action]}_{phase}",
        core,
        {
            "queries": queries,
            "rows": rows,
            "topk": sizes.topk_limit,
            "heads": heads,
            "row_bytes": sizes.cache.latent_row_bytes,
            "cached": lengths.total_tokens / sizes.shards,
            "longest": lengths.longest,
            "sparse": sparse,
        },
    )
    absorb = Kernel(
        f"absorb_{phase}",
        ("q_absorb", "v_up"),
        {
            "tokens": queries,
            "elements": heads * sizes.kv_lora_rank * widths,
            "element_bytes": 2.0,
            "outputs": heads * widths,
            "cached": lengths.total_tokens / sizes.shards,
            "pairs": lengths.visible / sizes.shards,
            "dense_width": heads * (widths + sizes.qk_rope_head_dim),
            "sparse": sparse,
        },
    )
    return attend, absorb


def _expanded_work(call: OpCall) -> Work:
    """Dense prefill: keys and values of every visible token are expanded through kv_b, then ordinary attention."""
    sizes: AttentionSizes = call.attributes["sizes"]
    lengths: Lengths = call.attributes["lengths"]
    q_THX, kv_b_XR = call.tensor(0), call.tensor(5)
    heads, key_dim = sizes.heads, sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
    cached, pairs = lengths.total_tokens / sizes.shards, lengths.visible / sizes.shards
    expanded = heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
    return Work(
        (
            Part(
                "kv_expand",
                2 * cached * sizes.kv_lora_rank * expanded,
                "bf16",
                bytes=kv_b_XR.bytes + 4 * cached * expanded,
            ),
            Part("qk", 2 * pairs * heads * key_dim, "bf16", bytes=q_THX.bytes),
            Part("softmax", vector_flops=SOFTMAX_OPERATIONS * pairs * heads),
            Part("pv", 2 * pairs * heads * sizes.v_head_dim, "bf16", bytes=call.outputs[0].bytes),
            Part("kv_read", bytes=cached * sizes.cache.latent_row_bytes),
        ),
        workspace_bytes=2 * cached * expanded,
    )


def _work(call: OpCall) -> Work:
    sizes: AttentionSizes = call.attributes["sizes"]
    dense_prefill = sizes.topk_limit is None and call.attributes["phase"] == "prefill" and sizes.absorbs
    return _expanded_work(call) if dense_prefill else _absorbed_work(call)


def _reference(
    q_THX: Tensor, kv_cache: Tensor, topk_TK: Tensor | None, block_tables: Tensor | None, seq_lens_B: Tensor | None,
    kv_b_XR: Tensor, staging: Tensor | None = None,
    *, sizes: AttentionSizes, lengths: Lengths | None, phase: str,
) -> tuple[Tensor]:  # fmt: skip
    w_uk_HNR, w_uv_HVR = kv_b_XR.view(sizes.heads, -1, sizes.kv_lora_rank).split(
        [sizes.qk_nope_head_dim, sizes.v_head_dim], dim=1
    )
    q_nope, q_rope = q_THX.split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=-1)
    q_THX = torch.cat([torch.einsum("thn,hnr->thr", q_nope, w_uk_HNR), q_rope], dim=-1)
    if block_tables is None or seq_lens_B is None:
        assert topk_TK is not None, "attention by row is given the rows"
        out_THR = _attend_rows(q_THX, kv_cache, topk_TK, staging, sizes)
    elif topk_TK is None or (
        # Many queries that select most of a short context read it once; others read the rows that they selected.
        phase == "prefill" and block_tables.shape[1] * kv_cache.shape[1] <= _MASKED_COLUMNS * topk_TK.shape[1]
    ):
        out_THR = _attend_masked(q_THX, kv_cache, topk_TK, block_tables, seq_lens_B, sizes)
    else:
        rows_TK = cached_rows(topk_TK, block_tables, seq_lens_B, kv_cache.shape[1])
        out_THR = _attend_rows(q_THX, kv_cache.flatten(0, 1), rows_TK, None, sizes)
    return (torch.einsum("thr,hvr->thv", out_THR, w_uv_HVR).contiguous(),)


def _attend_masked(
    q_THX: Tensor, kv_cache: Tensor, topk_TK: Tensor | None, block_tables: Tensor, seq_lens_B: Tensor,
    sizes: AttentionSizes,
) -> Tensor:  # fmt: skip
    """Over all rows of each request in order of position, of which the others than the selected are masked."""
    tokens, requests = q_THX.shape[0], seq_lens_B.shape[0]
    rows_BLX = latent_values(gather_request_rows(kv_cache, block_tables), sizes.kv_lora_rank, sizes.cache, q_THX.dtype)
    columns = rows_BLX.shape[1]
    allowed_BSL = visible_positions(seq_lens_B, tokens // requests, columns)
    if topk_TK is not None:
        allowed_BSL = allowed_BSL & selected_positions(topk_TK.view(*allowed_BSL.shape[:2], -1), columns)
    q_BSHX = q_THX.view(requests, -1, *q_THX.shape[1:])
    pieces = [
        _attend(q_BSHX[:, part], rows_BLX, allowed_BSL[:, part], sizes)
        for part in _query_parts(q_BSHX.shape[1], requests * sizes.heads * columns)
    ]
    return torch.cat(pieces, dim=1).flatten(0, 1)


def _attend_rows(
    q_THX: Tensor, stored: Tensor, rows_TK: Tensor, staging: Tensor | None, sizes: AttentionSizes
) -> Tensor:
    """Over the given rows of each query alone, in their order; −1 is none, and rows past `stored`'s are staged ones."""
    if not q_THX.is_cpu and accelerator.has_triton():
        return accelerator.attend_rows(
            q_THX, stored, rows_TK, staging, kv_lora_rank=sizes.kv_lora_rank, softmax_scale=sizes.softmax_scale,
            cache=sizes.cache,
        )  # fmt: skip
    allowed_TK = rows_TK >= 0
    pieces = []
    for part in _query_parts(q_THX.shape[0], rows_TK.shape[1] * max(sizes.heads, sizes.absorbed_head_dim)):
        rows = rows_of(stored, staging, rows_TK[part].clamp(min=0).long())
        rows_TKX = latent_values(rows, sizes.kv_lora_rank, sizes.cache, q_THX.dtype)
        pieces.append(_attend(q_THX[part, None], rows_TKX, allowed_TK[part, None], sizes))
    return torch.cat(pieces)[:, 0]


def rows_of(stored: Tensor, staging: Tensor | None, rows_TK: Tensor) -> Tensor:
    """The rows (T, K, X) with these numbers: of `stored` (rows, X), whose last one is a spare, then of `staging`."""
    if staging is None:
        return stored[rows_TK]
    own = stored.shape[0] - 1
    is_staged_TK = rows_TK >= own
    rows_TKX = stored[torch.where(is_staged_TK, own, rows_TK)]
    # On a CPU it costs nothing to ask, and hardly any row is staged.
    if not rows_TK.is_cpu or is_staged_TK.any():
        staged_TKX = staging[torch.where(is_staged_TK, rows_TK - own, 0)]
        rows_TKX = torch.where(is_staged_TK[..., None], staged_TKX, rows_TKX)
    return rows_TKX


def _query_parts(queries: int, elements: int) -> list[slice]:
    """Cuts of the queries of a request for score matrices of bounded size; `elements` is the size for one query."""
    step = max(1, SCORE_ELEMENTS // max(elements, 1))
    return [slice(start, start + step) for start in range(0, queries, step)]


def cached_rows(topk_TK: Tensor, block_tables: Tensor, seq_lens_B: Tensor, block_tokens: int) -> Tensor:
    """Flat cache rows (T, K) of selected tokens; −1 for none, and for a token after the query's own."""
    tokens, requests = topk_TK.shape[0], seq_lens_B.shape[0]
    queries = tokens // requests
    own_BS = seq_lens_B[:, None] - queries + torch.arange(queries, device=seq_lens_B.device)
    allowed_TK = (topk_TK >= 0) & (topk_TK <= own_BS.view(tokens, 1))
    return torch.where(allowed_TK, row_slots(topk_TK, block_tables, block_tokens), -1)


def row_slots(topk_TK: Tensor, block_tables: Tensor, block_tokens: int) -> Tensor:
    """Flat cache slots of selected tokens, (T, K); any slot for −1."""
    ids_TK = topk_TK.clamp(min=0).long()
    tables_TN = block_tables.repeat_interleave(topk_TK.shape[0] // block_tables.shape[0], dim=0)
    blocks_TK = tables_TN.gather(1, (ids_TK // block_tokens).clamp(max=tables_TN.shape[1] - 1))
    return blocks_TK.clamp(min=0) * block_tokens + ids_TK % block_tokens


def _attend(q_BSHX: Tensor, rows_BLX: Tensor, allowed_BSL: Tensor, sizes: AttentionSizes) -> Tensor:
    """Softmax over the allowed rows, at no less than fp32, and the weighted sum of their latents: (B, S, H, R)."""
    wide = torch.promote_types(q_BSHX.dtype, torch.float32)
    # A CPU without instructions for them multiplies 16-bit numbers tens of times slower than fp32.
    product = wide if q_BSHX.is_cpu else q_BSHX.dtype
    rows_BLX = rows_BLX.to(product)
    scores = torch.einsum("bshx,blx->bshl", q_BSHX.to(product), rows_BLX).to(wide) * sizes.softmax_scale
    scores = scores.masked_fill(~allowed_BSL[:, :, None], -torch.inf)
    # A padded request sees nothing: its result is zero, not NaN.
    weights = scores.softmax(dim=-1).nan_to_num_(0.0).to(product)
    return torch.einsum("bshl,blr->bshr", weights, rows_BLX[..., : sizes.kv_lora_rank]).to(q_BSHX.dtype)


def selected_positions(topk_BSK: Tensor, columns: int) -> Tensor:
    """Which of `columns` positions are among the ids, −1 for none: (B, S, L)."""
    chosen = torch.zeros(*topk_BSK.shape[:2], columns + 1, dtype=torch.bool, device=topk_BSK.device)
    ids = torch.where(topk_BSK < 0, columns, topk_BSK).long()
    return chosen.scatter_(-1, ids, True)[..., :columns]


SPARSE = Op("multihead_latent_attention", "sparse_attention", _shapes, _work, _reference, opaque=True)
SPARSE_QUANT = Op("multihead_latent_attention_quant", "sparse_attention", _shapes, _work, _reference, opaque=True)
DENSE = Op("multihead_latent_attention", "dense_attention", _shapes, _work, _reference, opaque=True)
DENSE_QUANT = Op("multihead_latent_attention_quant", "dense_attention", _shapes, _work, _reference, opaque=True)


def multihead_latent_attention(
    q_THX: Tensor,
    kv_cache: Tensor,
    topk_TK: Tensor | None,
    block_tables: Tensor | None,
    seq_lens_B: Tensor | None,
    kv_b: Weight,
    sizes: AttentionSizes,
    lengths: Lengths | None,
    *,
    staging: Tensor | None = None,
    phase: str,
    quantized: bool,
) -> tuple[Tensor, ...]:
    """Latent attention over the selected rows (sparse) or all visible ones (dense).

        q_latent = q_nope · W_uk                     per head, (T, H, R); W_uk, W_uv are the two halves of kv_b
        s_tj     = (q_latent · latent_j + q_rope · key_j) · softmax_scale       j among topk_t, or all visible
        o_th     = (sum_j softmax(s)_tj · latent_j) · W_uv

    q_THX: (T, H, N + P). topk_TK: int32 ids (T, K), −1 for none; None is dense attention. Returns (T, H, V);
    where `sizes.absorbs` is False, q is absorbed already and the result is latent (T, H, R), with the logarithm of each
    softmax's sum, fp32 (T, H), so that ranks with other rows can be merged.
    Without block tables topk_TK are rows of kv_cache, which is (rows, X) then; numbers from its last row on, which is a
    spare, are rows of `staging`. The result follows the rows' values and order alone, not where they lie.
    A request with fewer visible rows than topk_limit attends to those it has. Dense attention in the prefill phase
    expands keys and values instead of absorbing, with equal results up to rounding.
    """
    assert (topk_TK is None) == (sizes.topk_limit is None), "sparse attention needs the top-k ids, dense has none"
    plain, quant = (DENSE, DENSE_QUANT) if sizes.topk_limit is None else (SPARSE, SPARSE_QUANT)
    op = quant if quantized else plain
    return op(
        q_THX, kv_cache, topk_TK, block_tables, seq_lens_B, kv_b.values, *([] if staging is None else [staging]),
        sizes=sizes, lengths=lengths, phase=phase,
    )  # fmt: skip


def _absorb_shapes(q_THX: Abstract, kv_b_XR: Abstract, *, sizes: AttentionSizes) -> Shapes:
    return (((*q_THX.shape[:2], sizes.absorbed_head_dim), dtype_name(q_THX)),)


def _absorb_work(call: OpCall) -> Work:
    sizes: AttentionSizes = call.attributes["sizes"]
    return Work((_half_of_kv_b("q_absorb", call, sizes.qk_nope_head_dim),))


def _expand_shapes(out_THR: Abstract, kv_b_XR: Abstract, *, sizes: AttentionSizes) -> Shapes:
    return (((*out_THR.shape[:2], sizes.v_head_dim), dtype_name(out_THR)),)


def _expand_work(call: OpCall) -> Work:
    sizes: AttentionSizes = call.attributes["sizes"]
    return Work((_half_of_kv_b("v_up", call, sizes.v_head_dim),))


def _half_of_kv_b(name: str, call: OpCall, width: int) -> Part:
    """A batched product per head with the half of kv_b that has `width` rows a head."""
    sizes: AttentionSizes = call.attributes["sizes"]
    x_THX, kv_b_XR = call.tensor(0), call.tensor(1)
    read = kv_b_XR.bytes * width / (sizes.qk_nope_head_dim + sizes.v_head_dim)
    flops = 2 * x_THX.shape[0] * x_THX.shape[1] * width * sizes.kv_lora_rank
    return Part(name, flops, "bf16", bytes=x_THX.bytes + read + call.outputs[0].bytes)


def _rescale_shapes(out_THR: Abstract, lse_TH: Abstract, every_lse_TX: Abstract) -> Shapes:
    return ((out_THR.shape, dtype_name(out_THR)),)


def _rescale_work(call: OpCall) -> Work:
    out_THR, every_lse_TX = call.tensor(0), call.tensor(2)
    operations = out_THR.elements + 3 * every_lse_TX.elements
    return Work((Part("rescale", vector_flops=operations, bytes=2 * out_THR.bytes + every_lse_TX.bytes),))


RESCALE_SHARD = Op("rescale_shard", "elementwise", _rescale_shapes, _rescale_work)
ABSORB_QUERY = Op("absorb_query", "matmul", _absorb_shapes, _absorb_work)
EXPAND_VALUE = Op("expand_value", "matmul", _expand_shapes, _expand_work)


def absorb_query(q_THX: Tensor, kv_b: Weight, sizes: AttentionSizes) -> Tensor:
    """(q_nope · W_uk, q_rope) per head, (T, H, R + P): a query that several ranks can score against their rows."""
    return ABSORB_QUERY(q_THX, kv_b.values, sizes=sizes)[0]


def expand_value(out_THR: Tensor, kv_b: Weight, sizes: AttentionSizes) -> Tensor:
    """Latent results (T, H, R) of whole softmaxes to values: out · W_uv, (T, H, V)."""
    return EXPAND_VALUE(out_THR, kv_b.values, sizes=sizes)[0]


def rescale_shard(out_THR: Tensor, lse_TH: Tensor, every_lse_TX: Tensor) -> Tensor:
    """A rank's latent result times exp(its lse − the lse of all ranks), so that the ranks' results add up.

    every_lse_TX: the lse of every rank, (T, ranks · H). Returns (T, H, R).
    """
    return RESCALE_SHARD(out_THR, lse_TH, every_lse_TX)[0]
