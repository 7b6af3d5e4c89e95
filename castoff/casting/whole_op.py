"""Calls that are measured whole: a call as one kernel, called after its op."""

from __future__ import annotations

from castoff.dims import Dim
from castoff.ops.program import OpCall
from castoff.ops.work import Kernel

PREFIX = "op_"


def curve_of(op_name: str) -> str:
    """What a backend calls its fit of an op's whole calls."""
    return f"{PREFIX}{op_name}"


def as_kernel(call: OpCall) -> Kernel:
    """All that a call does as one kernel, with the sizes of the form `amounts`.

    tokens: rows of its first input. flops_per_token: what tells calls of one op apart, by their weights or by the
    tokens that they look at.
    """
    parts = call.work.parts
    tokens = next(shape[0] for shape in call.input_shapes)
    matrix_flops: Dim = 0.0
    vector_flops: Dim = 0.0
    moved: Dim = 0.0
    gathered: Dim = 0.0
    for part in parts:
        matrix_flops = matrix_flops + part.matrix_flops
        vector_flops = vector_flops + part.vector_flops
        moved = moved + part.bytes
        gathered = gathered + part.gather_bytes
    sizes = {
        "matrix_flops": matrix_flops,
        "vector_flops": vector_flops,
        "bytes": moved,
        "gather_bytes": gathered,
        "tokens": tokens,
        "flops_per_token": (matrix_flops + vector_flops) / tokens,
    }
    return Kernel(curve_of(call.op.name), tuple(part.name for part in parts), sizes)
