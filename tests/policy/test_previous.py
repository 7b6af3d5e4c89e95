"""plan_gather against the dictionary model, and what it may find."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from castoff.policy import previous
from castoff.policy.arrays import Selection
from castoff.policy.previous import plan_gather
from tests.policy import model
from tests.policy.compare import Strict, assert_equal, plain_python, strict
from tests.policy.decoding import Decoding, Sizes, empty_pools, seeds, sizes

# One buffer for each query index, of at least K places.
buffers = sizes.map(
    lambda drawn: dataclasses.replace(drawn, sets=max(drawn.sets, drawn.queries), ways=max(drawn.ways, drawn.columns))
)


@pytest.mark.property
@given(given_sizes=buffers, seed=seeds)
def test_equals_the_model(given_sizes: Sizes, seed: int) -> None:
    decoding, tags = Decoding(given_sizes, seed), empty_pools(given_sizes).tags_RNW
    expected = model.Gather(given_sizes)
    for _ in range(30):
        for slot in decoding.started:
            tags[slot] = -1
            expected.buffers = {key: held for key, held in expected.buffers.items() if key[0] != slot}
        step, before = decoding.step(), tags.copy()
        plan = plan_gather(step.selection, tags)
        assert_equal(plan, expected.plan(step.selection))
        np.testing.assert_array_equal(tags, expected.tags())
        fetched = {int(row) for row in plan.fetch_rows_BX.reshape(-1) if row >= 0}
        assert len(fetched) == plan.counts_B.sum(), "nothing is fetched to one row twice"
        for token, row in zip(step.selection.topk_TK.reshape(-1), plan.rows_TK.reshape(-1), strict=True):
            if row >= 0:
                assert tags.reshape(-1)[row] == token, "the tag says what the row holds"
                assert row in fetched or before.reshape(-1)[row] == token, "a hit was there"
        decoding.finish(step)


@pytest.mark.property
@settings(max_examples=15)
@given(given_sizes=buffers, seed=seeds)
def test_plain_python_gives_the_same_and_stays_in_bounds(given_sizes: Sizes, seed: int) -> None:
    decoding, tags = Decoding(given_sizes, seed), empty_pools(given_sizes).tags_RNW
    plain = tags.copy().view(Strict)
    for _ in range(6):
        step = decoding.step()
        plan = plan_gather(step.selection, tags)
        with plain_python(previous):
            assert_equal(plan_gather(strict(step.selection), plain), plan)
        np.testing.assert_array_equal(tags, plain)
        decoding.finish(step)


def test_ids_twice_in_one_query_stay_in_bounds() -> None:
    tags = np.array([[[7, 7, 9]]], np.int32).view(Strict)
    topk = np.array([[7, 9, 9], [8, 8, 8]], np.int32)
    with plain_python(previous):
        for row in topk:
            selection = Selection(row[None], np.zeros(1, np.int64), np.array([11]), np.array([10]), np.array([0]))
            plan = plan_gather(selection, tags)
            assert [tags[0, 0, row] for row in plan.rows_TK[0]] == row.tolist()


def test_places_stay_and_the_lowest_free_are_filled() -> None:
    tags = np.array([[[3, 8, 1, 9]]], np.int32)
    topk = np.array([[10, 8, 2, 9]], np.int32)
    selection = Selection(topk, np.zeros(1, np.int64), np.array([11]), np.array([10]), np.array([0]))
    plan = plan_gather(selection, tags)
    assert plan.rows_TK.tolist() == [[0, 1, 2, 3]]
    assert tags.tolist() == [[[10, 8, 2, 9]]]
    assert plan.fetch_ids_BX.tolist() == [[10, 2, -1, -1]]
    # Position 10 was rejected and is of this step again: what the buffer has of it is not read.
    plan = plan_gather(selection, tags)
    assert plan.fetch_ids_BX.tolist() == [[10, -1, -1, -1]]
