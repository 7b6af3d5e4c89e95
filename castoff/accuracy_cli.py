"""Commands on accuracy: how far predictions are from measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from castoff.accuracy import calibrate as fitting
from castoff.accuracy.e2e import e2e_accuracy
from castoff.accuracy.fit_file import fits_toml
from castoff.accuracy.ops import ops_accuracy
from castoff.flags import JsonTarget
from castoff.report.accuracy_text import accuracy_tables, calibration_table
from castoff.report.e2e_text import e2e_tables
from castoff.report.output import check_outputs, print_text, render, write_file, write_json
from castoff.report.progress import progress_bar


def accuracy_ops(
    *,
    tables: Annotated[
        Path,
        Parameter(metavar="DIR", help="Measured tables, at data/SYSTEM/FAMILY/BACKEND/VERSION/NAME_perf.parquet."),
    ],
    backend: Annotated[
        str | None,
        Parameter(
            help="What prices the rows: a known name or a file. By default the one named like the stack of each table."
        ),
    ] = None,
    json: JsonTarget = None,
) -> None:
    """Lay predicted beside measured op times, table by table, and beside the pure roofline."""
    check_outputs({"--json": None if json in (None, "-") else Path(str(json))})
    with progress_bar(f"{tables}: tables") as progress:
        result = ops_accuracy(tables, backend=backend, progress=progress)
    if json:
        write_json(json, result)
    if json != "-":
        print_text(render(*accuracy_tables(result)))


def accuracy_e2e(
    file: Annotated[
        Path,
        Parameter(
            metavar="FILE.csv", help="Measured points: TTFT and TPOT under load, or decode steps; by its columns."
        ),
    ],
    /,
    *,
    backend: Annotated[
        str | None, Parameter(help="What prices the rows: a known name or a file; that of each row by default.")
    ] = None,
    json: JsonTarget = None,
) -> None:
    """Lay predicted beside measured times of whole deployments, point by point."""
    check_outputs({"--json": None if json in (None, "-") else Path(str(json))})
    with progress_bar(f"{file}: points") as progress:
        result = e2e_accuracy(file, backend=backend, progress=progress)
    if json:
        write_json(json, result)
    if json != "-":
        print_text(render(*e2e_tables(result)))


def calibrate(
    *,
    tables: Annotated[
        Path,
        Parameter(metavar="DIR", help="Measured tables, at data/SYSTEM/FAMILY/BACKEND/VERSION/NAME_perf.parquet."),
    ],
    device: Annotated[str, Parameter(help="The device to fit on, as the tables and `castoff devices` call it.")],
    backend: Annotated[str, Parameter(help="The stack to fit, as the tables and castoff call it.")],
    output: Annotated[Path, Parameter(name=["--output", "-o"], metavar="FILE.toml", help="The backend file to write.")],
    json: JsonTarget = None,
) -> None:
    """Fit a backend's kernels to measured tables, and write them as a backend file for that device."""
    check_outputs({"--output": output, "--json": None if json in (None, "-") else Path(str(json))})
    with progress_bar(f"{tables}: fits") as progress:
        result = fitting.calibrate(tables, device=device, backend=backend, progress=progress)
    write_file(output, fits_toml(result))
    if json:
        write_json(json, result.stages)
    if json != "-":
        print_text(render(calibration_table(result)))


accuracy = App(name="accuracy", help="Say how far predictions are from measured times.", help_format="plaintext")
accuracy.command(accuracy_ops, name="ops")
accuracy.command(accuracy_e2e, name="e2e")
