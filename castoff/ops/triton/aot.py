"""Every kernel compiled ahead of time for devices that need not be there, and what it takes of them.

    python -m castoff.ops.triton.aot sm_90 gfx942

prints a table for both targets, or for those that are named. TRITON_INTERPRET must not be set.
Sizes are those of a decode step of 128 requests with three draft tokens and a pool of 8192 tokens in sets of 16.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from castoff.ops.offload_plan import PoolSizes
from castoff.ops.triton.attention import RowFormat, sparse_attention_launch
from castoff.ops.triton.launch import Backend, Launch
from castoff.ops.triton.plan_direct import plan_direct_launch
from castoff.ops.triton.plan_gather import plan_gather_launch
from castoff.ops.triton.plan_serve import install_metadata_launch, plan_serve_launch
from castoff.ops.triton.rows import (
    host_row_write_launch,
    offload_fetch_launch,
    offload_install_launch,
    offload_serve_launch,
)
from castoff.spec.offload import PoolPolicy

_TYPES = {
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
}  # fmt: skip
_REQUESTS, _QUERIES, _TOPK, _BLOCK_TOKENS, _BLOCKS = 128, 4, 2048, 128, 512
_HEADS, _RANK, _ROPE = 64, 512, 64


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
    """What a kernel takes of a device. registers, stack_bytes (which spilled registers take): per thread.

    None where no tool is there to tell. assembly: PTX or AMD's.
    """

    kernel: str
    target: str
    threads: int
    shared_bytes: int
    registers: int | None
    stack_bytes: int | None
    assembly: str


def launches(backend: Backend) -> Iterator[tuple[str, Launch]]:
    """Every kernel, by name and variant, with meta tensors of real sizes."""
    yield from _plans(backend)
    for name, store in (("bf16", _rows(576, torch.bfloat16)), ("quantised", _rows(656, torch.uint8))):
        for kernel, launch in _copies(store):
            yield f"{kernel} {name}", launch
    for heads in (_HEADS, 16):
        for row_format in ("plain", "int8", "fp8"):
            yield f"sparse_attention {row_format} {heads} heads", _attention(row_format, heads, backend)


# One that fits one row of a decode step.
_POOL = PoolSizes(_REQUESTS, 512, 16, 64, _QUERIES * _TOPK, "fifo")


def _plans(backend: Backend) -> Iterator[tuple[str, Launch]]:
    topk = _ints(_REQUESTS * _QUERIES, _TOPK)
    slots, lengths = _longs(_REQUESTS * _QUERIES), _longs(_REQUESTS)
    for policy in get_args(PoolPolicy):
        sizes = replace(_POOL, policy=policy)
        pool, hands = _ints(_REQUESTS, sizes.sets, sizes.ways), _ints(_REQUESTS, sizes.sets)
        inputs = (topk, slots, lengths, lengths, lengths, lengths, pool, pool, hands, hands)
        yield f"plan_direct {policy}", plan_direct_launch(*inputs, sizes)[0]
    launch, outputs = plan_serve_launch(topk, slots, lengths, lengths, lengths, pool, hands, _POOL)
    yield "plan_serve", launch
    yield "install_metadata", install_metadata_launch(outputs[1], outputs[2], outputs[4], lengths, pool, hands)
    buffers = replace(_POOL, policy="previous", sets=_QUERIES, ways=_TOPK)
    tags = _ints(_REQUESTS, _QUERIES, _TOPK)
    yield "plan_gather", plan_gather_launch(topk, slots, lengths, lengths, lengths, tags, buffers)[0]


def _copies(store: torch.Tensor) -> Iterator[tuple[str, Launch]]:
    host = store.new_empty(_BLOCKS, _BLOCK_TOKENS, store.shape[1])
    tables, slots = _longs(_REQUESTS, _BLOCKS), _longs(_REQUESTS)
    entries, counts = _ints(_REQUESTS, _QUERIES * _TOPK), _ints(_REQUESTS)
    selected, tokens = _ints(_REQUESTS * _QUERIES, _TOPK), _longs(_REQUESTS * _QUERIES)
    pool_rows = _REQUESTS * 8192
    yield (
        "offload_fetch",
        offload_fetch_launch(
            host, tables, slots, entries, entries, counts, store, store, pool_rows=pool_rows, ring_tokens=64
        ),
    )
    yield "offload_serve", offload_serve_launch(host, tables, selected, store, store)
    yield "offload_install", offload_install_launch(store, entries, entries, counts, store)
    yield "host_row_write", host_row_write_launch(store, tokens, host, tokens)


def _attention(row_format: RowFormat, heads: int, backend: Backend) -> Launch:
    store = _rows(576, torch.bfloat16) if row_format == "plain" else _rows(656, torch.uint8)
    q = _rows(_RANK + _ROPE, torch.bfloat16).new_empty(_REQUESTS * _QUERIES, heads, _RANK + _ROPE)
    return sparse_attention_launch(
        q, store, store, _ints(_REQUESTS * _QUERIES, _TOPK),
        kv_lora_rank=_RANK, softmax_scale=1 / 16, row_format=row_format, backend=backend,
    )[0]  # fmt: skip


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _longs(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(_REQUESTS * (8192 + 64) + 1, width, dtype=dtype, device="meta")


def compile_launch(name: str, launch: Launch, target: Target) -> Compiled:
    """Compile a launch as a device of `target` would on its first run; its tensors may be on the meta device."""
    kernel, arguments = launch.kernel, launch.arguments
    source = ASTSource(
        fn=kernel,
        signature={p.name: "constexpr" if p.is_constexpr else _type(arguments[p.name]) for p in kernel.params},
        constexprs={(p.num,): arguments[p.name] for p in kernel.params if p.is_constexpr},
        attrs={
            (p.num,): [["tt.divisibility", 16]]
            for p in kernel.params
            if not p.is_constexpr and _divides_by_16(arguments[p.name])
        },
    )
    built = triton.compile(source, target=target.gpu, options=launch.options(target.backend))
    registers, stack_bytes = _resources(built.asm, target)
    return Compiled(
        kernel=name,
        target=target.name,
        threads=launch.threads,
        shared_bytes=built.metadata.shared,
        registers=registers,
        stack_bytes=stack_bytes,
        assembly=built.asm["amdgcn" if target.backend == "hip" else "ptx"],
    )


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int), f"a kernel takes tensors and numbers, got {value!r}"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _divides_by_16(value: Any) -> bool:
    """What Triton looks at when it picks a variant; tensors begin at such an address."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def _resources(asm: Mapping[str, Any], target: Target) -> tuple[int | None, int | None]:
    """Registers and stack bytes of a thread."""
    if target.backend == "hip":
        found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", asm["amdgcn"]))
        return int(found["vgpr_count"]), int(found["private_segment_fixed_size"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(asm["cubin"])
        command = [str(tool), "--dump-resource-usage", str(cubin)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return int(found["REG"]), int(found["STACK"])


def compile_all(target: Target) -> list[Compiled]:
    """All kernels for one target."""
    return [compile_launch(name, launch, target) for name, launch in launches(target.backend)]


def table(rows: list[Compiled]) -> str:
    """One line per kernel and target."""
    cells: list[tuple[str, ...]] = [("kernel", "target", "threads", "shared bytes", "registers", "stack bytes")]
    for row in rows:
        counts = (row.threads, row.shared_bytes, row.registers, row.stack_bytes)
        cells.append((row.kernel, row.target, *("unknown" if count is None else str(count) for count in counts)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def main() -> None:
    """Print the table of the targets that are named, or of all."""
    chosen = [target for target in TARGETS if not sys.argv[1:] or target.name in sys.argv[1:]]
    print(table([compiled for target in chosen for compiled in compile_all(target)]))


if __name__ == "__main__":
    main()
