"""The fit of a stack's host times finds what points were made with."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from castoff.spec.backend import load_backend
from tests.accuracy.e2e_files import LOAD, write_csv

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("serving_fit", ROOT / "examples" / "serving" / "fit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look themselves up there.
    monkeypatch.setitem(sys.modules, "serving_fit", module)
    spec.loader.exec_module(module)
    return module


def test_it_finds_the_constants(fit: ModuleType, tmp_path: Path) -> None:
    rows = [{**LOAD, "osl": "256", "concurrency": str(clients)} for clients in (1, 2)]
    cases = fit.read_cases([write_csv(tmp_path / "points.csv", *rows)])
    made = []
    for row, case in zip(rows, cases, strict=True):
        found = fit.predict(case, (0.004, 0.1), 1.0)
        made.append({**row, "ttft_ms": str(found.ttft_s * 1e3), "tpot_ms": str(found.tpot_s * 1e3)})
    again = fit.read_cases([write_csv(tmp_path / "points.csv", *made)])
    hosts = fit.fit_hosts(again, 1.0, {})
    assert hosts["h200_sxm"] == pytest.approx((0.004, 0.1), rel=0.02)


def test_it_writes_figures_alone(fit: ModuleType, tmp_path: Path) -> None:
    shipped = ROOT / "castoff" / "data" / "backends" / "sglang.toml"
    path = tmp_path / "mine.toml"
    path.write_text(shipped.read_text())
    fit.write(path, {"b200_sxm": (0.00123, 0.0456)}, 1.234)
    serving, before = load_backend(str(path)).serving, load_backend("sglang").serving
    assert serving is not None
    assert before is not None
    system = serving.systems["b200_sxm"]
    assert (serving.prefill_factor, system.host_s_per_decode_step, system.host_s_per_prefill) == (
        1.234,
        0.00123,
        0.0456,
    )
    assert serving.systems["h200_sxm"] == before.systems["h200_sxm"]
    assert len(path.read_text().splitlines()) == len(shipped.read_text().splitlines())
