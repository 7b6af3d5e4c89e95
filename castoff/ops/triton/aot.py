"""Every kernel compiled ahead of time for devices that need not be there, and what it takes of them.

`python -m castoff.ops.triton.aot` prints a table. Needs no device, and TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from castoff.ops.triton.launch import Backend, Launch

_TYPES = {
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device to compile for. shared_bytes: the most that one program may have."""

    name: str
    backend: Backend
    gpu: GPUTarget
    shared_bytes: int


TARGETS = (
    Target(name="sm_90", backend="cuda", gpu=GPUTarget("cuda", 90, 32), shared_bytes=227 * 1024),
    Target(name="gfx942", backend="hip", gpu=GPUTarget("hip", "gfx942", 64), shared_bytes=64 * 1024),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a kernel takes of a device; spills in registers or bytes, None where the tools do not tell."""

    kernel: str
    target: Target
    num_warps: int
    shared_bytes: int
    registers: int | None
    spilled_bytes: int | None
    assembly: str


def compile_launch(launch: Launch, target: Target) -> Compiled:
    """Compile a launch as a device of `target` would on its first run; tensors may be on the meta device."""
    kernel = launch.kernel
    constants = {(p.num,): launch.arguments[p.name] for p in kernel.params if p.is_constexpr}
    signature = {
        p.name: "constexpr" if p.is_constexpr else _type(launch.arguments[p.name]) for p in kernel.params
    }
    aligned = {
        (p.num,): [["tt.divisibility", 16]]
        for p in kernel.params
        if not p.is_constexpr and _aligned(launch.arguments[p.name])
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    built = triton.compile(source, target=target.gpu, options=dict(launch.options))
    shared: int = built.metadata.shared
    return Compiled(
        kernel=kernel.__name__,
        target=target,
        num_warps=launch.num_warps,
        shared_bytes=shared,
        **_resources(built.asm, target),
    )


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int), f"a kernel takes tensors and numbers, got {value!r}"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _aligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def _resources(asm: Mapping[str, Any], target: Target) -> dict[str, Any]:
    if target.backend == "hip":
        text = asm["amdgcn"]
        registers = int(re.findall(r"\.vgpr_count:\s*(\d+)", text)[0])
        return {"registers": registers, "spilled_bytes": int(re.findall(r"\.private_segment_fixed_size:\s*(\d+)", text)[0]), "assembly": text}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(asm["cubin"])
        text = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": usage["REG"], "spilled_bytes": usage["STACK"] + usage["LOCAL"], "assembly": asm["ptx"]}
