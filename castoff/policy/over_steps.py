"""What the modes' plans count over many steps of one request, which alone has slot 0; the plans themselves are dropped.

These are the plans that a run makes, called from one loop that is compiled with them.
Axes: M steps of the request; others as in `arrays`, with B = R = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from castoff.policy import previous, published
from castoff.policy.arrays import STATS, Ints, Longs, PoolState
from castoff.policy.compiled import compiled
from castoff.policy.direct import planner
from castoff.spec.offload import PoolPolicy


class RequestSteps(NamedTuple):
    """Consecutive steps of one request in one index group; contiguous arrays, as `Selection` has them for one step."""

    topk_MSK: Ints
    slot_mapping_MS: Longs
    seq_lens_M: Longs
    committed_M: Longs
    ring_first_M: Longs


def new_state(sets: int, ways: int) -> PoolState:
    """The empty pool of one request."""
    return PoolState(
        np.full((1, sets, ways), -1, np.int32),
        np.full((1, sets, ways), -1, np.int32),
        np.zeros((1, sets), np.int32),
        np.zeros((1, sets), np.int32),
    )


def new_stats(steps: RequestSteps) -> Ints:
    """Room (M, C) for the counts of every step."""
    return np.zeros((len(steps.topk_MSK), len(STATS)), np.int32)


def count_direct(policy: PoolPolicy, steps: RequestSteps, state: PoolState) -> Ints:
    """Counts (M, C) of mode `direct`. Mutates state."""
    _, queries, columns = steps.topk_MSK.shape
    stats_MC = new_stats(steps)
    compiled(_direct_counter(policy))(*steps, *state, 2 * queries, queries * columns, stats_MC)
    return stats_MC


def count_serve_install(steps: RequestSteps, state: PoolState) -> Ints:
    """Counts (M, C) of mode `serve_install`, each step's rows being installed before the next. Mutates state."""
    stats_MC = new_stats(steps)
    compiled(_count_serve_install)(*steps, state.tags_RNW, state.hands_RN, stats_MC)
    return stats_MC


def count_gather(steps: RequestSteps, state: PoolState) -> Ints:
    """Counts (M, C) of mode `gather`; state has a set of K ways for each query. Mutates state."""
    stats_MC = new_stats(steps)
    compiled(_count_gather)(*steps, state.tags_RNW, stats_MC)
    return stats_MC


@cache
def _direct_counter(policy: PoolPolicy) -> Callable[..., None]:
    plan_requests = planner(policy)

    def count(
        topk_MSK: Ints,
        slot_mapping_MS: Longs,
        seq_lens_M: Longs,
        committed_M: Longs,
        ring_first_M: Longs,
        tags_RNW: Ints,
        used_RNW: Ints,
        hands_RN: Ints,
        marks_RN: Ints,
        ring_tokens: int,
        staging_rows: int,
        stats_MC: Ints,
    ) -> None:
        steps, queries, columns = topk_MSK.shape
        slots_B = np.zeros(1, np.int64)
        rows_TK, counts_B = np.empty((queries, columns), np.int32), np.empty(1, np.int32)
        fetch_ids_BX = np.empty((1, queries * columns), np.int32)
        fetch_rows_BX = np.empty((1, queries * columns), np.int32)
        for m in range(steps):
            plan_requests(
                topk_MSK[m],
                slot_mapping_MS[m],
                seq_lens_M[m : m + 1],
                committed_M[m : m + 1],
                slots_B,
                ring_first_M[m : m + 1],
                tags_RNW,
                used_RNW,
                hands_RN,
                marks_RN,
                ring_tokens,
                staging_rows,
                rows_TK,
                fetch_ids_BX,
                fetch_rows_BX,
                counts_B,
                stats_MC[m : m + 1],
            )

    return count


_plan_serve, _install, _plan_gather = published.plan_requests, published.install, previous.plan_requests


def _count_serve_install(
    topk_MSK: Ints,
    slot_mapping_MS: Longs,
    seq_lens_M: Longs,
    committed_M: Longs,
    ring_first_M: Longs,
    tags_RNW: Ints,
    hands_RN: Ints,
    stats_MC: Ints,
) -> None:
    steps, queries, columns = topk_MSK.shape
    slots_B = np.zeros(1, np.int64)
    sources_TK, counts_B = np.empty((queries, columns), np.int32), np.empty(1, np.int32)
    ids_BX = np.empty((1, queries * columns), np.int32)
    rows_BX = np.empty((1, queries * columns), np.int32)
    from_BX = np.empty((1, queries * columns), np.int32)
    for m in range(steps):
        _plan_serve(
            topk_MSK[m],
            slot_mapping_MS[m],
            seq_lens_M[m : m + 1],
            committed_M[m : m + 1],
            slots_B,
            tags_RNW,
            hands_RN,
            sources_TK,
            ids_BX,
            rows_BX,
            from_BX,
            counts_B,
            stats_MC[m : m + 1],
        )
        _install(ids_BX, rows_BX, counts_B, slots_B, tags_RNW, hands_RN)


def _count_gather(
    topk_MSK: Ints,
    slot_mapping_MS: Longs,
    seq_lens_M: Longs,
    committed_M: Longs,
    ring_first_M: Longs,
    tags_RNW: Ints,
    stats_MC: Ints,
) -> None:
    steps, queries, columns = topk_MSK.shape
    slots_B = np.zeros(1, np.int64)
    rows_TK, counts_B = np.empty((queries, columns), np.int32), np.empty(1, np.int32)
    ids_BX = np.empty((1, queries * columns), np.int32)
    rows_BX = np.empty((1, queries * columns), np.int32)
    for m in range(steps):
        _plan_gather(
            topk_MSK[m],
            slot_mapping_MS[m],
            seq_lens_M[m : m + 1],
            committed_M[m : m + 1],
            slots_B,
            tags_RNW,
            rows_TK,
            ids_BX,
            rows_BX,
            counts_B,
            stats_MC[m : m + 1],
        )
