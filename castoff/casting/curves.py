"""Cost curves: the work of an op to seconds on each kind of unit, by the curve that a backend has for its family.

A curve kind is a function here, its row in `_KINDS`, and its fields in `castoff.spec.backend`. What a backend has
fitted to measurements, kernel by kernel, goes before its curves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from castoff.casting.forms.form import Form, Times, log_at
from castoff.casting.forms.table import FORMS
from castoff.dims import Array, Dim, maximum, minimum, some, where
from castoff.errors import CastoffError
from castoff.ops.work import Kernel, Part
from castoff.spec.backend import Backend, Curve
from castoff.spec.device import Device
from castoff.spec.fits import Fit, LogGrid

Terms = tuple[Dim, Dim, Dim]
"""Seconds of (compute, vector, memory), each as if it had the op to itself."""

# Fits are evaluated once per value where at most this share of the scenarios have different ones.
MOST_DISTINCT = 0.25
LEAST_SECONDS = 1e-30
# Of the ends of what was measured, which are kept as logarithms.
ROUNDING = 1e-9


def parts_terms(parts: Sequence[Part], curve: Curve, device: Device) -> Terms:
    """Terms of parts that are one kernel, without its launch and its communication."""
    return _KINDS[curve.kind](parts, curve, device)


def _roofline(parts: Sequence[Part], curve: Curve, device: Device) -> Terms:
    """Every amount at its peak rate times the curve's efficiency for it."""
    bandwidth = device.memory.bandwidth_bytes_per_s
    vector_rate = device.vector_flops_per_s["fp32"] * curve.vector_efficiency
    compute: Dim = 0.0
    vector: Dim = 0.0
    memory: Dim = 0.0
    for part in parts:
        if some(part.matrix_flops):
            rate = device.matrix_flops_per_s[part.matrix_dtype] * curve.compute_efficiency
            compute = compute + part.matrix_flops / rate
        if some(part.vector_flops):
            vector = vector + part.vector_flops / vector_rate
        if some(part.bytes):
            memory = memory + part.bytes / (bandwidth * curve.memory_efficiency)
        if some(part.gather_bytes):
            memory = memory + part.gather_bytes / (bandwidth * curve.gather_efficiency)
    return compute, vector, memory


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """times: of a kernel. inside: whether all of its sizes are within the ranges that were fitted."""

    times: Times
    inside: bool | Array


def fitted_times(kernel: Kernel, fit: Fit, device: Device) -> FittedTimes:
    """Time of a kernel by a fit: the form's, times what measurements were off it at the nearest sizes fitted."""
    sizes, places = _distinct(kernel.sizes)
    result = _fitted_times(sizes, fit, device)
    if places is None:
        return result
    times, inside = result.times, result.inside
    spread = {item.name: _placed(getattr(times, item.name), places) for item in fields(times)}
    return FittedTimes(Times(**spread), inside[places] if isinstance(inside, np.ndarray) else inside)


def _placed(amount: Dim, places: Array) -> Dim:
    return amount[places] if isinstance(amount, np.ndarray) else amount


def _distinct(sizes: Mapping[str, Dim]) -> tuple[Mapping[str, Dim], Array | None]:
    """The sizes with each value once, and where the scenarios' values are among them: where one size alone differs
    among scenarios, and few of its values do."""
    arrays = {name: size for name, size in sizes.items() if isinstance(size, np.ndarray) and size.size > 1}
    if len(arrays) != 1:
        return sizes, None
    ((name, values),) = arrays.items()
    distinct, places = np.unique(values, return_inverse=True)
    if len(distinct) > values.size * MOST_DISTINCT:
        return sizes, None
    return {**sizes, name: distinct}, places.reshape(values.shape)


def _fitted_times(sizes: Mapping[str, Dim], fit: Fit, device: Device) -> FittedTimes:
    form = FORMS[fit.form]
    missing = [name for name in form.sizes if name not in sizes]
    if missing:
        raise CastoffError(
            f"{fit.source}: a fit of the form {fit.form} needs the sizes {', '.join(form.sizes)}, and this kernel has "
            f"{', '.join(sizes)}; give it another form"
        )
    times = form.times(sizes, fit.coefficients, device)
    inside: bool | Array = True
    for name, (least, most) in fit.ranges.items():
        size = sizes[name]
        inside = inside & (size >= least) & (size <= most)
    if fit.measured is not None:
        times = _scaled(times, _measured_factor(sizes, fit, fit.measured, device))
    return FittedTimes(corrected(times, form, sizes, fit.correction, fit.features, device), inside)


def _measured_factor(sizes: Mapping[str, Dim], fit: Fit, measured: LogGrid, device: Device) -> Dim:
    """Measured over formed time: between the measured points as they are, beyond them that of the nearest one."""
    nearest: dict[str, Dim] = dict(sizes)
    for name, knots in zip(measured.axes, measured.knots, strict=True):
        nearest[name] = minimum(maximum(sizes[name], np.exp(knots[0])), np.exp(knots[-1]))
    formed_s = FORMS[fit.form].times(nearest, fit.coefficients, device).seconds
    # A kernel that does not run there takes no time.
    return where(formed_s > 0, np.exp(log_at(measured, nearest)) / maximum(formed_s, LEAST_SECONDS), 0.0)


def corrected(
    times: Times,
    form: Form,
    sizes: Mapping[str, Dim],
    correction: LogGrid | None,
    features: Mapping[str, float],
    device: Device,
) -> Times:
    """A form's times on the device, times what measurements were off it; the host's stays."""
    if correction is None and not features:
        return times
    logarithm: Dim = 0.0
    if correction is not None:
        logarithm = log_at(correction, form.axes(sizes))
    if features:
        terms = form.features(sizes, device)
        for name, factor in features.items():
            logarithm = logarithm + factor * terms[name]
    return _scaled(times, np.exp(logarithm))


def _scaled(times: Times, scale: Dim) -> Times:
    """A kernel that takes so many times as long; the host's time stays."""
    return Times(
        times.seconds * scale, times.compute_s * scale, times.memory_s * scale, times.launch_s * scale, times.host_s
    )


def check_fits(backend: Backend, device: Device) -> None:
    """Raise CastoffError for a fit of a form that castoff does not have, or with other names than the form's."""
    for kernel, fit in backend.fits.items():
        where = f"backend {backend.name}: fits.{kernel}"
        if fit.form not in FORMS:
            raise CastoffError(f"{where}.form must be one of {', '.join(FORMS)}, got {fit.form}")
        form = FORMS[fit.form]
        if fit.coefficients.keys() != form.start.keys():
            given, wanted = ", ".join(fit.coefficients), ", ".join(form.start)
            raise CastoffError(f"{where}.coefficients must be {wanted}, got {given}")
        if fit.ranges.keys() != set(form.sizes):
            raise CastoffError(
                f"{where}.ranges: the sizes of {fit.form} are {', '.join(form.sizes)}, got {', '.join(fit.ranges)}"
            )
        if fit.measured is not None:
            _check_measured(fit, fit.measured, where)
        _check_terms(fit, form, where, device)


def _check_terms(fit: Fit, form: Form, where: str, device: Device) -> None:
    """Try the fit at the least sizes that it was made from."""
    sizes = {name: max(least, 1.0) for name, (least, _) in fit.ranges.items()}
    axes = form.axes(sizes)
    wrong = [] if fit.correction is None else [name for name in fit.correction.axes if name not in axes]
    if wrong:
        raise CastoffError(f"{where}.correction.axes must be of {', '.join(axes)}, got {', '.join(wrong)}")
    terms = form.features(sizes, device) if fit.features else {}
    wrong = [name for name in fit.features if name not in terms]
    if wrong:
        known = ", ".join(terms) or "none"
        raise CastoffError(f"{where}.features: the form {fit.form} has {known}, got {', '.join(wrong)}")


def _check_measured(fit: Fit, measured: LogGrid, where: str) -> None:
    wrong = [name for name in measured.axes if name not in fit.ranges]
    if wrong:
        raise CastoffError(f"{where}.measured.axes must be of {', '.join(fit.ranges)}, got {', '.join(wrong)}")
    for name, knots in zip(measured.axes, measured.knots, strict=True):
        (least, most), (first, last) = fit.ranges[name], np.exp(knots[[0, -1]])
        if least < first * (1 - ROUNDING) or most > last * (1 + ROUNDING):
            raise CastoffError(
                f"{where}.ranges.{name} must lie between the measured {first:g} and {last:g}, got {least:g} to {most:g}"
            )


_KINDS: Mapping[str, Callable[[Sequence[Part], Curve, Device], Terms]] = {"roofline": _roofline}
