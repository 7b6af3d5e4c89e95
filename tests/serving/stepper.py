"""The rules of `castoff.serving.instance`, one decode step at a time and without sums that are kept: a reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from castoff.serving.instance import Rules, StepTimes
from castoff.serving.workload import Requests


@dataclass(frozen=True, slots=True)
class Affine:
    """Times in closed form: a step costs by requests and rows, a pass by tokens, rows and requests."""

    base_s: float = 0.01
    request_s: float = 0.001
    row_s: float = 1e-6
    token_s: float = 1e-5
    topk: int = 50

    def decode_s(self, requests: int, context: float, growth: float, steps: int) -> float:
        rows = requests * (steps * context + growth * steps * (steps - 1) / 2)
        return steps * (self.base_s + requests * self.request_s) + rows * self.row_s

    def prefill_s(self, prompts: Sequence[tuple[int, int]]) -> float:
        sparse_s = self.base_s if max(new + rows for new, rows in prompts) > self.topk else 0.0
        each_s = sum(new * (self.token_s + rows * 1e-8) + self.request_s for new, rows in prompts)
        return self.base_s + sparse_s + each_s


@dataclass(slots=True, eq=False)
class Asked:
    index: int
    prompt: int
    output: int
    arrival: float
    tokens: float = 0.0
    rows: float = 0.0
    left: int = 0
    done: int = 0
    queued: float | None = None
    first: float | None = None
    finish: float | None = None
    retractions: int = 0


@dataclass(slots=True)
class Stepped:
    """What came out, and how many rows were in use after every step and pass."""

    asked: list[Asked]
    steps: int
    passes: int
    rows: list[float]


def simulate(requests: Requests, times: StepTimes, rules: Rules) -> Stepped:
    """Serve all requests, step by step."""
    every = [
        Asked(index, prompt, output, math.nan)
        for index, (prompt, output) in enumerate(zip(requests.prompt_tokens, requests.output_tokens, strict=True))
    ]
    admission, growth = rules.admission, rules.tokens_per_step
    fall = (admission.reserve_start - admission.reserve_least) / admission.reserve_decay_steps
    now, steps, passes, set_at = 0.0, 0, 0, 0
    start = admission.reserve_start
    coming: list[Asked] = []
    waiting: list[Asked] = []
    running: list[Asked] = []
    chunked: Asked | None = None
    unsent = list(every)
    full = False
    history: list[float] = []

    def send(time: float) -> None:
        if unsent:
            asked = unsent.pop(0)
            asked.arrival = time
            coming.append(asked)

    def held() -> list[Asked]:
        return [*running, *([chunked] if chunked else [])]

    def used() -> float:
        return sum(asked.rows for asked in held())

    def free(rows: float, count: int) -> float:
        return min(rules.capacity_tokens - rules.request_tokens * count, rules.host_tokens) - rows

    def to_come(asked: Asked) -> float:
        return min(max(asked.output - asked.tokens, 0.0), admission.clip_tokens)

    def finish(asked: Asked) -> None:
        nonlocal full
        asked.finish = now
        full = False
        if requests.arrival_s is None:
            send(now)

    def short() -> bool:
        return free(used(), len(held())) < len(running) * growth

    def retract() -> None:
        nonlocal full, start, set_at
        sent: list[Asked] = []
        while len(running) > (chunked is None):
            wanted = len(running) * growth * admission.retraction_steps
            if sent and free(used(), len(held())) >= wanted:
                break
            victim = min(running, key=lambda asked: (asked.tokens, -asked.prompt, -asked.index))
            running.remove(victim)
            victim.retractions += 1
            sent.append(victim)
            full = False
        waiting[:] = [*reversed(sent), *waiting] if admission.retracted_first else [*waiting, *sent]
        decoded = sum(asked.tokens for asked in running) + admission.retraction_steps * len(running)
        start, set_at = min(1.0, decoded / (sum(asked.output for asked in running) + 1)), steps

    def decode() -> None:
        nonlocal now, steps
        now += times.decode_s(len(running), sum(asked.rows for asked in running) / len(running), growth, 1)
        steps += 1
        for asked in running:
            asked.tokens += growth
            asked.rows += growth
        history.append(used())
        for asked in sorted(running, key=lambda asked: asked.index):
            if asked.tokens >= asked.output - 1e-9:
                running.remove(asked)
                finish(asked)

    for index, asked in enumerate(every):
        if requests.arrival_s is not None:
            asked.arrival = requests.arrival_s[index]
            coming.append(asked)
    if requests.arrival_s is not None:
        unsent.clear()
    for _ in range(requests.clients):
        send(0.0)

    while coming or waiting or running or chunked:
        coming.sort(key=lambda asked: (asked.arrival + rules.delay_s, asked.index))
        while coming and coming[0].arrival + rules.delay_s <= now:
            waiting.append(coming.pop(0))
        pieces: list[tuple[Asked, int, int]] = []
        if chunked or (waiting and not full):
            mixes = rules.mixes_prefill
            if mixes and running and short():
                retract()
            budget = rules.chunk_tokens - (len(running) if mixes else 0)
            reserve = max(start - fall * (steps - set_at), admission.reserve_least)
            aside = reserve * sum(to_come(asked) for asked in running) + (len(running) * growth if mixes else 0.0)
            taken, count = used(), len(held())
            if chunked and budget > 0:
                tokens = min(chunked.left, budget)
                pieces.append((chunked, tokens, chunked.done))
                budget -= tokens
                if tokens == chunked.left:
                    aside += to_come(chunked)
            while waiting and budget > 0 and len(running) + len(pieces) < rules.max_running:
                asked = waiting[0]
                rows = asked.prompt + math.ceil(asked.tokens - 1e-9)
                if to_come(asked) + aside >= free(taken + rows, count + 1):
                    full = True
                    break
                waiting.pop(0)
                asked.rows, asked.left, asked.done = rows, rows, 0
                taken, count = taken + rows, count + 1
                tokens = min(rows, budget)
                pieces.append((asked, tokens, 0))
                budget -= tokens
                if tokens == rows:
                    aside += to_come(asked)
                if asked.queued is None:
                    asked.queued = now - (asked.arrival + rules.delay_s)
        if pieces:
            now += times.prefill_s([(new, done) for _, new, done in pieces])
            passes += 1
            if rules.mixes_prefill and running:
                decode()
            chunked = None
            for asked, new, _ in pieces:
                asked.left -= new
                asked.done += new
                if asked.left:
                    chunked = asked
                    continue
                asked.tokens += 1
                asked.first = now if asked.first is None else asked.first
                if asked.tokens >= asked.output - 1e-9:
                    finish(asked)
                else:
                    running.append(asked)
            history.append(used())
        elif running:
            if short():
                retract()
            decode()
        else:
            now = min(asked.arrival + rules.delay_s for asked in coming)
            start, set_at = admission.reserve_start, steps
    return Stepped(every, steps, passes, history)
