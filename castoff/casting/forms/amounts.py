"""The form of whole ops: a launch, and seconds for each of the amounts that a call's work states."""

from __future__ import annotations

from castoff.casting.forms.form import Coefficients, Form, Sizes, Times
from castoff.spec.device import Device


def _times(sizes: Sizes, c: Coefficients, _: Device) -> Times:
    compute = c["s_per_matrix_flop"] * sizes["matrix_flops"] + c["s_per_vector_flop"] * sizes["vector_flops"]
    memory = c["s_per_byte"] * sizes["bytes"] + c["s_per_gather_byte"] * sizes["gather_bytes"]
    return Times(c["launch_s"] + compute + memory, compute, memory, c["launch_s"])


AMOUNTS = Form(
    _times,
    {
        "launch_s": 1e-5,
        "s_per_matrix_flop": 1e-11,
        "s_per_vector_flop": 1e-10,
        "s_per_byte": 1e-10,
        "s_per_gather_byte": 1e-10,
    },
    ("matrix_flops", "vector_flops", "bytes", "gather_bytes", "tokens", "flops_per_token"),
)
