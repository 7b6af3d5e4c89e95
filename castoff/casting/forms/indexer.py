"""Forms of the indexer's kernels: scores of queries against keys, and the selection among the scores.

Sizes: queries; requests; pairs of a query and a key that it sees; width, index heads times their dims; selecting, the
queries that see more than `topk` keys; excess, the keys that they see beyond topk, summed; sparse, 0 where a prefill
attends densely and scores nothing, else 1.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from castoff.casting.forms.form import Coefficients, Form, Sizes, Times, smooth_maximum
from castoff.casting.forms.projection import PROJECTION
from castoff.dims import maximum, minimum
from castoff.spec.device import Device

# One core scores the queries whose heads fill its tile against so many keys at a time.
TILE_WIDTH, KEYS_PER_STEP = 16384, 256
# Contexts beyond about so many keys no longer come from near memory.
NEAR_KEYS = 2e4
PAGE_KEYS = 64


def _project(sizes: Sizes, c: Coefficients, device: Device) -> Times:
    times = PROJECTION.times(sizes, c, device)
    return replace(times, host_s=times.host_s * sizes["sparse"])


INDEXER_PROJECTION = Form(_project, PROJECTION.start, (*PROJECTION.sizes, "sparse"))


def _ragged_logits(sizes: Sizes, c: Coefficients, device: Device) -> Times:
    queries, pairs = sizes["queries"], sizes["pairs"]
    cores = float(device.num_cores or 1)
    per_request, context = queries / sizes["requests"], pairs / queries
    tile_queries = maximum(TILE_WIDTH / sizes["width"], 1.0)
    tiles = np.ceil(queries / tile_queries)
    # A tile goes through the keys of every request that it has queries of.
    spanned = minimum(maximum(tile_queries / per_request, 1.0), sizes["requests"])
    mean_steps = np.ceil(context * spanned / KEYS_PER_STEP)
    longest_steps = np.ceil((context + per_request / 2) * spanned / KEYS_PER_STEP)
    rounds = np.ceil(tiles / cores)
    occupied = tiles / (rounds * cores)
    steps = maximum(longest_steps, rounds * mean_steps)
    far = context / (context + NEAR_KEYS)
    step_s = c["step_s"] * (1 + occupied * (c["crowding"] + c["far_crowding"] * far))
    compute = steps * step_s + c["round_s"] * rounds
    memory = 4.0 * pairs / (device.memory.bandwidth_bytes_per_s * c["memory_efficiency"])
    sparse = sizes["sparse"]
    seconds = sparse * (c["launch_s"] + smooth_maximum(compute, memory, c["overlap"]))
    return Times(seconds, sparse * compute, sparse * memory, sparse * c["launch_s"])


def _ragged_axes(sizes: Sizes) -> Sizes:
    queries = sizes["queries"]
    return {"queries": queries, "context": sizes["pairs"] / queries, "per_request": queries / sizes["requests"]}


RAGGED_LOGITS = Form(
    _ragged_logits,
    {
        "launch_s": 3e-6,
        "step_s": 0.95e-6,
        "crowding": 0.2,
        "far_crowding": 0.05,
        "round_s": 0.5e-6,
        "memory_efficiency": 0.8,
        "overlap": 1.0,
    },
    ("queries", "requests", "pairs", "width", "sparse"),
    _ragged_axes,
)


def _paged_logits(sizes: Sizes, c: Coefficients, device: Device) -> Times:
    pairs, queries = sizes["pairs"], sizes["queries"]
    rate = device.matrix_flops_per_s["fp8"] * c["compute_efficiency"]
    compute = 2.0 * pairs * sizes["width"] / rate
    # The longer a context, the deeper the chain from its pages to its scores.
    depth = c["depth_s"] * np.log2(1 + pairs / queries / PAGE_KEYS)
    return Times(c["launch_s"] + compute + depth, compute, 0.0, c["launch_s"] + depth)


PAGED_LOGITS = Form(
    _paged_logits,
    {"launch_s": 2e-6, "compute_efficiency": 0.25, "depth_s": 0.3e-6},
    ("queries", "pairs", "width"),
)


def _topk(sizes: Sizes, c: Coefficients, device: Device) -> Times:
    selecting, topk, sparse = sizes["selecting"], sizes["topk"], sizes["sparse"]
    cores = float(device.num_cores or 1)
    length = topk + sizes["excess"] / maximum(selecting, 1e-9)
    far = maximum(length - c["near_keys"], 0.0)
    row_s = c["row_s"] + c["pass_s"] * np.log2(length / topk) + length * c["near_key_s"] + far * c["far_key_s"]
    load = selecting / (cores * (1 + c["rows_per_core"]))
    # Below one row per place they all run at once; above, the last round is full on average to a half.
    rounds = np.where(load < 1, 1.0, load + 0.5 * np.exp(-load / 3))
    crowded = 1 + c["crowding"] * minimum(load * (1 + c["rows_per_core"]), 1.0)
    short = (sizes["queries"] - selecting) / cores * c["short_s"]
    any_selects = np.minimum(selecting, 1.0)
    seconds = sparse * (any_selects * (c["launch_s"] + row_s * crowded * rounds) + short)
    return Times(seconds, 0.0, seconds - sparse * c["launch_s"] * any_selects, sparse * c["launch_s"] * any_selects)


def _topk_axes(sizes: Sizes) -> Sizes:
    length = sizes["topk"] + sizes["excess"] / maximum(sizes["selecting"], 1e-9)
    return {"selecting": sizes["selecting"], "length": length}


TOPK = Form(
    _topk,
    {
        "launch_s": 3e-6,
        "row_s": 6e-6,
        "pass_s": 1e-6,
        "near_key_s": 2e-10,
        "far_key_s": 2e-10,
        "near_keys": 32e3,
        "rows_per_core": 1.0,
        "short_s": 0.5e-6,
        "crowding": 0.2,
    },
    ("queries", "selecting", "excess", "topk", "sparse"),
    _topk_axes,
)
