"""Counts of another cache simulator, libCacheSim 0.3.5 (the PyPI package libcachesim), over one sequence of requests.

The sequence is `sequence()`: 20,000 requests for 600 objects of size 1, no two alike in a row. Each was put to
`libcachesim.FIFO(cache_size=P)`, LRU, Clock, Sieve or Belady by `get(request)`, with `next_access_vtime` set for Belady
(2^62 for never), and the misses were counted. Here each request is a step of one query that selects one token.
"""

from functools import cache

import numpy as np
import pytest

from castoff.policy.accesses import Accesses, accesses_of
from castoff.policy.arrays import UNIQUE_MISSES
from castoff.policy.belady import count_belady
from castoff.policy.full import FullPolicy, count_full
from castoff.policy.over_steps import RequestSteps, count_direct, new_state
from castoff.policy.stack_distance import count_lru
from castoff.spec.offload import PoolPolicy

pytestmark = pytest.mark.golden
REQUESTS, OBJECTS = 20_000, 600
POOLS = (8, 31, 32, 33, 100, 101, 300, 301)
LRU = (18142, 15631, 15567, 15497, 11915, 11875, 5800, 5785)
CLOCK = (17988, 15471, 15397, 15330, 11694, 11656, 5658, 5646)
SIEVE = (16366, 13541, 13468, 13390, 10225, 10197, 5131, 5105)
FIFO = (18424, 16204, 16144)
BELADY = {31: 10821, 32: 10719, 33: 10623, 100: 6747, 101: 6710, 300: 2512, 301: 2500}


def sequence() -> list[int]:
    """Objects by a linear congruence, the first ones far more often than the last."""
    state, objects = 1, [-1]
    while len(objects) <= REQUESTS:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        drawn = int(OBJECTS * ((state >> 33) / 2**31) ** 3)
        if drawn != objects[-1]:
            objects.append(drawn)
    return objects[1:]


@cache
def steps() -> RequestSteps:
    topk_MSK = np.array(sequence(), np.int32).reshape(-1, 1, 1)
    committed_M = 1000 + np.arange(REQUESTS)
    return RequestSteps(topk_MSK, np.zeros((REQUESTS, 1), np.int64), committed_M + 1, committed_M, committed_M)


@cache
def made() -> Accesses:
    return accesses_of([steps()])


def misses(stats_MC: np.ndarray) -> int:
    return int(stats_MC[:, UNIQUE_MISSES].sum())


@pytest.mark.parametrize(("policy", "expected"), [("full-lru", LRU), ("full-clock", CLOCK), ("sieve", SIEVE)])
def test_without_sets(policy: FullPolicy, expected: tuple[int, ...]) -> None:
    assert tuple(misses(count_full(policy, made(), pool)) for pool in POOLS) == expected


def test_lru_of_all_sizes() -> None:
    assert tuple(misses(stats_MC) for stats_MC in count_lru(made(), POOLS)) == LRU


@pytest.mark.parametrize(("policy", "expected"), [("fifo", FIFO), ("lru", LRU[:3]), ("clock", CLOCK[:3])])
def test_one_set(policy: PoolPolicy, expected: tuple[int, ...]) -> None:
    assert tuple(misses(count_direct(policy, steps(), new_state(1, ways))) for ways in (8, 31, 32)) == expected


def test_belady_lies_around_one_that_must_keep_what_it_reads() -> None:
    """libCacheSim's takes each object in, for one request at least; ours may pass it by."""
    for pool, expected in BELADY.items():
        assert misses(count_belady(made(), pool)) <= expected <= misses(count_belady(made(), pool - 1))
