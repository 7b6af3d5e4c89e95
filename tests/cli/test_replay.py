"""`castoff replay`: what it writes, and what it refuses."""

import json
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
