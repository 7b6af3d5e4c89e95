"""What tests of predictions ask of a cast."""

from hypothesis import settings

from castoff.casting.price import Price
from castoff.casting.rank import Cast
from castoff.ops.program import OpCall
from castoff.spec.device import Device
from castoff.spec.model import ModelSpec
from castoff.spec.scenario import Scenario
from tests.casting.strategies import cast_step, scenario

H200 = "h200_sxm"


# Sums of the same numbers in another order.
ROUNDING = 1 + 1e-9


FEW = settings(max_examples=30)


def decode(case: Scenario) -> Scenario:
    """The same deployment, decoding."""
    return scenario(case, query_length=None, decode=True, prefix_cache_hit_rate=0.0)


def calls_of(step: Cast) -> list[tuple[OpCall, Price]]:
    return [
        (call, price)
        for entry in step.program.schedule
        for call, price in zip(entry.block.calls, step.prices[entry.block], strict=True)
    ]


def count(step: Cast, name: str) -> int:
    return sum(call.op.name.removesuffix("_quant") == name for call, _ in calls_of(step))


def latency(*case: ModelSpec | Device | Scenario) -> float:
    return float(cast_step(*case).latency_s)  # type: ignore[arg-type]
