"""Curves over the size of the pool, as SVG and in a page of HTML that needs nothing else.

Places on a drawing are in its own units, from the upper left corner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lazy_loader as lazy

from castoff.lab.result import ReplayResult, ReplayRow
from castoff.report.replay_text import facts, row_cells, row_columns, row_name, series
from castoff.report.units import count, percent, size_text

jinja2 = lazy.load("jinja2")

WIDTH, HEIGHT = 884, 420
LEFT, RIGHT, TOP, BOTTOM = 78, 842, 44, 366
LEGEND_WIDTH, LEGEND_HEIGHT = 190, 20
NUM_COLOURS = 8
DASHES = ("none", "7 3", "2 3", "10 3 2 3")
_TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True, slots=True)
class Point:
    """A pool of one policy. tip: what is shown when one points at it."""

    x: float
    y: float
    tip: str


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy with one number of ways. colour: from 0 on. is_level: of one that has no pool to choose."""

    name: str
    colour: int
    dashes: str
    points: tuple[Point, ...]
    is_level: bool
    legend_x: float
    legend_y: float

    @property
    def path(self) -> str:
        """The points of a line; a level one goes from side to side."""
        if self.is_level:
            return f"{LEFT},{self.points[0].y} {RIGHT},{self.points[0].y}"
        return " ".join(f"{point.x},{point.y}" for point in self.points)


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis."""

    place: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """All of one drawing. height: with the legend."""

    title: str
    height: int
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...]


def replay_svg(result: ReplayResult) -> str:
    """Hit rates over the size of the pool."""
    return _rendered("curves.svg.j2", chart=_hit_rates(result), is_page=False)


def replay_html(result: ReplayResult) -> str:
    """A page with hit rates, misses and bytes over the size of the pool, and all figures."""
    charts = (
        _hit_rates(result),
        _chart(result, "Distinct tokens read from the host, per request, step and index group", _misses, count),
        _chart(result, "Bytes over the link per step, all requests and layers", _link, size_text),
    )
    rows = [row_cells(row) for row in result.rows]
    return _rendered("replay.html.j2", charts=charts, facts=facts(result), columns=row_columns(), rows=rows)


def _hit_rates(result: ReplayResult) -> Chart:
    return _chart(result, "Selected rows that were in the pool", lambda row: row.hit_rate, percent)


def _misses(row: ReplayRow) -> float:
    return row.unique_misses_per_step


def _link(row: ReplayRow) -> float:
    return row.link_bytes_per_step


def _rendered(template: str, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    size = {"width": WIDTH, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}
    return str(environment.get_template(template).render(**size, **values))


def _chart(
    result: ReplayResult, title: str, value: Callable[[ReplayRow], float], text: Callable[[float], str]
) -> Chart:
    curves = series(result)
    chosen = {row.pool_tokens for row in result.rows if row.policy != "gather"}
    pools = sorted(chosen or {row.pool_tokens for row in result.rows})
    low, high, y_values = _scale([value(row) for row in result.rows])

    def x_of(pool: int) -> float:
        width = pools[-1] - pools[0]
        share = (min(max(pool, pools[0]), pools[-1]) - pools[0]) / width if width else 0.5
        return round(LEFT + share * (RIGHT - LEFT), 1)

    def y_of(amount: float) -> float:
        return round(BOTTOM - (amount - low) / (high - low) * (BOTTOM - TOP), 1)

    def point_of(row: ReplayRow) -> Point:
        tip = f"{row_name(row)}, pool of {count(row.pool_tokens)}: {text(value(row))}"
        return Point(x_of(row.pool_tokens), y_of(value(row)), tip)

    per_line = (RIGHT - LEFT) // LEGEND_WIDTH
    drawn = tuple(
        Curve(
            name,
            index % NUM_COLOURS,
            DASHES[index // NUM_COLOURS % len(DASHES)],
            tuple(map(point_of, rows)),
            rows[0].policy == "gather",
            LEFT + index % per_line * LEGEND_WIDTH,
            HEIGHT + 16 + index // per_line * LEGEND_HEIGHT,
        )
        for index, (name, rows) in enumerate(curves.items())
    )
    return Chart(
        title,
        HEIGHT + 12 + -(-len(curves) // per_line) * LEGEND_HEIGHT,
        tuple(Tick(x_of(pool), count(pool)) for pool in _some(pools)),
        tuple(Tick(y_of(amount), text(amount)) for amount in y_values),
        drawn,
    )


def _scale(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Ends of an axis, and 3 to 8 round values from one to the other."""
    low, high = min(values), max(values)
    if high <= low:
        low, high = low - 0.5 * abs(low), high + 0.5 * abs(high) or 1.0
    step = 10 ** math.floor(math.log10((high - low) / 2))
    step = next(step * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (step * factor) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = [round(index * step, 12) for index in range(first, last + 1)]
    return ticks[0], ticks[-1], ticks


def _some(pools: Sequence[int], most: int = 8) -> list[int]:
    """The first and the last, and some between."""
    if len(pools) <= most:
        return list(pools)
    return [pools[round(index * (len(pools) - 1) / (most - 1))] for index in range(most)]
