"""What is replayed in one pass over a trace: a policy with one pool, or with all pools at once where it can.

Axes: P pools of a pass, G index groups, M steps of all requests, C counters of `policy.arrays.STATS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import numpy as np

from castoff.lab.policies import DIRECT, FULLY_ASSOCIATIVE, SET_ASSOCIATIVE, PolicyName
from castoff.lab.requests import RequestRows, blocks
from castoff.policy.accesses import Accesses, accesses_of
from castoff.policy.arrays import STATS, Ints, PoolState
from castoff.policy.belady import count_belady, count_set_belady
from castoff.policy.full import count_full
from castoff.policy.over_steps import RequestSteps, count_direct, count_gather, count_serve_install, new_state
from castoff.policy.stack_distance import count_lru
from castoff.trace.steps import Steps

MOST_COUNTS = 2**27
"""Counts that a pass keeps at once, if it has more pools than one."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A policy. pools: rows of a request's pool in a layer, ascending; none for gather. ways: None without sets."""

    policy: PolicyName
    pools: tuple[int, ...]
    ways: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Replayable:
    """The requests of a trace, and how many queries of a step are replayed."""

    steps: Steps
    requests: tuple[RequestRows, ...]
    queries: int

    @property
    def num_steps(self) -> int:
        """Steps of all requests (M)."""
        return sum(rows.num_steps for rows in self.requests)

    @property
    def pools_at_once(self) -> int:
        """Pools whose counts do not take too much memory together."""
        return max(MOST_COUNTS // (self.groups * self.num_steps * len(STATS)), 1)

    @property
    def groups(self) -> int:
        """Index groups (G)."""
        return int(self.steps.ids_NGBSK.shape[1])

    @property
    def columns(self) -> int:
        """Ids of a query (K)."""
        return int(self.steps.ids_NGBSK.shape[-1])

    def blocks(self, group: int, rows: RequestRows) -> Iterator[RequestSteps]:
        """What a request selected in an index group."""
        return blocks(self.steps, group, rows, self.queries)


def passes(
    policies: Sequence[PolicyName], pools: Sequence[int], ways: Sequence[int], *, pools_at_once: int
) -> Iterator[Pass]:
    """Every policy with every pool, and those of sets with every number of ways. pools_at_once: at most, in a pass."""
    for policy in policies:
        if policy == "gather":
            yield Pass(policy, (), None)
        elif policy == "full-lru":
            ascending = sorted(pools)
            for first in range(0, len(pools), pools_at_once):
                yield Pass(policy, tuple(ascending[first : first + pools_at_once]), None)
        else:
            yield from (
                Pass(policy, (pool,), each)
                for each in (ways if policy in SET_ASSOCIATIVE else (None,))
                for pool in pools
            )


def count(given: Replayable, own: Pass, *, progress: Callable[[int], None]) -> Ints:
    """Counts (P, G, M, C) of every step, by request; one pool where the pass names none. progress: told each group."""
    counts_PGMC = np.zeros((max(len(own.pools), 1), given.groups, given.num_steps, len(STATS)), np.int32)

    def count_group(group: int) -> int:
        start = 0
        for rows in given.requests:
            end = start + rows.num_steps
            counts_PGMC[:, group, start:end] = _count_request(own, given, given.blocks(group, rows))
            start = end
        return group

    # The first group alone: it compiles what all of them call.
    progress(count_group(0))
    pool = ThreadPoolExecutor(_cores())
    try:
        for group in pool.map(count_group, range(1, given.groups)):
            progress(group)
    finally:
        pool.shutdown(cancel_futures=True)
    return counts_PGMC


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count_request(own: Pass, given: Replayable, parts: Iterator[RequestSteps]) -> Ints:
    """Counts (P, M, C) of one request in one group, of no pool but this."""
    match own.policy:
        case "gather":
            state = new_state(given.queries, given.columns)
            return _over(parts, lambda part: count_gather(part, state))
        case "full-lru":
            return _count_lru(accesses_of(parts), own.pools)
        case "belady":
            return count_belady(accesses_of(parts), own.pools[0])[np.newaxis]
    (pool,) = own.pools
    if own.policy in FULLY_ASSOCIATIVE:
        return count_full(own.policy, accesses_of(parts), pool)[np.newaxis]
    assert own.ways is not None
    if own.policy == "set-belady":
        return count_set_belady(accesses_of(parts), pool // own.ways, own.ways)[np.newaxis]
    return _over(parts, _planned(own.policy, new_state(pool // own.ways, own.ways)))


def _planned(policy: PolicyName, state: PoolState) -> Callable[[RequestSteps], Ints]:
    """Counts of a block of steps, by the plans that a run makes."""
    if policy == "serve_install":
        return lambda part: count_serve_install(part, state)
    assert policy in DIRECT
    return lambda part: count_direct(policy, part, state)


def _over(parts: Iterator[RequestSteps], counted: Callable[[RequestSteps], Ints]) -> Ints:
    return np.concatenate([counted(part) for part in parts])[np.newaxis]


def _count_lru(accesses: Accesses, pools: tuple[int, ...]) -> Ints:
    """Pools with room for every step's tokens in one pass, each smaller one by itself."""
    small = [pool for pool in pools if pool < accesses.most_distinct]
    alone = (count_full("full-lru", accesses, pool) for pool in small)
    together = count_lru(accesses, pools[len(small) :])
    return np.stack(list(chain(alone, together)))
