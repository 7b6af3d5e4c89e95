"""The MLP half of a decoder layer: dense, or routed experts with a shared one.

With expert parallelism (ep_size > 1) a rank routes its share of the tokens, sends their copies to the experts' ranks
and gets them back. Without it every rank of the experts' TP group computes all their tokens on a slice of each expert.
"""

from __future__ import annotations

from typing import Literal

from castoff.dims import Dim, maximum, minimum
from castoff.model.attention import Weights
from castoff.model.inputs import StepInputs
from castoff.model.setup import Setup
from castoff.model.sharding import gather_tokens, join_tokens, project_and_reduce, reduce_tokens
from castoff.ops.collectives import (
    ExpertExchange,
    all_gather,
    all_reduce,
    all_to_all,
    dispatch_ffn_combine,
    on_parts,
    reduce_scatter,
    split_tokens,
)
from castoff.ops.dispatch import exchange_counts
from castoff.ops.expert_load import ExpertLayer, ExpertLoad, skewed_load
from castoff.ops.linear import Activations, Weight, linear, quantize
from castoff.ops.moe import (
    expected_experts_touched,
    grouped_matmul,
    grouped_matmul_swiglu,
    moe_gate,
    moe_permute,
    moe_unpermute,
    swiglu,
)
from castoff.ops.norm import add
from castoff.ops.program import Tensor, on_stream

SHARED_EXPERT_STREAM = "shared_expert"


def dense_mlp(setup: Setup, weights: Weights, normed_TD: Tensor, tokens: Dim) -> Tensor:
    """down(swiglu(gate_up(x))) over whole tokens; returns whole or split tokens."""
    mesh = setup.mesh
    x_TD = gather_tokens(normed_TD, mesh.mlp_tp, mesh.tp)
    hidden_TI = swiglu(linear(x_TD, weights["mlp.gate_up_proj"]))
    return project_and_reduce(
        hidden_TI,
        weights["mlp.down_proj"],
        mesh.mlp_tp,
        mesh.tp,
        tokens,
        split=setup.sequence_parallel,
        fused="matmul_all_reduce" in setup.fusions,
    )


def moe(setup: Setup, weights: Weights, inputs: StepInputs, normed_TD: Tensor) -> Tensor:
    """Routed and shared experts. Takes whole tokens, or split ones under sequence parallelism; returns the same."""
    if setup.mesh.ep.size == 1:
        return _tensor_parallel_moe(setup, weights, inputs, normed_TD)
    return _expert_parallel_moe(setup, weights, inputs, normed_TD)


def _tensor_parallel_moe(setup: Setup, weights: Weights, inputs: StepInputs, normed_TD: Tensor) -> Tensor:
    mesh, tokens = setup.mesh, inputs.tokens
    own = mesh.moe_tp
    whole_TD = join_tokens(normed_TD, mesh.tp, tokens) if setup.sequence_parallel else normed_TD
    x_TD = gather_tokens(whole_TD, own, mesh.tp)
    shared_TD = _shared_expert(setup, weights, x_TD)
    weights_TK, experts_TK = _route(setup, weights, x_TD)
    rows_RD, order_R, counts_E = moe_permute(x_TD, experts_TK, setup.model.moe.n_routed_experts)
    rows_RD = _experts(setup, weights, rows_RD, counts_E, tokens=_group_tokens(setup, inputs))
    partial_TD = _with_shared(moe_unpermute(rows_RD, weights_TK, order_R), shared_TD)
    return reduce_tokens(partial_TD, own, mesh.tp, tokens, split=setup.sequence_parallel)


def _expert_parallel_moe(setup: Setup, weights: Weights, inputs: StepInputs, normed_TD: Tensor) -> Tensor:
    mesh, tokens = setup.mesh, inputs.tokens
    x_TD = normed_TD if setup.sequence_parallel else split_tokens(normed_TD, mesh.tp)
    shared_over_tp = mesh.parallel.enable_shared_expert_tp
    shared_input_TD = normed_TD if shared_over_tp and not setup.sequence_parallel else x_TD
    if shared_over_tp and setup.sequence_parallel:
        shared_input_TD = join_tokens(x_TD, mesh.tp, tokens)
    weights_TK, experts_TK = _route(setup, weights, x_TD)
    rows_RD, order_R, counts_E = moe_permute(x_TD, experts_TK, setup.model.moe.n_routed_experts)
    group_tokens = _group_tokens(setup, inputs)
    rows_RD, shared_TD = _dispatch_compute_combine(setup, weights, rows_RD, counts_E, shared_input_TD, group_tokens)
    routed_TD = moe_unpermute(rows_RD, weights_TK, order_R)
    split = setup.sequence_parallel
    if shared_over_tp and shared_TD is not None:
        shared_TD = reduce_scatter(shared_TD, mesh.tp) if split else all_reduce(shared_TD, mesh.tp)
        return _with_shared(routed_TD if split else join_tokens(routed_TD, mesh.tp, tokens), shared_TD)
    mine_TD = _with_shared(routed_TD, shared_TD)
    return mine_TD if split else join_tokens(mine_TD, mesh.tp, tokens)


def _dispatch_compute_combine(
    setup: Setup, weights: Weights, rows_RD: Tensor, counts_E: Tensor, shared_input_TD: Tensor, group_tokens: Dim
) -> tuple[Tensor, Tensor | None]:
    """Send rows (R, D) to the experts' ranks, compute there, bring the results back; the shared expert's output too.

    group_tokens: tokens that choose among the experts of this rank's group.
    The shared expert is computed while the rows are on their way.
    """
    mesh, hidden = setup.mesh, rows_RD.shape[1]
    there, back = _exchange(setup, "dispatch"), _exchange(setup, "combine")
    if mesh.parallel.host_external_shared_experts:
        held = (group_tokens / mesh.shared_expert_ranks, hidden)
        sent_RD = all_to_all(rows_RD, mesh.ep, shape=held, exchange=there)
        return all_to_all(_shared_mlp(weights, sent_RD), mesh.ep, shape=rows_RD.shape, exchange=back), None
    local_rows = _local_rows(setup, group_tokens)
    if setup.quantized_dispatch:
        rows_RD = quantize(rows_RD, weights["mlp.experts.gate_up_proj"])
    if "dispatch_ffn_combine" in setup.fusions and mesh.moe_tp.size == 1:
        shared_TD = _shared_expert(setup, weights, shared_input_TD)
        gate_up, down = weights["mlp.experts.gate_up_proj"], weights["mlp.experts.down_proj"]
        touched = _touched(setup, group_tokens)
        return dispatch_ffn_combine(rows_RD, gate_up, down, touched, local_rows, mesh.ep), shared_TD
    own = exchange_counts(counts_E, mesh.ep, mesh.moe_tp)
    sent_RD = on_parts(
        lambda rows: all_to_all(rows, mesh.ep, shape=(local_rows, rows.shape[1]), rows=own.dispatched, exchange=there),
        rows_RD,
    )
    shared_TD = _shared_expert(setup, weights, shared_input_TD)
    local_RD = on_parts(lambda rows: own.in_expert_order(all_gather(rows, mesh.moe_tp)), sent_RD)
    out_RD = own.as_they_came(_experts(setup, weights, local_RD, own.counts_E, tokens=group_tokens))
    back_RD = all_to_all(
        reduce_scatter(out_RD, mesh.moe_tp), mesh.ep, shape=rows_RD.shape, rows=own.combined, exchange=back
    )
    return back_RD, shared_TD


def _exchange(setup: Setup, way: Literal["dispatch", "combine"]) -> ExpertExchange:
    return ExpertExchange(way, setup.mode, _num_experts(setup), setup.model.moe.num_experts_per_tok)


def _num_experts(setup: Setup) -> int:
    """Routed experts of all ranks that share them, redundant ones included."""
    return (setup.mesh.ep.size - setup.mesh.shared_expert_ranks) * setup.mesh.experts_per_rank


def _group_tokens(setup: Setup, inputs: StepInputs) -> Dim:
    """Tokens that choose among one copy of the experts, padding not counted.

    The ranks of its ep and moe_tp groups bring theirs; ranks of one TP group bring the same tokens, once.
    """
    mesh, own = setup.mesh, inputs.tokens
    ranks = mesh.ep.size * mesh.moe_tp.size
    if ranks <= mesh.tp.size:
        return own * (ranks / mesh.tp.size)
    return own * inputs.busy_ranks * (ranks / mesh.stage_ranks)


def _local_rows(setup: Setup, group_tokens: Dim) -> Dim:
    """Token copies that reach the busiest expert rank. Each rank of a moe_tp group receives its share of
    them first."""
    mesh, chosen = setup.mesh, setup.model.moe.num_experts_per_tok
    tokens = group_tokens / mesh.moe_tp.size
    mean = tokens * chosen / (mesh.ep.size - mesh.shared_expert_ranks)
    # No rank can get more than one copy per token and local expert.
    most = tokens * min(chosen, mesh.experts_per_rank)
    busiest = mean * mesh.parallel.expert_load_imbalance
    if setup.expert_load_alpha:
        busiest = maximum(busiest, _skewed_load(setup, group_tokens).rows / mesh.moe_tp.size)
    return minimum(busiest, most)


def _skewed_load(setup: Setup, tokens: Dim) -> ExpertLoad:
    mesh, moe_spec = setup.mesh, setup.model.moe
    ranks = mesh.ep.size - mesh.shared_expert_ranks
    return skewed_load(tokens, _num_experts(setup), moe_spec.num_experts_per_tok, ranks, setup.expert_load_alpha)


def _experts(setup: Setup, weights: Weights, rows_RD: Activations, counts_E: Tensor, *, tokens: Dim) -> Tensor:
    """The two grouped products on this rank's rows; `tokens` is how many chose experts."""
    gate_up, down = weights["mlp.experts.gate_up_proj"], weights["mlp.experts.down_proj"]
    touched, layer = _touched(setup, tokens), _expert_layer(setup)
    rows_RD = quantize(rows_RD, gate_up)
    if "grouped_matmul_swiglu" in setup.fusions:
        hidden_RI = grouped_matmul_swiglu(rows_RD, gate_up, counts_E, touched, layer)
    else:
        hidden_RI = quantize(swiglu(grouped_matmul(rows_RD, gate_up, counts_E, touched, layer)), down)
    return grouped_matmul(hidden_RI, down, counts_E, touched, layer)


def _expert_layer(setup: Setup) -> ExpertLayer:
    return ExpertLayer(setup.model.hidden_size, setup.model.moe.n_routed_experts, setup.expert_load_alpha)


def _touched(setup: Setup, tokens: Dim) -> Dim:
    if setup.expert_load_alpha:
        return _skewed_load(setup, tokens).touched
    moe_spec = setup.model.moe
    return expected_experts_touched(
        tokens, moe_spec.n_routed_experts, moe_spec.num_experts_per_tok, setup.mesh.experts_per_rank
    )


def _route(setup: Setup, weights: Weights, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    return moe_gate(
        x_TD,
        weights["mlp.gate"],
        weights["mlp.gate.e_score_correction_bias"],
        setup.model.moe,
        # An external shared expert is one more expert of every token.
        appended=1 if setup.mesh.shared_expert_ranks else 0,
    )


def _shared_expert(setup: Setup, weights: Weights, x_TD: Tensor) -> Tensor | None:
    if setup.model.moe.n_shared_experts == 0 or setup.mesh.shared_expert_ranks:
        return None
    if not setup.multistream:
        return _shared_mlp(weights, x_TD)
    with on_stream(x_TD, SHARED_EXPERT_STREAM):
        return _shared_mlp(weights, x_TD)


def _shared_mlp(weights: Weights, x_TD: Tensor) -> Tensor:
    gate_up: Weight = weights["mlp.shared_experts.gate_up_proj"]
    return linear(swiglu(linear(x_TD, gate_up)), weights["mlp.shared_experts.down_proj"])


def _with_shared(routed_TD: Tensor, shared_TD: Tensor | None) -> Tensor:
    return routed_TD if shared_TD is None else add(routed_TD, shared_TD)
