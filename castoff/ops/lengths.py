"""Lengths of the requests in a step, and the sums over queries that attention costs depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from castoff.dims import Dim, maximum, minimum
from castoff.spec.scenario import RequestClass


@dataclass(frozen=True, slots=True)
class Lengths:
    """A batch as classes of equal requests: one for a uniform batch, several for a ragged one.

    Query i of a request (from 0) sees context + i + 1 positions, itself included.
    """

    classes: tuple[RequestClass, ...]

    @property
    def requests(self) -> Dim:
        """Number of requests."""
        return self._sum(lambda entry: entry.count)

    @property
    def tokens(self) -> Dim:
        """New tokens of all requests."""
        return self._sum(lambda entry: entry.count * entry.query)

    @property
    def total_tokens(self) -> Dim:
        """Cache rows in use after the step: context + query, over all requests."""
        return self._sum(lambda entry: entry.count * (entry.context + entry.query))

    @property
    def longest(self) -> Dim:
        """Longest request after the step."""
        longest: Dim = 0
        for entry in self.classes:
            longest = maximum(longest, entry.context + entry.query)
        return longest

    @property
    def visible(self) -> Dim:
        """Sum over queries of the positions each sees."""
        return self._sum(
            lambda entry: entry.count * (entry.query * entry.context + entry.query * (entry.query + 1) / 2)
        )

    def selected(self, topk: int) -> Dim:
        """Sum over queries of min(topk, positions it sees)."""

        def per_entry(entry: RequestClass) -> Dim:
            # The first `dense` queries of a request see at most topk positions and select them all.
            dense = minimum(maximum(topk - entry.context, 0), entry.query)
            rows = dense * entry.context + dense * (dense + 1) / 2 + (entry.query - dense) * topk
            return entry.count * rows

        return self._sum(per_entry)

    def beyond(self, topk: int) -> Dim:
        """Queries that see more than topk positions."""
        return self._sum(
            lambda entry: entry.count * (entry.query - minimum(maximum(topk - entry.context, 0), entry.query))
        )

    def with_query(self, query: Dim, *, grown_by: Dim = 0) -> Lengths:
        """The same requests `grown_by` tokens longer, of which the last `query` (or all, if fewer) are computed."""
        classes = []
        for entry in self.classes:
            total = entry.context + entry.query + grown_by
            own = minimum(query, total)
            classes.append(RequestClass(entry.count, total - own, own))
        return Lengths(tuple(classes))

    def _sum(self, term: Callable[[RequestClass], Dim]) -> Dim:
        total: Dim = 0
        for entry in self.classes:
            total = total + term(entry)
        return total
