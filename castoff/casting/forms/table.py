"""All forms, by the names that backend files have for them."""

from __future__ import annotations

from collections.abc import Mapping

from castoff.casting.forms.attention import ABSORBED_OR_DENSE, DECODE_ATTENTION, PREFILL_ATTENTION
from castoff.casting.forms.form import Form
from castoff.casting.forms.indexer import INDEXER_PROJECTION, PAGED_LOGITS, RAGGED_LOGITS, TOPK
from castoff.casting.forms.matmul import MATMUL
from castoff.casting.forms.projection import PROJECTION

FORMS: Mapping[str, Form] = {
    "matmul": MATMUL,
    "projection": PROJECTION,
    "indexer_projection": INDEXER_PROJECTION,
    "ragged_logits": RAGGED_LOGITS,
    "paged_logits": PAGED_LOGITS,
    "topk": TOPK,
    "prefill_attention": PREFILL_ATTENTION,
    "decode_attention": DECODE_ATTENTION,
    "absorbed_or_dense": ABSORBED_OR_DENSE,
}
