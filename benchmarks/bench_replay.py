"""How fast traces are replayed on one core.

    python benchmarks/bench_replay.py --runs 3

The trace is 1,000 steps of one request of 64K tokens, 21 index groups of one query of 2,048 ids each: 43 million ids.
Every policy is replayed with a pool of 8,192 rows, in sets of 16 where it has sets; full-lru with 16 sizes of pools
from 2,048 to 32,768 in one pass. Prints the time of each, and appends rows to benchmarks/replay.csv. Code is compiled
before. Run it on an idle machine; everything is pinned to one core.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bench_plan import TOPK, trace
from rows import append_rows, flags, made_on_one_core, one_core

from castoff.lab.policies import POLICIES
from castoff.lab.replay import Replay, replay
from castoff.spec.model import load_model
from castoff.trace.header import TraceHeader
from castoff.trace.reader import Trace, open_trace
from castoff.trace.writer import TraceWriter

COLUMNS = (
    "date", "machine", "python", "numpy", "numba", "castoff", "policy", "configuration", "hit_rate", "runs", "best_s",
    "ids_per_s",
)  # fmt: skip
MODEL = load_model("zai-org/GLM-5.2")
STEPS, POOL, SIZES = 1000, 8192, tuple(range(2048, 32_769, 2048))


def recorded(path: Path) -> Trace:
    """The trace; every group's ids are those of one, moved by its number, so that no two are alike."""
    header = TraceHeader.of_model(MODEL, batch=1, query_length=1)
    with TraceWriter(path, header) as writer:
        for call in trace(1, STEPS):
            moved_GK = call.selection.topk_TK + np.arange(header.num_groups)[:, np.newaxis]
            ids_GBSK = (moved_GK % call.selection.seq_lens_B).reshape(-1, 1, 1, TOPK)
            writer.append(np.zeros(1, int), call.selection.seq_lens_B, np.ones(1, int), ids_GBSK)
    return open_trace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every policy, print it, append it to the file."""
    arguments = flags(argv, description=__doc__, runs=3, file="replay.csv")
    common = made_on_one_core("numpy", "numba")
    rows: list[dict[str, object]] = []
    with one_core(), tempfile.TemporaryDirectory() as folder:
        made = recorded(Path(folder) / "x.topk")
        for policy in POLICIES:
            sizes = SIZES if policy == "full-lru" else (POOL,)
            given = Replay(policies=(policy,), pools=sizes)
            times = []
            for _ in range(arguments.runs + 1):
                start = time.perf_counter()
                result = replay(made, MODEL, given)
                times.append(time.perf_counter() - start)
            best_s = min(times[1:])
            row = next(row for row in result.rows if row.pool_tokens == POOL or policy == "gather")
            ids = STEPS * made.header.num_groups * TOPK
            ways = "" if row.ways is None else f", {row.ways} ways"
            pools = "2048:32768:2048" if policy == "full-lru" else str(row.pool_tokens)
            rows.append(
                {
                    **common,
                    "policy": policy,
                    "configuration": f"1 request, S=1, K={TOPK}, {made.header.num_groups} groups, {STEPS} steps, "
                    f"pool {pools}{ways}",
                    "hit_rate": f"{row.hit_rate:.3f}",
                    "runs": arguments.runs,
                    "best_s": f"{best_s:.3f}",
                    "ids_per_s": f"{ids / best_s:.4g}",
                }
            )
            print(f"{policy:13} {best_s:.2f} s, {ids / best_s / 1e6:.1f} M ids/s", flush=True)
    append_rows(arguments.output, COLUMNS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
