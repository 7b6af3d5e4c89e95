"""Rows in rings, by arrays of neighbours; a ring is named by a number beyond all rows, which stands between its ends.

The front is behind that number, the back before it. An empty ring is a number that is its own neighbour.
Axes: L rows and rings.
"""

from __future__ import annotations

from castoff.policy.arrays import Ints


def to_front(behind_L: Ints, before_L: Ints, ring: int, row: int) -> None:
    """Put a row that is in no ring at the front of one."""
    first = behind_L[ring]
    behind_L[ring] = row
    before_L[row] = ring
    behind_L[row] = first
    before_L[first] = row


def unlink(behind_L: Ints, before_L: Ints, row: int) -> None:
    """Take a row out of its ring."""
    before, behind = before_L[row], behind_L[row]
    behind_L[before] = behind
    before_L[behind] = before
