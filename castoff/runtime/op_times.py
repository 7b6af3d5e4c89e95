"""Seconds of every op of a run, and a trace of its beginning, through torch's profiler.

Every op names itself to the profiler. Recording only those names is cheap, and that is done throughout; a trace also
wants every operator and kernel beneath, which is slow and large. So a trace has its fill of events, half from prefill
and half from decode, and the profiler is emptied every few thousand events: neither grows with the run.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import lazy_loader as lazy

from castoff.model.decoder import PassOutput
from castoff.ops.program import Tensor
from castoff.ops.table import OPS
from castoff.runtime.engine import Engine, Rows

torch = lazy.load("torch")

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
_NAMES = frozenset(op.name for op in OPS)

# An event takes about 1.6 kB until the profiler is emptied, and emptying it takes longer per event the more there are.
WINDOW_EVENTS = 2_000
# From 100 to 250 bytes each in the file.
TRACE_EVENTS = 200_000


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


class _Names:
    """The profiler from now until `stop`, for what names itself, and on a device for its kernels.

    torch.profiler.profile has no setting for that: it records every operator. The function beneath it takes scopes.
    """

    def __init__(self, device: str) -> None:
        profile = torch.autograd.profiler.profile(use_device=None if device == "cpu" else device, use_kineto=True)
        activities, config = profile.kineto_activities, profile.config(create_trace_id=True)
        torch.autograd._prepare_profiler(config, activities)
        torch.autograd._enable_profiler(config, activities, {torch._C._profiler.RecordScope.USER_SCOPE})

    def stop(self) -> list[Any]:
        """End, and give torch's events."""
        events: list[Any] = torch.autograd._disable_profiler().events()
        return events


class _Everything:
    """The profiler from now until `stop`, for all that torch does."""

    def __init__(self, device: str) -> None:
        kinds = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if device == "cuda" else [])])
        self._profile.start()

    def stop(self) -> list[Any]:
        """End, and give torch's events."""
        self._profile.stop()
        events: list[Any] = self._profile.profiler.kineto_results.events()
        return events

    def trace_events(self) -> str:
        """The events of a Chrome trace, as a JSON list without its brackets."""
        with tempfile.TemporaryDirectory(prefix="castoff-") as folder:
            file = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(file))
            return json.dumps(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])[1:-1]


class OpClock:
    """Times the ops of all calls between entering and leaving it; on CUDA the time on the device counts.

    device: `cpu` or `cuda`. traced: whether to make a trace too.
    """

    def __init__(self, device: str, *, traced: bool) -> None:
        self._device = device
        self._traced = traced
        self._calls: Counter[str] = Counter()
        self._total_ns: Counter[str] = Counter()
        self._trace_parts: list[str] = []
        self._trace_events_left: dict[Phase, int] = dict.fromkeys(PHASES, TRACE_EVENTS // len(PHASES) if traced else 0)
        # The window that is open, the phase that it traces (None: it records names), its calls so far and at most.
        self._window: _Names | _Everything | None = None
        self._traces: Phase | None = None
        self._window_calls, self._most_calls = 0, 1

    def __enter__(self) -> OpClock:
        # Kineto tells standard error of every start and stop, unless its level is above all that it has to say.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        # The first start loads what the profiler needs; no request shall wait for it.
        (_Everything if self._traced else _Names)(self._device).stop()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._close()
        elif self._window is not None:
            self._window.stop()

    def before_call(self, phase: Phase) -> None:
        """To be called before every call of the engine: empties the profiler if it is time to."""
        traces = phase if self._trace_events_left[phase] > 0 else None
        if self._window is None or traces != self._traces:
            self._open(traces, most_calls=1)
        elif self._window_calls >= self._most_calls:
            events = self._close()
            most = min(WINDOW_EVENTS, self._trace_events_left[phase]) if traces else WINDOW_EVENTS
            self._open(traces, most_calls=max(1, most * self._window_calls // max(events, 1)))
        self._window_calls += 1

    @property
    def times(self) -> tuple[OpTime, ...]:
        """Every op that ran, the longest in total first."""
        return tuple(OpTime(name, self._calls[name], 1e-9 * total) for name, total in self._total_ns.most_common())

    @property
    def trace(self) -> str | None:
        """The text of a Chrome trace, where one was asked for."""
        if not self._traced:
            return None
        return '{"displayTimeUnit": "ms", "traceEvents": [' + ", ".join(self._trace_parts) + "]}\n"

    def _open(self, traces: Phase | None, *, most_calls: int) -> None:
        self._close()
        self._window = _Names(self._device) if traces is None else _Everything(self._device)
        self._traces, self._window_calls, self._most_calls = traces, 0, most_calls

    def _close(self) -> int:
        """Take over what the window recorded; the number of its events."""
        if self._window is None:
            return 0
        if self._device == "cuda":
            torch.cuda.synchronize()
        window, self._window = self._window, None
        events = window.stop()
        self._count(events)
        if self._traces is not None and isinstance(window, _Everything):
            self._trace_parts.append(window.trace_events())
            self._trace_events_left[self._traces] -= len(events)
        return len(events)

    def _count(self, events: Iterable[Any]) -> None:
        kinds = torch.autograd.DeviceType
        wanted = kinds.CUDA if self._device == "cuda" else kinds.CPU
        for event in events:
            # Of a name there is one event on the host and, where it launched anything, one on the device.
            if event.is_user_annotation() and event.device_type() == wanted and (name := event.name()) in _NAMES:
                self._calls[name] += 1
                self._total_ns[name] += event.duration_ns()


class TimedEngine(Engine):
    """An engine whose calls a clock is told of."""

    def __init__(self, clock: OpClock, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._clock = clock

    def forward(self, ids_BS: Tensor, rows: Rows, *, prefill: bool, last: bool) -> PassOutput:
        """As of any engine."""
        self._clock.before_call("prefill" if prefill else "decode")
        return super().forward(ids_BS, rows, prefill=prefill, last=last)

    def draft(
        self, ids_BS: Tensor, hidden_TD: Tensor, topk_TK: Tensor | None, rows: Rows, *, prefill: bool
    ) -> PassOutput:
        """As of any engine."""
        self._clock.before_call("prefill" if prefill else "decode")
        return super().draft(ids_BS, hidden_TD, topk_TK, rows, prefill=prefill)
