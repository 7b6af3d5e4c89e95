"""`castoff convert`: from a checkpoint to one that `castoff run` and `castoff show` take."""

import json
from pathlib import Path

import pytest

from castoff.runtime.checkpoint import RandomTensors, model_pieces
from castoff.spec.model import load_model
from tests.cli.commands import CONFIG, exit_status

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A checkpoint of random weights."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    pieces, source = model_pieces(load_model(str(directory)), mtp=True), RandomTensors(0)
    tensors = {piece.name: source.read(piece).bfloat16() for piece in pieces}
    safetensors_torch.save_file(tensors, directory / "model.safetensors")
    return str(directory)


@pytest.mark.parametrize("action", ["W8A8_DYNAMIC", "FP8"])
def test_convert_show_and_run(capsys: Capture, model: str, tmp_path: Path, action: str) -> None:
    out = str(tmp_path / "out")
    assert exit_status("convert", model, "--quantize-linear-action", action, "-o", out) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{out}: ")
    assert f"matrices in {action}" in captured.out
    assert captured.err == ""
    assert exit_status("show", out, "--json", "-") == 0
    shown = json.loads(capsys.readouterr().out)["checkpoint_quant"]
    assert shown["quant_method"] == {"W8A8_DYNAMIC": "compressed-tensors", "FP8": "fp8"}[action]
    reports = []
    for directory in (model, out):
        flags = ["--random-prompts", "2x20", "--max-new-tokens", "5", "--dtype", "float32", "--num-mtp-tokens", "2"]
        assert exit_status("run", directory, *flags, "--json", "-") == 0
        reports.append(json.loads(capsys.readouterr().out))
    plain, quantized = reports
    assert [len(tokens) for tokens in quantized["tokens"]] == [5, 5]
    assert quantized["memory"]["weights_bytes"] < 0.6 * plain["memory"]["weights_bytes"]


def test_drafts_change_no_token(capsys: Capture, model: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert exit_status("convert", model, "--quantize-linear-action", "FP8", "--output", out) == 0
    capsys.readouterr()
    tokens = []
    for drafts in ("0", "3"):
        flags = ["--random-prompts", "2x20", "--max-new-tokens", "8", "--dtype", "float64", "--num-mtp-tokens", drafts]
        assert exit_status("run", out, *flags, "--json", "-") == 0
        tokens.append(json.loads(capsys.readouterr().out)["tokens"])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--quantize-linear-action", "W4A8_DYNAMIC", "-o", "out"], "W4A8_DYNAMIC can be cast, not converted"),
        (["--quantize-linear-action", "INT8", "-o", "out"], "--quantize-linear-action must be one of"),
        (["--quantize-linear-action", "FP8"], "castoff convert needs --output"),
        (["-o", "out"], "castoff convert needs --quantize-linear-action"),
        (["--quantize-linear-action", "FP8", "-o", "model"], "-o model is the checkpoint itself"),
        (["--quantize-linear-action", "FP8", "-o", "model/config.json"], "is a file"),
    ],
)
def test_errors(
    capsys: Capture, model: str, monkeypatch: pytest.MonkeyPatch, flags: list[str], says: str
) -> None:  # fmt: skip
    monkeypatch.chdir(Path(model).parent)
    assert exit_status("convert", model, *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err
    assert {path.name for path in Path().iterdir()} == {"model"}


def test_progress_on_a_terminal(capsys: Capture, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert exit_status("convert", model, "--quantize-linear-action", "FP8", "-o", str(tmp_path / "out")) == 0
    shown = capsys.readouterr().err
    assert "file 1 of 1: tensor 1 of " in shown
    assert shown.endswith("\r\033[K")
