"""Events order streams that share no value: hand-made programs."""

import pytest

from castoff.casting.price import LINKS
from castoff.casting.timeline import schedule
from castoff.ops.program import Abstract, Recorder
from tests.casting.timelines import SIDE, op, prices_of, times


class TestEvents:
    def test_an_event_orders_streams_without_a_value(self) -> None:
        recorder = Recorder()

        def body(x: Abstract) -> tuple[Abstract]:
            op(x, seconds=2)
            recorder.signal(("planned", 0))
            with recorder.on_stream(SIDE):
                recorder.wait(("planned", 0))
                op(x, seconds=5, units=())
                recorder.signal(("fetched", 0))
            op(x, seconds=1)
            recorder.wait(("fetched", 0))
            return (op(x, seconds=1),)

        recorder.block("a", "a", body, recorder.tensor(1))
        assert times(recorder.program) == [(0, 2), (2, 7), (2, 3), (7, 8)]

    def test_events_of_a_repeated_block_are_of_its_own_layers(self) -> None:
        """A layer sends for the rows of the next, and waits for its own, which the layer before sent for."""
        recorder = Recorder()

        def body(x: Abstract, layer: int) -> tuple[Abstract]:
            first = op(x, seconds=1)
            recorder.signal(("began", layer))
            with recorder.on_stream(SIDE):
                recorder.wait(("began", layer))
                op(x, seconds=4, units=())
                recorder.signal(("fetched", layer + 1))
            recorder.wait(("fetched", layer))
            return (op(first, seconds=1),)

        x = recorder.tensor(1)
        for layer in (3, 4, 5):
            (x,) = recorder.block("layer", f"{layer}", lambda x: body(x, layer), x, layer=layer)  # noqa: B023
        assert len(recorder.program.blocks) == 1
        assert times(recorder.program) == [
            (0, 1), (1, 5), (1, 2),
            (2, 3), (5, 9), (5, 6),
            (6, 7), (9, 13), (9, 10),
        ]  # fmt: skip
        # The step ends when its side stream does.
        assert schedule(recorder.program, prices_of(recorder.program)).end_s == 13

    def test_what_never_came_up_is_not_waited_for(self) -> None:
        recorder = Recorder()

        def body(x: Abstract) -> tuple[Abstract]:
            recorder.wait(("installed", 0))
            return (op(x, seconds=1),)

        recorder.block("a", "a", body, recorder.tensor(1))
        with recorder.on_stream(SIDE):
            recorder.block("b", "b", lambda x: (op(x, seconds=1),), recorder.tensor(1))
        assert times(recorder.program) == [(0, 1), (1, 2)]

    def test_a_block_that_ends_with_a_wait_is_a_fault(self) -> None:
        recorder = Recorder()

        def body(x: Abstract) -> tuple[Abstract]:
            y = op(x, seconds=1)
            recorder.wait(("installed", 0))
            return (y,)

        with pytest.raises(AssertionError, match="ends with waits"):
            recorder.block("a", "a", body, recorder.tensor(1))

    def test_another_stage_is_another_device(self) -> None:
        """Its side stream and its links do not wait for those of the stage before; the step ends when all have."""
        recorder = Recorder()

        def body(x: Abstract) -> tuple[Abstract]:
            y = op(x, seconds=1)
            recorder.signal(("computed", 0))
            with recorder.on_stream(SIDE):
                recorder.wait(("computed", 0))
                op(x, seconds=10, units=(LINKS,))
            return (y,)

        (x,) = recorder.block("a", "a", body, recorder.tensor(1))
        recorder.next_stage()
        recorder.block("b", "b", body, x)
        assert times(recorder.program) == [(0, 1), (1, 11), (1, 2), (2, 12)]
        timeline = schedule(recorder.program, prices_of(recorder.program))
        assert (timeline.end_s, timeline.stage_s) == (12, (11, 11))
