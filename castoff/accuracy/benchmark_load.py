"""How a benchmark of experts loads the busiest of the ranks that share them.

Loads of experts are drawn from a power law, p(x) ~ x^-skew, cut at both ends and rounded to whole rows, as
aiconfigurator's benchmarks draw them (ai-dynamo/aiconfigurator). What many draws give on average is tabulated over
tokens once per structure. Axes: D draws, E experts, N numbers of tokens.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from castoff.dims import Array, Dim, maximum, minimum
from castoff.errors import CastoffError
from castoff.ops.expert_load import POINTS_PER_DOUBLING, ExpertLoad, power_law

DRAWS = 16
MOST_TOKENS = 2**18
# Ends of the power law: where there are rows for every expert, from one to this share of the tokens; else these two.
LARGEST_SHARE = 0.8
SPARSE_ENDS = (0.01, 2.0)


def drawn_load(tokens: Dim, experts: int, experts_per_token: int, ranks: int, skew: float) -> ExpertLoad:
    """Load of the busiest of `ranks` ranks when `tokens` tokens choose by a power law of this exponent."""
    if experts % ranks:
        raise CastoffError(f"{experts} experts cannot be dealt evenly to {ranks} ranks")
    at_N, rows_N, touched_N = _table(experts, experts_per_token, ranks, skew)
    place = np.log2(maximum(tokens, 1.0))
    # Shares and not amounts, which grow with the tokens.
    rows = tokens * experts_per_token * np.interp(place, at_N, rows_N)
    touched = experts / ranks * np.interp(place, at_N, touched_N)
    few = minimum(tokens, 1.0)
    return ExpertLoad(rows, touched * few)


def even_load(tokens: Dim, experts: int, experts_per_token: int, ranks: int) -> ExpertLoad:
    """Load of the first rank when the experts are dealt in turn, all alike."""
    touched = experts / ranks * minimum(1.0, tokens * experts_per_token / experts)
    return ExpertLoad(maximum(1.0, tokens * experts_per_token / ranks), maximum(1.0, touched))


@cache
def _table(experts: int, experts_per_token: int, ranks: int, skew: float) -> tuple[Array, Array, Array]:
    """log2 of numbers of tokens, and for each the shares of all rows and of its experts that the busiest rank has."""
    uniform_DE = np.random.default_rng(0).random((DRAWS, experts))
    steps = int(np.log2(MOST_TOKENS)) * POINTS_PER_DOUBLING
    tokens_N = np.unique(np.round(2 ** (np.arange(steps + 1) / POINTS_PER_DOUBLING)))
    loads = [_one_load(uniform_DE, int(tokens), experts_per_token, ranks, skew) for tokens in tokens_N]
    rows_N, touched_N = (np.array(values) for values in zip(*loads, strict=True))
    return np.log2(tokens_N), rows_N / (tokens_N * experts_per_token), touched_N / (experts / ranks)


def _one_load(uniform_DE: Array, tokens: int, experts_per_token: int, ranks: int, skew: float) -> tuple[float, float]:
    rows, experts = tokens * experts_per_token, uniform_DE.shape[1]
    low, high = (1.0, max(tokens * LARGEST_SHARE, 1.0 + 1e-6)) if rows > experts else SPARSE_ENDS
    drawn_DE = power_law(uniform_DE, low, high, skew)
    rows_DE = np.round(drawn_DE / drawn_DE.sum(axis=1, keepdims=True) * rows)
    for rows_E, drawn_E in zip(rows_DE, drawn_DE, strict=True):
        _balance(rows_E, np.argsort(-drawn_E), rows)
    rows_DRE = rows_DE.reshape(len(rows_DE), ranks, -1)
    busiest_DE = rows_DRE[np.arange(len(rows_DE)), rows_DRE.sum(axis=2).argmax(axis=1)]
    return float(busiest_DE.sum(axis=1).mean()), float((busiest_DE > 0).sum(axis=1).mean())


def _balance(rows_E: Array, order_E: Array, rows: int) -> None:
    """Make rounded loads sum up, in place: one row more for the largest, or one less for the smallest."""
    missing = int(rows - rows_E.sum())
    if missing > 0:
        rows_E += missing // len(rows_E)
        rows_E[order_E[: missing % len(rows_E)]] += 1
    while missing < 0:
        smallest = order_E[::-1]
        taken = smallest[rows_E[smallest] > 0][:-missing]
        rows_E[taken] -= 1
        missing += len(taken)
