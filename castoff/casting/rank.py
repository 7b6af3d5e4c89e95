"""Casting one structure: the rank that a batch loads most, its program, prices, timeline and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from castoff.casting.deployment import Deployment
from castoff.casting.footprint import Footprint, footprint
from castoff.casting.hits import Reads, expected_reads
from castoff.casting.prefill_peak import prefill_peak_bytes
from castoff.casting.price import BOUNDS, Prices, Pricing, longest_term, price_program, without_link
from castoff.casting.timeline import Timeline, schedule
from castoff.dims import Array, Dim, ceil_div, maximum, minimum, some
from castoff.errors import CastoffError
from castoff.model.offload_sizes import pool_sizes
from castoff.model.record import OffloadCast, record_step
from castoff.model.setup import Setup
from castoff.ops.lengths import Lengths
from castoff.ops.program import Program
from castoff.spec.backend import Backend, Origin, weakest
from castoff.spec.scenario import Mode, RequestClass, deal_to_rank

GIB = 2**30
MOST_RESERVED_GIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The requests of a rank: those whose caches it holds, and those of one pipeline micro-batch.

    resident: of the rank with the longest requests. micro: of the rank that is timed, see `dealings`.
    in_flight: micro-batches, at most one per pipeline stage.
    busy_ranks: new tokens of all attention-DP ranks in one micro-batch over those of the timed one; dp_size where all
        ranks are equally full.
    computed_tokens: new tokens of the whole deployment.
    """

    classes: tuple[RequestClass, ...]
    resident: Lengths
    micro: Lengths
    in_flight: Dim
    busy_ranks: Dim
    requests: Dim
    computed_tokens: Dim


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Cast:
    """One structure, cast: everything that a scalar prediction and a sweep have in common.

    reads: of a decode step with offload. host_s: of the latency, what the device waits for the host.
    """

    setup: Setup
    batch: Batch
    program: Program
    prices: Prices
    timeline: Timeline
    footprint: Footprint
    latency_s: Dim
    host_s: Dim
    reads: Reads | None
    bound: int | Array
    origin: Origin
    tokens_per_s: Dim
    throughput_origin: Origin


def cast_batch(deployment: Deployment, classes: Sequence[RequestClass]) -> Cast:
    """Record, price and place a deployment's step for a batch; both may hold arrays of scenarios."""
    casts = [cast_dealt(deployment, dealt) for dealt in dealings(classes)]
    return max(casts, key=lambda result: float(result.latency_s)) if len(casts) > 1 else casts[0]


def dealings(classes: Sequence[RequestClass]) -> list[tuple[RequestClass, ...]]:
    """Orders in which a ragged batch is dealt to ranks and micro-batches, of which the slowest outcome counts.

    The first of the ranks gets the most new tokens in one, the most pairs of a query and a position it sees in the
    other; either may take longest.
    """
    if len(classes) == 1:
        return [tuple(classes)]
    by_tokens = sorted(classes, key=lambda entry: (-int(entry.query), -int(entry.context)))
    by_pairs = sorted(classes, key=lambda entry: -int(entry.query) * (2 * int(entry.context) + int(entry.query)))
    return [tuple(by_tokens)] if by_tokens == by_pairs else [tuple(by_tokens), tuple(by_pairs)]


def cast_dealt(deployment: Deployment, classes: Sequence[RequestClass]) -> Cast:
    """Cast the first rank when requests are dealt in the order of their classes."""
    setup, pricing, pool = deployment.setup, deployment.pricing, deployment.pool
    batch = batch_of_rank(setup, classes)
    program = record_batch(deployment, batch, repeat=not deployment.scenario.disable_repetition)
    prices = price_program(program, pricing)
    timeline = schedule(program, prices)
    device_s = _latency(timeline, batch, setup.mode)
    host_s = _host_s(setup, pricing.backend, batch, device_s)
    latency_s = device_s + host_s
    origins = {price.origin for block in prices.values() for price in block}
    origin = weakest(
        [
            *origins,
            *([pricing.backend.host_origins[setup.mode]] if some(host_s) else []),
            *([pool.origin] if pool is not None else []),
        ]
    )
    gained: Dim = batch.computed_tokens if setup.mode == "prefill" else batch.requests * setup.mtp.tokens_per_step
    assumed_acceptance = setup.mode == "decode" and setup.mtp.acceptance_is_assumed
    return Cast(
        setup=setup,
        batch=batch,
        program=program,
        prices=prices,
        timeline=timeline,
        footprint=footprint_of(deployment, program, batch),
        latency_s=latency_s,
        host_s=host_s,
        reads=None if pool is None else expected_reads(pool, batch.micro),
        bound=_bound(program, prices),
        origin=origin,
        tokens_per_s=gained / latency_s,
        throughput_origin=weakest([origin, "assumed"]) if assumed_acceptance else origin,
    )


def stall_s(cast: Cast, pricing: Pricing) -> Dim:
    """How much of a latency is due to the link to host memory: what it would lack with one that takes no time."""
    unlinked = schedule(cast.program, price_program(cast.program, without_link(pricing)))
    device_s = _latency(unlinked, cast.batch, cast.setup.mode)
    without_s = device_s + _host_s(cast.setup, pricing.backend, cast.batch, device_s)
    return maximum(0.0, cast.latency_s - without_s)


def record_batch(deployment: Deployment, batch: Batch, *, repeat: bool = True) -> Program:
    """The program of one micro-batch. repeat: record each kind of layer once."""
    offload = offload_of(deployment, batch.micro)
    return record_step(deployment.setup, batch.micro, batch.busy_ranks, repeat=repeat, offload=offload)


def offload_of(deployment: Deployment, lengths: Lengths) -> OffloadCast | None:
    """Offload of these requests, with what a step reads of their pools if those are known; None without offload."""
    setup, options, pool = deployment.setup, deployment.scenario.offload, deployment.pool
    if not options.offloads:
        return None
    if pool is None:
        return OffloadCast(options, pool_sizes(setup, options, lengths.requests))
    reads = expected_reads(pool, lengths)
    sizes = pool_sizes(setup, options, lengths.requests, pool_tokens=pool.tokens)
    return OffloadCast(options, replace(sizes, listed=reads.listed, hosted=reads.hosted))


def batch_of_rank(setup: Setup, classes: Sequence[RequestClass]) -> Batch:
    """Deal a batch to the heaviest attention-DP rank and cut it into pipeline micro-batches."""
    ranks, stages = setup.mesh.dp.size, setup.mesh.pp.size
    longest_first = classes if len(classes) == 1 else sorted(classes, key=total_tokens, reverse=True)
    resident = Lengths(deal_to_rank(longest_first, ranks))
    part = Lengths(deal_to_rank(classes, ranks * stages))
    requests: Dim = 0
    computed: Dim = 0
    for entry in classes:
        requests, computed = requests + entry.count, computed + entry.count * entry.query
    in_flight = micro_batches(setup, requests)
    return Batch(
        classes=tuple(classes),
        resident=resident,
        micro=part,
        in_flight=in_flight,
        busy_ranks=computed / (in_flight * part.tokens),
        requests=requests,
        computed_tokens=computed,
    )


def micro_batches(setup: Setup, requests: Dim) -> Dim:
    """How many micro-batches the requests of the fullest rank are cut into: one per stage, as even as can be."""
    return minimum(ceil_div(requests, setup.mesh.dp.size), setup.mesh.pp.size)


def total_tokens(entry: RequestClass) -> int:
    return int(entry.context + entry.query)


def _latency(timeline: Timeline, batch: Batch, mode: Mode) -> Dim:
    """A step of all micro-batches, which follow each other through the stages, spaced by the slowest stage.

    In decode a micro-batch enters the first stage again when it has left the last one and the others have passed: the
    pipeline never drains. A prefill ends when the last micro-batch has left.
    """
    slowest: Dim = 0.0
    for seconds in timeline.stage_s:
        slowest = maximum(slowest, seconds)
    if mode == "decode":
        return maximum(timeline.end_s, batch.in_flight * slowest)
    return timeline.end_s + (batch.in_flight - 1) * slowest


def _host_s(setup: Setup, backend: Backend, batch: Batch, device_s: Dim) -> Dim:
    """Host time beside the device's: of each step, and what launching a prefill takes longer than computing it."""
    per_step = backend.host_s_per_step[setup.mode]
    if setup.mode == "decode" or not backend.prefill_floor_s_per_layer:
        return per_step
    return per_step + maximum(0.0, launch_s(setup, backend.prefill_floor_s_per_layer, batch.in_flight) - device_s)


def launch_s(setup: Setup, layer_s: float, in_flight: Dim = 1) -> Dim:
    """What hosts take to launch a step op by op, draft calls included. A stage launches its layers when the one before
    it has sent what it needs, and then those of the micro-batches that follow."""
    layers = setup.model.num_hidden_layers + setup.mtp.num_mtp_tokens
    return layer_s * layers * (1 + (in_flight - 1) / setup.mesh.pp.size)


def _bound(program: Program, prices: Prices) -> int | Array:
    """The term of BOUNDS that the op times, each counted for its longest term, add up to most."""
    sums: list[Dim] = [0.0] * len(BOUNDS)
    for block, count in program.counts.items():
        for price in prices[block]:
            bound = price.bound
            if isinstance(bound, int):
                sums[bound] = sums[bound] + count * price.seconds
            else:
                for index, term in enumerate(price.terms):
                    if isinstance(term, np.ndarray) or term:
                        sums[index] = sums[index] + np.where(bound == index, count * price.seconds, 0.0)
    return longest_term(sums)


def footprint_of(deployment: Deployment, program: Program, batch: Batch) -> Footprint:
    """Memory of a step, the prefill before it included where the scenario asks for it."""
    scenario, setup, pricing = deployment.scenario, deployment.setup, deployment.pricing
    if not 0 <= scenario.reserved_memory_gb <= MOST_RESERVED_GIB:
        raise CastoffError(
            f"--reserved-memory-gb must be from 0 to {MOST_RESERVED_GIB}, got {scenario.reserved_memory_gb:g}"
        )
    step = footprint(
        setup,
        pricing.device,
        pricing.backend,
        program,
        batch.resident,
        reserved_bytes=scenario.reserved_memory_gb * GIB,
        offload=offload_of(deployment, batch.resident),
    )
    if scenario.prefill_tokens is None:
        return step
    prefill = prefill_peak_bytes(setup, pricing.backend, scenario.prefill_tokens, batch.resident.longest)
    return replace(step, activation_bytes=maximum(step.activation_bytes, prefill))
