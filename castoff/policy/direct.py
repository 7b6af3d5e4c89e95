"""The plan of mode `direct`: every selected row gets its final place, and every missing token is fetched once.

Axes: as in `arrays`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from castoff.policy import clock, fifo, lru
from castoff.policy.arrays import (
    HITS,
    PROMOTED,
    REPEATED_MISSES,
    STAGED,
    UNIQUE_HITS,
    UNIQUE_MISSES,
    WINDOW_READS,
    FetchPlan,
    Ints,
    Longs,
    PoolState,
    Selection,
    clear_fetch_plan,
    new_fetch_plan,
    own_positions,
    shape_of,
)
from castoff.policy.compiled import compiled
from castoff.policy.id_table import clear, new_table, slot_of
from castoff.policy.look_up import find, look_up, new_found, set_of
from castoff.spec.offload import PoolPolicy

Touch = Callable[[Ints, Ints, int], None]
Victim = Callable[[Ints, Ints, Ints, int, int], int]

# A policy is a file with these two functions, and a line here.
_POLICIES: dict[PoolPolicy, tuple[Touch, Victim]] = {
    "fifo": (fifo.touch, fifo.victim),
    "lru": (lru.touch, lru.victim),
    "clock": (clock.touch, clock.victim),
}


def plan_direct(
    policy: PoolPolicy,
    selection: Selection,
    ring_first_B: Longs,
    state: PoolState,
    *,
    ring_tokens: int,
    staging_rows: int,
) -> FetchPlan:
    """Place what a step selected. Mutates state, for each request apart: none depends on another.

    ring_first: the first position whose row is in the ring. ring_tokens: G. staging_rows: of one request, at least X.
    `committed` of a request must rise from step to step.

        hits    a settled token that is in its set stays there; its way is used by this step
        window  a token of this step is in the ring, and nobody fetches it
        misses  every other token, in the order of positions, takes the way that the policy gives up among those that
                this step does not use; it is fetched there, and its way is used by this step too. Where this step
                uses all ways of the set, it is fetched to the staging row of its position, and the pool stays as it is.

    A token that is missing at several positions has the row of the first.
    """
    requests, queries, columns = shape_of(selection)
    assert len(ring_first_B) == requests
    assert state.tags_RNW.shape == state.used_RNW.shape
    assert state.tags_RNW.shape[:2] == state.hands_RN.shape == state.marks_RN.shape
    assert policy != "clock" or state.tags_RNW.shape[2] <= 32
    assert ring_tokens > 0
    assert staging_rows >= queries * columns
    plan = new_fetch_plan(requests, queries, columns)
    # Arrays one by one: numba takes microseconds to unpack tuples of them.
    compiled(planner(policy))(*selection, ring_first_B, *state, ring_tokens, staging_rows, *plan)
    return plan


class _Request(NamedTuple):
    """One request of a call."""

    ids_X: Ints
    committed: int
    ring_first: int
    tags_NW: Ints
    used_NW: Ints
    hands_N: Ints
    marks_N: Ints
    pool_row: int  # its first row of each kind
    ring_row: int
    ring_tokens: int
    staging_row: int
    rows_X: Ints
    fetch_ids_X: Ints
    fetch_rows_X: Ints
    stats_C: Ints


@cache
def planner(policy: PoolPolicy) -> Callable[..., None]:
    """The function that plans by one policy; its arguments are those of `plan_direct` and the arrays of the plan."""
    touch, victim = _POLICIES[policy]

    def plan_requests(
        topk_TK: Ints,
        slot_mapping_T: Longs,
        seq_lens_B: Longs,
        committed_B: Longs,
        request_slots_B: Longs,
        ring_first_B: Longs,
        tags_RNW: Ints,
        used_RNW: Ints,
        hands_RN: Ints,
        marks_RN: Ints,
        ring_tokens: int,
        staging_rows: int,
        rows_TK: Ints,
        fetch_ids_BX: Ints,
        fetch_rows_BX: Ints,
        counts_B: Ints,
        stats_BC: Ints,
    ) -> None:
        selection = Selection(topk_TK, slot_mapping_T, seq_lens_B, committed_B, request_slots_B)
        clear_fetch_plan(FetchPlan(rows_TK, fetch_ids_BX, fetch_rows_BX, counts_B, stats_BC))
        slots, sets, ways = tags_RNW.shape
        requests, width = fetch_ids_BX.shape
        found, overflowed = new_found(width), new_table(width)
        for b in range(requests):
            r = int(request_slots_B[b])
            if r < 0:
                continue
            assert r < slots
            request = _Request(
                topk_TK.reshape((requests, width))[b],
                int(committed_B[b]),
                int(ring_first_B[b]),
                tags_RNW[r],
                used_RNW[r],
                hands_RN[r],
                marks_RN[r],
                r * sets * ways,
                slots * sets * ways + r * ring_tokens,
                ring_tokens,
                slots * (sets * ways + ring_tokens) + r * staging_rows,
                rows_TK.reshape((requests, width))[b],
                fetch_ids_BX[b],
                fetch_rows_BX[b],
                stats_BC[b],
            )
            hits, misses, window = look_up(
                request.ids_X,
                own_positions(selection, b),
                request.committed,
                request.tags_NW,
                request.pool_row,
                request.rows_X,
                found,
            )
            _use(request, found.hits_X[:hits])
            touch(request.used_NW, request.marks_N, request.committed)
            _read_ring(request, found.window_X[:window])
            counts_B[b] = _place(request, found.misses_X[:misses], overflowed, victim)

    return plan_requests


def _use(request: _Request, hits: Ints) -> None:
    """Note that this step uses the ways that it hit."""
    used_P = request.used_NW.reshape(-1)
    unique = 0
    for row in hits:
        unique += used_P[row] != request.committed
        used_P[row] = request.committed
    request.stats_C[HITS] = len(hits)
    request.stats_C[UNIQUE_HITS] = unique


def _read_ring(request: _Request, window: Ints) -> None:
    """Rows of this step's own tokens, at so many positions."""
    for position in window:
        request.rows_X[position] = request.ring_row + int(request.ids_X[position]) % request.ring_tokens
    request.stats_C[WINDOW_READS] = len(window)


def _place(request: _Request, misses: Ints, overflowed: Ints, victim: Victim) -> int:
    """Rows of the missing tokens, by their positions, and the list of what to fetch, whose length is returned.

    overflowed: an empty table of ids, which is left empty; holds the staging rows of tokens without room in the pool.
    """
    sets, ways = request.tags_NW.shape
    stats_C = request.stats_C
    count = 0
    for position in misses:
        token = int(request.ids_X[position])
        n = set_of(token, sets)
        # It may have come to the pool at an earlier position.
        way = find(request.tags_NW, n, token)
        if way >= 0:
            request.rows_X[position] = request.pool_row + n * ways + way
            continue
        way = victim(request.used_NW, request.hands_N, request.marks_N, n, request.committed)
        if way >= 0:
            request.tags_NW[n, way] = token
            request.used_NW[n, way] = request.committed
            row = request.pool_row + n * ways + way
        else:
            y = slot_of(overflowed, token)
            if overflowed[0, y] >= 0:
                request.rows_X[position] = overflowed[1, y]
                continue
            row = request.staging_row + int(position)
            overflowed[0, y] = token
            overflowed[1, y] = row
            stats_C[STAGED] += 1
        promoted = token >= request.ring_first
        stats_C[PROMOTED] += promoted
        request.rows_X[position] = row
        request.fetch_ids_X[count] = -2 - token if promoted else token
        request.fetch_rows_X[count] = row
        count += 1
    stats_C[UNIQUE_MISSES] = count - stats_C[PROMOTED]
    stats_C[REPEATED_MISSES] = len(misses) - count
    if stats_C[STAGED] > 0:
        clear(overflowed)
    return count
