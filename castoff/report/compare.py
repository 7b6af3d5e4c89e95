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


MOST_S = 1e12
"""Longer than any op: a figure beyond it is no time."""


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
        return None if self.predicted_s is None or not self.measured_s else self.predicted_s / self.measured_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """mode: prefill or decode, of which both are. ops: those of the run, the longest first. not_run: ops that only the
    cast has. Totals are over ops that both have, the cast's time per call counted as often as the run called."""

    mode: str
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
    def ratio(self) -> float | None:
        """Predicted over measured, in total."""
        return self.predicted_s / self.measured_s if self.measured_s else None


def compare(cast_file: Path, run_file: Path) -> Comparison:
    """Compare the JSON of a cast with that of a run, over the run's passes of the cast's kind, prefill or decode.

    Raises CastoffError for files that are neither, and where the run timed no such op.
    """
    cast_json = _report(cast_file, "castoff cast --json", {"name", "calls", "mean_s", "total_s", "bound"})
    mode = str(cast_json.get("mode"))
    predicted = {op["name"]: float(op["mean_s"]) for op in cast_json["ops"]}
    timed = _report(run_file, "castoff run --json", {"name", "phase", "calls", "mean_s", "total_s"})["ops"]
    run = [op for op in timed if op["phase"] == mode]
    if not run:
        raise CastoffError(
            f"{run_file} timed no op of a {mode} pass, which {cast_file} predicts; ops of a graph are not timed, and a "
            "run of one token per request has no decode pass"
        )
    ops = tuple(
        OpComparison(op["name"], int(op["calls"]), predicted.get(op["name"]), float(op["mean_s"]))
        for op in sorted(run, key=lambda op: -float(op["total_s"]))
    )
    measured = {op.name for op in ops}
    if not measured & predicted.keys():
        raise CastoffError(f"{cast_file} and {run_file} have no op in common; cast and run the same number formats")
    return Comparison(mode, ops, tuple(name for name in predicted if name not in measured))


def _report(file: Path, made_by: str, needed: set[str]) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CastoffError(f"cannot read {file}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CastoffError(f"{file} is not JSON: {error}") from None
    ops = values.get("ops") if isinstance(values, dict) else None
    if not isinstance(ops, list) or not ops or not all(isinstance(op, dict) and needed <= op.keys() for op in ops):
        raise CastoffError(f"{file} lists no op times; make it with {made_by}")
    for op in ops:
        counts = type(op["calls"]) is int and op["calls"] >= 1
        times = all(type(op[key]) in (int, float) and 0 <= op[key] < MOST_S for key in ("mean_s", "total_s"))
        if not (isinstance(op["name"], str) and counts and times):
            raise CastoffError(f"{file}: the times of op {op['name']!r} are no numbers of calls and seconds")
    report: dict[str, Any] = values
    return report


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
        "mode": comparison.mode,
        "not_run": list(comparison.not_run),
        "predicted_s": comparison.predicted_s,
        "measured_s": comparison.measured_s,
        "ratio": comparison.ratio,
    }


def compare_table(comparison: Comparison) -> list[RenderableType]:
    """The comparison as a table and, where the cast has more, a line about that."""
    from rich.table import Table

    table = Table(
        "op",
        "calls",
        "cast µs",
        "run µs",
        "cast / run",
        title=f"Per call, in {comparison.mode} passes",
        title_justify="left",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for op in comparison.ops:
        predicted = "" if op.predicted_s is None else microseconds(op.predicted_s)
        ratio = "" if op.ratio is None else f"{op.ratio:.3g}"
        table.add_row(op.name, count(op.calls), predicted, microseconds(op.measured_s), ratio)
    table.add_row(
        "both, total ms", "", milliseconds(comparison.predicted_s), milliseconds(comparison.measured_s),
        "" if comparison.ratio is None else f"{comparison.ratio:.3g}", end_section=True,
    )  # fmt: skip
    only = ", ".join(comparison.not_run)
    hint = "; a cast with --backend castoff and the run's number formats has the ops of a run"
    missing = [f"Only in the cast: {only}{hint}"] if comparison.not_run else []
    return [table, *missing]
