"""`castoff replay`: what it writes, and what it refuses."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.commands import CONFIG, exit_status

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A trace of 12 steps of 2 requests with 2 query tokens each; the model has 3 groups of one layer."""
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(CONFIG))
    every_id = np.broadcast_to(np.arange(40), (12, 3, 2, 2, 40))
    np.save("ids.npy", np.random.default_rng(6).permuted(every_id, axis=-1)[..., :16])
    np.save("lengths.npy", 42 + 2 * np.arange(12)[:, None] + np.zeros(2, int))
    convert = ["trace", "convert", "ids.npy", "--model", "model.json", "--lengths", "lengths.npy", "-o", "x.topk"]
    assert exit_status(*convert) == 0
    capsys.readouterr()


def replayed(capsys: Capture, *arguments: str) -> Any:
    assert exit_status("replay", "x.topk", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_json(capsys: Capture) -> None:
    result = replayed(capsys, "--policy", "fifo,lru,gather", "--pool", "16:32:8", "--ways", "1,4")
    assert result["trace"] == "x.topk"
    assert result["model"] == "model.json"
    assert (result["steps"], result["requests"], result["request_steps"]) == (12, 2, 24)
    rows = result["rows"]
    assert len(rows) == 2 * 2 * 3 + 1
    assert rows[-1]["policy"] == "gather"
    assert rows[-1]["ways"] is None
    assert [row["pool_tokens"] for row in rows[:3]] == [16, 24, 32]
    for row in rows:
        assert 0 < row["hit_rate"] < 1
        # kv_lora_rank 16 and a rope part of 8, in bf16, one layer in a group.
        direct = row["stats"]["unique_misses"]["total"] * 48 / 12
        assert row["link_bytes_per_step"] == direct or row["policy"] == "gather"
        assert sum(group["stats"]["hits"]["total"] for group in row["per_group"]) == row["stats"]["hits"]["total"]
        assert [(part["first_step"], part["end_step"]) for part in row["warm_up"]] == [
            (0, 1), (1, 2), (2, 4), (4, 8), (8, 12),
        ]  # fmt: skip


def test_as_a_table(capsys: Capture) -> None:
    assert exit_status("replay", "x.topk", "--pool", "32", "--json", "out.json") == 0
    text = capsys.readouterr().out
    assert "fifo, 16 ways" in text
    assert json.loads(Path("out.json").read_text())["rows"][0]["pool_tokens"] == 32


def test_files(capsys: Capture) -> None:
    arguments = [
        "--policy",
        "fifo,belady",
        "--pool",
        "16:48:16",
        "--csv",
        "o.csv",
        "--svg",
        "o.svg",
        "--html",
        "o.html",
    ]
    assert exit_status("replay", "x.topk", *arguments) == 0
    text = capsys.readouterr().out
    assert "A  fifo, 16 ways" in text
    assert "B  belady" in text
    table = list(csv.DictReader(Path("o.csv").read_text().splitlines()))
    # For all groups together, and for each of three.
    assert len(table) == 2 * 3 * 4
    assert [row["group"] for row in table[:4]] == ["", "0", "1", "2"]
    mean = sum(float(row["unique_misses"]) for row in table[1:4]) / 3
    assert float(table[0]["unique_misses"]) == pytest.approx(mean)
    assert Path("o.svg").read_text().startswith("<svg")
    assert Path("o.html").read_text().startswith("<!DOCTYPE html>")


def test_queries_format_and_model(capsys: Capture) -> None:
    whole = replayed(capsys)
    assert whole["query_length"] == 2
    assert replayed(capsys, "--mtp", "0")["query_length"] == 1
    wide = {**CONFIG, "kv_lora_rank": 128}
    Path("wide.json").write_text(json.dumps(wide))
    # 128 values of a byte, a scale of four, and 8 rope values in bf16.
    own = replayed(capsys, "--model", "wide.json", "--quantize-attention-action", "FP8")
    assert (own["model"], own["row_bytes"]) == ("wide.json", 128 + 4 + 16)


def test_a_model_that_a_run_cut(capsys: Capture) -> None:
    grouped = {**CONFIG, "num_hidden_layers": 6, "index_topk_freq": 3, "index_skip_topk_offset": 3}
    Path("grouped.json").write_text(json.dumps(grouped))
    whole = replayed(capsys, "--model", "grouped.json")
    cut = replayed(capsys, "--model", "grouped.json", "--num-hidden-layers-override", "4")
    for result, last in ((whole, [2, 3, 4]), (cut, [2, 3])):
        assert [group["layers"] for group in result["rows"][0]["per_group"]] == [[0], [1], last]
    assert whole["rows"][0]["link_bytes_per_step"] > cut["rows"][0]["link_bytes_per_step"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "lfu"], "--policy 'lfu' is unknown"),
        (["--pool", "100"], "--pool must be a multiple of --ways 16, got 100; the nearest is 96"),
        (["--pool", "0"], "--pool must be from 1 to"),
        (
            ["--pool", "8k"],
            "value for --pool: whole numbers or FIRST:LAST:STEP, separated by commas, are needed, got '8k'",
        ),
        (["--pool", "64:32:16"], "value for --pool: FIRST:LAST:STEP needs LAST at least FIRST"),
        (["--pool", "16:64:0"], "STEP at least 1"),
        (["--pool", "1:999999999:1"], "no more than 10,000 sizes"),
        (["--ways", "33"], "--ways must be from 1 to 32, got 33"),
        (["--ways", "two"], "value for --ways: whole numbers"),
        (["--mtp", "2"], "--mtp must be from 0 to 1"),
        (["--model", "zai-org/GLM-5.2"], "has 16 ids per query, and zai-org/GLM-5.2 selects 2,048"),
        (["--csv", "nowhere/o.csv"], "--csv nowhere/o.csv: there is no directory"),
        (["--csv", "o", "--svg", "o"], "--csv and --svg name the same file"),
        (["--html", "x.topk/o"], "--html x.topk/o: "),
        (["--html", "x.topk"], "x.topk is what is read; name another file to write"),
    ],
)
def test_what_is_refused(capsys: Capture, arguments: list[str], said: str) -> None:
    before = {path: path.stat().st_size for path in Path().iterdir()}
    assert exit_status("replay", "x.topk", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert {path: path.stat().st_size for path in Path().iterdir()} == before


def test_damaged_traces_and_unknown_models(capsys: Capture) -> None:
    whole = Path("x.topk").read_bytes()
    Path("cut.topk").write_bytes(whole[:-4])
    Path("other.topk").write_bytes(b"GIF89a" + whole[6:])
    Path("unknown.topk").write_bytes(whole.replace(b'"model.json"', b'"nobody/had"'))
    for file, said in (
        ("cut.topk", "cut.topk is cut short: "),
        ("other.topk", "other.topk is no trace: it begins with b'GIF89a"),
        ("missing.topk", "cannot read missing.topk"),
        ("unknown.topk", "unknown.topk is of the model 'nobody/had'"),
    ):
        assert exit_status("replay", file) == 2
        assert said in capsys.readouterr().err
    assert exit_status("replay", "unknown.topk", "--model", "model.json") == 0


def test_nothing_heavy_is_imported_before_the_work() -> None:
    code = (
        "from castoff.cli import main; import sys; main(['replay', '--help']); assert 'numba.core' not in sys.modules"
    )
    code += "; assert 'jinja2.environment' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, stdin=subprocess.DEVNULL)


def test_without_numba_the_figures_are_the_same(capsys: Capture) -> None:
    arguments = ["replay", "x.topk", "--policy", "fifo,serve_install,gather,full-lru,s3-fifo,set-belady", "--json", "-"]
    code = f"import sys; sys.modules['numba'] = None; from castoff.cli import main; sys.exit(main({arguments!r}))"
    plain = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert plain.stderr == "note: replays run as plain Python, which is slow: pip install 'castoff[lab]' brings numba\n"
    assert exit_status(*arguments) == 0
    assert plain.stdout == capsys.readouterr().out
