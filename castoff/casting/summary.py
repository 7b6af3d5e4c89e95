"""A prediction's ops gathered for a report: by name (and shapes), by indexer bucket, by layer kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from castoff.casting.curves import parts_terms
from castoff.casting.prediction import Prediction
from castoff.casting.price import BOUNDS, Bound, Price, shapes_text
from castoff.casting.timeline import Span, spans
from castoff.ops.program import OpCall
from castoff.spec.backend import ORIGINS, Origin, weakest

LEAST_S = 1e-12


@dataclass(slots=True)
class BucketSummary:
    """One named part of an op over all its calls; seconds is the part's longest term, summed."""

    name: str
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class OpSummary:
    """All calls of one op (and, if asked for, of one set of shapes).

    bound: the term that the calls' time is counted for most. terms_s: seconds of every term of BOUNDS on its own.
    extrapolated: calls with a kernel beyond the sizes that its fit was made from.
    shapes: input shapes and how many calls have them.
    """

    name: str
    calls: int = 0
    extrapolated: int = 0
    total_s: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    origin: Origin = "measured"
    terms_s: dict[Bound, float] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0.0))
    bound_s: dict[Bound, float] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0.0))
    shapes: Counter[str] = field(default_factory=Counter)
    buckets: dict[str, BucketSummary] = field(default_factory=dict)

    @property
    def mean_s(self) -> float:
        """Seconds per call."""
        return self.total_s / self.calls

    @property
    def bound(self) -> Bound:
        """What this op waits for most."""
        return max(self.bound_s, key=lambda bound: self.bound_s[bound])


@dataclass(frozen=True, slots=True)
class KindSummary:
    """One kind of block: how often the step runs it, the seconds of one and of all."""

    name: str
    calls: int
    mean_s: float
    total_s: float


def op_summaries(prediction: Prediction, *, by_shapes: bool = False) -> list[OpSummary]:
    """Ops of a step, the longest in total first."""
    summaries: dict[str, OpSummary] = {}
    cast = prediction.cast
    for block, count in cast.program.counts.items():
        for call, price in zip(block.calls, cast.prices[block], strict=True):
            shapes = shapes_text(call)
            key = f"{call.op.name} {shapes}" if by_shapes else call.op.name
            summary = summaries.setdefault(key, OpSummary(call.op.name))
            _add(summary, call, price, shapes, prediction, count)
    return sorted(summaries.values(), key=lambda summary: -summary.total_s)


def _add(summary: OpSummary, call: OpCall, price: Price, shapes: str, prediction: Prediction, count: int) -> None:
    """Add `count` equal calls."""
    work = call.work
    seconds = count * float(price.seconds)
    summary.calls += count
    summary.extrapolated += count * bool(price.extrapolated)
    summary.total_s += seconds
    summary.flops += count * float(work.flops)
    summary.bytes += count * float(work.bytes)
    summary.origin = weakest([summary.origin, price.origin])
    summary.bound_s[BOUNDS[int(price.bound)]] += seconds
    for bound, term in zip(BOUNDS, price.terms, strict=True):
        summary.terms_s[bound] += count * float(term)
    summary.shapes[shapes] += count
    if not work.parts:
        return
    curve = prediction.backend.curve(call.family)
    own_s = {part.name: float(max(parts_terms((part,), curve, prediction.device))) for part in work.parts}
    # What a fit says of a kernel is shared by its parts as the roofline shares it.
    fitted = any(kernel.known_curve(prediction.backend.fits) for kernel in work.kernels)
    scale = float(price.seconds) / max(sum(own_s.values()), LEAST_S) if fitted else 1.0
    for part in work.parts:
        bucket = summary.buckets.setdefault(part.name, BucketSummary(part.name))
        bucket.flops += count * float(part.matrix_flops + part.vector_flops)
        bucket.bytes += count * float(part.bytes + part.gather_bytes)
        bucket.seconds += count * scale * own_s[part.name]


def origin_seconds(prediction: Prediction) -> dict[Origin, float]:
    """Op time of a step by where it comes from, the strongest origin first."""
    cast = prediction.cast
    seconds: dict[Origin, float] = dict.fromkeys(ORIGINS, 0.0)
    for block, count in cast.program.counts.items():
        for price in cast.prices[block]:
            seconds[price.origin] += count * float(price.seconds)
    return {origin: own for origin, own in seconds.items() if own}


def kind_summaries(prediction: Prediction) -> list[KindSummary]:
    """Blocks of a step by kind, in order of first use: embedding, layer kinds, head, draft calls."""
    cast = prediction.cast
    kinds: dict[str, KindSummary] = {}
    for block, count in cast.program.counts.items():
        seconds = sum(float(price.seconds) for price in cast.prices[block])
        calls, total = count, count * seconds
        # With repetition off, equal blocks carry one key.
        if block.key in kinds:
            calls, total = calls + kinds[block.key].calls, total + kinds[block.key].total_s
        kinds[block.key] = KindSummary(block.key, calls, total / calls, total)
    return list(kinds.values())


def op_spans(prediction: Prediction) -> list[Span]:
    """Every op call of the step with its start and end, in program order."""
    return list(spans(prediction.cast.program, prediction.cast.prices))
