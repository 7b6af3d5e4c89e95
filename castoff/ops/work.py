"""What an op must do, from dims alone: no device, no time.

A `Work` is a list of named parts (the buckets of a report), the collectives, and scratch memory.
FLOPs count a multiply-add as two. Bytes are device-memory traffic that the op cannot avoid when it is one kernel.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from castoff.dims import Dim
from castoff.spec.mesh import Group

DTYPE_BYTES: dict[str, float] = {
    "fp64": 8,
    "fp32": 4,
    "int32": 4,
    "bf16": 2,
    "fp16": 2,
    "int8": 1,
    "fp8": 1,
    "e8m0": 1,
    "int4": 0.5,
    "fp4": 0.5,
}

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]


@dataclass(frozen=True, slots=True)
class Part:
    """One named share of an op's work.

    matrix_flops run on the matrix units at the rate of matrix_dtype, vector_flops on the vector units. `bytes` are
    streamed, `gather_bytes` are read as `gather_rows` separate rows. host_read_bytes come from host memory, and
    host_write_bytes go there, as `host_rows` separate rows, or as a stream where that is 0.
    """

    name: str
    matrix_flops: Dim = 0
    matrix_dtype: str = "bf16"
    vector_flops: Dim = 0
    bytes: Dim = 0
    gather_bytes: Dim = 0
    gather_rows: Dim = 0
    host_read_bytes: Dim = 0
    host_write_bytes: Dim = 0
    host_rows: Dim = 0


@dataclass(frozen=True, slots=True)
class Collective:
    """Communication of one rank.

    `bytes` is the whole tensor for all_reduce, the output for all_gather, the input for reduce_scatter, what one rank
    sends (its own share included) for all_to_all, and the message for send_recv.
    """

    kind: CollectiveKind
    bytes: Dim
    group: Group


@dataclass(frozen=True, slots=True)
class Kernel:
    """Some of an op's work as a stack without fused ops launches it: what a curve fitted to measurements prices.

    curve: the name under which a backend may have a fit for it. parts: names of the parts that it does; none where it
    does the collective. sizes: the numbers that decide its time, by the names that the fit's form asks for.
    general: the curve of a family of kernels, of which `curve` is one; asked where there is no fit for `curve`.
    """

    curve: str
    parts: tuple[str, ...]
    sizes: Mapping[str, Dim] = field(hash=False)
    general: str | None = None

    def known_curve(self, curves: Container[str]) -> str | None:
        """The one of its curves that is among these."""
        return next((curve for curve in (self.curve, self.general) if curve is not None and curve in curves), None)


@dataclass(frozen=True, slots=True)
class Work:
    """All that one op call does. holds_cores: False for copies, done by engines or few cores beside a computation.

    kernels: shares of the parts that a backend may have fits for; it prices the others as one kernel.
    """

    parts: tuple[Part, ...] = ()
    collectives: tuple[Collective, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    workspace_bytes: Dim = 0
    holds_cores: bool = True

    @property
    def flops(self) -> Dim:
        """Matrix and vector operations together."""
        total: Dim = 0
        for part in self.parts:
            total = total + part.matrix_flops + part.vector_flops
        return total

    @property
    def bytes(self) -> Dim:
        """Device-memory traffic."""
        total: Dim = 0
        for part in self.parts:
            total = total + part.bytes + part.gather_bytes
        return total


def without_kernels(work: Work, kernels: Iterable[Kernel]) -> Work:
    """What is left of the work beside these kernels."""
    done = list(kernels)
    names = {name for kernel in done for name in kernel.parts}
    return replace(
        work,
        parts=tuple(part for part in work.parts if part.name not in names),
        collectives=() if any(not kernel.parts for kernel in done) else work.collectives,
        kernels=tuple(kernel for kernel in work.kernels if kernel not in done),
    )
