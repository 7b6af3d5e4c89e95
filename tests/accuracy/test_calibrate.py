"""Calibration by tables: what it refuses, and what it does not fit."""

from pathlib import Path

import numpy as np
import pytest

from castoff.accuracy.calibrate import calibrate
from castoff.errors import CastoffError
from tests.accuracy.measured import GEMM, repeated, write_table
from tests.cli.commands import exit_status

SITES = {"n": [1024, 2048, 4096] * 8, "k": [2048] * 24, "m": sorted([2**power for power in range(1, 9)] * 3)}
FLOPS = 2.0 * np.prod([SITES["m"], SITES["n"], SITES["k"]], axis=0)
TIMED = repeated(GEMM, 24, **SITES, latency=(0.005 + 1e3 * FLOPS / 500e12).tolist())


def test_it_fits_what_there_is(tmp_path: Path) -> None:
    write_table(tmp_path, TIMED, "gemm")
    result = calibrate(tmp_path, device="h200_sxm", backend="sglang")
    assert set(result.fits) == {"matmul_bf16"}
    fit = result.fits["matmul_bf16"]
    assert (fit.rows, fit.origin, fit.ranges["n"]) == (24, "calibrated", (1024, 4096))
    assert fit.median_abs_error < 0.1


def test_one_site_cannot_be_checked(tmp_path: Path) -> None:
    write_table(tmp_path, repeated(GEMM, 3, m=[1, 2, 4], latency=[0.1, 0.1, 0.1]), "gemm")
    with pytest.raises(CastoffError, match="all 3 rows are of one site"):
        calibrate(tmp_path, device="h200_sxm", backend="sglang")


@pytest.mark.parametrize("latency", [0.0, 1e300, 1e-300])
def test_no_row_leaves_the_file_alone(tmp_path: Path, latency: float, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(tmp_path, {**TIMED, "latency": [latency] * 24}, "gemm")
    kept = tmp_path / "kept.toml"
    kept.write_text("before")
    arguments = ("--tables", str(tmp_path), "--device", "h200_sxm", "--backend", "sglang", "-o", str(kept))
    assert exit_status("calibrate", *arguments) == 2
    assert "no row of backend sglang on device h200_sxm" in capsys.readouterr().err
    assert kept.read_text() == "before"


def test_rows_that_were_kept_for_their_time_are_not_fitted(tmp_path: Path) -> None:
    write_table(tmp_path, {**TIMED, "gemm_dtype": ["fp8_block"] * 24}, "gemm", backend="vllm")
    with pytest.raises(CastoffError, match="no row of backend vllm"):
        calibrate(tmp_path, device="h200_sxm", backend="vllm")
