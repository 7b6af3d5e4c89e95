"""Hand-made programs: calls whose seconds and units stand where the call does."""

from castoff.casting.price import CORES, LINKS, Price, Prices
from castoff.casting.timeline import spans
from castoff.ops.program import Abstract, Op, OpCall, Program, Shapes
from castoff.ops.work import Work

SIDE = "side"
UNITS: tuple[tuple[str, ...], ...] = ((CORES,), (LINKS,), (CORES, LINKS))


def _shapes(*_: Abstract | None, results: int, **__: object) -> Shapes:
    return (((1,), "bf16"),) * results


# `seconds` and `units` are attributes, so that a test writes the price of a call where it writes the call.
OP = Op("op", "elementwise", _shapes, lambda call: Work())


def op(*inputs: Abstract | None, seconds: float, units: tuple[str, ...] = (CORES,), results: int = 1) -> Abstract:
    return OP(*inputs, seconds=seconds, units=units, results=results)[0]


def price(call: OpCall) -> Price:
    seconds = float(call.attributes["seconds"])
    return Price(seconds, (seconds, 0.0, 0.0, 0.0, 0.0, 0.0), "assumed", call.attributes["units"])


def prices_of(program: Program) -> Prices:
    return {block: tuple(price(call) for call in block.calls) for block in program.blocks}


def times(program: Program) -> list[tuple[float, float]]:
    return [(span.start_s, span.end_s) for span in spans(program, prices_of(program))]
