"""What a replay found.

Axes: G index groups, M steps of all requests, C counters of `policy.arrays.STATS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from castoff.lab.policies import READS_EVERY_ROW, PolicyName
from castoff.policy.arrays import (
    HITS,
    PROMOTED,
    REPEATED_MISSES,
    STATS,
    UNIQUE_HITS,
    UNIQUE_MISSES,
    WINDOW_READS,
    Ints,
    Longs,
)

_SELECTED = (HITS, UNIQUE_MISSES, REPEATED_MISSES, WINDOW_READS, PROMOTED)
_DISTINCT = (UNIQUE_HITS, UNIQUE_MISSES, PROMOTED)
_QUANTILES = (10, 50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A count of `policy.arrays.STATS`: in all, and how it is spread over the steps of all requests."""

    total: int
    mean: float
    p10: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One index group. group: its place in the trace. layers: owner first."""

    group: int
    layers: tuple[int, ...]
    hit_rate: float
    unique_hit_rate: float
    unique_misses_per_step: float
    stats: Mapping[str, Spread]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Steps of requests, counted from the first of each, from `first_step` up to but without `end_step`."""

    first_step: int
    end_step: int
    hit_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRow:
    """One policy with one pool.

    ways: None where there are no sets. pool_tokens: rows of a request's pool in a layer; of gather, of its buffers.
    hit_rate: share of the selected rows whose token was in the pool. unique_hit_rate: share of the distinct settled
    tokens of a request's step that were there. unique_misses_…: distinct tokens that a request reads from the host in a
    step, per index group; p50 and p99 over steps and groups, of_steps the mean over groups of each step.
    link_bytes_per_step: of all requests and layers, on average over the steps. stats: counts of a request's step in one
    group. warm_up: by the age of requests.
    """

    policy: PolicyName
    ways: int | None
    pool_tokens: int
    hit_rate: float
    unique_hit_rate: float
    unique_misses_per_step: float
    unique_misses_p50: float
    unique_misses_p99: float
    unique_misses_of_steps: Spread
    link_bytes_per_step: float
    stats: Mapping[str, Spread]
    per_group: tuple[GroupRow, ...]
    warm_up: tuple[WarmUp, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """All rows of a replay, and what was replayed.

    steps: those in which some request counts. request_steps: rows of all of them. query_length: queries of a
    request in a step, at most. row_bytes: of a token in one layer.
    """

    trace: str
    model: str
    steps: int
    requests: int
    request_steps: int
    query_length: int
    index_topk: int
    row_bytes: int
    rows: tuple[ReplayRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """What the rows of a replay have in common. groups: their places. ages_M: steps since each request's first.
    counted_M: whether a step counts, save in the warm-up. num_steps: of the trace, in which some request counts."""

    groups: Sequence[int]
    layers: Sequence[tuple[int, ...]]
    ages_M: Longs
    counted_M: npt.NDArray[np.bool_]
    num_steps: int
    row_bytes: int

    def row(self, policy: PolicyName, ways: int | None, pool_tokens: int, stats_GMC: Ints) -> ReplayRow:
        """The row of these counts."""
        warm_up = self._warm_up(stats_GMC)
        stats_GMC = stats_GMC[:, self.counted_M]
        totals_GC = stats_GMC.sum(axis=1, dtype=np.int64)
        whole = _spreads(stats_GMC.reshape(1, -1, len(STATS)))[0]
        misses = whole["unique_misses"]
        link_rows_G = totals_GC[:, _read(policy)].sum(axis=1)
        layers_G = np.array([len(layers) for layers in self.layers])
        return ReplayRow(
            policy=policy,
            ways=ways,
            pool_tokens=pool_tokens,
            hit_rate=hit_rate(totals_GC.sum(axis=0)),
            unique_hit_rate=unique_hit_rate(totals_GC.sum(axis=0)),
            unique_misses_per_step=misses.mean,
            unique_misses_p50=misses.p50,
            unique_misses_p99=misses.p99,
            unique_misses_of_steps=_spread_of(stats_GMC[:, :, UNIQUE_MISSES].mean(axis=0)),
            link_bytes_per_step=float((link_rows_G * layers_G).sum() * self.row_bytes / self.num_steps),
            stats=whole,
            per_group=self._per_group(stats_GMC, totals_GC),
            warm_up=warm_up,
        )

    def _per_group(self, stats_GMC: Ints, totals_GC: Longs) -> tuple[GroupRow, ...]:
        every = zip(self.groups, self.layers, totals_GC, _spreads(stats_GMC), strict=True)
        return tuple(
            GroupRow(
                group=group,
                layers=layers,
                hit_rate=hit_rate(totals_C),
                unique_hit_rate=unique_hit_rate(totals_C),
                unique_misses_per_step=spreads["unique_misses"].mean,
                stats=spreads,
            )
            for group, layers, totals_C, spreads in every
        )

    def _warm_up(self, stats_GMC: Ints) -> tuple[WarmUp, ...]:
        """Parts of ever doubling length."""
        counts_MC = stats_GMC.sum(axis=0, dtype=np.int64)
        oldest = int(self.ages_M.max())
        parts = []
        first, end = 0, 1
        while first <= oldest:
            inside_M = (self.ages_M >= first) & (self.ages_M < end)
            rate = hit_rate(counts_MC[inside_M].sum(axis=0))
            parts.append(WarmUp(first_step=first, end_step=min(end, oldest + 1), hit_rate=rate))
            first, end = end, 2 * end
        return tuple(parts)


def hit_rate(counts_C: npt.NDArray[np.int64]) -> float:
    """Share of the selected rows that were in the pool; 0 where none was selected."""
    return _share(counts_C[HITS], counts_C[list(_SELECTED)].sum())


def unique_hit_rate(counts_C: npt.NDArray[np.int64]) -> float:
    """Share of the distinct settled tokens that were in the pool; 0 where there was none."""
    return _share(counts_C[UNIQUE_HITS], counts_C[list(_DISTINCT)].sum())


def _share(part: np.int64, whole: np.int64) -> float:
    return float(part / whole) if whole else 0.0


def _read(policy: PolicyName) -> list[int]:
    """Counters of the rows that a layer reads from the host."""
    return [UNIQUE_MISSES, REPEATED_MISSES, WINDOW_READS] if policy in READS_EVERY_ROW else [UNIQUE_MISSES]


def _spread_of(values_M: npt.NDArray[np.float64]) -> Spread:
    """Of one figure over the steps; its total is rounded."""
    quantiles = dict(zip(_QUANTILES, np.percentile(values_M, _QUANTILES).tolist(), strict=True))
    return Spread(
        total=round(float(values_M.sum())),
        mean=float(values_M.mean()),
        **{f"p{q}": quantiles[q] for q in _QUANTILES},
    )


def _spreads(stats_GMC: Ints) -> list[dict[str, Spread]]:
    """Of each group, by the names of the counters."""
    totals_GC = stats_GMC.sum(axis=1, dtype=np.int64)
    quantiles_QGC = np.percentile(stats_GMC, _QUANTILES, axis=1)
    return [
        {
            name: Spread(
                total=int(totals_GC[g, c]),
                mean=float(totals_GC[g, c] / stats_GMC.shape[1]),
                **{f"p{q}": float(quantiles_QGC[index, g, c]) for index, q in enumerate(_QUANTILES)},
            )
            for c, name in enumerate(STATS)
        }
        for g in range(len(stats_GMC))
    ]
