"""`castoff run --config`: flags from a YAML file, as strict as the command line, which wins."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import CONFIG, exit_status

Capture = pytest.CaptureFixture[str]

SETTINGS = """\
random_weights: 0
random_prompts: 2x5
max_new_tokens: 3
num_mtp_tokens: 1
dtype: float32
ignore_eos: true
json: "-"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a tiny model in `tiny`."""
    pytest.importorskip("torch")
    pytest.importorskip("yaml")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_gives_model_and_flags(capsys: Capture, here: Path) -> None:
    (here / "run.yaml").write_text(f"model: tiny\n{SETTINGS}")
    assert exit_status("run", "--config", "run.yaml") == 0
    report = json.loads(capsys.readouterr().out)
    assert [len(tokens) for tokens in report["tokens"]] == [3, 3]
    assert len(report["acceptance_rates"]) == 1


def test_the_command_line_wins(capsys: Capture, here: Path) -> None:
    (here / "run.yaml").write_text(f"model: nowhere\n{SETTINGS}")
    assert exit_status("run", "tiny", "--config", "run.yaml", "--max-new-tokens", "2", "--num-mtp-tokens", "0") == 0
    report = json.loads(capsys.readouterr().out)
    assert [len(tokens) for tokens in report["tokens"]] == [2, 2]
    assert report["acceptance_rates"] == []


def test_paths_are_relative_to_the_working_directory(capsys: Capture, here: Path) -> None:
    (here / "files").mkdir()
    (here / "files" / "run.yaml").write_text("prompt_file: prompts.json\nrandom_weights: 0\njson: out.json\n")
    (here / "prompts.json").write_text("[[1, 2]]")
    assert exit_status("run", "tiny", "--config", "files/run.yaml") == 0
    assert len(json.loads((here / "out.json").read_text())["tokens"]) == 1


def test_null_is_not_given_and_an_empty_file_gives_nothing(capsys: Capture, here: Path) -> None:
    for text in ("", "# nothing\n", "prompt:\n"):
        (here / "run.yaml").write_text(text)
        assert exit_status("run", "tiny", "--config", "run.yaml") == 2
        assert "give one of --prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("random_prompt: 2x5", "unknown key 'random_prompt' in the top level (did you mean 'random_prompts'"),
        ("random-prompts: 2x5", "did you mean 'random_prompts'"),
        ("config: other.yaml", "unknown key 'config'"),
        ("1: 2", "a key must be a word, got 1"),
        ("on: 2", "a key must be a word, got true"),
        ("max_new_tokens: '3'", "max_new_tokens must be int, got '3'"),
        ("max_new_tokens: 3.5", "max_new_tokens must be int, got 3.5"),
        ("max_new_tokens: yes", "max_new_tokens must be int, got True; YAML reads no, off, yes and on"),
        ("max_new_tokens:", "max_new_tokens must be int, got None"),
        ("batch: [1]", "batch must be a single value, got a list"),
        ("batch: {a: 1}", "batch must be a single value, got a table"),
        ("ignore_eos: 1", "ignore_eos must be bool, got 1"),
        ("ignore_eos: 'true'", "ignore_eos must be bool, got 'true'"),
        ("prompt: off", "prompt must be str or None, got False; YAML reads"),
        ("prompt: 2026-11-05", "prompt must be str or None, got datetime.date"),
        ("prompt: 2026-13-45", "not valid YAML: month must be"),
        ("prompt_file: 3", "prompt_file must be str or None, got 3"),
        ("temperature: 1e-3", "temperature must be float, got '1e-3'; a number stands without quotes"),
        ("temperature: .nan", "temperature must be a number, got 'nan'"),
        ("dtype: bf16", "dtype must be one of float64, float32, bfloat16, float16, got 'bf16'"),
        ("dtype: 16", "dtype must be float64 or float32 or bfloat16 or float16, got 16"),
        ("batch: 1\nseed: 1\nbatch: 2", "'batch' is given twice, in lines 1 and 3"),
        ("- batch: 1", "must hold settings, one `key: value` a line, got a list"),
        ("batch", "must hold settings, one `key: value` a line, got a single value"),
        ("batch: {", "not valid YAML: expected the node content"),
        ("batch: 1\n---\nbatch: 2", "not valid YAML: but found another document in line 2"),
        ("prompt: !!python/object:os.system x", "not valid YAML: could not determine a constructor"),
        ("[" * 5000, "nested too deeply"),
        ("prompt: \x07", "not valid YAML"),
    ],
)
def test_errors(capsys: Capture, here: Path, text: str, says: str) -> None:
    (here / "run.yaml").write_text(text)
    assert exit_status("run", "tiny", "--config", "run.yaml") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: run.yaml: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err


def test_files_that_cannot_be_read(capsys: Capture, here: Path) -> None:
    (here / "latin.yaml").write_bytes(b"prompt: \xe9t\xe9\n")
    for file, says in (("no.yaml", "No such file"), (".", "directory"), ("latin.yaml", "not UTF-8 text")):
        assert exit_status("run", "tiny", "--config", file) == 2
        assert says in capsys.readouterr().err


def test_without_pyyaml(here: Path) -> None:
    (here / "run.yaml").write_text("batch: 1\n")
    # As if the package were not installed: nothing finds it.
    code = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "yaml" else PathFinder.find_spec(name, path, target)

sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
from castoff.cli import main
sys.exit(main(["run", "tiny", "--config", "run.yaml"]))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=here
    )
    assert result.returncode == 2
    assert result.stderr == "error: a YAML file needs PyYAML: pip install 'castoff[run]'\n"
