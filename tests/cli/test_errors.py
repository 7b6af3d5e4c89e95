"""What castoff refuses: one clear sentence, exit status 2, nothing on standard output, never a traceback."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from castoff import api
from castoff.spec.model import config_text
from tests.cli.commands import CAST, DEVICE, MODEL, TP16, exit_status

Capture = pytest.CaptureFixture[str]
D = ["--device", DEVICE]


def assert_refused(capsys: Capture, arguments: list[str], *words: str) -> None:
    assert exit_status(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cast", "zai-org/GLM-5.3", *D], ["unknown model 'zai-org/GLM-5.3'", "zai-org/GLM-5.2"]),
        (["cast", "./nothing", *D], ["no file or directory './nothing'"]),
        (["cast", MODEL, "--device", "h201_sxm"], ["unknown device 'h201_sxm'", "h200_sxm"]),
        (["cast", MODEL], ["--device", DEVICE, "castoff devices"]),
        (["cast", *D], ["MODEL", "zai-org/GLM-5.2", "castoff models"]),
        ([*CAST, "--num-devices", "16", "--tp-size", "5"], ["--tp-size 5", "[1, 2, 4, 8, 16]"]),
        ([*CAST, "--num-devices", "12", "--tp-size", "12"], ["64 attention heads"]),
        ([*CAST, "--num-devices", "3", "--ep-size", "3"], ["256 routed experts"]),
        ([*CAST, "--context-length", "-5"], ["--context-length must be at least 0, got -5"]),
        ([*CAST, "--query-length", "0"], ["--query-length must be at least 1, got 0"]),
        ([*CAST, "--num-queries", "0"], ["--num-queries must be at least 1, got 0"]),
        ([*CAST, "--num-queries", "9" * 30], ["--num-queries"]),
        ([*CAST, "--num-devices", "0"], ["--num-devices must be a whole number of at least 1"]),
        ([*CAST, "--num-hidden-layers-override", "79"], ["78"]),
        ([*CAST, "--backend", "ascent"], ["unknown backend 'ascent'", "ascend"]),
        ([*CAST, "--num-mtp-tokens", "17"], ["--num-mtp-tokens"]),
    ],
)
def test_requests_that_cannot_be_served(capsys: Capture, arguments: list[str], words: list[str]) -> None:
    assert_refused(capsys, arguments, *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*CAST, "--tp-sise", "5"], ["--tp-sise", "--tp-size"]),
        ([*CAST, "--quantise-linear-action", "FP8"], ["--quantize-linear-action"]),
        ([*CAST, "--dump-op-bounds"], ["--dump-op-bound-results"]),
        ([*CAST, "--bananas"], ["--bananas", "castoff cast --help"]),
        ([*CAST, "-x"], ["-x"]),
        ([*CAST, "extra"], ["unexpected argument 'extra'"]),
        (["caste"], ['"caste"', "cast"]),
        ([*CAST, "--tp-size"], ["--tp-size needs a value"]),
        ([*CAST, "--tp-size", "five"], ["--tp-size must be a whole number, got 'five'"]),
        ([*CAST, "--tp-size", "1.5"], ["--tp-size must be a whole number, got '1.5'"]),
        ([*CAST, "--tp-size=1e3"], ["--tp-size must be a whole number, got '1e3'"]),
        ([*CAST, "--tp-size", "4", "--tp-size", "8"], ["--tp-size specified multiple times"]),
        ([*CAST, "--context-length", "1,x"], ["--context-length", "'1,x'"]),
        ([*CAST, "--context-length", "1,,2"], ["--context-length", "'1,,2'"]),
        ([*CAST, "--context-length", "1.5"], ["--context-length", "'1.5'"]),
        ([*CAST, "--context-length", "1,2", "--num-queries", "3"], ["--num-queries 3", "2 values"]),
        ([*CAST, "--context-length", "1,2", "--num-queries", "1"], ["--num-queries 1", "2 values"]),
        ([*CAST, "--context-length", "1,2", "--query-length", "4,5,6"], ["2 values", "3 values"]),
        ([*CAST, "--prefix-cache-hit-rate", "nan"], ["--prefix-cache-hit-rate must be a number, got 'nan'"]),
        ([*CAST, "--reserved-memory-gb", "inf"], ["--reserved-memory-gb must be a number, got 'inf'"]),
        ([*CAST, "--reserved-memory-gb", "-1"], ["--reserved-memory-gb"]),
        ([*CAST, "--mtp-acceptance-length", "nan"], ["--mtp-acceptance-length must be a number"]),
        ([*CAST, "--quantize-linear-action", "w4a8_static"], ["W8A16_DYNAMIC", "did you mean 'W4A8_STATIC'"]),
        ([*CAST, "--quantize-attention-action", "FP6"], ["DISABLED, INT8, FP8"]),
        ([*CAST, "--word-embedding-tp", "diagonal"], ["col, row"]),
        ([*CAST, "--log-level", "loud"], ["debug, info, warning, error, critical"]),
        ([*CAST, "--enable-sequence-parallel"], ["--enable-sequence-parallel needs --compile"]),
        ([*CAST, "--compilation-config", "enable_multistream"], ["--enable-multistream needs --compile"]),
        ([*CAST, "--compile", "--compilation-config", "enable_multistreem"], ["'enable_multistream'"]),
        ([*CAST, "--compile", "--compilation-config", '{"enable_multistream": 1}'], ["true or false"]),
        ([*CAST, "--compile", "--compilation-config", "{enable"], ["not a JSON object"]),
        ([*CAST, "--compile", "--compilation-config", ""], ["empty"]),
        ([*CAST, "--performance-model", "profiling"], ["--profiling-database"]),
        ([*CAST, "--profiling-database", "x.csv"], ["--performance-model profiling"]),
        (["shapes", MODEL, "--batch", "1,x"], ["--batch", "'1,x'"]),
        (["show", "glm-5.3"], ["'glm-5.3'", "zai-org/GLM-5.2", DEVICE]),
        (["show", "h100"], ["h100_sxm"]),
    ],
)
def test_arguments_that_are_wrong(capsys: Capture, arguments: list[str], words: list[str]) -> None:
    assert_refused(capsys, arguments, *words)


@pytest.mark.parametrize(
    "flag",
    [
        *("--graph-log-url", "--graph-log-path", "--fusion-plugin", "--remote-source", "--image-batch-size"),
        *("--image-height", "--image-width", "--vision-tp-size", "--vision_tp_size"),
    ],
)
def test_what_is_not_built_says_so(capsys: Capture, flag: str) -> None:
    assert_refused(capsys, [*CAST, flag, "1"], "is not built")
    assert_refused(capsys, [*CAST, f"{flag}=1"], "is not built")
    assert exit_status("cast", "--help") == 0
    assert flag not in capsys.readouterr().out


Change = Callable[[dict[str, Any]], None]


def set_types(types: list[str]) -> Change:
    return lambda config: config.update(indexer_types=types)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_types(["full"] * 77), ["indexer_types", "77"]),
        (set_types(["full"] * 80), ["indexer_types", "80"]),
        (set_types(["full"] * 77 + ["fool"]), ["indexer_types", "fool"]),
        (set_types(["shared"] + ["full"] * 77), ["indexer_types", "shared"]),
        (lambda config: config.pop("kv_lora_rank"), ["kv_lora_rank is missing"]),
        (lambda config: config.update(model_type="deepseek_v4"), ["deepseek_v4"]),
    ],
)
def test_configs_that_are_wrong(capsys: Capture, tmp_path: Path, change: Change, words: list[str]) -> None:
    config = json.loads(config_text(MODEL))
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_refused(capsys, ["cast", str(tmp_path), *D, *TP16], "config.json", *words)


def test_truncated_config(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_text(MODEL)[:300])
    assert_refused(capsys, ["cast", str(tmp_path), *D], "config.json", "cut short")


@pytest.mark.parametrize(("text", "words"), [("name = [", ["not valid TOML"]), ("name = 'x'", ["is missing"])])
def test_malformed_device(capsys: Capture, tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "mine.toml").write_text(text)
    assert_refused(capsys, ["cast", MODEL, "--device", str(tmp_path / "mine.toml")], "mine.toml", *words)


@pytest.mark.parametrize("flag", ["--json", "--chrome-trace-file", "--chrome-trace"])
def test_unwritable_output_is_refused_before_any_work(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the step was cast")

    monkeypatch.setattr(api, "cast", fail)
    assert_refused(capsys, [*CAST, flag, str(tmp_path)], "is a directory")
    assert_refused(capsys, [*CAST, flag, str(tmp_path / "missing" / "x.json")], "no directory")
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        assert_refused(capsys, [*CAST, flag, str(tmp_path / "x.json")], "permission denied")
        tmp_path.chmod(0o700)
    assert list(tmp_path.iterdir()) == []


def test_two_outputs_into_one_file(capsys: Capture, tmp_path: Path) -> None:
    same = str(tmp_path / "x.json")
    assert_refused(capsys, [*CAST, "--json", same, "--chrome-trace-file", same], "the same file")


def test_unwritable_shapes(capsys: Capture, tmp_path: Path) -> None:
    assert_refused(capsys, ["shapes", MODEL, *TP16, "-o", str(tmp_path / "missing" / "x.csv")], "no directory")


def test_ctrl_c_is_no_traceback(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "cast", interrupt)
    assert exit_status(*CAST, *TP16) == 130
    assert capsys.readouterr() == ("", "")


def run_into(code: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from castoff.cli import main; sys.exit(main(sys.argv[1:]))"
    command = f'"{sys.executable}" -c "{program}" cast {MODEL} --device {DEVICE} {" ".join(TP16)} {code}'
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)


def test_a_reader_that_leaves_is_no_error() -> None:
    # `true` reads nothing, so the report meets a closed pipe.
    result = run_into("--disable-repetition | true; exit ${PIPESTATUS[0]}")
    assert result.returncode in (0, 128 + signal.SIGPIPE)
    assert result.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_an_error() -> None:
    result = run_into("> /dev/full")
    assert result.returncode == 2
    assert result.stderr.startswith("error: cannot write to standard output")
