"""When each op runs: in-order streams, data dependencies, and the units that streams share.

An op starts when its stream is free, its inputs are ready and the unit it needs is free. Two streams never compute
at once on one device's cores, nor send at once on its links; what they gain is a computation beside a transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from castoff.casting.price import Prices
from castoff.dims import Dim, maximum
from castoff.ops.program import MAIN, Block, BlockCall, OpCall, Program

CORES, LINKS = "cores", "links"


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
    totals = {id(block): _stream_totals(block, prices) for block in program.blocks}
    for entry in program.schedule:
        for stream, seconds in totals[id(entry.block)].items():
            busy[stream] = busy[stream] + seconds
    num_stages = program.schedule[-1].stage + 1
    if len(busy) == 1:
        stages: list[Dim] = [0.0] * num_stages
        for entry in program.schedule:
            stages[entry.stage] = stages[entry.stage] + totals[id(entry.block)].get(MAIN, 0.0)
        return Timeline(busy[MAIN], tuple(stages), busy)
    ends: list[Dim] = [0.0] * num_stages
    for span in spans(program, prices):
        ends[span.entry.stage] = maximum(ends[span.entry.stage], span.end_s)
    starts = [0.0, *ends[:-1]]
    return Timeline(ends[-1], tuple(end - start for start, end in zip(starts, ends, strict=True)), busy)


def _stream_totals(block: Block, prices: Prices) -> dict[str, Dim]:
    totals: dict[str, Dim] = {}
    for call, price in zip(block.calls, prices[id(block)], strict=True):
        totals[call.stream] = totals.get(call.stream, 0.0) + price.seconds
    return totals


def spans(program: Program, prices: Prices) -> Iterator[Span]:
    """Every op of the step at its time, in program order."""
    stream_free: dict[str, Dim] = dict.fromkeys(program.streams, 0.0)
    unit_free: dict[str, Dim] = {CORES: 0.0, LINKS: 0.0}
    ready: dict[int, Dim] = {}
    for entry in program.schedule:
        block = entry.block
        # Values of the block as it was recorded, at the times of the values it is given now.
        local = {
            formal.value: ready.get(actual, 0.0)
            for formal, actual in zip(block.inputs, entry.inputs, strict=True)
            if formal is not None and actual is not None
        }
        for call, price in zip(block.calls, prices[id(block)], strict=True):
            start = stream_free[call.stream]
            for tensor in call.inputs:
                if tensor is not None and tensor.value in local:
                    start = maximum(start, local[tensor.value])
            units = _units(call)
            for unit in units:
                start = maximum(start, unit_free[unit])
            end = start + price.seconds
            stream_free[call.stream] = end
            for unit in units:
                unit_free[unit] = end
            for tensor in call.outputs:
                local[tensor.value] = end
            yield Span(entry, call, start, end)
        for formal, actual in zip(block.outputs, entry.outputs, strict=True):
            if formal is not None and actual is not None:
                ready[actual] = local.get(formal.value, 0.0)


def _units(call: OpCall) -> tuple[str, ...]:
    if call.op.family == "collective":
        return (LINKS,)
    return (CORES, LINKS) if call.op.work(call).collectives else (CORES,)
