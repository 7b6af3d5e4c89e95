"""gather_plan: what the previous step's selection leaves of this one's, for every query by itself.

Axes: B requests of a call, S queries of each, T = B·S, K top-k columns, X = S·K, R request slots, W buffer rows
(the most columns of any call).

One program plans one request, query after query. Ids are found through chains: every entry of a hash bucket links to
the one that entered before it. In which order entries get in is left to the device, and changes no result: a look-up
goes through the whole chain.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from castoff.ops.offload_plan import PoolSizes
from castoff.ops.triton.launch import Launch, power_of_two
from castoff.ops.triton.sets import MAX_POSITIONS, NEVER, NONE, NUM_STATS, THREADS, fill, store_stats

_NO_READ = tl.constexpr(0)
_HIT = tl.constexpr(1)
_MISS = tl.constexpr(2)


@triton.jit
def _enter(heads_ptr, links_ptr, index_X, id_X, mask_X, BUCKETS: tl.constexpr):
    """Put entries at the heads of their buckets' chains."""
    before_X = tl.atomic_xchg(heads_ptr + id_X % BUCKETS, index_X, mask=mask_X, sem="relaxed")
    tl.store(links_ptr + index_X, before_X, mask=mask_X)


@triton.jit
def _first_with_id(heads_ptr, links_ptr, ids_ptr, id_X, asked_X, BUCKETS: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest entry whose id is asked for, NEVER where there is none."""
    found_X = tl.full((BLOCK,), NEVER, tl.int32)
    at_X = tl.load(heads_ptr + id_X % BUCKETS, mask=asked_X, other=NONE, volatile=True)
    while tl.max(at_X) >= 0:
        there_X = at_X >= 0
        entry_X = tl.load(ids_ptr + at_X, mask=there_X, other=NONE)
        found_X = tl.where(there_X & (entry_X == id_X), tl.minimum(found_X, at_X), found_X)
        at_X = tl.load(links_ptr + at_X, mask=there_X, other=NONE)
    return found_X


@triton.jit
def _look_up(
    topk_ptr, last, now, tags_ptr, first_row, rows_ptr, heads_ptr, links_ptr, kept_ptr, orders_ptr, kinds_ptr,
    TOPK: tl.constexpr, BUCKETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of hits; which buffer rows they keep; the order of the ids to read, and how many there are."""
    reads = 0
    for start in range(0, TOPK, BLOCK):
        rank_X = start + tl.arange(0, BLOCK)
        inside_X = rank_X < TOPK
        id_X = tl.load(topk_ptr + rank_X, mask=inside_X, other=NONE)
        valid_X = (id_X >= 0) & (id_X <= last)
        committed_X = valid_X & (id_X < now)
        found_X = _first_with_id(heads_ptr, links_ptr, tags_ptr, id_X, committed_X, BUCKETS, BLOCK)
        hit_X = committed_X & (found_X < NEVER)
        tl.store(kept_ptr + found_X, 1, mask=hit_X)
        read_X = valid_X & ((id_X >= now) | (found_X == NEVER))
        order_X = reads + tl.cumsum(read_X.to(tl.int32), axis=0) - 1
        reads += tl.sum(read_X.to(tl.int32))
        tl.store(orders_ptr + rank_X, tl.where(read_X, order_X, NONE), mask=inside_X)
        tl.store(rows_ptr + rank_X, tl.where(hit_X, first_row + found_X, NONE), mask=inside_X & (read_X == 0))
        kind_X = tl.where(hit_X, _HIT, tl.where(committed_X, _MISS, _NO_READ))
        tl.store(kinds_ptr + rank_X, kind_X, mask=inside_X)
    return reads


@triton.jit
def _count_kinds(
    topk_ptr, kinds_ptr, heads_ptr, links_ptr, POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, BLOCK: tl.constexpr
):
    """Hits, distinct hits, misses and distinct misses of a request; an id is distinct once per kind."""
    fill(heads_ptr, NONE, 0, BUCKETS, BLOCK)
    tl.debug_barrier()
    for start in range(0, POSITIONS, BLOCK):
        place_X = start + tl.arange(0, BLOCK)
        kind_X = tl.load(kinds_ptr + place_X, mask=place_X < POSITIONS, other=_NO_READ)
        id_X = tl.load(topk_ptr + place_X, mask=kind_X > 0, other=0)
        _enter(heads_ptr, links_ptr, place_X, id_X, kind_X > 0, BUCKETS)
    tl.debug_barrier()
    hits_X = tl.full((BLOCK,), 0, tl.int32)
    unique_hits_X = tl.full((BLOCK,), 0, tl.int32)
    misses_X = tl.full((BLOCK,), 0, tl.int32)
    unique_misses_X = tl.full((BLOCK,), 0, tl.int32)
    for start in range(0, POSITIONS, BLOCK):
        place_X = start + tl.arange(0, BLOCK)
        kind_X = tl.load(kinds_ptr + place_X, mask=place_X < POSITIONS, other=_NO_READ)
        id_X = tl.load(topk_ptr + place_X, mask=kind_X > 0, other=0)
        repeats_X = tl.full((BLOCK,), 0, tl.int32)
        at_X = tl.load(heads_ptr + id_X % BUCKETS, mask=kind_X > 0, other=NONE, volatile=True)
        while tl.max(at_X) >= 0:
            before_X = (at_X >= 0) & (at_X < place_X)
            same_X = tl.load(topk_ptr + at_X, mask=before_X, other=NONE) == id_X
            alike_X = tl.load(kinds_ptr + at_X, mask=before_X, other=_NO_READ) == kind_X
            repeats_X += (before_X & same_X & alike_X).to(tl.int32)
            at_X = tl.load(links_ptr + at_X, mask=at_X >= 0, other=NONE)
        hits_X += (kind_X == _HIT).to(tl.int32)
        unique_hits_X += ((kind_X == _HIT) & (repeats_X == 0)).to(tl.int32)
        misses_X += (kind_X == _MISS).to(tl.int32)
        unique_misses_X += ((kind_X == _MISS) & (repeats_X == 0)).to(tl.int32)
    return tl.sum(hits_X), tl.sum(unique_hits_X), tl.sum(misses_X), tl.sum(unique_misses_X)


@triton.jit
def plan_gather_kernel(
    topk_ptr, slot_mapping_ptr, seq_lens_ptr, committed_ptr, request_slots_ptr, tags_ptr,
    rows_ptr, fetch_ids_ptr, fetch_rows_ptr, counts_ptr, stats_ptr, scratch_ptr,
    QUERIES: tl.constexpr, TOPK: tl.constexpr, SETS: tl.constexpr, WAYS: tl.constexpr,
    BUCKETS: tl.constexpr, SCRATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request row. scratch: (B, SCRATCH)."""
    POSITIONS: tl.constexpr = QUERIES * TOPK
    request = tl.program_id(0)
    slot = tl.load(request_slots_ptr + request).to(tl.int32)
    # A padding row is a request of length 0, which may see nothing.
    length = tl.load(seq_lens_ptr + request, mask=slot >= 0, other=0).to(tl.int32)
    buffered = tl.where(slot >= 0, SETS * WAYS, 0)
    slot = tl.maximum(slot, 0)
    now = tl.load(committed_ptr + request).to(tl.int32)
    # Rows of rejected tokens are written anew: no query may find them, nor one that this call leaves out.
    for start in range(0, buffered, BLOCK):
        place_X = start + tl.arange(0, BLOCK)
        held_ptrs = tags_ptr + slot * SETS * WAYS + place_X
        held_X = tl.load(held_ptrs, mask=place_X < SETS * WAYS, other=NONE)
        tl.store(held_ptrs, NONE, mask=held_X >= now)
    tl.debug_barrier()
    topk_ptr += request * POSITIONS
    rows_ptr += request * POSITIONS
    fetch_ids_ptr += request * POSITIONS
    fetch_rows_ptr += request * POSITIONS

    heads_ptr = scratch_ptr + request * SCRATCH
    links_ptr = heads_ptr + BUCKETS
    kinds_ptr = links_ptr + tl.maximum(POSITIONS, WAYS)
    orders_ptr = kinds_ptr + POSITIONS
    kept_ptr = orders_ptr + TOPK
    free_ptr = kept_ptr + WAYS
    count = 0
    for query in range(QUERIES):
        stored = tl.load(slot_mapping_ptr + request * QUERIES + query)
        # A padding token has no last visible id, and a buffer of no rows: it reads nothing and frees nothing.
        last = tl.where(stored >= 0, length - QUERIES + query, NONE)
        ways = tl.where(last >= 0, WAYS, 0)
        first_row = (slot * SETS + query) * WAYS
        fill(heads_ptr, NONE, 0, BUCKETS, BLOCK)
        tl.debug_barrier()
        for start in range(0, ways, BLOCK):
            way_X = start + tl.arange(0, BLOCK)
            tag_X = tl.load(tags_ptr + first_row + way_X, mask=way_X < WAYS, other=NONE)
            _enter(heads_ptr, links_ptr, way_X, tag_X, tag_X >= 0, BUCKETS)
            tl.store(kept_ptr + way_X, 0, mask=way_X < WAYS)
        tl.debug_barrier()
        reads = _look_up(
            topk_ptr + query * TOPK, last, now, tags_ptr + first_row, first_row, rows_ptr + query * TOPK,
            heads_ptr, links_ptr, kept_ptr, orders_ptr, kinds_ptr + query * TOPK, TOPK, BUCKETS, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        num_free = 0
        for start in range(0, ways, BLOCK):
            way_X = start + tl.arange(0, BLOCK)
            free_X = tl.load(kept_ptr + way_X, mask=way_X < WAYS, other=1) == 0
            order_X = num_free + tl.cumsum(free_X.to(tl.int32), axis=0) - 1
            num_free += tl.sum(free_X.to(tl.int32))
            tl.store(free_ptr + order_X, way_X, mask=free_X)
            tl.store(tags_ptr + first_row + way_X, NONE, mask=free_X)
        tl.debug_barrier()
        for start in range(0, TOPK, BLOCK):
            rank_X = start + tl.arange(0, BLOCK)
            order_X = tl.load(orders_ptr + rank_X, mask=rank_X < TOPK, other=NONE)
            read_X = order_X >= 0
            id_X = tl.load(topk_ptr + query * TOPK + rank_X, mask=read_X, other=0)
            row_X = first_row + tl.load(free_ptr + order_X, mask=read_X, other=0)
            tl.store(rows_ptr + query * TOPK + rank_X, row_X, mask=read_X)
            # Buffer rows are numbered as tags are.
            tl.store(tags_ptr + row_X, id_X, mask=read_X)
            tl.store(fetch_ids_ptr + count + order_X, id_X, mask=read_X)
            tl.store(fetch_rows_ptr + count + order_X, row_X, mask=read_X)
        count += reads
    fill(fetch_ids_ptr, NONE, count, POSITIONS, BLOCK)
    fill(fetch_rows_ptr, NONE, count, POSITIONS, BLOCK)
    hits, unique_hits, misses, unique_misses = _count_kinds(
        topk_ptr, kinds_ptr, heads_ptr, links_ptr, POSITIONS, BUCKETS, BLOCK
    )
    tl.store(counts_ptr + request, count)
    store_stats(
        stats_ptr + request * NUM_STATS, hits, unique_hits, unique_misses, misses - unique_misses, count - misses, 0, 0
    )


def plan_gather_launch(
    topk_TK: torch.Tensor, slot_mapping_T: torch.Tensor, seq_lens_B: torch.Tensor, committed_B: torch.Tensor,
    request_slots_B: torch.Tensor, tags_RNW: torch.Tensor, sizes: PoolSizes,
) -> tuple[Launch, tuple[torch.Tensor, ...]]:  # fmt: skip
    """The launch of `plan_gather`, and the tensors that it will write."""
    batch, (tokens, topk) = request_slots_B.shape[0], topk_TK.shape
    queries = tokens // max(1, batch)
    positions = queries * topk
    assert positions <= MAX_POSITIONS, f"a plan has at most {MAX_POSITIONS} ids per request, got {positions}"
    assert queries <= sizes.sets, f"{sizes.sets} buffers per request, and {queries} queries"
    assert topk <= sizes.ways, f"a buffer holds {sizes.ways} rows, and a query selects {topk}"
    rows_TK = torch.empty_like(topk_TK)
    fetch_ids_BX, fetch_rows_BX = topk_TK.new_empty(batch, positions), topk_TK.new_empty(batch, positions)
    counts_B, stats_BC = topk_TK.new_empty(batch), topk_TK.new_empty(batch, NUM_STATS.value)
    buckets = 2 * power_of_two(sizes.ways)
    scratch = buckets + max(positions, sizes.ways) + positions + topk + 2 * sizes.ways
    arguments = {
        "topk_ptr": topk_TK, "slot_mapping_ptr": slot_mapping_T, "seq_lens_ptr": seq_lens_B,
        "committed_ptr": committed_B, "request_slots_ptr": request_slots_B, "tags_ptr": tags_RNW,
        "rows_ptr": rows_TK, "fetch_ids_ptr": fetch_ids_BX, "fetch_rows_ptr": fetch_rows_BX,
        "counts_ptr": counts_B, "stats_ptr": stats_BC, "scratch_ptr": topk_TK.new_empty(batch, scratch),
        "QUERIES": queries, "TOPK": topk, "SETS": sizes.sets, "WAYS": sizes.ways,
        "BUCKETS": buckets, "SCRATCH": scratch, "BLOCK": THREADS,
    }  # fmt: skip
    launch = Launch(kernel=plan_gather_kernel, grid=(batch,), arguments=arguments, threads=THREADS)
    return launch, (rows_TK, fetch_ids_BX, fetch_rows_BX, counts_B, stats_BC)


def plan_gather(
    topk_TK: torch.Tensor, slot_mapping_T: torch.Tensor, seq_lens_B: torch.Tensor, committed_B: torch.Tensor,
    request_slots_B: torch.Tensor, tags_RNW: torch.Tensor, sizes: PoolSizes,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Rows (T, K), fetch ids and rows (B, X) each, counts (B,), stats (B, 7), all int32; changes `tags`."""
    launch, outputs = plan_gather_launch(
        topk_TK, slot_mapping_T, seq_lens_B, committed_B, request_slots_B, tags_RNW, sizes
    )
    launch.run()
    return outputs
