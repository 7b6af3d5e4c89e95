"""Top-k traces in words."""

from __future__ import annotations

from rich.table import Table

from castoff.report.grid import facts_table
from castoff.report.units import count, gib_text
from castoff.trace.reader import Trace
from castoff.trace.summary import TraceSummary


def trace_table(summary: TraceSummary) -> Table:
    """What `castoff trace info` shows."""
    made = facts_table(f"{summary.file}: top-k trace of {summary.model}")
    made.add_row("steps", count(summary.steps))
    made.add_row("requests", f"{count(summary.requests)}, at most {count(summary.batch)} in a step")
    made.add_row("request steps", count(summary.request_steps))
    made.add_row("lengths", _lengths(summary))
    made.add_row("query tokens per request and step", count(summary.query_length))
    made.add_row("ids per query", f"at most {count(summary.index_topk)}")
    made.add_row("index groups", f"{summary.groups}, selected by layers {', '.join(map(str, summary.owner_layers))}")
    if summary.mean_distinct_ids is not None:
        made.add_row("distinct ids per request, step and group", f"{summary.mean_distinct_ids:,.1f} on average")
    made.add_row("size", f"{count(summary.bytes)} bytes, {gib_text(summary.bytes)}")
    for key, value in summary.provenance.items():
        made.add_row(key, str(value))
    made.add_row("written by", f"{summary.written_by}, format version {summary.format_version}")
    return made


def _lengths(summary: TraceSummary) -> str:
    if not summary.lengths_known:
        return "not known: every id counts as committed"
    if summary.min_length is None or summary.max_length is None:
        return "none, as no request takes part"
    return f"{count(summary.min_length)} to {count(summary.max_length)} tokens"


def trace_text(trace: Trace) -> str:
    """One line about a trace that was written."""
    header = trace.header
    return (
        f"{trace.path}: steps {count(trace.num_steps)}, index groups {count(header.num_groups)}, requests per step at "
        f"most {count(header.batch)}, {count(trace.size_bytes)} bytes\n"
    )
