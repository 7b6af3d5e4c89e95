"""What the form of a fitted kernel is: its time from its sizes, with coefficients that a fit finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from castoff.dims import Array, Dim
from castoff.spec.device import Device
from castoff.spec.fits import LogGrid

# Measured layers near where the host and the device take equally long are some 10 % above the longer.
EAGER_SHARPNESS = 6.0

Sizes = Mapping[str, Dim]
Coefficients = Mapping[str, float]

LEAST_SIZE = 1e-30


@dataclass(frozen=True, slots=True)
class Times:
    """seconds: of a kernel, its launch included. The others say what it is made of, each as if it had it to itself.

    host_s: what the host takes to launch it and what goes with it where no graph does, beside the device.
    """

    seconds: Dim
    compute_s: Dim = 0.0
    memory_s: Dim = 0.0
    launch_s: Dim = 0.0
    host_s: Dim = 0.0


def no_features(_: Sizes, __: Device) -> Mapping[str, Dim]:
    return {}


def own_sizes(sizes: Sizes) -> Sizes:
    return sizes


@dataclass(frozen=True, slots=True)
class Form:
    """One form.

    times: from sizes and coefficients, all of which are positive; sizes may be arrays of scenarios.
    start: every coefficient by name, with the value that fits start from, in SI units.
    sizes: the names that it needs.
    axes: what a correction may depend on, from the sizes. features: terms that may add to the logarithm of the time.
    """

    times: Callable[[Sizes, Coefficients, Device], Times]
    start: Mapping[str, float]
    sizes: tuple[str, ...]
    axes: Callable[[Sizes], Sizes] = own_sizes
    features: Callable[[Sizes, Device], Mapping[str, Dim]] = field(default=no_features)


def smooth_maximum(a: Dim, b: Dim, sharpness: float) -> Dim:
    """(a^q + b^q)^(1/q): two things that overlap, the better the larger q = 1 + sharpness is."""
    q = 1.0 + sharpness
    return (a**q + b**q) ** (1 / q)


def eager_s(host_s: Dim, device_s: Dim) -> Dim:
    """Time of work that the host launches op by op: whichever of the two takes longer hides the other."""
    return smooth_maximum(host_s, device_s, EAGER_SHARPNESS)


def log_at(grid: LogGrid, axes: Sizes) -> Dim:
    """The logarithm that a grid has at some sizes."""
    return interpolate(grid.values, grid.knots, [axes[name] for name in grid.axes])


def interpolate(values: Array, knots: Sequence[Array], sizes: Sequence[Dim]) -> Dim:
    """Linear in the logarithms of the sizes between knots, constant beyond them."""
    left, varying = values, 0
    # Sizes that are one number leave a smaller grid for those that are an array of scenarios.
    for own, size in zip(knots, sizes, strict=True):
        if isinstance(size, np.ndarray) and size.ndim:
            varying += 1
            continue
        low, share = _corner(own, float(size))
        lower, upper = np.take(left, low, axis=varying), np.take(left, low + 1, axis=varying)
        left = lower + share * (upper - lower)
    if not varying:
        return float(left)
    pairs = [(own, size) for own, size in zip(knots, sizes, strict=True) if isinstance(size, np.ndarray) and size.ndim]
    if varying == 1:
        result: Dim = np.interp(_log(pairs[0][1]), pairs[0][0], left)
        return result
    return _interpolate_arrays(left, pairs)


def _interpolate_arrays(values: Array, pairs: Sequence[tuple[Array, Array]]) -> Dim:
    places = [corner_weights(own, size) for own, size in pairs]
    total: Dim = 0.0
    for corners in product((0, 1), repeat=len(places)):
        weight: Dim = 1.0
        for (_, share), corner in zip(places, corners, strict=True):
            weight = weight * (share if corner else 1 - share)
        total = total + weight * values[tuple(low + corner for (low, _), corner in zip(places, corners, strict=True))]
    return total


def _corner(knots: Array, size: float) -> tuple[int, float]:
    """`corner_weights` of one number."""
    at = min(max(math.log(max(size, LEAST_SIZE)), knots[0]), knots[-1])
    low = min(max(int(knots.searchsorted(at, side="right")) - 1, 0), len(knots) - 2)
    return low, float((at - knots[low]) / (knots[low + 1] - knots[low]))


def corner_weights(knots: Array, size: Dim) -> tuple[Array, Dim]:
    """The knot below a size, or the last but one, and how far towards the next it is, from 0 to 1."""
    at = np.clip(_log(size), knots[0], knots[-1])
    low = np.clip(np.searchsorted(knots, at, side="right") - 1, 0, len(knots) - 2)
    return low, (at - knots[low]) / (knots[low + 1] - knots[low])


def _log(size: Dim) -> Array:
    logarithm: Array = np.log(np.maximum(size, LEAST_SIZE))
    return logarithm
