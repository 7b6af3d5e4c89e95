"""S3-FIFO (Yang et al., SOSP 2023): a small queue for what is new, a main queue, and a memory of what left the former.

A token comes to the small queue, or to the main queue if it is among the tokens that left the small one last, as many
as the main queue has room for. A hit counts, up to 3. Rows give way from the back of a queue: of the small one while it
has a tenth of the pool or more, else of the main one. At the back of the small queue a row that was hit more than once
moves to the main queue, with a count of 0; at the back of the main queue one that was hit goes to the front again, and
its count falls by 1. A row that the step uses goes to the front of its queue as it is.

Ring P is the small queue, ring P + 1 the main one; the mark of a row is its count, and 4 more in the main queue.
evicted: how many had left the small queue when a token did, that one included; 0 for never. Axes: as in `full`.
"""

from __future__ import annotations

from castoff.policy.full_state import FullState
from castoff.policy.linked import to_front, unlink

# Which numbers are what. SMALL and MAIN: rows of the queue; those that step STEP uses are IN_SMALL and IN_MAIN.
SMALL, MAIN, IN_SMALL, IN_MAIN, STEP, LEFT = range(6)
IS_MAIN = 4
MOST_HITS = 3


def hit(state: FullState, row: int, now: int) -> None:
    """Count it."""
    _use(state, row, now)
    if state.marks_P[row] & MOST_HITS < MOST_HITS:
        state.marks_P[row] += 1


def victim(state: FullState, now: int) -> int:
    """The row that gives way, as above."""
    numbers_V, pool = state.numbers_V, len(state.key_P)
    _begin(state, now)
    while True:
        free_small = numbers_V[SMALL] > numbers_V[IN_SMALL]
        free_main = numbers_V[MAIN] > numbers_V[IN_MAIN]
        if free_small and (numbers_V[SMALL] >= _small_rows(pool) or not free_main):
            row = int(state.before_L[pool])
            unlink(state.behind_L, state.before_L, row)
            if state.used_P[row] == now:
                to_front(state.behind_L, state.before_L, pool, row)
                continue
            numbers_V[SMALL] -= 1
            if state.marks_P[row] <= 1:
                numbers_V[LEFT] += 1
                state.evicted_I[state.key_P[row]] = numbers_V[LEFT]
                return row
            numbers_V[MAIN] += 1
            state.marks_P[row] = IS_MAIN
            to_front(state.behind_L, state.before_L, pool + 1, row)
        else:
            row = int(state.before_L[pool + 1])
            unlink(state.behind_L, state.before_L, row)
            if state.used_P[row] != now:
                if state.marks_P[row] == IS_MAIN:
                    numbers_V[MAIN] -= 1
                    return row
                state.marks_P[row] -= 1
            to_front(state.behind_L, state.before_L, pool + 1, row)


def install(state: FullState, row: int, now: int) -> None:
    """Put what comes at the front of its queue."""
    numbers_V, pool = state.numbers_V, len(state.key_P)
    left = state.evicted_I[state.key_P[row]]
    is_known = left > 0 and numbers_V[LEFT] - left < pool - _small_rows(pool)
    state.evicted_I[state.key_P[row]] = 0
    state.marks_P[row] = IS_MAIN if is_known else 0
    numbers_V[MAIN if is_known else SMALL] += 1
    _use(state, row, now)
    to_front(state.behind_L, state.before_L, pool + is_known, row)


def settle(state: FullState, row: int) -> None:
    """Nothing is left to do."""


def _small_rows(pool: int) -> int:
    return max(pool // 10, 1)


def _begin(state: FullState, now: int) -> None:
    """Forget what an earlier step used."""
    if state.numbers_V[STEP] != now:
        state.numbers_V[STEP] = now
        state.numbers_V[IN_SMALL] = state.numbers_V[IN_MAIN] = 0


def _use(state: FullState, row: int, now: int) -> None:
    _begin(state, now)
    state.numbers_V[IN_MAIN if state.marks_P[row] & IS_MAIN else IN_SMALL] += 1
