"""Fits find what made-up times were made from, and a file of them prices as they do."""

from pathlib import Path

import numpy as np
import pytest

from castoff.accuracy.calibrate import Calibration
from castoff.accuracy.fit import fit, predict
from castoff.accuracy.fit_file import fits_toml
from castoff.accuracy.recipe import Recipe, Robustness, Samples, Slot
from castoff.accuracy.validate import as_fit, validate
from castoff.casting.curves import check_fits, fitted_times
from castoff.casting.forms.table import FORMS
from castoff.ops.work import Kernel
from castoff.spec.backend import load_backend
from castoff.spec.device import load_device

H200 = load_device("h200_sxm")
TRUE = {
    "matmul": {"launch_s": 4e-6, "compute_efficiency": 0.6, "memory_efficiency": 0.75, "overlap": 1.5},
    "stream": {"launch_s": 3e-6, "memory_efficiency": 0.5},
    "grouped_fp8": {
        "launch_s": 9e-6, "compute_efficiency": 0.4, "padding_rows": 12.0, "memory_efficiency": 0.7, "overlap": 2.0,
    },
    "exchange": {"launch_s": 6e-6, "rank_s": 1e-6, "link_efficiency": 0.6, "ramp_s": 5e-7},
}  # fmt: skip
SPANS = {
    "m": (1, 16384), "n": (128, 16384), "k": (128, 16384), "rows": (1, 65536), "touched": (1, 256), "skew": (1, 2),
    "bytes": (1e3, 1e9), "ranks": (2, 8),
}  # fmt: skip


def samples(form: str, factor: float = 1.0, count: int = 600) -> Samples:
    rng = np.random.default_rng(3)
    sizes = {name: np.exp(rng.uniform(*np.log(SPANS[name]), count)) for name in FORMS[form].sizes}
    if "touched" in sizes:
        sizes["touched"] = np.minimum(sizes["touched"], sizes["rows"])
    seconds = np.asarray(FORMS[form].times(sizes, TRUE[form], H200).seconds)
    return Samples((Slot("kernel", sizes),), np.zeros(count), seconds * factor, rng.integers(0, 50, count))


@pytest.mark.parametrize("form", list(TRUE))
def test_coefficients_are_recovered(form: str) -> None:
    found = fit([samples(form)], {"kernel": Recipe(form=form)}, H200, Robustness(prior=1e-9, steps=200))
    assert found["kernel"].coefficients == pytest.approx(TRUE[form], rel=0.02)


@pytest.mark.parametrize("how", [Robustness(), Robustness(ridge=1e-6, smooth=1e-6, tail=0.2)])
def test_a_step_in_a_size_goes_to_the_grid(how: Robustness) -> None:
    whole = samples("matmul")
    off = np.where(whole.slots[0].sizes["m"] > 64, 1.3, 1.0)
    group = Samples(whole.slots, whole.fixed_s, whole.measured_s * off, whole.sites)
    known = {"start": TRUE["matmul"], "held": frozenset(TRUE["matmul"])}
    knots = {"m": (1.0, 64.0, 65.0, 16384.0), "n": (128.0, 16384.0)}
    recipes = {"kernel": Recipe(form="matmul", knots=knots, **known)}  # type: ignore[arg-type]
    model = fit([group], recipes, H200, how)
    (predicted,) = predict([group], model, recipes, H200)
    assert np.median(abs(predicted / group.measured_s - 1)) < 0.005
    assert validate([group], recipes, H200, how).median_abs_error < 0.01


def test_rows_with_a_kernel_twice() -> None:
    first, second = samples("stream"), samples("stream", count=600)
    slots = (first.slots[0], Slot("kernel", {"bytes": second.slots[0].sizes["bytes"][::-1].copy()}))
    recipe = Recipe(form="stream", knots={"bytes": (1e3, 1e6, 1e9)})
    seconds = sum(np.asarray(FORMS["stream"].times(slot.sizes, TRUE["stream"], H200).seconds) for slot in slots)
    group = Samples(slots, np.full(600, 1e-6), np.asarray(seconds) + 1e-6, first.sites)
    assert validate([group], {"kernel": recipe}, H200, Robustness()).p90_abs_error < 0.01


def test_a_file_prices_as_the_fit_did(tmp_path: Path) -> None:
    group, recipe = samples("matmul", 1.1), Recipe(form="matmul", knots={"m": (1, 100, 10000), "k": (128, 1e4)})
    how = Robustness()
    model, checked = fit([group], {"kernel": recipe}, H200, how), validate([group], {"kernel": recipe}, H200, how)
    made = as_fit("kernel", [group], model, recipe, checked, "made up")
    path = tmp_path / "made.toml"
    path.write_text(fits_toml(Calibration(backend="sglang", device="h200_sxm", stages=(), fits={"kernel": made})))
    backend = load_backend(str(path), "h200_sxm")
    check_fits(backend, H200)
    read = backend.fits["kernel"]
    assert (read.rows, read.source, read.form) == (600, "made up", "matmul")
    for m in (1.0, 77.0, 5000.0):
        kernel = Kernel("kernel", ("matmul",), {"m": m, "n": 4096.0, "k": 2048.0})
        one, other = (fitted_times(kernel, each, H200) for each in (made, read))
        assert one.times.seconds == pytest.approx(other.times.seconds, rel=0.01)
        assert one.inside == other.inside


def test_scenarios_with_few_values_are_those_values() -> None:
    group, recipe = samples("matmul"), Recipe(form="matmul", knots={"m": (1, 100, 10000), "k": (128, 1e4)})
    how = Robustness()
    model, checked = fit([group], {"kernel": recipe}, H200, how), validate([group], {"kernel": recipe}, H200, how)
    made = as_fit("kernel", [group], model, recipe, checked, "made up")
    m = np.repeat([3.0, 50.0, 1e6], 40)
    together = fitted_times(Kernel("kernel", (), {"m": m, "n": 4096.0, "k": 2048.0}), made, H200)
    for place in (0, 40, 80):
        alone = fitted_times(Kernel("kernel", (), {"m": m[place], "n": 4096.0, "k": 2048.0}), made, H200)
        assert np.asarray(together.times.seconds)[place] == pytest.approx(float(alone.times.seconds))
        assert np.asarray(together.inside)[place] == alone.inside
