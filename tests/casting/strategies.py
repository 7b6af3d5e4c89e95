"""What the casting tests draw and build: cases (model, device, scenario), scaled devices, hand-made programs."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from hypothesis import strategies as st

from castoff.casting.deployment import resolve
from castoff.casting.rank import Cast, cast_batch
from castoff.spec.backend import Backend, load_backend
from castoff.spec.device import Device, shipped_devices
from castoff.spec.model import ModelSpec
from castoff.spec.scenario import Scenario, request_classes
from tests.generators import MODELS, device, model, scenarios

GROUPS = ("workload", "parallel", "quant", "mtp", "compilation")
Case = tuple[ModelSpec, Device, Scenario]


def scenario(base: Scenario | None = None, **values: Any) -> Scenario:
    """A scenario by the names of its fields, whichever group they are in; the rest from `base`."""
    base = base or Scenario()
    top = {name: values.pop(name) for name in ("backend", "reserved_memory_gb", "disable_repetition") if name in values}
    for group in GROUPS:
        part = getattr(base, group)
        own = {item.name: values.pop(item.name) for item in fields(part) if item.name in values}
        top[group] = replace(part, **own)
    assert not values, f"no such fields: {sorted(values)}"
    return replace(base, **top)


def flat(case: Scenario) -> dict[str, Any]:
    """The fields of a scenario's groups by name."""
    parts = [getattr(case, group) for group in GROUPS]
    return {item.name: getattr(part, item.name) for part in parts for item in fields(part)}


def backend_of(where: Device, case: Scenario) -> Backend:
    return load_backend(case.backend or where.default_backend)


def cast_step(spec: ModelSpec, where: Device, case: Scenario) -> Cast:
    """What `castoff.cast` finds, without the search for the largest batch and context, which takes most of its time."""
    return cast_batch(resolve(spec, where, case), request_classes(case.workload, case.mtp))


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    models: tuple[str, ...] = MODELS,
    keep: Callable[[Scenario], Scenario] = lambda case: case,
    **options: Any,
) -> Case:
    """A valid case on any shipped device; `keep` settles what a test needs, `options` go to `parallels`."""
    spec = model(draw(st.sampled_from(models)))
    where = device(draw(st.sampled_from(shipped_devices())))
    # The smallest system has 16 devices; four stages of four fill it.
    ranks = min(options.pop("max_stage_ranks", 32), where.max_devices // 4)
    return spec, where, keep(draw(scenarios(spec, where, max_stage_ranks=ranks, **options)))


def scaled(
    where: Device, *, compute: float = 1, vector: float = 1, memory: float = 1, links: float = 1, latency: float = 1
) -> Device:
    """The same device with its rates multiplied."""

    def times(rates: Mapping[str, float], factor: float) -> dict[str, float]:
        return {dtype: rate * factor for dtype, rate in rates.items()}

    return replace(
        where,
        matrix_flops_per_s=times(where.matrix_flops_per_s, compute),
        vector_flops_per_s=times(where.vector_flops_per_s, vector),
        memory=replace(where.memory, bandwidth_bytes_per_s=where.memory.bandwidth_bytes_per_s * memory),
        tiers=tuple(
            replace(
                tier,
                bandwidth_bytes_per_s=tier.bandwidth_bytes_per_s * links,
                latency_s=tier.latency_s * latency,
            )
            for tier in where.tiers
        ),
    )
