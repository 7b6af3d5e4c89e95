"""A hit profile of a replay: what `castoff cast` needs of it."""

from __future__ import annotations

from collections.abc import Iterable

from castoff.errors import CastoffError
from castoff.lab.result import ReplayResult, ReplayRow
from castoff.spec.backend import Origin
from castoff.spec.hit_profile import HitCurve, HitPoint, HitProfile, Policy
from castoff.spec.model import ModelSpec
from castoff.spec.offload import OffloadMode
from castoff.trace.reader import Trace

# How the policies that a cast knows are named there.
_MODES: dict[str, tuple[OffloadMode, Policy]] = {
    "fifo": ("direct", "fifo"),
    "lru": ("direct", "lru"),
    "clock": ("direct", "clock"),
    "serve_install": ("serve_install", "fifo"),
    "gather": ("gather", "previous"),
}


def hit_profile(result: ReplayResult, model: ModelSpec, trace: Trace) -> HitProfile:
    """The rows of a replay whose policies are modes of offload, as curves; misses spread over steps, from p10 to p90.

    Counts of a trace that was drawn are assumed, others measured. Raises CastoffError where no row is of a mode.
    """
    curves: dict[tuple[OffloadMode, Policy, int], list[HitPoint]] = {}
    for row in sorted(result.rows, key=lambda row: row.pool_tokens):
        if row.policy in _MODES:
            mode, policy = _MODES[row.policy]
            # Of gather there is one pool, whatever sizes are asked for.
            points = curves.setdefault((mode, policy, row.ways or 0), [])
            if not points or points[-1].pool_tokens < row.pool_tokens:
                points.append(_point(row))
    if any(point.rows == 0 for points in curves.values() for point in points):
        raise CastoffError(f"{trace.path} selects nothing in the steps that count, so there are no hits to write")
    if not curves:
        raise CastoffError(
            f"--hit-profile needs a policy that `castoff cast` knows: {', '.join(_MODES)}; got "
            f"{', '.join(dict.fromkeys(row.policy for row in result.rows))}"
        )
    return HitProfile(
        model=model.name,
        owner_layers=tuple(group.owner for group in model.index_groups),
        index_topk=result.index_topk,
        context_length=_mean_length(trace),
        origin=_origin(trace),
        source=f"replay of {trace.path.name}: {trace.header.num_groups} of {len(model.index_groups)} index groups, "
        f"spread over {result.request_steps} steps of {result.requests} requests",
        curves=tuple(
            HitCurve(mode=mode, policy=policy, ways=ways, query_length=result.query_length, points=tuple(points))
            for (mode, policy, ways), points in curves.items()
        ),
    )


def _point(row: ReplayRow) -> HitPoint:
    stats = row.stats
    misses, of_steps = stats["unique_misses"], row.unique_misses_of_steps
    return HitPoint(
        pool_tokens=row.pool_tokens,
        # A row of the ring is on the device too.
        hits=stats["hits"].mean + stats["promoted_rows"].mean,
        unique_hits=stats["unique_hits"].mean + stats["promoted_rows"].mean,
        unique_misses=misses.mean,
        repeated_misses=stats["repeated_misses"].mean,
        window_reads=stats["window_reads"].mean,
        unique_misses_low=min(of_steps.p10, misses.mean),
        unique_misses_high=max(of_steps.p90, misses.mean),
    )


def _origin(trace: Trace) -> Origin:
    return "assumed" if "generator" in trace.header.provenance else "measured"


def _mean_length(trace: Trace) -> int:
    """Tokens of the requests of a trace, on average; without lengths, as many as the largest id asks for."""
    steps = trace.steps()
    if steps.lengths_known:
        return max(round(float(steps.lengths_NB[steps.active].mean())), 1)
    largest: Iterable[int] = (int(ids.max()) for ids in steps.ids_NGBSK)
    return max(largest, default=0) + 1
