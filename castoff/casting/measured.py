"""Measured op times from a CSV file, and how much of a step they cover."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path

from castoff.casting.prediction import Prediction
from castoff.casting.price import CallKey, Measured, call_key, is_measurable
from castoff.errors import CastoffError

MOST_SECONDS = 1e6
COLUMNS = ("name", "shapes", "dtypes", "seconds")


def load_measured(path: Path) -> Measured:
    """Op times from a CSV file with the columns name, shapes, dtypes, seconds; other columns are ignored.

    shapes, dtypes: of the inputs, as `castoff shapes` writes them, spaces aside. Raises CastoffError with file and line
    for a missing column, a time that is not a positive number, an op measured twice.
    """
    seconds: dict[CallKey, float] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise CastoffError(
                    f"{path}: column {', '.join(missing)} is missing; the first line must name {', '.join(COLUMNS)}"
                )
            for row in reader:
                key = (_cell(row["name"]), normal_list(_cell(row["shapes"])), normal_list(_cell(row["dtypes"])))
                where = f"{path}, line {reader.line_num}"
                if key in seconds:
                    raise CastoffError(f"{where}: {key[0]} with shapes {key[1]} of {key[2]} is measured twice")
                seconds[key] = _seconds(_cell(row["seconds"]), where)
    except OSError as error:
        raise CastoffError(f"cannot read --profiling-database {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CastoffError(f"{path} is not a CSV file: it is not UTF-8 text") from None
    except csv.Error as error:
        raise CastoffError(f"{path} is not a CSV file: {error}") from None
    return Measured(seconds)


def normal_list(text: str) -> str:
    """Shapes with the spaces of `shapes_text`: `[4096,6144],[6144]` becomes `[4096, 6144], [6144]`."""
    return re.sub(r"\s*,\s*", ", ", text.strip()).replace("[ ", "[").replace(" ]", "]")


def _cell(value: str | None) -> str:
    # DictReader gives None for a cell that a short line lacks.
    return (value or "").strip()


def _seconds(text: str, where: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST_SECONDS:
        raise CastoffError(f"{where}: seconds must be greater than 0 and at most {MOST_SECONDS:g}, got {text!r}")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much of a step was measured: distinct (op, input shapes), calls, and seconds of ops."""

    shapes: int
    measured_shapes: int
    calls: int
    measured_calls: int
    op_s: float
    measured_s: float


def coverage(prediction: Prediction, measured: Measured) -> Coverage:
    """Coverage of a prediction that was made with `measured`."""
    seen: set[CallKey] = set()
    hit: set[CallKey] = set()
    calls = measured_calls = 0
    op_s = measured_s = 0.0
    for entry in prediction.cast.program.schedule:
        for call, price in zip(entry.block.calls, prediction.cast.prices[entry.block], strict=True):
            key = call_key(call)
            is_measured = key in measured.seconds and is_measurable(call)
            seen.add(key)
            calls, op_s = calls + 1, op_s + float(price.seconds)
            if is_measured:
                hit.add(key)
                measured_calls, measured_s = measured_calls + 1, measured_s + float(price.seconds)
    return Coverage(
        shapes=len(seen),
        measured_shapes=len(hit),
        calls=calls,
        measured_calls=measured_calls,
        op_s=op_s,
        measured_s=measured_s,
    )


def require_hits(found: Coverage, path: Path) -> None:
    """Raise CastoffError where a database covers nothing of a step."""
    if not found.measured_shapes:
        raise CastoffError(
            f"--profiling-database {path} covers 0 of the {found.shapes} op shapes of this step, so nothing would be "
            "measured; `castoff shapes` lists the names, shapes and dtypes that are needed"
        )
