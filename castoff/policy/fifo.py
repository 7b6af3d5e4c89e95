"""First in, first out: a set's hand goes round its ways, and what was filled longest ago leaves.

Axes: N sets, W ways. `now` is the value of `used` that stands for this step.
"""

from __future__ import annotations

from castoff.policy.arrays import Ints


def touch(used_NW: Ints, marks_N: Ints, now: int) -> None:
    """What this step's hits change: nothing."""


def victim(used_NW: Ints, hands_N: Ints, marks_N: Ints, n: int, now: int) -> int:
    """The first way of set n, from the hand on, that this step does not use; the hand moves behind it. -1 for none."""
    ways = int(used_NW.shape[1])
    way = int(hands_N[n]) % ways
    for _ in range(ways):
        following = way + 1 if way + 1 < ways else 0
        if used_NW[n, way] != now:
            hands_N[n] = following
            return way
        way = following
    return -1
