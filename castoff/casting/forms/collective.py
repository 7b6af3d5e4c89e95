"""Forms of collectives among `ranks` devices of one tier, by the bytes of the whole tensor."""

from __future__ import annotations

import numpy as np

from castoff.casting.forms.form import Coefficients, Form, Sizes, Times
from castoff.dims import Dim, minimum, where
from castoff.spec.device import Device

SIZES = ("bytes", "ranks")
# Beyond these a stack leaves all-reduce to its communication library.
LARGEST_OWN_BYTES = 2.0**24
RAMP_BYTES = 3e4


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
