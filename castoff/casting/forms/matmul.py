"""Forms of matrix products: (m, k) times (k, n), by tiles dealt to cores in waves, or by the bytes they move."""

from __future__ import annotations

from castoff.casting.forms.form import Coefficients, Form, Sizes, Times, smooth_maximum
from castoff.spec.device import Device


def _times(sizes: Sizes, c: Coefficients, device: Device) -> Times:
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    compute = 2.0 * m * n * k / (device.matrix_flops_per_s["bf16"] * c["compute_efficiency"])
    memory = 2.0 * (m * k + k * n + m * n) / (device.memory.bandwidth_bytes_per_s * c["memory_efficiency"])
    busy = smooth_maximum(compute, memory, c["overlap"])
    return Times(c["launch_s"] + busy, compute, memory, c["launch_s"])


MATMUL = Form(
    _times,
    {"launch_s": 3e-6, "compute_efficiency": 0.7, "memory_efficiency": 0.8, "overlap": 2.0},
    ("m", "n", "k"),
)
