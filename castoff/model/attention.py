"""The attention half of a decoder layer: mlapo, the indexer on full layers, attention over selected rows, o_proj."""

from __future__ import annotations

from collections.abc import Mapping

from castoff.model.indexer import index_tokens
from castoff.model.inputs import AttendedRows, CacheSource, Selected, StepInputs
from castoff.model.setup import Setup
from castoff.model.sharding import exchange_heads, project_and_reduce
from castoff.ops.attention import AttentionSizes, absorb_query, expand_value, multihead_latent_attention, rescale_shard
from castoff.ops.collectives import all_gather, reduce_scatter
from castoff.ops.linear import Weight
from castoff.ops.mlapo import MlapoSizes, MlapoWeights, mlapo
from castoff.ops.program import Tensor

Weights = Mapping[str, Weight]


def attention(
    setup: Setup,
    weights: Weights,
    caches: CacheSource,
    inputs: StepInputs,
    layer: int,
    normed_TD: Tensor,
    selected: Selected,
    *,
    indexer: str,
) -> tuple[Tensor, Selected]:
    """Attention of one layer over whole tokens; returns its output (whole or split) and the selection that it used.

    indexer: "full" scores and selects, "shared" uses `selected`, "reuse" uses it and still writes indexer keys, "none"
    is dense attention.
    """
    model, mesh = setup.model, setup.mesh
    heads = model.num_attention_heads // mesh.tp.size
    latent = caches.latent(layer)
    written, slots_T = latent.written_to(inputs)
    q_THX, _, _, qa_normed_TQ = mlapo(
        normed_TD, inputs.cos_TP, inputs.sin_TP, slots_T, written,
        _mlapo_weights(weights), _mlapo_sizes(setup, heads), model.latent_norm_eps, mode=setup.mode,
    )  # fmt: skip
    topk_TK = index_tokens(
        setup, weights, caches, inputs, layer, normed_TD, qa_normed_TQ, selected.topk_TK, indexer=indexer
    )
    chosen_here = indexer in ("full", "none")
    rows, selected = latent.select(inputs, Selected(topk_TK) if chosen_here else selected, chosen_here=chosen_here)
    out_THV = _attend(setup, weights, inputs, q_THX, rows)
    latent.attended(inputs, selected)
    heads_TI = out_THV.view(out_THV.shape[0], heads * model.v_head_dim)
    out_TD = project_and_reduce(
        exchange_heads(heads_TI, mesh.o_proj_tp, mesh.tp),
        weights["self_attn.o_proj"],
        mesh.o_proj_tp,
        mesh.tp,
        inputs.tokens,
        split=setup.sequence_parallel,
        fused="matmul_all_reduce" in setup.fusions,
    )
    return out_TD, selected


def _attend(setup: Setup, weights: Weights, inputs: StepInputs, q_THX: Tensor, rows: AttendedRows) -> Tensor:
    """Attention of this rank's heads, (T, H, V).

    With DCP a rank scores the heads of its whole DCP group against the rows it holds; the partial results, weighted by
    their softmax sums, are added up where the heads belong.
    """
    model, dcp = setup.model, setup.mesh.dcp
    tokens, heads = q_THX.shape[0], model.num_attention_heads // setup.mesh.tp.size
    kv_b = weights["self_attn.kv_b_proj"]
    sizes = AttentionSizes(
        heads=heads * dcp.size,
        qk_nope_head_dim=model.qk_nope_head_dim,
        qk_rope_head_dim=model.qk_rope_head_dim,
        kv_lora_rank=model.kv_lora_rank,
        v_head_dim=model.v_head_dim,
        cache=setup.cache,
        softmax_scale=model.softmax_scale,
        topk_limit=setup.topk_limit,
        shards=dcp.size,
        absorbs=dcp.size == 1,
    )
    if dcp.size > 1:
        q_THX = all_gather(absorb_query(q_THX, kv_b, sizes), dcp, axis=1)
    out_THX, *lse_TH = multihead_latent_attention(
        q_THX, rows.cache, rows.ids_TK, rows.block_tables, rows.seq_lens_B, kv_b,
        sizes, inputs.lengths, staging=rows.staging, phase=setup.mode, quantized=setup.cache.action != "DISABLED",
    )  # fmt: skip
    if dcp.size == 1:
        return out_THX
    (own_lse_TH,) = lse_TH
    out_THX = rescale_shard(out_THX, own_lse_TH, all_gather(own_lse_TH, dcp, axis=1))
    mine_HX = reduce_scatter(out_THX.view(sizes.heads, tokens * model.kv_lora_rank), dcp)
    return expand_value(mine_HX.view(tokens, heads, model.kv_lora_rank), kv_b, sizes)


def _mlapo_weights(weights: Weights) -> MlapoWeights:
    low_rank = "self_attn.q_a_proj" in weights
    return MlapoWeights(
        q_a=weights["self_attn.q_a_proj"] if low_rank else None,
        q_a_norm=weights["self_attn.q_a_layernorm"] if low_rank else None,
        q_b=weights["self_attn.q_b_proj" if low_rank else "self_attn.q_proj"],
        kv_a=weights["self_attn.kv_a_proj_with_mqa"],
        kv_a_norm=weights["self_attn.kv_a_layernorm"],
    )


def _mlapo_sizes(setup: Setup, heads: int) -> MlapoSizes:
    model = setup.model
    return MlapoSizes(
        heads=heads,
        qk_nope_head_dim=model.qk_nope_head_dim,
        qk_rope_head_dim=model.qk_rope_head_dim,
        kv_lora_rank=model.kv_lora_rank,
        q_lora_rank=model.q_lora_rank or 0,
        cache=setup.cache,
    )
