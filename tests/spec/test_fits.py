"""Fits of backend files: what they say, what they may not say, and where they hold."""

from pathlib import Path

import numpy as np
import pytest

from castoff.casting.curves import check_fits
from castoff.errors import CastoffError
from castoff.spec.backend import backend_fits, fitted_device, load_backend, shipped_backends
from castoff.spec.device import load_device, shipped_devices
from tests.casting.fitted import BF16, GRID, MEASURED, TIMED, fitted_backend


def test_a_fit(tmp_path: Path) -> None:
    path = fitted_backend(tmp_path, BF16 + GRID)
    backend = load_backend(path, "h200_sxm")
    check_fits(backend, load_device("h200_sxm"))
    fit = backend.fits["matmul_bf16"]
    assert fit.ranges["m"] == (1, 4096)
    assert fit.correction is not None
    assert fit.correction.axes == ("m", "n")
    assert np.exp(fit.correction.knots[0]) == pytest.approx([1, 100])
    assert fit.correction.values.tolist() == [[0.1, 0.1], [0.2, 0.2]]
    assert backend.sources["fits.matmul_bf16"] == "made up"
    assert backend.curves == load_backend("nvidia").curves
    assert [(device, list(fits)) for device, fits in backend_fits(path).items()] == [("h200_sxm", ["matmul_bf16"])]


def test_a_file_holds_on_its_device(tmp_path: Path) -> None:
    path = fitted_backend(tmp_path)
    with pytest.raises(CastoffError, match=r"device is h200_sxm: its fits do not hold on b200_sxm"):
        load_backend(path, "b200_sxm")
    assert fitted_device(path) == "h200_sxm"
    assert fitted_device("nvidia") is None


def test_fits_name_their_device(tmp_path: Path) -> None:
    path = fitted_backend(tmp_path)
    Path(path).write_text(Path(path).read_text().replace('device = "h200_sxm"\n', ""))
    with pytest.raises(CastoffError, match=r"device is missing: it is the one that the file's \[fits\] hold on"):
        load_backend(path, "h200_sxm")


def test_files_extend_each_other(tmp_path: Path) -> None:
    below = fitted_backend(tmp_path, name="below.toml")
    above = tmp_path / "above.toml"
    above.write_text(
        f'name = "above"\ndescription = "x"\nextends = "{below}"\n' + BF16.replace("matmul_bf16", "matmul_fp8_block")
    )
    backend = load_backend(str(above), "h200_sxm")
    assert (backend.name, set(backend.fits)) == ("above", {"matmul_bf16", "matmul_fp8_block"})
    assert fitted_device(str(above)) == "h200_sxm"
    with pytest.raises(CastoffError, match="do not hold on h100_sxm"):
        load_backend(str(above), "h100_sxm")
    circle = tmp_path / "circle.toml"
    circle.write_text(f'name = "c"\ndescription = "x"\nextends = "{circle}"\n')
    with pytest.raises(CastoffError, match="leads through more than 5 files"):
        load_backend(str(circle))


def test_a_fit_of_another_backend(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    head = 'name = "own"\ndescription = "x"\nextends = "nvidia"\n'
    own.write_text(head + '[fits.all_reduce]\nof = "sglang"\n')
    fits = load_backend(str(own), "h200_sxm").fits
    assert list(fits) == ["all_reduce"]
    assert fits["all_reduce"].coefficients == load_backend("sglang", "h200_sxm").fits["all_reduce"].coefficients
    assert load_backend(str(own)).fits == load_backend(str(own), "ATLAS_800_A3_752T_128G_DIE").fits == {}
    for given, message in (
        ('of = "sgl"', "sgl"),
        (f'of = "{own}"', "must be a backend with a fit of its own"),
        ('of = "sglang"\nrows = 3', "unknown key 'rows'"),
        ('of = "nvidia"', "must be a backend with a fit of all_reduce, got 'nvidia'"),
    ):
        own.write_text(head + f"[fits.all_reduce]\n{given}\n")
        with pytest.raises(CastoffError, match=message):
            load_backend(str(own), "h200_sxm")


def test_products_of_vllm_are_those_of_sglang() -> None:
    for device in ("h100_sxm", "h200_sxm", "b200_sxm"):
        ours, theirs = (load_backend(name, device).fits["matmul_fp8_block"] for name in ("vllm", "sglang"))
        assert ours.coefficients == theirs.coefficients


@pytest.mark.parametrize("name", shipped_backends())
def test_what_is_shipped_can_be_priced(name: str) -> None:
    assert load_backend(name).fits == {}
    for device in shipped_devices():
        check_fits(load_backend(name, device), load_device(device))


def refused(folder: Path, text: str, given: str, instead: str, message: str) -> None:
    """A file of these fits, changed in one place, is refused with a sentence."""
    assert given in text
    path = fitted_backend(folder, text.replace(given, instead))
    with pytest.raises(CastoffError, match=message):
        check_fits(load_backend(path, "h200_sxm"), load_device("h200_sxm"))


@pytest.mark.parametrize(
    ("given", "instead", "message"),
    [
        ("m = [1, 4096]", "m = [4096, 1]", "ranges.m must be the least and the largest value"),
        ("m = [1, 4096]", "q = [1, 4096]", "the sizes of matmul are m, n, k, got q"),
        ("overlap = 20", "overlap = -1", "overlap"),
        ("m = [1, 4096], ", "", "the sizes of matmul are m, n, k, got n, k"),
        ("compute_efficiency = 0.5", "compute_efficiency = 0", "compute_efficiency must be"),
        ("axes = { m = [1, 100]", "axes = { z = [1, 100]", "correction.axes must be of m, n, k, got z"),
        ("rows = 100", "features = { tall = 1 }\nrows = 100", "features: the form matmul has none, got tall"),
        ('origin = "calibrated"', 'origin = "guessed"', "origin must be one of measured, calibrated, assumed"),
        ("overlap = 20 }", "overlap = 20, more = 1 }", "coefficients must be launch_s, compute_efficiency"),
        ('form = "matmul"', 'form = "cube"', "form must be one of matmul"),
        ("axes = { m = [1, 100]", "axes = { m = [100, 1]", "must be two or more ascending numbers above 0"),
        ("axes = { m = [1, 100]", "axes = { m = [1]", "must be two or more ascending numbers above 0"),
        ("values = [0.1, 0.1, 0.2, 0.2]", "values = [0.1]", "must be 4 numbers"),
        ("matmul_bf16.correction", "matmul_bf16.measured", "unknown key 'values'"),
        ('origin = "calibrated"', 'origin = "measured"', "is measured only where there are seconds"),
        ("values = [0.1, 0.1, 0.2, 0.2]", "values = [nan, 0.1, 0.2, 0.2]", "values"),
        ("values = [0.1, 0.1, 0.2, 0.2]", "values = [9, 0.1, 0.2, 0.2]", "must be logarithms of factors"),
    ],
)
def test_faults(tmp_path: Path, given: str, instead: str, message: str) -> None:
    refused(tmp_path, BF16 + GRID, given, instead, message)


@pytest.mark.parametrize(
    ("given", "instead", "message"),
    [
        ("seconds = [1e-5", "seconds = [0", "seconds must be from 1e-09 to 1000, got"),
        ("seconds = [1e-5", "seconds = [1e5", "seconds must be from 1e-09 to 1000, got"),
        ("2e-5, 4e-5, ", "", "must be 6 numbers"),
        ("axes = { m", "axes = { rows", "measured.axes must be of m, n, k, got rows"),
        ("seconds =", "values =", "unknown key 'values'"),
        ("m = [16, 4096]", "m = [8, 4096]", "ranges.m must lie between the measured 16 and 4096, got 8 to 4096"),
    ],
)
def test_faults_of_measured_times(tmp_path: Path, given: str, instead: str, message: str) -> None:
    refused(tmp_path, TIMED + MEASURED, given, instead, message)


def test_times_stand_without_a_correction(tmp_path: Path) -> None:
    with pytest.raises(CastoffError, match="measured must be without correction"):
        load_backend(fitted_backend(tmp_path, TIMED + GRID + MEASURED), "h200_sxm")
