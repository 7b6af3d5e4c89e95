"""Forms of collectives among `ranks` devices of one tier, by the bytes of the whole tensor.

Exchanges with experts also know the bytes of a token's copy, the experts of all ranks and the copies of a token.
"""

from __future__ import annotations

import numpy as np

from castoff.casting.forms.form import Coefficients, Form, Sizes, Times, smooth_maximum
from castoff.dims import Dim, maximum, minimum, where
from castoff.spec.device import Device

SIZES = ("bytes", "ranks")
# A row in another format than those measured is of another size, too.
EXPERT_SIZES = (*SIZES, "row_bytes", "experts", "experts_per_token")
# Beyond these a stack leaves all-reduce to its communication library.
LARGEST_OWN_BYTES = 2.0**24
RAMP_BYTES = 3e4
# Of links and the cores that fill them, as good as of products: chosen, not fitted.
OVERLAP = 3.0


def _all_reduce(sizes: Sizes, c: Coefficients, device: Device) -> Times:
    """The better of one shot, in which each rank reads all others' data, and two, reduce-scatter and all-gather."""
    moved, ranks = sizes["bytes"], sizes["ranks"]
    rate = _rate(device) * c["link_efficiency"]
    launch = c["launch_s"] + c["rank_s"] * ranks
    one = _link_s((ranks - 1) * moved, rate, c)
    two = c["second_launch_s"] + c["second_rank_s"] * ranks + _link_s(2.0 * (ranks - 1) / ranks * moved, rate, c)
    own = launch + where(ranks == 2, one, minimum(one, two))
    efficiency = np.interp(
        np.log2(ranks), (1, 2, 3), [c["library_efficiency_2"], c["library_efficiency_4"], c["library_efficiency_8"]]
    )
    library = c["library_launch_s"] + c["library_rank_s"] * ranks + moved / (_rate(device) * efficiency)
    return Times(where(moved > LARGEST_OWN_BYTES, library, own), launch_s=minimum(launch, own))


def _exchange(sizes: Sizes, c: Coefficients, device: Device) -> Times:
    """What leaves a rank, on its links, after a latency per rank."""
    ranks = sizes["ranks"]
    launch = c["launch_s"] + c["rank_s"] * (ranks - 1)
    seconds = launch + _link_s((ranks - 1) / ranks * sizes["bytes"], _rate(device) * c["link_efficiency"], c)
    return Times(seconds, launch_s=launch)


def _expert_copies(sizes: Sizes, c: Coefficients, device: Device) -> Times:
    """Every copy of a token travels, to a place that its expert has for it: what decodes use."""
    ranks, moved = sizes["ranks"], sizes["bytes"]
    launch = c["launch_s"] + c["expert_s"] * sizes["experts"] / ranks
    links = (ranks - 1) / ranks * moved / (_rate(device) * c["link_efficiency"])
    # One block serves an expert, so few experts do not fill the links.
    blocks = moved / sizes["experts"] * c["expert_byte_s"]
    return Times(launch + smooth_maximum(links, blocks, OVERLAP), launch_s=launch)


def _expert_tokens(sizes: Sizes, c: Coefficients, device: Device) -> Times:
    """A token travels once to each rank that has one of its experts or more: what prefills use."""
    ranks, chosen, row_bytes = sizes["ranks"], sizes["experts_per_token"], sizes["row_bytes"]
    tokens = sizes["bytes"] / (chosen * row_bytes)
    rows = tokens * _ranks_reached(ranks, chosen, sizes["experts"])
    launch = c["launch_s"] + c["row_byte_launch_s"] * row_bytes
    links = rows * (c["row_s"] + row_bytes / (_rate(device) * c["link_efficiency"]))
    # The few cores that do it also go through every token.
    cores = tokens * row_bytes * c["token_byte_s"]
    busy = smooth_maximum(links, cores, OVERLAP) + c["ramp_s"] * np.log1p(sizes["bytes"] / RAMP_BYTES)
    return Times(launch + busy, launch_s=launch)


def _ranks_reached(ranks: Dim, chosen: Dim, experts: Dim) -> Dim:
    """Of a token that chooses so many different experts, all alike."""
    others = experts - experts / ranks
    spared: Dim = 1.0
    for place in range(int(np.max(chosen))):
        share = maximum(others - place, 0.0) / maximum(experts - place, 1.0)
        spared = spared * where(place < chosen, share, 1.0)
    return ranks * (1 - spared)


def _link_s(moved: Dim, rate: float, c: Coefficients) -> Dim:
    """Time on the links, which small messages do not fill."""
    seconds: Dim = moved / rate + c["ramp_s"] * np.log1p(moved / RAMP_BYTES)
    return seconds


def _rate(device: Device) -> float:
    return device.tiers[0].bandwidth_bytes_per_s


ALL_REDUCE = Form(
    _all_reduce,
    {
        "launch_s": 3e-6, "rank_s": 1e-7, "link_efficiency": 0.8, "second_launch_s": 1e-6, "second_rank_s": 3e-7,
        "ramp_s": 3e-7, "library_launch_s": 1e-5, "library_rank_s": 5e-6, "library_efficiency_2": 0.75,
        "library_efficiency_4": 0.75, "library_efficiency_8": 0.75,
    },
    SIZES,
)  # fmt: skip
EXCHANGE = Form(_exchange, {"launch_s": 8e-6, "rank_s": 5e-7, "link_efficiency": 0.8, "ramp_s": 1e-6}, SIZES)
EXPERT_COPIES = Form(
    _expert_copies,
    {"launch_s": 8e-6, "expert_s": 1e-7, "link_efficiency": 0.6, "expert_byte_s": 2e-10},
    EXPERT_SIZES,
)
EXPERT_TOKENS = Form(
    _expert_tokens,
    {
        "launch_s": 25e-6, "row_byte_launch_s": 1e-9, "row_s": 5e-9, "link_efficiency": 0.8, "token_byte_s": 5e-12,
        "ramp_s": 1e-6,
    },
    EXPERT_SIZES,
)  # fmt: skip
