"""How far predicted op times are from measured ones, as tables."""

from __future__ import annotations

from itertools import pairwise

from rich.table import Table

from castoff.accuracy.calibrate import Calibration
from castoff.accuracy.ops import BUCKET_EDGES_S, OpsAccuracy, TableAccuracy
from castoff.accuracy.this_machine import MachineCalibration
from castoff.report.grid import table
from castoff.report.units import count, microseconds, milliseconds, percent


def accuracy_tables(result: OpsAccuracy) -> list[Table]:
    """What `castoff accuracy ops` shows: errors, errors by measured time, the worst row of each, what is left out."""
    return [made for made in (_errors(result), _by_time(result), _worst(result), _excluded(result)) if made.row_count]


def calibration_table(result: Calibration) -> Table:
    """What `castoff calibrate` shows: each fit, its rows and sites, and how far off were sites that it left out."""
    columns = ("fit", "kernels", "rows", "sites", "median", "p90")
    made = table(f"{result.backend} on {result.device}: errors on sites left out of the fit", columns, left=2)
    for column in made.columns[:2]:
        column.no_wrap = False
    for stage in result.stages:
        errors = percent(stage.median_abs_error), percent(stage.p90_abs_error)
        made.add_row(stage.name, ", ".join(stage.curves), count(stage.rows), count(stage.sites), *errors)
    return made


def machine_table(result: MachineCalibration) -> Table:
    """What `castoff calibrate --this-machine` shows: each op, and how far off were points that its fit left out."""
    columns = ("op", "calls", "share of time", "median", "p90")
    made = table(f"{result.model}: errors at batches and lengths left out of the fit", columns)
    for op in result.ops:
        made.add_row(
            op.name, count(op.calls), percent(op.share), percent(op.median_abs_error), percent(op.p90_abs_error)
        )
    made.caption = f"beside its ops a decode step takes {milliseconds(result.host_s)} ms"
    made.caption_justify = "left"
    return made


def _errors(result: OpsAccuracy) -> Table:
    columns = ("table", "system", "measured", "rows", "scored", "median", "p90", "bias", "roofline")
    made = table("Errors of predicted op times: |predicted / measured − 1|", columns, left=3)
    for entry in result.tables:
        errors = (entry.median_abs_error, entry.p90_abs_error, entry.bias, entry.roofline_median_abs_error)
        made.add_row(*_names(entry), count(entry.rows), count(entry.rows_scored), *(_share(error) for error in errors))
    return made


def _by_time(result: OpsAccuracy) -> Table:
    edges = [*pairwise(BUCKET_EDGES_S)]
    titles = [f"from {_time(low)}" if low else f"below {_time(high)}" for low, high in edges]
    made = table("Median error by measured time", ("table", "system", "measured", *titles), left=3)
    for entry in result.tables:
        known = {bucket.from_s: percent(bucket.median_abs_error) for bucket in entry.buckets}
        if known:
            made.add_row(*_names(entry), *(known.get(low, "") for low, _ in edges))
    return made


def _worst(result: OpsAccuracy) -> Table:
    made = table("Worst row of each table", ("table", "system", "row", "predicted µs", "measured µs"), left=3)
    made.columns[2].no_wrap = False
    for entry in result.tables:
        for worst in entry.worst[:1]:
            row = ", ".join(f"{name} {value}" for name, value in worst.row.items())
            times = microseconds(worst.predicted_s), microseconds(worst.measured_s)
            made.add_row(entry.name, entry.system, row, *times)
    return made


def _excluded(result: OpsAccuracy) -> Table:
    made = table("Rows that are not scored", ("table", "system", "measured", "why", "rows"), left=4)
    made.columns[3].no_wrap = False
    for entry in result.tables:
        for why, rows in entry.excluded.items():
            made.add_row(*_names(entry), why, count(rows))
    return made


def _names(entry: TableAccuracy) -> tuple[str, str, str]:
    return entry.name, entry.system, f"{entry.backend} {entry.version}"


def _share(error: float | None) -> str:
    return "" if error is None else percent(error)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:g} µs"
