"""A structure on a device, resolved: what is cast with one batch or many."""

from __future__ import annotations

from dataclasses import dataclass

from castoff.casting.curves import check_fits
from castoff.casting.hits import Pool, check_hits, pool_of
from castoff.casting.price import Measured, Pricing
from castoff.model.setup import Setup, resolve_setup
from castoff.spec.backend import as_assumed, load_backend
from castoff.spec.device import Device
from castoff.spec.model import ModelSpec
from castoff.spec.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """pool: of decode steps with offload, else None; other than the scenario says where it is swept."""

    setup: Setup
    pricing: Pricing
    scenario: Scenario
    pool: Pool | None
    notes: tuple[str, ...] = ()


def resolve(model: ModelSpec, device: Device, scenario: Scenario, *, measured: Measured | None = None) -> Deployment:
    """A scenario's deployment; its requests do not count. measured: op times that replace the backend's curves.

    Raises CastoffError with the reason where it cannot run.
    """
    backend = load_backend(device.default_backend if scenario.backend is None else scenario.backend, device.name)
    check_fits(backend, device)
    notes: tuple[str, ...] = ()
    if backend.vendor not in (None, device.vendor):
        notes = (f"{backend.name} is for devices of {backend.vendor}; on {device.name} all its figures are assumed",)
        backend = as_assumed(backend)
    setup = resolve_setup(model, device, backend, scenario, scenario.workload.mode)
    check_hits(setup, scenario)
    reads_pools = scenario.offload.offloads and setup.mode == "decode"
    pool, pool_notes = pool_of(setup, scenario) if reads_pools else (None, ())
    notes = (*notes, *pool_notes)
    published, priced = model.checkpoint_quant, setup.expert.action
    if published is not None and priced != published.action:
        notes = (
            *notes,
            f"{model.name} is published in {published.action} and is priced as {priced}; "
            f"--quantize-linear-action {published.action} prices it as published",
        )
    pricing = Pricing(device, backend, measured, setup.mesh.num_devices)
    return Deployment(setup=setup, pricing=pricing, scenario=scenario, pool=pool, notes=notes)
