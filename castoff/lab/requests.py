"""The requests of a trace one by one, each over all of its steps: their pools have nothing in common.

Axes: N steps of the trace, M those of one request; others as in `trace.steps`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from castoff.errors import CastoffError
from castoff.policy.arrays import Ints, Longs
from castoff.policy.over_steps import RequestSteps
from castoff.trace.header import MAX_INT32
from castoff.trace.steps import Steps

# Ids that are copied out of the file at once.
BLOCK_IDS = 2**22
MOST_TOKENS = 2**27
"""Positions are below this: what is known of each takes memory."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestRows:
    """Where a request stands in a trace, and what its plans are told.

    steps, rows: of each of its steps, from the first that is replayed. query_lengths: queries that are replayed.
    committed: tokens before them; where lengths are not known, rising numbers beyond all ids. ring_first: the first
    position that mode `direct` has in its ring.
    """

    request: int
    steps_M: Longs
    rows_M: Longs
    query_lengths_M: Longs
    committed_M: Longs
    ring_first_M: Longs

    @property
    def num_steps(self) -> int:
        """Steps (M)."""
        return len(self.steps_M)


def requests_of(steps: Steps, queries: int) -> tuple[RequestRows, ...]:
    """All requests by their ids; of each at most the first `queries` queries of a step.

    Raises CastoffError for a request whose settled tokens do not become more from step to step.
    """
    step_A, row_A = np.nonzero(steps.active)
    request_A = steps.request_ids_NB[step_A, row_A]
    # Stable: the steps of a request stay in order.
    order = np.argsort(request_A, kind="stable")
    ids, firsts = np.unique(request_A[order], return_index=True)
    own_A = np.split(order, firsts[1:])
    return tuple(
        _rows(steps, queries, int(request), step_A[own], row_A[own])
        for request, own in zip(ids, own_A if len(ids) else [], strict=True)
    )


def _rows(steps: Steps, queries: int, request: int, step_M: Longs, row_M: Longs) -> RequestRows:
    query_lengths_M = np.minimum(steps.query_lengths_NB[step_M, row_M], queries).astype(np.int64)
    if steps.lengths_known:
        lengths_M = steps.lengths_NB[step_M, row_M].astype(np.int64)
        committed_M = lengths_M - steps.query_lengths_NB[step_M, row_M]
        # Tokens of the prompt were never in the ring.
        ring_first_M = np.maximum(committed_M[0], committed_M - queries)
        stuck = np.flatnonzero(np.diff(committed_M) <= 0)
        if stuck.size:
            before, after = stuck[0], stuck[0] + 1
            raise CastoffError(
                f"request {request} has {committed_M[before]:,} settled tokens in step "
                f"{steps.first + step_M[before]:,} and {committed_M[after]:,} in step "
                f"{steps.first + step_M[after]:,}; a replay needs more from step to step"
            )
    else:
        committed_M = MAX_INT32 - len(step_M) + np.arange(len(step_M), dtype=np.int64)
        ring_first_M = np.full(len(step_M), MAX_INT32, np.int64)
    return RequestRows(request, step_M, row_M, query_lengths_M, committed_M, ring_first_M)


def blocks(steps: Steps, group: int, rows: RequestRows, queries: int) -> Iterator[RequestSteps]:
    """What a request selected in an index group, a block of steps at a time."""
    columns = steps.ids_NGBSK.shape[-1]
    length = max(BLOCK_IDS // (queries * columns), 1)
    for start in range(0, rows.num_steps, length):
        part = slice(start, start + length)
        ids_MSK: Ints = steps.ids_NGBSK[rows.steps_M[part], group, rows.rows_M[part], :queries]
        if ids_MSK.max() >= MOST_TOKENS:
            raise CastoffError(
                f"request {rows.request} selects position {ids_MSK.max():,}; a replay takes positions "
                f"below {MOST_TOKENS:,}"
            )
        padded_MS = np.arange(queries) >= rows.query_lengths_M[part, np.newaxis]
        committed_M = rows.committed_M[part]
        # Query s is at position `committed` + s; without lengths it is beyond all ids.
        beyond = 0 if steps.lengths_known else rows.num_steps
        yield RequestSteps(
            np.ascontiguousarray(ids_MSK, np.int32),
            np.where(padded_MS, -1, 0).astype(np.int64),
            committed_M + queries + beyond,
            committed_M,
            rows.ring_first_M[part],
        )
