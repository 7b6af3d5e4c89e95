"""Lengths of the requests in a step, and the sums over queries that attention costs depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from castoff.dims import Dim, maximum, minimum


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` requests that have `context` tokens in the cache and bring `query` new ones."""

    count: Dim
    context: Dim
    query: Dim


@dataclass(frozen=True, slots=True)
class Lengths:
    """A batch as segments of equal requests: one segment for a uniform batch, several for a ragged one.

    Query i of a request (from 0) sees context + i + 1 positions, itself included.
    """

    segments: tuple[Segment, ...]

    @property
    def requests(self) -> Dim:
        """Number of requests."""
        return self._sum(lambda segment: segment.count)

    @property
    def tokens(self) -> Dim:
        """New tokens of all requests."""
        return self._sum(lambda segment: segment.count * segment.query)

    @property
    def total_tokens(self) -> Dim:
        """Cache rows in use after the step: context + query, over all requests."""
        return self._sum(lambda segment: segment.count * (segment.context + segment.query))

    @property
    def longest(self) -> Dim:
        """Longest request after the step."""
        longest: Dim = 0
        for segment in self.segments:
            longest = maximum(longest, segment.context + segment.query)
        return longest

    @property
    def visible(self) -> Dim:
        """Sum over queries of the positions each sees."""
        return self._sum(
            lambda segment: segment.count * (segment.query * segment.context + segment.query * (segment.query + 1) / 2)
        )

    def selected(self, topk: int) -> Dim:
        """Sum over queries of min(topk, positions it sees)."""

        def per_segment(segment: Segment) -> Dim:
            # The first `dense` queries of a request see at most topk positions and select them all.
            dense = minimum(maximum(topk - segment.context, 0), segment.query)
            rows = dense * segment.context + dense * (dense + 1) / 2 + (segment.query - dense) * topk
            return segment.count * rows

        return self._sum(per_segment)

    def with_query(self, query: Dim, *, grown_by: Dim = 0) -> Lengths:
        """The same requests `grown_by` tokens longer, of which the last `query` (or all, if fewer) are computed."""
        segments = []
        for segment in self.segments:
            total = segment.context + segment.query + grown_by
            own = minimum(query, total)
            segments.append(Segment(segment.count, total - own, own))
        return Lengths(tuple(segments))

    def _sum(self, term: Callable[[Segment], Dim]) -> Dim:
        total: Dim = 0
        for segment in self.segments:
            total = total + term(segment)
        return total
