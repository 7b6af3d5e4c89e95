"""LRU without sets for pools of all sizes in one pass: what a pool holds is the first part of what a larger one does.

The depth of a token is how many others were used since it was used last, by the order in which `full_lru` keeps rows,
before the step that asks for it; a pool finds a token if it has more rows than that. This holds for pools with at least
as many rows as a step has distinct tokens: in a smaller one some pass the pool by, and the order is another.

Axes: P pools in ascending order, T times of use, of which each key has one; others as in `accesses`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from castoff.policy.accesses import Accesses, Bools, count_miss
from castoff.policy.arrays import HITS, STATS, UNIQUE_HITS, WINDOW_READS, Ints, Longs
from castoff.policy.compiled import compiled

NEVER = 2**31 - 1


def depths(accesses: Accesses) -> Ints:
    """The depth (A,) of each access; NEVER for the first of a token."""
    depth_A = np.empty(len(accesses.keys_A), np.int32)
    size = 2
    while size < 2 * (len(accesses.ids_I) + accesses.most_distinct):
        size *= 2
    compiled(_measure)(accesses.starts_M, accesses.keys_A, np.full(len(accesses.ids_I), -1, np.int32), size, depth_A)
    return depth_A


def count_lru(accesses: Accesses, pools: Sequence[int]) -> Ints:
    """Counts (P, M, C) of every step with each of the pools; ascending, each with room for every step's tokens."""
    assert all(pool >= accesses.most_distinct for pool in pools)
    assert list(pools) == sorted(pools)
    stats_PMC = np.zeros((len(pools), accesses.num_steps, len(STATS)), np.int32)
    compiled(_count)(*accesses[:5], depths(accesses), np.array(pools, np.int64), stats_PMC)
    return stats_PMC


def _measure(starts_M: Longs, keys_A: Ints, time_I: Ints, size: int, depth_A: Ints) -> None:
    """Fill the depths. time: when each key was used last, −1 for never. size: times that there can be, a power of 2.

    The tree is Fenwick's: tree[i] says how many times from i − (i & −i) + 1 to i, counted from 1, belong to a key.
    """
    tree_T, key_T = np.zeros(size + 1, np.int32), np.empty(size, np.int32)
    now = live = 0
    for m in range(len(starts_M) - 1):
        if now + starts_M[m + 1] - starts_M[m] > size:
            _renumber(tree_T, key_T, time_I, now)
            now = live
        for a in range(starts_M[m], starts_M[m + 1]):
            i, earlier = time_I[keys_A[a]] + 1, 0
            depth_A[a] = NEVER
            if i > 0:
                while i > 0:
                    earlier += tree_T[i]
                    i &= i - 1
                depth_A[a] = live - earlier
        for a in range(starts_M[m], starts_M[m + 1]):
            key = keys_A[a]
            if time_I[key] >= 0:
                _add(tree_T, time_I[key], -1)
            else:
                live += 1
            _add(tree_T, now, 1)
            time_I[key] = now
            key_T[now] = key
            now += 1


def _add(tree_T: Ints, time: int, change: int) -> None:
    i = time + 1
    while i < len(tree_T):
        tree_T[i] += change
        i += i & -i


def _renumber(tree_T: Ints, key_T: Ints, time_I: Ints, now: int) -> None:
    """Times from 0 on, in the same order, for the keys; there are enough for the next step then."""
    live = 0
    for time in range(now):
        key = key_T[time]
        if time_I[key] == time:
            time_I[key] = live
            key_T[live] = key
            live += 1
    for i in range(1, len(tree_T)):
        low = i - (i & -i)
        tree_T[i] = max(min(i, live) - low, 0)


def _count(
    starts_M: Longs,
    keys_A: Ints,
    rows_A: Ints,
    in_ring_A: Bools,
    window_M: Ints,
    depth_A: Ints,
    pools_P: Longs,
    stats_PMC: Ints,
) -> None:
    for m in range(len(window_M)):
        stats_PMC[:, m, WINDOW_READS] = window_M[m]
        for a in range(starts_M[m], starts_M[m + 1]):
            for p in range(len(pools_P)):
                stats_C = stats_PMC[p, m]
                if depth_A[a] < pools_P[p]:
                    stats_C[UNIQUE_HITS] += 1
                    stats_C[HITS] += rows_A[a]
                else:
                    count_miss(stats_C, rows_A[a], in_ring_A[a])
