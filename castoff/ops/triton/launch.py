"""A kernel with all that it is launched with, as a value: run it here, or compile it for a device elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

Backend = Literal["cuda", "hip"]
# Threads that run in step.
_WARP_THREADS: Mapping[Backend, int] = {"cuda": 32, "hip": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch: `kernel` over `grid` programs of `threads` threads each.

    arguments: every argument of the kernel by name, constants among them.
    stages: how many steps of a loop over loads and products overlap.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    threads: int
    stages: int = 1

    def options(self, backend: Backend) -> dict[str, Any]:
        """How it is compiled. Products are fused with sums, whatever the default of a version of Triton."""
        num_warps = max(1, self.threads // _WARP_THREADS[backend])
        return {"num_warps": num_warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def run(self) -> None:
        """Launch on the current stream; a grid without programs is no launch."""
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, **self.options(current_backend()))


def current_backend() -> Backend:
    """What torch was built for."""
    return "hip" if torch.version.hip else "cuda"


def power_of_two(number: int) -> int:
    """The least power of two that is no less than `number`."""
    return 1 << max(0, number - 1).bit_length()


def ceil_div(number: int, divisor: int) -> int:
    """number / divisor, rounded up."""
    return -(-number // divisor)
