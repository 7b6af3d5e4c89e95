"""A step as a Chrome trace: one process per pipeline stage, one row per stream, one for layers, one for the host.

The format is the JSON of the Trace Event Format, which Perfetto and chrome://tracing open; times are in µs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from castoff.casting.prediction import Prediction
from castoff.casting.price import BOUNDS, Price, shapes_text
from castoff.casting.summary import op_spans
from castoff.casting.timeline import Span
from castoff.ops.program import MAIN, OpCall
from castoff.report.plain import number

Event = dict[str, Any]
HOST_ROW, LAYER_ROW, FIRST_STREAM_ROW = 0, 1, 2


def chrome_trace(prediction: Prediction) -> dict[str, Any]:
    """The trace of one step; of several pipeline micro-batches it shows the first one's way through the stages.

    Host time comes first, since no device work hides it; the last op ends when the step ends.
    """
    cast = prediction.cast
    spans = op_spans(prediction)
    stages = sorted({span.entry.stage for span in spans})
    rows = {stream: FIRST_STREAM_ROW + index for index, stream in enumerate(cast.program.streams)}
    events: list[Event] = []
    for stage in stages:
        suffix = f", stage {stage + 1} of {len(stages)}" if len(stages) > 1 else ""
        events.append(_metadata("process_name", stage, 0, prediction.device.name + suffix))
        events += [
            _metadata("thread_name", stage, row, name)
            for name, row in {"host": HOST_ROW, "layers": LAYER_ROW, **rows}.items()
        ]
    host_s = float(cast.host_s)
    if host_s:
        events.append(_event("what the device waits for the host", "host", (0, HOST_ROW), 0.0, host_s, {}))
    events += _layer_events(spans, host_s)
    events += _op_events(prediction, spans, rows)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"model": prediction.model.name, "device": prediction.device.name, "mode": prediction.mode},
    }


def _layer_events(spans: list[Span], offset_s: float) -> Iterator[Event]:
    """Blocks, from the first to the last of their ops on the main stream, on which blocks follow each other."""
    main = [span for span in spans if span.call.stream == MAIN]
    starts = [index for index, (a, b) in enumerate(pairwise(main), start=1) if a.entry is not b.entry]
    for first, end in pairwise([0, *starts, len(main)]):
        entry = main[first].entry
        place = (entry.stage, LAYER_ROW)
        start_s, end_s = float(main[first].start_s), float(main[end - 1].end_s)
        yield _event(entry.label, "layer", place, offset_s + start_s, offset_s + end_s, {"kind": entry.block.key})


def _op_events(prediction: Prediction, spans: list[Span], rows: dict[str, int]) -> Iterator[Event]:
    cast = prediction.cast
    prices = [price for entry in cast.program.schedule for price in cast.prices[entry.block]]
    known: dict[int, Event] = {}
    host_s = float(cast.host_s)
    for span, price in zip(spans, prices, strict=True):
        call = span.call
        if id(call) not in known:
            known[id(call)] = _arguments(call, price)
        place = (span.entry.stage, rows[call.stream])
        start_s, end_s = host_s + float(span.start_s), host_s + float(span.end_s)
        arguments = {"layer": span.entry.label, **known[id(call)]}
        yield _event(call.op.name, call.family, place, start_s, end_s, arguments)


def _arguments(call: OpCall, price: Price) -> Event:
    work = call.work
    return {
        "shapes": shapes_text(call),
        "bound": BOUNDS[int(price.bound)],
        **{f"{bound}_us": round(float(term) * 1e6, 3) for bound, term in zip(BOUNDS, price.terms, strict=True)},
        "flops": number(float(work.flops)),
        "bytes": number(float(work.bytes)),
        "origin": price.origin,
    }


def _event(name: str, category: str, place: tuple[int, int], start_s: float, end_s: float, arguments: Event) -> Event:
    """A complete event. Both ends are rounded to ns, so that events which touch do not come to overlap."""
    start_ns, end_ns = round(start_s * 1e9), round(end_s * 1e9)
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": place[0],
        "tid": place[1],
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": arguments,
    }


def _metadata(kind: str, process: int, row: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
