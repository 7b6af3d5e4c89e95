"""A replay of what a run recorded counts what the run counted, to the last row."""

import json
from pathlib import Path
from typing import Any

import pytest

from castoff.lab.policies import PolicyName
from castoff.lab.replay import Replay, replay
from castoff.lab.result import ReplayRow
from castoff.policy.arrays import STATS
from castoff.spec.model import load_model
from castoff.trace.reader import open_trace
from tests.cli.commands import CONFIG, exit_status

pytest.importorskip("torch")

Capture = pytest.CaptureFixture[str]
# Groups of one and three layers.
CASE: dict[str, Any] = {
    **CONFIG, "num_hidden_layers": 4, "index_topk_freq": 4, "index_skip_topk_offset": 2,
    "index_share_for_mtp_iteration": True,
}  # fmt: skip
# Shorter than top-k, as long, and longer than the pool; two at a time, so that they change rows, and join late.
PROMPTS = [[1, 2, 3], list(range(16)), [token % 61 for token in range(90)], [3 * token % 61 for token in range(70)]]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CASE))
    Path("prompts.json").write_text(json.dumps(PROMPTS))
    return str(tmp_path)


def recorded(capsys: Capture, model: str, drafts: int, *offload: str) -> dict[str, Any]:
    """The `offload` object of a run, which leaves x.topk."""
    capsys.readouterr()
    status = exit_status(
        *("run", model, "--random-weights", "3", "--dtype", "float32", "--max-new-tokens", "14", "--batch", "2"),
        *("--prompt-file", "prompts.json", "--num-mtp-tokens", str(drafts), "--ignore-eos"),
        *("--record", "x.topk", "--offload", *offload, "--json", "-"),
    )
    assert status == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report["offload"]  # type: ignore[no-any-return]


def assert_same(row: ReplayRow, offload: dict[str, Any]) -> None:
    main = [group for group in offload["groups"] if not group["is_mtp"]]
    assert len(row.per_group) == len(main) == 2
    for own, theirs in zip(row.per_group, main, strict=True):
        assert list(own.layers) == theirs["layers"]
        assert {name: own.stats[name].total for name in STATS} == {name: theirs[name] for name in STATS}
        assert own.hit_rate == theirs["hit_rate"]
    if len(main) == len(offload["groups"]):
        assert row.hit_rate == offload["hit_rate"]
    assert row.pool_tokens == offload["pool_tokens"]


def replayed(policy: PolicyName, pool: int = 8192, ways: int = 16) -> ReplayRow:
    trace = open_trace("x.topk")
    result = replay(trace, load_model("config.json"), Replay(policies=(policy,), pools=(pool,), ways=(ways,)))
    (row,) = result.rows
    return row


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("policy", ["fifo", "lru", "clock"])
def test_direct(capsys: Capture, model: str, policy: PolicyName, drafts: int) -> None:
    # A pool that is smaller than what a step with drafts selects, so that rows spill.
    pool = ["--pool-tokens", "24", "--ways", "4"]
    offload = recorded(capsys, model, drafts, "direct", "--policy", policy, *pool)
    assert_same(replayed(policy, 24, 4), offload)
    if drafts:
        groups = offload["groups"]
        assert all(sum(group[name] for group in groups) for name in STATS), "every counter is at work"


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("mode", ["gather", "serve_install"])
def test_published_modes(capsys: Capture, model: str, mode: PolicyName, drafts: int) -> None:
    pool = ["--pool-tokens", "40", "--ways", "8"] if mode == "serve_install" else []
    offload = recorded(capsys, model, drafts, mode, *pool)
    assert_same(replayed(mode, 40, 8), offload)
