"""The closed forms over lengths against loops over every query of every request."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.dims import Dim
from castoff.ops.lengths import Lengths
from castoff.spec.scenario import RequestClass
from tests.generators import batches

# Around the lengths that `batches` draws, so that requests below, across and above the limit all occur.
limits = st.integers(1, 120)

SUMS: dict[str, Callable[[Lengths], Dim]] = {
    "requests": lambda lengths: lengths.requests,
    "tokens": lambda lengths: lengths.tokens,
    "total_tokens": lambda lengths: lengths.total_tokens,
    "longest": lambda lengths: lengths.longest,
    "visible": lambda lengths: lengths.visible,
    "selected 1": lambda lengths: lengths.selected(1),
    "selected 16": lambda lengths: lengths.selected(16),
    "selected 2048": lambda lengths: lengths.selected(2048),
}


def requests_of(lengths: Lengths) -> list[tuple[int, int]]:
    """(context, query) of every single request."""
    return [(int(s.context), int(s.query)) for s in lengths.classes for _ in range(int(s.count))]


def positions_seen(lengths: Lengths) -> list[int]:
    """What every query of every request sees: the tokens before it and itself."""
    return [context + i + 1 for context, query in requests_of(lengths) for i in range(query)]


@pytest.mark.property
class TestAgainstLoops:
    @given(batches())
    def test_counts(self, lengths: Lengths) -> None:
        requests = requests_of(lengths)
        assert lengths.requests == len(requests)
        assert lengths.tokens == sum(query for _, query in requests)
        assert lengths.total_tokens == sum(context + query for context, query in requests)
        assert lengths.longest == max(context + query for context, query in requests)

    @given(batches())
    def test_visible(self, lengths: Lengths) -> None:
        assert lengths.visible == sum(positions_seen(lengths))

    @given(batches(), limits)
    def test_selected(self, lengths: Lengths, topk: int) -> None:
        assert lengths.selected(topk) == sum(min(topk, seen) for seen in positions_seen(lengths))

    @given(batches(), limits)
    def test_selected_never_exceeds_what_is_visible_and_grows_with_the_limit(self, lengths: Lengths, topk: int) -> None:
        assert lengths.selected(topk) <= lengths.visible
        assert lengths.selected(topk) <= lengths.tokens * topk
        assert lengths.selected(topk) <= lengths.selected(topk + 1)
        longest = int(lengths.longest)
        assert lengths.selected(longest) == lengths.visible

    @given(batches(), st.integers(1, 5), st.integers(0, 4))
    def test_with_query_keeps_the_requests_and_lets_them_grow(self, lengths: Lengths, window: int, grown: int) -> None:
        window = min(window, *(context + query + grown for context, query in requests_of(lengths)))
        later = lengths.with_query(window, grown_by=grown)
        assert later.requests == lengths.requests
        assert later.tokens == window * lengths.requests
        assert later.total_tokens == lengths.total_tokens + grown * lengths.requests
        assert positions_seen(later) == [
            context + query + grown - window + i + 1 for context, query in requests_of(lengths) for i in range(window)
        ]


@pytest.mark.property
class TestRagged:
    @pytest.mark.parametrize("name", SUMS)
    @given(batches())
    def test_one_segment_per_request_is_the_same_batch(self, name: str, lengths: Lengths) -> None:
        ragged = Lengths(tuple(RequestClass(1, context, query) for context, query in requests_of(lengths)))
        assert SUMS[name](ragged) == SUMS[name](lengths)

    @pytest.mark.parametrize("name", SUMS)
    @given(lengths=batches(), other=batches())
    def test_two_batches_together(self, name: str, lengths: Lengths, other: Lengths) -> None:
        together = SUMS[name](Lengths(lengths.classes + other.classes))
        apart = [SUMS[name](lengths), SUMS[name](other)]
        assert together == (max(apart) if name == "longest" else sum(apart))


@pytest.mark.property
class TestArrays:
    """A batch whose dims are arrays is many batches at once."""

    @staticmethod
    def stacked(scenarios: list[Lengths]) -> Lengths:
        columns = zip(*(lengths.classes for lengths in scenarios), strict=True)
        return Lengths(tuple(RequestClass(*(np.array(dims) for dims in _transposed(column))) for column in columns))

    @pytest.mark.parametrize("name", SUMS)
    @given(data=st.data())
    def test_each_entry_equals_its_scalar(self, name: str, data: st.DataObject) -> None:
        num_segments = data.draw(st.integers(1, 3))
        batch = st.lists(batches(max_segments=1), min_size=num_segments, max_size=num_segments).map(
            lambda parts: Lengths(tuple(segment for part in parts for segment in part.classes))
        )
        scenarios = data.draw(st.lists(batch, min_size=1, max_size=6))
        found = SUMS[name](self.stacked(scenarios))
        assert isinstance(found, np.ndarray)
        assert found.tolist() == [SUMS[name](lengths) for lengths in scenarios]

    @given(st.lists(batches(max_segments=1), min_size=1, max_size=6))
    def test_with_query(self, scenarios: list[Lengths]) -> None:
        later = self.stacked(scenarios).with_query(1, grown_by=2)
        singles = [lengths.with_query(1, grown_by=2) for lengths in scenarios]
        assert np.asarray(later.visible).tolist() == [lengths.visible for lengths in singles]
        assert np.asarray(later.total_tokens).tolist() == [lengths.total_tokens for lengths in singles]

    def test_only_one_dim_is_an_array(self) -> None:
        contexts = np.array([0, 100, 5000])
        lengths = Lengths((RequestClass(2, contexts, 3),))
        for name, value in SUMS.items():
            expected = [value(Lengths((RequestClass(2, int(context), 3),))) for context in contexts]
            assert np.broadcast_to(value(lengths), 3).tolist() == expected, name


def _transposed(column: tuple[RequestClass, ...]) -> list[list[Any]]:
    return [
        [segment.count for segment in column],
        [segment.context for segment in column],
        [segment.query for segment in column],
    ]


class TestSizes:
    """Sums stay exact where they are large: a million tokens, thousands of requests."""

    def test_a_prefill_of_a_million_tokens(self) -> None:
        lengths = Lengths((RequestClass(1, 0, 1_000_000),))
        assert lengths.visible == 1_000_000 * 1_000_001 // 2
        # The first 2048 queries see 1 … 2048 tokens, all others select 2048.
        assert lengths.selected(2048) == 2048 * 2049 // 2 + (1_000_000 - 2048) * 2048

    def test_arrays_of_integers_do_not_overflow(self) -> None:
        lengths = Lengths((RequestClass(np.array([4096]), np.array([1_000_000]), np.array([4096])),))
        assert np.asarray(lengths.visible).tolist() == [4096 * (4096 * 1_000_000 + 4096 * 4097 // 2)]

    @pytest.mark.parametrize(
        ("context", "selected"), [(0, 1), (2046, 2047), (2047, 2048), (2048, 2048), (61_000, 2048)]
    )
    def test_a_decode_step_around_the_limit(self, context: int, selected: int) -> None:
        assert Lengths((RequestClass(1, context, 1),)).selected(2048) == selected
