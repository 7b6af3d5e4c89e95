"""The command line: one function per command, which loads, calls and renders."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from castoff import __version__, api
from castoff.casting.measured import coverage, load_measured, require_hits
from castoff.casting.summary import op_summaries
from castoff.config_file import add_from_file, shipped_runs
from castoff.errors import CastoffError, CastoffWarning
from castoff.flags import (
    DeviceName,
    DocumentedFormatter,
    Grid,
    JsonTarget,
    Model,
    OffloadGroup,
    OutputFlags,
    OutputGroup,
    RunGroup,
    RunParallelGroup,
    StepFlags,
    StepGroup,
    Structure,
    StructureGroup,
    WorkloadFlags,
    WorkloadGroup,
    check_tokens,
    normalize,
    sentence,
)
from castoff.report import catalogue
from castoff.report import compare as comparing
from castoff.report.chrome_trace import chrome_trace
from castoff.report.output import check_outputs, console, print_note, print_text, render, write_file, write_json
from castoff.report.plain import json_text
from castoff.report.prediction_json import prediction_json
from castoff.report.progress import progress_line
from castoff.report.run_text import convert_text, run_text
from castoff.report.shapes_csv import shapes_csv
from castoff.report.step import step_report
from castoff.report.tables import step_tables
from castoff.runtime import convert as converting
from castoff.runtime import generate
from castoff.runtime.options import RunOptions
from castoff.spec.backend import Backend, backend_fits, load_backend, shipped_backends
from castoff.spec.device import Device, load_device, shipped_devices
from castoff.spec.model import ModelSpec, load_model, shipped_models
from castoff.spec.quant import LinearAction
from castoff.spec.scenario import Workload
from castoff.spec.toml_file import read_toml

# The device that the GLM-5 design is written for. Shapes depend on a device only through what it cannot do.
SHAPES_DEVICE = "ATLAS_800_A3_752T_128G_DIE"
log = logging.getLogger("castoff")


def cast(
    model: Model,
    /,
    *,
    device: DeviceName,
    workload: WorkloadGroup | None = None,
    structure: StructureGroup | None = None,
    step: StepGroup | None = None,
    output: OutputGroup | None = None,
) -> None:
    """Predict one step of a model on a device: how long it takes, where the time and the memory go, whether it fits."""
    workload, structure = workload or WorkloadFlags(), structure or Structure()
    step, output = step or StepFlags(), output or OutputFlags()
    json_file = None if output.json in (None, "-") else Path(output.json)
    check_outputs({"--json": json_file, "--chrome-trace-file": output.chrome_trace_file})
    scenario = step.priced(structure.scenario(workload.workload))
    measured = load_measured(step.profiling_database) if step.profiling_database else None
    with logging_to_stderr(output.log_level), collected_notes() as notes:
        spec = load_model(model, num_hidden_layers=structure.num_hidden_layers_override)
        started_s = time.perf_counter()
        prediction = api.cast(spec, device, scenario, measured=measured)
        log.info("cast in %.1f ms", 1e3 * (time.perf_counter() - started_s))
        found = coverage(prediction, measured) if measured else None
        if found and step.profiling_database:
            require_hits(found, step.profiling_database)
    report = step_report(prediction, coverage=found, notes=notes)
    if output.chrome_trace_file:
        write_file(output.chrome_trace_file, json_text(chrome_trace(prediction), indent=None))
    if output.json:
        write_json(output.json, prediction_json(report))
    if output.json != "-":
        ops = op_summaries(prediction, by_shapes=True) if output.dump_input_shapes else report.ops
        bounds = output.dump_op_bound_results
        print_text(render(*step_tables(report, ops, with_shapes=output.dump_input_shapes, with_bounds=bounds)))


def run(
    model: Annotated[
        str, Parameter(help="A directory with a config.json and weights, or with --random-weights any known model.")
    ],
    /,
    *,
    config: Annotated[
        Path | None,
        Parameter(
            metavar="FILE",
            help="YAML file of these flags, with underscores; those given here win. castoff has "
            + ", ".join(shipped_runs()),
        ),
    ] = None,
    options: RunGroup | None = None,
    parallel: RunParallelGroup | None = None,
    offload: OffloadGroup | None = None,
    num_hidden_layers_override: Annotated[
        int | None, Parameter(help="Keep only the first layers of the model.")
    ] = None,
    json: JsonTarget = None,
) -> None:
    """Generate tokens with a model for real: the forward pass that `cast` prices, on torch tensors.

    With several processes, torchrun --nproc-per-node N -m castoff run MODEL.
    """
    options = options or RunOptions()
    targets = {"--profile": options.profile, "--record": options.record}
    check_outputs({"--json": None if json in (None, "-") else Path(str(json)), **targets})
    with progress_line() as progress:
        report = generate.run(
            model,
            options,
            parallel,
            offload,
            num_hidden_layers=num_hidden_layers_override,
            op_times=json is not None,
            progress=progress,
        )
    if report.rank:
        return
    if options.profile and report.trace is not None:
        write_file(options.profile, report.trace)
    if json:
        write_json(json, report.as_json())
    if json != "-":
        print_text(run_text(report))


def convert(
    model: Annotated[str, Parameter(help="A directory with a config.json and weights.")],
    /,
    *,
    quantize_linear_action: Annotated[LinearAction, Parameter(help="Format to write: W8A8_DYNAMIC or FP8.")],
    output: Annotated[
        Path, Parameter(alias="-o", metavar="DIR", help="A new directory, or that of a begun conversion.")
    ],
) -> None:
    """Write a checkpoint anew with its linear layers quantised; an interrupted conversion goes on where it stopped."""
    with progress_line() as progress:
        report = converting.convert(model, quantize_linear_action, output, progress=progress)
    print_text(convert_text(report))


def compare(
    cast_json: Annotated[Path, Parameter(help="What `castoff cast --json` wrote.")],
    run_json: Annotated[Path, Parameter(help="What `castoff run --json` wrote.")],
    /,
    *,
    json: JsonTarget = None,
) -> None:
    """Lay a cast beside a run: predicted and measured time of every op, and in total."""
    comparison = comparing.compare(cast_json, run_json)
    if json:
        write_json(json, comparing.comparison_json(comparison))
    if json != "-":
        print_text(render(*comparing.compare_table(comparison)))


def models(*, json: JsonTarget = None) -> None:
    """List the models whose configs ship with castoff."""
    rows = [catalogue.model_row(load_model(name)) for name in shipped_models()]
    if json:
        write_json(json, rows)
    else:
        print_text(render(catalogue.models_table(rows)))


def devices(*, json: JsonTarget = None) -> None:
    """List the devices that castoff knows."""
    known = [load_device(name) for name in shipped_devices()]
    if json:
        write_json(json, [catalogue.device_row(device) for device in known])
    else:
        print_text(render(catalogue.devices_table(known)))


def show(
    name: Annotated[str, Parameter(help="A model, a device or a backend: a known name or a file.")],
    /,
    *,
    json: JsonTarget = None,
) -> None:
    """Show one model, or one device or backend with the source of every figure."""
    found: ModelSpec | Device | Backend
    if name in shipped_backends() or (name.endswith(".toml") and _is_backend(Path(name))):
        found = load_backend(name)
        details = catalogue.backend_details(found, backend_fits(name))
    elif name in shipped_devices() or name.endswith(".toml"):
        found = load_device(name)
        details = catalogue.device_details(found)
    else:
        if not Path(name).exists():
            catalogue.require_known(name)
        found = load_model(name)
        details = catalogue.model_details(found)
    if json:
        write_json(json, found)
    else:
        print_text(render(*details))


def _is_backend(file: Path) -> bool:
    """A backend has curves, its own or another's."""
    return bool({"curves", "extends"} & read_toml(file).values.keys())


def shapes(
    model: Model,
    /,
    *,
    batch: Annotated[Grid, Parameter(help="Requests of the deployment.")] = (1, 8, 32),
    length: Annotated[Grid, Parameter(help="Tokens that each request has in the cache.")] = (4096, 65536),
    query_length: Annotated[
        int | None, Parameter(help="New tokens per request, for prefill; unset for decode.")
    ] = None,
    device: Annotated[str, Parameter(help="Refuses the formats that it cannot compute in.")] = SHAPES_DEVICE,
    structure: StructureGroup | None = None,
    output: Annotated[str | None, Parameter(alias="-o", metavar="FILE", help="Write to a file.")] = None,
) -> None:
    """Write the shapes of every op over a grid of batch and length, as CSV: what a kernel benchmark has to run."""
    target = None if output in (None, "-") else Path(output)
    check_outputs({"--output": target})
    structure = structure or Structure()
    spec = load_model(model, num_hidden_layers=structure.num_hidden_layers_override)
    scenario = structure.scenario(Workload(query_length=query_length))
    text = shapes_csv(spec, load_device(device), scenario, batch, length)
    if target is None:
        print_text(text)
    else:
        write_file(target, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0; 2 for a request that cannot be served; 130 after Ctrl-C."""
    # Started with a stream closed.
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        with ended_by_signals(), collected_notes():
            _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except CastoffError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            # Whoever read our output has gone; the interpreter would complain when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        print(f"error: {error.strerror or error}", file=sys.stderr)
        return 2
    except UnicodeEncodeError as error:
        print(f"error: a name holds characters that cannot be written: {error.reason}", file=sys.stderr)
        return 2
    return 0


def _run(argv: Sequence[str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        # A terminal without UTF-8 must not stop a report for its µ.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        command, bound, _ = _app(argv).parse_args(normalize(argv), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise CastoffError(sentence(error)) from None
    command(*bound.args, **bound.kwargs)


def _app(argv: Sequence[str]) -> App:
    asks_for_help = not argv or "--help" in argv or "-h" in argv or list(argv) in (["trace"], ["accuracy"])
    app = App(
        name="castoff",
        help="Predict steps of long-context sparse-attention LLMs on hardware that you need not have.",
        version=__version__,
        help_format="plaintext",
        config=(add_from_file, check_tokens),
        help_formatter=DocumentedFormatter(),
        # Making one takes longer than parsing.
        console=console(plain_width=120) if asks_for_help else None,
    )
    for place in ("trace_cli:trace", "trace_cli:replay", "accuracy_cli:accuracy", "accuracy_cli:calibrate"):
        # Help lists what commands do, for which it must have them; else they are imported when they are called.
        found = resolve_name(f"castoff.{place}") if asks_for_help else f"castoff.{place}"
        app.command(found, name=place.partition(":")[2])
    for command in (cast, run, convert, compare, models, devices, show, shapes):
        app.command(command)
    return app


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does, so that nothing half-written is left behind."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # What was set to be ignored, by nohup say, stays so; handlers can be set on the main thread alone.
    is_main = threading.current_thread() is threading.main_thread()
    mine = [name for name in names if is_main and signal.getsignal(getattr(signal, name)) == signal.SIG_DFL]
    for name in mine:
        signal.signal(getattr(signal, name), end)
    try:
        yield
    finally:
        for name in mine:
            signal.signal(getattr(signal, name), signal.SIG_DFL)


@contextmanager
def collected_notes() -> Iterator[list[str]]:
    """Castoff's warnings as they come up inside, printed as `note:` lines at the end; others pass through."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CastoffWarning)
        try:
            yield notes
        finally:
            notes += dict.fromkeys(str(item.message) for item in caught if issubclass(item.category, CastoffWarning))
            for note in notes:
                print_note(note)
    for item in caught:
        if not issubclass(item.category, CastoffWarning):
            warnings.warn_explicit(item.message, item.category, item.filename, item.lineno)


@contextmanager
def logging_to_stderr(level: str) -> Iterator[None]:
    """Log messages of castoff from `level` on to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(level.upper())
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
