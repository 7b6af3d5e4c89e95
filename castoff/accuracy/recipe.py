"""What is fitted to what: rows as sums of kernels, how each of their curves is fitted, and how robustly.

Axes: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from castoff.casting.forms.form import Form
from castoff.casting.forms.table import FORMS
from castoff.dims import Array
from castoff.spec.fits import Fit


@dataclass(frozen=True, slots=True)
class Slot:
    """One kernel of every row: its curve, and an array per size."""

    curve: str
    sizes: Mapping[str, Array]

    def where(self, chosen: Array) -> Slot:
        return Slot(self.curve, {name: values[chosen] for name, values in self.sizes.items()})


@dataclass(frozen=True, slots=True)
class Samples:
    """Rows made of the same kernels. fixed_s: seconds of all that is not fitted. sites: a code of each row's site.

    eager: whether the host launches op by op, so that its time or the device's counts, whichever is longer.
    """

    slots: tuple[Slot, ...]
    fixed_s: Array
    measured_s: Array
    sites: Array
    eager: bool = False

    def __len__(self) -> int:
        return len(self.measured_s)

    def where(self, chosen: Array) -> Samples:
        slots = tuple(slot.where(chosen) for slot in self.slots)
        return replace(
            self,
            slots=slots,
            fixed_s=self.fixed_s[chosen],
            measured_s=self.measured_s[chosen],
            sites=self.sites[chosen],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one curve is fitted.

    knots: of its correction, by axis of the form; none fits no correction. start: coefficients that start elsewhere
    than the form's. held: coefficients that stay at their start.
    refines: None fits afresh; else the coefficients that are fitted again where an earlier stage found the curve, whose
    others and whose correction stay. of: the curve that is refined where it is another.
    """

    form: str
    knots: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    features: bool = False
    start: Mapping[str, float] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    refines: frozenset[str] | None = None
    of: str | None = None
    known: Fit | None = None

    def after(self, earlier: Fit | None) -> Recipe:
        """The recipe where an earlier stage has a fit of the curve."""
        if self.refines is None or earlier is None:
            return self
        held = frozenset(self.formula.start) - self.refines
        return replace(self, start=earlier.coefficients, held=held, known=earlier)

    @property
    def is_held(self) -> bool:
        """Whether nothing of it is fitted."""
        return not self.knots and not self.features and self.held >= self.formula.start.keys()

    @property
    def formula(self) -> Form:
        return FORMS[self.form]


@dataclass(frozen=True, slots=True, kw_only=True)
class Robustness:
    """huber: errors beyond this many log units count less. prior: pull of each coefficient to its start, per row.
    ridge: pull of the correction to none, per row. smooth: pull of neighbouring points of its grid to each other, per
    row. tail: how much more those rows count in the correction whose errors are near `tail_edge`, a 90 % quantile."""

    huber: float = 0.05
    prior: float = 1e-6
    ridge: float = 1e-3
    smooth: float = 0.0
    correction_huber: float = 0.03
    tail: float = 0.0
    tail_edge: float = 0.15
    most_rows: int = 6000
    steps: int = 40
