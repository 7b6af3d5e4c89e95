"""Least recently used: the way whose last step of use lies furthest back leaves; a free way was never used.

Axes: N sets, W ways. `now` is the value of `used` that stands for this step.
"""

from __future__ import annotations

from castoff.policy.arrays import Ints

# Later than every step.
NEVER = 2**31 - 1


def touch(used_NW: Ints, marks_N: Ints, now: int) -> None:
    """What this step's hits change: nothing beyond `used`."""


def victim(used_NW: Ints, hands_N: Ints, marks_N: Ints, n: int, now: int) -> int:
    """The least recently used way of set n, the lowest of equals, that this step does not use; -1 for none."""
    ways = int(used_NW.shape[1])
    oldest = NEVER
    for way in range(ways):
        oldest = min(oldest, used_NW[n, way] if used_NW[n, way] != now else NEVER)
    found = -1
    for way in range(ways - 1, -1, -1):
        if used_NW[n, way] == oldest:
            found = way
    return found
