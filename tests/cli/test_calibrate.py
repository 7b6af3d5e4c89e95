"""`castoff calibrate --this-machine`, from flags to files that casts read; and which flags go together."""

import json
from pathlib import Path

import pytest

from castoff.spec.backend import load_backend
from tests.cli.commands import CONFIG, exit_status

pytest.importorskip("torch")

Capture = pytest.CaptureFixture[str]
SMALL = ["--dtype", "float32", "--batch", "1,2", "--length", "20", "--rounds", "1"]


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("castoff.accuracy.peaks.COPY_BYTES", 1 << 20)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(CONFIG))


def test_files_price_a_cast(capsys: Capture) -> None:
    machine = ["calibrate", "--this-machine", "--model", "model", *SMALL]
    assert exit_status(*machine, "-o", "here") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for part in ("dsa_indexer", "share of time", "beside its ops", "here/backend.toml", "castoff cast MODEL"):
        assert part in captured.out
    files = ["--device", "here/device.toml", "--backend", "here/backend.toml", "--quantize-linear-action", "DISABLED"]
    assert exit_status("cast", "model", *files, "--num-queries", "2", "--context-length", "20", "--json", "-") == 0
    cast = json.loads(capsys.readouterr().out)
    # Where points left out are far off, a fit is worth no more than an assumption.
    assert (cast["device"], cast["origin"] in ("calibrated", "assumed")) == ("this_machine", True)
    assert cast["latency_s"] > 0
    for name in ("device", "backend"):
        assert exit_status("show", f"here/{name}.toml") == 0
    capsys.readouterr()
    # A second calibration takes the place of the first.
    assert exit_status(*machine, "-o", "here", "--json", "-") == 0
    assert {"name", "calls", "share", "median_abs_error", "p90_abs_error"} == json.loads(capsys.readouterr().out)[
        0
    ].keys()
    assert sorted(path.name for path in Path("here").iterdir()) == ["backend.toml", "device.toml"]


def test_quantised_layers_have_fits_of_their_own(capsys: Capture) -> None:
    action = ["--quantize-linear-action", "W8A8_DYNAMIC"]
    assert exit_status("calibrate", "--this-machine", "--model", "model", *SMALL, *action, "-o", "here") == 0
    assert "--quantize-linear-action W8A8_DYNAMIC" in capsys.readouterr().out
    files = ["--device", "here/device.toml", "--backend", "here/backend.toml"]
    assert exit_status("cast", "model", *files, *action, "--context-length", "20", "--json", "-") == 0
    ops = json.loads(capsys.readouterr().out)["ops"]
    assert {op["origin"] for op in ops} <= {"calibrated", "assumed"}
    fits = load_backend("here/backend.toml", "this_machine").fits
    assert {f"op_{op['name']}" for op in ops} <= fits.keys()


def test_another_device_refuses_the_backend(capsys: Capture) -> None:
    assert exit_status("calibrate", "--this-machine", "--model", "model", *SMALL, "-o", "here") == 0
    assert exit_status("cast", "model", "--device", "h200_sxm", "--backend", "here/backend.toml") == 2
    assert "its fits do not hold on h200_sxm" in capsys.readouterr().err


def test_an_interrupt_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("castoff.accuracy.this_machine.measure_peaks", interrupt)
    assert exit_status("calibrate", "--this-machine", "--model", "model", *SMALL, "-o", "here") == 130
    assert [path.name for path in Path().iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "here"], "give either --tables DIR"),
        (["--tables", ".", "--this-machine", "-o", "here"], "give either --tables DIR"),
        (["--this-machine"], "--output"),
        (["--this-machine", "--backend", "castoff", "-o", "here"], "--backend is for --tables"),
        (["--this-machine", "--device", "h200_sxm", "-o", "here"], "--device must be cpu or cuda"),
        (["--this-machine", "-o", "model/config.json"], "is a file; name a directory"),
        (["--this-machine", "-o", "none/here"], "there is no directory"),
        (["--this-machine", "-o", "here", "--model", "glm53"], "glm53"),
        (["--this-machine", "-o", "here", "--quantize-linear-action", "MXFP4"], "cannot be run"),
        (["--this-machine", "-o", "here", "--batch", "1", "--length", "64"], "no grid"),
        (["--tables", ".", "--device", "h200_sxm", "-o", "f.toml"], "--tables needs --device and --backend"),
        (["--tables", ".", "--rounds", "2", "-o", "f.toml"], "--rounds is for --this-machine"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: Capture) -> None:
    before = {*Path().rglob("*")}
    assert exit_status("calibrate", *arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert {*Path().rglob("*")} == before


def test_help(capsys: Capture) -> None:
    assert exit_status("calibrate", "--help") == 0
    out = capsys.readouterr().out
    for part in ("--this-machine", "--rounds", "1,2,4,8", "--tables"):
        assert part in out
