"""Kernels of ops on an accelerator, in the form of their references; Triton is imported when one runs.

This is the one place that imports `ops/triton/`.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.ops.program import Tensor
from castoff.spec.quant import AttentionAction, CacheFormat

if TYPE_CHECKING:
    from castoff.ops.offload_plan import PoolSizes

torch = lazy.load("torch")


@cache
def has_triton() -> bool:
    """Whether the kernels can be imported."""
    return find_spec("triton") is not None


def require_triton(op: str) -> None:
    """Raise CastoffError where the kernel of an op cannot be imported."""
    if not has_triton():
        raise CastoffError(
            f"{op} needs its Triton kernel on this device, and triton is not installed: pip install "
            "'castoff[run]' brings it on Linux"
        )


def plan_direct(
    topk_TK: Tensor, slot_mapping_T: Tensor, seq_lens_B: Tensor, committed_B: Tensor, request_slots_B: Tensor,
    ring_first_B: Tensor, tags_RNW: Tensor, used_RNW: Tensor, hands_RN: Tensor, marks_RN: Tensor,
    *, sizes: PoolSizes, lists: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `offload_plan.plan_direct`."""
    from castoff.ops.triton import plan_direct as kernels

    return kernels.plan_direct(
        topk_TK, slot_mapping_T, seq_lens_B, committed_B, request_slots_B, ring_first_B, tags_RNW, used_RNW, hands_RN,
        marks_RN, sizes,
    )  # fmt: skip


def plan_gather(
    topk_TK: Tensor, slot_mapping_T: Tensor, seq_lens_B: Tensor, committed_B: Tensor, request_slots_B: Tensor,
    ring_first_B: Tensor, tags_RNW: Tensor, used_RNW: Tensor, hands_RN: Tensor, marks_RN: Tensor,
    *, sizes: PoolSizes, lists: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `offload_plan.plan_gather`."""
    from castoff.ops.triton import plan_gather as kernels

    return kernels.plan_gather(topk_TK, slot_mapping_T, seq_lens_B, committed_B, request_slots_B, tags_RNW, sizes)


def plan_serve(
    topk_TK: Tensor, slot_mapping_T: Tensor, seq_lens_B: Tensor, committed_B: Tensor, request_slots_B: Tensor,
    ring_first_B: Tensor, tags_RNW: Tensor, used_RNW: Tensor, hands_RN: Tensor, marks_RN: Tensor,
    *, sizes: PoolSizes, lists: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `offload_plan.plan_serve`."""
    from castoff.ops.triton import plan_serve as kernels

    return kernels.plan_serve(
        topk_TK, slot_mapping_T, seq_lens_B, committed_B, request_slots_B, tags_RNW, hands_RN, sizes
    )


def install_metadata(
    request_slots_B: Tensor, ids_BX: Tensor, rows_BX: Tensor, counts_B: Tensor, tags_RNW: Tensor, hands_RN: Tensor,
    *, sizes: PoolSizes,
) -> tuple[()]:  # fmt: skip
    """As `offload_plan.install_metadata`."""
    from castoff.ops.triton import plan_serve as kernels

    kernels.install_metadata(ids_BX, rows_BX, counts_B, request_slots_B, tags_RNW, hands_RN)
    return ()


def fetch(
    host: Tensor, block_tables: Tensor, request_slots_B: Tensor, ids_BX: Tensor, to_rows_BX: Tensor, counts_B: Tensor,
    region: Tensor, staging: Tensor, *, sizes: PoolSizes,
) -> tuple[()]:  # fmt: skip
    """As `offload_rows.fetch`."""
    from castoff.ops.triton import rows as kernels

    kernels.offload_fetch(
        host, block_tables, request_slots_B, ids_BX, to_rows_BX, counts_B, region,
        staging if sizes.staging_rows else None, pool_rows=sizes.pool_rows, ring_tokens=sizes.ring_tokens,
    )  # fmt: skip
    return ()


def serve(host: Tensor, block_tables: Tensor, sources_TK: Tensor, region: Tensor, selection: Tensor) -> tuple[()]:
    """As `offload_rows.serve`."""
    from castoff.ops.triton import rows as kernels

    kernels.offload_serve(host, block_tables, sources_TK, region, selection)
    return ()


def install(selection: Tensor, to_rows_BX: Tensor, from_BX: Tensor, counts_B: Tensor, region: Tensor) -> tuple[()]:
    """As `offload_rows.install`."""
    from castoff.ops.triton import rows as kernels

    kernels.offload_install(selection, to_rows_BX, from_BX, counts_B, region)
    return ()


def write_to_host(region: Tensor, own_rows_T: Tensor, host: Tensor, slot_mapping_T: Tensor) -> tuple[()]:
    """As `offload_rows.write_to_host`."""
    from castoff.ops.triton import rows as kernels

    kernels.host_row_write(region, own_rows_T, host, slot_mapping_T)
    return ()


def attend_rows(
    q_THX: Tensor, stored: Tensor, rows_TK: Tensor, staging: Tensor | None, *, kv_lora_rank: int, softmax_scale: float,
    cache: CacheFormat,
) -> Tensor:  # fmt: skip
    """Latent results (T, H, R) of queries in the latent space over the rows that they name."""
    from castoff.ops.triton import attention as kernels

    formats: dict[AttentionAction, Literal["plain", "fp8", "int8"]] = {
        "DISABLED": "plain",
        "FP8": "fp8",
        "INT8": "int8",
    }
    out_THR, _ = kernels.sparse_attention(
        q_THX,
        stored,
        staging,
        rows_TK.to(torch.int32),
        kv_lora_rank=kv_lora_rank,
        softmax_scale=softmax_scale,
        row_format=formats[cache.action],
    )
    return out_THR
