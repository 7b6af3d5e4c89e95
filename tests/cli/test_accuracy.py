"""`castoff accuracy ops`."""

import json
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from tests.accuracy.measured import GEMM, repeated, write_table
from tests.cli.commands import exit_status

Capture = pytest.CaptureFixture[str]
KEYS = {
    "name", "system", "backend", "version", "priced_by", "rows", "rows_scored", "median_abs_error", "p90_abs_error",
    "bias", "roofline_median_abs_error", "excluded", "buckets", "worst",
}  # fmt: skip


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(Path(), repeated(GEMM, 2, latency=[0.2, 0.0]), "gemm")
    write_table(Path(), {"x": [1]}, "computescale")


def test_json(capsys: Capture) -> None:
    assert exit_status("accuracy", "ops", "--tables", ".", "--json") == 0
    out, err = capsys.readouterr()
    unmapped, gemm = json.loads(out)["tables"]
    assert err == ""
    assert gemm.keys() == unmapped.keys() == KEYS
    assert (gemm["rows"], gemm["rows_scored"], gemm["excluded"]) == (2, 1, {"no time measured": 1})
    assert unmapped["median_abs_error"] is None


def test_text_and_file(capsys: Capture) -> None:
    assert exit_status("accuracy", "ops", "--tables", ".", "--backend", "castoff", "--json", "out.json") == 0
    out = capsys.readouterr().out
    for part in ("gemm_bf16", "roofline", "sglang 1.0", "no time measured", "gemm_dtype bfloat16", "below 10 µs"):
        assert part in out
    assert json.loads(Path("out.json").read_text())["tables"][1]["priced_by"] == "castoff"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tables", "none"], "--tables none holds no measured tables"),
        (["--tables", ".", "--backend", "nvidai"], "nvidai"),
        (["--tables", ".", "--json", "none/out.json"], "--json none/out.json: there is no directory"),
        ([], "--tables"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: Capture) -> None:
    before = {*Path().rglob("*")}
    assert exit_status("accuracy", "ops", *arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert {*Path().rglob("*")} == before


def test_help(capsys: Capture) -> None:
    for arguments in (["accuracy"], ["accuracy", "--help"], ["accuracy", "ops", "--help"]):
        assert exit_status(*arguments) == 0
        assert "ops" in capsys.readouterr().out
