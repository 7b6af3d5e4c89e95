"""When each op runs: in-order streams, data dependencies, events, and the units that streams share.

An op starts when its stream is free, its inputs are ready, the events that it waits for have come and the unit that it
needs is free. Two streams never compute at once on one device's cores, nor send at once on its links; what they gain is
a computation beside a transfer. A step ends when all of its streams have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from castoff.casting.price import UNITS, Price, Prices
from castoff.dims import Dim, maximum
from castoff.ops.program import MAIN, Block, BlockCall, Event, OpCall, Program


@dataclass(frozen=True, slots=True)
class Span:
    """One op call at its time."""

    entry: BlockCall
    call: OpCall
    start_s: Dim
    end_s: Dim


@dataclass(frozen=True, slots=True)
class Timeline:
    """end_s: when the last op of a step ends. stage_s: busy time of each pipeline stage. busy_s: per stream."""

    end_s: Dim
    stage_s: tuple[Dim, ...]
    busy_s: dict[str, Dim]


def schedule(program: Program, prices: Prices) -> Timeline:
    """Times of a step. On one stream, ops follow each other; on several, every op of every layer is placed."""
    busy: dict[str, Dim] = dict.fromkeys(program.streams, 0.0)
    totals = {block: _stream_totals(block, prices) for block in program.blocks}
    for entry in program.schedule:
        for stream, seconds in totals[entry.block].items():
            busy[stream] = busy[stream] + seconds
    num_stages = program.schedule[-1].stage + 1
    if len(busy) == 1:
        stages: list[Dim] = [0.0] * num_stages
        for entry in program.schedule:
            stages[entry.stage] = stages[entry.stage] + totals[entry.block].get(MAIN, 0.0)
        return Timeline(busy[MAIN], tuple(stages), busy)
    starts: dict[int, Dim] = {}
    ends: list[Dim] = [0.0] * num_stages
    for placed in place(program, prices):
        stage = placed.entry.stage
        starts.setdefault(stage, placed.start_s)
        ends[stage] = maximum(ends[stage], placed.end_s)
    last: Dim = 0.0
    for end in ends:
        last = maximum(last, end)
    return Timeline(last, tuple(end - starts[stage] for stage, end in enumerate(ends)), busy)


def _stream_totals(block: Block, prices: Prices) -> dict[str, Dim]:
    totals: dict[str, Dim] = {}
    for call, price in zip(block.calls, prices[block], strict=True):
        totals[call.stream] = totals.get(call.stream, 0.0) + price.seconds
    return totals


@dataclass(frozen=True, slots=True)
class Run:
    """Calls of a block that follow each other on one stream and unit and wait for nothing but each other.

    waits: values from elsewhere that must be ready before the run starts. makes: values that something else waits
    for, with the seconds from the start of the run to each. after, signals: the same of events, by relative layers.
    """

    stream: str
    units: tuple[str, ...]
    waits: tuple[int, ...]
    after: tuple[Event, ...]
    makes: tuple[tuple[int, Dim], ...]
    signals: tuple[tuple[Event, Dim], ...]
    calls: tuple[OpCall, ...]
    seconds: tuple[Dim, ...]
    total_s: Dim


@dataclass(frozen=True, slots=True)
class Placed:
    """One run at its time."""

    entry: BlockCall
    run: Run
    start_s: Dim
    end_s: Dim


def place(program: Program, prices: Prices) -> Iterator[Placed]:
    """Every run of the step at its time, in program order."""
    stream_free: dict[str, Dim] = dict.fromkeys(program.streams, 0.0)
    unit_free: dict[str, Dim] = dict.fromkeys(UNITS, 0.0)
    ready: dict[int, Dim] = {}
    came: dict[Event, Dim] = {}
    maker: dict[int, str] = {}
    runs: dict[tuple[Block, tuple[str | None, ...]], list[Run]] = {}
    stage = 0
    for entry in program.schedule:
        block = entry.block
        if entry.stage != stage:
            # Another device, whose streams and units have nothing to do before the hidden state arrives.
            stage = entry.stage
            stream_free = dict.fromkeys(program.streams, stream_free[MAIN])
            unit_free = dict.fromkeys(UNITS, stream_free[MAIN])
        given = tuple(maker.get(actual) if actual is not None else None for actual in entry.inputs)
        if (block, given) not in runs:
            runs[block, given] = block_runs(block, prices[block], given)
        # Values of the block as it was recorded, at the times of the values it is given now.
        local = {
            formal.value: ready.get(actual, 0.0)
            for formal, actual in zip(block.inputs, entry.inputs, strict=True)
            if formal is not None and actual is not None
        }
        for run in runs[block, given]:
            start = stream_free[run.stream]
            for value in run.waits:
                start = maximum(start, local[value])
            for name, layer in run.after:
                start = maximum(start, came.get((name, entry.layer + layer), 0.0))
            for unit in run.units:
                start = maximum(start, unit_free[unit])
            end = start + run.total_s
            stream_free[run.stream] = end
            for unit in run.units:
                unit_free[unit] = end
            for value, offset in run.makes:
                local[value] = start + offset
            for (name, layer), offset in run.signals:
                came[name, entry.layer + layer] = start + offset
            yield Placed(entry, run, start, end)
        streams = _makers(block, given)
        for formal, actual in zip(block.outputs, entry.outputs, strict=True):
            if formal is not None and actual is not None:
                ready[actual] = local.get(formal.value, 0.0)
                stream = streams.get(formal.value)
                if stream is not None:
                    maker[actual] = stream


def _makers(block: Block, given: tuple[str | None, ...]) -> dict[int, str]:
    """The stream that makes each value of a block, its inputs included where they were made by an op."""
    streams = {
        formal.value: stream
        for formal, stream in zip(block.inputs, given, strict=True)
        if formal is not None and stream is not None
    }
    for call in block.calls:
        for tensor in call.outputs:
            streams[tensor.value] = call.stream
    return streams


def block_runs(block: Block, prices: tuple[Price, ...], given: tuple[str | None, ...]) -> list[Run]:
    """Cut a block's calls into runs. given: the stream that made each of the block's inputs, None for no op."""
    streams = _makers(block, given)
    # What the same stream made earlier is ready when the stream is free.
    waits = [
        tuple(t.value for t in call.inputs if t is not None and streams.get(t.value, call.stream) != call.stream)
        for call in block.calls
    ]
    starts = [
        index
        for index, (call, price) in enumerate(zip(block.calls, prices, strict=True))
        if index == 0
        or waits[index]
        or call.waits
        or (call.stream, price.units) != (block.calls[index - 1].stream, prices[index - 1].units)
    ]
    wanted = {value for values in waits for value in values}
    wanted |= {tensor.value for tensor in block.outputs if tensor is not None}
    return [
        _run(block.calls[start:stop], prices[start:stop], waits[start], wanted)
        for start, stop in pairwise([*starts, len(block.calls)])
    ]


def _run(calls: Sequence[OpCall], prices: Sequence[Price], waits: tuple[int, ...], wanted: set[int]) -> Run:
    total: Dim = 0.0
    makes: list[tuple[int, Dim]] = []
    signals: list[tuple[Event, Dim]] = []
    for call, price in zip(calls, prices, strict=True):
        total = total + price.seconds
        makes += [(tensor.value, total) for tensor in call.outputs if tensor.value in wanted]
        signals += [(event, total) for event in call.signals]
    return Run(
        stream=calls[0].stream,
        units=prices[0].units,
        waits=waits,
        after=calls[0].waits,
        makes=tuple(makes),
        signals=tuple(signals),
        calls=tuple(calls),
        seconds=tuple(price.seconds for price in prices),
        total_s=total,
    )


def spans(program: Program, prices: Prices) -> Iterator[Span]:
    """Every op call of the step at its time, in program order."""
    for placed in place(program, prices):
        start = placed.start_s
        for call, seconds in zip(placed.run.calls, placed.run.seconds, strict=True):
            yield Span(placed.entry, call, start, start + seconds)
            start = start + seconds
