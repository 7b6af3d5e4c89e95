"""Form of what surrounds attention: small kernels and products of all tokens with a set of weights.

Sizes: tokens, elements of the weights, their bytes each (scales included), outputs that a token gets.
"""

from __future__ import annotations

import numpy as np

from castoff.casting.forms.form import Coefficients, Form, Sizes, Times, smooth_maximum
from castoff.dims import maximum
from castoff.spec.device import Device

# A product has no fewer rows than the narrowest tile.
LEAST_ROWS = 8


def product_terms(sizes: Sizes, c: Coefficients, device: Device) -> tuple[Times, Times]:
    """Compute and memory of the product, apart; a one-byte format computes at twice the rate of bf16."""
    rows, elements, width = maximum(sizes["tokens"], LEAST_ROWS), sizes["elements"], sizes["element_bytes"]
    rate = device.matrix_flops_per_s["bf16"] * c["compute_efficiency"] * 2.0 / width
    compute = 2.0 * rows * elements / rate
    memory = elements * width / (device.memory.bandwidth_bytes_per_s * c["memory_efficiency"])
    return Times(compute), Times(memory)


def _times(sizes: Sizes, c: Coefficients, device: Device) -> Times:
    tokens, outputs = sizes["tokens"], sizes["outputs"]
    compute, memory = product_terms(sizes, c, device)
    product = smooth_maximum(compute.seconds, memory.seconds, c["overlap"])
    # Blocks that each have few tokens of some outputs: a cost per output, one per token, and one between the two.
    spread = outputs * (c["output_s"] + c["root_s"] * np.sqrt(tokens))
    busy = product + spread + tokens * (c["token_s"] + outputs * c["token_output_s"])
    return Times(c["launch_s"] + busy, compute.seconds, memory.seconds, c["launch_s"], c["host_s"])


PROJECTION = Form(
    _times,
    {
        "launch_s": 12e-6,
        "compute_efficiency": 0.7,
        "memory_efficiency": 0.8,
        "overlap": 3.0,
        "output_s": 1e-10,
        "root_s": 3e-11,
        "token_s": 10e-9,
        "token_output_s": 1e-12,
        "host_s": 300e-6,
    },
    ("tokens", "elements", "element_bytes", "outputs"),
)
