"""All forms, by the names that backend files have for them."""

from __future__ import annotations

from collections.abc import Mapping

from castoff.casting.forms.amounts import AMOUNTS
from castoff.casting.forms.attention import ABSORBED_OR_DENSE, DECODE_ATTENTION, PREFILL_ATTENTION
from castoff.casting.forms.collective import ALL_REDUCE, EXCHANGE, EXPERT_COPIES, EXPERT_TOKENS
from castoff.casting.forms.form import Form
from castoff.casting.forms.grouped import GROUPED_BF16, GROUPED_FP8
from castoff.casting.forms.indexer import INDEXER_PROJECTION, PAGED_LOGITS, RAGGED_LOGITS, TOPK
from castoff.casting.forms.matmul import MATMUL, MATMUL_FP4, MATMUL_FP8, MATMUL_TILES_FP8
from castoff.casting.forms.projection import PROJECTION
from castoff.casting.forms.stream import STREAM

FORMS: Mapping[str, Form] = {
    "matmul": MATMUL,
    "matmul_fp8": MATMUL_FP8,
    "matmul_fp4": MATMUL_FP4,
    "matmul_tiles_fp8": MATMUL_TILES_FP8,
    "grouped_bf16": GROUPED_BF16,
    "grouped_fp8": GROUPED_FP8,
    "stream": STREAM,
    "all_reduce": ALL_REDUCE,
    "exchange": EXCHANGE,
    "expert_copies": EXPERT_COPIES,
    "expert_tokens": EXPERT_TOKENS,
    "projection": PROJECTION,
    "indexer_projection": INDEXER_PROJECTION,
    "ragged_logits": RAGGED_LOGITS,
    "paged_logits": PAGED_LOGITS,
    "topk": TOPK,
    "prefill_attention": PREFILL_ATTENTION,
    "decode_attention": DECODE_ATTENTION,
    "absorbed_or_dense": ABSORBED_OR_DENSE,
    "amounts": AMOUNTS,
}
