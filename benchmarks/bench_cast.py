"""How long casting takes: the published command from start to exit, 100,000 scenarios in one sweep, one cast; the
same with KV offload.

    python benchmarks/bench_cast.py --runs 10

Appends one row per benchmark to benchmarks/cast.csv. Run it on an idle machine; everything is pinned to one core.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rows import append_rows, flags, made_on_one_core, one_core

from castoff import ClosedLoop, cast, serve, sweep
from castoff.casting.sweep import SweepResult
from castoff.serving.serve import as_served
from castoff.spec.device import load_device
from castoff.spec.model import load_model
from castoff.spec.offload import Offload
from castoff.spec.scenario import Compilation, Mtp, Parallel, Quant, Scenario, Workload

REPOSITORY = Path(__file__).resolve().parent.parent
COLUMNS = (
    "date", "machine", "python", "numpy", "castoff", "benchmark", "configuration", "runs", "median_s", "min_s", "max_s",
)  # fmt: skip

MODEL = "zai-org/GLM-5.2"
DEVICE = "ATLAS_800_A3_752T_128G_DIE"
# The command that the published GLM-5 design of TensorCast gives.
PUBLISHED_COMMAND = (
    f"cast {MODEL} --device {DEVICE} --num-devices 16 --tp-size 16 --dp-size 1 --ep-size 16 "
    "--context-length 61000 --query-length 4096 --num-queries 1 --num-mtp-tokens 3 --compile "
    "--quantize-linear-action W4A8_STATIC --dump-input-shapes"
)
PUBLISHED_SCENARIO = Scenario(
    workload=Workload(num_queries=1, query_length=4096, context_length=61_000),
    parallel=Parallel(num_devices=16, tp_size=16, dp_size=1, ep_size=16),
    quant=Quant(quantize_linear_action="W4A8_STATIC"),
    mtp=Mtp(num_mtp_tokens=3),
    compilation=Compilation(compile=True),
)

# The published offload evaluation.
OFFLOAD_COMMAND = (
    f"cast {MODEL} --device {DEVICE} --backend cann-ge --num-devices 32 --dp-size 32 --ep-size 32 --lmhead-tp-size 32 "
    "--word-embedding-tp row --word-embedding-tp-size 32 --quantize-indexer-action INT8 --num-mtp-tokens 3 --compile "
    "--decode --context-length 65536 --num-queries 128 --offload serve_install --pool-tokens 8192 --hit-rate 0.85"
)
OFFLOAD_SCENARIO = Scenario(
    workload=Workload(num_queries=128, context_length=65_536, decode=True),
    parallel=Parallel(num_devices=32, dp_size=32, ep_size=32),
    mtp=Mtp(num_mtp_tokens=3),
    compilation=Compilation(compile=True),
    offload=Offload(offload="direct"),
)
POOLS = np.arange(1, 17) * 2048
HIT_RATES = np.linspace(0.5, 1, 25)

TP_SIZES = [1, 2, 4, 8, 16]
EP_SIZES = [1, 8, 16, 32]
MTP_TOKENS = [0, 3]
BATCHES = np.arange(1, 51) * 8
CONTEXTS = np.arange(1, 51) * 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Something to time. `run` raises where it did not do what it should."""

    name: str
    configuration: str
    run: Callable[[], object]


def command(arguments: str) -> Callable[[], object]:
    """A whole process, from start to exit."""
    start = [sys.executable, "-c", "import sys; from castoff.cli import main; sys.exit(main(sys.argv[1:]))"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}

    def run() -> object:
        return subprocess.run(
            [*start, *arguments.split()],
            env=environment,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    return run


def sweep_once() -> SweepResult:
    """100,000 decode steps: 40 structures, 50 batches and 50 contexts each."""
    return sweep(
        MODEL,
        DEVICE,
        Scenario(compilation=Compilation(compile=True)),
        num_devices=32,
        tp_size=TP_SIZES,
        ep_size=EP_SIZES,
        num_mtp_tokens=MTP_TOKENS,
        num_queries=BATCHES[:, None],
        context_length=CONTEXTS,
    )


def check_sweep() -> int:
    """The number of scenarios; all of them must be answered, or the time means nothing."""
    result = sweep_once()
    assert result.latency_s.shape == (40, 50, 50)
    assert result.reasons == (None,) * 40
    assert np.isfinite(result.latency_s).all()
    return result.latency_s.size


def sweep_offload() -> SweepResult:
    """120,000 decode steps with offload: 6 structures, 16 pools, 25 hit rates and 50 batches each."""
    return sweep(
        MODEL,
        DEVICE,
        OFFLOAD_SCENARIO,
        offload=["serve_install", "direct"],
        num_mtp_tokens=[1, 2, 3],
        pool_tokens=POOLS[:, None, None],
        hit_rate=HIT_RATES[:, None],
        num_queries=BATCHES,
    )


def sweep_fitted(backend: str) -> SweepResult:
    """40,000 decode steps on H200: 16 structures, 50 batches and 50 contexts each, with or without fitted kernels."""
    return sweep(
        f"{MODEL}-FP8",
        "h200_sxm",
        Scenario(quant=Quant(quantize_linear_action="FP8"), compilation=Compilation(compile=True), backend=backend),
        num_devices=8,
        tp_size=[1, 2, 4, 8],
        ep_size=[1, 8],
        num_mtp_tokens=MTP_TOKENS,
        num_queries=BATCHES[:, None],
        context_length=CONTEXTS,
    )


def serve_point() -> None:
    """The point of most events among those measured: 640 requests, a closed loop of 64, outputs of 8K."""
    model, device = load_model("zai-org/GLM-5-FP8"), load_device("h200_sxm")
    scenario = as_served("sglang", device, model, Parallel(num_devices=8, tp_size=8))
    result = serve(model, device, scenario, workload=ClosedLoop(concurrency=64, prompt_tokens=1024, output_tokens=8192))
    assert result.summary.capacity_bound


def benchmarks() -> Iterator[Benchmark]:
    """All of them. A first, untimed run of each fills the caches of the file system."""
    yield Benchmark(name="command", configuration=f"castoff {PUBLISHED_COMMAND}", run=command(PUBLISHED_COMMAND))
    yield Benchmark(name="help", configuration="castoff --help", run=command("--help"))
    scenarios = check_sweep()
    structures = f"tp {TP_SIZES} x ep {EP_SIZES} x mtp {MTP_TOKENS} on 32 devices, decode, compile"
    yield Benchmark(
        name="sweep",
        configuration=f"{scenarios} scenarios of {MODEL}: {structures}; 50 batches x 50 contexts",
        run=sweep_once,
    )
    for backend in ("nvidia", "sglang"):
        fitted = sweep_fitted(backend)
        assert fitted.reasons == (None,) * 16
        yield Benchmark(
            name=f"sweep {backend}",
            configuration=f"{fitted.latency_s.size} scenarios of {MODEL}-FP8 on h200_sxm: tp [1, 2, 4, 8] x ep [1, 8] "
            "x mtp [0, 3] on 8 devices, decode, compile; 50 batches x 50 contexts",
            run=lambda backend=backend: sweep_fitted(backend),  # type: ignore[misc]
        )
    yield Benchmark(
        name="serve",
        configuration="640 requests of 1K/8K, 64 at a time, GLM-5-FP8 on 8 h200_sxm, tables and simulation, in process",
        run=serve_point,
    )
    model, device = load_model(MODEL), load_device(DEVICE)
    yield Benchmark(
        name="cast",
        configuration="the scenario of the command, in process",
        run=lambda: cast(model, device, PUBLISHED_SCENARIO),
    )
    yield Benchmark(name="offload command", configuration=f"castoff {OFFLOAD_COMMAND}", run=command(OFFLOAD_COMMAND))
    swept = sweep_offload()
    assert swept.reasons == (None,) * 6
    yield Benchmark(
        name="offload sweep",
        configuration=f"{swept.latency_s.size} scenarios of {MODEL}: 2 modes x mtp [1, 2, 3] on 32 devices, decode, "
        "compile; 16 pools x 25 hit rates x 50 batches",
        run=sweep_offload,
    )
    yield Benchmark(
        name="offload cast",
        configuration="128 requests of 64K with mode direct on 32 devices, in process",
        run=lambda: cast(model, device, OFFLOAD_SCENARIO),
    )


def measure(benchmark: Benchmark, runs: int) -> list[float]:
    """Seconds of each run."""
    benchmark.run()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        benchmark.run()
        seconds.append(time.perf_counter() - start)
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything, print it, append it to the file."""
    arguments = flags(argv, description=__doc__, runs=10, file="cast.csv")
    common = made_on_one_core("numpy") | {"runs": arguments.runs}
    rows: list[dict[str, object]] = []
    with one_core():
        for benchmark in benchmarks():
            seconds = measure(benchmark, arguments.runs)
            figures = {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
            rows.append(
                {
                    **common,
                    "benchmark": benchmark.name,
                    "configuration": benchmark.configuration,
                    **{name: f"{value:.4f}" for name, value in figures.items()},
                }
            )
            print(f"{benchmark.name:8} {figures['median_s']:.3f} s (median of {arguments.runs})", flush=True)
    append_rows(arguments.output, COLUMNS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
