"""The largest batch and the longest context that fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from castoff.casting.deployment import Deployment
from castoff.casting.rank import batch_of_rank, footprint_of, record_batch, total_tokens
from castoff.dims import Array
from castoff.spec.checks import MOST
from castoff.spec.scenario import RequestClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """What would fit: requests per attention-DP rank at these lengths (0 for none), context at this batch (or None)."""

    max_batch_per_device: int
    max_context_length: int | None


def largest_that_fits(deployment: Deployment, classes: Sequence[RequestClass]) -> Largest:
    """Largest batch per rank at the longest request's lengths, and longest context at this batch, that still fit."""
    longest = max(classes, key=total_tokens)
    requests = sum(int(entry.count) for entry in classes)
    context_cap = deployment.setup.model.max_position_embeddings - int(longest.query)

    def fits(context: Array) -> Array:
        return _fit(deployment, RequestClass(requests, context, longest.query))

    return Largest(
        max_batch_per_device=largest_batch(deployment, longest),
        max_context_length=_largest_true(fits, least=0, most=max(context_cap, 0)),
    )


def largest_batch(deployment: Deployment, request: RequestClass) -> int:
    """The most requests of these lengths per attention-DP rank that fit; 0 for none."""
    ranks = deployment.setup.mesh.dp.size

    def fits(batch: Array) -> Array:
        own = RequestClass(batch * ranks, request.context, request.query)
        return _fit(deployment, own)

    return _largest_true(fits, least=1) or 0


def _fit(deployment: Deployment, requests: RequestClass) -> Array:
    batch = batch_of_rank(deployment.setup, [requests])
    return np.asarray(footprint_of(deployment, record_batch(deployment, batch), batch).fits)


_PROBES = 64


def _largest_true(fits: Callable[[Array], Array], *, least: int, most: int = MOST) -> int | None:
    """Largest whole number in [least, most] for which a monotone test holds, or None; 64 probes at a time."""
    low, high = least - 1, most
    while low < high:
        if low < least:
            probes = np.unique(np.minimum(np.geomspace(max(least, 1), max(most, 1), _PROBES).astype(np.int64), most))
            probes = np.union1d(probes, [least])
        else:
            probes = np.unique(np.linspace(low + 1, high, _PROBES).astype(np.int64))
        # float64: products of large probes would overflow int64.
        holds = fits(probes.astype(np.float64))
        if not holds.any():
            high = int(probes[0]) - 1
            continue
        best = int(np.nonzero(holds)[0][-1])
        low = int(probes[best])
        high = int(probes[best + 1]) - 1 if best + 1 < len(probes) else low
    return low if low >= least else None
