"""What plans over a set-associative pool share: a tag compare in a set, and misses ranked within their sets.

Axes of blocks: X positions or misses, W ways.

A plan lists its misses in order of position. Each set must take its own in that order, once per id. So all sets work
side by side, in turns: in each turn a set's head is its lowest miss that has no rank yet. The head gets the number of
the turn as its rank, other misses of the head's id become its duplicates, and the rest compete again. A miss sees in
turn t who won turn t - 1, and competes in the same pass; two arrays of heads, used alternately, keep the two apart.
A head holds (turn, miss) as one number that is lower in later turns, so no array is ever cleared.
"""

from __future__ import annotations

import triton
import triton.language as tl

THREADS = 1024
"""Threads of a plan, and elements of its blocks.

A program is alone on its multiprocessor in a batch of a hundred requests, so it is as wide as one can be. With two
elements per thread, Triton holds blocks in several orders, and moves them between these through shared memory.
"""
MAX_POSITIONS = 32_768
"""Positions of a request: a head is a pair of smaller numbers in an int32."""

NONE = tl.constexpr(-1)
"""No row, no id; and the state of a miss that has no rank yet."""
NEVER = tl.constexpr(2**31 - 1)
"""A head of a set that had no miss."""

DUPLICATE = tl.constexpr(-2)
"""A state is NONE, a rank >= 0, or DUPLICATE - the miss that it duplicates."""
RING_POSITION = tl.constexpr(-2)
"""An entry of a fetch list is a host token, or RING_POSITION - the position of a ring row."""
HOST_TOKEN = tl.constexpr(-2)
"""A source is NONE, a pool row, or HOST_TOKEN - id."""
NUM_STATS = tl.constexpr(7)


@triton.jit
def find_way(tags_ptr, pool_row, id_X, asked_X, SETS: tl.constexpr, WAYS: tl.constexpr, WAYS_POW2: tl.constexpr):
    """The way of its set in which each id is resident, WAYS_POW2 where it is in none or not asked for."""
    way_W = tl.arange(0, WAYS_POW2)
    row_XW = pool_row + (id_X % SETS)[:, None] * WAYS + way_W[None, :]
    read_XW = asked_X[:, None] & (way_W < WAYS)[None, :]
    tag_XW = tl.load(tags_ptr + row_XW, mask=read_XW, other=NONE)
    found_XW = read_XW & (tag_XW == id_X[:, None])
    return tl.min(tl.where(found_XW, way_W[None, :], WAYS_POW2), axis=1)


@triton.jit
def look_up(
    topk_ptr, slot_mapping_ptr, length, now, tags_ptr, pool_row, place_X,
    QUERIES: tl.constexpr, TOPK: tl.constexpr, SETS: tl.constexpr, WAYS: tl.constexpr, WAYS_POW2: tl.constexpr,
):  # fmt: skip
    """Of the ids at some places of a request: the ids, which are this step's own, which are committed, and the ways of
    those, as `find_way` gives them. An id that no query may see is neither."""
    inside_X = place_X < QUERIES * TOPK
    query_X = place_X // TOPK
    id_X = tl.load(topk_ptr + place_X, mask=inside_X, other=NONE)
    stored_X = tl.load(slot_mapping_ptr + query_X, mask=inside_X, other=NONE)
    valid_X = (stored_X >= 0) & (id_X >= 0) & (id_X <= length - QUERIES + query_X)
    asked_X = valid_X & (id_X < now)
    way_X = find_way(tags_ptr, pool_row, id_X, asked_X, SETS, WAYS, WAYS_POW2)
    return id_X, valid_X & (id_X >= now), asked_X, way_X


@triton.jit
def _head(turn, miss_X, SPAN: tl.constexpr):
    """(turn, miss) as one number: lower in later turns, then for lower misses."""
    return (SPAN - 1 - turn) * SPAN + miss_X


@triton.jit
def list_misses(
    misses, ids_ptr, places_ptr, states_ptr, heads_ptr, place_X, id_X, miss_X, SETS: tl.constexpr, SPAN: tl.constexpr
):
    """Append misses to a list of so many, without a rank, and to turn 0 of their sets; returns the list's length."""
    index_X = misses + tl.cumsum(miss_X.to(tl.int32), axis=0) - 1
    tl.store(ids_ptr + index_X, id_X, mask=miss_X)
    tl.store(places_ptr + index_X, place_X, mask=miss_X)
    tl.store(states_ptr + index_X, NONE, mask=miss_X)
    tl.atomic_min(heads_ptr + id_X % SETS, _head(0, index_X, SPAN), mask=miss_X, sem="relaxed")
    return misses + tl.sum(miss_X.to(tl.int32))


@triton.jit
def rank_misses(ids_ptr, states_ptr, heads_ptr, misses, SETS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Give each of `misses` listed ids its rank within its set, or the miss that it duplicates.

    ids, states: (misses,), states all NONE. heads: (2, SETS); the first row holds each set's lowest miss at turn 0, and
    a barrier stands between its writes and this call. SPAN: a power of two, no less than `misses`. Ends with a barrier.
    """
    unranked = misses
    turn = 1
    while unranked > 0:
        unranked = 0
        won_ptr = heads_ptr + ((turn + 1) % 2) * SETS
        next_ptr = heads_ptr + (turn % 2) * SETS
        for start in range(0, misses, BLOCK):
            miss_X = start + tl.arange(0, BLOCK)
            state_X = tl.load(states_ptr + miss_X, mask=miss_X < misses, other=0)
            open_X = state_X == NONE
            id_X = tl.load(ids_ptr + miss_X, mask=open_X, other=0)
            set_X = id_X % SETS
            winner_X = tl.load(won_ptr + set_X, mask=open_X, other=0, volatile=True) % SPAN
            same_X = open_X & (tl.load(ids_ptr + winner_X, mask=open_X, other=NONE) == id_X)
            # Threads may hold copies of a block, and none may read a state that another has written already.
            tl.debug_barrier()
            rank_X = tl.where(winner_X == miss_X, turn - 1, DUPLICATE - winner_X)
            tl.store(states_ptr + miss_X, rank_X, mask=same_X)
            left_X = open_X & (same_X == 0)
            tl.atomic_min(next_ptr + set_X, _head(turn, miss_X, SPAN), mask=left_X, sem="relaxed")
            unranked += tl.sum(left_X.to(tl.int32))
        tl.debug_barrier()
        turn += 1


@triton.jit
def distinct_in_set(heads_ptr, set_X, asked_X, SETS: tl.constexpr, SPAN: tl.constexpr):
    """How many ranks `rank_misses` gave in each set: its last head tells the last turn in which it had one."""
    even_X = tl.load(heads_ptr + set_X, mask=asked_X, other=0, volatile=True)
    odd_X = tl.load(heads_ptr + SETS + set_X, mask=asked_X, other=0, volatile=True)
    return SPAN - tl.minimum(even_X, odd_X) // SPAN


@triton.jit
def fill(ptr, value, first, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Write `value` to int32 `first` to COUNT - 1."""
    for start in range(first // BLOCK * BLOCK, COUNT, BLOCK):
        index_X = start + tl.arange(0, BLOCK)
        tl.store(ptr + index_X, value, mask=(index_X >= first) & (index_X < COUNT))


@triton.jit
def store_stats(
    ptr, hits, unique_hits, unique_misses, repeated_misses, window_reads, promoted, overflows
):  # fmt: skip
    """Write the counters of one request, in the order of their columns."""
    tl.store(ptr, hits)
    tl.store(ptr + 1, unique_hits)
    tl.store(ptr + 2, unique_misses)
    tl.store(ptr + 3, repeated_misses)
    tl.store(ptr + 4, window_reads)
    tl.store(ptr + 5, promoted)
    tl.store(ptr + 6, overflows)


@triton.jit
def count_bits(ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Number of bits set in COUNT int32."""
    bits_X = tl.full((BLOCK,), 0, tl.int32)
    for start in range(0, COUNT, BLOCK):
        index_X = start + tl.arange(0, BLOCK)
        word_X = tl.load(ptr + index_X, mask=index_X < COUNT, other=0, volatile=True)
        # Sums of bits in fields of 2, 4, 8 and 32 bits; what a shift copies of the sign is masked away.
        word_X -= (word_X >> 1) & 0x55555555
        word_X = (word_X & 0x33333333) + ((word_X >> 2) & 0x33333333)
        word_X = (word_X + (word_X >> 4)) & 0x0F0F0F0F
        word_X += word_X >> 8
        bits_X += (word_X + (word_X >> 16)) & 0x3F
    return tl.sum(bits_X)
