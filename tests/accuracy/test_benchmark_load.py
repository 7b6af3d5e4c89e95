"""Loads of the busiest rank as a benchmark of experts draws them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.accuracy.benchmark_load import drawn_load, even_load


def sampled(tokens: int, experts: int, chosen: int, ranks: int, skew: float, draws: int) -> tuple[float, float]:
    """Rows and touched experts of the busiest rank, drawn anew."""
    rng = np.random.default_rng(7)
    low, high = (1.0, 0.8 * tokens) if tokens * chosen > experts else (0.01, 2.0)
    rows, touched = [], []
    for _ in range(draws):
        weights = (low ** (1 - skew) + (high ** (1 - skew) - low ** (1 - skew)) * rng.random(experts)) ** (
            1 / (1 - skew)
        )
        loads = np.round(weights / weights.sum() * tokens * chosen)
        busiest = max(loads.reshape(ranks, -1), key=lambda own: own.sum())
        rows.append(busiest.sum())
        touched.append(np.count_nonzero(busiest))
    return float(np.mean(rows)), float(np.mean(touched))


@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.parametrize("skew", [1.01, 1.2])
@pytest.mark.parametrize("tokens", [256, 2048, 16384])
def test_the_table_is_what_draws_give(tokens: int, skew: float, ranks: int) -> None:
    load = drawn_load(tokens, 256, 8, ranks, skew)
    rows, touched = sampled(tokens, 256, 8, ranks, skew, 60)
    assert load.rows == pytest.approx(rows, rel=0.12)
    assert load.touched == pytest.approx(touched, rel=0.12)


@given(tokens=st.integers(1, 100_000), ranks=st.sampled_from([1, 4, 32, 256]), skew=st.sampled_from([1.0, 1.2, 2.0]))
def test_no_more_than_there_is(tokens: int, ranks: int, skew: float) -> None:
    load = drawn_load(tokens, 256, 8, ranks, skew)
    assert tokens * 8 / ranks * (1 - 1e-9) <= load.rows <= tokens * 8 * (1 + 1e-9)
    assert 0 < load.touched <= 256 / ranks


def test_arrays_and_repeats() -> None:
    tokens = np.array([1.0, 7.0, 300.0])
    together = drawn_load(tokens, 256, 8, 8, 1.2)
    for place, count in enumerate(tokens):
        alone = drawn_load(float(count), 256, 8, 8, 1.2)
        assert (together.rows[place], together.touched[place]) == pytest.approx((alone.rows, alone.touched))  # type: ignore[index]


@pytest.mark.parametrize(
    ("tokens", "ranks", "rows", "touched"), [(1, 1, 8, 8), (1, 32, 1, 1), (32, 1, 256, 256), (64, 8, 64, 32)]
)
def test_experts_dealt_in_turn(tokens: int, ranks: int, rows: float, touched: float) -> None:
    load = even_load(tokens, 256, 8, ranks)
    assert (load.rows, load.touched) == (rows, touched)
