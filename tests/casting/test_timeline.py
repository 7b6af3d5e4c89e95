"""When ops run: hand-made programs, and random ones against a simulator that knows nothing of blocks and runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castoff.casting.price import CORES, LINKS, Price, Prices
from castoff.casting.timeline import Span, place, schedule, spans
from castoff.model.record import record_step
from castoff.ops.lengths import Lengths
from castoff.ops.program import MAIN, Abstract, Program, Recorder
from castoff.spec.scenario import RequestClass
from tests.casting.strategies import Case, cases, cast_step, scenario
from tests.casting.timelines import OP, SIDE, UNITS, op, prices_of, times
from tests.generators import ASCEND, GLM_52, device, model, setup_of


class TestByHand:
    def test_one_stream_is_a_sum(self) -> None:
        recorder = Recorder()
        recorder.block("a", "a", lambda x: (op(op(x, seconds=2), seconds=3, units=(LINKS,)),), recorder.tensor(1))
        program = recorder.program
        assert times(program) == [(0, 2), (2, 5)]
        timeline = schedule(program, prices_of(program))
        assert (timeline.end_s, timeline.stage_s, timeline.busy_s) == (5, (5,), {MAIN: 5})

    def test_computation_beside_a_transfer(self) -> None:
        recorder = Recorder()

        def body(x: Abstract) -> tuple[Abstract]:
            sent = op(x, seconds=5, units=(LINKS,))
            with recorder.on_stream(SIDE):
                computed = op(x, seconds=3)
            return (op(sent, computed, seconds=1),)

        recorder.block("a", "a", body, recorder.tensor(1))
        assert times(recorder.program) == [(0, 5), (0, 3), (5, 6)]
        timeline = schedule(recorder.program, prices_of(recorder.program))
        assert (timeline.end_s, timeline.busy_s) == (6, {MAIN: 6, SIDE: 3})

    @pytest.mark.parametrize("unit", [CORES, LINKS])
    def test_streams_share_cores_and_links(self, unit: str) -> None:
        recorder = Recorder()

        def body(x: Abstract) -> tuple[Abstract]:
            first = op(x, seconds=5, units=(unit,))
            with recorder.on_stream(SIDE):
                second = op(x, seconds=3, units=(unit,))
            return (op(first, second, seconds=1),)

        recorder.block("a", "a", body, recorder.tensor(1))
        assert times(recorder.program) == [(0, 5), (5, 8), (8, 9)]

    def test_fused_kernel_takes_both_units(self) -> None:
        recorder = Recorder()

        def body(x: Abstract) -> tuple[Abstract]:
            sent = op(x, seconds=5, units=(LINKS,))
            with recorder.on_stream(SIDE):
                op(x, seconds=2, units=(CORES, LINKS))
            return (sent,)

        recorder.block("a", "a", body, recorder.tensor(1))
        assert times(recorder.program) == [(0, 5), (5, 7)]

    def test_side_stream_waits_for_its_input_and_main_for_the_result(self) -> None:
        recorder = Recorder()

        def body(x: Abstract) -> tuple[Abstract]:
            first = op(x, seconds=2)
            second = op(first, seconds=4, units=(LINKS,))
            with recorder.on_stream(SIDE):
                side = op(op(first, seconds=3), seconds=3)
            third = op(second, seconds=1, units=(LINKS,))
            return (op(third, side, seconds=1),)

        recorder.block("a", "a", body, recorder.tensor(1))
        assert times(recorder.program) == [(0, 2), (2, 6), (2, 5), (5, 8), (6, 7), (8, 9)]

    def test_overlap_crosses_blocks(self) -> None:
        # The side stream's result of one block is needed only at the end of the next one.
        recorder = Recorder()

        def body(x: Abstract, late: Abstract) -> tuple[Abstract, Abstract]:
            with recorder.on_stream(SIDE):
                fetched = op(x, seconds=4, units=(LINKS,))
            return op(op(x, seconds=3), late, seconds=2), fetched

        x, late = recorder.tensor(1), recorder.tensor(1)
        for layer in range(3):
            x, late = recorder.block("layer", f"layer {layer}", body, x, late)  # type: ignore[assignment]
        assert times(recorder.program) == [
            (0, 4), (0, 3), (3, 5),
            (5, 9), (5, 8), (8, 10),
            (10, 14), (10, 13), (13, 15),
        ]  # fmt: skip
        assert schedule(recorder.program, prices_of(recorder.program)).end_s == 15

    def test_a_repeated_block_waits_for_the_values_it_is_given(self) -> None:
        recorder = Recorder()
        recorded: list[Abstract] = []

        def source(x: Abstract) -> tuple[Abstract, Abstract]:
            with recorder.on_stream(SIDE):
                slow = op(x, seconds=9, units=(LINKS,))
            return op(x, seconds=1), slow

        x = recorder.tensor(1)
        fast, slow = recorder.block("source", "source", source, x)
        # First given a value of its own stream, then one of the side stream.
        for given_to_it in (fast, slow):
            (result,) = recorder.block("use", "use", lambda x: (op(x, seconds=1),), given_to_it)
            assert result is not None
            recorded.append(result)
        assert times(recorder.program) == [(0, 9), (0, 1), (1, 2), (9, 10)]

    def test_stages(self) -> None:
        recorder = Recorder()
        x = recorder.tensor(1)
        for seconds in (3, 5):

            def body(x: Abstract) -> tuple[Abstract]:
                sent = op(x, seconds=seconds, units=(LINKS,))  # noqa: B023
                with recorder.on_stream(SIDE):
                    side = op(x, seconds=1)
                return (op(sent, side, seconds=1),)

            (result,) = recorder.block(str(seconds), "layer", body, x)
            assert result is not None
            x = result
            if seconds == 3:
                recorder.next_stage()
        timeline = schedule(recorder.program, prices_of(recorder.program))
        assert (timeline.end_s, timeline.stage_s) == (10, (4, 6))

    def test_stages_of_one_stream(self) -> None:
        recorder = Recorder()
        recorder.block("a", "a", lambda x: (op(x, seconds=3),), recorder.tensor(1))
        recorder.next_stage()
        recorder.block("b", "b", lambda x: (op(x, seconds=5),), recorder.tensor(1))
        timeline = schedule(recorder.program, prices_of(recorder.program))
        assert (timeline.end_s, timeline.stage_s) == (8, (3, 5))


@dataclass(frozen=True)
class PlannedCall:
    stream: str
    units: tuple[str, ...]
    seconds: int
    inputs: tuple[int, ...]
    results: int


@dataclass(frozen=True)
class PlannedBlock:
    calls: tuple[PlannedCall, ...]
    outputs: tuple[int, ...]


WIDTH = 3
planned_calls = st.builds(
    PlannedCall,
    st.sampled_from([MAIN, SIDE, "copy"]),
    st.sampled_from(UNITS),
    st.integers(0, 6),
    st.lists(st.integers(0, 30), min_size=1, max_size=3).map(tuple),
    st.integers(1, 2),
)
planned_blocks = st.builds(
    PlannedBlock,
    st.lists(planned_calls, min_size=1, max_size=7).map(tuple),
    st.lists(st.integers(0, 30), min_size=WIDTH, max_size=WIDTH).map(tuple),
)
# Blocks, and the order in which a step runs them: block and which of the values at hand each input takes.
plans = st.tuples(
    st.lists(planned_blocks, min_size=1, max_size=3),
    st.lists(
        st.tuples(st.integers(0, 2), st.permutations(range(WIDTH))),
        min_size=1,
        max_size=6,
    ),
)
Plan = tuple[Sequence[PlannedBlock], Sequence[tuple[int, Sequence[int]]]]


def record(plan: Plan, *, repeat: bool = True, single: bool = False) -> Program:
    """The planned program; `single` puts every call on one stream."""
    blocks, order = plan
    recorder = Recorder(repeat=repeat)
    at_hand: list[Abstract] = [recorder.tensor(1) for _ in range(WIDTH)]
    outside = recorder.tensor(1)

    def body_of(block: PlannedBlock, *inputs: Abstract) -> tuple[Abstract, ...]:
        values = [*inputs, outside]
        for call in block.calls:
            operands = [values[pick % len(values)] for pick in call.inputs]
            with recorder.on_stream(MAIN if single else call.stream):
                values += OP(*operands, seconds=call.seconds, units=call.units, results=call.results)
        # Distinct values: a block is recorded with what it is first given, and values that are one there stay one.
        chosen: list[Abstract] = []
        for pick in block.outputs:
            left = [value for value in values if value is not outside and value not in chosen]
            chosen.append(left[pick % len(left)])
        return tuple(chosen)

    for number, permutation in order:
        index = number % len(blocks)
        inputs = [at_hand[position] for position in permutation]
        given_out = recorder.block(
            f"block {index}", f"entry {index}", lambda *values, index=index: body_of(blocks[index], *values), *inputs
        )
        at_hand = [value for value in given_out if value is not None]
    return recorder.program


@dataclass(frozen=True)
class Event:
    """One op of the unrolled step: its place in program order is its number; `after` are the ops it reads from."""

    stream: str
    units: tuple[str, ...]
    seconds: float
    after: frozenset[int]


def unroll(program: Program, prices: Prices) -> list[Event]:
    """Every op with the numbers of the ops that made its inputs."""
    events: list[Event] = []
    # Values are named by (entry, value) inside an entry and by value between entries.
    made: dict[int, int] = {}
    for entry in program.schedule:
        local: dict[int, int] = {}
        for formal, actual in zip(entry.block.inputs, entry.inputs, strict=True):
            if formal is not None and actual in made:
                local[formal.value] = made[actual]
        for call, cost in zip(entry.block.calls, prices[entry.block], strict=True):
            after = frozenset(local[value.value] for value in call.inputs if value is not None and value.value in local)
            for value in call.outputs:
                local[value.value] = len(events)
            assert isinstance(cost.seconds, float)
            events.append(Event(call.stream, cost.units, cost.seconds, after))
        for formal, actual in zip(entry.block.outputs, entry.outputs, strict=True):
            if formal is not None and actual is not None and formal.value in local:
                made[actual] = local[formal.value]
    return events


def simulate(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Start every op as early as all rules allow, by raising starts until no rule is broken."""
    before: list[set[int]] = []
    for number, event in enumerate(events):
        earlier = set(event.after)
        for other in range(number):
            if events[other].stream == event.stream or set(events[other].units) & set(event.units):
                earlier.add(other)
        before.append(earlier)
    starts = [0.0] * len(events)
    changed = True
    while changed:
        changed = False
        for number, earlier in enumerate(before):
            earliest = max((starts[other] + events[other].seconds for other in earlier), default=0.0)
            if starts[number] < earliest:
                starts[number], changed = earliest, True
    return [(start, start + event.seconds) for start, event in zip(starts, events, strict=True)]


@pytest.mark.property
@settings(max_examples=200)
@given(plans)
def test_equals_the_simulator(plan: Plan) -> None:
    program = record(plan)
    assert times(program) == simulate(unroll(program, prices_of(program)))


@pytest.mark.property
@settings(max_examples=200)
@given(plans)
def test_repeated_blocks_run_like_blocks_written_out(plan: Plan) -> None:
    assert times(record(plan)) == times(record(plan, repeat=False))


@pytest.mark.property
@settings(max_examples=200)
@given(plans)
def test_what_no_timeline_may_do(plan: Plan) -> None:
    program = record(plan)
    placed = list(spans(program, prices_of(program)))
    assert [(span.entry, span.call) for span in placed] == list(program.calls())
    for stream in program.streams:
        in_order([span for span in placed if span.call.stream == stream])
    for unit in (CORES, LINKS):
        in_order([span for span in placed if unit in span.call.attributes["units"]])
    events = unroll(program, prices_of(program))
    for span, event in zip(placed, events, strict=True):
        assert span.end_s - span.start_s == event.seconds
        assert all(placed[other].end_s <= span.start_s for other in event.after)


def in_order(placed: Sequence[Span]) -> None:
    assert all(before.end_s <= after.start_s for before, after in pairwise(placed))


@pytest.mark.property
@settings(max_examples=200)
@given(plans)
def test_several_streams_are_never_slower_than_one(plan: Plan) -> None:
    several, single = record(plan), record(plan, single=True)
    total = sum(call.attributes["seconds"] for _, call in single.calls())
    one = schedule(single, prices_of(single))
    assert one.end_s == total
    assert one.busy_s == {MAIN: total}
    timeline = schedule(several, prices_of(several))
    assert timeline.end_s <= total
    assert timeline.end_s == max(end for _, end in times(several))
    assert sum(timeline.busy_s.values()) == total
    assert all(busy <= timeline.end_s for busy in timeline.busy_s.values())


@pytest.mark.property
@given(plans, st.integers(1, 5))
def test_longer_ops_never_end_the_step_earlier(plan: Plan, longer: int) -> None:
    program = record(plan)
    prices = prices_of(program)
    slower: Mapping[int, tuple[Price, ...]] = {
        block: tuple(Price(one.seconds + longer, one.terms, one.origin, one.units) for one in own)
        for block, own in prices.items()
    }
    assert schedule(program, prices).end_s <= schedule(program, slower).end_s


@pytest.mark.property
@given(cases(max_stages=2))
def test_real_steps_equal_the_simulator(case: Case) -> None:
    spec, where, step = case
    # Few layers of each kind are enough, and the simulator compares every pair of ops.
    cast = cast_step(spec.with_num_hidden_layers(8), where, step)
    events = unroll(cast.program, cast.prices)
    expected = simulate(events[:400])
    got = [(span.start_s, span.end_s) for span in spans(cast.program, cast.prices)][:400]
    for (start, end), (expected_start, expected_end) in zip(got, expected, strict=True):
        assert start == pytest.approx(expected_start, rel=1e-9, abs=1e-15)
        assert end == pytest.approx(expected_end, rel=1e-9, abs=1e-15)
    assert cast.timeline.end_s <= sum(event.seconds for event in events) * (1 + 1e-12)


@pytest.mark.property
@given(cases(keep=lambda case: scenario(case, enable_multistream=False)))
def test_a_real_step_on_one_stream_is_the_sum_of_its_ops(case: Case) -> None:
    cast = cast_step(*case)
    assert set(cast.timeline.busy_s) == {MAIN}
    assert all(placed.run.stream == MAIN for placed in place(cast.program, cast.prices))
    last = max(span.end_s for span in spans(cast.program, cast.prices))
    assert cast.timeline.end_s == pytest.approx(last, rel=1e-9)
    assert sum(cast.timeline.stage_s) == pytest.approx(last, rel=1e-9)


@pytest.mark.property
@given(cases(max_stages=2))
def test_multistream_is_never_slower(case: Case) -> None:
    spec, where, step = case
    several = cast_step(spec, where, scenario(step, enable_multistream=True))
    single = cast_step(spec, where, scenario(step, enable_multistream=False))
    assert several.latency_s <= single.latency_s * (1 + 1e-12)


def test_the_shared_expert_overlaps_dispatch_and_combine() -> None:
    step = scenario(num_devices=16, tp_size=16, ep_size=16, num_queries=1, query_length=4096, compile=True)
    several = cast_step(model(GLM_52), device(ASCEND), step)
    single = cast_step(model(GLM_52), device(ASCEND), scenario(step, enable_multistream=False))
    hidden = single.latency_s - several.latency_s
    # Dispatch and combine take longer than the shared expert, so all of it fits beside them.
    assert hidden == pytest.approx(several.timeline.busy_s["shared_expert"], rel=0.1)


def test_every_value_that_crosses_a_block_is_one_of_its_inputs() -> None:
    # Else the timeline would not know that it has to wait for it.
    step = scenario(num_devices=16, tp_size=16, ep_size=16, num_mtp_tokens=3, compile=True)
    program = record_step(setup_of(model(GLM_52), step), Lengths((RequestClass(8, 30_000, 4),)))
    made_by_ops = {value.value for _, call in program.calls() for value in call.outputs}
    for block in program.blocks:
        own = {value.value for value in block.inputs if value is not None}
        own |= {value.value for call in block.calls for value in call.outputs}
        for call in block.calls:
            used = {value.value for value in call.inputs if value is not None}
            assert used & made_by_ops <= own, f"{block.key}: {call.op.name}"
