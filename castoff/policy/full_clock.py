"""CLOCK without sets: as `clock` does in a set, in one of all rows.

A hit marks a row. The hand, numbers[0], goes round, takes marks away, and stops at the first row without one; it passes
by rows that the step uses. Axes: as in `full`.
"""

from __future__ import annotations

from castoff.policy.full_state import FullState


def hit(state: FullState, row: int, now: int) -> None:
    """The row gets a mark."""
    state.marks_P[row] = 1


def victim(state: FullState, now: int) -> int:
    """The first row from the hand on without a mark, that the step does not use; the hand moves behind it."""
    rows = len(state.key_P)
    row = int(state.numbers_V[0])
    while state.used_P[row] == now or state.marks_P[row] > 0:
        if state.used_P[row] != now:
            state.marks_P[row] = 0
        row = row + 1 if row + 1 < rows else 0
    state.numbers_V[0] = row + 1 if row + 1 < rows else 0
    return row


def install(state: FullState, row: int, now: int) -> None:
    """What comes has no mark, and what was there had none when it left."""


def settle(state: FullState, row: int) -> None:
    """Nothing is left to do."""
