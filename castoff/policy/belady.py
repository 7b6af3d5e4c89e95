"""The most that a pool can find, by looking ahead (Belady 1966): what stays are the tokens that are used again soonest.

A step asks for its tokens all at once, and of these and those in the pool it keeps what fits: of each set, or of all,
the ways or rows whose tokens come next. What it does not keep passes the pool by, or leaves it. Every pool holds after
a step only what it held before and what the step selected, so none of as many ways or rows finds more distinct tokens
over all steps: a token kept from one step to the next that selects it is one of the intervals of which at most so many
may overlap, and dropping the one that ends last leaves the most of them.

Axes: N sets, W ways; others as in `accesses`.
"""

from __future__ import annotations

import numpy as np

from castoff.policy.accesses import Accesses, Bools, count_miss
from castoff.policy.arrays import HITS, STAGED, STATS, UNIQUE_HITS, WINDOW_READS, Ints, Longs
from castoff.policy.compiled import compiled
from castoff.policy.look_up import find, set_of


def count_belady(accesses: Accesses, pool: int) -> Ints:
    """Counts (M, C) of every step, of a pool without sets."""
    stats_MC = np.zeros((accesses.num_steps, len(STATS)), np.int32)
    compiled(_count_full)(*accesses, pool, stats_MC)
    return stats_MC


def count_set_belady(accesses: Accesses, sets: int, ways: int) -> Ints:
    """Counts (M, C) of every step, of a pool of sets."""
    stats_MC = np.zeros((accesses.num_steps, len(STATS)), np.int32)
    compiled(_count_sets)(*accesses, sets, ways, stats_MC)
    return stats_MC


def _next_steps(starts_M: Longs, keys_A: Ints, keys: int) -> Ints:
    """The next step (A,) that accesses the same key; the number of steps for none."""
    steps = len(starts_M) - 1
    next_A, next_I = np.empty(len(keys_A), np.int32), np.full(keys, steps, np.int32)
    for m in range(steps - 1, -1, -1):
        for a in range(starts_M[m], starts_M[m + 1]):
            next_A[a] = next_I[keys_A[a]]
            next_I[keys_A[a]] = m
    return next_A


def _count_full(
    starts_M: Longs,
    keys_A: Ints,
    rows_A: Ints,
    in_ring_A: Bools,
    window_M: Ints,
    ids_I: Ints,
    pool: int,
    stats_MC: Ints,
) -> None:
    steps = len(window_M)
    next_A = _next_steps(starts_M, keys_A, len(ids_I))
    # What is kept for each step, as a chain of keys; the last chain that is not empty is `last` or an earlier one.
    first_M, following_I = np.full(steps, -1, np.int32), np.empty(len(ids_I), np.int32)
    is_kept_I, is_hit_A = np.zeros(len(ids_I), np.bool_), np.zeros(len(keys_A), np.bool_)
    kept, last = 0, 0
    for m in range(steps):
        stats_C = stats_MC[m]
        stats_C[WINDOW_READS] = window_M[m]
        for a in range(starts_M[m], starts_M[m + 1]):
            key = keys_A[a]
            is_hit_A[a] = is_kept_I[key]
            if is_kept_I[key]:
                kept -= 1
                stats_C[UNIQUE_HITS] += 1
                stats_C[HITS] += rows_A[a]
            else:
                count_miss(stats_C, rows_A[a], in_ring_A[a])
            is_kept_I[key] = next_A[a] < steps
            if is_kept_I[key]:
                kept += 1
                last = max(last, next_A[a])
                following_I[key] = first_M[next_A[a]]
                first_M[next_A[a]] = key
        while kept > pool:
            while first_M[last] < 0:
                last -= 1
            is_kept_I[first_M[last]] = False
            first_M[last] = following_I[first_M[last]]
            kept -= 1
        for a in range(starts_M[m], starts_M[m + 1]):
            stats_C[STAGED] += not (is_hit_A[a] or is_kept_I[keys_A[a]])


def _count_sets(
    starts_M: Longs,
    keys_A: Ints,
    rows_A: Ints,
    in_ring_A: Bools,
    window_M: Ints,
    ids_I: Ints,
    sets: int,
    ways: int,
    stats_MC: Ints,
) -> None:
    steps = len(window_M)
    next_A = _next_steps(starts_M, keys_A, len(ids_I))
    # A free way has a token that no step will ask for.
    tags_NW, next_NW = np.full((sets, ways), -1, np.int32), np.full((sets, ways), steps, np.int32)
    is_hit_A = np.zeros(len(keys_A), np.bool_)
    for m in range(steps):
        stats_C = stats_MC[m]
        stats_C[WINDOW_READS] = window_M[m]
        for a in range(starts_M[m], starts_M[m + 1]):
            token = int(ids_I[keys_A[a]])
            n = set_of(token, sets)
            way = find(tags_NW, n, token)
            if way >= 0:
                is_hit_A[a] = True
                next_NW[n, way] = next_A[a]
                stats_C[UNIQUE_HITS] += 1
                stats_C[HITS] += rows_A[a]
            else:
                count_miss(stats_C, rows_A[a], in_ring_A[a])
        for a in range(starts_M[m], starts_M[m + 1]):
            if is_hit_A[a]:
                continue
            token = int(ids_I[keys_A[a]])
            n = set_of(token, sets)
            latest = 0
            for way in range(1, ways):
                if next_NW[n, way] > next_NW[n, latest]:
                    latest = way
            if next_A[a] < next_NW[n, latest]:
                tags_NW[n, latest] = token
                next_NW[n, latest] = next_A[a]
            else:
                stats_C[STAGED] += 1
