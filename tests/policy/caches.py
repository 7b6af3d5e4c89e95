"""Caches without sets as their descriptions read, in plain Python: what `policy/full.py` and others are compared with.

A step is a list of (token, rows that select it, whether the ring has it), in the order of first positions.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Protocol

import numpy as np

from castoff.policy.arrays import (
    HITS,
    PROMOTED,
    REPEATED_MISSES,
    STAGED,
    STATS,
    UNIQUE_HITS,
    UNIQUE_MISSES,
    WINDOW_READS,
)
from castoff.policy.over_steps import RequestSteps

Step = Sequence[tuple[int, int, bool]]


def steps_of(given: RequestSteps) -> tuple[list[Step], list[int]]:
    """The accesses of each step, and how many rows select its own tokens."""
    steps, windows = [], []
    for ids_SK, mapping_S, length, committed, ring_first in zip(*(array.tolist() for array in given), strict=True):
        rows: dict[int, int] = {}
        window = 0
        for s, (ids_K, place) in enumerate(zip(ids_SK, mapping_S, strict=True)):
            own = length - len(ids_SK) + s
            for token in ids_K:
                if place < 0 or token < 0 or token > own:
                    continue
                if token >= committed:
                    window += 1
                else:
                    rows[token] = rows.get(token, 0) + 1
        steps.append([(token, count, token >= ring_first) for token, count in rows.items()])
        windows.append(window)
    return steps, windows


class Cache(Protocol):
    """What a policy keeps; `tokens` are in the pool."""

    tokens: Sequence[int]

    def hit(self, token: int) -> None: ...

    def evict(self, in_use: set[int]) -> None: ...

    def add(self, token: int) -> None: ...

    def settle(self, tokens: list[int]) -> None: ...


def count(cache: Cache, pool: int, steps: list[Step], windows: list[int]) -> np.ndarray:
    """Counts (M, C) of a cache."""
    stats_MC = np.zeros((len(steps), len(STATS)), np.int32)
    for stats_C, step, window in zip(stats_MC, steps, windows, strict=True):
        stats_C[WINDOW_READS] = window
        found = [token for token, _, _ in step if token in cache.tokens]
        in_use = set(found)
        for token in found:
            cache.hit(token)
        for token, rows, in_ring in step:
            if token in found:
                stats_C[HITS] += rows
                stats_C[UNIQUE_HITS] += 1
                continue
            stats_C[PROMOTED if in_ring else UNIQUE_MISSES] += 1
            stats_C[REPEATED_MISSES] += rows - 1
            if len(in_use) == pool:
                stats_C[STAGED] += 1
                continue
            if len(cache.tokens) == pool:
                cache.evict(in_use)
            assert len(cache.tokens) < pool
            cache.add(token)
            in_use.add(token)
        cache.settle([token for token, _, _ in step if token in cache.tokens])
    return stats_MC


class Lru:
    def __init__(self, pool: int) -> None:
        self.tokens: OrderedDict[int, None] = OrderedDict()  # type: ignore[assignment]

    def hit(self, token: int) -> None:
        pass

    def evict(self, in_use: set[int]) -> None:
        del self.tokens[next(token for token in self.tokens if token not in in_use)]

    def add(self, token: int) -> None:
        self.tokens[token] = None

    def settle(self, tokens: list[int]) -> None:
        for token in tokens:
            self.tokens.move_to_end(token)


class Clock:
    def __init__(self, pool: int) -> None:
        self.rows: list[int | None] = [None] * pool
        self.marked, self.hand = set[int](), 0

    @property
    def tokens(self) -> list[int]:
        return [token for token in self.rows if token is not None]

    def hit(self, token: int) -> None:
        self.marked.add(token)

    def evict(self, in_use: set[int]) -> None:
        while (token := self.rows[self.hand]) in in_use or token in self.marked:
            if token not in in_use:
                self.marked.discard(token)  # type: ignore[arg-type]
            self.hand = (self.hand + 1) % len(self.rows)
        self.rows[self.hand] = None
        self.hand = (self.hand + 1) % len(self.rows)

    def add(self, token: int) -> None:
        self.rows[self.rows.index(None)] = token

    def settle(self, tokens: list[int]) -> None:
        pass


class Sieve:
    """`tokens` from the front to the back; the hand is a place among them."""

    def __init__(self, pool: int) -> None:
        self.tokens: list[int] = []
        self.marked, self.hand = set[int](), -1

    def hit(self, token: int) -> None:
        self.marked.add(token)

    def evict(self, in_use: set[int]) -> None:
        while (token := self.tokens[self.hand]) in in_use or token in self.marked:
            if token not in in_use:
                self.marked.remove(token)
            self.hand = self.hand - 1 if self.hand % len(self.tokens) else -1
        place = self.hand % len(self.tokens)
        del self.tokens[place]
        # Counted from the back, so that what comes at the front does not move it.
        self.hand = place - 1 - len(self.tokens) if place else -1

    def add(self, token: int) -> None:
        self.tokens.insert(0, token)

    def settle(self, tokens: list[int]) -> None:
        pass


class S3Fifo:
    """Queues from the front to the back."""

    def __init__(self, pool: int) -> None:
        self.small, self.main = deque[int](), deque[int]()
        self.small_rows = max(pool // 10, 1)
        self.hits: dict[int, int] = {}
        self.left: list[int] = []
        self.ghosts = pool - self.small_rows

    @property
    def tokens(self) -> list[int]:
        return [*self.small, *self.main]

    def hit(self, token: int) -> None:
        self.hits[token] = min(self.hits[token] + 1, 3)

    def evict(self, in_use: set[int]) -> None:
        full = len(self.tokens)
        while len(self.tokens) == full:
            small, main = (any(token not in in_use for token in queue) for queue in (self.small, self.main))
            if small and (len(self.small) >= self.small_rows or not main):
                token = self.small.pop()
                if token in in_use:
                    self.small.appendleft(token)
                elif self.hits[token] > 1:
                    self.hits[token] = 0
                    self.main.appendleft(token)
                else:
                    self.left.append(token)
            else:
                token = self.main.pop()
                if token in in_use:
                    self.main.appendleft(token)
                elif self.hits[token]:
                    self.hits[token] -= 1
                    self.main.appendleft(token)

    def add(self, token: int) -> None:
        self.hits[token] = 0
        if self.ghosts and token in self.left[-self.ghosts :]:
            # What came back is known no more, and its place in the memory stays empty.
            self.left = [-1 if one == token else one for one in self.left]
            self.main.appendleft(token)
        else:
            self.small.appendleft(token)

    def settle(self, tokens: list[int]) -> None:
        pass


CACHES: dict[str, Callable[[int], Cache]] = {"full-lru": Lru, "full-clock": Clock, "sieve": Sieve, "s3-fifo": S3Fifo}


def most_hits(steps: list[Step], pool: int) -> int:
    """The most distinct tokens that steps can find, by trying all that a pool could keep after each."""
    best = {frozenset[int](): 0}
    for step in steps:
        asked = {token for token, _, _ in step}
        following: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            hits += len(held & asked)
            there = held | asked
            for size in range(min(pool, len(there)) + 1):
                for kept in map(frozenset, combinations(there, size)):
                    following[kept] = max(following.get(kept, 0), hits)
        best = following
    return max(best.values())
