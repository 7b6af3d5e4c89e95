"""The tables of `castoff cast`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from castoff.casting.footprint import Footprint
from castoff.casting.price import BOUNDS
from castoff.casting.summary import BucketSummary, OpSummary, kind_summaries
from castoff.dims import largest
from castoff.report.grid import table
from castoff.report.offload_table import offload_table
from castoff.report.step import StepReport
from castoff.report.units import count, gib, giga, mib, microseconds, milliseconds, percent, rate
from castoff.report.words import coverage_text, misfit, verdict, what_is_cast

_FOOTPRINT_ROWS = (
    ("weights", "weights_bytes"),
    ("KV cache", "kv_bytes"),
    ("indexer cache", "indexer_cache_bytes"),
    ("pool", "pool_bytes"),
    ("selection buffers", "selection_bytes"),
    ("staging", "staging_bytes"),
    ("metadata", "metadata_bytes"),
    ("activations", "activation_bytes"),
    ("communication buffers", "communication_bytes"),
    ("reserved", "reserved_bytes"),
    ("free", "free_bytes"),
)


def step_tables(
    report: StepReport, ops: Sequence[OpSummary], *, with_shapes: bool = False, with_bounds: bool = False
) -> list[Table | Text]:
    """A report from its first line (what does not fit) to its last (the verdict).

    ops: the rows of the op table, by name or by name and shapes. with_shapes: show the input shapes of each.
    with_bounds: show what each bound alone would take.
    """
    prediction = report.prediction
    too_large = misfit(prediction)
    parts: list[Table | Text] = [Text(too_large, "bold red"), Text()] if too_large else []
    parts += [Text(line, "bold" if index == 0 else "") for index, line in enumerate(what_is_cast(prediction))]
    parts += [Text(), _op_table(report, ops, with_shapes=with_shapes, with_bounds=with_bounds)]
    buckets = [bucket for op in report.ops if op.name == "dsa_indexer" for bucket in op.buckets.values()]
    if buckets:
        parts.append(_bucket_table(buckets))
    parts += [_kind_table(report), _stream_table(report), _footprint_table(prediction.footprint)]
    if prediction.offload is not None:
        parts.append(offload_table(prediction, prediction.offload))
    parts.append(_summary(report))
    if report.coverage is not None:
        parts.append(Text(coverage_text(report.coverage)))
    parts += [Text(f"note: {note}", "yellow") for note in report.notes]
    parts.append(Text(verdict(report), "bold green" if prediction.fits else "bold red"))
    return parts


def _op_table(report: StepReport, ops: Sequence[OpSummary], *, with_shapes: bool, with_bounds: bool) -> Table:
    micro_batches = int(largest(report.prediction.cast.batch.in_flight))
    title = f"Ops of one of {micro_batches} micro-batches, through all stages" if micro_batches > 1 else "Ops"
    if with_bounds:
        title += "; on the right, what each bound alone would take, as a share of the op's time"
    made = table(title, ["op", "total ms", "share", "mean µs", "calls"])
    made.add_column("bound", overflow="fold")
    made.add_column("origin", overflow="fold")
    if with_bounds:
        for bound in BOUNDS:
            made.add_column(bound, justify="right", no_wrap=True)
    if with_shapes:
        made.add_column("input shapes", overflow="fold")
    for op in ops:
        cells = [op.name, milliseconds(op.total_s), percent(op.total_s / report.op_s), microseconds(op.mean_s)]
        cells += [count(op.calls), op.bound, _origin(op)]
        if with_bounds:
            cells += [percent(op.terms_s[bound] / op.total_s) for bound in BOUNDS]
        if with_shapes:
            cells.append("; ".join(op.shapes))
        made.add_row(*cells)
    total = [milliseconds(report.op_s), percent(1), "", count(sum(op.calls for op in ops)), "", ""]
    made.add_section()
    made.add_row("all ops", *total)
    return made


def _origin(op: OpSummary) -> str:
    return f"{op.origin}, extrapolated" if op.extrapolated else op.origin


def _bucket_table(buckets: Iterable[BucketSummary]) -> Table:
    made = table("Inside dsa_indexer", ["part", "GFLOP", "MiB", "ms"])
    for bucket in buckets:
        made.add_row(bucket.name, giga(bucket.flops), mib(bucket.bytes), milliseconds(bucket.seconds))
    return made


def _kind_table(report: StepReport) -> Table:
    kinds = kind_summaries(report.prediction)
    made = table("Layers by kind", ["kind", "count", "each ms", "total ms", "share"])
    for kind in kinds:
        share = percent(kind.total_s / report.op_s)
        made.add_row(kind.name, count(kind.calls), milliseconds(kind.mean_s), milliseconds(kind.total_s), share)
    return made


def _stream_table(report: StepReport) -> Table:
    made = table("Streams", ["stream", "busy ms", "of the step"])
    for stream, busy_s in report.stream_s.items():
        made.add_row(stream, milliseconds(busy_s), percent(busy_s / report.prediction.latency_s))
    return made


def _footprint_table(footprint: Footprint) -> Table:
    capacity = footprint.device_bytes_capacity
    made = table("Memory of the fullest device", ["tier", "what", "GiB", "share"], left=2)
    for what, field in _FOOTPRINT_ROWS:
        size = largest(getattr(footprint, field))
        if size or field == "free_bytes":
            made.add_row("device", what, gib(size), percent(size / capacity))
    made.add_row("device", "capacity", gib(capacity), percent(1), end_section=True)
    host_bytes = largest(footprint.host_kv_bytes)
    made.add_row("host", "KV cache, per device", gib(host_bytes), percent(host_bytes / footprint.host_bytes_capacity))
    if host_bytes:
        made.add_row("host", "capacity, per device", gib(footprint.host_bytes_capacity), percent(1))
    return made


def _summary(report: StepReport) -> Table:
    prediction = report.prediction
    cast = prediction.cast
    made = table("Result", ["figure", "value", "unit"])
    made.columns[2].justify = "left"
    made.add_column("origin")
    made.add_row("latency of the step", milliseconds(prediction.latency_s), "ms", cast.origin)
    if prediction.mode == "decode" and cast.setup.mtp.num_mtp_tokens:
        per_token = prediction.latency_s / cast.setup.mtp.tokens_per_step
        made.add_row("time per output token", milliseconds(per_token), "ms", cast.throughput_origin)
    if prediction.scenario.offload.offloads:
        made.add_row("of it, stall of the host link", milliseconds(prediction.stall_s), "ms", cast.origin)
    made.add_row("throughput", rate(prediction.tokens_per_s), "tokens/s", cast.throughput_origin)
    per_device = rate(prediction.tokens_per_s_per_device)
    made.add_row("throughput per device", per_device, "tokens/s/device", cast.throughput_origin)
    made.add_row("largest batch that fits", count(prediction.largest.max_batch_per_device), "requests per DP rank", "")
    context = prediction.largest.max_context_length
    made.add_row("longest context that fits", "none" if context is None else count(context), "tokens", "")
    return made
