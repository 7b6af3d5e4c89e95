"""Hit profiles of replays: the counts of its rows, and what a cast makes of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from castoff.errors import CastoffError
from castoff.lab.profile import hit_profile
from castoff.lab.replay import Replay, replay
from castoff.spec.hit_profile import HitProfile, load_hit_profile
from castoff.trace.header import TraceHeader
from castoff.trace.reader import Trace, open_trace
from castoff.trace.writer import TraceWriter
from tests.cli.commands import DEVICE, exit_status
from tests.generators import GLM_52, model

STEPS, QUERIES, LENGTH = 6, 2, 5000


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """Two queries of one request choose 2,048 of their last 3,000 tokens at random, in all groups."""
    generator = np.random.default_rng(0)
    header = TraceHeader.of_model(model(), batch=1, query_length=QUERIES)
    path = tmp_path / "drawn.topk"
    with TraceWriter(path, header) as writer:
        for step in range(STEPS):
            length = LENGTH + step
            ids = np.stack(
                [
                    np.stack(
                        [length - QUERIES + s - generator.choice(3000, 2048, replace=False) for s in range(QUERIES)]
                    )
                    for _ in range(header.num_groups)
                ]
            )
            writer.append(np.array([7]), np.array([length]), np.array([1]), ids[:, np.newaxis])
    return open_trace(path)


def profile_of(trace: Trace, *policies: str, pools: tuple[int, ...] = (2048, 4096)) -> HitProfile:
    result = replay(trace, model(), Replay(policies=policies, pools=pools, ways=(16,)))  # type: ignore[arg-type]
    return hit_profile(result, model(), trace)


def test_curves_have_the_counts_of_the_rows(trace: Trace) -> None:
    result = replay(trace, model(), Replay(policies=("fifo", "gather", "belady"), pools=(2048, 4096), ways=(16,)))
    profile = hit_profile(result, model(), trace)
    assert (profile.model, profile.index_topk, profile.origin) == (GLM_52, 2048, "measured")
    assert profile.context_length == LENGTH + round((STEPS - 1) / 2)
    named = [(curve.mode, curve.policy, curve.ways, curve.query_length, len(curve.points)) for curve in profile.curves]
    # Gather has one size, and a policy of the lab no mode.
    assert named == [("direct", "fifo", 16, QUERIES, 2), ("gather", "previous", 0, QUERIES, 1)]
    for curve in profile.curves:
        for point in curve.points:
            (row,) = [
                row
                for row in result.rows
                if row.policy in (curve.policy, curve.mode) and row.pool_tokens == point.pool_tokens
            ][:1]
            assert point.unique_misses == row.stats["unique_misses"].mean
            assert point.rows == pytest.approx(2048 * QUERIES)


def test_policies_of_the_lab_alone_make_no_profile(trace: Trace) -> None:
    with pytest.raises(CastoffError, match="needs a policy that `castoff cast` knows: fifo"):
        profile_of(trace, "sieve", "belady")


def test_a_cast_reads_what_a_replay_wrote(trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    replayed = ["replay", str(trace.path), "--policy", "fifo,serve_install,gather", "--pool", "4096,8192"]
    assert exit_status(*replayed, "--hit-profile", str(file)) == 0
    capsys.readouterr()
    cast = ["cast", GLM_52, "--device", DEVICE, "--decode", "--num-mtp-tokens", "1", "--context-length", "65536"]
    offload = ["--offload", "direct", "--pool-tokens", "4096", "--hit-profile", str(file)]
    assert exit_status(*cast, *offload, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)["offload"]
    (point, _) = load_hit_profile(file).curve("direct", "fifo", 16, 2).points
    assert found["unique_misses"] == pytest.approx(point.unique_misses)
    # One draft more is another query length, which this profile does not have.
    cast[cast.index("1")] = "2"
    assert exit_status(*cast, *offload) == 2
    assert (
        "at 3 query tokens a request; it has direct fifo, serve_install fifo, gather previous; ways 16"
        in capsys.readouterr().err
    )
    other = ["cast", "deepseek-ai/DeepSeek-V3.2", "--device", DEVICE, "--decode", "--num-mtp-tokens", "1"]
    assert exit_status(*other, *offload) == 2
    assert "take a profile of this model" in capsys.readouterr().err


def test_the_model_of_a_trace_is_not_exchanged(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    """GLM-5 selects as many tokens, but in groups of one layer: its bytes would be others."""
    assert exit_status("replay", str(trace.path), "--model", "zai-org/GLM-5") == 2
    assert "whose index groups are not those of --model zai-org/GLM-5" in capsys.readouterr().err
    assert exit_status("replay", str(trace.path), "--model", f"{GLM_52}-FP8") == 0


def test_some_groups_are_noted(trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part, profile = tmp_path / "part.topk", tmp_path / "part.json"
    assert exit_status("trace", "cut", str(trace.path), "--groups", "2,3", "-o", str(part)) == 0
    assert exit_status("replay", str(part), "--hit-profile", str(profile)) == 0
    assert f"has 2 of 21 index groups of {GLM_52}; bytes are those of these alone" in capsys.readouterr().err
    assert "2 of 21 index groups" in load_hit_profile(profile).source


def test_a_trace_that_selects_nothing_makes_no_profile(tmp_path: Path) -> None:
    header = TraceHeader.of_model(model(), batch=1, query_length=1)
    path = tmp_path / "nothing.topk"
    with TraceWriter(path, header) as writer:
        writer.append(np.array([0]), np.array([100]), np.array([1]), np.full((header.num_groups, 1, 1, 2048), -1))
    with pytest.raises(CastoffError, match="selects nothing in the steps that count"):
        profile_of(open_trace(path), "fifo")
