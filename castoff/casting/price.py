"""Seconds of an op call: its work on a device, driven by a backend."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal, get_args

import numpy as np

from castoff.casting.collective import collective_s, levels_of
from castoff.casting.curves import fitted_times, parts_terms
from castoff.casting.whole_op import as_kernel, curve_of
from castoff.dims import Array, Dim, maximum, some, where
from castoff.ops.program import Block, OpCall, Program
from castoff.ops.work import Kernel, Work, without_kernels
from castoff.spec.backend import Backend, Origin, weakest
from castoff.spec.device import Device
from castoff.spec.fits import Fit

Bound = Literal["compute", "vector", "memory", "communication", "host_link", "launch"]
BOUNDS: tuple[Bound, ...] = get_args(Bound)
# The host link is one for each direction.
CORES, LINKS, HOST_READS, HOST_WRITES = UNITS = ("cores", "links", "host_reads", "host_writes")


@dataclass(frozen=True, slots=True)
class Price:
    """Time of one call.

    seconds: launch and the longest of the other terms; where the cores read the host, that comes on top. terms: seconds
    of each of BOUNDS on its own. units: what the call occupies meanwhile. extrapolated: whether sizes lie beyond those
    that a fit was made from. host_s: what the host takes for the call where no graph launches it, as far as fits know.
    """

    seconds: Dim
    terms: tuple[Dim, ...]
    origin: Origin
    units: tuple[str, ...] = (CORES,)
    extrapolated: bool | Array = False
    host_s: Dim = 0.0

    @property
    def bound(self) -> int | Array:
        """Index into BOUNDS of the longest term (per scenario); the first of equals."""
        return longest_term(self.terms)


def longest_term(terms: Sequence[Dim]) -> int | Array:
    """Index of the largest term (per scenario); the first of equals."""
    best = terms[0]
    index: int | Array = 0
    for position, term in enumerate(terms[1:], start=1):
        # Most ops have no communication, most collectives nothing else.
        if isinstance(term, np.ndarray) or term:
            better = term > best
            index = (
                np.where(better, position, index) if isinstance(better, np.ndarray) else position if better else index
            )
            best = maximum(best, term)
    return index


CallKey = tuple[str, str, str]
"""Calls with one key cost the same: op name, input shapes, input dtypes, as `shapes_text` and `dtypes_text` write."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured op times: seconds by `call_key`."""

    seconds: Mapping[CallKey, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pricing:
    """What turns work into time. num_devices: of the deployment, which share the links to their hosts' memory."""

    device: Device
    backend: Backend
    measured: Measured | None = None
    num_devices: int = 1


def shapes_text(call: OpCall) -> str:
    """Input shapes of a call, weights included: `[4096, 6144], [576, 6144]`."""
    return ", ".join("[" + ", ".join(_dim_text(dim) for dim in shape) + "]" for shape in call.input_shapes)


def dtypes_text(call: OpCall) -> str:
    """Input dtypes of a call, weights included: `bf16, int8`."""
    return ", ".join(tensor.dtype for tensor in call.inputs if tensor is not None)


def is_measurable(call: OpCall) -> bool:
    """Whether shapes say what a call costs. How many rows offload moves is data, of which a cast has an expectation."""
    return not call.family.startswith("offload_")


def call_key(call: OpCall) -> CallKey:
    """The key under which a call's time may be measured."""
    return call.op.name, shapes_text(call), dtypes_text(call)


def _dim_text(dim: Dim) -> str:
    return "*" if isinstance(dim, np.ndarray) else f"{dim:.10g}"


def price_call(call: OpCall, pricing: Pricing) -> Price:
    """Time of one call: a measured one where there is one, else that of its kernels, one after the other.

    A kernel that the backend has a fit for costs what the fit says; all other parts are one by the family's curve.
    Where it has a fit of the whole op, that is the only kernel.
    """
    work, fits = call.work, pricing.backend.fits
    known = [(kernel, kernel.known_curve(fits)) for kernel in _kernels(call, fits)] if fits else []
    fitted = [(kernel, fits[curve]) for kernel, curve in known if curve and _is_covered(kernel, work, pricing)]
    rest = without_kernels(work, [kernel for kernel, _ in fitted]) if fitted else work
    prices = [_fitted_price(kernel, fit, pricing.device) for kernel, fit in fitted]
    if rest.parts or rest.collectives or not prices:
        prices.append(_curve_price(call.family, rest, pricing))
    price = _one_after_the_other(prices, _units(work))
    if pricing.measured is not None and is_measurable(call):
        seconds = pricing.measured.seconds.get(call_key(call))
        if seconds is not None:
            return Price(seconds, price.terms, "measured", price.units)
    return price


def _kernels(call: OpCall, fits: Mapping[str, Fit]) -> tuple[Kernel, ...]:
    """The whole call where there is a fit for it, else its kernels."""
    return (as_kernel(call),) if curve_of(call.op.name) in fits else call.work.kernels


def _is_covered(kernel: Kernel, work: Work, pricing: Pricing) -> bool:
    """Whether a fit can be asked: collectives are measured on the links of one tier alone."""
    return bool(kernel.parts) or all(
        len(levels_of(collective.group, pricing.device.tiers)) == 1 for collective in work.collectives
    )


def _fitted_price(kernel: Kernel, fit: Fit, device: Device) -> Price:
    result = fitted_times(kernel, fit, device)
    times, inside = result.times, result.inside
    terms: tuple[Dim, ...] = (times.compute_s, 0.0, times.memory_s, 0.0, 0.0, times.launch_s)
    if not kernel.parts:
        terms = (0.0, 0.0, 0.0, times.seconds - times.launch_s, 0.0, times.launch_s)
    extrapolated = ~inside if isinstance(inside, np.ndarray) else not inside
    origin: Origin = "analytic" if np.any(extrapolated) else fit.origin
    return Price(times.seconds, terms, origin, (), extrapolated, times.host_s)


def _curve_price(family: str, work: Work, pricing: Pricing) -> Price:
    """All of the work as one kernel, by the family's curve."""
    backend = pricing.backend
    pure_collective = not work.parts
    curve = None if pure_collective else backend.curve(family)
    terms = (0.0, 0.0, 0.0) if curve is None else parts_terms(work.parts, curve, pricing.device)
    host_link = host_link_s(work, pricing)
    communication: Dim = 0.0
    for collective in work.collectives:
        communication = communication + collective_s(collective, pricing.device, backend.collectives.link_efficiency)
    launch = backend.collectives.launch_s if curve is None else curve.launch_s
    origins = [] if curve is None else [curve.origin]
    if work.collectives:
        origins.append(backend.collectives.origin)
    if some(host_link):
        rows = backend.host_rows
        origins.append(_LINK_ORIGINS[pricing.device.host_link.origin] if rows is None else rows.origin)
    longest = maximum(maximum(terms[0], terms[1]), maximum(terms[2], communication))
    # A kernel whose cores fetch rows from here and there does one after the other; a copy engine streams.
    busy = longest + host_link if work.holds_cores else maximum(longest, host_link)
    return Price(launch + busy, (*terms, communication, host_link, launch), weakest(origins))


def _one_after_the_other(prices: Sequence[Price], units: tuple[str, ...]) -> Price:
    first = prices[0]
    if len(prices) == 1:
        return replace(first, units=units)
    seconds, terms, extrapolated, host_s = first.seconds, first.terms, first.extrapolated, first.host_s
    for price in prices[1:]:
        seconds = seconds + price.seconds
        terms = tuple(a + b for a, b in zip(terms, price.terms, strict=True))
        extrapolated = extrapolated | price.extrapolated
        host_s = host_s + price.host_s
    return Price(seconds, terms, weakest(price.origin for price in prices), units, extrapolated, host_s)


def host_link_s(work: Work, pricing: Pricing) -> Dim:
    """Seconds on the link to host memory, in whichever direction takes longer.

    The devices of a deployment all use their links at once. Separate rows come at a share of the rate of large copies.
    """
    link, rows = pricing.device.host_link, pricing.backend.host_rows
    row_efficiency = link.row_efficiency if rows is None else rows.row_efficiency
    sharers = min(link.devices_per_link, pricing.num_devices)
    reads: Dim = 0.0
    writes: Dim = 0.0
    for part in work.parts:
        share = where(part.host_rows > 0, row_efficiency, 1.0) / sharers
        if some(part.host_read_bytes):
            reads = reads + part.host_read_bytes / (share * link.to_device_bytes_per_s)
        if some(part.host_write_bytes):
            writes = writes + part.host_write_bytes / (share * link.to_host_bytes_per_s)
    busy = maximum(reads, writes)
    return busy + where(busy > 0, link.latency_s, 0.0) if some(busy) else 0.0


def without_link(pricing: Pricing) -> Pricing:
    """The same with a link to host memory that takes no time."""
    link = replace(pricing.device.host_link, to_device_bytes_per_s=inf, to_host_bytes_per_s=inf, latency_s=0.0)
    return replace(pricing, device=replace(pricing.device, host_link=link))


def _units(work: Work) -> tuple[str, ...]:
    """What a call occupies: a copy nothing but its link."""
    units = [CORES] if work.parts and work.holds_cores else []
    if work.collectives:
        units.append(LINKS)
    if any(some(part.host_read_bytes) for part in work.parts):
        units.append(HOST_READS)
    if any(some(part.host_write_bytes) for part in work.parts):
        units.append(HOST_WRITES)
    return tuple(units)


_LINK_ORIGINS: Mapping[str, Origin] = {"measured": "measured", "datasheet": "analytic", "assumed": "assumed"}

Prices = Mapping[Block, tuple[Price, ...]]


def any_extrapolated(prices: Prices) -> bool | Array:
    """Whether a call of a step is priced beyond the sizes that a fit was made from."""
    result: bool | Array = False
    for price in itertools.chain.from_iterable(prices.values()):
        result = result | price.extrapolated
    return result


def beyond_ranges(call: OpCall, pricing: Pricing) -> dict[str, dict[str, float]]:
    """The fitted kernels of a call of one scenario that lie beyond what was fitted: by curve, the sizes that do."""
    fits, work = pricing.backend.fits, call.work
    found: dict[str, dict[str, float]] = {}
    for kernel in _kernels(call, fits):
        curve = kernel.known_curve(fits)
        if curve is None or not _is_covered(kernel, work, pricing):
            continue
        ranges = fits[curve].ranges
        outside = {
            name: float(kernel.sizes[name])
            for name, (least, most) in ranges.items()
            if not least <= float(kernel.sizes[name]) <= most
        }
        if outside:
            found[curve] = outside
    return found


def price_program(program: Program, pricing: Pricing) -> Prices:
    """Prices of the calls of every distinct block."""
    return {block: price_block(block, pricing) for block in program.blocks}


def price_block(block: Block, pricing: Pricing) -> tuple[Price, ...]:
    """Prices of a block's calls, in order."""
    return tuple(price_call(call, pricing) for call in block.calls)
