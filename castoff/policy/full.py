"""Pools without sets: any token may lie in any row, and which row gives way is what a policy is.

A step goes like one of mode `direct`. What it selects and finds stays; then each missing token, in the order of
positions, takes a free row or that of a token that the step does not use. What finds none passes the pool by.
A policy is a file with the four functions of `Policy`, and a line in `POLICIES`.

Axes: P rows of the pool, L = P + 2 rows and rings, I keys, V numbers that a policy keeps; others as in `accesses`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import numpy as np

from castoff.policy import full_clock, full_lru, s3_fifo, sieve
from castoff.policy.accesses import Accesses, Bools, count_miss
from castoff.policy.arrays import HITS, STAGED, STATS, UNIQUE_HITS, WINDOW_READS, Ints, Longs
from castoff.policy.compiled import compiled
from castoff.policy.full_state import NUMBERS, FullState

FullPolicy = Literal["full-lru", "full-clock", "sieve", "s3-fifo"]
# hit: a row that the step finds. victim: the row that gives way, which leaves what the policy keeps of it; there is one
# that the step does not use. install: a row that got a token. settle: after that, each row that the step uses.
Policy = tuple[
    Callable[[FullState, int, int], None],
    Callable[[FullState, int], int],
    Callable[[FullState, int, int], None],
    Callable[[FullState, int], None],
]
POLICIES: dict[FullPolicy, Policy] = {
    "full-lru": (full_lru.hit, full_lru.victim, full_lru.install, full_lru.settle),
    "full-clock": (full_clock.hit, full_clock.victim, full_clock.install, full_clock.settle),
    "sieve": (sieve.hit, sieve.victim, sieve.install, sieve.settle),
    "s3-fifo": (s3_fifo.hit, s3_fifo.victim, s3_fifo.install, s3_fifo.settle),
}


def count_full(policy: FullPolicy, accesses: Accesses, pool: int) -> Ints:
    """Counts (M, C) of every step, with a pool that is empty at first."""
    keys = len(accesses.ids_I)
    # Rows that can never be filled are not made.
    pool = min(pool, keys + 1)
    stats_MC = np.zeros((accesses.num_steps, len(STATS)), np.int32)
    rings_L = np.arange(pool + 2, dtype=np.int32)
    state = (
        np.full(pool, -1, np.int32), np.full(pool, -1, np.int32), np.zeros(pool, np.int32), rings_L, rings_L.copy(),
        np.zeros(keys, np.int64), np.zeros(NUMBERS, np.int64),
    )  # fmt: skip
    compiled(_counter(policy))(*accesses[:5], np.full(keys, -1, np.int32), *state, stats_MC)
    return stats_MC


@cache
def _counter(policy: FullPolicy) -> Callable[..., None]:
    hit, victim, install, settle = POLICIES[policy]

    def count(
        starts_M: Longs,
        keys_A: Ints,
        rows_A: Ints,
        in_ring_A: Bools,
        window_M: Ints,
        row_I: Ints,
        key_P: Ints,
        used_P: Ints,
        marks_P: Ints,
        behind_L: Ints,
        before_L: Ints,
        evicted_I: Longs,
        numbers_V: Longs,
        stats_MC: Ints,
    ) -> None:
        state = FullState(key_P, used_P, marks_P, behind_L, before_L, evicted_I, numbers_V)
        pool, filled = len(key_P), 0
        for m in range(len(window_M)):
            stats_C = stats_MC[m]
            stats_C[WINDOW_READS] = window_M[m]
            step = range(starts_M[m], starts_M[m + 1])
            in_use = 0
            for a in step:
                row = row_I[keys_A[a]]
                if row >= 0:
                    used_P[row] = m
                    in_use += 1
                    hit(state, row, m)
                    stats_C[HITS] += rows_A[a]
            stats_C[UNIQUE_HITS] = in_use
            for a in step:
                key = keys_A[a]
                if row_I[key] >= 0:
                    continue
                count_miss(stats_C, rows_A[a], in_ring_A[a])
                if in_use == pool:
                    stats_C[STAGED] += 1
                    continue
                if filled < pool:
                    row = filled
                    filled += 1
                else:
                    row = victim(state, m)
                    row_I[key_P[row]] = -1
                row_I[key] = row
                key_P[row] = key
                used_P[row] = m
                in_use += 1
                install(state, row, m)
            for a in step:
                if row_I[keys_A[a]] >= 0:
                    settle(state, row_I[keys_A[a]])

    return count
