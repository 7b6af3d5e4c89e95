"""What a request asks of any cache: the distinct settled tokens of each step, in the order of their first positions.

Tokens are numbered in the order in which they first come up: these numbers are keys.
Axes: M steps of the request, A accesses of all of them, I keys, T positions; others as in `arrays`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from castoff.policy.arrays import PROMOTED, REPEATED_MISSES, UNIQUE_MISSES, Ints, Longs
from castoff.policy.compiled import compiled
from castoff.policy.over_steps import RequestSteps

Bools = npt.NDArray[np.bool_]


class Accesses(NamedTuple):
    """The accesses of step m are those from starts[m] up to but without starts[m + 1]."""

    starts_M: Longs
    """One more than there are steps."""
    keys_A: Ints
    rows_A: Ints
    """How many (query, rank) rows select the token."""
    in_ring_A: Bools
    """Whether the ring of mode `direct` has it, so that a miss is no read from the host."""
    window_M: Ints
    """Rows that select the step's own tokens, which are no accesses."""
    ids_I: Ints
    """The token of each key."""

    @property
    def num_steps(self) -> int:
        """Steps (M)."""
        return len(self.window_M)

    @property
    def most_distinct(self) -> int:
        """Most accesses of a step."""
        return int(np.diff(self.starts_M).max(initial=0))


def accesses_of(blocks: Iterable[RequestSteps]) -> Accesses:
    """The accesses of a request over all of its steps."""
    key_T, at_T, ids_I = (np.empty(0, np.int32) for _ in range(3))
    num_keys = 0
    parts: list[tuple[Longs, Ints, Ints, Bools, Ints]] = []
    for block in blocks:
        more = int(block.topk_MSK.max()) + 1 - len(key_T)
        if more > 0:
            key_T, at_T, ids_I = (np.concatenate([old, np.full(more, -1, np.int32)]) for old in (key_T, at_T, ids_I))
        size, steps = block.topk_MSK.size, len(block.topk_MSK)
        counts_M, window_M = np.zeros(steps, np.int64), np.zeros(steps, np.int32)
        keys_A, rows_A, in_ring_A = np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size, np.bool_)
        num_keys = compiled(_number)(
            *block, key_T, at_T, ids_I, num_keys, counts_M, keys_A, rows_A, in_ring_A, window_M
        )
        found = int(counts_M.sum())
        parts.append((counts_M, keys_A[:found].copy(), rows_A[:found].copy(), in_ring_A[:found].copy(), window_M))
    counts_M, keys_A, rows_A, in_ring_A, window_M = (np.concatenate(part) for part in zip(*parts, strict=True))
    starts_M = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts_M)])
    return Accesses(starts_M, keys_A, rows_A, in_ring_A, window_M, ids_I[:num_keys].copy())


def _number(
    topk_MSK: Ints,
    slot_mapping_MS: Longs,
    seq_lens_M: Longs,
    committed_M: Longs,
    ring_first_M: Longs,
    key_T: Ints,
    at_T: Ints,
    ids_I: Ints,
    num_keys: int,
    counts_M: Longs,
    keys_A: Ints,
    rows_A: Ints,
    in_ring_A: Bools,
    window_M: Ints,
) -> int:
    """Fill the arrays from counts on; returns how many keys there are. Mutates key, at and ids too.

    at: where a token came up last; what it says of an earlier block is no harm, since the key there tells.
    """
    steps, queries, columns = topk_MSK.shape
    count = 0
    for m in range(steps):
        first = count
        for s in range(queries):
            own = -1 if slot_mapping_MS[m, s] < 0 else seq_lens_M[m] - queries + s
            for k in range(columns):
                token = topk_MSK[m, s, k]
                if token < 0 or token > own:
                    continue
                if token >= committed_M[m]:
                    window_M[m] += 1
                    continue
                if key_T[token] < 0:
                    key_T[token] = num_keys
                    ids_I[num_keys] = token
                    num_keys += 1
                at = at_T[token]
                if first <= at < count and keys_A[at] == key_T[token]:
                    rows_A[at] += 1
                    continue
                at_T[token] = count
                keys_A[count] = key_T[token]
                rows_A[count] = 1
                in_ring_A[count] = token >= ring_first_M[m]
                count += 1
        counts_M[m] = count - first
    return num_keys


def count_miss(stats_C: Ints, rows: int, in_ring: bool) -> None:
    """Count a token that is not in the pool; the rows beyond the first find what that one brings."""
    stats_C[PROMOTED] += in_ring
    stats_C[UNIQUE_MISSES] += not in_ring
    stats_C[REPEATED_MISSES] += rows - 1
