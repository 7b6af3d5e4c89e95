"""Cost curves: the work of an op to seconds on each kind of unit, by the curve that a backend has for its family.

A curve kind is a function here, its row in `_KINDS`, and its fields in `castoff.spec.backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from castoff.dims import Dim, some
from castoff.ops.work import Part, Work
from castoff.spec.backend import Curve
from castoff.spec.device import Device

Terms = tuple[Dim, Dim, Dim]
"""Seconds of (compute, vector, memory), each as if it had the op to itself."""


def work_terms(work: Work, curve: Curve, device: Device) -> Terms:
    """Terms of a whole op, without its launch and its communication."""
    return _KINDS[curve.kind](work.parts, curve, device)


def part_terms(part: Part, curve: Curve, device: Device) -> Terms:
    """Terms of one part of an op alone."""
    return _KINDS[curve.kind]((part,), curve, device)


def _roofline(parts: Sequence[Part], curve: Curve, device: Device) -> Terms:
    """Every amount at its peak rate times the curve's efficiency for it."""
    bandwidth = device.memory.bandwidth_bytes_per_s
    vector_rate = device.vector_flops_per_s["fp32"] * curve.vector_efficiency
    compute: Dim = 0.0
    vector: Dim = 0.0
    memory: Dim = 0.0
    for part in parts:
        if some(part.matrix_flops):
            rate = device.matrix_flops_per_s[part.matrix_dtype] * curve.compute_efficiency
            compute = compute + part.matrix_flops / rate
        if some(part.vector_flops):
            vector = vector + part.vector_flops / vector_rate
        if some(part.bytes):
            memory = memory + part.bytes / (bandwidth * curve.memory_efficiency)
        if some(part.gather_bytes):
            memory = memory + part.gather_bytes / (bandwidth * curve.gather_efficiency)
    return compute, vector, memory


_KINDS: Mapping[str, Callable[[Sequence[Part], Curve, Device], Terms]] = {"roofline": _roofline}
