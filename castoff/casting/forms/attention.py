"""Forms of latent attention: over selected rows in prefill and in decode, and dense over short contexts.

Sizes: queries; rows, those that the queries attend to, summed; topk, the most that one may; heads; row_bytes of the
cache; cached, the rows in it; longest, tokens of the longest request; sparse, 0 where a prefill attends densely, else
1. Dense attention: pairs of a query and a row that it sees, and dense_width, what a pair multiplies in all heads.
"""

from __future__ import annotations

import numpy as np

from castoff.casting.forms.form import Coefficients, Form, Sizes, Times, smooth_maximum
from castoff.casting.forms.projection import PROJECTION
from castoff.dims import Dim, maximum, minimum
from castoff.spec.device import Device

# Fewer rows than this in the whole cache are in the memory of few channels.
HOT_ROWS = 128
# So that a second round never takes less than the first.
MOST_MISSING = 0.4
# Heads that one block of the kernel computes, fewer or not.
BLOCK_HEADS = 64
# Hosts prepare more for requests longer than this.
FAR_TOKENS = 131072


def _prefill(sizes: Sizes, c: Coefficients, device: Device) -> Times:
    queries, heads, topk = sizes["queries"], sizes["heads"], sizes["topk"]
    cores = float(device.num_cores or 1)
    blocks = queries * np.ceil(heads / BLOCK_HEADS)
    rounds = np.ceil(blocks / cores)
    occupied = blocks / (rounds * cores)
    used = minimum(heads / BLOCK_HEADS, 1.0)
    # The rounds of a block with fewer heads than it has room for are shorter, if at all.
    filled = (used + c["padding"]) / (1 + c["padding"])
    visible = minimum(sizes["rows"] / (queries * topk), 1.0)
    scale = topk / 2048
    compute = rounds * c["round_s"] * scale * (1 + c["crowding"] * occupied * (1 - 1 / rounds))
    moved = queries * topk * sizes["row_bytes"]
    memory = moved / (device.memory.bandwidth_bytes_per_s * c["gather_efficiency"])
    # The same few rows, asked for by all cores at once, come from few memory channels.
    crowd = queries * c["hot_s"] * scale * (sizes["cached"] < HOT_ROWS)
    # Rows that a query does not have are skipped by full cores, and waited for by others.
    missing = (1 - visible) * np.where(rounds <= 1, c["missing_alone"], -minimum(c["missing"], MOST_MISSING))
    sparse = sizes["sparse"]
    busy: Dim = filled * (1 + missing) * smooth_maximum(compute, memory, c["overlap"])
    busy = maximum(busy, crowd)
    launch = sparse * c["launch_s"]
    host_s = c["host_s"] + c["far_host_s"] * (sizes["longest"] > FAR_TOKENS)
    return Times(launch + sparse * busy, sparse * compute, sparse * memory, launch, host_s)


def _prefill_axes(sizes: Sizes) -> Sizes:
    queries = sizes["queries"]
    return {"queries": queries, "visible": sizes["rows"] / queries}


PREFILL_ATTENTION = Form(
    _prefill,
    {
        "launch_s": 3e-6,
        "round_s": 55e-6,
        "crowding": 0.1,
        "gather_efficiency": 1.0,
        "missing_alone": 0.2,
        "missing": 0.08,
        "hot_s": 1.5e-6,
        "padding": 3.0,
        "overlap": 4.0,
        "host_s": 100e-6,
        "far_host_s": 400e-6,
    },
    ("queries", "rows", "topk", "heads", "row_bytes", "cached", "longest", "sparse"),
    _prefill_axes,
)


def _decode(sizes: Sizes, c: Coefficients, device: Device) -> Times:
    queries, rows, heads = sizes["queries"], sizes["rows"], sizes["heads"]
    mean = rows / queries
    share = minimum(mean / sizes["topk"], 1.0)
    padding = c["padding"] / (1 + c["padding"])
    padded = padding + (1 - padding) * share
    first = c["first_s"] * (1 - np.exp(-mean / c["first_rows"]))
    spread = np.sqrt(queries) * (c["root_s"] * padded + c["split_s"] * share)
    scale = sizes["topk"] / 2048
    per_query = queries * padded * scale * (c["query_s"] + c["head_s"] * heads / BLOCK_HEADS)
    busy = first + spread + per_query
    return Times(c["launch_s"] + busy, 0.0, per_query, c["launch_s"] + first + spread)


def _decode_axes(sizes: Sizes) -> Sizes:
    queries = sizes["queries"]
    return {"queries": queries, "visible": sizes["rows"] / queries, "heads": sizes["heads"]}


DECODE_ATTENTION = Form(
    _decode,
    {
        "launch_s": 6e-6,
        "first_s": 3e-6,
        "first_rows": 300.0,
        "root_s": 1e-6,
        "split_s": 0.1e-6,
        "padding": 0.1,
        "query_s": 0.4e-6,
        "head_s": 0.1e-6,
    },
    ("queries", "rows", "topk", "heads"),
    _decode_axes,
)


def _absorbed_or_dense(sizes: Sizes, c: Coefficients, device: Device) -> Times:
    """Products that take queries into the latent space and results out of it; where a prefill attends densely, the
    expansion of all cached rows and all of its attention in their place."""
    absorbed = PROJECTION.times(sizes, c, device)
    rate = device.matrix_flops_per_s["bf16"]
    expand = 2.0 * sizes["cached"] * sizes["elements"] / (rate * c["expand_efficiency"])
    attend = 2.0 * sizes["pairs"] * sizes["dense_width"] / (rate * c["dense_efficiency"])
    compute = expand + attend
    sparse = sizes["sparse"]
    dense = 1 - sparse
    return Times(
        sparse * absorbed.seconds + dense * (c["dense_launch_s"] + compute),
        sparse * absorbed.compute_s + dense * compute,
        sparse * absorbed.memory_s,
        sparse * absorbed.launch_s + dense * c["dense_launch_s"],
        sparse * absorbed.host_s + dense * c["dense_host_s"],
    )


ABSORBED_OR_DENSE = Form(
    _absorbed_or_dense,
    {
        **PROJECTION.start,
        "expand_efficiency": 0.5,
        "dense_efficiency": 0.5,
        "dense_launch_s": 20e-6,
        "dense_host_s": 300e-6,
    },
    (*PROJECTION.sizes, "cached", "pairs", "dense_width", "sparse"),
)
