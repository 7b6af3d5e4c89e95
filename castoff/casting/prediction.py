"""Casting: a model, a device and a scenario in, a prediction out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from castoff.casting.deployment import resolve
from castoff.casting.footprint import Footprint
from castoff.casting.hits import Pool
from castoff.casting.largest import Largest, largest_that_fits
from castoff.casting.offload import OffloadFigures, offload_figures
from castoff.casting.price import BOUNDS, Bound, Measured, Pricing, beyond_ranges
from castoff.casting.rank import Cast, cast_batch, stall_s
from castoff.dims import largest
from castoff.errors import CastoffError
from castoff.spec.backend import Backend
from castoff.spec.device import Device
from castoff.spec.model import ModelSpec
from castoff.spec.scenario import Compilation, Mode, Scenario, request_classes

# Kernels that one note names.
MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The cost of one step of a deployment.

    stall_s: how much of latency_s is due to the link to host memory. offload: of a decode step with offload.
    latency_s: from the start of the step to its last token, host time included. tokens_per_s: tokens that users get
    (decode, with accepted drafts) or that are computed (prefill), over the whole deployment.
    """

    model: ModelSpec
    device: Device
    backend: Backend
    scenario: Scenario
    cast: Cast = field(repr=False)
    largest: Largest
    stall_s: float = 0.0
    offload: OffloadFigures | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def mode(self) -> Mode:
        """decode or prefill."""
        return self.cast.setup.mode

    @property
    def latency_s(self) -> float:
        """Seconds of the step."""
        return float(self.cast.latency_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the deployment."""
        return float(self.cast.tokens_per_s)

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens per second and device."""
        return self.tokens_per_s / self.cast.setup.mesh.num_devices

    @property
    def fits(self) -> bool:
        """Whether the fullest device holds it."""
        return bool(self.cast.footprint.fits)

    @property
    def bound(self) -> Bound:
        """What the step waits for most."""
        return BOUNDS[int(self.cast.bound)]

    @property
    def footprint(self) -> Footprint:
        """Memory of the fullest device."""
        return self.cast.footprint


def cast(model: ModelSpec, device: Device, scenario: Scenario, *, measured: Measured | None = None) -> Prediction:
    """Predict one step of `scenario`.

    measured: op times that replace the backend's curves where name and shapes match.
    Raises CastoffError where the scenario cannot run on this device whatever its size of memory; a step that only
    does not fit is predicted, with `fits` false and the largest batch and context that would.
    """
    deployment = resolve(model, device, scenario, measured=measured)
    classes = request_classes(scenario.workload, scenario.mtp)
    if any(isinstance(dim, np.ndarray) for entry in classes for dim in (entry.count, entry.context, entry.query)):
        raise CastoffError("cast takes one scenario; give arrays to castoff.sweep")
    result = cast_batch(deployment, classes)
    fits = largest_that_fits(deployment, classes)
    return Prediction(
        model=model,
        device=device,
        backend=deployment.pricing.backend,
        scenario=scenario,
        cast=result,
        largest=fits,
        stall_s=float(stall_s(result, deployment.pricing)) if scenario.offload.offloads else 0.0,
        offload=None if deployment.pool is None else offload_figures(result, deployment, fits.max_batch_per_device),
        notes=(
            *deployment.notes,
            *_notes(model, scenario.compilation, result, deployment.pool),
            *_host_notes(result, deployment.pricing.backend),
            *_extrapolations(result, deployment.pricing),
        ),
    )


def _host_notes(result: Cast, backend: Backend) -> list[str]:
    waited_s = float(result.host_s) - backend.host_s_per_step[result.setup.mode]
    if waited_s <= 0:
        return []
    return [f"the host launches this prefill op by op, which takes {waited_s:.3g} s longer than the device computes"]


def _extrapolations(result: Cast, pricing: Pricing) -> list[str]:
    """A note on the kernels that are priced beyond the sizes that their fits were made from."""
    found: dict[str, str] = {}
    calls = 0
    for block, count in result.program.counts.items():
        for call, price in zip(block.calls, result.prices[block], strict=True):
            if price.extrapolated:
                beyond = beyond_ranges(call, pricing)
                calls += count * len(beyond)
                for curve, sizes in beyond.items():
                    found.setdefault(curve, " ".join(f"{name}={size:,.6g}" for name, size in sizes.items()))
    if not found:
        return []
    named = "; ".join(f"{curve} {sizes}" for curve, sizes in list(found.items())[:MOST_NAMED])
    rest = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return [f"launches of kernels beyond the ranges fitted: {calls:,}, of {named}{rest}"]


def _notes(model: ModelSpec, compilation: Compilation, result: Cast, pool: Pool | None) -> list[str]:
    notes = []
    resident = result.batch.resident
    context = largest(resident.total_tokens / resident.requests)
    if pool is not None and pool.hit_rate is None and not 0.5 <= context / pool.context_length <= 2:
        notes.append(
            f"hit rates are those of a context of {pool.context_length:,} tokens, and these requests have "
            f"{context:,.0f}; --hit-rate gives another"
        )
    ops = {call.op.name for block in result.program.blocks for call in block.calls}
    for asked, flag, done in (
        (compilation.enable_dispatch_ffn_combine, "--enable-dispatch-ffn-combine", "dispatch_ffn_combine" in ops),
        (compilation.enable_matmul_allreduce, "--enable-matmul-allreduce", "matmul_all_reduce" in ops),
        (compilation.enable_sequence_parallel, "--enable-sequence-parallel", result.setup.sequence_parallel),
    ):
        if asked and not done:
            notes.append(f"{flag} finds nothing to change with this parallelism")
    longest = largest(result.batch.resident.longest)
    if longest > model.max_position_embeddings:
        notes.append(
            f"requests reach {longest:.0f} tokens, beyond max_position_embeddings {model.max_position_embeddings} "
            f"of {model.name}"
        )
    return notes
