"""Forms of matrix products, (m, k) times (k, n): by compute and bytes, or by tiles that are dealt to cores in waves."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from castoff.casting.forms.form import Coefficients, Form, Sizes, Times, smooth_maximum
from castoff.dims import Array, Dim
from castoff.ops.work import DTYPE_BYTES
from castoff.spec.device import Device

SIZES = ("m", "n", "k")
OUT_BYTES = 2.0
K_STEP = 128
# Tiles that the kernel may take: rows m by columns n. Larger ones need m beyond the smaller.
_TILES = [(m, n) for m in (64, 128, 256) for n in range(16, 161, 16)]
_TILE_M_C1, _TILE_N_C1 = (np.array(edges, dtype=np.float64)[:, None] for edges in zip(*_TILES, strict=True))
# Among tiles that need as many waves and fill the last one alike, the smallest is taken.
_AREA_WEIGHT = 1e-9
_HINGES = (32.0, 64.0, 97.0, 128.0)


def by_peaks(dtype: str) -> Form:
    """Compute and memory at shares of the peaks, overlapped."""

    def times(sizes: Sizes, c: Coefficients, device: Device) -> Times:
        m, n, k = sizes["m"], sizes["n"], sizes["k"]
        compute = 2.0 * m * n * k / (device.matrix_flops_per_s[dtype] * c["compute_efficiency"])
        memory = _bytes(m, n, k, dtype) / (device.memory.bandwidth_bytes_per_s * c["memory_efficiency"])
        busy = smooth_maximum(compute, memory, c["overlap"])
        return Times(c["launch_s"] + busy, compute, memory, c["launch_s"])

    return Form(times, {"launch_s": 3e-6, "compute_efficiency": 0.7, "memory_efficiency": 0.8, "overlap": 2.0}, SIZES)


def by_tiles(dtype: str) -> Form:
    """Waves of tiles, each of which takes its multiplications and its loads step by step along k, beside the bytes.

    The tile is that with the fewest waves, and of those the one that fills the last wave best, as DeepGEMM chooses.
    """

    def times(sizes: Sizes, c: Coefficients, device: Device) -> Times:
        m, n, k = sizes["m"], sizes["n"], sizes["k"]
        tile_m, tile_n, waves, _ = chosen_tile(m, n, _cores(device))
        rate = device.matrix_flops_per_s[dtype] / _cores(device) / 2 * c["compute_efficiency"]
        step = K_STEP * (tile_m * tile_n + K_STEP * (c["load"] * (tile_m + tile_n) + c["step"] * K_STEP)) / rate
        compute = waves * (_steps(k) + c["prologue_steps"]) * step
        memory = (_bytes(m, n, k, dtype) + c["ramp_bytes"]) / (
            device.memory.bandwidth_bytes_per_s * c["memory_efficiency"]
        )
        launch = c["launch_s"] + c["depth_s"] * np.log1p(k / 1024)
        return Times(launch + smooth_maximum(compute, memory, c["overlap"]), compute, memory, launch)

    start = {
        "launch_s": 3e-6, "depth_s": 5e-7, "compute_efficiency": 1.0, "load": 0.3, "step": 0.1, "prologue_steps": 3.0,
        "memory_efficiency": 0.85, "ramp_bytes": 2e6, "overlap": 2.0,
    }  # fmt: skip
    return Form(times, start, SIZES, features=tile_features)


def chosen_tile(m: Dim, n: Dim, cores: int) -> tuple[Dim, Dim, Dim, Dim]:
    """Rows and columns of the tile, waves, and the share of the cores that the last one uses."""
    shape = np.broadcast_shapes(np.shape(m), np.shape(n))
    m_N, n_N = (np.broadcast_to(np.asarray(size, dtype=np.float64), shape).ravel() for size in (m, n))
    # Tiles depend on m by its blocks of 64 alone.
    pairs_NX, places_N = np.unique(np.stack([np.ceil(m_N / 64), n_N]), axis=1, return_inverse=True)
    found = [values[places_N].reshape(shape) for values in _best_tiles(64 * pairs_NX[0], pairs_NX[1], cores)]
    tile_m, tile_n, waves, fill = (values if shape else float(values) for values in found)
    return tile_m, tile_n, waves, fill


def _best_tiles(m_N: Array, n_N: Array, cores: int) -> tuple[Array, Array, Array, Array]:
    blocks_CN = np.ceil(m_N / _TILE_M_C1) * np.ceil(n_N / _TILE_N_C1)
    waves_CN = np.ceil(blocks_CN / cores)
    fill_CN = blocks_CN / cores - (waves_CN - 1)
    is_open_CN = (_TILE_M_C1 == 64) | (m_N > _TILE_M_C1 / 2)
    cost_CN = np.where(is_open_CN, waves_CN - 0.5 * fill_CN + _AREA_WEIGHT * _TILE_M_C1 * _TILE_N_C1, np.inf)
    best_N = np.argmin(cost_CN, axis=0)
    at = (best_N, np.arange(len(m_N)))
    return _TILE_M_C1[best_N, 0], _TILE_N_C1[best_N, 0], waves_CN[at], fill_CN[at]


def tile_features(sizes: Sizes, device: Device) -> Mapping[str, Dim]:
    """What the choice of a tile leaves in the time, as terms of its logarithm."""
    tile_m, tile_n, waves, fill = chosen_tile(sizes["m"], sizes["n"], _cores(device))
    columns, last, number = np.log2(tile_n), np.log(fill), np.log2(waves)
    return {
        # Over a tile in the middle, so that no constant hides in them.
        "columns": columns - 6.0,
        "rows": np.log2(tile_m) - 7.0,
        "last_wave": last,
        "last_of_two": last * (waves < 3),
        "waves": number,
        **{f"columns_above_{edge:g}": np.maximum(columns - np.log2(edge), 0.0) for edge in _HINGES},
        "columns_of_128": (tile_m == 128) * columns,
        "columns_of_256": (tile_m == 256) * columns,
        "columns_off_32": 1.0 * (tile_n % 32 != 0),
        "columns_off_64": 1.0 * (tile_n % 64 != 0),
    }


def _steps(k: Dim) -> Dim:
    steps: Dim = np.ceil(k / K_STEP)
    return steps


def _bytes(m: Dim, n: Dim, k: Dim, dtype: str) -> Dim:
    return DTYPE_BYTES[dtype] * (m * k + k * n) + OUT_BYTES * m * n


def _cores(device: Device) -> int:
    return device.num_cores or 1


MATMUL, MATMUL_FP8, MATMUL_FP4 = (by_peaks(dtype) for dtype in ("bf16", "fp8", "fp4"))
MATMUL_TILES_FP8 = by_tiles("fp8")
