"""What tests of footprints ask of a cast."""

from dataclasses import replace

from castoff.casting.rank import Cast
from castoff.spec.device import Device, DeviceMemory
from tests.casting.strategies import cast_step, scenario
from tests.generators import ASCEND, GLM_52, device, model

H200 = "h200_sxm"


def step_of(*, on: str = ASCEND, spec_name: str = GLM_52, **values: object) -> Cast:
    return cast_step(model(spec_name), device(on), scenario(**values))


def with_memory(where: Device, size_bytes: int) -> Device:
    return replace(
        where,
        memory=DeviceMemory(
            size_bytes=size_bytes, bandwidth_bytes_per_s=where.memory.bandwidth_bytes_per_s, source="test"
        ),
    )
