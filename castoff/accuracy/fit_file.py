"""Writing the fits of a calibration as a backend file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite

import numpy as np

from castoff.accuracy.calibrate import Calibration
from castoff.spec.fits import Fit, LogGrid

DIGITS, CORRECTION_DECIMALS, NUMBERS_PER_LINE = 6, 2, 20
# Of ends of ranges, so that they are not left out by the digits written.
ROUNDING = 1e-5


def fits_toml(result: Calibration) -> str:
    """A backend file that extends the calibrated backend with its fits."""
    head = [
        f"# {result.backend} on {result.device}, fitted by `castoff calibrate`.",
        f"name = {_text(f'{result.backend} fitted on {result.device}')}",
        f"description = {_text(f'{result.backend} with kernels fitted to measurements on {result.device}')}",
        f"extends = {_text(result.backend)}",
        f"device = {_text(result.device)}",
    ]
    return "\n".join([*head, *fits_lines(result.fits)]) + "\n"


def fits_lines(fits: Mapping[str, Fit]) -> Iterator[str]:
    """The sections of some fits."""
    for kernel, fit in fits.items():
        yield from _fit_lines(kernel, fit)


def _fit_lines(kernel: str, fit: Fit) -> Iterator[str]:
    yield ""
    yield f"[fits.{kernel}]"
    yield f"form = {_text(fit.form)}"
    yield f"coefficients = {_pairs(fit.coefficients.items())}"
    if fit.features:
        yield f"features = {_pairs(fit.features.items())}"
    yield "ranges = { " + ", ".join(f"{name} = {_ends(*ends)}" for name, ends in fit.ranges.items()) + " }"
    yield f"rows = {fit.rows}"
    yield f"median_abs_error = {fit.median_abs_error:.4f}"
    yield f"p90_abs_error = {fit.p90_abs_error:.4f}"
    yield f"origin = {_text(fit.origin)}"
    yield f"source = {_text(fit.source)}"
    if fit.correction is not None:
        yield from _correction_lines(kernel, fit.correction)


def _correction_lines(kernel: str, correction: LogGrid) -> Iterator[str]:
    yield f"[fits.{kernel}.correction]"
    axes = zip(correction.axes, correction.knots, strict=True)
    yield "axes = { " + ", ".join(f"{name} = {_numbers(np.exp(knots))}" for name, knots in axes) + " }"
    yield "values = ["
    rounded = [_short(round(float(value), CORRECTION_DECIMALS)) for value in correction.values.ravel()]
    for start in range(0, len(rounded), NUMBERS_PER_LINE):
        # There are many of them, so without spaces.
        yield ",".join(rounded[start : start + NUMBERS_PER_LINE]) + ","
    yield "]"


def _ends(least: float, most: float) -> str:
    """A range as few digits hold it, which does not leave out its own ends."""
    whole = least.is_integer() and most.is_integer() and most < 10**DIGITS
    return _numbers((least, most) if whole else (least * (1 - ROUNDING), most * (1 + ROUNDING)))


def _pairs(items: Iterable[tuple[str, float]]) -> str:
    return "{ " + ", ".join(f"{name} = {_short(value)}" for name, value in items) + " }"


def _numbers(values: Iterable[float]) -> str:
    return "[" + ", ".join(_short(float(value)) for value in values) + "]"


def _short(value: float) -> str:
    assert isfinite(value), "a fit holds numbers"
    return f"{value:.{DIGITS}g}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
