"""What a calibration of this machine is written as: a device file, and a backend file for `castoff run` on it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from castoff.accuracy.fit_file import fits_lines
from castoff.accuracy.this_machine import DEVICE_NAME, MachineCalibration


def device_toml(result: MachineCalibration) -> str:
    """The machine as a device that stands alone."""
    peaks, source = result.peaks, f"source = {_text(result.source)}"
    lines = [
        "# Measured by `castoff calibrate --this-machine`.",
        f"name = {_text(DEVICE_NAME)}",
        f"vendor = {_text(peaks.vendor)}",
        f"description = {_text(f'{peaks.description}, {peaks.num_cores} cores')}",
        'default_backend = "castoff"',
        f"num_cores = {peaks.num_cores}",
        "",
        "[matrix_flops_per_s]",
        *_figures(peaks.matrix_flops_per_s),
        source,
        "",
        "[vector_flops_per_s]",
        *_figures(peaks.vector_flops_per_s),
        source,
        "",
        "[memory]",
        f"size_bytes = {peaks.memory_bytes}",
        *_figures({"bandwidth_bytes_per_s": peaks.copy_bytes_per_s}),
        source,
        "",
        "[host_link]",
        *_figures(
            {
                "to_device_bytes_per_s": peaks.to_device_bytes_per_s,
                "to_host_bytes_per_s": peaks.to_host_bytes_per_s,
                "latency_s": 0.0,
                "row_efficiency": peaks.row_efficiency,
            }
        ),
        "devices_per_link = 1",
        f"host_memory_bytes = {peaks.host_memory_bytes}",
        "devices_per_host = 1",
        'origin = "measured"',
        source,
    ]
    return "\n".join(lines) + "\n"


def backend_toml(result: MachineCalibration) -> str:
    """The backend `castoff` with fits of its ops."""
    lines = [
        "# Fitted by `castoff calibrate --this-machine`; it holds on the device of the file beside it.",
        f"name = {_text(f'castoff on {DEVICE_NAME}')}",
        f"description = {_text(f'castoff run with its ops fitted to decode steps of {result.model}')}",
        'extends = "castoff"',
        f"device = {_text(DEVICE_NAME)}",
        "",
        "[host_s_per_step]",
        f"prefill = {result.host_s:.6g}",
        f"decode = {result.host_s:.6g}",
        'origin = "calibrated"',
        f"source = {_text(f'{result.source}; a step beside its ops, of prefill taken to be that of decode')}",
        *fits_lines(result.fits),
    ]
    return "\n".join(lines) + "\n"


def _figures(figures: Mapping[str, float]) -> list[str]:
    return [f"{name} = {value:.6g}" for name, value in figures.items()]


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
