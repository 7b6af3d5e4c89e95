"""Requests that decode with random selections and rejected drafts: what the engine would ask the plans."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from castoff.policy.arrays import PoolState, Selection

Array = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Sizes:
    """R slots, N sets, W ways, up to S queries in a call, K columns."""

    slots: int
    sets: int
    ways: int
    queries: int
    columns: int

    @property
    def ring_tokens(self) -> int:
        return 2 * self.queries

    @property
    def staging_rows(self) -> int:
        return self.queries * self.columns

    @property
    def ring_start(self) -> int:
        """Code of the first ring row."""
        return self.slots * self.sets * self.ways

    @property
    def staging_start(self) -> int:
        """Code of the first staging row."""
        return self.ring_start + self.slots * self.ring_tokens


# Sets that are no power of two, one way, the 32 ways of all CLOCK marks, pools far smaller than a step's needs.
sizes = st.builds(
    Sizes,
    slots=st.integers(1, 4),
    sets=st.integers(1, 9),
    ways=st.one_of(st.integers(1, 6), st.sampled_from([8, 16, 31, 32])),
    queries=st.integers(1, 4),
    columns=st.integers(1, 14),
)
seeds = st.integers(0, 2**32 - 1)


def empty_pools(given: Sizes) -> PoolState:
    pool, sets = (given.slots, given.sets, given.ways), (given.slots, given.sets)
    return PoolState(
        np.full(pool, -1, np.int32), np.full(pool, -1, np.int32), np.zeros(sets, np.int32), np.zeros(sets, np.int32)
    )


def clear_slot(state: PoolState, slot: int) -> None:
    """What the engine does when a request starts in a slot."""
    state.tags_RNW[slot] = state.used_RNW[slot] = -1
    state.hands_RN[slot] = state.marks_RN[slot] = 0


@dataclass
class Request:
    """A request in a slot: it decodes from `first` on, and has `committed` settled tokens."""

    first: int
    committed: int


@dataclass(frozen=True)
class Step:
    """One call: each row's slot (-1: padding) and real tokens, and what the plans are given."""

    slots: list[int]
    real: list[int]
    selection: Selection
    ring_first: Array


class Decoding:
    """A batch whose requests come, decode, lose drafts and go. `odd`: with ids and padding that no engine makes."""

    def __init__(self, given: Sizes, seed: int, *, longest: int = 60, odd: bool = True, same_queries: bool = False):
        self.sizes, self.longest, self.odd, self.same_queries = given, longest, odd, same_queries
        self.rng = np.random.default_rng(seed)
        self.requests = [self.new_request() for _ in range(given.slots)]
        self.started = list(range(given.slots))
        """Slots that got a new request since the last step."""

    def new_request(self) -> Request:
        prompt = int(self.rng.integers(1, self.longest))
        return Request(prompt, prompt)

    def step(self) -> Step:
        """Some requests and perhaps padding rows, in any order."""
        given, rng = self.sizes, self.rng
        queries = given.queries if self.same_queries else int(rng.integers(1, given.queries + 1))
        present = [slot for slot in range(given.slots) if rng.random() < 0.8] or [0]
        slots = [int(slot) for slot in rng.permutation(present + [-1] * int(rng.integers(0, 2)))]
        real = [int(rng.integers(1, queries + 1)) if rng.random() < 0.2 else queries for _ in slots]
        topk = np.full((len(slots), queries, given.columns), -1, np.int32)
        mapping = np.zeros((len(slots), queries), np.int64)
        committed = np.array([self.requests[slot].committed if slot >= 0 else 0 for slot in slots], np.int64)
        first = np.array([self.requests[slot].first if slot >= 0 else 0 for slot in slots], np.int64)
        for b, slot in enumerate(slots):
            for s in range(queries):
                topk[b, s] = self._select(int(committed[b]) + s if slot >= 0 else self.longest)
                mapping[b, s] = -1 if s >= real[b] or (self.odd and rng.random() < 0.05) else rng.integers(0, 99)
        lengths = committed + queries
        if self.odd:
            lengths[np.array(slots) < 0] = rng.integers(0, 9)
        # Positions up to S_max - 2 beyond `committed` may have been written before, and were rejected.
        ring_first = np.maximum(first, committed + given.queries - given.ring_tokens)
        selection = Selection(
            topk.reshape(-1, given.columns), mapping.reshape(-1), lengths, committed, np.array(slots, np.int64)
        )
        return Step(slots, real, selection, ring_first)

    def finish(self, step: Step) -> None:
        """Accept some tokens of each request, then let some requests go; new ones take their slots."""
        self.started = []
        for slot, real in zip(step.slots, step.real, strict=True):
            if slot < 0:
                continue
            self.requests[slot].committed += int(self.rng.integers(1, real + 1))
            if self.rng.random() < 0.03:
                self.requests[slot] = self.new_request()
                self.started.append(slot)

    def _select(self, own: int) -> Array:
        """Distinct ids of one query at position `own`: recent ones, old ones again and again, some of any age."""
        columns, rng = self.sizes.columns, self.rng
        recent = rng.integers(max(own - 6, 0), own + 1, columns)
        again = (rng.integers(0, 12, columns) ** 2) % (own + 1)
        anywhere = rng.integers(0, own + 1, columns)
        ids = rng.permutation(np.unique(np.concatenate([recent, again, anywhere])))[:columns]
        row = np.full(columns, -1, np.int32)
        row[: len(ids)] = ids
        if self.odd:
            row[rng.random(columns) < 0.1] = -1 - rng.integers(0, 3)
            beyond = rng.random(columns) < 0.05
            # Distinct, too.
            row[beyond] = own + 1 + np.flatnonzero(beyond)
        return row
