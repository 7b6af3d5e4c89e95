"""The published hit rates' order, of plans over one drawn trace at a small scale: 1 to 32 of GLM-5.2's sizes."""

import numpy as np
import pytest

from castoff.policy.arrays import PoolState, Selection
from castoff.policy.direct import plan_direct
from castoff.policy.previous import plan_gather
from castoff.policy.published import install_metadata, plan_serve

TOKENS, TOPK, STEPS = 2048, 64, 400
WINDOW = 4


def drawn_trace() -> list[tuple[int, np.ndarray]]:
    """Lengths and selections: a heavy-tailed liking for each token, noise that lasts, and a recent window always."""
    random = np.random.default_rng(7)
    liking, noise = random.exponential(size=TOKENS + STEPS), np.zeros(TOKENS + STEPS)
    steps = []
    for step in range(STEPS):
        length = TOKENS + step
        noise = 0.35 * noise + np.sqrt(1 - 0.35**2) * random.normal(size=noise.size)
        scores = liking + noise
        scores[length - WINDOW : length] = np.inf
        steps.append((length, np.argsort(-scores[:length], kind="stable")[:TOPK].astype(np.int32)))
    return steps


def rate(name: str, pool: int) -> float:
    """Share of selected rows that were there, after the first fifth of the steps."""
    ways, hits, rows = 16, 0, 0
    sets = pool // ways
    tags = np.full((1, sets, ways) if name != "previous" else (1, 1, TOPK), -1, np.int32)
    state = PoolState(tags, tags.copy(), np.zeros((1, sets), np.int32), np.zeros((1, sets), np.int32))
    slots = np.zeros(1, np.int64)
    for step, (length, ids) in enumerate(drawn_trace()):
        selection = Selection(ids[None], np.zeros(1, np.int64), np.array([length]), np.array([length - 1]), slots)
        if name == "previous":
            stats = plan_gather(selection, tags).stats_BC
        elif name == "serve_install":
            plan = plan_serve(selection, tags, state.hands_RN)
            stats = plan.stats_BC
            install_metadata(plan.install_ids_BX, plan.install_rows_BX, plan.counts_B, slots, tags, state.hands_RN)
        else:
            stats = plan_direct(
                name,
                selection,
                np.array([length]),
                state,
                ring_tokens=2,
                staging_rows=TOPK,  # type: ignore[arg-type]
            ).stats_BC
        if step >= STEPS // 5:
            hits, rows = hits + int(stats[0, 0]), rows + TOPK
    return hits / rows


@pytest.mark.golden
def test_the_published_order_of_hit_rates() -> None:
    previous, fifo, lru, larger = (
        rate(*given) for given in (("previous", TOPK), ("serve_install", 256), ("lru", 256), ("serve_install", 512))
    )
    assert previous < fifo < lru
    assert fifo < larger
    # The same sets, filled before the step's attention or after it.
    assert abs(rate("fifo", 256) - fifo) < 0.05
