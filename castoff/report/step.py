"""What a report of one step is made from: the prediction and its ops, gathered once for every form of output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from castoff.casting.measured import Coverage
from castoff.casting.prediction import Prediction
from castoff.casting.price import BOUNDS, Bound
from castoff.casting.summary import OpSummary, op_summaries


@dataclass(frozen=True, slots=True)
class StepReport:
    """A prediction, its ops by name, how much was measured (None without measured times), and notes to the user."""

    prediction: Prediction
    ops: tuple[OpSummary, ...]
    coverage: Coverage | None = None
    notes: tuple[str, ...] = ()

    @property
    def op_s(self) -> float:
        """Seconds of all ops, one after another."""
        return sum(op.total_s for op in self.ops)

    @property
    def bound_s(self) -> dict[Bound, float]:
        """Seconds of ops by what each call waits for most."""
        return {bound: sum(op.bound_s[bound] for op in self.ops) for bound in BOUNDS}

    @property
    def stream_s(self) -> dict[str, float]:
        """Busy seconds by stream; `host` is host time that no device work hides."""
        cast = self.prediction.cast
        return {**{name: float(busy) for name, busy in cast.timeline.busy_s.items()}, "host": float(cast.host_s)}


def step_report(prediction: Prediction, *, coverage: Coverage | None = None, notes: Sequence[str] = ()) -> StepReport:
    """Gather a report; `notes` come before the prediction's own."""
    every = dict.fromkeys([*notes, *prediction.notes])
    return StepReport(prediction, tuple(op_summaries(prediction)), coverage, tuple(every))
