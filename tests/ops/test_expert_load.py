"""Loads of the busiest rank where experts are chosen by popularities."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.ops.expert_load import POPULARITY_RATIO, power_law, skewed_load


@given(tokens=st.integers(1, 100_000), ranks=st.sampled_from([1, 4, 32, 256]), skew=st.sampled_from([1.0, 1.2, 2.0]))
def test_no_more_than_there_is(tokens: int, ranks: int, skew: float) -> None:
    load = skewed_load(tokens, 256, 8, ranks, skew)
    assert tokens * 8 / ranks * (1 - 1e-9) <= load.rows <= tokens * 8 * (1 + 1e-9)
    assert 0 < load.touched <= min(256 / ranks, load.rows) * (1 + 1e-9)


@given(tokens=st.integers(1, 100_000), more=st.integers(1, 1000), skew=st.sampled_from([1.0, 1.2, 2.0]))
def test_more_tokens_touch_no_fewer_experts(tokens: int, more: int, skew: float) -> None:
    less = skewed_load(tokens, 256, 8, 1, skew)
    assert skewed_load(tokens + more, 256, 8, 1, skew).touched >= less.touched


def test_arrays_are_as_their_entries() -> None:
    tokens = np.array([1.0, 7.0, 300.0])
    together = skewed_load(tokens, 256, 8, 8, 1.2)
    for place, count in enumerate(tokens):
        alone = skewed_load(float(count), 256, 8, 8, 1.2)
        assert (together.rows[place], together.touched[place]) == pytest.approx((alone.rows, alone.touched))  # type: ignore[index]


def test_tokens_that_choose_one_by_one() -> None:
    # 40 tokens, 8 different experts each, by popularities of the same law.
    rng, touched = np.random.default_rng(3), []
    for _ in range(40):
        popularity = power_law(rng.random(256), 1.0, POPULARITY_RATIO, 1.2)
        shares = popularity / popularity.sum()
        chosen = {expert for _ in range(40) for expert in rng.choice(256, 8, replace=False, p=shares).tolist()}
        touched.append(len(chosen))
    assert skewed_load(40, 256, 8, 1, 1.2).touched == pytest.approx(np.mean(touched), rel=0.06)


@pytest.mark.parametrize(("tokens", "ranks"), [(1, 8), (4, 8), (16, 8), (64, 8), (16, 32)])
def test_the_busiest_rank_is_found_after_the_draw(tokens: int, ranks: int) -> None:
    rng, rows, touched = np.random.default_rng(5), [], []
    for _ in range(400):
        popularity = power_law(rng.random(256), 1.0, POPULARITY_RATIO, 1.2)
        drawn = rng.multinomial(8 * tokens, popularity / popularity.sum()).reshape(ranks, -1)
        busiest = drawn[drawn.sum(axis=1).argmax()]
        rows.append(busiest.sum())
        touched.append(np.count_nonzero(busiest))
    load = skewed_load(tokens, 256, 8, ranks, 1.2)
    assert load.rows == pytest.approx(np.mean(rows), rel=0.1)
    # Drawn one by one an expert may be chosen twice by a token.
    assert load.touched == pytest.approx(np.mean(touched), rel=0.12)
