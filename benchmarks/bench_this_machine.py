"""How well a cast predicts `castoff run` on this machine after `castoff calibrate --this-machine`.

    python benchmarks/bench_this_machine.py
    python benchmarks/bench_this_machine.py --dtype float32 --experts 8 --threads 2 --prompts 5000

GLM-5.2's dimensions cut to 4 layers and a few experts, decode steps of four configurations beside the grid that the
command measures by default: batch 1 and 4, context 1K and 8K. All are measured in turns, so that a busy machine slows
them alike; predictions come from the files that the command writes, by `castoff.cast`. Rows go to
benchmarks/this_machine.csv.

Prompts cost nothing here: caches are random, see castoff/accuracy/decode_steps.py. With --prompts N, configurations of
up to N prompt tokens are also carried out whole, by what `castoff run` calls, prompts included; they have rows of their
own. Their TPOT is that of the request that joins last, since the others wait for its prompt.

--clock cpu counts the processor time of the one thread that computes instead of the time that passes: about what would
pass on a machine without other work.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from rows import append_rows, machine

import castoff
from castoff import Quant, Scenario, Workload
from castoff.accuracy.decode_steps import Point, StepTimes, filled_engine, summarized, timed_steps, tpot_s
from castoff.accuracy.machine_files import backend_toml, device_toml
from castoff.accuracy.peaks import measure_peaks
from castoff.accuracy.this_machine import MachineGrid, MachineOptions, fitted, in_rounds, machine_setup
from castoff.runtime import generate
from castoff.runtime.options import RunOptions
from castoff.spec.model import raw_config

COLUMNS = (
    "date", "machine", "threads", "clock", "load_before", "load_after", "torch", "castoff", "dtype", "experts", "grid",
    "rounds", "which", "batch", "context", "predicted_s", "measured_s", "error", "origin",
)  # fmt: skip
LAYERS = 4
# What the command measures unless told otherwise: lengths of none of the configurations.
GRID = MachineGrid()
CHECKS = tuple(Point(batch, context) for batch in (1, 4) for context in (1024, 8192))
CHECKED_STEPS = 2
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--rounds", type=int, default=GRID.rounds)
    parser.add_argument("--prompts", type=int, default=0, metavar="N")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("this_machine.csv"))
    options = parser.parse_args()
    if options.clock == "cpu" and (options.threads > 1 or options.prompts):
        parser.error("--clock cpu is for one thread, and runs with --prompts have the time that passes")
    return options


def cut_model(folder: Path, experts: int) -> str:
    """A directory that `castoff cast` and `castoff run` take for a model."""
    values = raw_config("zai-org/GLM-5.2")
    cut = {"num_hidden_layers": LAYERS, "n_routed_experts": experts}
    lists = {key: values[key][:LAYERS] for key in ("indexer_types", "mlp_layer_types")}  # type: ignore[index]
    (folder / "config.json").write_text(json.dumps({**values, **cut, **lists}))
    return str(folder)


def measured(model: str, options: argparse.Namespace, folder: Path) -> dict[Point, float]:
    """Write the files of a calibration; the TPOT of the four configurations."""
    machine_options = MachineOptions(model=model, num_experts=options.experts, dtype=options.dtype)
    setup = machine_setup(machine_options)
    engine = filled_engine(setup, (*GRID.points, *CHECKS), dtype=options.dtype, device="cpu", progress=print)
    steps: dict[Point, list[StepTimes]] = {point: [] for point in GRID.points}
    checked: dict[Point, list[float]] = {point: [] for point in CHECKS}

    clock = CLOCKS[options.clock]

    def visit(point: Point) -> None:
        if point in checked:
            checked[point].append(tpot_s(engine, point, steps=CHECKED_STEPS, now_s=clock))
            print(point, f"TPOT {checked[point][-1]:.3f} s", flush=True)
        else:
            steps[point] += timed_steps(engine, point, steps=GRID.steps, now_s=clock)
            print(point, f"{steps[point][-1].seconds:.3f} s", flush=True)

    in_rounds((*GRID.points, *CHECKS), options.rounds, visit, lambda _, __: None)
    points = [summarized(setup, point, own) for point, own in steps.items()]
    result = fitted(machine_options, setup.model, points, measure_peaks("cpu"))
    (folder / "device.toml").write_text(device_toml(result))
    (folder / "backend.toml").write_text(backend_toml(result))
    return {point: statistics.median(values) for point, values in checked.items()}


def predicted(model: str, folder: Path, point: Point) -> castoff.Prediction:
    scenario = Scenario(
        workload=Workload(num_queries=point.batch, context_length=point.context),
        quant=Quant(quantize_linear_action="DISABLED"),
        backend=str(folder / "backend.toml"),
    )
    return castoff.cast(model, str(folder / "device.toml"), scenario)


def run_whole(model: str, options: argparse.Namespace, point: Point) -> float:
    """TPOT of the request that joins last in a run with prompts."""
    asked = RunOptions(
        random_prompts=f"{point.batch}x{point.context}", random_weights=0, max_new_tokens=6, ignore_eos=True,
        batch=point.batch, dtype=options.dtype,
    )  # fmt: skip
    # The weights of the steps before.
    gc.collect()
    last = generate.run(model, asked).results[-1]
    return (last.last_token_s - last.first_token_s) / (len(last.tokens) - 1)


def rows_of(which: str, model: str, folder: Path, measured_s: dict[Point, float]) -> Sequence[dict[str, object]]:
    rows = []
    for point, seconds in measured_s.items():
        prediction = predicted(model, folder, point)
        latency_s = prediction.latency_s
        rows.append(
            {
                "which": which,
                "batch": point.batch,
                "context": point.context,
                "predicted_s": f"{latency_s:.4f}",
                "measured_s": f"{seconds:.4f}",
                "error": f"{latency_s / seconds - 1:+.3f}",
                "origin": prediction.cast.origin,
            }
        )
    return rows


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = cut_model(folder, options.experts)
        rows = [*rows_of("steps", model, folder, measured(model, options, folder))]
        whole = [point for point in CHECKS if point.batch * point.context <= options.prompts]
        rows += rows_of("run", model, folder, {point: run_whole(model, options, point) for point in whole})
    same = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "threads": options.threads,
        "clock": options.clock,
        "load_before": f"{load_before:.1f}",
        "load_after": f"{os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "castoff": castoff.__version__,
        "dtype": options.dtype,
        "experts": options.experts,
        "grid": f"{GRID.batches} x {GRID.contexts}",
        "rounds": options.rounds,
    }
    append_rows(options.output, COLUMNS, [{**same, **row} for row in rows])
    for row in rows:
        print(*row.values())


if __name__ == "__main__":
    main()
