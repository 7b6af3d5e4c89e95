"""Decode steps of a model as `castoff run` makes them, timed whole and call by call.

Caches hold random rows and prompts cost nothing: a decode step takes as long as behind any prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import lazy_loader as lazy

from castoff.model.decoder import PassOutput
from castoff.model.record import record_step
from castoff.model.setup import Setup
from castoff.ops.lengths import Lengths
from castoff.ops.program import OpCall, Tensor
from castoff.runtime.checkpoint import LoadedWeights, RandomTensors
from castoff.runtime.engine import Engine, Rows
from castoff.runtime.memory import check_fits
from castoff.runtime.op_times import CallClock
from castoff.runtime.sampling import Sampling
from castoff.runtime.scheduler import Request, Scheduler
from castoff.spec.scenario import RequestClass

torch = lazy.load("torch")

BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """A batch of equal requests. context: tokens that each has in the cache before the step."""

    batch: int
    context: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, from the end of the one before, and of its op calls in order."""

    seconds: float
    calls: Sequence[tuple[str, float]]


class FilledEngine(Engine):
    """An engine whose prompts are in the cache before they are computed."""

    def fill(self) -> None:
        """Random rows everywhere."""
        for layer in range(self.setup.model.num_hidden_layers):
            self.caches.latent(layer).cache.normal_()
            if self.setup.model.indexer and self.setup.model.indexer_types[layer] == "full":
                self.caches.indexer(layer).normal_()

    def forward(self, ids_BS: Tensor, rows: Rows, *, prefill: bool, last: bool) -> PassOutput:
        """A decode step; of a prompt nothing but random logits."""
        if not prefill:
            return super().forward(ids_BS, rows, prefill=False, last=last)
        return PassOutput(ids_BS, torch.randn(1, self.setup.model.vocab_size, device=self.device), ids_BS, None)


def filled_engine(
    setup: Setup, points: Sequence[Point], *, dtype: str, device: str, progress: Callable[[str], None]
) -> FilledEngine:
    """An engine with random weights and room for the largest point. Raises CastoffError where it does not fit."""
    blocks = max(point.batch * (-(-point.context // BLOCK_TOKENS) + 1) for point in points)
    own_dtype, own_device = getattr(torch, dtype), torch.device(device)
    check_fits(setup, (blocks + 1) * BLOCK_TOKENS, None, dtype=own_dtype, device=own_device)
    weights = LoadedWeights(setup, RandomTensors(0), dtype=own_dtype, device=own_device, progress=progress)
    engine = FilledEngine(
        setup, weights, num_blocks=blocks, block_tokens=BLOCK_TOKENS, dtype=own_dtype, device=own_device
    )
    engine.fill()
    return engine


def timed_steps(
    engine: FilledEngine, point: Point, *, steps: int, now_s: Callable[[], float] = time.perf_counter
) -> list[StepTimes]:
    """So many decode steps of a batch, one after the other, after one that is not counted. now_s: the clock."""
    clock = CallClock(engine.device.type, now_s)
    times: list[StepTimes] = []
    last_s: float | None = None

    def step_ends() -> None:
        nonlocal last_s
        calls, ended_s = clock.take(), now_s()
        if last_s is not None:
            times.append(StepTimes(ended_s - last_s, calls))
        last_s = ended_s

    with clock.running():
        _decode(engine, point, steps + 1, step_ends)
    return times


def tpot_s(engine: FilledEngine, point: Point, *, steps: int, now_s: Callable[[], float] = time.perf_counter) -> float:
    """Time per token of a batch whose requests have all joined, over so many steps after one that is not counted."""
    ends_s: list[float] = []
    _decode(engine, point, steps + 1, lambda: ends_s.append(now_s()))
    return (ends_s[-1] - ends_s[0]) / steps


def _decode(engine: FilledEngine, point: Point, steps: int, step_ends: Callable[[], None]) -> None:
    scheduler = Scheduler(
        engine, slots=point.batch, chunk_tokens=point.context, sampling=Sampling(), record=lambda _: step_ends()
    )
    # The first token comes with the prompt.
    request = Request((1,) * point.context, steps + 1)
    with torch.inference_mode():
        scheduler.run([request] * point.batch)


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """What was measured at a point: op calls as a cast records them, each with its median seconds, and the step's."""

    point: Point
    calls: Sequence[tuple[OpCall, float]]
    seconds: float

    @property
    def host_s(self) -> float:
        """What a step takes beside its ops: inputs, sampling, scheduling."""
        return max(self.seconds - sum(seconds for _, seconds in self.calls), 0.0)


def summarized(setup: Setup, point: Point, times: Sequence[StepTimes]) -> MeasuredPoint:
    """Medians over steps. The calls of a step are those of its cast, then those of sampling."""
    recorded = recorded_calls(setup, point)
    for step in times:
        names = [name for name, _ in step.calls[: len(recorded)]]
        assert names == [call.op.name for call in recorded], "a run has the ops of its cast"
    seconds = [median(step.calls[place][1] for step in times) for place in range(len(recorded))]
    return MeasuredPoint(point, tuple(zip(recorded, seconds, strict=True)), median(step.seconds for step in times))


def recorded_calls(setup: Setup, point: Point) -> list[OpCall]:
    """The op calls of a decode step, in order."""
    program = record_step(setup, Lengths((RequestClass(point.batch, point.context, 1),)))
    return [call for _, call in program.calls()]
