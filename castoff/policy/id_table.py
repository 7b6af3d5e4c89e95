"""A hash table from token ids to numbers, in one array: open addressing, linear probing.

Axes: 2 (ids, then their numbers), Y slots, a power of two and at least twice the ids that the table will hold.
"""

from __future__ import annotations

import numpy as np

from castoff.policy.arrays import Ints


def new_table(ids: int) -> Ints:
    """An empty table (2, Y) for up to so many ids."""
    size = 2
    while size < 2 * ids:
        size *= 2
    table_2Y = np.empty((2, size), np.int32)
    clear(table_2Y)
    return table_2Y


def clear(table_2Y: Ints) -> None:
    """Forget all ids."""
    table_2Y[0] = -1


def slot_of(table_2Y: Ints, token: int) -> int:
    """The slot y with table[0, y] == token, else the free one, table[0, y] == -1, where the token belongs."""
    last = int(table_2Y.shape[1]) - 1
    # Knuth's multiplicative hash: golden ratio times 2^32. The product stays below 2^63.
    y = (token * 2654435769 >> 15) & last
    while table_2Y[0, y] >= 0 and table_2Y[0, y] != token:
        y = (y + 1) & last
    return y
