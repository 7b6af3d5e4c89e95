"""The plan of mode `serve_install`, as the CANN recipes of GLM-5.2 publish it: FIFO sets that change after the step.

Attention reads a buffer into which every selected row is copied, from the pool or from the host. Later the rows that
came from the host are copied on into the pool, and after all layers of a group did so, the group's metadata follow.
Axes: as in `arrays`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from castoff.policy.arrays import (
    HITS,
    REPEATED_MISSES,
    STATS,
    UNIQUE_HITS,
    UNIQUE_MISSES,
    WINDOW_READS,
    Ints,
    Longs,
    Selection,
    own_positions,
    shape_of,
)
from castoff.policy.compiled import compiled
from castoff.policy.id_table import clear, new_table, slot_of
from castoff.policy.look_up import look_up, new_found, set_of


class ServePlan(NamedTuple):
    """Where the selected rows come from, and which of them are then installed in the pool."""

    sources_TK: Ints
    """A row code of the pool; -2 - id for a token to read from the host; -1 where no id is valid."""
    install_ids_BX: Ints
    """Settled tokens that are not in the pool, once each, ordered by their first position."""
    install_rows_BX: Ints
    """The row codes where they go; -1 for one whose row a later one of the list takes."""
    install_from_BX: Ints
    """Row t · K + k of the buffer, the token's first. From counts[b] on all three lists are -1."""
    counts_B: Ints
    stats_BC: Ints


def plan_serve(selection: Selection, tags_RNW: Ints, hands_RN: Ints) -> ServePlan:
    """Sources of what a step selected, and the installs that follow. Mutates nothing.

    A settled token is read from the pool if it is there; any other token from the host, at every position that selects
    it. Each missing settled token goes to the way at its set's hand, which moves on by one; where a set gets more
    than W, hands come round, and the last token in a way stays.
    """
    requests, queries, columns = shape_of(selection)
    assert tags_RNW.shape[:2] == hands_RN.shape
    plan = ServePlan(
        np.empty((requests * queries, columns), np.int32),
        np.empty((requests, queries * columns), np.int32),
        np.empty((requests, queries * columns), np.int32),
        np.empty((requests, queries * columns), np.int32),
        np.empty(requests, np.int32),
        np.empty((requests, len(STATS)), np.int32),
    )
    compiled(plan_requests)(*selection, tags_RNW, hands_RN, *plan)
    return plan


def install_metadata(
    install_ids_BX: Ints, install_rows_BX: Ints, counts_B: Ints, request_slots_B: Longs, tags_RNW: Ints, hands_RN: Ints
) -> None:
    """Make the metadata those of the pools after a plan's installs. Mutates tags and hands.

    Both are as the plan saw them, so every layer of a group must have installed before.
    """
    assert tags_RNW.shape[:2] == hands_RN.shape
    assert install_ids_BX.shape == install_rows_BX.shape
    assert len(install_ids_BX) == len(counts_B) == len(request_slots_B)
    compiled(install)(install_ids_BX, install_rows_BX, counts_B, request_slots_B, tags_RNW, hands_RN)


class _Request(NamedTuple):
    """One request of a call."""

    ids_X: Ints
    hands_N: Ints
    ways: int
    pool_row: int
    first_from: int
    install_ids_X: Ints
    install_rows_X: Ints
    install_from_X: Ints
    stats_C: Ints


def plan_requests(
    topk_TK: Ints,
    slot_mapping_T: Longs,
    seq_lens_B: Longs,
    committed_B: Longs,
    request_slots_B: Longs,
    tags_RNW: Ints,
    hands_RN: Ints,
    sources_TK: Ints,
    install_ids_BX: Ints,
    install_rows_BX: Ints,
    install_from_BX: Ints,
    counts_B: Ints,
    stats_BC: Ints,
) -> None:
    selection = Selection(topk_TK, slot_mapping_T, seq_lens_B, committed_B, request_slots_B)
    for lists in (sources_TK, install_ids_BX, install_rows_BX, install_from_BX):
        lists[:] = -1
    counts_B[:] = 0
    stats_BC[:] = 0
    slots, sets, ways = tags_RNW.shape
    requests, width = install_ids_BX.shape
    found, listed = new_found(width), new_table(width)
    last_P = np.empty(sets * ways, np.int32)
    for b in range(requests):
        r = int(request_slots_B[b])
        if r < 0:
            continue
        assert r < slots
        ids_X = topk_TK.reshape((requests, width))[b]
        sources_X = sources_TK.reshape((requests, width))[b]
        pool_row = r * sets * ways
        hits, misses, window = look_up(
            ids_X, own_positions(selection, b), int(committed_B[b]), tags_RNW[r], pool_row, sources_X, found
        )
        for positions in (found.misses_X[:misses], found.window_X[:window]):
            for position in positions:
                sources_X[position] = -2 - ids_X[position]
        request = _Request(
            ids_X,
            hands_RN[r].copy(),
            ways,
            pool_row,
            b * width,
            install_ids_BX[b],
            install_rows_BX[b],
            install_from_BX[b],
            stats_BC[b],
        )
        counts_B[b] = _list_installs(request, found.misses_X[:misses], listed, last_P)
        stats_BC[b, HITS] = hits
        stats_BC[b, UNIQUE_HITS] = _distinct(found.hits_X[:hits], last_P)
        stats_BC[b, WINDOW_READS] = window


def _list_installs(request: _Request, misses: Ints, listed: Ints, last_P: Ints) -> int:
    """List each missing token once, with what installing it will do; returns the length of the list.

    listed: an empty table, left empty. last: scratch, the last entry of the list for each row of the pool.
    """
    last_P[:] = -1
    sets, count = len(request.hands_N), 0
    for position in misses:
        token = int(request.ids_X[position])
        y = slot_of(listed, token)
        if listed[0, y] >= 0:
            continue
        listed[0, y] = token
        n = set_of(token, sets)
        way = int(request.hands_N[n]) % request.ways
        request.hands_N[n] = (way + 1) % request.ways
        row = n * request.ways + way
        if last_P[row] >= 0:
            request.install_rows_X[last_P[row]] = -1
        last_P[row] = count
        request.install_ids_X[count] = token
        request.install_rows_X[count] = request.pool_row + row
        request.install_from_X[count] = request.first_from + position
        count += 1
    clear(listed)
    request.stats_C[UNIQUE_MISSES] = count
    request.stats_C[REPEATED_MISSES] = len(misses) - count
    return count


def _distinct(rows: Ints, seen_P: Ints) -> int:
    """How many distinct rows of the pool a list has; seen: scratch."""
    seen_P[:] = 0
    for row in rows:
        seen_P[row] = 1
    return int(seen_P.sum())


def install(
    install_ids_BX: Ints, install_rows_BX: Ints, counts_B: Ints, request_slots_B: Longs, tags_RNW: Ints, hands_RN: Ints
) -> None:
    slots, sets, ways = tags_RNW.shape
    for b in range(len(counts_B)):
        r = int(request_slots_B[b])
        if r < 0:
            continue
        assert r < slots
        assert counts_B[b] <= install_ids_BX.shape[1]
        for entry in range(counts_B[b]):
            token = int(install_ids_BX[b, entry])
            n = set_of(token, sets)
            hands_RN[r, n] = (hands_RN[r, n] + 1) % ways
            if install_rows_BX[b, entry] >= 0:
                row = int(install_rows_BX[b, entry]) - r * sets * ways
                assert row // ways == n
                tags_RNW[r, n, row % ways] = token
