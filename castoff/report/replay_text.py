"""A replay in words."""

from __future__ import annotations

from rich.table import Table

from castoff.lab.result import ReplayResult, ReplayRow
from castoff.report.tables import table
from castoff.report.units import count, percent, size_text


def row_name(row: ReplayRow) -> str:
    """`fifo, 16 ways`."""
    if row.ways is None:
        return row.policy
    return f"{row.policy}, {row.ways} {'way' if row.ways == 1 else 'ways'}"


def replay_tables(result: ReplayResult) -> list[Table]:
    """What `castoff replay` shows."""
    title = (
        f"{result.trace}: {result.model}, {count(result.steps)} steps of {count(result.requests)} requests, "
        f"{result.query_length} query tokens each"
    )
    made = table(title, ("policy", "pool", "hit rate", "distinct", "misses", "p50", "p99", "link per step"))
    for row in result.rows:
        made.add_row(
            row_name(row),
            count(row.pool_tokens),
            percent(row.hit_rate),
            percent(row.unique_hit_rate),
            f"{row.unique_misses_per_step:,.1f}",
            count(row.unique_misses_p50),
            count(row.unique_misses_p99),
            size_text(row.link_bytes_per_step),
        )
    return [made]
