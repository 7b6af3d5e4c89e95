"""Times of fitted kernels: many scenarios at once are as each alone, in every amount."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from castoff.casting.curves import fitted_times
from castoff.casting.forms.form import Times
from castoff.casting.forms.table import FORMS
from castoff.casting.price import Pricing, price_call
from castoff.ops.linear import Weight, linear
from castoff.ops.program import Recorder
from castoff.ops.work import Kernel
from castoff.spec.backend import load_backend
from castoff.spec.device import load_device
from castoff.spec.fits import LogGrid
from tests.casting.fitted import MEASURED, TIMED, fitted_backend

FITS = {device: load_backend("sglang", device).fits for device in ("h100_sxm", "h200_sxm", "b200_sxm")}
KERNELS = [(device, kernel) for device, fits in FITS.items() for kernel in fits]

H200 = load_device("h200_sxm")


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


def test_measured_seconds_are_read_off_between_their_points(tmp_path: Path) -> None:
    fit = load_backend(fitted_backend(tmp_path, TIMED + MEASURED), "h200_sxm").fits["matmul_bf16"]

    def seconds(m: float, k: float, n: float = 512.0) -> tuple[float, bool]:
        found = fitted_times(Kernel("matmul_bf16", (), {"m": m, "n": n, "k": k}), fit, H200)
        return float(found.times.seconds), bool(found.inside)

    assert seconds(16, 6144) == (pytest.approx(2e-5), True)
    assert seconds(4096, 2048) == (pytest.approx(1e-4), True)
    # Half way in the logarithms of both sizes; outputs are no axis.
    assert seconds(64, np.sqrt(2048 * 6144), 4096.0) == (pytest.approx((1e-5 * 2e-5 * 2e-5 * 4e-5) ** 0.25), True)
    formed = replace(fit, measured=None)
    for m, nearest in ((8.0, 16.0), (32768.0, 4096.0)):
        own, edge = (
            float(fitted_times(Kernel("x", (), {"m": at, "n": 512.0, "k": 2048.0}), formed, H200).times.seconds)
            for at in (m, nearest)
        )
        assert seconds(m, 2048) == (pytest.approx(seconds(nearest, 2048)[0] * own / edge), False)
    both = fitted_times(Kernel("x", (), {"m": np.array([8.0, 64.0]), "n": 512, "k": 2048}), fit, H200)
    assert both.times.seconds == pytest.approx([seconds(8, 2048)[0], seconds(64, 2048)[0]])
    assert np.asarray(both.inside).tolist() == [False, True]


def test_a_cast_says_that_times_are_measured(tmp_path: Path) -> None:
    backend = load_backend(fitted_backend(tmp_path, TIMED.replace('"calibrated"', '"measured"') + MEASURED), "h200_sxm")
    recorder = Recorder()
    recorder.block("x", "x", lambda: (linear(recorder.tensor(64, 4096), plain_weight(recorder)), ())[1])
    ((_, call),) = recorder.program.calls()
    assert price_call(call, Pricing(H200, backend)).origin == "measured"


def plain_weight(recorder: Recorder) -> Weight:
    return Weight(recorder.tensor(512, 4096, kind="weight"), None, None)


def test_measured_seconds_of_a_kernel_that_does_not_run(tmp_path: Path) -> None:
    ours = load_backend("sglang", "h200_sxm").fits["topk_prefill"]
    grid = LogGrid(axes=("queries",), knots=(np.log([1024.0, 8192.0]),), values=np.log([1e-5, 2e-5]))
    fit = replace(ours, measured=grid, correction=None)
    sizes = {"queries": 2048.0, "selecting": 100.0, "excess": 5000.0, "topk": 2048.0}
    for sparse, wanted in ((1.0, 1e-5 * 2 ** (1 / 3)), (0.0, 0.0)):
        found = fitted_times(Kernel("x", (), {**sizes, "sparse": sparse}), fit, H200)
        assert float(found.times.seconds) == pytest.approx(wanted)
