"""Latent attention over rows that are given by code, wherever they lie.

Axes: T tokens, H heads, R kv_lora_rank, P qk_rope, K top-k columns, D width of a stored row.

One program takes one token and a block of its heads through the token's rows in rank order, with a running softmax in
fp32. So what it computes depends on the values and the order of the rows, and not on where they lie.
Rows of a quantised cache are multiplied by their scales and rounded to the type of the query, as the reference does.
"""

from __future__ import annotations

from math import gcd
from typing import Literal

import torch
import triton
import triton.language as tl

from castoff.ops.triton.launch import Backend, Launch, ceil_div, current_backend, power_of_two
from castoff.ops.triton.sets import NONE
from castoff.spec.quant import LATENT_SCALE_TILE

RowFormat = Literal["plain", "int8", "fp8"]

_LOG2_E = 1.4426950408889634
# Products are of blocks of at least so many rows and columns.
_LEAST_BLOCK = 16


@triton.jit
def _pick(
    region_ptr, staging_ptr, code_N, layer_rows, STRIDE: tl.constexpr, STAGED: tl.constexpr, ALIGNMENT: tl.constexpr
):  # fmt: skip
    """Addresses of rows by code, all of them multiples of ALIGNMENT."""
    row_ptr = region_ptr + code_N * STRIDE
    if STAGED:
        row_ptr = tl.where(code_N < layer_rows, row_ptr, staging_ptr + (code_N - layer_rows) * STRIDE)
    # Triton may lose sight of it in a choice between two pointers, and then reads number by number.
    return tl.multiple_of(row_ptr, ALIGNMENT)


@triton.jit
def _dequantize(value_NR, scale_NC, FORMAT: tl.constexpr, TILE: tl.constexpr):
    """Values times the scales of their tiles, in fp32."""
    if FORMAT == "fp8":
        value_NR = value_NR.to(tl.float8e4nv, bitcast=True)
    ROWS: tl.constexpr = value_NR.shape[0]
    RANK: tl.constexpr = value_NR.shape[1]
    value_NCV = tl.reshape(value_NR.to(tl.float32), (ROWS, RANK // TILE, TILE))
    return tl.reshape(value_NCV * scale_NC[:, :, None], (ROWS, RANK))


@triton.jit
def sparse_attention_kernel(
    q_ptr, rows_ptr, out_ptr, lse_ptr,
    values_ptr, keys_ptr, scales_ptr, staged_values_ptr, staged_keys_ptr, staged_scales_ptr,
    layer_rows, heads, scale_log2,
    TOPK: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr, STAGED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    VALUE_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, KEY_START: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, SCALE_START: tl.constexpr, SCALE_TILE: tl.constexpr,
    RANK_POW2: tl.constexpr, ROPE_POW2: tl.constexpr, TOPK_POW2: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Programs (token, block of HEADS heads) over ROWS rows at a time."""
    token = tl.program_id(0).to(tl.int64)
    head_H = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    rank_R = tl.arange(0, RANK_POW2)
    rope_P = tl.arange(0, ROPE_POW2)
    dtype = q_ptr.dtype.element_ty
    q_ptr += token * heads * (RANK + ROPE)
    rows_ptr += token * TOPK
    q_at_H = (head_H * (RANK + ROPE))[:, None]
    q_HR = tl.load(q_ptr + q_at_H + rank_R[None, :], mask=(head_H < heads)[:, None] & (rank_R < RANK)[None, :], other=0)
    q_HP = tl.load(
        q_ptr + q_at_H + RANK + rope_P[None, :], mask=(head_H < heads)[:, None] & (rope_P < ROPE)[None, :], other=0
    )
    # Rows end in a run of columns without one, which may be most of them.
    column_K = tl.arange(0, TOPK_POW2)
    code_K = tl.load(rows_ptr + column_K, mask=column_K < TOPK, other=NONE)
    columns = tl.max(tl.where(code_K >= 0, column_K + 1, 0))

    most_H = tl.full((HEADS,), float("-inf"), tl.float32)
    sum_H = tl.full((HEADS,), 0.0, tl.float32)
    out_HR = tl.full((HEADS, RANK_POW2), 0.0, tl.float32)
    for start in range(0, columns, ROWS):
        column_N = start + tl.arange(0, ROWS)
        code_N = tl.load(rows_ptr + column_N, mask=column_N < columns, other=NONE).to(tl.int64)
        read_N = code_N >= 0
        value_N = _pick(values_ptr, staged_values_ptr, code_N, layer_rows, VALUE_STRIDE, STAGED, ALIGNMENT)
        key_N = _pick(keys_ptr, staged_keys_ptr, code_N, layer_rows, KEY_STRIDE, STAGED, ALIGNMENT)
        value_NR = tl.load(value_N[:, None] + rank_R[None, :], mask=read_N[:, None] & (rank_R < RANK)[None, :], other=0)
        key_NP = tl.load(
            key_N[:, None] + KEY_START + rope_P[None, :], mask=read_N[:, None] & (rope_P < ROPE)[None, :], other=0
        ).to(dtype)
        if FORMAT != "plain":
            tile_C = tl.arange(0, RANK_POW2 // SCALE_TILE)
            scale_N = _pick(scales_ptr, staged_scales_ptr, code_N, layer_rows, SCALE_STRIDE, STAGED, ALIGNMENT)
            scale_NC = tl.load(
                scale_N[:, None] + SCALE_START + tile_C[None, :],
                mask=read_N[:, None] & (tile_C * SCALE_TILE < RANK)[None, :], other=0,
            )  # fmt: skip
            value_NR = _dequantize(value_NR, scale_NC, FORMAT, SCALE_TILE)
        value_NR = value_NR.to(dtype)
        score_HN = tl.dot(q_HP, tl.trans(key_NP), input_precision="ieee")
        score_HN = tl.dot(q_HR, tl.trans(value_NR), score_HN, input_precision="ieee")
        score_HN = tl.where(read_N[None, :], score_HN * scale_log2, float("-inf"))
        more_H = tl.maximum(most_H, tl.max(score_HN, axis=1))
        # A block without a row leaves the most at minus infinity, from which nothing may be subtracted.
        base_H = tl.where(more_H == float("-inf"), 0.0, more_H)
        weight_HN = tl.exp2(score_HN - base_H[:, None])
        shrink_H = tl.exp2(most_H - base_H)
        sum_H = sum_H * shrink_H + tl.sum(weight_HN, axis=1)
        out_HR = tl.dot(weight_HN.to(dtype), value_NR, out_HR * shrink_H[:, None], input_precision="ieee")
        most_H = more_H
    out_HR = out_HR / tl.where(sum_H > 0, sum_H, 1.0)[:, None]
    out_ptr += token * heads * RANK
    out_mask_HR = (head_H < heads)[:, None] & (rank_R < RANK)[None, :]
    tl.store(out_ptr + (head_H * RANK)[:, None] + rank_R[None, :], out_HR.to(dtype), mask=out_mask_HR)
    lse_H = (most_H + tl.log2(tl.where(sum_H > 0, sum_H, 1.0))) * 0.6931471805599453
    tl.store(lse_ptr + token * heads + head_H, lse_H, mask=head_H < heads)


def _stores(
    store_LD: torch.Tensor, rank: int, rope: int, row_format: RowFormat
) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:
    """A store as values, keys and scales, and where in a row each of them stands."""
    width = store_LD.shape[-1]
    if row_format == "plain":
        assert width == rank + rope, f"a plain row has {rank} + {rope} numbers, got {width}"
        places = {"VALUE_STRIDE": width, "KEY_STRIDE": width, "KEY_START": rank, "SCALE_STRIDE": 0, "SCALE_START": 0}
        return (store_LD, store_LD, store_LD), places
    scale_bytes = 4 * (rank // LATENT_SCALE_TILE)
    assert rank % LATENT_SCALE_TILE == 0, f"scales are of {LATENT_SCALE_TILE} values, and a row has {rank}"
    assert width == rank + scale_bytes + 2 * rope, f"a quantised row of {rank} + {rope} numbers, got {width} bytes"
    views = (
        store_LD.view(torch.int8 if row_format == "int8" else torch.uint8),
        store_LD.view(torch.bfloat16),
        store_LD.view(torch.float32),
    )
    places = {
        "VALUE_STRIDE": width, "KEY_STRIDE": width // 2, "KEY_START": (rank + scale_bytes) // 2,
        "SCALE_STRIDE": width // 4, "SCALE_START": rank // 4,
    }  # fmt: skip
    return views, places


def _alignment(*stores: torch.Tensor | None) -> int:
    """The largest power of two up to 16 bytes of which all rows' addresses are multiples."""
    numbers = [
        number
        for store in stores
        if store is not None
        for number in (store.shape[-1] * store.element_size(), store.data_ptr())
    ]
    return gcd(16, *numbers)


def _blocks(heads: int, element_bytes: int, row_format: RowFormat, backend: Backend) -> dict[str, int]:
    """Heads and rows of a program, by what registers hold and by 227 KiB of shared memory, or 64 on hip.

    Hopper's products have 64 rows or more; smaller ones are those of older devices, of 16.
    """
    if element_bytes > 2:
        return {"HEADS": _LEAST_BLOCK, "ROWS": _LEAST_BLOCK}
    most_heads, rows = (64, 32) if backend == "cuda" else (32, 32 if row_format == "plain" else 16)
    return {"HEADS": _LEAST_BLOCK if heads <= _LEAST_BLOCK else most_heads, "ROWS": rows}


def sparse_attention_launch(
    q_THD: torch.Tensor, region_LD: torch.Tensor, staging_GD: torch.Tensor | None, rows_TK: torch.Tensor,
    *, kv_lora_rank: int, softmax_scale: float, row_format: RowFormat, backend: Backend | None = None,
) -> tuple[Launch, tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """The launch of `sparse_attention`, and the tensors that it will write."""
    backend = backend or current_backend()
    tokens, heads, width = q_THD.shape
    rank, rope, topk = kv_lora_rank, width - kv_lora_rank, rows_TK.shape[1]
    (values, keys, scales), places = _stores(region_LD, rank, rope, row_format)
    staged = (values, keys, scales) if staging_GD is None else _stores(staging_GD, rank, rope, row_format)[0]
    out_THR, lse_TH = q_THD.new_empty(tokens, heads, rank), q_THD.new_empty(tokens, heads, dtype=torch.float32)
    blocks = _blocks(heads, q_THD.element_size(), row_format, backend)
    arguments = {
        "q_ptr": q_THD, "rows_ptr": rows_TK, "out_ptr": out_THR, "lse_ptr": lse_TH,
        "values_ptr": values, "keys_ptr": keys, "scales_ptr": scales,
        "staged_values_ptr": staged[0], "staged_keys_ptr": staged[1], "staged_scales_ptr": staged[2],
        "layer_rows": region_LD.shape[0] - 1, "heads": heads, "scale_log2": softmax_scale * _LOG2_E,
        "TOPK": topk, "RANK": rank, "ROPE": rope, "FORMAT": row_format, "STAGED": staging_GD is not None,
        "ALIGNMENT": _alignment(region_LD, staging_GD),
        **places, "SCALE_TILE": LATENT_SCALE_TILE,
        "RANK_POW2": max(_LEAST_BLOCK, power_of_two(rank)), "ROPE_POW2": max(_LEAST_BLOCK, power_of_two(rope)),
        "TOPK_POW2": power_of_two(topk), **blocks,
    }  # fmt: skip
    launch = Launch(
        kernel=sparse_attention_kernel, grid=(tokens, ceil_div(heads, blocks["HEADS"])), arguments=arguments,
        threads=256, stages=2 if backend == "cuda" else 1,
    )  # fmt: skip
    return launch, (out_THR, lse_TH)


def sparse_attention(
    q_THD: torch.Tensor, region_LD: torch.Tensor, staging_GD: torch.Tensor | None, rows_TK: torch.Tensor,
    *, kv_lora_rank: int, softmax_scale: float, row_format: RowFormat,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Latent results (T, H, R) in q's dtype, and the logarithm of each softmax's sum, fp32 (T, H).

        s_tk  = (q_latent_th · latent_row + q_rope_th · key_row) · softmax_scale        row = rows_tk, none for -1
        out_th = sum_k softmax(s)_tk · latent_row

    q: (T, H, R + P), brought into the latent space. rows: int32 codes (T, K). A code is a row of `region`; with
    staging, its codes begin at that of region's last row, which then has none. row_format: of both stores, which are
    (rows, R + P) numbers or (rows, bytes) uint8.
    A token without any row gets zeros, and minus infinity as the logarithm.
    """
    launch, outputs = sparse_attention_launch(
        q_THD, region_LD, staging_GD, rows_TK,
        kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale, row_format=row_format,
    )  # fmt: skip
    launch.run()
    return outputs
