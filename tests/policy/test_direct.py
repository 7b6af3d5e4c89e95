"""plan_direct against the dictionary model, its invariants, and hard corners."""

import dataclasses
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from castoff.policy import direct
from castoff.policy.arrays import HITS, PROMOTED, STAGED, STATS, WINDOW_READS, FetchPlan, PoolState, Selection
from castoff.policy.direct import plan_direct
from castoff.spec.offload import PoolPolicy
from tests.policy import model
from tests.policy.compare import assert_equal, plain_python, strict
from tests.policy.decoding import Array, Decoding, Sizes, Step, clear_slot, empty_pools, seeds, sizes

POLICIES = get_args(PoolPolicy)


def run(policy: PoolPolicy, given_sizes: Sizes, step: Step, state: PoolState) -> FetchPlan:
    return plan_direct(
        policy,
        step.selection,
        step.ring_first,
        state,
        ring_tokens=given_sizes.ring_tokens,
        staging_rows=given_sizes.staging_rows,
    )


def check_invariants(given_sizes: Sizes, step: Step, before: PoolState, state: PoolState, plan: FetchPlan) -> None:
    """What holds of every step, whatever the policy."""
    queries = len(step.selection.topk_TK) // len(step.slots)
    assert (state.hands_RN >= 0).all()
    assert (state.hands_RN < given_sizes.ways).all()
    for tags in state.tags_RNW:
        held = tags[tags >= 0]
        assert len(np.unique(held)) == len(held), "a token is in one place"
        assert (np.nonzero(tags >= 0)[0] == held % given_sizes.sets).all(), "a token is in its set"
    for slot in set(range(given_sizes.slots)) - set(step.slots):
        for old, new in zip(before, state, strict=True):
            assert (old[slot] == new[slot]).all(), "who is not in the call keeps its pool"
    for b, slot in enumerate(step.slots):
        tokens = slice(b * queries, (b + 1) * queries)
        ids, rows = step.selection.topk_TK[tokens].reshape(-1), plan.rows_TK[tokens].reshape(-1)
        stats = dict(zip(STATS, plan.stats_BC[b].tolist(), strict=True))
        valid = rows >= 0
        assert valid.sum() == sum(stats[name] for name in STATS if name not in ("unique_hits", "staged_rows"))
        fetched = plan.fetch_rows_BX[b, : plan.counts_B[b]]
        assert len(fetched) == stats["unique_misses"] + stats["promoted_rows"]
        assert len(np.unique(fetched)) == len(fetched), "nothing is fetched to one row twice"
        if slot < 0:
            assert not valid.any()
            continue
        committed = int(step.selection.committed_B[b])
        assert (state.tags_RNW[slot] < committed).all(), "no pool has a token that may yet be rejected"
        check_rows(given_sizes, slot, committed, ids[valid], rows[valid], before, state, fetched)


def check_rows(
    given_sizes: Sizes,
    slot: int,
    committed: int,
    ids: Array,
    rows: Array,
    before: PoolState,
    state: PoolState,
    fetched: Array,
) -> None:
    pool = given_sizes.sets * given_sizes.ways
    for token, row in zip(ids.tolist(), rows.tolist(), strict=True):
        if row >= given_sizes.staging_start:
            assert 0 <= row - given_sizes.staging_start - slot * given_sizes.staging_rows < given_sizes.staging_rows
            assert row in fetched
        elif row >= given_sizes.ring_start:
            assert token >= committed
            first = given_sizes.ring_start + slot * given_sizes.ring_tokens
            assert row == first + token % given_sizes.ring_tokens
        else:
            place = row - slot * pool
            assert state.tags_RNW[slot].reshape(-1)[place] == token, "the tag says what the row holds"
            assert state.used_RNW[slot].reshape(-1)[place] == committed
            was_there = before.tags_RNW[slot].reshape(-1)[place] == token
            assert was_there == (row not in fetched), "a hit was resident, anything else is fetched"
    assert len(set(zip(ids.tolist(), rows.tolist(), strict=True))) == len(set(ids.tolist())), "an id has one row"


@pytest.mark.property
@pytest.mark.parametrize("policy", POLICIES)
@given(given_sizes=sizes, seed=seeds)
def test_equals_the_model(policy: PoolPolicy, given_sizes: Sizes, seed: int) -> None:
    decoding, state = Decoding(given_sizes, seed), empty_pools(given_sizes)
    expected = model.Direct(policy, given_sizes)
    for _ in range(25):
        for slot in decoding.started:
            clear_slot(state, slot)
            expected.pools[slot] = model.Pool()
        step, before = decoding.step(), PoolState(*(array.copy() for array in state))
        plan = run(policy, given_sizes, step, state)
        assert_equal(plan, expected.plan(step.selection, step.ring_first))
        assert_equal(state, expected.state())
        check_invariants(given_sizes, step, before, state, plan)
        decoding.finish(step)


@pytest.mark.property
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15)
@given(given_sizes=sizes, seed=seeds)
def test_plain_python_gives_the_same_and_stays_in_bounds(policy: PoolPolicy, given_sizes: Sizes, seed: int) -> None:
    decoding, state = Decoding(given_sizes, seed), empty_pools(given_sizes)
    plain = strict(state)
    for _ in range(6):
        step = decoding.step()
        plan = run(policy, given_sizes, step, state)
        with plain_python(direct):
            assert_equal(
                plan, run(policy, given_sizes, dataclasses.replace(step, selection=strict(step.selection)), plain)
            )
        assert_equal(state, plain)
        decoding.finish(step)


class OneRequest(RuleBasedStateMachine):
    """One request whose selections Hypothesis draws, in a pool of its choice; what fails shrinks to few ids."""

    @initialize(given_sizes=st.builds(Sizes, st.just(1), *[st.integers(1, 4)] * 4), policy=st.sampled_from(POLICIES))
    def start(self, given_sizes: Sizes, policy: PoolPolicy) -> None:
        self.sizes, self.policy = given_sizes, policy
        self.state, self.model = empty_pools(given_sizes), model.Direct(policy, given_sizes)
        self.first = self.committed = 1

    @rule(data=st.data(), accepted=st.integers(1, 4))
    def decode(self, data: st.DataObject, accepted: int) -> None:
        queries = data.draw(st.integers(1, self.sizes.queries))
        ids = st.integers(-1, self.committed + queries)
        row = st.lists(ids, min_size=self.sizes.columns, max_size=self.sizes.columns)
        topk = data.draw(st.lists(row, min_size=queries, max_size=queries))
        mapping = data.draw(st.lists(st.sampled_from([-1, 5, 5, 5]), min_size=queries, max_size=queries))
        committed = np.array([self.committed])
        selection = Selection(
            np.array(topk, np.int32), np.array(mapping), committed + queries, committed, np.array([0])
        )
        start = max(self.first, self.committed + self.sizes.queries - self.sizes.ring_tokens)
        step = Step([0], [queries], selection, np.array([start]))
        before = PoolState(*(array.copy() for array in self.state))
        plan = run(self.policy, self.sizes, step, self.state)
        assert_equal(plan, self.model.plan(selection, step.ring_first))
        check_invariants(self.sizes, step, before, self.state, plan)
        self.committed += min(accepted, queries)

    @rule(prompt=st.integers(1, 20))
    def replace(self, prompt: int) -> None:
        clear_slot(self.state, 0)
        self.model.pools[0] = model.Pool()
        self.first = self.committed = prompt

    @invariant()
    def state_is_the_models(self) -> None:
        assert_equal(self.state, self.model.state())


TestOneRequest = pytest.mark.property(OneRequest.TestCase)
TestOneRequest.settings = settings(max_examples=40, stateful_step_count=20)


def one_call(
    policy: PoolPolicy, given_sizes: Sizes, topk: Array, committed: int, state: PoolState, *, ring_first: int = 0
) -> FetchPlan:
    queries = len(topk)
    selection = Selection(
        topk, np.zeros(queries, np.int64), np.array([committed + queries]), np.array([committed]), np.array([0])
    )
    return run(policy, given_sizes, Step([0], [queries], selection, np.array([ring_first])), state)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_of_16_rows_serves_8192_ids(policy: PoolPolicy) -> None:
    given_sizes = Sizes(slots=1, sets=1, ways=16, queries=4, columns=2048)
    rng, expected = np.random.default_rng(0), model.Direct(policy, given_sizes)
    state = empty_pools(given_sizes)
    for committed in (20_000, 20_003):
        topk = np.stack([rng.permutation(20_000)[:2048] for _ in range(4)]).astype(np.int32)
        plan = one_call(policy, given_sizes, topk, committed, state, ring_first=19_990)
        first = expected.plan(
            Selection(topk, np.zeros(4, np.int64), np.array([committed + 4]), np.array([committed]), np.array([0])),
            np.array([19_990]),
        )
        assert_equal(plan, first)
        assert_equal(state, expected.state())
        assert plan.stats_BC[0, STAGED] > 6000


@pytest.mark.parametrize("policy", POLICIES)
def test_the_longest_contexts(policy: PoolPolicy) -> None:
    given_sizes = Sizes(slots=1, sets=7, ways=3, queries=1, columns=4)
    state = empty_pools(given_sizes)
    last = 2**31 - 2
    topk = np.array([[last, last - 1, 5, last - 2]], np.int32)
    plan = one_call(policy, given_sizes, topk, last, state, ring_first=last - 1)
    assert plan.stats_BC[0, WINDOW_READS] == 1
    assert plan.stats_BC[0, PROMOTED] == 1
    assert plan.fetch_ids_BX[0].tolist() == [-2 - (last - 1), 5, last - 2, -1]
    again = one_call(policy, given_sizes, topk[:, 1:], last + 1, state, ring_first=last)
    assert again.stats_BC[0, HITS] == 3


def test_a_request_of_no_length_selects_nothing() -> None:
    given_sizes = Sizes(slots=1, sets=2, ways=2, queries=2, columns=3)
    state = empty_pools(given_sizes)
    selection = Selection(
        np.zeros((2, 3), np.int32), np.zeros(2, np.int64), np.array([0]), np.array([0]), np.array([0])
    )
    plan = run("lru", given_sizes, Step([0], [2], selection, np.array([0])), state)
    assert (plan.rows_TK == -1).all()
    assert not plan.stats_BC.any()
    assert_equal(state, empty_pools(given_sizes))


def test_rows_in_the_order_of_the_definition() -> None:
    """A step of two queries by hand: 2 sets of 2 ways, 5 settled tokens, positions 5 and 6 of this step."""
    given_sizes = Sizes(slots=1, sets=2, ways=2, queries=2, columns=4)
    state = empty_pools(given_sizes)
    plan = one_call("fifo", given_sizes, np.array([[4, 2, 5, 0], [0, 6, 3, -1]], np.int32), 5, state, ring_first=3)
    ring, staging = 4, 8
    # 4 and 2 fill set 0, so 0 overflows; 3 is the first of set 1; 5 and 6 are in the ring at 5 % 4 and 6 % 4.
    assert plan.rows_TK.tolist() == [[0, 1, ring + 1, staging + 3], [staging + 3, ring + 2, 2, -1]]
    # 4 and 3 are still in the ring, from which they are copied.
    assert plan.fetch_ids_BX[0].tolist() == [-6, 2, 0, -5, -1, -1, -1, -1]
    assert plan.fetch_rows_BX[0].tolist() == [0, 1, staging + 3, 2, -1, -1, -1, -1]
    assert plan.counts_B.tolist() == [4]
    assert dict(zip(STATS, plan.stats_BC[0].tolist(), strict=True)) == {
        "hits": 0,
        "unique_hits": 0,
        "unique_misses": 2,
        "repeated_misses": 1,
        "window_reads": 2,
        "promoted_rows": 2,
        "staged_rows": 1,
    }
    assert state.tags_RNW.tolist() == [[[4, 2], [3, -1]]]


@pytest.mark.parametrize(("policy", "gone"), [("fifo", 10), ("lru", 12), ("clock", 12)])
def test_what_a_policy_gives_up(policy: PoolPolicy, gone: int) -> None:
    """One set of 3 ways gets 10, 11, 12, then 10 again and 11 again, then 13."""
    given_sizes = Sizes(slots=1, sets=1, ways=3, queries=1, columns=3)
    state = empty_pools(given_sizes)
    for committed, ids in enumerate([[10, 11, 12], [10, -1, -1], [11, -1, -1], [13, -1, -1]], start=20):
        one_call(policy, given_sizes, np.array([ids], np.int32), committed, state)
    assert set(state.tags_RNW.reshape(-1).tolist()) == {10, 11, 12, 13} - {gone}
