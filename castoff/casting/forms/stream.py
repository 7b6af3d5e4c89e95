"""The form of small kernels that stream what they read and write."""

from __future__ import annotations

from castoff.casting.forms.form import Coefficients, Form, Sizes, Times
from castoff.spec.device import Device


def _times(sizes: Sizes, c: Coefficients, device: Device) -> Times:
    memory = sizes["bytes"] / (device.memory.bandwidth_bytes_per_s * c["memory_efficiency"])
    return Times(c["launch_s"] + memory, 0.0, memory, c["launch_s"])


STREAM = Form(_times, {"launch_s": 2e-6, "memory_efficiency": 0.7}, ("bytes",))
