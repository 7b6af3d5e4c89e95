"""What must happen before what, proven from what main recorded, waited for and submitted, and by streams that lag."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from castoff.errors import CastoffError
from castoff.model.offload import Label
from castoff.offload.streams import StreamFigures, ThreadStreams
from castoff.ops.program import MAIN, op_observer
from castoff.spec.offload import OffloadMode

torch = pytest.importorskip("torch")

from tests.offload.runs import MODES, Case, assert_equal, opened, options_of, outcome, with_streams  # noqa: E402

CASE = Case(kind="glm52", drafts=1, prompts=(40, 70, 33), slots=2, new_tokens=6, chunk_tokens=32)


@dataclass(eq=False)
class Node:
    """Something that a stream did: an op, a named point, or a piece of work as a whole."""

    what: object
    stream: str
    before: list["Node"] = field(default_factory=list)

    def follows(self, other: "Node") -> bool:
        """Whether this must come after the other."""
        seen, todo = set(), [self]
        while todo:
            node = todo.pop()
            if node is other:
                return True
            if id(node) not in seen:
                seen.add(id(node))
                todo.extend(node.before)
        return False


@dataclass
class _Task:
    stream: str
    work: Callable[[], None]
    node: Node


class LaggingStreams:
    """Streams that do nothing before main waits for it, and keep the order of what they did.

    Whatever main does too early, it does to rows that others still need. Edges come from events alone, not from the
    order in which main handed work out.
    """

    def __init__(self) -> None:
        self.figures = StreamFigures()
        self.nodes: list[Node] = []
        self._last: dict[str, Node] = {}
        self._recorded: dict[Label, Node] = {}
        self._queues: dict[str, list[_Task]] = {}
        self._tasks: dict[Label, _Task] = {}
        self._running = MAIN

    def note(self, what: object) -> Node:
        node = Node(what, self._running, [self._last[self._running]] if self._running in self._last else [])
        self._last[self._running] = node
        self.nodes.append(node)
        return node

    def record(self, label: Label) -> None:
        self._recorded[label] = self.note(("record", label))

    def wait(self, label: Label) -> None:
        task = self._tasks.get(label)
        node = self.note(("wait", label))
        if task is not None:
            self._run(task)
            node.before.append(task.node)

    def submit(self, stream: str, label: Label, work: Callable[[], None], *, after: Label) -> None:
        task = _Task(stream, work, Node(("done", label), stream))
        # Known by the label in the step's own order, so that a test can find it.
        self.nodes.append(task.node)
        if after in self._recorded:
            task.node.before.append(self._recorded[after])
        queue = self._queues.setdefault(stream, [])
        if queue:
            task.node.before.append(queue[-1].node)
        elif stream in self._last:
            task.node.before.append(self._last[stream])
        queue.append(task)
        self._tasks[label] = task

    def _run(self, task: _Task) -> None:
        queue = self._queues[task.stream]
        while task in queue:
            first = queue.pop(0)
            self._running = first.stream
            self._last[first.stream] = Node("begin", first.stream, list(first.node.before))
            first.work()
            first.node.before.append(self._last[first.stream])
            self._last[first.stream] = first.node
            self._running = MAIN

    def drain(self) -> None:
        for queue in self._queues.values():
            while queue:
                self._run(queue[-1])

    def abandon(self) -> None:
        self.drain()

    def close(self) -> None:
        self._queues.clear()


@contextmanager
def noted_ops(streams: LaggingStreams) -> Iterator[None]:
    @contextmanager
    def observe(name: str) -> Iterator[None]:
        streams.note(name)
        yield

    token = op_observer.set(observe)
    try:
        yield
    finally:
        op_observer.reset(token)


@pytest.fixture(params=MODES)
def traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[OffloadMode, list[Node]]:
    """The nodes of a short run of every mode, whose streams do everything as late as events allow."""
    streams = LaggingStreams()
    with_streams(monkeypatch, [streams])
    options = options_of(request.param)
    with noted_ops(streams), opened(CASE, options) as (_, scheduler):
        scheduler.run(CASE.requests)
    return request.param, streams.nodes


@pytest.mark.numerics
@pytest.mark.parametrize("mode", MODES)
def test_streams_that_lag_as_far_as_they_may_change_nothing(mode: OffloadMode, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outcome(CASE)
    with_streams(monkeypatch, [LaggingStreams()])
    given = {"mtp_gather_reuse": False} if mode == "gather" else {}
    assert_equal(outcome(CASE, options_of(mode, **given)), expected)


def occurrences(nodes: list[Node], what: object) -> list[Node]:
    return [node for node in nodes if node.what == what]


def assert_each_follows_its_last(nodes: list[Node], later: object, earlier: object) -> None:
    """Every `later` comes after the `earlier` that was last called for before it."""
    place = {id(node): index for index, node in enumerate(nodes)}
    checked = 0
    for node in occurrences(nodes, later):
        before = [other for other in occurrences(nodes, earlier) if place[id(other)] < place[id(node)]]
        if before:
            assert node.follows(before[-1]), f"{later} does not wait for {earlier}"
            checked += 1
    assert checked, f"{earlier} never came before {later}"


GROUPS = ((0,), (1, 2, 3))


@pytest.mark.property
def test_every_edge_of_a_step_is_an_event(traced: tuple[OffloadMode, list[Node]]) -> None:
    mode, nodes = traced
    if mode == "serve_install":
        for index, layers in enumerate(GROUPS):
            # a: a plan comes after the metadata of the step before.
            assert_each_follows_its_last(nodes, ("record", ("planned", index)), ("done", ("group installed", index)))
            for layer in layers:
                # b and e: a serve reads a pool that is whole, and overwrites a selection that is installed.
                assert_each_follows_its_last(nodes, ("record", ("served", layer)), ("done", ("installed", layer)))
                # d: an install comes after the serve whose selection it copies.
                assert_each_follows_its_last(nodes, ("done", ("installed", layer)), ("record", ("served", layer)))
                # f: metadata changes after every install that reads it.
                assert_each_follows_its_last(
                    nodes, ("done", ("group installed", index)), ("done", ("installed", layer))
                )
    if mode == "direct":
        for layer in GROUPS[1][1:]:
            # Fetches of later layers know the plan, and attention waits for them.
            assert_each_follows_its_last(nodes, ("done", ("fetched", layer)), ("record", ("planned", 1)))
            assert_each_follows_its_last(nodes, ("record", ("readable", layer)), ("done", ("fetched", layer)))
            # The next plan gives rows away only after the last fetch into them.
            assert_each_follows_its_last(nodes, ("record", ("planned", 1)), ("done", ("fetched", layer)))
    # Prompts: a buffer takes new rows after the old ones are in host memory, and a plan follows both.
    for buffer in (0, 1):
        assert_each_follows_its_last(nodes, ("done", ("stored", buffer)), ("record", ("written", buffer)))
        assert_each_follows_its_last(nodes, ("wait", ("loaded", buffer)), ("done", ("stored", buffer)))
        assert_each_follows_its_last(nodes, ("done", ("loaded", buffer)), ("record", ("attended", buffer)))
        assert_each_follows_its_last(nodes, ("record", ("planned", 0)), ("done", ("stored", buffer)))


@pytest.mark.property
def test_nothing_stands_between_readable_rows_and_attention(traced: tuple[OffloadMode, list[Node]]) -> None:
    mode, nodes = traced
    main = [node.what for node in nodes if node.stream == MAIN]
    name = "served" if mode == "serve_install" else "readable"
    starts = [
        at for at, what in enumerate(main) if isinstance(what, tuple) and what[0] == "record" and what[1][0] == name
    ]
    assert starts
    for at in starts:
        assert main[at + 1] == "multihead_latent_attention", main[at - 3 : at + 3]


@pytest.mark.property
def test_new_rows_reach_the_host_before_they_are_served(traced: tuple[OffloadMode, list[Node]]) -> None:
    """Edge c of the published route, and of gather, which reads this step's own rows from the host too."""
    mode, nodes = traced
    if mode == "direct":
        pytest.skip("direct reads this step's rows from its ring")
    main = [node.what for node in nodes if node.stream == MAIN and isinstance(node.what, str)]
    op = "offload_serve" if mode == "serve_install" else "offload_fetch"
    served = [at for at, what in enumerate(main) if what == op]
    assert served
    for at in served:
        since = main[:at][::-1]
        written = since.index("host_row_write")
        assert "multihead_latent_attention" not in since[:written], "the write is of this layer"


def test_installs_and_follower_fetches_are_not_on_main(traced: tuple[OffloadMode, list[Node]]) -> None:
    mode, nodes = traced
    streams = {(node.what, node.stream) for node in nodes if isinstance(node.what, str)}
    if mode == "serve_install":
        assert ("offload_install", "install") in streams
        assert ("offload_install", MAIN) not in streams
        assert ("install_metadata", MAIN) not in streams
    if mode == "direct":
        assert ("offload_fetch", "copy") in streams
    assert ("store_rows", "copy") in streams
    assert ("store_rows", MAIN) not in streams


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
