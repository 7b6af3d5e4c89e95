"""Replays of whole traces: requests, lengths, queries, blocks, bytes; and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from castoff.errors import CastoffError
from castoff.lab import passes, requests
from castoff.lab.policies import POLICIES, PolicyName
from castoff.lab.replay import Replay, replay
from castoff.lab.result import ReplayResult, ReplayRow
from castoff.spec.model import ModelSpec, load_model, read_model
from castoff.trace.cut import cut_trace
from castoff.trace.header import TraceHeader
from castoff.trace.reader import Trace, open_trace
from castoff.trace.writer import TraceWriter
from tests.cli.commands import CONFIG

# Groups of one and of three layers, top-k 16.
MODEL = read_model(
    {**CONFIG, "num_hidden_layers": 4, "index_topk_freq": 4, "index_skip_topk_offset": 2}, name="tiny", source="tiny"
)
EVERY = Replay(policies=POLICIES, pools=(16, 48), ways=(4,))


def record(
    path: Path, rows: list[list[int]], *, model: ModelSpec = MODEL, queries: int = 2, known: bool = True
) -> Trace:
    """A trace of requests, −1 for none, in rows; each has 30 tokens at first and gains 1 or 2 in a step."""
    rng = np.random.default_rng(len(rows))
    batch = max(map(len, rows), default=1)
    header = TraceHeader.of_model(model, batch=batch, query_length=queries, lengths_known=known)
    before: dict[int, int] = {}
    with TraceWriter(path, header) as writer:
        for row in rows:
            committed_B = np.array([before.setdefault(request, 30) for request in row])
            ids_GBSK = np.full((2, len(row), queries, 16), -1)
            for g, b, s in np.ndindex(ids_GBSK.shape[:3]):
                if row[b] >= 0:
                    ids_GBSK[g, b, s] = rng.permutation(committed_B[b] + s + 1)[:16]
            lengths_B = committed_B + queries if known else None
            accepted_B = rng.integers(1, queries + 1, len(row))
            writer.append(np.array(row), lengths_B, np.where(np.array(row) < 0, -1, accepted_B), ids_GBSK)
            before |= {request: before[request] + int(gained) for request, gained in zip(row, accepted_B, strict=True)}
    return open_trace(path)


def totals(row: ReplayRow) -> dict[tuple[int, str], int]:
    return {(group.group, name): spread.total for group in row.per_group for name, spread in group.stats.items()}


def all_totals(result: ReplayResult) -> list[dict[tuple[int, str], int]]:
    return [totals(row) for row in result.rows]


def test_requests_are_replayed_one_by_one(tmp_path: Path) -> None:
    rows = [[0, 1], [0, 1], [1, 0], [1, -1], [2, 1], [2, 1], [-1, 1]]
    trace = record(tmp_path / "x.topk", rows)
    whole = replay(trace, MODEL, EVERY)
    assert (whole.steps, whole.requests, whole.request_steps) == (7, 3, 12)
    alone = [
        all_totals(replay(cut_trace(trace, tmp_path / f"{request}.topk", requests=[request]), MODEL, EVERY))
        for request in range(3)
    ]
    for own, *parts in zip(all_totals(whole), *alone, strict=True):
        assert own == {key: sum(part[key] for part in parts) for key in own}


def test_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = record(tmp_path / "x.topk", [[0]] * 20)
    expected = replay(trace, MODEL, EVERY)
    monkeypatch.setattr(requests, "BLOCK_IDS", 100)
    monkeypatch.setattr(passes, "MOST_COUNTS", 1)
    assert replay(trace, MODEL, EVERY) == expected


def test_bytes_and_rates(tmp_path: Path) -> None:
    result = replay(record(tmp_path / "x.topk", [[0, 1]] * 6), MODEL, EVERY)
    # kv_lora_rank 16 and a rope part of 8, in bf16.
    assert result.row_bytes == 48
    for row in result.rows:
        stats = [{name: spread.total for name, spread in group.stats.items()} for group in row.per_group]
        read = [
            group["unique_misses"] + (row.policy in ("gather", "serve_install"))
            * (group["repeated_misses"] + group["window_reads"])
            for group in stats
        ]  # fmt: skip
        assert row.link_bytes_per_step == (read[0] * 1 + read[1] * 3) * 48 / 6
        selected = sum(
            group[name] for group in stats
            for name in ("hits", "unique_misses", "repeated_misses", "window_reads", "promoted_rows")
        )  # fmt: skip
        assert selected == 2 * 6 * 2 * 2 * 16, "two groups, six steps, two requests of two queries"
        assert row.hit_rate == sum(group["hits"] for group in stats) / selected
        distinct = sum(group[name] for group in stats for name in ("unique_hits", "unique_misses", "promoted_rows"))
        assert row.unique_hit_rate == sum(group["unique_hits"] for group in stats) / distinct
        assert row.unique_misses_per_step == sum(group["unique_misses"] for group in stats) / (2 * 6 * 2)
        assert row.unique_misses_p50 <= row.unique_misses_p99
    assert [(row.policy, row.pool_tokens) for row in result.rows if row.ways is None][-1] == ("gather", 32)


def test_a_cold_direct_step_never_reads_more_than_serve_install(tmp_path: Path) -> None:
    trace = record(tmp_path / "x.topk", [[0, 1, 2]])
    fifo, served = replay(trace, MODEL, Replay(policies=("fifo", "serve_install"), pools=(16,), ways=(4,))).rows
    assert fifo.unique_misses_per_step == served.unique_misses_per_step
    assert fifo.link_bytes_per_step < served.link_bytes_per_step


def test_optima_bound_the_curves(tmp_path: Path) -> None:
    result = replay(record(tmp_path / "x.topk", [[0]] * 30), MODEL, EVERY)
    rates = {(row.policy, row.pool_tokens): row.unique_hit_rate for row in result.rows}
    for pool in EVERY.pools:
        assert all(rates["set-belady", pool] >= rates[policy, pool] for policy in ("fifo", "lru", "clock"))
        assert all(rates["belady", pool] >= rates[policy, pool] for policy in (*POLICIES[:-1],))


def test_lru_pools_smaller_than_a_step_stand_beside_larger_ones(tmp_path: Path) -> None:
    trace = record(tmp_path / "x.topk", [[0, 1]] * 8)

    def lru(*pools: int) -> tuple[ReplayRow, ...]:
        return replay(trace, MODEL, Replay(policies=("full-lru",), pools=pools)).rows

    assert lru(60, 8, 24, 40) == tuple(lru(pool)[0] for pool in (8, 24, 40, 60))


def test_fewer_queries_are_those_of_a_trace_that_has_no_more(tmp_path: Path) -> None:
    trace = record(tmp_path / "x.topk", [[0, 1]] * 10, queries=3)
    header = TraceHeader.of_model(MODEL, batch=2, query_length=2)
    with TraceWriter(tmp_path / "y.topk", header) as writer:
        steps = trace.steps()
        for index in range(10):
            ids_GBSK = steps.ids_NGBSK[index][:, :, :2]
            writer.append(steps.request_ids_NB[index], steps.lengths_NB[index] - 1, None, ids_GBSK)
    cut = replay(trace, MODEL, Replay(policies=POLICIES, pools=(16,), ways=(4,), num_mtp_tokens=1))
    other = replay(open_trace(tmp_path / "y.topk"), MODEL, Replay(policies=POLICIES, pools=(16,), ways=(4,)))
    assert cut.rows == other.rows
    assert cut.query_length == 2


def test_without_lengths_every_token_may_stay(tmp_path: Path) -> None:
    result = replay(record(tmp_path / "x.topk", [[0]] * 12, known=False), MODEL, EVERY)
    for row in result.rows:
        assert row.stats["window_reads"].total == row.stats["promoted_rows"].total == 0
        assert 0 < row.hit_rate < 1


def test_warm_up(tmp_path: Path) -> None:
    result = replay(
        record(tmp_path / "x.topk", [[0], [0], [0, 1], [-1, 1], [-1, 1]]), MODEL, Replay(policies=("sieve",))
    )
    (row,) = result.rows
    assert [(part.first_step, part.end_step) for part in row.warm_up] == [(0, 1), (1, 2), (2, 3)]
    # Nothing is there in the first step, and nearly all in the last, where pools hold whole requests.
    assert row.warm_up[0].hit_rate == 0
    assert row.warm_up[-1].hit_rate > 0.5


def test_skipped_steps_fill_pools_and_are_not_counted(tmp_path: Path) -> None:
    trace = record(tmp_path / "x.topk", [[0], [0], [0, 1], [-1, 1], [-1, 1]])
    (whole,) = replay(trace, MODEL, Replay(policies=("sieve",))).rows
    result = replay(trace, MODEL, Replay(policies=("sieve",), skip_steps=2))
    (row,) = result.rows
    # The third step of each request alone: step 2 of the trace for one, the last for the other.
    assert (result.steps, result.request_steps) == (2, 2)
    assert row.warm_up == whole.warm_up
    assert row.hit_rate == row.warm_up[-1].hit_rate
    with pytest.raises(CastoffError, match=r"--skip-steps 3 leaves nothing of .*: no request has more than 3 steps"):
        replay(trace, MODEL, Replay(policies=("sieve",), skip_steps=3))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"policies": ("fifo", "lruu")}, r"--policy 'lruu' is unknown \(did you mean 'lru'.*allowed: fifo, lru, clock"),
        ({"policies": ()}, "--policy is empty"),
        ({"policies": ("fifo", "fifo")}, "must name each thing once, got fifo,fifo"),
        ({"pools": (0,)}, "--pool must be from 1 to .* tokens, got 0"),
        ({"pools": (2**40,)}, "--pool must be from 1 to"),
        ({"pools": (8192, 100)}, "multiple of --ways 16, got 100; the nearest is 96"),
        ({"ways": (4, 33)}, "--ways must be from 1 to 32, got 33"),
        ({"ways": (0,)}, "--ways must be from 1 to 32, got 0"),
        ({"num_mtp_tokens": 2}, "--mtp must be from 0 to 1, since .* has 2 query tokens per request and step, got 2"),
        ({"num_mtp_tokens": -1}, "--mtp must be from 0 to 1"),
    ],
)
def test_what_cannot_be_replayed(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    trace = record(tmp_path / "x.topk", [[0]])
    with pytest.raises(CastoffError, match=said):
        replay(trace, MODEL, Replay(**given))


def test_pools_without_sets_need_no_multiple() -> None:
    no_sets: tuple[PolicyName, ...] = ("sieve", "belady", "gather", "full-lru")
    assert Replay(policies=no_sets, pools=(7,)).pools == (7,)


def test_traces_of_other_models(tmp_path: Path) -> None:
    trace = record(tmp_path / "x.topk", [[0]])
    with pytest.raises(CastoffError, match=r"has 16 ids per query, and zai-org/GLM-5.2 selects 2,048; name.*--model"):
        replay(trace, load_model("zai-org/GLM-5.2"))
    with pytest.raises(CastoffError, match="has no indexer"):
        replay(trace, load_model("deepseek-ai/DeepSeek-V3"))
    two = read_model({**CONFIG, "num_hidden_layers": 1}, name="short", source="short")
    with pytest.raises(CastoffError, match=r"has selections of layer 1, and in short the layers that select are 0;"):
        replay(trace, two)


@pytest.mark.parametrize("rows", [[], [[-1], [-1]]])
def test_traces_without_requests(tmp_path: Path, rows: list[list[int]]) -> None:
    with pytest.raises(CastoffError, match=f"has {len(rows)} steps and no request in any; there is nothing to replay"):
        replay(record(tmp_path / "x.topk", rows), MODEL)


def test_lengths_that_stand_still(tmp_path: Path) -> None:
    header = TraceHeader.of_model(MODEL, batch=1, query_length=1)
    with TraceWriter(tmp_path / "x.topk", header) as writer:
        for length in (20, 21, 21):
            writer.append(np.array([5]), np.array([length]), None, np.zeros((2, 1, 1, 1), int))
    with pytest.raises(
        CastoffError, match="request 5 has 20 settled tokens in step 1 and 20 in step 2; a replay needs"
    ):
        replay(open_trace(tmp_path / "x.topk"), MODEL)


def test_positions_beyond_all_contexts(tmp_path: Path) -> None:
    header = TraceHeader.of_model(MODEL, batch=1, query_length=1, lengths_known=False)
    with TraceWriter(tmp_path / "x.topk", header) as writer:
        writer.append(np.array([5]), None, None, np.full((2, 1, 1, 1), 2**30))
    with pytest.raises(CastoffError, match="request 5 selects position 1,073,741,824; a replay takes positions below"):
        replay(open_trace(tmp_path / "x.topk"), MODEL)


def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    glm = load_model("zai-org/GLM-5.2")
    header = TraceHeader.of_model(glm, batch=1, query_length=1)
    with TraceWriter("mine.topk", header) as writer:
        for length in (5000, 5001):
            ids = np.broadcast_to(np.arange(2048), (21, 1, 1, 2048))
            writer.append(np.array([0]), np.array([length]), np.array([1]), ids)
    text = (Path(__file__).resolve().parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")
    code = text.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/replay.md", "exec"), names)
    # Both pools hold the whole of the first step's selection.
    assert set(names["rates"].values()) == {0.5}
    assert len(names["rates"]) == 2 * 2 + 2 + 2
