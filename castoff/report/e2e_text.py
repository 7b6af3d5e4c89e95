"""How far predicted times of whole deployments are from measured ones, as tables."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from castoff.accuracy.e2e import LoadAccuracy, StepAccuracy
from castoff.report.grid import table
from castoff.report.units import count, milliseconds, percent


def e2e_tables(result: LoadAccuracy | StepAccuracy) -> list[Table]:
    """What `castoff accuracy e2e` shows: every point, mean errors by system and in all, what is left out."""
    tables = _loads(result) if isinstance(result, LoadAccuracy) else _steps(result)
    return [made for made in (*tables, _excluded(result.excluded)) if made.row_count]


def _loads(result: LoadAccuracy) -> list[Table]:
    points = table(
        "Points under load: ms, predicted beside measured",
        (
            "model",
            "system",
            "isl",
            "osl",
            "requests",
            "TTFT",
            "measured",
            "error",
            "TPOT",
            "measured",
            "error",
            "memory",
        ),
        left=2,
    )
    for point in result.points:
        ttft = milliseconds(point.ttft_s), milliseconds(point.measured_ttft_s), _signed(point.ttft_error)
        tpot = milliseconds(point.tpot_s), milliseconds(point.measured_tpot_s), _signed(point.tpot_error)
        sizes = count(point.isl), count(point.osl), count(point.concurrency)
        points.add_row(point.model, point.system, *sizes, *ttft, *tpot, "queues" if point.queueing else "")
    errors = table("Mean |error|", ("system", "points", "TTFT", "TPOT"))
    for system in result.systems:
        shares = percent(system.ttft_mean_abs_error), percent(system.tpot_mean_abs_error)
        errors.add_row(system.system, count(system.points), *shares)
    if result.ttft_mean_abs_error is not None and result.tpot_mean_abs_error is not None:
        shares = percent(result.ttft_mean_abs_error), percent(result.tpot_mean_abs_error)
        errors.add_row("all", count(len(result.points)), *shares)
    return [points, errors]


def _steps(result: StepAccuracy) -> list[Table]:
    columns = (
        "model",
        "device",
        "backend",
        "offload",
        "pool",
        "devices",
        "batch",
        "context",
        "step",
        "measured",
        "error",
    )
    points = table("Decode steps: ms, predicted beside measured", columns, left=4)
    for point in result.points:
        pool = "" if point.pool_tokens is None else count(point.pool_tokens)
        sizes = count(point.num_devices), count(point.global_batch), count(point.context_tokens)
        times = milliseconds(point.step_s), milliseconds(point.measured_step_s), _signed(point.step_error)
        points.add_row(point.model, point.device, point.backend, point.offload, pool, *sizes, *times)
    errors = table("Mean |error|", ("device", "points", "step"))
    for system in result.systems:
        errors.add_row(system.system, count(system.points), percent(system.step_mean_abs_error))
    if result.step_mean_abs_error is not None:
        errors.add_row("all", count(len(result.points)), percent(result.step_mean_abs_error))
    return [points, errors]


def _excluded(excluded: Mapping[str, int]) -> Table:
    made = table("Rows that are not scored", ("why", "rows"))
    made.columns[0].no_wrap = False
    for why, rows in excluded.items():
        made.add_row(why, count(rows))
    return made


def _signed(error: float) -> str:
    return f"{error:+.1%}"
