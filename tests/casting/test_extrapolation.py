"""What is priced by fits, and the marks where sizes lie beyond them."""

import json
from pathlib import Path

import numpy as np
import pytest

import castoff
from castoff.casting.prediction import Prediction
from castoff.casting.summary import op_summaries
from castoff.spec.scenario import Parallel, Quant, Scenario, Workload
from tests.casting.fitted import BF16, fitted_backend
from tests.cli.commands import exit_status

FLAGS = ("--num-devices", "8", "--tp-size", "8", "--quantize-linear-action", "DISABLED")


def prediction(backend: str, queries: int = 4, context: int = 2000) -> Prediction:
    scenario = Scenario(
        backend=backend,
        workload=Workload(num_queries=queries, context_length=context, decode=True),
        parallel=Parallel(num_devices=8, tp_size=8),
        quant=Quant(quantize_linear_action="DISABLED"),
    )
    return castoff.cast("zai-org/GLM-5.2", "h200_sxm", scenario)


def test_a_fit_prices_its_kernel_alone(tmp_path: Path) -> None:
    plain, fitted = (
        {op.name: op for op in op_summaries(prediction(backend))} for backend in ("nvidia", fitted_backend(tmp_path))
    )
    assert plain.keys() == fitted.keys()
    assert {name for name in plain if plain[name].total_s != fitted[name].total_s} == {"linear", "moe_gate"}
    assert (plain["linear"].origin, fitted["linear"].origin) == ("assumed", "calibrated")
    assert fitted["linear"].extrapolated == 0


def test_marks_of_a_prediction(tmp_path: Path) -> None:
    backend = fitted_backend(tmp_path, BF16.replace("m = [1, 4096]", "m = [1, 2]"))
    found = prediction(backend)
    (note,) = [note for note in found.notes if "beyond" in note]
    ops = {op.name: op for op in op_summaries(found)}
    linear, router = ops["linear"], ops["moe_gate"]
    assert linear.extrapolated == linear.calls
    assert note == f"launches of kernels beyond the ranges fitted: {linear.calls + router.calls:,}, of matmul_bf16 m=4"
    assert linear.origin == "analytic"
    assert not any("beyond" in note for note in prediction(fitted_backend(tmp_path)).notes)


def test_marks_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    backend = fitted_backend(tmp_path, BF16.replace("m = [1, 4096]", "m = [1, 2]"))
    arguments = ("cast", "zai-org/GLM-5.2", "--device", "h200_sxm", "--backend", backend, *FLAGS, "--decode")
    sizes = ("--num-queries", "4", "--context-length", "2000")
    assert exit_status(*arguments, *sizes) == 0
    assert "analytic, extrapolated" in " ".join(capsys.readouterr().out.split())
    assert exit_status(*arguments, *sizes, "--json", "-") == 0
    ops = {op["name"]: op for op in json.loads(capsys.readouterr().out)["ops"]}
    assert ops["linear"]["extrapolated"] == ops["linear"]["calls"]
    assert ops["all_reduce"]["extrapolated"] == 0


def test_marks_of_a_sweep(tmp_path: Path) -> None:
    result = castoff.sweep(
        "zai-org/GLM-5.2", "h200_sxm", backend=["nvidia", fitted_backend(tmp_path)], num_devices=8, tp_size=8,
        quantize_linear_action="DISABLED", decode=True, num_queries=np.array([1, 4096, 5000]), context_length=2000,
    )  # fmt: skip
    assert result.extrapolated.tolist() == [[False] * 3, [False, False, True]]
    assert [row["extrapolated"] for row in result.rows()] == [False] * 5 + [True]
    alone = prediction(fitted_backend(tmp_path), 4096)
    assert result.latency_s[1, 1] == pytest.approx(alone.latency_s)


def test_show_lists_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(fitted_backend(tmp_path))
    assert exit_status("show", str(path)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Fitted on h200_sxm" in text
    assert "matmul_bf16 matmul 100 5.0% 15.0% 4" in text
