"""How fast mode direct plans on one core, beside a plain C loop that does the same work on the same data.

    python benchmarks/bench_plan.py --runs 7

Every row is a policy with 1 or 4 queries per step: a pool of 8,192 rows in sets of 16, top-k 2,048 of a context of 64K
tokens. Prints ids per second, and appends rows to benchmarks/plan.csv. The C loop is compiled with `cc` first; the
plans of both must be equal. Run it on an idle machine; everything is pinned to one core.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rows import append_rows, flags, made_on_one_core, one_core

from castoff.policy.arrays import HITS, STAGED, STATS, UNIQUE_HITS, FetchPlan, Longs, PoolState, Selection
from castoff.policy.direct import plan_direct
from castoff.spec.offload import PoolPolicy

COLUMNS = (
    "date", "machine", "python", "numpy", "numba", "castoff", "policy", "configuration", "hit_rate", "runs",
    "numba_ids_per_s", "c_ids_per_s", "ratio",
)  # fmt: skip

SETS, WAYS, TOPK, CONTEXT = 512, 16, 2048, 65_536
WARM_STEPS, TIMED_STEPS = 60, 120
COMPILE = ("cc", "-O3", "-march=native", "-shared", "-fPIC")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments of one step's plan."""

    selection: Selection
    ring_first: Longs


def trace(queries: int, steps: int) -> Iterator[Call]:
    """Steps of one request whose selections are alike, with the recent past and a heavy tail of tokens that come often.

    A token's score is how often it is wanted at all (exponential, so that selections have a heavy tail), what the text
    is about now (a slow random walk back to 0), how recent it is, and noise of each query; the highest are selected.
    A step accepts 1 to S tokens.
    """
    rng = np.random.default_rng(queries)
    tokens = CONTEXT + queries * steps
    wanted, topic = 0.8 * rng.standard_exponential(tokens), rng.standard_normal(tokens)
    committed = CONTEXT
    for _ in range(steps):
        topic = 0.965 * topic + np.sqrt(1 - 0.965**2) * rng.standard_normal(tokens)
        topk = np.empty((queries, TOPK), np.int32)
        for s in range(queries):
            seen = committed + s + 1
            recent = 4 * np.exp((np.arange(seen) + 1 - seen) / 1024)
            score = wanted[:seen] + topic[:seen] + recent + 0.8 * rng.standard_normal(seen)
            best = np.argpartition(-score, TOPK)[:TOPK]
            topk[s] = best[np.argsort(-score[best])]
        yield Call(
            selection=Selection(
                topk,
                np.zeros(queries, np.int64),
                np.array([committed + queries]),
                np.array([committed]),
                np.array([0]),
            ),
            ring_first=np.array([max(CONTEXT, committed - queries)]),
        )
        committed += int(rng.integers(1, queries + 1))


def empty_pool() -> PoolState:
    pool, sets = (1, SETS, WAYS), (1, SETS)
    return PoolState(
        np.full(pool, -1, np.int32), np.full(pool, -1, np.int32), np.zeros(sets, np.int32), np.zeros(sets, np.int32)
    )


# Plans of all steps, to be made in order; a plan is good until the next is made.
Plans = list[Callable[[], FetchPlan]]


def numba_plans(policy: PoolPolicy, calls: Sequence[Call], state: PoolState) -> Plans:
    """As the package makes them."""
    queries = len(calls[0].selection.topk_TK)
    sizes = {"ring_tokens": 2 * queries, "staging_rows": queries * TOPK}
    return [partial(plan_direct, policy, call.selection, call.ring_first, state, **sizes) for call in calls]


def c_plans(loop: Any, policy: PoolPolicy, calls: Sequence[Call], state: PoolState) -> Plans:
    """As the C loop makes them; addresses and memory are ready before."""
    queries = len(calls[0].selection.topk_TK)
    width = queries * TOPK
    table = np.full((2, 4 * width), -1, np.int32)
    plan = FetchPlan(
        np.empty((queries, TOPK), np.int32),
        np.empty((1, width), np.int32),
        np.empty((1, width), np.int32),
        np.empty(1, np.int32),
        np.empty((1, len(STATS)), np.int32),
    )
    sizes = (get_args(PoolPolicy).index(policy), 1, queries, TOPK, 1, SETS, WAYS, 2 * queries, width)
    results = (*addresses(*table), table.shape[1], *addresses(*plan))

    def make(arguments: tuple[object, ...], _alive: object) -> FetchPlan:
        loop.plan_direct(*arguments)
        return plan

    return [
        partial(make, (*sizes, *addresses(*call.selection, call.ring_first, *state), *results), (table, state))
        for call in calls
    ]


def addresses(*arrays: np.ndarray) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(array.ctypes.data) for array in arrays]


def compile_loop(folder: Path) -> Any:
    """The C loop, for this machine."""
    library = folder / "plan.so"
    subprocess.run([*COMPILE, str(Path(__file__).with_name("plan.c")), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def seconds(plans: Plans) -> list[float]:
    """Time of each of the last TIMED_STEPS steps; the others warm the pool."""
    for plan in plans[:WARM_STEPS]:
        plan()
    times = []
    for plan in plans[WARM_STEPS:]:
        start = time.perf_counter()
        plan()
        times.append(time.perf_counter() - start)
    return times


def best(runs: Iterable[list[float]]) -> float:
    """Time of all steps, each as fast as in its best run: every run makes the same plans."""
    return sum(min(times) for times in zip(*runs, strict=True))


def check_equal(policy: PoolPolicy, calls: Sequence[Call], loop: Any) -> np.ndarray:
    """Both make the same plans and leave the same state; returns the statistics of the timed steps, summed."""
    state, c_state = empty_pool(), empty_pool()
    total = np.zeros(len(STATS), np.int64)
    both = zip(numba_plans(policy, calls, state), c_plans(loop, policy, calls, c_state), strict=True)
    for index, (numba_plan, c_plan) in enumerate(both):
        first, second = numba_plan(), c_plan()
        assert all((left == right).all() for left, right in zip(first, second, strict=True))
        total += first.stats_BC[0] * (index >= WARM_STEPS)
    assert all((left == right).all() for left, right in zip(state, c_state, strict=True))
    return total


def measure(policy: PoolPolicy, calls: Sequence[Call], loop: Any, runs: int) -> dict[str, object]:
    """One row; both run in turn."""
    queries = len(calls[0].selection.topk_TK)
    stats = check_equal(policy, calls, loop)
    numba_runs, c_runs = [], []
    for _ in range(runs):
        numba_runs.append(seconds(numba_plans(policy, calls, empty_pool())))
        c_runs.append(seconds(c_plans(loop, policy, calls, empty_pool())))
    numba_s, c_s = best(numba_runs), best(c_runs)
    ids = TIMED_STEPS * queries * TOPK
    rows = stats.sum() - stats[UNIQUE_HITS] - stats[STAGED]
    return {
        "policy": policy,
        "configuration": f"1 request, S={queries}, K={TOPK}, {SETS} sets of {WAYS} ways, {TIMED_STEPS} steps",
        "hit_rate": f"{stats[HITS] / rows:.3f}",
        "runs": runs,
        "numba_ids_per_s": f"{ids / numba_s:.4g}",
        "c_ids_per_s": f"{ids / c_s:.4g}",
        "ratio": f"{numba_s / c_s:.2f}",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every policy with 1 and with 4 queries, print it, append it to the file."""
    arguments = flags(argv, description=__doc__, runs=7, file="plan.csv")
    common = made_on_one_core("numpy", "numba")
    rows: list[dict[str, object]] = []
    with one_core(), tempfile.TemporaryDirectory() as folder:
        loop = compile_loop(Path(folder))
        for queries in (1, 4):
            calls = list(trace(queries, WARM_STEPS + TIMED_STEPS))
            for policy in get_args(PoolPolicy):
                row = measure(policy, calls, loop, arguments.runs)
                rows.append({**common, **row})
                print(
                    f"{policy:5} S={queries}: {float(str(row['numba_ids_per_s'])) / 1e6:.1f} M ids/s, "
                    f"{row['ratio']} times C's time, hit rate {row['hit_rate']}",
                    flush=True,
                )
    append_rows(arguments.output, COLUMNS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
