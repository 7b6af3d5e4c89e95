"""What offload does to a step, and where it begins to pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from castoff.casting.deployment import Deployment
from castoff.casting.hits import Pool
from castoff.casting.largest import largest_batch
from castoff.casting.rank import Cast, cast_dealt, total_tokens
from castoff.dims import Array, Dim, maximum
from castoff.model.offload_sizes import Extent, offload_bytes, offloaded_groups, pool_sizes
from castoff.model.setup import Setup
from castoff.spec.offload import Offload
from castoff.spec.scenario import RequestClass

# Hit rates that are tried, and between which a straight line is drawn.
_HIT_RATES = np.linspace(0.0, 1.0, 65)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadFigures:
    """Of one rank in one decode step, all micro-batches together.

    hit_rate: of the selected rows. unique_misses: distinct tokens that a request misses in an index group.
    link_bytes, written_bytes: read from the host, and written there, by the device with the most of both.
    latency_low_s, latency_high_s: with the misses at the ends of the profile's spread.
    break_even_context_tokens: from here on a request takes less device memory with offload than without.
    break_even_hit_rate: from here on the largest batch that fits gives more tokens per second than the largest one that
    fits without offload; 0 where that is so without any hit, None where it never is.
    batch_without, tokens_per_s_without: of the largest batch without offload, per attention-DP rank and in all; 0 where
    no request fits. batch_with, tokens_per_s_with: likewise with offload, at this hit rate.
    """

    hit_rate: float
    unique_misses: float
    link_bytes: float
    written_bytes: float
    latency_low_s: float
    latency_high_s: float
    break_even_context_tokens: float
    break_even_hit_rate: float | None
    batch_without: int
    tokens_per_s_without: float
    batch_with: int
    tokens_per_s_with: float


def offload_figures(cast: Cast, deployment: Deployment, batch_with: int) -> OffloadFigures:
    """The figures of a deployment that was cast. batch_with: the largest batch that fits, per attention-DP rank."""
    pool, setup = deployment.pool, deployment.setup
    assert pool is not None, "a decode step with offload has pools"
    assert cast.reads is not None, "and reads them"
    classes = cast.batch.classes
    low, high = _spread(deployment, pool, classes)
    longest = max(classes, key=total_tokens)
    resident = replace(deployment, scenario=replace(deployment.scenario, offload=Offload()), pool=None)
    batch_without = largest_batch(resident, longest)

    def tokens_per_s(batch: int, cast_with: Deployment) -> Dim:
        requests = RequestClass(batch * setup.mesh.dp.size, longest.context, longest.query)
        return cast_dealt(cast_with, [requests]).tokens_per_s if batch else 0.0

    without = float(tokens_per_s(batch_without, resident))
    rates = np.append(_HIT_RATES, float(cast.reads.hits))
    swept = replace(deployment, pool=replace(pool, hit_rate=rates))
    with_rates = np.broadcast_to(tokens_per_s(batch_with, swept), rates.shape)
    reads, writes = _link_bytes(cast)
    rows = cast.batch.micro.selected(pool.index_topk) / cast.batch.micro.requests
    return OffloadFigures(
        hit_rate=float(cast.reads.hits),
        unique_misses=float(cast.reads.missed * rows),
        link_bytes=reads,
        written_bytes=writes,
        latency_low_s=low,
        latency_high_s=high,
        break_even_context_tokens=break_even_context_tokens(setup, deployment.scenario.offload, pool),
        break_even_hit_rate=_crossing(with_rates[:-1], without) if batch_with else None,
        batch_without=batch_without,
        tokens_per_s_without=without,
        batch_with=batch_with,
        tokens_per_s_with=float(with_rates[-1]),
    )


def break_even_context_tokens(setup: Setup, options: Offload, pool: Pool) -> float:
    """Tokens whose rows take as much of the device as a request's share of what offload holds there."""

    def held(requests: int) -> float:
        sizes = pool_sizes(setup, options, requests, pool_tokens=pool.tokens)
        extent = Extent(requests=requests, host_rows=0, prompt_rows=0)
        return float(offload_bytes(groups, setup, options, sizes, extent, row_bytes=row_bytes).device)

    groups, row_bytes = offloaded_groups(setup, options), setup.cache.latent_row_bytes
    return (held(2) - held(1)) / (sum(len(group) for group in groups) * row_bytes)


def _spread(deployment: Deployment, pool: Pool, classes: Sequence[RequestClass]) -> tuple[float, float]:
    """Latency with the least and the most misses that the profile holds possible."""
    point = pool.curve.at(pool.tokens)
    ends = np.array([point.unique_misses_low, point.unique_misses_high]) / maximum(point.unique_misses, 1e-9)
    # A given rate has no spread.
    scale = ends if pool.hit_rate is None else np.ones(2)
    cast = cast_dealt(replace(deployment, pool=replace(pool, miss_scale=scale)), classes)
    low, high = np.broadcast_to(cast.latency_s, 2).tolist()
    return low, high


def _crossing(swept: Array, without: float) -> float | None:
    """The least hit rate at which `swept`, which rises with it, reaches `without`; None where it never does."""
    values = np.maximum.accumulate(swept)
    if values[-1] < without:
        return None
    at = int(np.argmax(values >= without))
    if at == 0:
        return 0.0
    share = (without - values[at - 1]) / (values[at] - values[at - 1])
    return float(_HIT_RATES[at - 1] + share * (_HIT_RATES[at] - _HIT_RATES[at - 1]))


def _link_bytes(cast: Cast) -> tuple[float, float]:
    """Bytes that a step reads from the host and writes there, in the pipeline stage with the most."""
    stages = cast.setup.mesh.pp.size
    reads, writes = [0.0] * stages, [0.0] * stages
    for entry, call in cast.program.calls():
        for part in call.work.parts:
            reads[entry.stage] += float(part.host_read_bytes)
            writes[entry.stage] += float(part.host_write_bytes)
    fullest = max(range(stages), key=lambda stage: reads[stage] + writes[stage])
    micro_batches = float(cast.batch.in_flight)
    return micro_batches * reads[fullest], micro_batches * writes[fullest]
