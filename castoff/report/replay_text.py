"""A replay in words, and hit rates as a chart of letters."""

from __future__ import annotations

from itertools import pairwise
from string import ascii_uppercase

from rich.table import Table
from rich.text import Text

from castoff.lab.result import ReplayResult, ReplayRow
from castoff.report.grid import table
from castoff.report.units import count, percent, size_text

CHART_COLUMNS, CHART_LINES = 64, 16


def row_name(row: ReplayRow) -> str:
    """`fifo, 16 ways`."""
    if row.ways is None:
        return row.policy
    return f"{row.policy}, {row.ways} {'way' if row.ways == 1 else 'ways'}"


def series(result: ReplayResult) -> dict[str, list[ReplayRow]]:
    """The rows of each curve by its name, by size of the pool."""
    curves: dict[str, list[ReplayRow]] = {}
    for row in result.rows:
        curves.setdefault(row_name(row), []).append(row)
    return {name: sorted(rows, key=lambda row: row.pool_tokens) for name, rows in curves.items()}


def facts(result: ReplayResult) -> str:
    """What was replayed, in a line."""
    return (
        f"{result.trace}: {result.model}, {_many(result.steps, 'step')} of {_many(result.requests, 'request')}, "
        f"{_many(result.query_length, 'query token')} each"
    )


def row_columns() -> tuple[str, ...]:
    """Titles of `row_cells`."""
    return ("policy", "pool", "hit rate", "distinct", "misses", "p50", "p99", "link per step")


def row_cells(row: ReplayRow) -> tuple[str, ...]:
    """The figures of a row."""
    return (
        row_name(row),
        count(row.pool_tokens),
        percent(row.hit_rate),
        percent(row.unique_hit_rate),
        f"{row.unique_misses_per_step:,.1f}",
        count(row.unique_misses_p50),
        count(row.unique_misses_p99),
        size_text(row.link_bytes_per_step),
    )


def replay_tables(result: ReplayResult) -> list[Table | Text]:
    """What `castoff replay` shows."""
    made = table(facts(result), row_columns())
    for row in result.rows:
        made.add_row(*row_cells(row))
    return [made, *_chart(result)]


def _chart(result: ReplayResult) -> list[Text]:
    """Hit rates over the size of the pool, a letter for each curve; nothing where there is one size."""
    curves = {name: rows for name, rows in series(result).items() if rows[0].policy != "gather"}
    pools = sorted({row.pool_tokens for rows in curves.values() for row in rows})
    if len(pools) < 2:
        return []
    rates = [row.hit_rate for rows in curves.values() for row in rows]
    low, high = min(rates), max(rates)
    lines = [[" "] * CHART_COLUMNS for _ in range(CHART_LINES)]
    for index, rows in enumerate(curves.values()):
        _draw(lines, index, rows, (pools[0], pools[-1]), (low, high))
    texts = [Text("hit rate over the tokens of a pool; * where curves meet", "bold")]
    for line, cells in enumerate(lines):
        share = high - (high - low) * line / (CHART_LINES - 1)
        texts.append(Text(f"{percent(share) if line % 5 == 0 else '':>7} |{''.join(cells)}"))
    last = count(pools[-1])
    texts.append(Text(f"{'':>7} +{'-' * CHART_COLUMNS}"))
    texts.append(Text(f"{'':>8} {count(pools[0]):<{CHART_COLUMNS - len(last)}}{last}"))
    texts += [Text(f"{'':>8} {_letter(index)}  {name}") for index, name in enumerate(curves)]
    return texts


def _draw(
    lines: list[list[str]],
    index: int,
    rows: list[ReplayRow],
    pools: tuple[int, int],
    rates: tuple[float, float],
) -> None:
    """A curve, with straight lines between its pools."""
    (first, last), (low, high) = pools, rates
    height = high - low or 1.0
    for column in range(CHART_COLUMNS):
        pool = first + (last - first) * column / (CHART_COLUMNS - 1)
        for before, after in pairwise(rows):
            if before.pool_tokens <= pool <= after.pool_tokens:
                share = (pool - before.pool_tokens) / (after.pool_tokens - before.pool_tokens)
                rate = before.hit_rate + share * (after.hit_rate - before.hit_rate)
                line = round((high - rate) / height * (CHART_LINES - 1))
                lines[line][column] = _letter(index) if lines[line][column] == " " else "*"
                break


def _letter(index: int) -> str:
    return ascii_uppercase[index % len(ascii_uppercase)]


def _many(number: int, what: str) -> str:
    return f"{count(number)} {what}{'' if number == 1 else 's'}"
