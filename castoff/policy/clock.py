"""CLOCK: a hit marks its way; a set's hand goes round, takes marks away, and stops at the first way without one.

Axes: N sets, W ways, at most 32. `now` is the value of `used` that stands for this step.
"""

from __future__ import annotations

import numpy as np

from castoff.policy.arrays import Ints


def touch(used_NW: Ints, marks_N: Ints, now: int) -> None:
    """What this step's hits change: the ways that it uses get marks."""
    for n in range(len(marks_N)):
        bits = _bits(marks_N[n])
        for way in range(used_NW.shape[1]):
            if used_NW[n, way] == now:
                bits |= 1 << way
        marks_N[n] = _signed(bits)


def victim(used_NW: Ints, hands_N: Ints, marks_N: Ints, n: int, now: int) -> int:
    """The first way of set n, from the hand on, without a mark, that this step does not use; -1 for none.

    Ways of other steps that are passed lose their marks, so the second round finds one if there is any. The hand moves
    behind what was found.
    """
    ways = int(used_NW.shape[1])
    way = int(hands_N[n]) % ways
    bits = _bits(marks_N[n])
    for _ in range(2 * ways):
        following = way + 1 if way + 1 < ways else 0
        if used_NW[n, way] != now:
            if bits >> way & 1 == 0:
                hands_N[n] = following
                marks_N[n] = _signed(bits)
                return way
            bits &= ~(1 << way)
        way = following
    return -1


def _bits(marks: np.int32) -> int:
    """The 32 bits of an int32 as a number from 0 on."""
    return int(marks) & 0xFFFFFFFF


def _signed(bits: int) -> int:
    """The int32 with such bits."""
    return bits - (1 << 32) if bits >> 31 else bits
