"""Which of the selected tokens are in a request's pool.

Axes: as in `arrays`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from castoff.policy.arrays import Ints, Longs


class Found(NamedTuple):
    """Lists for one request at a time, each for up to X entries."""

    hits_X: Ints
    """Rows n · W + w, in order of the positions that select them; repeated as those are."""
    misses_X: Ints
    """Positions of settled tokens that are not in the pool."""
    window_X: Ints
    """Positions of this step's own tokens."""


def new_found(width: int) -> Found:
    """Lists for requests with X = width."""
    return Found(np.empty(width, np.int32), np.empty(width, np.int32), np.empty(width, np.int32))


def look_up(
    ids_X: Ints, own_S: Longs, committed: int, tags_NW: Ints, pool_row: int, rows_X: Ints, found: Found
) -> tuple[int, int, int]:
    """Fill the lists, and write the rows of hits; returns how many are in each list.

    own: the last position that each query sees. committed: the first token of this step. pool_row: code of row 0.
    """
    sets, ways = tags_NW.shape
    columns = len(ids_X) // len(own_S)
    hits = misses = window = 0
    for s in range(len(own_S)):
        own = int(own_S[s])
        for position in range(s * columns, (s + 1) * columns):
            token = int(ids_X[position])
            if token < 0 or token > own:
                continue
            if token >= committed:
                found.window_X[window] = position
                window += 1
                continue
            n = set_of(token, sets)
            way = find(tags_NW, n, token)
            # A processor would guess a branch on hit or miss wrong too often: both are written, and one counts.
            rows_X[position] = pool_row + n * ways + way
            found.hits_X[hits] = n * ways + way
            hits += way >= 0
            found.misses_X[misses] = position
            misses += way < 0
    return hits, misses, window


def set_of(token: int, sets: int) -> int:
    """The set of a token: token % sets."""
    # Unsigned division in 32 bits is the cheapest.
    return int(np.uint32(token) % np.uint32(sets))


def find(tags_NW: Ints, n: int, token: int) -> int:
    """The way of set n that holds a token, or -1."""
    # No early exit, and ways of 32 bits like the tags: so LLVM compares eight at a time.
    none = np.int32(-1)
    found: int | np.int32 = none
    for way in range(np.int32(tags_NW.shape[1])):
        found = max(found, way if tags_NW[n, way] == token else none)
    return int(found)
