"""offload_plan: rows, fetch list and new group state of one step of `direct` offload, in one kernel launch.

Axes: B requests of a call, S queries of each, T = B·S, K top-k columns, X = S·K, R request slots, N sets, W ways.

One program plans one request, in phases with barriers between them:

    look up     every id at its place: window row, pool row of a hit, or an entry of the miss list
    rank        the misses within their sets (sets.py)
    choose      a way for each first occurrence: the rank-th of its set's unblocked ways in the policy's order
    place       tags, last use, hands and marks; duplicates take the row of what they duplicate; the fetch list

That the rank alone decides the way is what makes a miss independent of the others of its set. Taking the ways of a set
one by one, in the order of FIFO, LRU or CLOCK, takes them in the order of one key, known before the first is taken:

    FIFO    the distance from the hand, (way - hand) mod W
    LRU     the last use, then the way
    CLOCK   the mark, then the distance: the hand takes unmarked ways on its first lap and clears the marks that it
            passes; a second lap starts when none is left, and finds all marks cleared
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from castoff.ops.offload_plan import PoolSizes
from castoff.ops.triton.launch import Launch, power_of_two
from castoff.ops.triton.sets import (
    DUPLICATE,
    MAX_POSITIONS,
    NEVER,
    NONE,
    NUM_STATS,
    RING_POSITION,
    THREADS,
    count_bits,
    distinct_in_set,
    fill,
    list_misses,
    look_up,
    rank_misses,
    store_stats,
)

# Registers bound a (misses, ways) tile.
_CHOICE_ELEMENTS = 8192


@triton.jit
def _look_up(
    topk_ptr, slot_mapping_ptr, length, now, tags_ptr, used_ptr, marks_ptr, pool_row, ring_row, rows_ptr,
    heads_ptr, hit_ways_ptr, miss_ids_ptr, miss_places_ptr, states_ptr,
    QUERIES: tl.constexpr, TOPK: tl.constexpr, SETS: tl.constexpr, WAYS: tl.constexpr, RING: tl.constexpr,
    POLICY: tl.constexpr, WAYS_POW2: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of hits and window reads, and the list of misses: returns numbers of hits, window reads and misses."""
    POSITIONS: tl.constexpr = QUERIES * TOPK
    misses = 0
    hits_X = tl.full((BLOCK,), 0, tl.int32)
    window_X = tl.full((BLOCK,), 0, tl.int32)
    for start in range(0, POSITIONS, BLOCK):
        place_X = start + tl.arange(0, BLOCK)
        id_X, own_X, asked_X, way_X = look_up(
            topk_ptr, slot_mapping_ptr, length, now, tags_ptr, pool_row, place_X, QUERIES, TOPK, SETS, WAYS, WAYS_POW2
        )
        set_X = id_X % SETS
        hit_X = asked_X & (way_X < WAYS)
        found_X = pool_row + set_X * WAYS + way_X
        row_X = tl.where(hit_X, found_X, tl.where(own_X, ring_row + id_X % RING, NONE))
        tl.store(rows_ptr + place_X, row_X, mask=place_X < POSITIONS)
        tl.store(used_ptr + found_X, now, mask=hit_X)
        bit_X = tl.full((BLOCK,), 1, tl.int32) << (way_X & 31)
        tl.atomic_or(hit_ways_ptr + set_X, bit_X, mask=hit_X, sem="relaxed")
        if POLICY == "clock":
            tl.atomic_or(marks_ptr + set_X, bit_X, mask=hit_X, sem="relaxed")
        miss_X = asked_X & (way_X >= WAYS)
        misses = list_misses(
            misses, miss_ids_ptr, miss_places_ptr, states_ptr, heads_ptr, place_X, id_X, miss_X, SETS, SPAN
        )
        hits_X += hit_X.to(tl.int32)
        window_X += own_X.to(tl.int32)
    return tl.sum(hits_X), tl.sum(window_X), misses


@triton.jit
def _rankth_least(key_XW, rank_X, first_X, WAYS: tl.constexpr):
    """The least key of each row but for `rank` lesser ones, (X,); NEVER where there are not so many. Keys differ."""
    depth = tl.minimum(tl.max(tl.where(first_X, rank_X, 0)), WAYS)
    for taken in range(depth):
        least_X = tl.min(key_XW, axis=1)
        drop_XW = (taken < rank_X)[:, None] & (key_XW == least_X[:, None])
        key_XW = tl.where(drop_XW, NEVER, key_XW)
    return tl.min(key_XW, axis=1)


@triton.jit
def _choose(
    misses, now, used_ptr, hands_ptr, marks_ptr, pool_row, staged_row, rows_ptr,
    heads_ptr, miss_ids_ptr, miss_places_ptr, states_ptr, next_hands_ptr, next_marks_ptr,
    SETS: tl.constexpr, WAYS: tl.constexpr, POLICY: tl.constexpr, WAYS_POW2: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of first occurrences, and the hands and marks that they leave; returns how many overflow.

    Reads the group state and writes none of it, so that no miss sees what another one changes.
    """
    way_W = tl.arange(0, WAYS_POW2)
    bit_W = tl.full((WAYS_POW2,), 1, tl.int32) << (way_W & 31)
    overflows = 0
    for start in range(0, misses, BLOCK):
        miss_X = start + tl.arange(0, BLOCK)
        rank_X = tl.load(states_ptr + miss_X, mask=miss_X < misses, other=NONE)
        first_X = rank_X >= 0
        place_X = tl.load(miss_places_ptr + miss_X, mask=first_X, other=0)
        set_X = tl.load(miss_ids_ptr + miss_X, mask=first_X, other=0) % SETS
        first_row_X = pool_row + set_X * WAYS
        asked_XW = first_X[:, None] & (way_W < WAYS)[None, :]
        used_XW = tl.load(used_ptr + first_row_X[:, None] + way_W[None, :], mask=asked_XW, other=0)
        open_XW = asked_XW & (used_XW != now)
        num_open_X = tl.sum(open_XW.to(tl.int32), axis=1)
        # Keys give the way back: it is key + hand, modulo W.
        if POLICY == "lru":
            hand_X = tl.full((BLOCK,), 0, tl.int32)
            key_XW = (used_XW + 1) * WAYS + way_W[None, :]
        else:
            hand_X = tl.load(hands_ptr + set_X, mask=first_X, other=0)
            distance_XW = (way_W[None, :] - hand_X[:, None] + WAYS) % WAYS
            key_XW = distance_XW
            if POLICY == "clock":
                marks_X = tl.load(marks_ptr + set_X, mask=first_X, other=0, volatile=True)
                key_XW += tl.where((marks_X[:, None] & bit_W[None, :]) != 0, WAYS, 0)
        key_X = _rankth_least(tl.where(open_XW, key_XW, NEVER), rank_X, first_X, WAYS)
        placed_X = first_X & (rank_X < num_open_X)
        way_X = tl.where(placed_X, key_X + hand_X, 0) % WAYS
        row_X = tl.where(placed_X, first_row_X + way_X, staged_row + place_X)
        tl.store(rows_ptr + place_X, row_X, mask=first_X)
        overflows += tl.sum((first_X & (rank_X >= num_open_X)).to(tl.int32))
        if POLICY != "lru":
            distinct_X = distinct_in_set(heads_ptr, set_X, first_X, SETS, SPAN)
            last_X = placed_X & (rank_X == tl.minimum(distinct_X, num_open_X) - 1)
            tl.store(next_hands_ptr + miss_X, tl.where(last_X, (way_X + 1) % WAYS, NONE), mask=first_X)
            if POLICY == "clock":
                passed_XW = open_XW & (distance_XW < key_X[:, None])
                passed_X = tl.sum(tl.where(passed_XW, bit_W[None, :], 0), axis=1)
                tl.store(next_marks_ptr + miss_X, marks_X & ~passed_X, mask=first_X)
    return overflows


@triton.jit
def _place(
    misses, now, ring_first, pool_rows, tags_ptr, used_ptr, hands_ptr, marks_ptr, rows_ptr, fetch_ids_ptr,
    fetch_rows_ptr, miss_ids_ptr, miss_places_ptr, states_ptr, next_hands_ptr, next_marks_ptr,
    POSITIONS: tl.constexpr, SETS: tl.constexpr, POLICY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Group state, rows of duplicates and the fetch list: returns its length and how much of it is promoted."""
    count = 0
    promoted = 0
    for start in range(0, misses, BLOCK):
        miss_X = start + tl.arange(0, BLOCK)
        listed_X = miss_X < misses
        state_X = tl.load(states_ptr + miss_X, mask=listed_X, other=0)
        first_X = listed_X & (state_X >= 0)
        copy_X = listed_X & (state_X < 0)
        source_X = tl.where(copy_X, DUPLICATE - state_X, miss_X)
        id_X = tl.load(miss_ids_ptr + miss_X, mask=listed_X, other=0)
        place_X = tl.load(miss_places_ptr + miss_X, mask=listed_X, other=0)
        source_place_X = tl.load(miss_places_ptr + source_X, mask=listed_X, other=0)
        row_X = tl.load(rows_ptr + source_place_X, mask=listed_X, other=NONE)
        tl.store(rows_ptr + place_X, row_X, mask=copy_X)
        # Pool rows are numbered as tags are.
        placed_X = first_X & (row_X < pool_rows)
        tl.store(tags_ptr + row_X, id_X, mask=placed_X)
        tl.store(used_ptr + row_X, now, mask=placed_X)
        if POLICY != "lru":
            hand_X = tl.load(next_hands_ptr + miss_X, mask=first_X, other=NONE)
            last_X = hand_X >= 0
            tl.store(hands_ptr + id_X % SETS, hand_X, mask=last_X)
            if POLICY == "clock":
                marks_X = tl.load(next_marks_ptr + miss_X, mask=last_X, other=0)
                tl.store(marks_ptr + id_X % SETS, marks_X, mask=last_X)
        from_ring_X = first_X & (id_X >= ring_first)
        index_X = count + tl.cumsum(first_X.to(tl.int32), axis=0) - 1
        tl.store(fetch_ids_ptr + index_X, tl.where(from_ring_X, RING_POSITION - id_X, id_X), mask=first_X)
        tl.store(fetch_rows_ptr + index_X, row_X, mask=first_X)
        count += tl.sum(first_X.to(tl.int32))
        promoted += tl.sum(from_ring_X.to(tl.int32))
    fill(fetch_ids_ptr, NONE, count, POSITIONS, BLOCK)
    fill(fetch_rows_ptr, NONE, count, POSITIONS, BLOCK)
    return count, promoted


@triton.jit
def plan_direct_kernel(
    topk_ptr, slot_mapping_ptr, seq_lens_ptr, committed_ptr, request_slots_ptr, ring_first_ptr,
    tags_ptr, used_ptr, hands_ptr, marks_ptr,
    rows_ptr, fetch_ids_ptr, fetch_rows_ptr, counts_ptr, stats_ptr, scratch_ptr,
    pool_rows, layer_rows, staging_rows,
    QUERIES: tl.constexpr, TOPK: tl.constexpr, SETS: tl.constexpr, WAYS: tl.constexpr, RING: tl.constexpr,
    POLICY: tl.constexpr, WAYS_POW2: tl.constexpr, SPAN: tl.constexpr, SCRATCH: tl.constexpr,
    BLOCK: tl.constexpr, CHOICE_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request row; see the module. scratch: (B, SCRATCH)."""
    POSITIONS: tl.constexpr = QUERIES * TOPK
    request = tl.program_id(0)
    slot = tl.load(request_slots_ptr + request).to(tl.int32)
    # A padding row is a request of length 0, which may see nothing.
    length = tl.load(seq_lens_ptr + request, mask=slot >= 0, other=0).to(tl.int32)
    slot = tl.maximum(slot, 0)
    now = tl.load(committed_ptr + request).to(tl.int32)
    ring_first = tl.load(ring_first_ptr + request).to(tl.int32)
    pool_row = slot * (SETS * WAYS)
    hands_ptr += slot * SETS
    marks_ptr += slot * SETS
    rows_ptr += request * POSITIONS

    heads_ptr = scratch_ptr + request * SCRATCH
    hit_ways_ptr = heads_ptr + 2 * SETS
    miss_ids_ptr = hit_ways_ptr + SETS
    miss_places_ptr = miss_ids_ptr + POSITIONS
    states_ptr = miss_places_ptr + POSITIONS
    next_hands_ptr = states_ptr + POSITIONS
    next_marks_ptr = next_hands_ptr + POSITIONS
    fill(heads_ptr, NEVER, 0, 2 * SETS, BLOCK)
    fill(hit_ways_ptr, 0, 0, SETS, BLOCK)
    tl.debug_barrier()
    hits, window_reads, misses = _look_up(
        topk_ptr + request * POSITIONS, slot_mapping_ptr + request * QUERIES, length, now,
        tags_ptr, used_ptr, marks_ptr, pool_row, pool_rows + slot * RING, rows_ptr,
        heads_ptr, hit_ways_ptr, miss_ids_ptr, miss_places_ptr, states_ptr,
        QUERIES, TOPK, SETS, WAYS, RING, POLICY, WAYS_POW2, SPAN, BLOCK,
    )  # fmt: skip
    tl.debug_barrier()
    unique_hits = count_bits(hit_ways_ptr, SETS, BLOCK)
    rank_misses(miss_ids_ptr, states_ptr, heads_ptr, misses, SETS, SPAN, BLOCK)
    overflows = _choose(
        misses, now, used_ptr, hands_ptr, marks_ptr, pool_row, layer_rows + slot * staging_rows, rows_ptr,
        heads_ptr, miss_ids_ptr, miss_places_ptr, states_ptr, next_hands_ptr, next_marks_ptr,
        SETS, WAYS, POLICY, WAYS_POW2, SPAN, CHOICE_BLOCK,
    )  # fmt: skip
    tl.debug_barrier()
    count, promoted = _place(
        misses, now, ring_first, pool_rows, tags_ptr, used_ptr, hands_ptr, marks_ptr, rows_ptr,
        fetch_ids_ptr + request * POSITIONS, fetch_rows_ptr + request * POSITIONS,
        miss_ids_ptr, miss_places_ptr, states_ptr, next_hands_ptr, next_marks_ptr,
        POSITIONS, SETS, POLICY, BLOCK,
    )  # fmt: skip
    tl.store(counts_ptr + request, count)
    store_stats(
        stats_ptr + request * NUM_STATS,
        hits, unique_hits, count - promoted, misses - count, window_reads, promoted, overflows,
    )  # fmt: skip


def plan_direct_launch(
    topk_TK: torch.Tensor, slot_mapping_T: torch.Tensor, seq_lens_B: torch.Tensor, committed_B: torch.Tensor,
    request_slots_B: torch.Tensor, ring_first_B: torch.Tensor,
    tags_RNW: torch.Tensor, used_RNW: torch.Tensor, hands_RN: torch.Tensor, marks_RN: torch.Tensor,
    sizes: PoolSizes,
) -> tuple[Launch, tuple[torch.Tensor, ...]]:  # fmt: skip
    """The launch of `plan_direct`, and the tensors that it will write."""
    batch, (tokens, topk) = request_slots_B.shape[0], topk_TK.shape
    queries = tokens // max(1, batch)
    positions, pool_tokens = queries * topk, sizes.sets * sizes.ways
    assert sizes.policy in ("fifo", "lru", "clock"), f"no such policy of a set: {sizes.policy}"
    assert positions <= MAX_POSITIONS, f"a plan has at most {MAX_POSITIONS} ids per request, got {positions}"
    assert sizes.ways <= 32, "a set's marks are the bits of one int32"
    rows_TK = torch.empty_like(topk_TK)
    fetch_ids_BX, fetch_rows_BX = topk_TK.new_empty(batch, positions), topk_TK.new_empty(batch, positions)
    counts_B, stats_BC = topk_TK.new_empty(batch), topk_TK.new_empty(batch, NUM_STATS.value)
    scratch = 3 * sizes.sets + 5 * positions
    ways_pow2 = power_of_two(sizes.ways)
    arguments = {
        "topk_ptr": topk_TK, "slot_mapping_ptr": slot_mapping_T, "seq_lens_ptr": seq_lens_B,
        "committed_ptr": committed_B, "request_slots_ptr": request_slots_B, "ring_first_ptr": ring_first_B,
        "tags_ptr": tags_RNW, "used_ptr": used_RNW, "hands_ptr": hands_RN, "marks_ptr": marks_RN,
        "rows_ptr": rows_TK, "fetch_ids_ptr": fetch_ids_BX, "fetch_rows_ptr": fetch_rows_BX,
        "counts_ptr": counts_B, "stats_ptr": stats_BC, "scratch_ptr": topk_TK.new_empty(batch, scratch),
        "pool_rows": sizes.requests * pool_tokens,
        "layer_rows": sizes.requests * (pool_tokens + sizes.ring_tokens),
        "staging_rows": sizes.staging_rows,
        "QUERIES": queries, "TOPK": topk, "SETS": sizes.sets, "WAYS": sizes.ways, "RING": sizes.ring_tokens,
        "POLICY": sizes.policy, "WAYS_POW2": ways_pow2, "SPAN": power_of_two(positions), "SCRATCH": scratch,
        "BLOCK": THREADS, "CHOICE_BLOCK": min(THREADS, _CHOICE_ELEMENTS // ways_pow2),
    }  # fmt: skip
    launch = Launch(kernel=plan_direct_kernel, grid=(batch,), arguments=arguments, threads=THREADS)
    return launch, (rows_TK, fetch_ids_BX, fetch_rows_BX, counts_B, stats_BC)


def plan_direct(
    topk_TK: torch.Tensor, slot_mapping_T: torch.Tensor, seq_lens_B: torch.Tensor, committed_B: torch.Tensor,
    request_slots_B: torch.Tensor, ring_first_B: torch.Tensor,
    tags_RNW: torch.Tensor, used_RNW: torch.Tensor, hands_RN: torch.Tensor, marks_RN: torch.Tensor,
    sizes: PoolSizes,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Rows (T, K), fetch ids and rows (B, X) each, counts (B,), stats (B, 7), all int32; changes the group state.

    topk: int32 (T, K), -1 for none. slot_mapping: int64 (T,), negative for padding. seq_lens (this call's tokens among
    them), committed, request_slots (-1 for padding) and ring_first: int64 (B,). Group state: int32. Positions are below
    2^31 / W, so that a last use and a way fit in an int32. Results do not depend on the order in which threads run.
    """
    launch, outputs = plan_direct_launch(
        topk_TK, slot_mapping_T, seq_lens_B, committed_B, request_slots_B, ring_first_B,
        tags_RNW, used_RNW, hands_RN, marks_RN, sizes,
    )  # fmt: skip
    launch.run()
    return outputs
