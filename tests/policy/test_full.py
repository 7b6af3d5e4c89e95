"""Policies without sets, and optima, against plain models and against each other."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castoff.policy import accesses, belady, full, stack_distance
from castoff.policy.accesses import Accesses, accesses_of
from castoff.policy.arrays import PROMOTED, STATS, UNIQUE_HITS, UNIQUE_MISSES
from castoff.policy.belady import count_belady, count_set_belady
from castoff.policy.full import POLICIES, count_full
from castoff.policy.over_steps import RequestSteps, count_direct, count_serve_install, new_state
from castoff.policy.stack_distance import NEVER, count_lru, depths
from tests.policy.caches import CACHES, count, most_hits, steps_of

pytestmark = pytest.mark.property
SEEDS = st.integers(0, 2**32 - 1)


def decoding(seed: int, *, steps: int = 25, tokens: int = 24, queries: int = 3, columns: int = 5) -> RequestSteps:
    """Steps of a request that gains some tokens in each: random selections, mostly of few tokens, and padding."""
    rng = np.random.default_rng(seed)
    gained_M = rng.integers(1, queries + 1, steps)
    committed_M = tokens + np.cumsum(gained_M) - gained_M
    topk_MSK = np.full((steps, queries, columns), -1, np.int32)
    for m in range(steps):
        for s in range(queries):
            visible = int(committed_M[m]) + s + 1
            spread = rng.choice([6, visible, visible + 3])
            wanted = (
                visible - 1 - rng.integers(0, spread, 2 * columns)
                if rng.random() < 0.3
                else rng.integers(0, spread, 2 * columns)
            )
            ids = rng.permutation(np.unique(wanted))[: rng.integers(0, columns + 1)]
            topk_MSK[m, s, : len(ids)] = np.maximum(ids, -2)
    mapping_MS = np.where(rng.random((steps, queries)) < 0.1, -1, 0)
    ring_first_M = np.maximum(tokens, committed_M - queries)
    return RequestSteps(topk_MSK, mapping_MS, committed_M + queries, committed_M, ring_first_M)


@contextmanager
def plain_python() -> Iterator[None]:
    """Nothing is compiled inside."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (accesses, belady, full, stack_distance):
            patch.setattr(module, "compiled", lambda function: function)
        yield


def distinct_hits(stats_MC: np.ndarray) -> int:
    return int(stats_MC[:, UNIQUE_HITS].sum())


def distinct_misses(stats_MC: np.ndarray) -> int:
    return int(stats_MC[:, [UNIQUE_MISSES, PROMOTED]].sum())


@given(SEEDS)
def test_accesses(seed: int) -> None:
    own = decoding(seed)
    steps, windows = steps_of(own)
    # A block at a time, and all at once.
    parts = [RequestSteps(*(array[first : first + 4] for array in own)) for first in range(0, 25, 4)]
    for made in (accesses_of(parts), accesses_of([own])):
        assert made.window_M.tolist() == windows
        for m, step in enumerate(steps):
            inside = slice(made.starts_M[m], made.starts_M[m + 1])
            tokens = made.ids_I[made.keys_A[inside]].tolist()
            assert list(zip(tokens, made.rows_A[inside], made.in_ring_A[inside], strict=True)) == list(step)
        assert made.most_distinct == max(map(len, steps))


@pytest.mark.parametrize("policy", list(POLICIES))
@given(SEEDS, st.integers(1, 30))
def test_counts_are_those_of_a_plain_model(policy: full.FullPolicy, seed: int, pool: int) -> None:
    own = decoding(seed)
    expected = count(CACHES[policy](pool), pool, *steps_of(own))
    np.testing.assert_array_equal(count_full(policy, accesses_of([own]), pool), expected)


@settings(max_examples=10)
@given(SEEDS, st.integers(2, 30))
def test_plain_python_counts_the_same(seed: int, pool: int) -> None:
    def counts() -> list[np.ndarray]:
        made = accesses_of([decoding(seed)])
        fits = max(pool, made.most_distinct)
        by_policy = [count_full(policy, made, pool) for policy in POLICIES]
        return [
            *by_policy, count_belady(made, pool), count_set_belady(made, pool // 2, 2), *count_lru(made, [fits, 99])
        ]  # fmt: skip

    compiled = counts()
    with plain_python():
        plain = counts()
    for left, right in zip(compiled, plain, strict=True):
        np.testing.assert_array_equal(left, right)


@given(SEEDS)
def test_lru_of_all_sizes_in_one_pass(seed: int) -> None:
    made = accesses_of([decoding(seed, steps=60)])
    pools = range(made.most_distinct, 60)
    for pool, stats_MC in zip(pools, count_lru(made, pools), strict=True):
        np.testing.assert_array_equal(stats_MC, count_full("full-lru", made, pool))


def test_depths_of_many_steps_outlast_the_tree() -> None:
    rng = np.random.default_rng(0)
    keys_A = rng.integers(0, 10, 4000).astype(np.int32)
    flags = np.zeros(4000, np.bool_)
    ones, nothing = np.ones(4000, np.int32), np.zeros(4000, np.int32)
    made = Accesses(np.arange(4001), keys_A, ones, flags, nothing, np.arange(10, dtype=np.int32))
    stack: list[int] = []
    for key, depth in zip(keys_A.tolist(), depths(made).tolist(), strict=True):
        assert depth == (stack.index(key) if key in stack else NEVER)
        stack = [key, *(other for other in stack if other != key)]


@given(SEEDS)
def test_a_larger_pool_never_misses_more_by_lru(seed: int) -> None:
    made = accesses_of([decoding(seed)])
    pools = range(made.most_distinct, 40)
    misses_PM = count_lru(made, pools)[:, :, [UNIQUE_MISSES, PROMOTED]].sum(axis=2)
    assert (np.diff(misses_PM, axis=0) <= 0).all(), "in no step"


@pytest.mark.parametrize("policy", ["belady", *POLICIES])
@given(SEEDS)
def test_with_room_for_all_only_first_touches_miss(policy: str, seed: int) -> None:
    made = accesses_of([decoding(seed)])
    pool = len(made.ids_I) + 1
    stats_MC = count_belady(made, pool) if policy == "belady" else count_full(policy, made, pool)  # type: ignore[arg-type]
    assert distinct_misses(stats_MC) == len(made.ids_I)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 3), st.integers(1, 3))
def test_no_choice_of_what_to_keep_finds_more_than_belady(seed: int, ways: int, sets: int) -> None:
    own = decoding(seed, steps=7, tokens=4, queries=2, columns=2)
    made, (steps, _) = accesses_of([own]), steps_of(own)
    assert distinct_hits(count_belady(made, ways)) == most_hits(steps, ways)
    of_sets = [[[entry for entry in step if entry[0] % sets == n] for step in steps] for n in range(sets)]
    assert distinct_hits(count_set_belady(made, sets, ways)) == sum(most_hits(part, ways) for part in of_sets)


@given(SEEDS, st.sampled_from([1, 2, 4, 8]), st.integers(1, 6))
def test_belady_is_a_bound_of_its_associativity(seed: int, ways: int, sets: int) -> None:
    own = decoding(seed)
    made = accesses_of([own])
    of_sets, pool = count_set_belady(made, sets, ways), sets * ways
    best = count_belady(made, pool)
    assert distinct_hits(best) >= distinct_hits(of_sets)
    assert distinct_misses(best) <= distinct_misses(of_sets)
    for policy in POLICIES:
        assert distinct_hits(count_full(policy, made, pool)) <= distinct_hits(best)
    others = [
        count_serve_install(own, new_state(sets, ways)),
        *(count_direct(policy, own, new_state(sets, ways)) for policy in ("fifo", "lru", "clock")),
    ]
    for stats_MC in others:
        assert distinct_hits(stats_MC) <= distinct_hits(of_sets)
        assert stats_MC[:, [UNIQUE_HITS, UNIQUE_MISSES, PROMOTED]].sum() == len(made.keys_A)


@given(SEEDS, st.sampled_from([1, 5, 16, 32]))
def test_one_set_is_no_sets(seed: int, ways: int) -> None:
    """CLOCK in one set of all rows is CLOCK without sets; so are the optima."""
    own = decoding(seed)
    made = accesses_of([own])
    np.testing.assert_array_equal(count_direct("clock", own, new_state(1, ways)), count_full("full-clock", made, ways))
    assert distinct_hits(count_set_belady(made, 1, ways)) == distinct_hits(count_belady(made, ways))


@given(SEEDS)
def test_counts_add_up(seed: int) -> None:
    own = decoding(seed)
    made, (steps, windows) = accesses_of([own]), steps_of(own)
    rows = sum(windows) + sum(rows for step in steps for _, rows, _ in step)
    for stats_MC in (
        count_belady(made, 9),
        count_set_belady(made, 3, 3),
        *(count_full(name, made, 9) for name in POLICIES),
    ):
        total = dict(zip(STATS, stats_MC.sum(axis=0).tolist(), strict=True))
        assert rows == sum(
            total[name] for name in ("hits", "unique_misses", "repeated_misses", "window_reads", "promoted_rows")
        )
