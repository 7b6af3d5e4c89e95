"""What an instance is asked: requests in a closed loop, or at given times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from castoff.errors import CastoffError
from castoff.spec.checks import check_whole

REQUESTS_PER_CLIENT = 10
MOST_REQUESTS = 1_000_000
# A year: later arrivals are a slip, and leave the range in which times add up.
LAST_ARRIVAL_S = 3.2e7


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests one by one. arrival_s: when each comes; None: a closed loop, in which `clients` are on their way at a
    time, the first ones at 0 and each other one when one has been answered."""

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    arrival_s: tuple[float, ...] | None
    clients: int = 0

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest request at its end."""
        return max(prompt + output for prompt, output in zip(self.prompt_tokens, self.output_tokens, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """So many clients, each with one request on its way, all starting at once.

    prompt_tokens, output_tokens: nominal lengths. Each is drawn evenly from least_share of it to all of it.
    num_requests: in all; None means 10 for each client.
    """

    concurrency: int
    prompt_tokens: int
    output_tokens: int
    num_requests: int | None = None
    least_share: float = 0.8
    seed: int = 0

    def drawn(self) -> Requests:
        """The requests. Raises CastoffError for numbers that cannot be."""
        check_whole("concurrency", self.concurrency, least=1)
        check_whole("prompt_tokens", self.prompt_tokens, least=1)
        check_whole("output_tokens", self.output_tokens, least=1)
        check_whole("seed", self.seed, least=0)
        if not 0 < self.least_share <= 1:
            raise CastoffError(f"least_share must be greater than 0 and at most 1, got {self.least_share}")
        count = REQUESTS_PER_CLIENT * self.concurrency if self.num_requests is None else self.num_requests
        check_whole("num_requests", count, least=1)
        if count > MOST_REQUESTS:
            raise CastoffError(
                f"{count:,} requests are more than the {MOST_REQUESTS:,} that are simulated; give fewer clients or "
                "num_requests"
            )
        draw = np.random.default_rng(self.seed)

        def lengths(nominal: int) -> tuple[int, ...]:
            # The small term keeps 0.8 * 10 from becoming 8.000….
            least = max(1, math.ceil(nominal * self.least_share - 1e-9))
            return tuple(draw.integers(least, nominal + 1, count).tolist())

        return Requests(
            lengths(self.prompt_tokens), lengths(self.output_tokens), None, min(int(self.concurrency), int(count))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Requests at given times: one entry of each for every request. arrival_s: seconds from the start, in any order."""

    arrival_s: Sequence[float]
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]

    @property
    def _lengths(self) -> tuple[Sequence[int], Sequence[int]]:
        return self.prompt_tokens, self.output_tokens

    def drawn(self) -> Requests:
        """The requests, as they are. Raises CastoffError for numbers that cannot be."""
        if not all(isinstance(given, Sequence | np.ndarray) for given in (self.arrival_s, *self._lengths)):
            raise CastoffError("arrivals need arrival_s, prompt_tokens and output_tokens as lists of numbers")
        try:
            times = [float(time) for time in self.arrival_s]
        except (TypeError, ValueError):
            raise CastoffError("arrival_s must be numbers, in seconds from the start") from None
        counts = {len(times), len(self.prompt_tokens), len(self.output_tokens)}
        if len(counts) != 1 or counts == {0}:
            raise CastoffError(
                f"arrivals need one time, one prompt_tokens and one output_tokens a request, at least one; got "
                f"{len(times)}, {len(self.prompt_tokens)} and {len(self.output_tokens)}"
            )
        if not all(0 <= time <= LAST_ARRIVAL_S for time in times):
            raise CastoffError(f"arrival_s must be seconds from 0 to {LAST_ARRIVAL_S:g}")
        for name, lengths in (("prompt_tokens", self.prompt_tokens), ("output_tokens", self.output_tokens)):
            check_whole(name, np.asarray(lengths), least=1)
        prompts, outputs = (tuple(int(n) for n in lengths) for lengths in (self.prompt_tokens, self.output_tokens))
        return Requests(prompts, outputs, tuple(times))


Load = ClosedLoop | Arrivals
