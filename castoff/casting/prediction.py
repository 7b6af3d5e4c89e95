"""Casting: a model, a device and a scenario in, a prediction out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from castoff.casting.footprint import Footprint, footprint
from castoff.casting.prefill_peak import prefill_peak_bytes
from castoff.casting.price import BOUNDS, Bound, Measured, Prices, Pricing, longest_term, price_program
from castoff.casting.timeline import Timeline, schedule
from castoff.dims import Array, Dim, ceil_div, largest, maximum
from castoff.errors import CastoffError
from castoff.model.decoder import record_step
from castoff.model.setup import Setup, resolve_setup
from castoff.ops.lengths import Lengths
from castoff.ops.program import Program
from castoff.spec.backend import Backend, Origin, load_backend, weakest
from castoff.spec.device import Device
from castoff.spec.model import ModelSpec
from castoff.spec.scenario import MOST, Compilation, Mode, RequestClass, Scenario, deal_to_rank, request_classes

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
    """One structure, cast: everything that a scalar prediction and a sweep have in common."""

    setup: Setup
    batch: Batch
    program: Program
    prices: Prices
    timeline: Timeline
    footprint: Footprint
    latency_s: Dim
    host_s: float
    bound: int | Array
    origin: Origin
    tokens_per_s: Dim
    throughput_origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """What would fit: requests per attention-DP rank at these lengths (0 for none), context at this batch (or None)."""

    max_batch_per_device: int
    max_context_length: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The cost of one step of a deployment.

    latency_s: from the start of the step to its last token, host time included. tokens_per_s: tokens that users get
    (decode, with accepted drafts) or that are computed (prefill), over the whole deployment.
    """

    model: ModelSpec
    device: Device
    backend: Backend
    scenario: Scenario
    cast: Cast = field(repr=False)
    largest: Largest
    notes: tuple[str, ...] = field(default=())

    @property
    def mode(self) -> Mode:
        """decode or prefill."""
        return self.cast.setup.mode

    @property
    def latency_s(self) -> float:
        """Seconds of the step."""
        return float(self.cast.latency_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the deployment."""
        return float(self.cast.tokens_per_s)

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens per second and device."""
        return self.tokens_per_s / self.cast.setup.mesh.num_devices

    @property
    def fits(self) -> bool:
        """Whether the fullest device holds it."""
        return bool(self.cast.footprint.fits)

    @property
    def bound(self) -> Bound:
        """What the step waits for most."""
        return BOUNDS[int(self.cast.bound)]

    @property
    def footprint(self) -> Footprint:
        """Memory of the fullest device."""
        return self.cast.footprint


def cast(model: ModelSpec, device: Device, scenario: Scenario, *, measured: Measured | None = None) -> Prediction:
    """Predict one step of `scenario`.

    measured: op times that replace the backend's curves where name and shapes match.
    Raises CastoffError where the scenario cannot run on this device whatever its size of memory; a step that only
    does not fit is predicted, with `fits` false and the largest batch and context that would.
    """
    backend = load_backend(device.default_backend if scenario.backend is None else scenario.backend)
    setup = resolve_setup(model, device, backend, scenario, scenario.workload.mode)
    classes = request_classes(scenario.workload, scenario.mtp)
    if any(isinstance(dim, np.ndarray) for entry in classes for dim in (entry.count, entry.context, entry.query)):
        raise CastoffError("cast takes one scenario; give arrays to castoff.sweep")
    pricing = Pricing(device, backend, measured)
    result = cast_structure(setup, pricing, classes, scenario)
    return Prediction(
        model=model,
        device=device,
        backend=backend,
        scenario=scenario,
        cast=result,
        largest=largest_that_fits(setup, pricing, classes, scenario),
        notes=tuple(_notes(model, scenario.compilation, result)),
    )


def cast_structure(setup: Setup, pricing: Pricing, classes: Sequence[RequestClass], scenario: Scenario) -> Cast:
    """Record, price and place one structure for a batch, which may hold arrays of scenarios."""
    casts = [_cast_rank(setup, pricing, dealt, scenario) for dealt in dealings(classes)]
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


def _cast_rank(setup: Setup, pricing: Pricing, classes: Sequence[RequestClass], scenario: Scenario) -> Cast:
    """Cast the first rank when requests are dealt in the order of their classes."""
    batch = batch_of_rank(setup, classes)
    program = record_step(setup, batch.micro, batch.busy_ranks, repeat=not scenario.disable_repetition)
    prices = price_program(program, pricing)
    timeline = schedule(program, prices)
    host_s = pricing.backend.host_s_per_step[setup.mode]
    latency_s = _latency(timeline, batch, setup.mode) + host_s
    origins = {price.origin for block in prices.values() for price in block}
    origin = weakest([*origins, *([pricing.backend.host_origin] if host_s else [])])
    gained: Dim = batch.computed_tokens if setup.mode == "prefill" else batch.requests * setup.mtp.tokens_per_step
    assumed_acceptance = setup.mode == "decode" and setup.mtp.acceptance_is_assumed
    return Cast(
        setup=setup,
        batch=batch,
        program=program,
        prices=prices,
        timeline=timeline,
        footprint=_footprint(setup, pricing, program, batch, scenario),
        latency_s=latency_s,
        host_s=host_s,
        bound=_bound(program, prices),
        origin=origin,
        tokens_per_s=gained / latency_s,
        throughput_origin=weakest([origin, "assumed"]) if assumed_acceptance else origin,
    )


def batch_of_rank(setup: Setup, classes: Sequence[RequestClass]) -> Batch:
    """Deal a batch to the heaviest attention-DP rank and cut it into pipeline micro-batches."""
    ranks, stages = setup.mesh.dp.size, setup.mesh.pp.size
    longest_first = classes if len(classes) == 1 else sorted(classes, key=_total_tokens, reverse=True)
    resident = Lengths(deal_to_rank(longest_first, ranks))
    part = Lengths(deal_to_rank(classes, ranks * stages))
    requests: Dim = 0
    computed: Dim = 0
    for entry in classes:
        requests, computed = requests + entry.count, computed + entry.count * entry.query
    in_flight = ceil_div(resident.requests, part.requests)
    return Batch(
        classes=tuple(classes),
        resident=resident,
        micro=part,
        in_flight=in_flight,
        busy_ranks=computed / (in_flight * part.tokens),
        requests=requests,
        computed_tokens=computed,
    )


def _total_tokens(entry: RequestClass) -> int:
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


def _footprint(setup: Setup, pricing: Pricing, program: Program, batch: Batch, scenario: Scenario) -> Footprint:
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
    )
    if scenario.prefill_tokens is None:
        return step
    prefill = prefill_peak_bytes(setup, pricing.backend, scenario.prefill_tokens, batch.resident.longest)
    return replace(step, activation_bytes=maximum(step.activation_bytes, prefill))


def largest_that_fits(setup: Setup, pricing: Pricing, classes: Sequence[RequestClass], scenario: Scenario) -> Largest:
    """Largest batch per rank at the longest request's lengths, and longest context at this batch, that still fit."""
    longest = max(classes, key=_total_tokens)
    requests = sum(int(entry.count) for entry in classes)
    context_cap = setup.model.max_position_embeddings - int(longest.query)

    def fits(count: Dim, context: Dim) -> Array:
        own = batch_of_rank(setup, [RequestClass(count, context, longest.query)])
        program = record_step(setup, own.micro, own.busy_ranks)
        return np.asarray(_footprint(setup, pricing, program, own, scenario).fits)

    ranks = setup.mesh.dp.size
    return Largest(
        max_batch_per_device=_largest_true(lambda batch: fits(batch * ranks, longest.context), least=1) or 0,
        max_context_length=_largest_true(lambda context: fits(requests, context), least=0, most=max(context_cap, 0)),
    )


_PROBES = 64


def _largest_true(fits: Callable[[Array], Array], *, least: int, most: int = MOST) -> int | None:
    """Largest whole number in [least, most] for which a monotone test holds, or None; 64 probes at a time."""
    low, high = least - 1, most
    while low < high:
        if low < least:
            probes = np.unique(np.minimum(np.geomspace(max(least, 1), max(most, 1), _PROBES).astype(np.int64), most))
            probes = np.union1d(probes, [least])
        else:
            probes = np.unique(np.linspace(low + 1, high, _PROBES).astype(np.int64))
        # float64: products of large probes would overflow int64.
        holds = fits(probes.astype(np.float64))
        if not holds.any():
            high = int(probes[0]) - 1
            continue
        best = int(np.nonzero(holds)[0][-1])
        low = int(probes[best])
        high = int(probes[best + 1]) - 1 if best + 1 < len(probes) else low
    return low if low >= least else None


def _notes(model: ModelSpec, compilation: Compilation, result: Cast) -> list[str]:
    notes = []
    ops = {call.op.name for block in result.program.blocks for call in block.calls}
    for asked, flag, done in (
        (compilation.enable_dispatch_ffn_combine, "--enable-dispatch-ffn-combine", "dispatch_ffn_combine" in ops),
        (compilation.enable_matmul_allreduce, "--enable-matmul-allreduce", "matmul_all_reduce" in ops),
        (compilation.enable_sequence_parallel, "--enable-sequence-parallel", result.setup.sequence_parallel),
    ):
        if asked and not done:
            notes.append(f"{flag} finds nothing to change with this parallelism")
    longest = largest(result.batch.resident.longest)
    if longest > model.max_position_embeddings:
        notes.append(
            f"requests reach {longest:.0f} tokens, beyond max_position_embeddings {model.max_position_embeddings} "
            f"of {model.name}"
        )
    published, priced = model.checkpoint_quant, result.setup.expert.action
    if published is not None and priced != published.action:
        notes.append(
            f"{model.name} is published in {published.action} and is priced as {priced}; "
            f"--quantize-linear-action {published.action} prices it as published"
        )
    return notes
