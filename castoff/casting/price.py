"""Seconds of an op call: its work on a device, driven by a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from castoff.casting.collective import collective_s
from castoff.casting.curves import work_terms
from castoff.dims import Array, Dim, maximum
from castoff.ops.program import Block, OpCall, Program
from castoff.spec.backend import Backend, Origin, weakest
from castoff.spec.device import Device

Bound = Literal["compute", "vector", "memory", "communication", "launch"]
BOUNDS: tuple[Bound, ...] = get_args(Bound)
CORES, LINKS = "cores", "links"


@dataclass(frozen=True, slots=True)
class Price:
    """Time of one call.

    seconds: launch and the longest of the other terms. terms: seconds of each of BOUNDS on its own. units: what the
    call occupies meanwhile.
    """

    seconds: Dim
    terms: tuple[Dim, ...]
    origin: Origin
    units: tuple[str, ...] = (CORES,)

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
    """What turns work into time."""

    device: Device
    backend: Backend
    measured: Measured | None = None


def shapes_text(call: OpCall) -> str:
    """Input shapes of a call, weights included: `[4096, 6144], [576, 6144]`."""
    return ", ".join("[" + ", ".join(_dim_text(dim) for dim in shape) + "]" for shape in call.input_shapes)


def dtypes_text(call: OpCall) -> str:
    """Input dtypes of a call, weights included: `bf16, int8`."""
    return ", ".join(tensor.dtype for tensor in call.inputs if tensor is not None)


def call_key(call: OpCall) -> CallKey:
    """The key under which a call's time may be measured."""
    return call.op.name, shapes_text(call), dtypes_text(call)


def _dim_text(dim: Dim) -> str:
    return "*" if isinstance(dim, np.ndarray) else f"{dim:.10g}"


def price_call(call: OpCall, pricing: Pricing) -> Price:
    """Time of one call: a measured one where there is one, else the backend's curve for its family."""
    work = call.work
    backend = pricing.backend
    pure_collective = not work.parts
    curve = None if pure_collective else backend.curve(call.family)
    terms = (0.0, 0.0, 0.0) if curve is None else work_terms(work, curve, pricing.device)
    communication: Dim = 0.0
    for collective in work.collectives:
        communication = communication + collective_s(collective, pricing.device, backend.collectives.link_efficiency)
    launch = backend.collectives.launch_s if curve is None else curve.launch_s
    origins = [] if curve is None else [curve.origin]
    if work.collectives:
        origins.append(backend.collectives.origin)
    every = (*terms, communication, launch)
    units = (LINKS,) if pure_collective else (CORES, LINKS) if work.collectives else (CORES,)
    if pricing.measured is not None:
        known = pricing.measured.seconds.get(call_key(call))
        if known is not None:
            return Price(known, every, "measured", units)
    longest = maximum(maximum(terms[0], terms[1]), maximum(terms[2], communication))
    return Price(launch + longest, every, weakest(origins), units)


Prices = Mapping[Block, tuple[Price, ...]]


def price_program(program: Program, pricing: Pricing) -> Prices:
    """Prices of the calls of every distinct block."""
    return {block: price_block(block, pricing) for block in program.blocks}


def price_block(block: Block, pricing: Pricing) -> tuple[Price, ...]:
    """Prices of a block's calls, in order."""
    return tuple(price_call(call, pricing) for call in block.calls)
