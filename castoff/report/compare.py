"""A cast laid beside a run: predicted and measured time per call of every op, and in total."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castoff.errors import CastoffError
from castoff.report.units import count, microseconds, milliseconds

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class OpComparison:
    """One op: calls of the run, and seconds per call; predicted_s is None for an op that the cast does not have."""

    name: str
    calls: int
    predicted_s: float | None
    measured_s: float

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return None if self.predicted_s is None else self.predicted_s / self.measured_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """ops: those of the run, the longest first. not_run: ops that only the cast has. Totals are over ops that both
    have, the cast's time per call counted as often as the run called."""

    ops: tuple[OpComparison, ...]
    not_run: tuple[str, ...]

    @property
    def measured_s(self) -> float:
        """Measured seconds of the ops that both have."""
        return sum(op.calls * op.measured_s for op in self.ops if op.predicted_s is not None)

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of the same calls."""
        return sum(op.calls * op.predicted_s for op in self.ops if op.predicted_s is not None)

    @property
    def ratio(self) -> float:
        """Predicted over measured, in total."""
        return self.predicted_s / self.measured_s


def compare(cast_file: Path, run_file: Path) -> Comparison:
    """Compare the JSON of a cast with that of a run. Raises CastoffError for files that are neither."""
    predicted = {op["name"]: float(op["mean_s"]) for op in _ops(cast_file, "castoff cast --json")}
    run = _ops(run_file, "castoff run --json")
    ops = tuple(
        OpComparison(op["name"], int(op["calls"]), predicted.get(op["name"]), float(op["mean_s"]))
        for op in sorted(run, key=lambda op: -float(op["total_s"]))
    )
    measured = {op.name for op in ops}
    if not measured & predicted.keys():
        raise CastoffError(f"{cast_file} and {run_file} have no op in common; cast and run the same number formats")
    return Comparison(ops, tuple(name for name in predicted if name not in measured))


def _ops(file: Path, made_by: str) -> list[dict[str, Any]]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CastoffError(f"cannot read {file}: {error}") from None
    except ValueError as error:
        raise CastoffError(f"{file} is not JSON: {error}") from None
    ops = values.get("ops") if isinstance(values, dict) else None
    needed = {"name", "calls", "mean_s", "total_s"}
    if not isinstance(ops, list) or not ops or not all(isinstance(op, dict) and needed <= op.keys() for op in ops):
        raise CastoffError(f"{file} lists no op times; make it with {made_by}")
    return ops


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as `castoff compare --json` writes it: seconds per call, and in total."""
    return {
        "ops": [
            {
                "name": op.name,
                "calls": op.calls,
                "predicted_s": op.predicted_s,
                "measured_s": op.measured_s,
                "ratio": op.ratio,
            }
            for op in comparison.ops
        ],
        "not_run": list(comparison.not_run),
        "predicted_s": comparison.predicted_s,
        "measured_s": comparison.measured_s,
        "ratio": comparison.ratio,
    }


def compare_table(comparison: Comparison) -> list[RenderableType]:
    """The comparison as a table and, where the cast has more, a line about that."""
    from rich.table import Table

    table = Table("op", "calls", "cast µs", "run µs", "cast / run", title="Per call", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for op in comparison.ops:
        predicted = "" if op.predicted_s is None else microseconds(op.predicted_s)
        ratio = "" if op.ratio is None else f"{op.ratio:.3f}"
        table.add_row(op.name, count(op.calls), predicted, microseconds(op.measured_s), ratio)
    table.add_row(
        "total ms", "", milliseconds(comparison.predicted_s), milliseconds(comparison.measured_s),
        f"{comparison.ratio:.3f}", end_section=True,
    )  # fmt: skip
    missing = [f"Only in the cast: {', '.join(comparison.not_run)}"] if comparison.not_run else []
    return [table, *missing]
