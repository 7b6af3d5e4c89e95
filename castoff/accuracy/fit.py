"""Fitting the kernels of a backend to measured times of the calls that they are part of.

A row's time is the sum of its calls' times. Coefficients are found by robust Gauss-Newton steps on the logarithms of
times and coefficients; what is left goes, by robust ridge regression, to a grid of log-factors. Axes: N rows,
P coefficients, B grid points and features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from castoff.accuracy.log_grid import design_of, mixed, ridge, stacked
from castoff.accuracy.recipe import Recipe, Robustness, Samples, Slot
from castoff.casting.curves import corrected
from castoff.casting.forms.form import EAGER_SHARPNESS, Times, eager_s
from castoff.dims import Array, Dim
from castoff.spec.device import Device
from castoff.spec.fits import LogGrid

LEAST_SECONDS = 1e-12
# Rows of whose time a curve has less say nothing of it.
LEAST_SHARE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What was found for one curve."""

    coefficients: Mapping[str, float]
    correction: LogGrid | None = None
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
    times = recipe.formula.times(slot.sizes, fitted.coefficients, device)
    return corrected(times, recipe.formula, slot.sizes, fitted.correction, fitted.features, device)


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
        design = mixed([design_of(slot, recipe, device) for slot in own], [each / own_N for each in slots_s])
        designs.append(design.where(counted))
        targets.append(np.log(group.measured_s / total_N)[counted] / share_N[counted])
        shares.append(share_N[counted])
    factors_B = ridge(stacked(designs), np.concatenate(targets), np.concatenate(shares) ** 2, recipe, how)
    shape = tuple(len(places) for places in recipe.knots.values())
    size = int(np.prod(shape)) if recipe.knots else 0
    names = _feature_names(recipe, groups, curve, device)
    return Fitted(
        coefficients=model[curve].coefficients,
        correction=LogGrid(
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
