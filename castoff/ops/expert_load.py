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

DRAWS = 96
FEW_DRAWS = 16
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
    at_N, share_N, touched_N = _table(experts, experts_per_token, ranks, skew)
    place, few = np.log2(maximum(tokens, 1.0)), minimum(tokens, 1.0)
    rows = tokens * experts_per_token * np.interp(place, at_N, share_N)
    return ExpertLoad(rows, np.interp(place, at_N, touched_N) * few)


@cache
def _table(experts: int, experts_per_token: int, ranks: int, skew: float) -> tuple[Array, Array, Array]:
    """log2 of numbers of tokens; of all rows, the busiest rank's share; the experts that it has rows for."""
    draw = np.random.default_rng(0)
    popularity_DE = power_law(draw.random((DRAWS, experts)), 1.0, POPULARITY_RATIO, skew)
    share_DRE = (popularity_DE / popularity_DE.sum(axis=1, keepdims=True)).reshape(DRAWS, ranks, -1)
    steps = int(np.log2(MOST_TOKENS)) * POINTS_PER_DOUBLING
    at_N = np.arange(steps + 1) / POINTS_PER_DOUBLING
    if ranks == 1:
        # What all experts get hardly differs from draw to draw.
        chance_DE = np.minimum(share_DRE[:FEW_DRAWS, 0] * experts_per_token, 1.0)
        touched = [(1 - (1 - chance_DE) ** tokens).sum(axis=1).mean() for tokens in 2**at_N]
        return at_N, np.ones(len(at_N)), np.array(touched)
    share_DR = share_DRE.sum(axis=2)
    rows_N = np.round(experts_per_token * 2**at_N).astype(np.int64)
    # Rows come on top of those of fewer tokens, so that more tokens never load a rank less.
    drawn_DR = np.zeros((DRAWS, ranks), dtype=np.int64)
    shares, touched = [], []
    for more, rows in zip(np.diff(rows_N, prepend=0), rows_N, strict=True):
        drawn_DR = drawn_DR + draw.multinomial(more, share_DR)
        busiest_D = drawn_DR.argmax(axis=1)
        own_D, own_DE = drawn_DR.max(axis=1), share_DRE[np.arange(DRAWS), busiest_D]
        chance_DE = own_DE / own_DE.sum(axis=1, keepdims=True)
        shares.append(own_D.mean() / rows)
        touched.append((1 - (1 - chance_DE) ** own_D[:, None]).sum(axis=1).mean())
    return at_N, np.array(shares), np.maximum.accumulate(touched)


def power_law(uniform: Array, low: float, high: float, skew: float) -> Array:
    """Draws of p(x) ~ x^-skew between two ends, from draws between 0 and 1."""
    # As good as an exponent of 1, for which the quantiles are of another form.
    power = 1.0 - skew if skew != 1.0 else 1e-6
    drawn: Array = ((high**power - low**power) * uniform + low**power) ** (1 / power)
    return drawn
