"""Seconds of every op of a run, and a trace of its beginning."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lazy_loader as lazy

from castoff.ops.program import Tensor, op_observer

torch = lazy.load("torch")

# Calls of ops in a trace: each brings some ten operators and as many kernels beneath it.
TRACED_CALLS = 10_000
# Pairs of CUDA events that are kept before the device is waited for.
_PENDING_CALLS = 10_000


@dataclass(frozen=True, slots=True)
class OpTime:
    """Calls of one op over a run, and their seconds."""

    name: str
    calls: int
    total_s: float

    @property
    def mean_s(self) -> float:
        """Seconds per call."""
        return self.total_s / self.calls


class OpClock:
    """Counts and times the ops that are computed while `running`; on CUDA the time on the device.

    traced: also keep a Chrome trace of the first `TRACED_CALLS` calls, with all that torch does beneath them.
    """

    def __init__(self, device: str, *, traced: bool) -> None:
        self._device = device
        self._calls: Counter[str] = Counter()
        self._total_s: Counter[str] = Counter()
        self._pending: list[tuple[str, Tensor, Tensor]] = []
        self._profile: Tensor | None = _profile(device) if traced else None
        self.trace: str | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch the ops inside."""
        token = op_observer.set(self._on_device if self._device == "cuda" else self._on_host)
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
        return tuple(OpTime(name, self._calls[name], total) for name, total in self._total_s.most_common())

    @contextmanager
    def _on_host(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._add(name, time.perf_counter() - started)

    @contextmanager
    def _on_device(self, name: str) -> Iterator[None]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._pending.append((name, start, end))
        if len(self._pending) >= _PENDING_CALLS:
            self._settle()

    def _settle(self) -> None:
        if not self._pending:
            return
        torch.cuda.synchronize()
        for name, start, end in self._pending:
            self._add(name, 1e-3 * start.elapsed_time(end))
        self._pending.clear()

    def _add(self, name: str, seconds: float) -> None:
        self._calls[name] += 1
        self._total_s[name] += seconds  # type: ignore[assignment]
        if self._profile is not None and self._calls.total() >= TRACED_CALLS:
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


def _profile(device: str) -> Tensor:
    # Kineto tells standard error of every start and stop, unless its level is above all that it has to say.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    kinds = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if device == "cuda" else [])])
