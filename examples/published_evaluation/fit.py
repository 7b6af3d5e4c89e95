"""Fit the backend cann-ge on published decode steps without offload, and say how well each constant is known.

    python examples/published_evaluation/fit.py

points.csv holds the steps. Every prediction is castoff's own, of a backend file with other figures; four constants are
fitted by least squares on the logarithms of the step times.
"""

from __future__ import annotations

import csv
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

import castoff
from castoff.spec.offload import Offload, OffloadMode
from castoff.spec.scenario import Compilation, Mtp, Parallel, Quant, Scenario, Workload

HERE = Path(__file__).resolve().parent
BACKENDS = Path(castoff.__file__).resolve().parent / "data" / "backends"
DEVICE = "ATLAS_800_A3_752T_128G_DIE"
VECTOR = ("norm", "elementwise", "moe_routing", "embedding", "sampling")

Constants = Mapping[str, float]
START: Constants = {"launch": 1.0, "memory": 0.6, "gather": 0.1, "indexer": 0.2}


@dataclass(frozen=True, slots=True)
class Point:
    """One published step. tokens_per_s: of the whole deployment, as observed; None where that is not published."""

    name: str
    model: str
    num_devices: int
    global_batch: int
    context_tokens: int
    graph: str
    offload: OffloadMode
    pool_tokens: int | None
    step_s: float
    tokens_per_s: float | None


def read_points(path: Path = HERE / "points.csv") -> list[Point]:
    """The published steps."""
    with path.open(newline="") as file:
        return [
            Point(
                row["point"], row["model"], int(row["num_devices"]), int(row["global_batch"]),
                int(row["context_tokens"]), row["graph"], cast(OffloadMode, row["offload"]),
                int(row["pool_tokens"]) if row["pool_tokens"] else None, float(row["step_ms"]) / 1e3,
                float(row["observed_tokens_per_s"]) if row["observed_tokens_per_s"] else None,
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def scenario(point: Point, backend: str) -> Scenario:
    """The deployment of a point: attention DP and EP over all dies, MTP with three draft tokens."""
    dies = point.num_devices
    sizes: dict[str, int] = {"num_devices": dies, "dp_size": dies, "ep_size": dies}
    if "GLM" in point.model:
        # W8A8C16: INT8 index keys beside bf16 rows.
        quant = Quant(quantize_indexer_action="INT8")
        sizes |= {"lmhead_tp_size": 32, "word_embedding_tp_size": 32}
    else:
        # W8A8C8, with o_proj and the dense MLPs over four dies.
        quant = Quant(quantize_attention_action="INT8")
        sizes |= {"o_proj_tp_size": 4, "mlp_tp_size": 4, "lmhead_tp_size": 16, "word_embedding_tp_size": 16}
    return Scenario(
        workload=Workload(num_queries=point.global_batch, context_length=point.context_tokens, decode=True),
        parallel=Parallel(word_embedding_tp="row", **sizes),  # type: ignore[arg-type]
        quant=quant,
        mtp=Mtp(num_mtp_tokens=3),
        compilation=Compilation(compile=True),
        offload=Offload(offload=point.offload, pool_tokens=point.pool_tokens),
        backend=backend,
    )


def step_s(point: Point, backend: str) -> float:
    """Predicted seconds of a point's step with a shipped backend or a backend file."""
    return float(castoff.sweep(point.model, DEVICE, scenario(point, backend)).latency_s[0])


def with_figure(text: str, section: str, key: str, value: float) -> str:
    """A backend file's text with one figure changed."""
    pattern = rf"(^\[{re.escape(section)}\]\n(?:(?!\[).*\n)*?{key} = )[^\s#]+"
    changed, count = re.subn(pattern, rf"\g<1>{value!r}", text, flags=re.MULTILINE)
    assert count == 1, f"[{section}] has one {key}"
    return changed


def with_constants(text: str, constants: Constants) -> str:
    """A backend file's text with the fitted constants: `launch` in units of TensorCast's static costs."""
    launch = constants["launch"]
    figures = {
        ("collectives", "launch_s"): 10e-6 * launch,
        ("curves.default", "launch_s"): 5e-6 * launch,
        ("curves.default", "memory_efficiency"): constants["memory"],
        ("curves.default", "gather_efficiency"): constants["memory"],
        ("curves.sparse_attention_decode", "gather_efficiency"): constants["gather"],
        **{("curves.indexer", f"{unit}_efficiency"): constants["indexer"] for unit in ("compute", "vector", "memory")},
        **{(f"curves.{family}", "launch_s"): 2e-6 * launch for family in VECTOR},
    }
    for (section, key), value in figures.items():
        text = with_figure(text, section, key, value)
    return text


def predicted_s(points: list[Point], constants: Constants) -> npt.NDArray[np.float64]:
    """Predicted steps with other constants than the shipped ones."""
    text = (BACKENDS / "cann-ge.toml").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "backend.toml"
        file.write_text(with_constants(text, constants), encoding="utf-8")
        return np.array([step_s(point, str(file)) for point in points])


def fit(
    points: list[Point], start: Constants = START, rounds: int = 12
) -> tuple[dict[str, float], npt.NDArray[np.float64]]:
    """Constants by Gauss-Newton on logarithms, and their relative standard deviations."""
    constants, measured = dict(start), np.array([point.step_s for point in points])
    names = list(constants)
    for _ in range(rounds):
        steps = predicted_s(points, constants)
        residual = np.log(measured / steps)
        slopes = np.empty((len(points), len(names)))
        for column, name in enumerate(names):
            more = {**constants, name: constants[name] * 1.02}
            slopes[:, column] = np.log(predicted_s(points, more) / steps) / np.log(1.02)
        change = np.clip(np.linalg.lstsq(slopes, residual, rcond=None)[0], -0.5, 0.5)
        constants = {name: value * float(np.exp(c)) for (name, value), c in zip(constants.items(), change, strict=True)}
        if np.abs(change).max() < 1e-3:
            break
    variance = float(residual @ residual) / max(1, len(points) - len(names))
    return constants, np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)) * variance)


def main() -> None:
    """Fit, leave each point out in turn, and compare what is shipped."""
    every = [point for point in read_points() if point.offload == "none"]
    points = [point for point in every if point.graph == "cann-ge"]
    constants, spread = fit(points)
    print("fitted on all points, with the standard deviation of each")
    for (name, value), share in zip(constants.items(), spread, strict=True):
        print(f"  {name:8} {value:.3f}  ±{share:.0%}")
    print("point             measured   shipped   error   predicted from the other points")
    for point in every:
        shipped = step_s(point, point.graph)
        line = f"  {point.name:16} {point.step_s * 1e3:7.2f}   {shipped * 1e3:7.2f}  {shipped / point.step_s - 1:+6.1%}"
        if point in points:
            others = fit([other for other in points if other != point], constants)[0]
            left_out = float(predicted_s([point], others)[0])
            line += f"   {left_out * 1e3:7.2f}  {left_out / point.step_s - 1:+6.1%}"
        print(line)


if __name__ == "__main__":
    main()
