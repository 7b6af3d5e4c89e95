"""Times of fitted kernels: many scenarios at once are as each alone, in every amount."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from castoff.casting.curves import fitted_times
from castoff.casting.forms.form import Times
from castoff.casting.forms.table import FORMS
from castoff.ops.work import Kernel
from castoff.spec.backend import load_backend
from castoff.spec.device import load_device

FITS = {device: load_backend("sglang", device).fits for device in ("h100_sxm", "h200_sxm", "b200_sxm")}
KERNELS = [(device, kernel) for device, fits in FITS.items() for kernel in fits]


@pytest.mark.parametrize(("device", "kernel"), KERNELS)
def test_repeated_sizes_are_as_each_alone(device: str, kernel: str) -> None:
    fit = FITS[device][kernel]
    sizes = {name: fit.ranges.get(name, (1.0, 1.0))[1] for name in FORMS[fit.form].sizes}
    name = next(iter(sizes))
    values = np.repeat(np.linspace(1.0, sizes[name], 3), 5)
    together = fitted_times(Kernel(kernel, (), {**sizes, name: values}), fit, load_device(device)).times
    for place, value in enumerate(values.tolist()):
        alone = fitted_times(Kernel(kernel, (), {**sizes, name: value}), fit, load_device(device)).times
        for item in fields(Times):
            amount = np.broadcast_to(getattr(together, item.name), values.shape)[place]
            assert amount == pytest.approx(getattr(alone, item.name), rel=1e-9), item.name


@pytest.mark.parametrize(("device", "kernel"), KERNELS)
def test_factors_stay_within_reason(device: str, kernel: str) -> None:
    correction = FITS[device][kernel].correction
    if correction is not None:
        assert np.median(abs(correction.values)) < 0.7
