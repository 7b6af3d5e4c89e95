"""Fits of a backend's kernels to measured times on one device: a form, its coefficients, and what the form leaves.

Forms are in `castoff.casting.forms`; here is what a file says of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import prod
from typing import Literal, get_args

import numpy as np

from castoff.dims import Array
from castoff.spec.toml_file import Table, shown

LARGEST_LOG_FACTOR = 5.0
# What a kernel may take.
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e3

FitOrigin = Literal["measured", "calibrated", "assumed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogGrid:
    """Logarithms on a grid of sizes: linear between knots in the logarithms of the sizes, beyond the last knot that of
    the edge.

    axes: names of sizes. knots: their logarithms, ascending. values: one per point of the grid.
    """

    axes: tuple[str, ...]
    knots: tuple[Array, ...]
    values: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One kernel's cost on one device.

    coefficients: what the form multiplies and adds, by its names, positive, in SI units.
    features: factors of further terms that the form gives, which add to the logarithm of its time.
    correction: of measured over formed time, by axes that the form gives. measured: of seconds, by sizes; where there
        are any, the time is theirs, and beyond them what the form makes of the nearest one.
    ranges: least and largest of each size among the rows fitted; beyond them a prediction is marked.
    rows: how many. median_abs_error, p90_abs_error: of |predicted / measured − 1| over rows of sites left out in turn,
        which other kernels may be part of. origin: assumed where nothing of it was fitted.
    """

    form: str
    coefficients: Mapping[str, float] = field(hash=False)
    features: Mapping[str, float] = field(hash=False)
    correction: LogGrid | None
    measured: LogGrid | None = None
    ranges: Mapping[str, tuple[float, float]] = field(hash=False)
    rows: int
    median_abs_error: float
    p90_abs_error: float
    origin: FitOrigin
    source: str


def read_fit(table: Table) -> Fit:
    """A `[fits.<kernel>]` of a backend file; the form checks the names."""
    table.only(item.name for item in fields(Fit))
    coefficients = table.table("coefficients")
    features = table.table("features") if "features" in table.values else Table(file=table.file, values={})
    ranges = table.table("ranges")
    origin = table.choice("origin", get_args(FitOrigin))
    if origin == "measured" and "measured" not in table.values:
        raise table.fault("origin", "is measured only where there are seconds, in a section `measured`")
    if "measured" in table.values and ("correction" in table.values or features.values):
        raise table.fault("measured", "must be without correction and features: its seconds are the time")
    return Fit(
        form=table.text("form"),
        coefficients={name: _coefficient(coefficients, name) for name in coefficients.values},
        features={name: features.number(name) for name in features.values},
        correction=_read_correction(table.table("correction")) if "correction" in table.values else None,
        measured=_read_measured(table.table("measured")) if "measured" in table.values else None,
        ranges={name: _range(ranges, name) for name in ranges.values},
        rows=table.count("rows"),
        median_abs_error=table.at_least_zero("median_abs_error"),
        p90_abs_error=table.at_least_zero("p90_abs_error"),
        origin=origin,
        source=table.text("source"),
    )


def _coefficient(table: Table, name: str) -> float:
    # Forms divide by them.
    return table.positive(name) if name.endswith("efficiency") else table.at_least_zero(name)


def _range(table: Table, name: str) -> tuple[float, float]:
    values = table.numbers(name)
    if len(values) != 2 or values[0] > values[1]:
        raise table.fault(name, f"must be the least and the largest value, got {shown(table.values[name])}")
    return values[0], values[1]


def _read_correction(table: Table) -> LogGrid:
    grid = _read_grid(table, "values")
    if np.max(abs(grid.values)) > LARGEST_LOG_FACTOR:
        raise table.fault(
            "values", f"must be logarithms of factors, from −{LARGEST_LOG_FACTOR:g} to {LARGEST_LOG_FACTOR:g}"
        )
    return grid


def _read_measured(table: Table) -> LogGrid:
    grid = _read_grid(table, "seconds")
    if np.min(grid.values) < LEAST_SECONDS or np.max(grid.values) > MOST_SECONDS:
        raise table.fault("seconds", f"must be from {LEAST_SECONDS:g} to {MOST_SECONDS:g}, got {_listed(grid.values)}")
    return replace(grid, values=np.log(grid.values))


def _read_grid(table: Table, key: str) -> LogGrid:
    """Axes and one number per point, which lie under a key."""
    table.only(("axes", key))
    axes = table.table("axes")
    knots = {name: axes.numbers(name) for name in axes.values}
    for name, places in knots.items():
        if len(places) < 2 or min(places) <= 0 or any(a >= b for a, b in pairwise(places)):
            raise axes.fault(name, f"must be two or more ascending numbers above 0, got {_listed(places)}")
    values = table.numbers(key)
    shape = tuple(len(places) for places in knots.values())
    if not knots or len(values) != prod(shape):
        raise table.fault(key, f"must be {prod(shape)} numbers, one per point of the axes, got {len(values)}")
    return LogGrid(
        axes=tuple(knots),
        knots=tuple(np.log(places) for places in knots.values()),
        values=np.array(values).reshape(shape),
    )


def _listed(numbers: Iterable[float]) -> str:
    return f"[{', '.join(f'{number:g}' for number in np.ravel(list(numbers)))}]"
