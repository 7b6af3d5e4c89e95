"""Casts with offload, as tests ask for them."""

from dataclasses import replace
from typing import Any

import numpy as np

from castoff.casting.deployment import resolve
from castoff.casting.rank import Cast, cast_batch
from castoff.spec.device import Device
from castoff.spec.hit_profile import Hits
from castoff.spec.offload import Offload, OffloadMode
from castoff.spec.scenario import Scenario, request_classes
from tests.casting.strategies import scenario
from tests.generators import ASCEND, GLM_52, device, model

MODES: tuple[OffloadMode, ...] = ("gather", "serve_install", "direct")


def step(mode: OffloadMode, *, hit_rate: float | None = None, base: Scenario | None = None, **given: Any) -> Scenario:
    """Decode of GLM-5.2 with three drafts, two requests of 64K tokens on each of 32 dies; `given` as in `Offload`."""
    base = base or scenario(
        num_devices=32, dp_size=32, ep_size=32, num_mtp_tokens=3, num_queries=64, context_length=65_536, decode=True
    )
    return replace(base, offload=Offload(offload=mode, **given), hits=Hits(hit_rate=hit_rate))


def cast_offload(case: Scenario, *, on: Device | None = None, name: str = GLM_52, **pools: Any) -> Cast:
    """The cast of a step, and nothing else; `pools` replaces fields of its pool."""
    deployment = resolve(model(name), on or device(ASCEND), case)
    if deployment.pool is not None:
        deployment = replace(deployment, pool=replace(deployment.pool, **pools))
    return cast_batch(deployment, request_classes(case.workload, case.mtp))


def with_link(rate: float, *, share: float = 1.0) -> Device:
    """The Ascend device with another link to its host, in both directions."""
    where = device(ASCEND)
    link = replace(
        where.host_link, to_device_bytes_per_s=rate, to_host_bytes_per_s=rate, row_efficiency=share, latency_s=0.0
    )
    return replace(where, host_link=link)


def host_bytes(cast: Cast) -> tuple[float, float]:
    """Bytes that a step reads from the host and writes there."""
    parts = [part for _, call in cast.program.calls() for part in call.work.parts]
    return sum(float(np.max(part.host_read_bytes)) for part in parts), sum(
        float(part.host_write_bytes) for part in parts
    )
