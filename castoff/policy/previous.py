"""The plan of mode `gather`: a query finds again what its last selection left in its buffer, and reads the rest.

The pool of a request is one buffer of W rows for each query index: set s is the buffer of query s.
Axes: as in `arrays`, with S <= N and K <= W.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from castoff.policy.arrays import (
    HITS,
    REPEATED_MISSES,
    UNIQUE_HITS,
    UNIQUE_MISSES,
    WINDOW_READS,
    FetchPlan,
    Ints,
    Longs,
    Selection,
    clear_fetch_plan,
    new_fetch_plan,
    own_positions,
    shape_of,
)
from castoff.policy.compiled import compiled
from castoff.policy.id_table import clear, new_table, slot_of

Bools = npt.NDArray[np.bool_]


def plan_gather(selection: Selection, tags_RNW: Ints) -> FetchPlan:
    """Place what a step selected, for each query apart. Mutates tags.

        hits   a settled token that is in the query's buffer stays at its place
        reads  what else is in the buffer leaves it; then every other token, in the order of ranks, is read from the
               host to the lowest free place. Tokens of this step are among them, counted as window_reads.

    Tokens that several queries read are fetched for each. The ids of one query are distinct.

    A padded query, and one that a call does not have, keeps its buffer, save tokens that are not settled: the rows of
    rejected ones are written anew, and must not be found when such a query comes back.
    """
    requests, queries, columns = shape_of(selection)
    _, sets, ways = tags_RNW.shape
    assert queries <= sets
    assert columns <= ways
    plan = new_fetch_plan(requests, queries, columns)
    compiled(plan_requests)(*selection, tags_RNW, *plan)
    return plan


class _Query(NamedTuple):
    """One query of a request."""

    ids_K: Ints
    own: int
    committed: int
    tags_W: Ints
    pool_row: int  # the first of its buffer
    rows_K: Ints


def plan_requests(
    topk_TK: Ints,
    slot_mapping_T: Longs,
    seq_lens_B: Longs,
    committed_B: Longs,
    request_slots_B: Longs,
    tags_RNW: Ints,
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
    kept_W = np.empty(ways, np.bool_)
    held, seen = new_table(ways), new_table(width)
    for b in range(requests):
        r = int(request_slots_B[b])
        if r < 0:
            continue
        assert r < slots
        clear(seen)
        _drop_unsettled(tags_RNW[r], int(committed_B[b]))
        own_S = own_positions(selection, b)
        for s in range(len(own_S)):
            t = b * len(own_S) + s
            if slot_mapping_T[t] < 0:
                continue
            pool_row = (r * sets + s) * ways
            query = _Query(topk_TK[t], int(own_S[s]), int(committed_B[b]), tags_RNW[r, s], pool_row, rows_TK[t])
            _keep(query, kept_W, held, seen, stats_BC[b])
            counts_B[b] = _read(query, kept_W, seen, fetch_ids_BX[b], fetch_rows_BX[b], int(counts_B[b]), stats_BC[b])


def _drop_unsettled(tags_NW: Ints, committed: int) -> None:
    for n in range(tags_NW.shape[0]):
        for way in range(tags_NW.shape[1]):
            if tags_NW[n, way] >= committed:
                tags_NW[n, way] = -1


def _keep(query: _Query, kept_W: Bools, held: Ints, seen: Ints, stats_C: Ints) -> None:
    """Rows of what is in the buffer; everything else leaves it."""
    clear(held)
    for way in range(len(query.tags_W)):
        kept_W[way] = False
        token = int(query.tags_W[way])
        if 0 <= token < query.committed:
            y = slot_of(held, token)
            held[0, y] = token
            held[1, y] = way
    for k in range(len(query.ids_K)):
        token = int(query.ids_K[k])
        if 0 <= token <= query.own:
            y = slot_of(held, token)
            if held[0, y] >= 0:
                way = int(held[1, y])
                kept_W[way] = True
                query.rows_K[k] = query.pool_row + way
                stats_C[HITS] += 1
                stats_C[UNIQUE_HITS] += _is_first(seen, token, 1)
    for way in range(len(query.tags_W)):
        if not kept_W[way]:
            query.tags_W[way] = -1


def _read(
    query: _Query, kept_W: Bools, seen: Ints, fetch_ids_X: Ints, fetch_rows_X: Ints, count: int, stats_C: Ints
) -> int:
    """Rows of the ids that have none yet; they are added to the lists, whose length is `count` and then the result."""
    way = 0
    for k in range(len(query.ids_K)):
        token = int(query.ids_K[k])
        if token < 0 or token > query.own or query.rows_K[k] >= 0:
            continue
        # No query has more valid ids than its buffer has places, so there is a free one.
        while kept_W[way]:
            way += 1
        query.tags_W[way] = token
        query.rows_K[k] = query.pool_row + way
        fetch_ids_X[count] = token
        fetch_rows_X[count] = query.pool_row + way
        count += 1
        way += 1
        if token >= query.committed:
            stats_C[WINDOW_READS] += 1
        elif _is_first(seen, token, 2):
            stats_C[UNIQUE_MISSES] += 1
        else:
            stats_C[REPEATED_MISSES] += 1
    return count


def _is_first(seen: Ints, token: int, kind: int) -> bool:
    """Whether the request has not seen a token as hit (kind 1) or as miss (kind 2) before; notes that it has."""
    y = slot_of(seen, token)
    kinds = int(seen[1, y]) if seen[0, y] >= 0 else 0
    seen[0, y] = token
    seen[1, y] = kinds | kind
    return kinds & kind == 0
