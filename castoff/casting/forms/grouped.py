"""The form of grouped products: rows sorted by expert times that expert's (k, n), for the experts that got rows."""

from __future__ import annotations

from castoff.casting.forms.form import Coefficients, Form, Sizes, Times, smooth_maximum
from castoff.dims import Dim, maximum, minimum
from castoff.ops.work import DTYPE_BYTES
from castoff.spec.device import Device

OUT_BYTES = 2.0


def grouped(dtype: str) -> Form:
    """Weights of the touched experts beside the multiplications of rows, which each expert pads."""

    def times(sizes: Sizes, c: Coefficients, device: Device) -> Times:
        rows, touched, area = sizes["rows"], sizes["touched"], sizes["n"] * sizes["k"]
        padded = rows + c["padding_rows"] * minimum(touched, rows)
        compute = 2.0 * padded * area / (device.matrix_flops_per_s[dtype] * c["compute_efficiency"])
        moved = DTYPE_BYTES[dtype] * (touched * area + rows * sizes["k"]) + OUT_BYTES * rows * sizes["n"]
        memory = moved / (device.memory.bandwidth_bytes_per_s * c["memory_efficiency"])
        busy = smooth_maximum(compute, memory, c["overlap"])
        return Times(c["launch_s"] + busy, compute, memory, c["launch_s"])

    start = {
        "launch_s": 5e-6, "compute_efficiency": 0.5, "padding_rows": 8.0, "memory_efficiency": 0.8, "overlap": 1.0,
    }  # fmt: skip
    return Form(times, start, ("rows", "touched", "n", "k", "skew"), axes=_axes)


def _axes(sizes: Sizes) -> dict[str, Dim]:
    touched = maximum(sizes["touched"], 1e-3)
    return {
        "rows_per_expert": sizes["rows"] / touched,
        "touched": touched,
        "area": sizes["n"] * sizes["k"],
        "skew": sizes["skew"],
    }


GROUPED_FP8, GROUPED_BF16 = (grouped(dtype) for dtype in ("fp8", "bf16"))
