"""What this machine can do, measured by a few operators of torch: the figures of a device file.

Fits of ops price what they cover; peaks price the rest, and say how far from them the ops are.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import lazy_loader as lazy

from castoff.free_memory import available_bytes
from castoff.ops.program import Tensor

torch = lazy.load("torch")

# A product of (M, K) and (K, N), a vector that stays in caches, and a copy that does not.
PRODUCT_M, PRODUCT_N, PRODUCT_K = 256, 1024, 1024
VECTOR_ELEMENTS = 1 << 16
COPY_BYTES = 1 << 28
# A latent row in bf16.
ROW_ELEMENTS = 576
MATRIX_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
VECTOR_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """By castoff's names of dtypes. row_efficiency: of gathered rows beside a plain copy, at most 1."""

    description: str
    vendor: str
    num_cores: int
    memory_bytes: int
    host_memory_bytes: int
    matrix_flops_per_s: Mapping[str, float]
    vector_flops_per_s: Mapping[str, float]
    copy_bytes_per_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    row_efficiency: float


def measure_peaks(device: str) -> Peaks:
    """A few seconds of measuring."""
    with torch.inference_mode():
        matrix = {name: _matrix_rate(getattr(torch, dtype), device) for name, dtype in MATRIX_DTYPES.items()}
        vector = {name: _vector_rate(getattr(torch, dtype), device) for name, dtype in VECTOR_DTYPES.items()}
        copied, gathered = _copy_rates(device)
        to_device, to_host = (copied / 2, copied / 2) if device == "cpu" else _link_rates(device)
    # The reference multiplies both as fp32.
    matrix |= {"int8": matrix["fp32"], "fp8": matrix["fp32"]}
    host_bytes = _host_bytes()
    properties = None if device == "cpu" else torch.cuda.get_device_properties(0)
    return Peaks(
        description=_processor() if properties is None else str(properties.name),
        vendor="cpu" if properties is None else "nvidia",
        num_cores=(os.cpu_count() or 1) if properties is None else int(properties.multi_processor_count),
        memory_bytes=host_bytes if properties is None else int(properties.total_memory),
        host_memory_bytes=host_bytes,
        matrix_flops_per_s=matrix,
        vector_flops_per_s=vector,
        copy_bytes_per_s=copied,
        to_device_bytes_per_s=to_device,
        to_host_bytes_per_s=to_host,
        row_efficiency=min(gathered / copied, 1.0),
    )


def _seconds(work: Callable[[], object], device: str, repeats: int = 7) -> float:
    """Median time of some work, after one time that does not count."""
    return median([*_timed(work, device, repeats + 1)][1:])


def _timed(work: Callable[[], object], device: str, repeats: int) -> Iterator[float]:
    for _ in range(repeats):
        started = perf_counter()
        work()
        if device != "cpu":
            torch.accelerator.synchronize()
        yield perf_counter() - started


def _matrix_rate(dtype: Tensor, device: str) -> float:
    x_MK = torch.randn(PRODUCT_M, PRODUCT_K, device=device).to(dtype)
    weight_NK = torch.randn(PRODUCT_N, PRODUCT_K, device=device).to(dtype)
    seconds = _seconds(lambda: torch.nn.functional.linear(x_MK, weight_NK), device)
    return 2 * PRODUCT_M * PRODUCT_N * PRODUCT_K / seconds


def _vector_rate(dtype: Tensor, device: str) -> float:
    """A multiply-add per element."""
    x, y = (torch.randn(VECTOR_ELEMENTS, device=device).to(dtype) for _ in range(2))
    return 2 * VECTOR_ELEMENTS / _seconds(lambda: torch.add(x, y, alpha=2, out=x), device, repeats=31)


def _copy_rates(device: str) -> tuple[float, float]:
    """Bytes read and written per second by a copy, and by gathering rows."""
    rows = COPY_BYTES // (2 * ROW_ELEMENTS)
    source = torch.zeros(rows, ROW_ELEMENTS, dtype=torch.bfloat16, device=device)
    target = torch.zeros_like(source)
    order = torch.randperm(rows, device=device)
    moved = 2 * source.nbytes
    copied = moved / _seconds(lambda: target.copy_(source), device)
    return copied, moved / _seconds(lambda: torch.index_select(source, 0, order, out=target), device)


def _link_rates(device: str) -> tuple[float, float]:
    """Large copies to the device and back, from pinned memory."""
    here = torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    to_device = COPY_BYTES / _seconds(lambda: there.copy_(here), device)
    return to_device, COPY_BYTES / _seconds(lambda: here.copy_(there), device)


def _host_bytes() -> int:
    pages = os.sysconf_names.get("SC_PHYS_PAGES")
    total = None if pages is None else os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return total or available_bytes() or 1 << 34


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text(errors="replace").splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
