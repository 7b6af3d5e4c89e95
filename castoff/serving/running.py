"""The requests that decode. Sums and orders are kept, so that an event looks at few of them, not at all.

A request's tokens follow from counts of passes and steps, never from sums of fractions, so that many steps at once and
single ones agree.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

# Fractions of a token that are rounding.
ROUNDING = 1e-9


@dataclass(slots=True)
class Request:
    """A request on its way. rows: in the cache after its latest prompt's pass. passes: of those, each of which gave a
    token. steps: decode steps before that pass. joined: the step count of the instance at it."""

    index: int
    prompt: int
    output: int
    rows: int = 0
    passes: int = 0
    steps: int = 0
    joined: int = 0
    retractions: int = 0


@dataclass(slots=True)
class Sums:
    """Over some requests: how many, rows, tokens asked for, passes, `joined`, and `steps`."""

    count: int = 0
    rows: int = 0
    output: int = 0
    passes: int = 0
    joined: int = 0
    steps: int = 0

    def add(self, request: Request, sign: int = 1) -> None:
        """Count a request in, or with -1 out."""
        self.count += sign
        self.rows += sign * request.rows
        self.output += sign * request.output
        self.passes += sign * request.passes
        self.joined += sign * request.joined
        self.steps += sign * request.steps


class Running:
    """The running requests, and how many decode steps there have been.

    tokens_per_step: that a step adds to each. clip_tokens: tokens still to come that admission counts of each at most.
    """

    def __init__(self, tokens_per_step: float, clip_tokens: int) -> None:
        self.step = 0
        self._per_step, self._clip = tokens_per_step, clip_tokens
        self._requests: dict[int, Request] = {}
        self._all, self._long = Sums(), Sums()
        # Those with more to come than admission counts.
        self._long_ones: set[int] = set()
        # Heaps whose entries end with a request and its passes; those of requests that have left since are skipped.
        self._ends: list[tuple[int, int, int]] = []
        self._clips: list[tuple[int, int, int]] = []
        self._youngest: list[tuple[float, int, int, int]] = []

    def __len__(self) -> int:
        return len(self._requests)

    def join(self, request: Request) -> None:
        """A request decodes from the next step on."""
        request.joined = self.step
        self._requests[request.index] = request
        self._all.add(request)
        left, entry = request.output - self.generated(request), (request.index, request.passes)
        heapq.heappush(self._ends, (self.step + self._steps_for(left), *entry))
        fixed = request.passes + self._per_step * (request.steps - request.joined)
        heapq.heappush(self._youngest, (fixed, -request.prompt, -request.index, request.passes))
        if left > self._clip:
            self._long.add(request)
            self._long_ones.add(request.index)
            heapq.heappush(self._clips, (self.step + self._steps_for(left - self._clip), *entry))

    def leave(self, request: Request) -> None:
        """A request decodes no more."""
        if request.index in self._long_ones:
            self._shorten(request)
        self._all.add(request, -1)
        del self._requests[request.index]
        request.steps += self.step - request.joined

    def rows(self, steps: int = 0) -> float:
        """Cache rows of all after that many more steps."""
        every = self._all
        return every.rows + self._per_step * (every.count * (self.step + steps) - every.joined)

    def generated(self, request: Request) -> float:
        """Tokens that a request has, running or not."""
        decoded = request.steps + (self.step - request.joined if request.index in self._requests else 0)
        return request.passes + self._per_step * decoded

    def is_done(self, request: Request) -> bool:
        """Whether it has all its tokens."""
        return self.generated(request) >= request.output - ROUNDING

    def counted(self, request: Request) -> float:
        """Tokens still to come of one request, as admission counts them."""
        return min(max(request.output - self.generated(request), 0.0), self._clip)

    def all_counted(self) -> float:
        """The same of all that run."""
        while self._clips and self._clips[0][0] <= self.step:
            _, index, passes = heapq.heappop(self._clips)
            if self._is_current(index, passes) and index in self._long_ones:
                self._shorten(self._requests[index])
        return self._to_come(self._all) - self._to_come(self._long) + self._clip * self._long.count

    def all_generated(self) -> float:
        """Tokens that all have."""
        return self._all.output - self._to_come(self._all)

    @property
    def all_asked(self) -> int:
        """Tokens that were asked for."""
        return self._all.output

    def steps_to_end(self) -> int:
        """Decode steps until the next one ends; 0 where one has."""
        while not self._is_current(*self._ends[0][1:]):
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.step

    def next_to_end(self) -> Request:
        """The one that ends next, by its index where several do."""
        self.steps_to_end()
        return self._requests[self._ends[0][1]]

    def youngest(self) -> Request:
        """The one with fewest tokens, of equals that with the longest prompt, of these the last."""
        while not self._is_current(-self._youngest[0][2], self._youngest[0][3]):
            heapq.heappop(self._youngest)
        return self._requests[-self._youngest[0][2]]

    def _is_current(self, index: int, passes: int) -> bool:
        request = self._requests.get(index)
        return request is not None and request.passes == passes

    def _shorten(self, request: Request) -> None:
        self._long.add(request, -1)
        self._long_ones.remove(request.index)

    def _to_come(self, sums: Sums) -> float:
        return sums.output - sums.passes - self._per_step * (sums.steps + sums.count * self.step - sums.joined)

    def _steps_for(self, tokens: float) -> int:
        return math.ceil(tokens / self._per_step - ROUNDING)
