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
