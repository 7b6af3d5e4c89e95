"""Streams beside the one that computes: threads on a CPU, device streams on an accelerator, or none at all.

What they are asked for is `model.offload.Streams`; nothing in a step waits for more than it names.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Protocol

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.model.offload import Label, Streams
from castoff.ops.program import Tensor

torch = lazy.load("torch")


@dataclass(slots=True)
class StreamFigures:
    """waits: labels that main waited for. stall_s: how long. most_behind: the most pieces of work that were still to be
    done when main came to wait. Both are None once steps are a captured graph, in which nothing can be asked."""

    waits: int = 0
    stall_s: float | None = 0.0
    most_behind: int | None = 0


class RunStreams(Streams, Protocol):
    """Streams of a run: they are drained before their work's results are read by others, and closed at its end."""

    figures: StreamFigures

    def drain(self) -> None:
        """Wait until all that was submitted is done. Raises CastoffError where a piece of work failed."""

    def abandon(self) -> None:
        """Wait until nothing that was submitted goes on, whether it was done or failed."""

    def close(self) -> None:
        """Let go of the streams; work that has not begun is dropped."""


def open_streams(device: Tensor, *, inline: bool) -> RunStreams:
    """The streams that a device has. inline: do everything in order on main, as a graph of a compiler does."""
    if inline:
        return InlineStreams()
    return ThreadStreams() if device.type == "cpu" else DeviceStreams(device)


class InlineStreams:
    """No streams: work is done where it is submitted."""

    def __init__(self) -> None:
        self.figures = StreamFigures()

    def record(self, label: Label) -> None:
        """Nothing: main has done all that was before."""

    def wait(self, label: Label) -> None:
        """Nothing: it is done."""

    def submit(self, stream: str, label: Label, work: Callable[[], None], *, after: Label) -> None:
        """Do it now."""
        work()

    def drain(self) -> None:
        """Nothing is open."""

    def abandon(self) -> None:
        """Nothing goes on."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class _Task:
    """A piece of work in a thread's queue. error: what it raised."""

    work: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class ThreadStreams:
    """A thread per stream. On a CPU main has done what it recorded, so a thread need not wait for main's labels."""

    def __init__(self) -> None:
        self.figures = StreamFigures()
        self._queues: dict[str, queue.SimpleQueue[_Task | None]] = {}
        self._threads: list[threading.Thread] = []
        self._open: dict[Label, _Task] = {}
        self._failed: BaseException | None = None
        self._closing = False

    def record(self, label: Label) -> None:
        """Nothing: main has done all that was before."""

    def wait(self, label: Label) -> None:
        """Wait for the thread. Raises CastoffError where a thread's work failed."""
        task = self._open.get(label)
        if task is None:
            return
        figures = self.figures
        figures.waits += 1
        if not task.done.is_set():
            behind = sum(not other.done.is_set() for other in self._open.values())
            figures.most_behind = max(figures.most_behind or 0, behind)
            started = time.perf_counter()
            task.done.wait()
            figures.stall_s = (figures.stall_s or 0.0) + time.perf_counter() - started
        # Only now: an interrupt while it waited leaves the task to `abandon`.
        del self._open[label]
        self._raise_failure(task)

    def submit(self, stream: str, label: Label, work: Callable[[], None], *, after: Label) -> None:
        """Hand it to the stream's thread."""
        # What observes main's ops observes these too.
        context = copy_context()
        task, tasks = _Task(lambda: context.run(work)), self._queue(stream)
        self._open[label] = task
        tasks.put(task)

    def drain(self) -> None:
        """Wait for all threads. Raises CastoffError where work failed."""
        for label in list(self._open):
            self.wait(label)

    def abandon(self) -> None:
        """Wait for all threads, and leave it to the next wait to tell of a failure.

        Not for what is open: an interrupted `submit` may have left work that no thread was ever given.
        """
        last = [_Task(lambda: None) for _ in self._queues]
        for tasks, task in zip(self._queues.values(), last, strict=True):
            tasks.put(task)
        for task in last:
            task.done.wait()
        self._open.clear()

    def close(self) -> None:
        """End the threads after the piece of work that each is at."""
        self._closing = True
        self._open.clear()
        for tasks in self._queues.values():
            tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._queues.clear()
        self._threads.clear()

    def _queue(self, stream: str) -> queue.SimpleQueue[_Task | None]:
        if stream not in self._queues:
            tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(tasks,), name=f"castoff-{stream}", daemon=True)
            thread.start()
            self._threads.append(thread)
            # Last: whoever finds the queue must find a thread at its end.
            self._queues[stream] = tasks
        return self._queues[stream]

    def _serve(self, tasks: queue.SimpleQueue[_Task | None]) -> None:
        # Inference mode is a thread's own, like main's.
        with torch.inference_mode():
            while (task := tasks.get()) is not None:
                try:
                    # After a failure nothing that follows may touch rows.
                    if self._failed is None and not self._closing:
                        task.work()
                # Whatever it is, main must hear of it instead of waiting for ever.
                except BaseException as error:  # noqa: BLE001
                    self._failed = task.error = error
                finally:
                    task.done.set()

    def _raise_failure(self, task: _Task) -> None:
        error = task.error or self._failed
        if error is not None:
            raise CastoffError(
                f"copying cache rows failed: {type(error).__name__}: {error}; the run was ended, since its rows may be "
                "wrong"
            ) from error


@dataclass(frozen=True, slots=True)
class _Pending:
    """Work on a stream that main has not waited for. work keeps the tensors alive that it uses."""

    done: Tensor
    work: Callable[[], None]
    is_captured: bool


class DeviceStreams:
    """Streams and events of the accelerator that torch sees; nothing in a step waits for the whole device.

    Tensors that a stream's work uses live until main has waited for it, so no memory is handed out again too early.
    """

    def __init__(self, device: Tensor) -> None:
        self.figures = StreamFigures()
        self._device = device
        self._streams: dict[str, Tensor] = {}
        self._events: dict[Label, Tensor] = {}
        self._open: dict[Label, _Pending] = {}
        self._stalls: list[tuple[Tensor, Tensor]] = []

    def record(self, label: Label) -> None:
        """An event on main."""
        event = torch.Event(self._device)
        event.record(self._main)
        self._events[label] = event

    def wait(self, label: Label) -> None:
        """Main's stream waits, the host does not."""
        found = self._open.pop(label, None)
        if found is None:
            return
        figures = self.figures
        figures.waits += 1
        if found.is_captured:
            figures.stall_s = figures.most_behind = None
        elif figures.stall_s is not None:
            behind = sum(not other.done.query() for other in (found, *self._open.values()))
            figures.most_behind = max(figures.most_behind or 0, behind)
            arrived = torch.Event(self._device, enable_timing=True)
            arrived.record(self._main)
            self._stalls.append((arrived, found.done))
            if len(self._stalls) >= _MOST_STALLS:
                self._settle()
        self._main.wait_event(found.done)

    def submit(self, stream: str, label: Label, work: Callable[[], None], *, after: Label) -> None:
        """Have it done on a stream of its own, after main's event."""
        if stream not in self._streams:
            self._streams[stream] = torch.Stream(self._device)
        side = self._streams[stream]
        if after in self._events:
            side.wait_event(self._events[after])
        else:
            side.wait_stream(self._main)
        with side:
            work()
        is_captured = _capturing(self._device)
        done = torch.Event(self._device, enable_timing=not is_captured)
        done.record(side)
        self._open[label] = _Pending(done, work, is_captured)

    def drain(self) -> None:
        """Main waits for every stream. At the end of a captured graph this joins them, and no event outlives it."""
        for label in list(self._open):
            self.wait(label)
        self._events.clear()
        if not _capturing(self._device):
            self._settle()

    def abandon(self) -> None:
        """Main's stream waits for all others; what a graph that came to nothing recorded is forgotten."""
        self._open = {label: pending for label, pending in self._open.items() if not pending.is_captured}
        self.drain()

    def close(self) -> None:
        """Wait for all that was submitted, since it may still use memory, and let go of streams and events."""
        self.abandon()
        self._main.synchronize()
        self._streams.clear()

    @property
    def _main(self) -> Tensor:
        return torch.accelerator.current_stream(self._device)

    def _settle(self) -> None:
        """Measure how late the work was that main has waited for."""
        if self._stalls:
            self._main.synchronize()
        for arrived, done in self._stalls:
            late_ms = arrived.elapsed_time(done)
            self.figures.stall_s = (self.figures.stall_s or 0.0) + max(late_ms, 0.0) * 1e-3
        self._stalls.clear()


# Pairs of events that are kept before main's stream is waited for.
_MOST_STALLS = 10_000


def _capturing(device: Tensor) -> bool:
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())
