"""Fits of the kernels of sparse attention: times made of known coefficients are found again, kept ones stay."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from castoff.accuracy.calibrate import Calibration, calibrate
from castoff.accuracy.fit import fit, predict
from castoff.accuracy.fit_file import fits_toml
from castoff.accuracy.recipe import Recipe, Robustness, Samples, Slot
from castoff.accuracy.stages_attention import MODULE_STAGES
from castoff.accuracy.validate import as_fit, validate
from castoff.casting.curves import fitted_times
from castoff.casting.forms.table import FORMS
from castoff.dims import Array
from castoff.ops.work import Kernel
from castoff.spec.backend import load_backend
from castoff.spec.device import load_device
from castoff.spec.fits import Fit
from tests.accuracy.measured import MODULE, repeated, write_table

H200 = load_device("h200_sxm")
CURVE = "sparse_attention_bf16_decode"


def decode_slot(rows: int) -> Slot:
    draw = np.random.default_rng(3)
    queries = 2.0 ** draw.integers(0, 9, rows)
    mean = 2.0 ** draw.integers(0, 12, rows)
    heads = 2.0 ** draw.integers(3, 8, rows)
    sizes = {"queries": queries, "rows": queries * mean, "topk": np.full(rows, 2048.0), "heads": heads}
    return Slot(CURVE, sizes)


def made(slots: tuple[Slot, ...], coefficients: dict[str, dict[str, float]], forms: dict[str, str]) -> Array:
    parts = [FORMS[forms[slot.curve]].times(slot.sizes, coefficients[slot.curve], H200).seconds for slot in slots]
    return np.asarray(sum(parts))


def test_times_of_known_coefficients_are_found_again() -> None:
    slot = decode_slot(400)
    truth = {**FORMS["decode_attention"].start, "launch_s": 1e-5, "query_s": 0.8e-6, "head_s": 0.3e-6, "root_s": 3e-6}
    seconds = made((slot,), {CURVE: truth}, {CURVE: "decode_attention"})
    samples = Samples((slot,), np.zeros(400), seconds, np.arange(400) % 20)
    recipes = {CURVE: Recipe(form="decode_attention")}
    how = Robustness(prior=1e-9)
    model = fit([samples], recipes, H200, how)
    assert predict([samples], model, recipes, H200)[0] == pytest.approx(seconds, rel=2e-3)
    assert validate([samples], recipes, H200, how).p90_abs_error < 5e-3


def as_file(curve: str, samples: Samples, recipe: Recipe) -> Fit:
    model = fit([samples], {curve: recipe}, H200, Robustness())
    return as_fit(curve, [samples], model, recipe, validate([samples], {curve: recipe}, H200, Robustness()), "made up")


def test_a_refined_curve_keeps_its_other_coefficients() -> None:
    slot = decode_slot(300)
    seconds = made((slot,), {CURVE: dict(FORMS["decode_attention"].start)}, {CURVE: "decode_attention"})
    samples = Samples((slot,), np.zeros(300), seconds, np.arange(300) % 20)
    earlier = as_file(CURVE, samples, Recipe(form="decode_attention"))
    slower = replace(samples, measured_s=seconds + 5e-6)
    recipe = Recipe(form="decode_attention", refines=frozenset({"launch_s"})).after(earlier)
    found = fit([slower], {CURVE: recipe}, H200, Robustness(prior=1e-9))[CURVE].coefficients
    for name, value in earlier.coefficients.items():
        assert found[name] == pytest.approx(value + (5e-6 if name == "launch_s" else 0), rel=2e-2)


def test_rows_of_an_eager_host_give_the_host_its_time() -> None:
    rows = 200
    tokens = np.geomspace(16, 65536, rows)
    sizes = {
        "tokens": tokens, "elements": np.full(rows, 2e7), "element_bytes": np.full(rows, 2.0),
        "outputs": np.full(rows, 2048.0),
    }  # fmt: skip
    slot = Slot("mlapo_bf16_prefill", sizes)
    truth = {**FORMS["projection"].start, "host_s": 800e-6}
    times = FORMS["projection"].times(sizes, truth, H200)
    seconds = np.maximum(times.seconds, 800e-6)
    samples = Samples((slot,), np.zeros(rows), seconds, np.arange(rows) % 20, eager=True)
    recipes = {slot.curve: Recipe(form="projection")}
    found = fit([samples], recipes, H200, Robustness(prior=1e-6))[slot.curve].coefficients
    assert found["host_s"] == pytest.approx(800e-6, rel=0.05)
    # A graph launches without the host.
    (alone,) = predict([replace(samples, eager=False)], fit([samples], recipes, H200, Robustness()), recipes, H200)
    assert alone[0] < 100e-6


def test_a_written_fit_gives_the_same_times(tmp_path: Path) -> None:
    slot = decode_slot(300)
    seconds = made((slot,), {CURVE: dict(FORMS["decode_attention"].start)}, {CURVE: "decode_attention"})
    fitted = as_file(
        CURVE, Samples((slot,), np.zeros(300), seconds, np.arange(300) % 9), Recipe(form="decode_attention")
    )
    path = tmp_path / "fits.toml"
    path.write_text(fits_toml(Calibration(backend="sglang", device="h200_sxm", stages=(), fits={CURVE: fitted})))
    read = load_backend(str(path), "h200_sxm").fits[CURVE]
    kernel = Kernel(CURVE, ("qk",), {name: values[7] for name, values in slot.sizes.items()})
    one, other = (fitted_times(kernel, each, H200).times.seconds for each in (fitted, read))
    assert one == pytest.approx(other, rel=1e-4)


def context_table(folder: Path, *, system: str) -> None:
    rows = 24
    columns = repeated(
        MODULE, rows, isl=[1024, 2048, 4096] * 8, step=[0, 4096, 16384, 65536] * 6,
        op_name=["dsa_context_module", "dsa_context_module_skip_indexer"] * 12, batch_size=[1] * rows,
        latency=[1.0 + 0.1 * row for row in range(rows)],
    )  # fmt: skip
    write_table(folder, columns, "dsa_context_module", system=system)


@pytest.mark.parametrize(("system", "rows"), [("b200_sxm", 24), ("h200_sxm", 12)])
def test_untrusted_series_are_not_fitted(tmp_path: Path, system: str, rows: int) -> None:
    context_table(tmp_path, system=system)
    (stage,) = calibrate(tmp_path, device=system, backend="sglang").stages
    assert stage.rows == rows
    # Of the curves of the stage, those that the rows are made of.
    assert set(stage.curves) < set(MODULE_STAGES[1].recipes)
    assert "mlapo_bf16_prefill" in stage.curves
    assert "mlapo_fp8_block_prefill" not in stage.curves
