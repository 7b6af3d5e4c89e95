"""Fitting the kernels of a backend to measured times of the calls that they are part of.

A row's time is the sum of its calls' times. Coefficients are found by robust Gauss-Newton steps on the logarithms of
times and coefficients; what is left goes, by robust ridge regression, to a grid of log-factors. Axes: N rows,
P coefficients, C points of the grid that a row lies between, F features, B grid points and features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from castoff.casting.forms.form import EAGER_SHARPNESS, Form, Times, corner_weights, eager_s, log_factor
from castoff.casting.forms.table import FORMS
from castoff.dims import Array, Dim
from castoff.spec.device import Device
from castoff.spec.fits import Correction, Fit

LEAST_SECONDS = 1e-12
TAIL_WIDTH = 0.06
# Of neighbouring knots, in log units: knots on both sides of a step are close, and the step may be steep.
LEAST_DISTANCE = 0.3
# Rows of whose time a curve has less say nothing of it.
LEAST_SHARE = 1e-3
LEAST_SPREAD = 0.03


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What was found for one curve."""

    coefficients: Mapping[str, float]
    correction: Correction | None = None
    features: Mapping[str, float] = field(default_factory=dict)


Model = Mapping[str, Fitted]


def predict(groups: Sequence[Samples], model: Model, recipes: Mapping[str, Recipe], device: Device) -> list[Array]:
    """Seconds of every row."""
    return [_total(group, model, recipes, device) for group in groups]


def _total(group: Samples, model: Model, recipes: Mapping[str, Recipe], device: Device) -> Array:
    return _combined(group, _all_times(group, model, recipes, device))


def _all_times(group: Samples, model: Model, recipes: Mapping[str, Recipe], device: Device) -> list[Times]:
    return [_slot_times(slot, model[slot.curve], recipes[slot.curve], device) for slot in group.slots]


def _combined(group: Samples, times: Sequence[Times]) -> Array:
    device_N, host_s = _device_and_host_s(group, times)
    combined: Array = np.asarray(eager_s(host_s, device_N)) if group.eager else device_N
    return combined


def _device_and_host_s(group: Samples, times: Sequence[Times]) -> tuple[Array, Dim]:
    device_N = group.fixed_s
    host_s: Dim = 0.0
    for own in times:
        device_N, host_s = device_N + own.seconds, host_s + own.host_s
    return device_N, host_s


def _slot_times(slot: Slot, fitted: Fitted, recipe: Recipe, device: Device) -> Times:
    """A kernel's times, of which the correction changes the seconds alone."""
    form = recipe.formula
    times = form.times(slot.sizes, fitted.coefficients, device)
    logarithm_N: Dim = 0.0
    if fitted.correction is not None:
        logarithm_N = log_factor(fitted.correction, form.axes(slot.sizes))
    if fitted.features:
        terms = form.features(slot.sizes, device)
        for name, factor in fitted.features.items():
            logarithm_N = logarithm_N + factor * terms[name]
    return replace(times, seconds=times.seconds * np.exp(logarithm_N))


def fit(groups: Sequence[Samples], recipes: Mapping[str, Recipe], device: Device, how: Robustness) -> Model:
    """Coefficients of every recipe's curve, then the corrections that some ask for."""
    model = _fit_coefficients([_thinned(group, how, len(groups)) for group in groups], recipes, device, how)
    for curve, recipe in recipes.items():
        if recipe.knots or recipe.features:
            model = {**model, curve: _fit_correction(curve, groups, model, recipes, device, how)}
    return model


def _thinned(group: Samples, how: Robustness, groups: int) -> Samples:
    most = how.most_rows // groups
    if len(group) <= most:
        return group
    return group.where(np.random.default_rng(1).choice(len(group), most, replace=False))


def _fit_coefficients(
    groups: Sequence[Samples], recipes: Mapping[str, Recipe], device: Device, how: Robustness
) -> dict[str, Fitted]:
    names = [(curve, name) for curve, recipe in recipes.items() for name in recipe.formula.start]
    start = {(curve, name): recipes[curve].start.get(name, recipes[curve].formula.start[name]) for curve, name in names}
    free = [key for key in names if key[1] not in recipes[key[0]].held]
    measured_N = np.log(np.concatenate([group.measured_s for group in groups]))

    def model_of(logs_P: Array) -> dict[str, Fitted]:
        values = {**start, **dict(zip(free, np.exp(logs_P).tolist(), strict=True))}
        return {
            curve: _started(recipe, {name: values[curve, name] for name in recipe.formula.start})
            for curve, recipe in recipes.items()
        }

    latest: dict[tuple[int, int], dict[tuple[float, ...], Times]] = {}

    def times_of(place: tuple[int, int], slot: Slot, fitted: Fitted) -> Times:
        # Steps to the side change one curve, so that the times of all others are known.
        known = latest.setdefault(place, {})
        key = tuple(fitted.coefficients.values())
        if key not in known:
            for oldest in list(known)[:-1]:
                del known[oldest]
            known[key] = _slot_times(slot, fitted, recipes[slot.curve], device)
        return known[key]

    def residual(logs_P: Array) -> Array:
        model = model_of(logs_P)
        predicted = np.concatenate(
            [
                _combined(group, [times_of((at, n), slot, model[slot.curve]) for n, slot in enumerate(group.slots)])
                for at, group in enumerate(groups)
            ]
        )
        error_N: Array = np.log(np.maximum(predicted, LEAST_SECONDS)) - measured_N
        return error_N

    return model_of(gauss_newton(residual, np.log([start[key] for key in free]), how))


def _started(recipe: Recipe, coefficients: Mapping[str, float]) -> Fitted:
    """These coefficients, with the correction that an earlier stage found."""
    if recipe.known is None:
        return Fitted(coefficients=coefficients)
    return Fitted(coefficients=coefficients, correction=recipe.known.correction, features=recipe.known.features)


def gauss_newton(residual: Callable[[Array], Array], start_P: Array, how: Robustness) -> Array:
    """Arguments with the least robust sum of squares: Levenberg-Marquardt steps with Huber's weights."""
    at_P: Array = start_P.copy()
    if not len(start_P):
        return at_P
    damping = 1e-2
    prior = how.prior * len(residual(start_P))

    def cost(error_N: Array, place_P: Array) -> float:
        size = abs(error_N)
        robust = np.where(size <= how.huber, 0.5 * error_N**2, how.huber * (size - 0.5 * how.huber))
        return float(robust.sum() + 0.5 * prior * ((place_P - start_P) ** 2).sum())

    error_N = residual(at_P)
    least = cost(error_N, at_P)
    for _ in range(how.steps):
        jacobian_NP = np.stack([(residual(at_P + step) - error_N) / 1e-4 for step in 1e-4 * np.eye(len(at_P))], axis=1)
        weights_N = how.huber / np.maximum(abs(error_N), how.huber)
        normal = jacobian_NP.T @ (jacobian_NP * weights_N[:, None]) + prior * np.eye(len(at_P))
        slope = jacobian_NP.T @ (weights_N * error_N) + prior * (at_P - start_P)
        for _ in range(8):
            damped = normal + damping * np.diag(np.diag(normal) + 1e-9)
            step_P = np.clip(-np.linalg.solve(damped, slope), -1.5, 1.5)
            next_N = residual(at_P + step_P)
            next_cost = cost(next_N, at_P + step_P)
            if next_cost < least:
                break
            damping *= 4
        else:
            return at_P
        gain = (least - next_cost) / least
        at_P, error_N, least, damping = at_P + step_P, next_N, next_cost, max(damping / 5, 1e-7)
        if gain < 1e-5:
            break
    return at_P


def _fit_correction(
    curve: str, groups: Sequence[Samples], model: Model, recipes: Mapping[str, Recipe], device: Device, how: Robustness
) -> Fitted:
    """Log-factors of one curve that explain what the model leaves, as far as the curve is part of a row's time."""
    recipe = recipes[curve]
    designs, targets, shares = [], [], []
    for group in groups:
        own = [slot for slot in group.slots if slot.curve == curve]
        if not own:
            continue
        times = _all_times(group, model, recipes, device)
        total_N = _combined(group, times)
        share_N = _share(curve, group, times)
        counted = share_N > LEAST_SHARE
        slots_s = [
            np.asarray(each.seconds) for slot, each in zip(group.slots, times, strict=True) if slot.curve == curve
        ]
        own_N = sum(slots_s)
        design = _mixed([_design(slot, recipe, device) for slot in own], [each / own_N for each in slots_s])
        designs.append(design.where(counted))
        targets.append(np.log(group.measured_s / total_N)[counted] / share_N[counted])
        shares.append(share_N[counted])
    factors_B = _ridge(_stacked(designs), np.concatenate(targets), np.concatenate(shares) ** 2, recipe, how)
    shape = tuple(len(places) for places in recipe.knots.values())
    size = int(np.prod(shape)) if recipe.knots else 0
    names = _feature_names(recipe, groups, curve, device)
    return Fitted(
        coefficients=model[curve].coefficients,
        correction=Correction(
            axes=tuple(recipe.knots),
            knots=tuple(np.log(places) for places in recipe.knots.values()),
            values=factors_B[:size].reshape(shape),
        )
        if recipe.knots
        else None,
        features=dict(zip(names, factors_B[size:].tolist(), strict=True)),
    )


def _share(curve: str, group: Samples, times: Sequence[Times]) -> Array:
    """By how many per cent a row's time grows where the curve's grows by one."""
    device_N, host_s = _device_and_host_s(group, times)
    own_N = sum(own.seconds for slot, own in zip(group.slots, times, strict=True) if slot.curve == curve)
    share_N: Array = np.broadcast_to(own_N / device_N, len(group))
    if group.eager:
        share_N = share_N * (device_N / eager_s(host_s, device_N)) ** (1 + EAGER_SHARPNESS)
    return share_N


def _feature_names(recipe: Recipe, groups: Sequence[Samples], curve: str, device: Device) -> tuple[str, ...]:
    if not recipe.features:
        return ()
    slot = next(slot for group in groups for slot in group.slots if slot.curve == curve)
    return tuple(recipe.formula.features(slot.sizes, device))


@dataclass(frozen=True, slots=True)
class _Design:
    """What multiplies the log-factors of each row: weights of the grid's points that it lies between, and features.

    size: of the grid.
    """

    size: int
    points_NC: Array
    weights_NC: Array
    features_NF: Array

    def where(self, chosen: Array) -> _Design:
        return _Design(self.size, self.points_NC[chosen], self.weights_NC[chosen], self.features_NF[chosen])

    def logarithm(self, factors_B: Array) -> Array:
        grid_N = (self.weights_NC * factors_B[self.points_NC]).sum(axis=1)
        logarithm_N: Array = grid_N + self.features_NF @ factors_B[self.size :]
        return logarithm_N

    def normal(self, weight_N: Array) -> Array:
        """Sums over rows of weighted products of what multiplies any two factors: (B, B)."""
        size, features = self.size, self.features_NF.shape[1]
        normal_BB = np.zeros((size + features, size + features))
        pairs = self.points_NC[:, :, None] * size + self.points_NC[:, None, :]
        products = self.weights_NC[:, :, None] * self.weights_NC[:, None, :] * weight_N[:, None, None]
        normal_BB[:size, :size] = np.bincount(pairs.ravel(), products.ravel(), minlength=size**2).reshape(size, size)
        crossed = [self._on_grid(weight_N * column) for column in self.features_NF.T]
        for place, column in enumerate(crossed, start=size):
            normal_BB[:size, place] = normal_BB[place, :size] = column
        normal_BB[size:, size:] = self.features_NF.T @ (self.features_NF * weight_N[:, None])
        return normal_BB

    def against(self, values_N: Array) -> Array:
        """Sums over rows of values times what multiplies each factor: (B,)."""
        return np.concatenate([self._on_grid(values_N), self.features_NF.T @ values_N])

    def _on_grid(self, values_N: Array) -> Array:
        return np.bincount(
            self.points_NC.ravel(), (self.weights_NC * values_N[:, None]).ravel(), minlength=self.size
        ).astype(np.float64)


def _design(slot: Slot, recipe: Recipe, device: Device) -> _Design:
    form = recipe.formula
    rows = len(next(iter(slot.sizes.values())))
    points, weights, size = [], [], 0
    if recipe.knots:
        axes = form.axes(slot.sizes)
        places = [corner_weights(np.log(knots), axes[name]) for name, knots in recipe.knots.items()]
        shape = tuple(len(knots) for knots in recipe.knots.values())
        size = int(np.prod(shape))
        for corners in product((0, 1), repeat=len(places)):
            weight_N = np.ones(rows)
            at: list[Array] = []
            for (low, share), corner in zip(places, corners, strict=True):
                weight_N = weight_N * (share if corner else 1 - share)
                at.append(np.broadcast_to(low + corner, rows))
            points.append(np.ravel_multi_index(at, shape))
            weights.append(weight_N)
    features = form.features(slot.sizes, device).values() if recipe.features else ()
    return _Design(
        size,
        np.stack(points, axis=1) if points else np.zeros((rows, 0), dtype=np.int64),
        np.stack(weights, axis=1) if weights else np.zeros((rows, 0)),
        np.stack([np.broadcast_to(values, rows) for values in features], axis=1) if features else np.zeros((rows, 0)),
    )


def _mixed(designs: Sequence[_Design], shares: Sequence[Array]) -> _Design:
    """The design of rows that have a curve more than once, by each one's share of their time."""
    weighted = [(design, share_N[:, None]) for design, share_N in zip(designs, shares, strict=True)]
    return _Design(
        designs[0].size,
        np.concatenate([design.points_NC for design in designs], axis=1),
        np.concatenate([design.weights_NC * share_N1 for design, share_N1 in weighted], axis=1),
        sum((design.features_NF * share_N1 for design, share_N1 in weighted), np.zeros_like(designs[0].features_NF)),
    )


def _stacked(designs: Sequence[_Design]) -> _Design:
    """Rows of several groups; those of groups with fewer points are filled up with points that count nothing."""
    most = max(design.points_NC.shape[1] for design in designs)

    def filled(values_NC: Array) -> Array:
        return np.pad(values_NC, ((0, 0), (0, most - values_NC.shape[1])))

    return _Design(
        designs[0].size,
        np.concatenate([filled(design.points_NC) for design in designs]),
        np.concatenate([filled(design.weights_NC) for design in designs]),
        np.concatenate([design.features_NF for design in designs]),
    )


def _ridge(design: _Design, target_N: Array, weight_N: Array, recipe: Recipe, how: Robustness) -> Array:
    mean_B = design.against(np.ones(len(target_N))) / len(target_N)
    variance_B = np.diag(design.normal(np.ones(len(target_N)))) / len(target_N) - mean_B**2
    # A point of the grid that hardly any row is near learns little.
    penalty_BB = how.ridge * np.diag(np.maximum(variance_B, LEAST_SPREAD**2))
    if how.smooth:
        penalty_BB[: design.size, : design.size] += how.smooth * _roughness(recipe)
    robust_N = weight_N
    factors_B: Array = np.zeros(len(penalty_BB))
    for _ in range(8):
        normal_BB = design.normal(robust_N) + penalty_BB * robust_N.sum()
        factors_B = np.linalg.solve(normal_BB, design.against(robust_N * target_N))
        error_N = abs(target_N - design.logarithm(factors_B))
        robust_N = how.correction_huber / np.maximum(error_N, how.correction_huber)
        if how.tail:
            robust_N = robust_N + how.tail * np.exp(-0.5 * ((error_N - how.tail_edge) / TAIL_WIDTH) ** 2)
        robust_N = weight_N * robust_N
    return factors_B


def _roughness(recipe: Recipe) -> Array:
    """A quadratic form of a grid: squares of the differences of neighbours over their distances, which count as at
    least `LEAST_DISTANCE`."""
    shape = tuple(len(knots) for knots in recipe.knots.values())
    points = np.arange(np.prod(shape)).reshape(shape)
    rough_BB = np.zeros((points.size, points.size))
    for axis, knots in enumerate(recipe.knots.values()):
        rows = np.moveaxis(points, axis, 0)
        for low, distance in enumerate(np.maximum(np.diff(np.log(knots)), LEAST_DISTANCE)):
            a, b = rows[low].ravel(), rows[low + 1].ravel()
            rough_BB[a, a] += 1 / distance
            rough_BB[b, b] += 1 / distance
            rough_BB[a, b] -= 1 / distance
            rough_BB[b, a] -= 1 / distance
    return rough_BB


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """Errors of rows whose sites were left out of the fit that predicts them. predicted_s: per group."""

    predicted_s: Sequence[Array]
    median_abs_error: float
    p90_abs_error: float


def validate(
    groups: Sequence[Samples], recipes: Mapping[str, Recipe], device: Device, how: Robustness, *, folds: int = 5
) -> Validated:
    """Leave out the sites of each fold in turn."""
    sites = np.unique(np.concatenate([group.sites for group in groups]))
    order = np.random.default_rng(0).permutation(len(sites))
    fold_of_site = dict(zip(sites[order].tolist(), (np.arange(len(sites)) % folds).tolist(), strict=True))
    fold_N = [np.array([fold_of_site[site] for site in group.sites.tolist()]) for group in groups]
    predicted = [np.full(len(group), np.nan) for group in groups]
    for fold in range(folds):
        kept = [group.where(own != fold) for group, own in zip(groups, fold_N, strict=True)]
        model = fit([group for group in kept if len(group)], recipes, device, how)
        for group, own, out in zip(groups, fold_N, predicted, strict=True):
            left = own == fold
            if left.any():
                out[left] = _total(group.where(left), model, recipes, device)
    measured = np.concatenate([group.measured_s for group in groups])
    error = abs(np.concatenate(predicted) / measured - 1)
    return Validated(
        predicted_s=predicted,
        median_abs_error=float(np.median(error)),
        p90_abs_error=float(np.quantile(error, 0.9)),
    )


def as_fit(curve: str, groups: Sequence[Samples], model: Model, recipe: Recipe, checked: Validated, source: str) -> Fit:
    """One curve as a backend file holds it."""
    slots = [slot for group in groups for slot in group.slots if slot.curve == curve]
    ranges = {
        name: (
            float(min(np.min(slot.sizes[name]) for slot in slots)),
            float(max(np.max(slot.sizes[name]) for slot in slots)),
        )
        for name in recipe.formula.sizes
    }
    return Fit(
        form=recipe.form,
        coefficients=model[curve].coefficients,
        features=model[curve].features,
        correction=model[curve].correction,
        ranges=ranges,
        rows=sum(len(group) for group in groups if any(slot.curve == curve for slot in group.slots)),
        median_abs_error=checked.median_abs_error,
        p90_abs_error=checked.p90_abs_error,
        source=source,
    )
