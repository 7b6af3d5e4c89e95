"""SIEVE (Zhang et al., NSDI 2024): CLOCK whose rows stand in the order in which they came, and new ones at the front.

A hit marks a row, and moves nothing. The hand goes from the back of ring P to its front and begins again; it takes
marks away, stops at the first row without one, and passes by rows that the step uses. numbers[0] is 1 + the row where
it goes on, or 0 for the back. Axes: as in `full`.
"""

from __future__ import annotations

from castoff.policy.full_state import FullState
from castoff.policy.linked import to_front, unlink


def hit(state: FullState, row: int, now: int) -> None:
    """The row gets a mark."""
    state.marks_P[row] = 1


def victim(state: FullState, now: int) -> int:
    """The first row from the hand on without a mark, that the step does not use; the hand moves before it."""
    ring = len(state.key_P)
    row = int(state.numbers_V[0]) - 1 if state.numbers_V[0] > 0 else ring
    while row == ring or state.used_P[row] == now or state.marks_P[row] > 0:
        if row != ring and state.used_P[row] != now:
            state.marks_P[row] = 0
        row = int(state.before_L[row])
    before = int(state.before_L[row])
    state.numbers_V[0] = 0 if before == ring else before + 1
    unlink(state.behind_L, state.before_L, row)
    return row


def install(state: FullState, row: int, now: int) -> None:
    """What comes stands at the front, without a mark."""
    to_front(state.behind_L, state.before_L, len(state.key_P), row)


def settle(state: FullState, row: int) -> None:
    """Nothing is left to do."""
