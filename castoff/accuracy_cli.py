"""Commands on accuracy: how far predictions are from measured times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, cast, get_args

from cyclopts import App, Group, Parameter
from rich.table import Table

from castoff.accuracy import calibrate as fitting
from castoff.accuracy.e2e import e2e_accuracy
from castoff.accuracy.fit_file import fits_toml
from castoff.accuracy.machine_files import backend_toml, device_toml
from castoff.accuracy.ops import ops_accuracy
from castoff.accuracy.this_machine import FEW_LAYERS, DeviceKind, DType, MachineGrid, MachineOptions, calibrate_machine
from castoff.errors import CastoffError
from castoff.flags import Choice, JsonTarget
from castoff.report.accuracy_text import accuracy_tables, calibration_table, machine_table
from castoff.report.e2e_text import e2e_tables
from castoff.report.output import check_outputs, make_directory, print_text, render, write_file, write_json
from castoff.report.progress import progress_bar, progress_line
from castoff.spec.quant import LinearAction


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


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
    check_outputs({"--json": _file(json)})
    with progress_bar(f"{tables}: tables") as progress:
        result = ops_accuracy(tables, backend=backend, progress=progress)
    _report(json, result, *accuracy_tables(result))


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
    check_outputs({"--json": _file(json)})
    with progress_bar(f"{file}: points") as progress:
        result = e2e_accuracy(file, backend=backend, progress=progress)
    _report(json, result, *e2e_tables(result))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFlags:
    """What --this-machine measures; None takes the default."""

    model: Annotated[
        str | None,
        Parameter(
            help="Whose ops are measured, with random weights: a known id, a directory with a config.json, or a .json "
            f"file; {MachineOptions().model} by default. Experts are left out where they take too much memory."
        ),
    ] = None
    num_hidden_layers_override: Annotated[
        int | None, Parameter(help=f"Keep only the first layers of the model; up to {FEW_LAYERS} by default.")
    ] = None
    dtype: Annotated[
        DType | None, Parameter(help="Of weights, caches and activations; bfloat16 by default, as in `castoff run`.")
    ] = None
    quantize_linear_action: Annotated[
        LinearAction | None, Parameter(help="Format of the linear layers, experts included; DISABLED by default.")
    ] = None
    batch: Annotated[Choice, Parameter(help=f"Requests of a step; {_listed(MachineGrid().batches)} by default.")] = None
    length: Annotated[
        Choice, Parameter(help=f"Tokens that each has in the cache; {_listed(MachineGrid().contexts)} by default.")
    ] = None
    rounds: Annotated[
        int | None, Parameter(help=f"Times that every step is visited; {MachineGrid().rounds} by default.")
    ] = None

    @property
    def options(self) -> MachineOptions:
        """Model and number formats."""
        given = {
            "model": self.model,
            "num_hidden_layers": self.num_hidden_layers_override,
            "dtype": self.dtype,
            "quantize_linear_action": self.quantize_linear_action,
        }
        return MachineOptions(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    @property
    def grid(self) -> MachineGrid:
        """What is measured; raises CastoffError for a batch, length or number of rounds that cannot be."""
        given = {"batches": self.batch, "contexts": self.length, "rounds": self.rounds}
        return MachineGrid(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


MachineGroup = Annotated[MachineFlags, Parameter(name="*", group=Group("This machine", sort_key=1))]


def calibrate(
    *,
    tables: Annotated[
        Path | None,
        Parameter(metavar="DIR", help="Measured tables, at data/SYSTEM/FAMILY/BACKEND/VERSION/NAME_perf.parquet."),
    ] = None,
    this_machine: Annotated[
        bool, Parameter(negative=(), help="Measure the ops of `castoff run` here instead (needs the `run` extra).")
    ] = False,
    device: Annotated[
        str | None,
        Parameter(
            help="With --tables, the device to fit on, as the tables and `castoff devices` call it; with "
            "--this-machine, cpu (the default) or cuda."
        ),
    ] = None,
    backend: Annotated[
        str | None, Parameter(help="With --tables, the stack to fit, as the tables and castoff call it.")
    ] = None,
    output: Annotated[
        Path,
        Parameter(
            name=["--output", "-o"],
            metavar="PATH",
            help="With --tables, the backend file to write; with --this-machine, a directory for device.toml and "
            "backend.toml.",
        ),
    ],
    machine: MachineGroup | None = None,
    json: JsonTarget = None,
) -> None:
    """Fit a backend's kernels to measured tables, or the ops of `castoff run` to this machine: files for casts."""
    if this_machine == (tables is not None):
        raise CastoffError("give either --tables DIR, which fits a stack to its tables, or --this-machine")
    if tables is None:
        _calibrate_machine(device, backend, output, machine or MachineFlags(), json)
        return
    if machine is not None and machine != MachineFlags():
        names = [item.name for item in fields(MachineFlags) if getattr(machine, item.name) is not None]
        raise CastoffError(f"--{names[0].replace('_', '-')} is for --this-machine; leave it out with --tables")
    if device is None or backend is None:
        raise CastoffError("--tables needs --device and --backend: of which stack, on what, the tables are")
    _calibrate_tables(tables, device, backend, output, json)


def _calibrate_tables(tables: Path, device: str, backend: str, output: Path, json: str | None) -> None:
    check_outputs({"--output": output, "--json": _file(json)})
    with progress_bar(f"{tables}: fits") as progress:
        result = fitting.calibrate(tables, device=device, backend=backend, progress=progress)
    write_file(output, fits_toml(result))
    _report(json, result.stages, calibration_table(result))
    if json != "-":
        print_text(f"\nwritten: {output}\ncastoff cast MODEL --device {device} --backend {output}\n")


def _calibrate_machine(
    device: str | None, backend: str | None, output: Path, machine: MachineFlags, json: str | None
) -> None:
    if backend is not None:
        raise CastoffError("--backend is for --tables; --this-machine measures `castoff run`, whose backend is castoff")
    if device is not None and device not in get_args(DeviceKind):
        raise CastoffError(f"--device must be cpu or cuda with --this-machine, got {device!r}")
    files = {name: output / f"{name}.toml" for name in ("device", "backend")}
    # A directory that is still to be made is written like a file.
    targets = {f"--output ({name})": file for name, file in files.items()} if output.is_dir() else {"--output": output}
    if output.exists() and not output.is_dir():
        raise CastoffError(f"--output {output}: is a file; name a directory")
    check_outputs({**targets, "--json": _file(json)})
    options = machine.options if device is None else replace(machine.options, device=cast(DeviceKind, device))
    with progress_line() as note:
        result = calibrate_machine(
            options,
            machine.grid,
            progress=lambda done, whole: note(f"decode steps: {done} of {whole} measurements"),
            note=note,
        )
    make_directory(output)
    write_file(files["device"], device_toml(result))
    write_file(files["backend"], backend_toml(result))
    _report(json, result.ops, machine_table(result))
    if json != "-":
        print_text(
            f"\nwritten: {files['device']}, {files['backend']}\n"
            f"castoff cast MODEL --device {files['device']} --backend {files['backend']} "
            f"--quantize-linear-action {options.quantize_linear_action} --num-queries N --context-length L\n"
        )


def _report(json: str | None, value: object, *tables: Table) -> None:
    """JSON to where --json says; the tables, unless standard output has the JSON."""
    if json:
        write_json(json, value)
    if json != "-":
        print_text(render(*tables))


def _file(json: str | None) -> Path | None:
    return None if json in (None, "-") else Path(str(json))


accuracy = App(name="accuracy", help="Say how far predictions are from measured times.", help_format="plaintext")
accuracy.command(accuracy_ops, name="ops")
accuracy.command(accuracy_e2e, name="e2e")
