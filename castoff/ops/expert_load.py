"""How many rows and experts the busiest of the ranks that share experts gets, where experts are not chosen alike.

Experts have popularities, drawn from a power law and dealt to ranks as they come; tokens choose at random by them. What
many draws give on average is tabulated over tokens once per structure. Axes: D draws, E experts, R ranks, N numbers of
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from castoff.dims import Array, Dim, maximum, minimum

DRAWS = 16
POINTS_PER_DOUBLING = 3
# With more tokens every expert that is ever chosen is.
MOST_TOKENS = 2**16
# The most popular expert over the least.
POPULARITY_RATIO = 50.0


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Of the busiest rank. rows: token copies. touched: experts that get any."""

    rows: Dim
    touched: Dim


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The layer that a grouped product is part of, as far as its kernel is tuned for it, and how its loads differ.

    skew: exponent of the power law of the experts' loads; 0 where all get the same.
    """

    hidden_size: int
    experts: int
    skew: float = 0.0


def skewed_load(tokens: Dim, experts: int, experts_per_token: int, ranks: int, skew: float) -> ExpertLoad:
    """Expected load of the busiest of `ranks` ranks when `tokens` tokens choose experts whose popularities follow a
    power law of this exponent."""
    at_N, touched_N, share = _table(experts, experts_per_token, ranks, skew)
    touched = np.interp(np.log2(maximum(tokens, 1.0)), at_N, touched_N) * minimum(tokens, 1.0)
    return ExpertLoad(tokens * experts_per_token * share, touched)


@cache
def _table(experts: int, experts_per_token: int, ranks: int, skew: float) -> tuple[Array, Array, float]:
    """log2 of numbers of tokens, the experts that the busiest rank then has rows for, and its share of all rows."""
    popularity_DE = power_law(np.random.default_rng(0).random((DRAWS, experts)), 1.0, POPULARITY_RATIO, skew)
    share_DRE = (popularity_DE / popularity_DE.sum(axis=1, keepdims=True)).reshape(DRAWS, ranks, -1)
    share_DR = share_DRE.sum(axis=2)
    busiest_DE = share_DRE[np.arange(DRAWS), share_DR.argmax(axis=1)]
    chance_DE = np.minimum(busiest_DE * experts_per_token, 1.0)
    steps = int(np.log2(MOST_TOKENS)) * POINTS_PER_DOUBLING
    at_N = np.arange(steps + 1) / POINTS_PER_DOUBLING
    touched_N = np.array([(1 - (1 - chance_DE) ** tokens).sum(axis=1).mean() for tokens in 2**at_N])
    return at_N, touched_N, float(share_DR.max(axis=1).mean())


def power_law(uniform: Array, low: float, high: float, skew: float) -> Array:
    """Draws of p(x) ~ x^-skew between two ends, from draws between 0 and 1."""
    # As good as an exponent of 1, for which the quantiles are of another form.
    power = 1.0 - skew if skew != 1.0 else 1e-6
    drawn: Array = ((high**power - low**power) * uniform + low**power) ** (1 / power)
    return drawn
