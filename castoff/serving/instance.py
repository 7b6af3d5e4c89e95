"""One instance under load: a state machine that jumps from event to event.

Between an admission, an end, and memory that is used up, decode steps are all alike, so that many advance at once. A
prompt's pass comes before decodes; these wait for it, or go on in it where the stack mixes them.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from castoff.serving.result import Served
from castoff.serving.running import ROUNDING, Request, Running
from castoff.serving.workload import Requests
from castoff.spec.serving import Admission


class StepTimes(Protocol):
    """Seconds of passes, host time included."""

    def decode_s(self, requests: int, context: float, growth: float, steps: int) -> float:
        """That many decode steps of `requests` requests, `context` rows long on average, each growing by `growth` a
        step."""

    def prefill_s(self, prompts: Sequence[tuple[int, int]]) -> float:
        """A pass over prompts: of each, new tokens and the rows that it has already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an instance holds and how it admits.

    capacity_tokens: cache rows on the device, or, with offload, what would be if nothing else were there.
    request_tokens: rows' worth of device memory that a request takes beside its own. host_tokens: rows in host memory.
    tokens_per_step: that a decode step adds to a request, drafts included. delay_s: from a request's arrival until it
    is in the queue.
    """

    capacity_tokens: int
    request_tokens: float = 0.0
    host_tokens: float = math.inf
    chunk_tokens: int
    max_running: int
    tokens_per_step: float = 1.0
    delay_s: float = 0.0
    mixes_prefill: bool = False
    admission: Admission

    def free(self, rows: float, requests: int) -> float:
        """Rows that may be added to so many of so many requests."""
        return min(self.capacity_tokens - rows - self.request_tokens * requests, self.host_tokens - rows)


def fits_alone(requests: Requests, rules: Rules) -> bool:
    """Whether the longest request fits with nothing beside it; its last step may add more tokens than it asks for."""
    return rules.free(requests.longest_tokens + math.ceil(rules.tokens_per_step), 1) > 0


@dataclass(slots=True)
class Times:
    """Of all requests."""

    arrival: list[float]
    queued: list[float]
    first: list[float]
    finish: list[float]


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a prompt in a pass: so many new tokens after so many that the cache has."""

    request: Request
    tokens: int
    context: int
    is_last: bool


class Instance:
    """An instance; `run` takes it from an empty one to one whose requests are all answered."""

    def __init__(self, requests: Requests, times_of: StepTimes, rules: Rules) -> None:
        assert fits_alone(requests, rules), "a request that never fits is refused before"
        self.requests, self.times_of, self.rules = requests, times_of, rules
        self.now = 0.0
        self.passes = 0
        self.waiting: deque[Request] = deque()
        self.running = Running(rules.tokens_per_step, rules.admission.clip_tokens)
        self.chunked: Piece | None = None
        self.peak = 0.0
        # Whether a request was found to have no room since the last one left.
        self.full = self.was_full = False
        pairs = zip(requests.prompt_tokens, requests.output_tokens, strict=True)
        self._all = [Request(index, prompt, output) for index, (prompt, output) in enumerate(pairs)]
        self._times = Times(*([math.nan] * len(self._all) for _ in range(4)))
        # A heap: when requests are in the queue.
        self._coming: list[tuple[float, int]] = []
        self._next = 0
        self._reserve, self._reserve_step = rules.admission.reserve_start, 0
        if requests.arrival_s is None:
            for _ in range(requests.clients):
                self._send()
        else:
            for index, time in enumerate(requests.arrival_s):
                self._arrive(index, time)

    def run(self) -> Served:
        """Serve all requests."""
        while self._coming or self.waiting or self.running or self.chunked:
            self._receive()
            pieces = self._admit()
            if pieces:
                self._prefill(pieces)
            elif self.running:
                self._decode()
            else:
                self._idle()
        times = self._times
        return Served(
            prompt_tokens=np.array(self.requests.prompt_tokens),
            output_tokens=np.array(self.requests.output_tokens),
            arrival_s=np.array(times.arrival),
            queued_s=np.array(times.queued),
            first_token_s=np.array(times.first),
            finish_s=np.array(times.finish),
            retractions=np.array([request.retractions for request in self._all]),
            decode_steps=self.running.step,
            prefill_passes=self.passes,
            kv_peak_tokens=self.peak,
            capacity_bound=self.was_full,
        )

    # Arrivals

    def _send(self) -> None:
        """A client of a closed loop sends its next request."""
        if self._next < len(self._all):
            self._arrive(self._next, self.now)
            self._next += 1

    def _arrive(self, index: int, time: float) -> None:
        self._times.arrival[index] = time
        heapq.heappush(self._coming, (time + self.rules.delay_s, index))

    def _receive(self) -> None:
        while self._coming and self._coming[0][0] <= self.now:
            self.waiting.append(self._all[heapq.heappop(self._coming)[1]])

    def _idle(self) -> None:
        """Nothing to do before the next request comes."""
        self.now = self._coming[0][0]
        self._set_reserve(self.rules.admission.reserve_start)

    # Memory

    def rows(self, steps: int = 0) -> float:
        """Cache rows in use after that many more decode steps, those of a prompt in pieces counted whole."""
        return self.running.rows(steps) + (self.chunked.request.rows if self.chunked else 0)

    def _held(self) -> int:
        """Requests that have memory."""
        return len(self.running) + (self.chunked is not None)

    def _free(self, steps: int = 0) -> float:
        return self.rules.free(self.rows(steps), self._held())

    def _has_room(self, steps: int) -> bool:
        """Whether, after that many more steps, there is memory for another one."""
        return self._free(steps) >= len(self.running) * self.rules.tokens_per_step

    # Admission

    @property
    def reserve(self) -> float:
        """The share of tokens still to come that is set aside."""
        admission = self.rules.admission
        fall = (admission.reserve_start - admission.reserve_least) / admission.reserve_decay_steps
        return max(self._reserve - fall * (self.running.step - self._reserve_step), admission.reserve_least)

    def _set_reserve(self, share: float) -> None:
        self._reserve, self._reserve_step = share, self.running.step

    def _admit(self) -> list[Piece]:
        """The next prompt's pass: what is left of one in pieces, then those from the queue that fit."""
        mixes = self.rules.mixes_prefill
        if self.chunked is None and (self.full or not self.waiting):
            return []
        if mixes and self.running and not self._has_room(0):
            self._retract()
        budget = self.rules.chunk_tokens - (len(self.running) if mixes else 0)
        pieces: list[Piece] = []
        set_aside = self.reserve * self.running.all_counted()
        set_aside += len(self.running) * self.rules.tokens_per_step if mixes else 0.0
        taken, held = self.rows(), self._held()
        if self.chunked is not None and budget > 0:
            pieces.append(self._next_piece(self.chunked, budget))
            budget -= pieces[-1].tokens
            if pieces[-1].is_last:
                set_aside += self.running.counted(self.chunked.request)
        while self.waiting and budget > 0 and len(self.running) + len(pieces) < self.rules.max_running:
            request = self.waiting[0]
            rows = request.prompt + math.ceil(self.running.generated(request) - ROUNDING)
            if self.running.counted(request) + set_aside >= self.rules.free(taken + rows, held + 1):
                self.full = self.was_full = True
                break
            self.waiting.popleft()
            request.rows = rows
            taken, held = taken + rows, held + 1
            pieces.append(self._next_piece(Piece(request, 0, 0, False), budget))
            budget -= pieces[-1].tokens
            if pieces[-1].is_last:
                set_aside += self.running.counted(request)
            if math.isnan(self._times.queued[request.index]):
                at = self._times.arrival[request.index] + self.rules.delay_s
                self._times.queued[request.index] = self.now - at
        self.peak = max(self.peak, taken)
        return pieces

    def _next_piece(self, piece: Piece, budget: int) -> Piece:
        request, done = piece.request, piece.context + piece.tokens
        tokens = min(request.rows - done, budget)
        return Piece(request, tokens, done, done + tokens == request.rows)

    def _prefill(self, pieces: list[Piece]) -> None:
        self.now += self.times_of.prefill_s([(piece.tokens, piece.context) for piece in pieces])
        self.passes += 1
        if self.rules.mixes_prefill and self.running:
            self._advance(1)
        self.chunked = None if pieces[-1].is_last else pieces[-1]
        for piece in pieces:
            if piece.is_last:
                self._join(piece.request)
        self.peak = max(self.peak, self.rows())

    def _join(self, request: Request) -> None:
        """A request whose prompt is computed decodes from now on; its pass gave a token."""
        request.passes += 1
        if math.isnan(self._times.first[request.index]):
            self._times.first[request.index] = self.now
        if self.running.is_done(request):
            self._end(request)
        else:
            self.running.join(request)

    # Decoding

    def _decode(self) -> None:
        """Decode steps up to the next event; one where requests had to go back first."""
        if not self._has_room(0):
            self._retract()
            self._advance(1)
            return
        steps = min(self.running.steps_to_end(), self._steps_in_memory())
        # A request that comes is looked at after the step in which it came, if it could join.
        if self._coming and not self.full and len(self.running) < self.rules.max_running:
            steps = self._steps_until(self._coming[0][0], steps)
        self._advance(steps)

    def _steps_in_memory(self) -> int:
        """Steps before memory is used up, at least one."""
        growth = len(self.running) * self.rules.tokens_per_step
        steps = max(1, int(self._free() / growth))
        while steps > 1 and not self._has_room(steps - 1):
            steps -= 1
        while self._has_room(steps):
            steps += 1
        return steps

    def _steps_until(self, time: float, most: int) -> int:
        """The fewest steps, of at most `most`, after which it is `time`."""
        steps = max(1, min(math.ceil((time - self.now) / self._seconds(1)), most))
        while steps > 1 and self.now + self._seconds(steps - 1) >= time:
            steps -= 1
        while steps < most and self.now + self._seconds(steps) < time:
            steps += 1
        return steps

    def _seconds(self, steps: int) -> float:
        count = len(self.running)
        return self.times_of.decode_s(count, self.running.rows() / count, self.rules.tokens_per_step, steps)

    def _advance(self, steps: int) -> None:
        """Decode steps, after which those requests end that have all their tokens."""
        self.now += self._seconds(steps)
        self.running.step += steps
        self.peak = max(self.peak, self.rows())
        while self.running and self.running.steps_to_end() == 0:
            ended = self.running.next_to_end()
            self.running.leave(ended)
            self._end(ended)

    def _end(self, request: Request) -> None:
        self._times.finish[request.index] = self.now
        self.full = False
        if self.requests.arrival_s is None:
            self._send()

    def _retract(self) -> None:
        """Send those requests back that have generated least, until there is memory for some steps of the others."""
        admission, per_step = self.rules.admission, self.rules.tokens_per_step
        sent: list[Request] = []
        while len(self.running) > (self.chunked is None):
            wanted = len(self.running) * per_step * admission.retraction_steps
            if sent and self._free() >= wanted:
                break
            victim = self.running.youngest()
            self.running.leave(victim)
            victim.retractions += 1
            sent.append(victim)
        if admission.retracted_first:
            self.waiting.extendleft(sent)
        else:
            self.waiting.extend(sent)
        self.full, self.was_full = False, True
        ahead = admission.retraction_steps * len(self.running)
        self._set_reserve(min(1.0, (self.running.all_generated() + ahead) / (self.running.all_asked + 1)))
