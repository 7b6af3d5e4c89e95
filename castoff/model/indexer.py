"""Which rows a layer attends to: a full layer scores and selects, a shared layer takes over its owner's choice."""

from __future__ import annotations

from collections.abc import Mapping

from castoff.dims import ceil_div, minimum
from castoff.model.inputs import CacheSource, StepInputs
from castoff.model.setup import Setup
from castoff.ops.collectives import all_gather
from castoff.ops.dsa_indexer import IndexerSizes, IndexerWeights, dsa_indexer, indexer_key_write, merge_topk
from castoff.ops.linear import Weight
from castoff.ops.program import Tensor


def index_tokens(
    setup: Setup,
    weights: Mapping[str, Weight],
    caches: CacheSource,
    inputs: StepInputs,
    layer: int,
    normed_TD: Tensor,
    qa_normed_TQ: Tensor,
    topk_TK: Tensor | None,
    *,
    indexer: str,
) -> Tensor | None:
    """Top-k ids that this layer's attention uses; None for dense attention. See `attention` for `indexer`."""
    if indexer == "none":
        return None
    if indexer == "shared":
        assert topk_TK is not None, f"layer {layer} shares a top-k, and no earlier layer made one"
        return topk_TK
    own, sizes = _weights(weights), _sizes(setup)
    cache = caches.indexer(layer)
    if indexer == "reuse":
        assert topk_TK is not None, f"layer {layer} reuses a top-k, and no earlier call made one"
        indexer_key_write(normed_TD, inputs.cos_TP, inputs.sin_TP, cache, inputs.slot_mapping_T, own, sizes)
        return topk_TK
    columns = minimum(sizes.topk_limit, ceil_div(inputs.longest, sizes.shards))
    local_TK, *scores = dsa_indexer(
        normed_TD, qa_normed_TQ, inputs.cos_TP, inputs.sin_TP, cache, inputs.slot_mapping_T,
        inputs.block_tables, inputs.seq_lens_B, own, sizes, columns, inputs.lengths, mode=setup.mode,
    )  # fmt: skip
    if setup.mesh.dcp.size == 1:
        return local_TK
    # Every DCP rank has the best of its own keys; the best of all are among them.
    (scores_TK,) = scores
    ids_TC = all_gather(local_TK, setup.mesh.dcp, axis=1)
    scores_TC = all_gather(scores_TK, setup.mesh.dcp, axis=1)
    return merge_topk(scores_TC, ids_TC, minimum(sizes.topk_limit, inputs.longest))


def _weights(weights: Mapping[str, Weight]) -> IndexerWeights:
    names = ("wq_b", "wk", "weights_proj", "k_norm", "k_norm.bias")
    return IndexerWeights(*(weights[f"self_attn.indexer.{name}"] for name in names))


def _sizes(setup: Setup) -> IndexerSizes:
    indexer = setup.model.indexer
    assert indexer is not None
    return IndexerSizes(
        heads=indexer.index_n_heads,
        head_dim=indexer.index_head_dim,
        qk_rope_head_dim=setup.model.qk_rope_head_dim,
        topk_limit=indexer.index_topk,
        rope_interleave=indexer.rope_interleave,
        cache=setup.cache,
        shards=setup.mesh.dcp.size,
    )
