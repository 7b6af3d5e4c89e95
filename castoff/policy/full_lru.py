"""Least recently used, without sets: ring P has all rows, the last used at its front.

Of one step's tokens those at later positions count as used later, whether they were in the pool or not, so that what a
pool holds is the first part of what a larger one does.
Axes: as in `full`.
"""

from __future__ import annotations

from castoff.policy.full_state import FullState
from castoff.policy.linked import to_front, unlink


def hit(state: FullState, row: int, now: int) -> None:
    """The row comes to the front."""
    settle(state, row)


def victim(state: FullState, now: int) -> int:
    """The row at the back: those of this step have all come to the front."""
    row = int(state.before_L[len(state.key_P)])
    unlink(state.behind_L, state.before_L, row)
    return row


def install(state: FullState, row: int, now: int) -> None:
    """The row comes to the front."""
    to_front(state.behind_L, state.before_L, len(state.key_P), row)


def settle(state: FullState, row: int) -> None:
    """In the order of positions the rows come to the front."""
    unlink(state.behind_L, state.before_L, row)
    to_front(state.behind_L, state.before_L, len(state.key_P), row)
