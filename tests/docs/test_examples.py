"""What the documentation shows works as it is written."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from castoff.casting.curves import check_fits
from castoff.spec.backend import load_backend
from castoff.spec.device import load_device
from castoff.trace.reader import open_trace
from castoff.trace.summary import summarize

ROOT = Path(__file__).resolve().parents[2]


def blocks(file: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / file).read_text(encoding="utf-8"), re.DOTALL)


def test_device_and_backend_files_load(tmp_path: Path) -> None:
    for name, text in zip(("device", "backend", "fits", "timed"), blocks("docs/files.md", "toml"), strict=True):
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")
    assert load_device(str(tmp_path / "device.toml")).name == "my_gpu"
    assert load_backend(str(tmp_path / "backend.toml")).name == "my_stack"
    fitted = load_backend(str(tmp_path / "fits.toml"), "h200_sxm")
    check_fits(fitted, load_device("h200_sxm"))
    assert fitted.fits["matmul_bf16"].source == "my benchmark"
    timed = load_backend(str(tmp_path / "timed.toml"), "h200_sxm")
    check_fits(timed, load_device("h200_sxm"))
    assert timed.fits["matmul_bf16"].origin == "measured"


def test_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer, plain = blocks("docs/traces.md", "python")
    names: dict[str, Any] = {}
    exec(compile(writer, "docs/traces.md", "exec"), names)
    assert names["may_be_cached"].sum() == 2 * 2 * 4 * 100
    exec(compile(plain, "docs/traces.md", "exec"), names)
    assert summarize(open_trace("other.topk")).mean_distinct_ids == 2048
    assert open_trace("other.topk").header.owner_layers == names["trace"].header.owner_layers
    assert (names["mapped"]["ids"] == open_trace("other.topk").steps().ids_NGBSK).all()


def test_readme_python() -> None:
    (code,) = blocks("README.md", "python")
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    table = names["table"]
    assert table.latency_s.shape == (4 * 2 * 2, 32, 3)  # type: ignore[attr-defined]
    assert set(table.reasons) == {None}  # type: ignore[attr-defined]


def test_serving_python() -> None:
    (code,) = blocks("docs/serving.md", "python")
    names: dict[str, object] = {}
    exec(compile(code, "docs/serving.md", "exec"), names)
    assert names["result"].summary.capacity_bound  # type: ignore[attr-defined]


def test_transformers_python(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    (code,) = blocks("docs/transformers.md", "python")
    exec(compile(code, "docs/transformers.md", "exec"), {})
    assert "of the rows were in pools" in capsys.readouterr().out
