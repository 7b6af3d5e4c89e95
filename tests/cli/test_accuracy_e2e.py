"""`castoff accuracy e2e`."""

import json
from pathlib import Path

import pytest

from tests.accuracy.e2e_files import LOAD, STEP, write_csv
from tests.cli.commands import exit_status

Capture = pytest.CaptureFixture[str]
KEYS = {
    "row", "model", "system", "precision", "backend", "kv_dtype", "num_devices", "isl", "osl", "concurrency", "mtp",
    "measured_ttft_s", "measured_tpot_s", "ttft_s", "tpot_s", "ttft_error", "tpot_error", "queueing", "queue_mean_s",
    "retractions", "kv_capacity_tokens", "output_tokens_per_s", "origin",
}  # fmt: skip


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(Path("loads.csv"), LOAD, {**LOAD, "system": "gb200"})
    write_csv(Path("steps.csv"), STEP)


def test_json(capsys: Capture) -> None:
    assert exit_status("accuracy", "e2e", "loads.csv", "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert found.keys() == {"points", "rows", "excluded", "systems", "ttft_mean_abs_error", "tpot_mean_abs_error"}
    assert found["points"][0].keys() == KEYS
    assert found["excluded"] == {"castoff has no device gb200": 1}
    assert found["tpot_mean_abs_error"] == found["systems"][0]["tpot_mean_abs_error"] > 0


def test_json_of_steps(capsys: Capture) -> None:
    assert exit_status("accuracy", "e2e", "steps.csv", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["points"][0]["step_s"] == pytest.approx(0.0712, rel=0.01)
    assert found["step_mean_abs_error"] < 0.01


def test_text_and_file(capsys: Capture) -> None:
    assert exit_status("accuracy", "e2e", "loads.csv", "--json", "out.json") == 0
    out = capsys.readouterr().out
    for part in ("zai-org/GLM-5-FP8", "TTFT", "300.000", "h200_sxm", "castoff has no device gb200", "all"):
        assert part in out
    assert json.loads(Path("out.json").read_text())["rows"] == 2
    assert exit_status("accuracy", "e2e", "steps.csv") == 0
    out = capsys.readouterr().out
    for part in ("cann-ge", "71.210", "65,536", "all"):
        assert part in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.csv"], "none.csv: cannot read this file"),
        (["loads.csv", "--backend", "slang"], "unknown backend 'slang'"),
        (["loads.csv", "--json", "none/out.json"], "--json none/out.json: there is no directory"),
        ([], "FILE"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: Capture) -> None:
    before = {*Path().rglob("*")}
    assert exit_status("accuracy", "e2e", *arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert {*Path().rglob("*")} == before


def test_help(capsys: Capture) -> None:
    assert exit_status("accuracy", "e2e", "--help") == 0
    assert "--backend" in capsys.readouterr().out
