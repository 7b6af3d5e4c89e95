"""What must happen before what: device streams over a device that only keeps account, and threads.

Every op of a run tells which rows it reads and writes, and on which stream. Two accesses of one row, one of them a
write, must be ordered by the streams and by the events between them, whatever main's order was.
"""

import sys
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from castoff.errors import CastoffError
from castoff.offload import streams as stream_module
from castoff.offload.streams import DeviceStreams, ThreadStreams
from castoff.ops.attention import row_slots
from castoff.ops.program import Op
from castoff.spec.offload import OffloadMode

torch = pytest.importorskip("torch")

from tests.offload.runs import MODES, Case, assert_equal, opened, options_of, outcome, with_streams  # noqa: E402

CASE = Case(kind="glm52", drafts=1, prompts=(40, 70, 33), slots=2, new_tokens=6, chunk_tokens=32, check=False)
Clock = dict[str, int]
Place = tuple[int, int]


class FakeStream:
    """A stream that does at once what it is given, and keeps account of what it knows to be done."""

    def __init__(self, device: "FakeDevice", name: str) -> None:
        self.device, self.name = device, name
        self.known: Clock = defaultdict(int)

    def __enter__(self) -> None:
        self.device.running.append(self)

    def __exit__(self, *_: object) -> None:
        self.device.running.pop()

    def wait_event(self, event: "FakeEvent") -> None:
        for name, done in event.known.items():
            self.known[name] = max(self.known[name], done)

    def wait_stream(self, other: "FakeStream") -> None:
        for name, done in other.known.items():
            self.known[name] = max(self.known[name], done)

    def synchronize(self) -> None:
        """The host waits, which orders nothing on the device that events do not."""

    def did(self) -> int:
        self.known[self.name] += 1
        return self.known[self.name]


class FakeEvent:
    known: Clock

    def record(self, stream: FakeStream) -> None:
        self.known = dict(stream.known)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1.0


@dataclass
class Access:
    """An op's access of a row: on which stream, as its how-manieth op, knowing what."""

    op: str
    stream: str
    at: int
    known: Clock


@dataclass
class FakeDevice:
    """Streams, and the last accesses of every row: a write, and the reads since."""

    running: list[FakeStream] = field(default_factory=list)
    writes: dict[Place, Access] = field(default_factory=dict)
    reads: dict[Place, list[Access]] = field(default_factory=lambda: defaultdict(list))
    ops: list[tuple[str, str]] = field(default_factory=list)
    races: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.running.append(FakeStream(self, "main"))

    def access(self, op: str, reads: set[Place], writes: set[Place]) -> None:
        stream = self.running[-1]
        access = Access(op, stream.name, stream.did(), dict(stream.known))
        self.ops.append((op, stream.name))
        for place in reads | writes:
            earlier = [self.writes[place]] if place in self.writes else []
            if place in writes:
                earlier += self.reads.pop(place, [])
            for other in earlier:
                if access.known.get(other.stream, 0) < other.at:
                    self.races.append(f"{op} on {stream.name} does not wait for {other.op} on {other.stream}")
            if place in writes:
                self.writes[place] = access
            else:
                self.reads[place].append(access)


def rows_at(tensor: Any, rows: Any) -> set[Place]:
    """Rows of a tensor, whose address names it."""
    return {(tensor.data_ptr(), int(row)) for row in torch.as_tensor(rows).flatten().tolist()}


def whole(*tensors: Any) -> set[Place]:
    return {(tensor.data_ptr(), -1) for tensor in tensors}


def accesses(op: Op, inputs: tuple[Any, ...], attributes: dict[str, Any]) -> tuple[set[Place], set[Place]]:
    """Rows that an op reads and writes; ops that touch nothing that is shared between streams have none."""
    match op.name:
        case "mlapo":
            slots_T, cache = inputs[3], inputs[4]
            return set(), rows_at(cache, slots_T[slots_T >= 0])
        case "offload_plan" | "gather_plan":
            return set(), whole(inputs[6])
        case "serve_plan":
            return whole(inputs[6], inputs[8]), set()
        case "install_metadata":
            return whole(inputs[1], inputs[2], inputs[3]), whole(inputs[4], inputs[5])
        case "offload_fetch":
            return _fetch_accesses(*inputs, sizes=attributes["sizes"])
        case "offload_serve":
            host, tables, sources_TK, region, selection = inputs
            hosted = row_slots(-2 - sources_TK, tables, host.shape[1])[sources_TK < -1]
            reads = rows_at(host, hosted) | rows_at(region, sources_TK[sources_TK >= 0])
            return reads, rows_at(selection, torch.arange(sources_TK.numel()))
        case "offload_install":
            selection, to_rows, origins, counts, region = inputs
            live = (torch.arange(to_rows.shape[1]) < counts[:, None]) & (to_rows >= 0)
            return rows_at(selection, origins[live]) | whole(to_rows), rows_at(region, to_rows[live])
        case "host_row_write":
            region, own_rows, host, slots = inputs
            return rows_at(region, own_rows[own_rows >= 0]), rows_at(host, slots[slots >= 0])
        case "store_rows":
            buffer, host = inputs
            span = range(attributes["start"], attributes["end"])
            return rows_at(buffer, list(span)), rows_at(host, _slots(span, attributes["blocks"], host))
        case "load_rows":
            host, buffer = inputs
            span = range(attributes["end"])
            return rows_at(host, _slots(span, attributes["blocks"], host)), rows_at(buffer, list(span))
        case "multihead_latent_attention":
            return _attention_accesses(*inputs), set()
    return set(), set()


def _slots(span: range, blocks: tuple[int, ...], host: Any) -> list[int]:
    tokens = host.shape[1]
    return [blocks[at // tokens] * tokens + at % tokens for at in span]


def _fetch_accesses(
    host: Any, tables: Any, slots: Any, ids: Any, to_rows: Any, counts: Any, region: Any, staging: Any, *, sizes: Any
) -> tuple[set[Place], set[Place]]:
    live = torch.arange(ids.shape[1]) < counts[:, None]
    from_host = live & (ids >= 0)
    ring = sizes.pool_rows + slots[:, None] * sizes.ring_tokens + (-2 - ids) % sizes.ring_tokens
    reads = rows_at(host, row_slots(ids, tables, host.shape[1])[from_host]) | rows_at(region, ring[live & (ids < -1)])
    staged = live & (to_rows >= sizes.layer_rows)
    writes = rows_at(region, to_rows[live & ~staged]) | rows_at(staging, to_rows[staged] - sizes.layer_rows)
    return reads | whole(ids), writes


def _attention_accesses(
    q: Any, cache: Any, ids: Any, tables: Any, lengths: Any, kv_b: Any, staging: Any = None
) -> set[Place]:
    if tables is not None:
        slots = row_slots(ids, tables, cache.shape[1])
        return rows_at(cache, slots[ids >= 0])
    rows = ids[ids >= 0]
    if staging is None:
        return rows_at(cache, rows)
    own = cache.shape[0] - 1
    return rows_at(cache, rows[rows < own]) | rows_at(staging, rows[rows >= own] - own)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Device streams over the fake, in the next engine; every op that is computed is accounted for."""
    fake = FakeDevice()
    names = iter(["copy", "install", "third"])
    own = SimpleNamespace(
        Event=lambda device, enable_timing=False: FakeEvent(),
        Stream=lambda device: FakeStream(fake, next(names)),
        accelerator=SimpleNamespace(current_stream=lambda device: fake.running[-1]),
        cuda=SimpleNamespace(is_current_stream_capturing=lambda: False),
    )
    monkeypatch.setattr(stream_module, "torch", own)
    with_streams(monkeypatch, [DeviceStreams(torch.device("cpu"))])
    compute = Op.compute

    def accounted(op: Op, *inputs: Any, **attributes: Any) -> Any:
        reads, writes = accesses(op, inputs, attributes)
        fake.access(op.name, reads, writes)
        return compute(op, *inputs, **attributes)

    monkeypatch.setattr(Op, "compute", accounted)
    return fake


@pytest.mark.property
@pytest.mark.parametrize("mode", MODES)
def test_every_conflict_is_ordered_by_events(mode: OffloadMode, device: FakeDevice) -> None:
    """Through prompts in chunks, decode steps with drafts, requests that leave and others that take their place."""
    with opened(CASE, options_of(mode)) as (_, scheduler):
        scheduler.run(CASE.requests)
    assert sorted(set(device.races)) == []
    streams = set(device.ops)
    assert ("store_rows", "copy") in streams
    assert ("store_rows", "main") not in streams
    if mode == "direct":
        assert ("offload_fetch", "copy") in streams
    if mode == "serve_install":
        assert ("offload_install", "install") in streams
        assert ("offload_install", "main") not in streams
        assert ("install_metadata", "main") not in streams


@pytest.mark.property
@pytest.mark.parametrize("mode", MODES)
def test_nothing_stands_between_a_layers_rows_and_its_attention(mode: OffloadMode, device: FakeDevice) -> None:
    """On main: no install, and no fetch for another layer, between a layer's serve, or its own write, and attention."""
    with opened(CASE, options_of(mode)) as (_, scheduler):
        scheduler.run(CASE.requests)
    main = [op for op, stream in device.ops if stream == "main"]
    last = {"direct": "host_row_write", "gather": "offload_fetch", "serve_install": "offload_serve"}[mode]
    found = [main[at + 1] for at, op in enumerate(main) if op == last]
    assert found
    assert set(found) == {"multihead_latent_attention"}


@pytest.mark.property
@pytest.mark.parametrize(
    ("mode", "lost", "said"),
    [
        ("serve_install", "wait", "does not wait for"),
        ("direct", "wait", "multihead_latent_attention on main does not wait for offload_fetch on copy"),
        ("direct", "after", "does not wait for"),
        ("gather", "after", "store_rows on copy does not wait for mlapo on main"),
    ],
)
def test_a_lost_edge_is_found(
    mode: OffloadMode, lost: str, said: str, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The account is worth something: without main's waits, or without what work comes after, there are races."""
    if lost == "wait":
        monkeypatch.setattr(DeviceStreams, "wait", lambda self, label: None)
    else:
        monkeypatch.setattr(FakeStream, "wait_event", lambda self, event: None)
        monkeypatch.setattr(FakeStream, "wait_stream", lambda self, other: None)
    with opened(CASE, options_of(mode)) as (_, scheduler):
        scheduler.run(CASE.requests)
    assert any(said in race for race in device.races), sorted(set(device.races))


class LaggingStreams(ThreadStreams):
    """Streams that do nothing before main waits for it: what main does too early, it does to rows that others need."""

    def __init__(self) -> None:
        super().__init__()
        self._work: dict[str, list[tuple[object, Any]]] = defaultdict(list)

    def submit(self, stream: str, label: Any, work: Any, *, after: Any) -> None:
        self._work[stream].append((label, work))

    def wait(self, label: Any) -> None:
        for queue in self._work.values():
            labels = [own for own, _ in queue]
            if label in labels:
                reach = len(labels) - labels[::-1].index(label)
                todo = queue[:reach]
                del queue[:reach]
                for _, work in todo:
                    work()

    def drain(self) -> None:
        for queue in self._work.values():
            while queue:
                queue.pop(0)[1]()


@pytest.mark.numerics
@pytest.mark.parametrize("mode", MODES)
def test_streams_that_lag_as_far_as_they_may_change_nothing(mode: OffloadMode, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outcome(CASE)
    with_streams(monkeypatch, [LaggingStreams()])
    given = {"mtp_gather_reuse": False} if mode == "gather" else {}
    assert_equal(outcome(CASE, options_of(mode, **given)), expected)


def test_a_failed_thread_is_heard_of_and_nothing_hangs() -> None:
    streams = ThreadStreams()

    def fail() -> None:
        raise ValueError("the link is down")

    done = []
    streams.submit("copy", ("fetched", 1), fail, after=("planned", 0))
    streams.submit("copy", ("fetched", 2), lambda: done.append(2), after=("planned", 0))
    with pytest.raises(CastoffError, match="the link is down"):
        streams.wait(("fetched", 2))
    assert not done, "nothing may touch rows after a failure"
    streams.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("castoff-")]


def test_waiting_twice_and_for_nothing_returns_at_once() -> None:
    streams = ThreadStreams()
    streams.wait(("fetched", 1))
    done = []
    streams.submit("copy", ("fetched", 1), lambda: done.append(1), after=("planned", 0))
    streams.wait(("fetched", 1))
    streams.wait(("fetched", 1))
    assert done == [1]
    assert streams.figures.waits == 1
    streams.close()


def test_closing_while_work_is_waiting_never_hangs() -> None:
    """The threads take work from their queues while main closes them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            streams = ThreadStreams()
            for label in range(20):
                streams.submit("copy", ("fetched", label), lambda: None, after=("planned", 0))
            closing = threading.Thread(target=streams.close, daemon=True)
            closing.start()
            closing.join(timeout=30)
            assert not closing.is_alive()
    finally:
        sys.setswitchinterval(interval)


def test_an_interrupt_while_work_is_handed_over_leaves_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the thread got it or not, and whether there was a thread already."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for place in ("put", "start"):
        streams = ThreadStreams()
        if place == "put":
            streams.submit("copy", ("fetched", 1), lambda: None, after=("planned", 0))
            streams.wait(("fetched", 1))
        with monkeypatch.context() as patch:
            if place == "start":
                patch.setattr(threading.Thread, "start", interrupted)
            else:
                patch.setattr(streams, "_queues", {"copy": SimpleNamespace(put=interrupted)})
            with pytest.raises(KeyboardInterrupt):
                streams.submit("copy", ("fetched", 2), lambda: None, after=("planned", 0))
        waiting = threading.Thread(target=streams.abandon, daemon=True)
        waiting.start()
        waiting.join(timeout=30)
        assert not waiting.is_alive()
        streams.close()


def test_work_that_an_interrupted_wait_was_for_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, done, go = ThreadStreams(), [], threading.Event()

    def slow() -> None:
        go.wait(10)
        done.append(1)

    streams.submit("copy", ("fetched", 1), slow, after=("planned", 0))

    def interrupted(self: threading.Event, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(streams._open["fetched", 1].done, "wait", interrupted.__get__(streams._open["fetched", 1].done))
        with pytest.raises(KeyboardInterrupt):
            streams.wait(("fetched", 1))
    go.set()
    streams.abandon()
    assert done == [1], "nothing goes on after what was abandoned"
    streams.close()
