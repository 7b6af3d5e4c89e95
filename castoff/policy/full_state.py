"""What policies without sets keep.

Axes: as in `full`.
"""

from __future__ import annotations

from typing import NamedTuple

from castoff.policy.arrays import Ints, Longs

NUMBERS = 6


class FullState(NamedTuple):
    """The pool of a request. Rows are filled from 0 on."""

    key_P: Ints
    used_P: Ints
    """The last step that used each row."""
    marks_P: Ints
    """For the policy; 0 at first, as are evicted and numbers."""
    behind_L: Ints
    """The rings P and P + 1, as `linked` has them; empty at first."""
    before_L: Ints
    evicted_I: Longs
    numbers_V: Longs
