"""Seconds of every op of a run, and a trace of its beginning."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lazy_loader as lazy

from castoff.ops.program import Tensor, op_observer
from castoff.spec.scenario import Mode

torch = lazy.load("torch")

# Calls of ops in a trace: each brings some ten operators and as many kernels beneath it.
TRACED_CALLS = 10_000
# Pairs of events that are kept before the device is waited for.
_PENDING_CALLS = 10_000


@dataclass(frozen=True, slots=True)
class OpTime:
    """Calls of one op over all prefill passes of a run, or over all decode passes and drafts, and their seconds."""

    name: str
    phase: Mode
    calls: int
    total_s: float

    @property
    def mean_s(self) -> float:
        """Seconds per call."""
        return self.total_s / self.calls


class OpClock:
    """Counts and times the ops that are computed while `running`; on an accelerator the time on the device.

    traced: also keep a Chrome trace of the first `TRACED_CALLS` calls, with all that torch does beneath them.
    """

    def __init__(self, device: str, *, traced: bool) -> None:
        self._device = device
        self._phase: Callable[[], Mode] = lambda: "prefill"
        self._calls: Counter[tuple[str, Mode]] = Counter()
        self._total_s: defaultdict[tuple[str, Mode], float] = defaultdict(float)
        self._pending: list[tuple[tuple[str, Mode], Tensor, Tensor]] = []
        # Side streams of a CPU are threads.
        self._lock = threading.Lock()
        self._profile: Tensor | None = _profile(device) if traced else None
        self.trace: str | None = None

    @contextmanager
    def running(self, phase: Callable[[], Mode]) -> Iterator[None]:
        """Watch the ops inside; `phase` says of which kind of pass they are."""
        self._phase = phase
        token = op_observer.set(self._on_host if self._device == "cpu" else self._on_device)
        if self._profile is not None:
            self._profile.start()
        try:
            yield
        finally:
            op_observer.reset(token)
            self._settle()
            self._end_trace()

    @property
    def times(self) -> tuple[OpTime, ...]:
        """Every op that ran, the longest in total first."""
        longest = sorted(self._total_s.items(), key=lambda item: -item[1])
        return tuple(OpTime(*key, self._calls[key], total) for key, total in longest)

    @contextmanager
    def _on_host(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._add((name, self._phase()), time.perf_counter() - started)

    @contextmanager
    def _on_device(self, name: str) -> Iterator[None]:
        with _timed(self._device) as (start, end):
            yield
        self._pending.append(((name, self._phase()), start, end))
        if len(self._pending) >= _PENDING_CALLS:
            self._settle()

    def _settle(self) -> None:
        if not self._pending:
            return
        torch.accelerator.synchronize()
        for key, start, end in self._pending:
            self._add(key, 1e-3 * start.elapsed_time(end))
        self._pending.clear()

    def _add(self, key: tuple[str, Mode], seconds: float) -> None:
        with self._lock:
            self._calls[key] += 1
            self._total_s[key] += seconds
            is_long_enough = self._calls.total() >= TRACED_CALLS
        # A profiler is stopped where it was started.
        if self._profile is not None and is_long_enough and threading.current_thread() is threading.main_thread():
            self._end_trace()

    def _end_trace(self) -> None:
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        with tempfile.TemporaryDirectory(prefix="castoff-") as folder:
            file = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(file))
            self.trace = file.read_text(encoding="utf-8")


class CallClock:
    """Seconds of every op call in order, of those that are computed on this thread while `running`.

    now_s: what is looked at on a CPU.
    """

    def __init__(self, device: str, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._now_s = now_s
        self._calls: list[tuple[str, float | tuple[Tensor, Tensor]]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch the ops inside."""
        token = op_observer.set(self._on_host if self._device == "cpu" else self._on_device)
        try:
            yield
        finally:
            op_observer.reset(token)

    def take(self) -> list[tuple[str, float]]:
        """The calls since this was last asked for; waits for the device."""
        calls, self._calls = self._calls, []
        if self._device != "cpu":
            torch.accelerator.synchronize()
        return [
            (name, told if isinstance(told, float) else 1e-3 * told[0].elapsed_time(told[1])) for name, told in calls
        ]

    @contextmanager
    def _on_host(self, name: str) -> Iterator[None]:
        started = self._now_s()
        yield
        self._calls.append((name, self._now_s() - started))

    @contextmanager
    def _on_device(self, name: str) -> Iterator[None]:
        with _timed(self._device) as events:
            yield
        self._calls.append((name, events))


@contextmanager
def _timed(device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Events at the start and the end of what is inside, by the device's own clock."""
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    start.record()
    yield start, end
    end.record()


def _profile(device: str) -> Tensor:
    # Kineto tells standard error of every start and stop, unless its level is above all that it has to say.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    kinds = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if device == "cuda" else [])])
