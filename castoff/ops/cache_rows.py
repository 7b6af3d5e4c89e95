"""What a cache row holds: latent rows and indexer keys in each CacheFormat, and index scores over such keys.

A quantised cache is a tensor of bytes, one row after the other. Numbers stand in a row without alignment, in the
machine's byte order (little endian wherever torch runs).

    latent row:   R one-byte values | R / 128 scales, fp32 | P rope values, bf16       512 + 16 + 128 = 656 bytes
    indexer key:  E one-byte values | one scale, fp32 (FP8) or fp16 (INT8)             128 + 4 or 128 + 2 bytes

The latent row is FlashMLA's FP8 row of 656 bytes; with int8 values it is the row of the CANN recipes' C8 caches.
A plain cache (DISABLED) holds R + P or E numbers in the float dtype of the run.

Axes: T tokens, W width of a vector, N tiles, R kv_lora_rank, P qk_rope, E index_head_dim, X a row as stored,
B requests, S queries per request, H index heads, L rows per request.
"""

from __future__ import annotations

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.ops.program import Tensor
from castoff.ops.quantization import dequantize_rows, quantize_rows, widened
from castoff.spec.quant import LATENT_SCALE_TILE, AttentionAction, CacheFormat

torch = lazy.load("torch")

# Scores per head that exist at once: bounds scratch memory to 256 MiB in fp32.
SCORE_ELEMENTS = 2**26


def row_storage(values: int, row_bytes: int, action: AttentionAction, dtype: Tensor) -> tuple[int, Tensor]:
    """Width and dtype of a cache tensor: `values` numbers of `dtype`, or a quantised row's bytes."""
    return (values, dtype) if action == "DISABLED" else (row_bytes, torch.uint8)


def latent_rows(latent_TR: Tensor, key_TP: Tensor, cache: CacheFormat) -> Tensor:
    """Rows (…, X) to write to a latent cache, quantised or not; the rotated key (…, P) comes last."""
    if cache.action == "DISABLED":
        return torch.cat([latent_TR, key_TP], dim=-1)
    return pack_latent(latent_TR, key_TP, cache)


def latent_values(rows_X: Tensor, kv_lora_rank: int, cache: CacheFormat, dtype: Tensor) -> Tensor:
    """The numbers (…, R + P) of latent rows, quantised or not, in `dtype`; plain rows of that dtype are not copied."""
    if cache.action == "DISABLED":
        return rows_X.to(dtype)
    return unpack_latent(rows_X, kv_lora_rank, cache, dtype)


def index_rows(key_TE: Tensor, cache: CacheFormat) -> Tensor:
    """Rows (…, X) to write to an indexer key cache, quantised or not; a quantised one is rotated first."""
    if cache.index_action == "DISABLED":
        return key_TE
    return pack_index_keys(key_TE, cache)


def index_scores(
    q_BSHE: Tensor,
    head_weights_BSH: Tensor,
    key_rows_BLX: Tensor,
    cache: CacheFormat,
    *,
    max_elements: int = SCORE_ELEMENTS,
) -> Tensor:
    """Index scores (B, S, L) over the rows of an indexer key cache, quantised or not, at no less than fp32.

        score(s, j) = sum_h w_sh · relu(q_sh · k_j · E^-0.5)

    and over quantised keys an estimate of it, of the same size, since rotating both sides keeps q · k:

        q8, q_scale = quantise(hadamard(q_sh))        per query and head, as a key is
        score(s, j) = k_scale_j · sum_h (w_sh · q_scale_sh) · relu(q8_sh · k8_j · E^-0.5)

    head_weights: with their factor heads^-0.5. max_elements: of (B, S, H, L) scores, how many may exist at once.
    Every (query, row) pair is scored: what a query may see is the caller's to mask.
    Int8 products are whole numbers far below 2^24 and add up exactly in fp32; float8 products are exact and rounded as
    they add up. FP8 follows `fp8_index` of DeepSeek-V3.2's published inference code. INT8 follows the CANN indexer,
    which divides the products by 1024 to stay inside fp16 and knows no E^-0.5: positive constants, which leave the
    ranking as it is. Ours keeps the head weights at no less than fp32, where CANN has fp16.
    """
    weights_BSH = widened(head_weights_BSH)
    wide = weights_BSH.dtype
    if cache.index_action == "DISABLED":
        return _weighted_relu(q_BSHE.to(wide), weights_BSH, key_rows_BLX, max_elements)
    q_values, q_scales = _rotate_quantize(q_BSHE, cache)
    k_values, k_scales = unpack_index_keys(key_rows_BLX, cache)
    weights_BSH = weights_BSH * q_scales.squeeze(-1).to(wide)
    scores_BSL = _weighted_relu(q_values.to(wide), weights_BSH, k_values, max_elements)
    return scores_BSL.mul_(k_scales.to(wide).transpose(-1, -2))


def hadamard(x_XW: Tensor) -> Tensor:
    """x · H_W / sqrt(W) over the last axis, with the rows of H in Sylvester's order; at no less than fp32.

        H_1 = [1];  H_2n = [[H_n, H_n], [H_n, −H_n]]

    H is symmetric, so the rotation is its own inverse; it keeps dot products, and spreads one large value over all
    W, which is what quantisation wants of it. Computed as log2(W) stages of sums and differences. Order and factor are
    those of fast-hadamard-transform, which DeepSeek-V3.2's indexer calls. Raises CastoffError for a W that is no power
    of two: Sylvester's matrices have no other size, and no known model needs one (index_head_dim is 128).
    """
    width = x_XW.shape[-1]
    if width < 1 or width & (width - 1):
        raise CastoffError(
            f"a quantised indexer cache rotates keys by a Hadamard matrix, whose size is a power of two, got "
            f"index_head_dim {width}; use --quantize-indexer-action DISABLED"
        )
    y_XW = widened(x_XW)
    half = 1
    while half < width:
        first, second = y_XW.unflatten(-1, (width // (2 * half), 2, half)).unbind(-2)
        y_XW = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        half *= 2
    return y_XW * width**-0.5


def pack_latent(latent_TR: Tensor, key_TP: Tensor, cache: CacheFormat) -> Tensor:
    """Quantised latent rows, uint8 (…, latent_row_bytes); the rotated key is rounded to bf16."""
    values, scales = quantize_rows(latent_TR, _value_dtype(cache.action), LATENT_SCALE_TILE, scale_dtype=torch.float32)
    rows = torch.cat([_bytes(values), _bytes(scales), _bytes(key_TP.to(torch.bfloat16))], dim=-1)
    assert rows.shape[-1] == cache.latent_row_bytes, "a latent row has as many bytes as its format says"
    return rows


def unpack_latent(rows_X: Tensor, kv_lora_rank: int, cache: CacheFormat, dtype: Tensor) -> Tensor:
    """Latent and rotated key, (…, R + P) in `dtype`, of quantised rows (…, latent_row_bytes)."""
    assert rows_X.shape[-1] == cache.latent_row_bytes, "a latent row has as many bytes as its format says"
    scales_end = kv_lora_rank + 4 * (kv_lora_rank // LATENT_SCALE_TILE)
    values = rows_X[..., :kv_lora_rank].view(_value_dtype(cache.action))
    scales = _numbers(rows_X[..., kv_lora_rank:scales_end], torch.float32)
    key = _numbers(rows_X[..., scales_end:], torch.bfloat16)
    return torch.cat([dequantize_rows(values, scales, LATENT_SCALE_TILE).to(dtype), key.to(dtype)], dim=-1)


def pack_index_keys(key_TE: Tensor, cache: CacheFormat) -> Tensor:
    """Indexer keys, rotated by `hadamard` and quantised: uint8 (…, index_row_bytes).

    INT8 rounds the rotated key to fp16 first, so one beyond 65504 becomes infinite and its row reads back as NaN.
    """
    values, scales = _rotate_quantize(key_TE, cache)
    rows = torch.cat([_bytes(values), _bytes(scales)], dim=-1)
    assert rows.shape[-1] == cache.index_row_bytes, "an indexer key has as many bytes as its format says"
    return rows


def unpack_index_keys(rows_X: Tensor, cache: CacheFormat) -> tuple[Tensor, Tensor]:
    """Rotated keys as stored, (…, E) int8 or float8_e4m3fn, and their scales, (…, 1) fp16 or fp32."""
    assert rows_X.shape[-1] == cache.index_row_bytes, "an indexer key has as many bytes as its format says"
    values, scales = rows_X.split([cache.index_key_bytes, cache.index_scale_bytes], dim=-1)
    return values.view(_value_dtype(cache.index_action)), _numbers(scales, _index_scale_dtype(cache))


def _weighted_relu(q_BSHE: Tensor, weights_BSH: Tensor, keys_BLE: Tensor, max_elements: int) -> Tensor:
    """sum_h w · relu(q · k · E^-0.5) in q's dtype: (B, S, L).

    Goes over the keys in chunks, of which one key is the least. So the bound holds for one query over a long context,
    where chunks of queries could not keep it, and only a chunk of keys is ever converted.
    """
    requests, queries, heads, head_dim = q_BSHE.shape
    rows = keys_BLE.shape[1]
    scores_BSL = q_BSHE.new_empty(requests, queries, rows)
    step = max(1, max_elements // max(1, requests * queries * heads))
    for start in range(0, rows, step):
        chunk_BLE = keys_BLE[:, start : start + step].to(q_BSHE.dtype)
        products_BSHL = torch.einsum("bshe,ble->bshl", q_BSHE, chunk_BLE).mul_(head_dim**-0.5).relu_()
        scores_BSL[..., start : start + step] = torch.einsum("bsh,bshl->bsl", weights_BSH, products_BSHL)
    return scores_BSL


def _rotate_quantize(x_XE: Tensor, cache: CacheFormat) -> tuple[Tensor, Tensor]:
    """An index query or key, rotated and quantised with one scale: values (…, E), scales (…, 1)."""
    rotated_XE = hadamard(x_XE)
    if cache.index_action == "INT8":
        # The CANN indexer's order: rotate, round to fp16, quantise.
        rotated_XE = rotated_XE.to(torch.float16)
    return quantize_rows(
        rotated_XE,
        _value_dtype(cache.index_action),
        x_XE.shape[-1],
        scale_dtype=_index_scale_dtype(cache),
    )


def _value_dtype(action: AttentionAction) -> Tensor:
    assert action != "DISABLED", "plain rows have no one-byte values"
    return torch.int8 if action == "INT8" else torch.float8_e4m3fn


def _index_scale_dtype(cache: CacheFormat) -> Tensor:
    return torch.float16 if cache.index_scale_bytes == 2 else torch.float32


def _bytes(x_XW: Tensor) -> Tensor:
    """Numbers as bytes: (…, W · bytes each)."""
    return _packed(x_XW).view(torch.uint8)


def _numbers(bytes_X: Tensor, dtype: Tensor) -> Tensor:
    """Bytes as numbers of `dtype`; a copy, since a row puts them at any address."""
    return _packed(bytes_X).view(dtype)


def _packed(x: Tensor) -> Tensor:
    """A copy with its own storage; `contiguous()` would keep a slice of one row where, and with the strides, it is."""
    return x.clone(memory_format=torch.contiguous_format)
