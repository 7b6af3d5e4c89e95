"""The attention function that transformers calls by the name `castoff`: over rows that the cache has stored.

transformers hands its cache the keyword arguments that the attention function is about to get ("updated in place", as
its own paged cache does). `LatentLayer.update` puts a `LayerRows` there, so that no state is shared between caches, or
parked on modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.hf.latents import LatentStore
from castoff.hf.library import transformers
from castoff.ops.program import Tensor

torch = lazy.load("torch")

ATTENTION = "castoff"
LAYER_ROWS = "castoff_rows"


@dataclass(frozen=True, slots=True)
class LayerRows:
    """One layer's rows of this pass, (T, X), and where they go."""

    store: LatentStore
    layer: int
    rows_TX: Tensor


@cache
def register() -> None:
    """Make the name `castoff` known to transformers, with boolean masks, which the indexer needs beside attention."""
    transformers.AttentionInterface.register(ATTENTION, attend)
    transformers.AttentionMaskInterface.register(ATTENTION, transformers.masking_utils.sdpa_mask)


def attend(
    module: Tensor, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *, scaling: float,
    indices: Tensor | None = None, castoff_rows: LayerRows | None = None, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of one layer, (B, S, H, V).

    query: (B, H, S, N + P). indices: what the indexer chose, (B, S, K). attention_mask: boolean, (B, 1, S, L), True for
    what may be seen. key, value: of one token, for which transformers expanded what `update` gave back; unused.
    """
    if castoff_rows is None or indices is None:
        raise CastoffError(
            f'attn_implementation="{ATTENTION}" attends to the rows of a castoff.hf.OffloadedCache: pass it as cache=, '
            "or close() it to have the model as it was"
        )
    if attention_mask is None or attention_mask.dtype != torch.bool:
        raise CastoffError("castoff's attention takes a boolean attention mask: 2-D, or (batch, 1, queries, tokens)")
    batch, heads, queries, _width = query.shape
    may_see_BSK = attention_mask[:, 0].expand(batch, -1, -1).gather(-1, indices.long())
    topk_BSK = torch.where(may_see_BSK, indices, -1)
    out_THV = castoff_rows.store.attend(
        castoff_rows.layer,
        castoff_rows.rows_TX,
        query.transpose(1, 2).flatten(0, 1),
        topk_BSK.flatten(0, 1),
        module.kv_b_proj.weight,
        scaling,
    )
    return out_THV.view(batch, queries, heads, -1), None
