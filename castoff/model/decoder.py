"""The forward pass: embedding, decoder layers, head, and the MTP block's draft calls.

Axes: T tokens of this attention-DP rank, D hidden, K selected tokens, V vocabulary, B requests.
The residual stream is a pair (x, residual) whose sum is the hidden state, so that the next norm can fuse the addition.
Under sequence parallelism both are split over the TP group between attention and MLP.
"""

from __future__ import annotations

from castoff.dims import Dim
from castoff.model.attention import Weights, attention
from castoff.model.head import embed, logits_and_sample
from castoff.model.inputs import AbstractCaches, StepInputs, abstract_inputs
from castoff.model.moe import dense_mlp, moe
from castoff.model.setup import Setup
from castoff.model.sharding import join_tokens
from castoff.model.weights import RankWeights
from castoff.ops.collectives import send_recv, split_tokens
from castoff.ops.lengths import Lengths
from castoff.ops.linear import Weight, linear
from castoff.ops.norm import (
    add,
    add_rms_norm,
    add_rms_norm2,
    add_rms_norm2_dynamic_quant,
    rms_norm,
)
from castoff.ops.program import Abstract, Program, Recorder
from castoff.ops.tokens import concat, select_rows
from castoff.spec.mesh import Group

Body = tuple[Abstract | None, ...]


def record_step(setup: Setup, lengths: Lengths, busy_ranks: Dim | None = None, *, repeat: bool = True) -> Program:
    """The program of one step for a batch of these lengths on the predicted rank.

    busy_ranks: tokens of all attention-DP ranks over those of this one; None means that all are as full.
    repeat: record each kind of layer once; False records every layer.
    """
    recorder = Recorder(repeat=repeat)
    Decoder(setup, RankWeights(setup, recorder), AbstractCaches(setup, lengths, recorder), recorder).step(
        lengths, setup.mesh.dp.size if busy_ranks is None else busy_ranks
    )
    return recorder.program


class Decoder:
    """The forward pass of one rank."""

    def __init__(self, setup: Setup, weights: RankWeights, caches: AbstractCaches, recorder: Recorder) -> None:
        self._setup = setup
        self._weights = weights
        self._caches = caches
        self._recorder = recorder
        self._outer = weights.outer()

    def step(self, lengths: Lengths, busy_ranks: Dim) -> None:
        """Main pass over the new tokens, then one draft call per MTP token."""
        hidden_TD = self._main_pass(abstract_inputs(self._setup, lengths, busy_ranks, self._recorder))
        if self._setup.mtp.num_mtp_tokens:
            self._draft(lengths, busy_ranks, hidden_TD)

    def _main_pass(self, inputs: StepInputs) -> Abstract:
        """All layers and the head; returns the hidden state after the final norm, whole."""
        setup, block = self._setup, self._recorder.block
        (x_TD,) = block("embedding", "embedding", lambda ids_T: (self._embed(ids_T),), inputs.ids_T)
        residual_TD: Abstract | None = None
        topk_TK: Abstract | None = None
        for layer in range(setup.model.num_hidden_layers):
            if layer in setup.stage_starts[1:]:
                x_TD, residual_TD = self._next_stage(layer, x_TD, residual_TD)
            indexer = self._indexer_kind(layer)

            def body(x_TD: Abstract, residual_TD: Abstract | None, topk_TK: Abstract | None) -> Body:
                return self._layer(layer, inputs, x_TD, residual_TD, topk_TK, indexer=indexer)  # noqa: B023

            kind = f"{indexer}/{setup.model.mlp_layer_types[layer]}/{'first' if residual_TD is None else 'next'}"
            # A full layer has no use for the previous group's ids: their life ends with their group.
            given_TK = topk_TK if indexer == "shared" else None
            x_TD, residual_TD, topk_TK = block(f"layer/{kind}", f"layer {layer}", body, x_TD, residual_TD, given_TK)

        def head(x_TD: Abstract, residual_TD: Abstract) -> Body:
            return self._head(inputs.lengths, x_TD, residual_TD, self._outer["norm"], last=setup.mode == "prefill")

        hidden_TD, _ = block("head", "head", head, x_TD, residual_TD)
        assert hidden_TD is not None
        return hidden_TD

    def _draft(self, lengths: Lengths, busy_ranks: Dim, hidden_TD: Abstract) -> None:
        """num_mtp_tokens calls of the MTP block, each feeding on the hidden state of the one before."""
        setup = self._setup
        last = setup.model.num_hidden_layers
        topk_TK: Abstract | None = None
        for draft in range(setup.mtp.num_mtp_tokens):
            window: Dim = 1 + setup.mtp.num_mtp_tokens if setup.mtp_window == "every" else 1
            own = lengths if draft == 0 else lengths.with_query(window, grown_by=draft)
            inputs = abstract_inputs(setup, own, busy_ranks, self._recorder)
            hidden_TD = hidden_TD.view(own.tokens, setup.model.hidden_size)
            indexer = "none" if setup.model.indexer is None else "full"
            if topk_TK is not None and setup.shares_topk_among_drafts:
                indexer, topk_TK = "reuse", topk_TK.view(own.tokens, topk_TK.shape[1])

            def body(hidden_TD: Abstract, topk_TK: Abstract | None) -> Body:
                return self._draft_call(last, inputs, hidden_TD, topk_TK, indexer=indexer)  # noqa: B023

            # The lengths grow by one from call to call, so no two calls are equal.
            key = f"mtp/{draft}"
            hidden, topk_TK, _ = self._recorder.block(
                key, f"mtp {draft}", body, hidden_TD, topk_TK if indexer == "reuse" else None
            )
            assert hidden is not None
            hidden_TD = hidden

    def _draft_call(
        self, layer: int, inputs: StepInputs, hidden_TD: Abstract, topk_TK: Abstract | None, *, indexer: str
    ) -> Body:
        """One MTP iteration: (next hidden state, top-k ids, draft tokens)."""
        weights, eps = self._weights.layer(layer), self._setup.model.rms_norm_eps
        embedded_TD = self._embed(inputs.ids_T, split=False)
        joined = concat(rms_norm(embedded_TD, weights["enorm"], eps), rms_norm(hidden_TD, weights["hnorm"], eps))
        x_TD = self._split(linear(joined, weights["eh_proj"]))
        x_TD, residual_TD, topk_TK = self._layer(layer, inputs, x_TD, None, topk_TK, indexer=indexer, weights=weights)
        assert x_TD is not None
        assert residual_TD is not None
        hidden, tokens_B = self._head(inputs.lengths, x_TD, residual_TD, weights["shared_head.norm"], last=True)
        return hidden, topk_TK, tokens_B

    def _layer(
        self,
        layer: int,
        inputs: StepInputs,
        x_TD: Abstract,
        residual_TD: Abstract | None,
        topk_TK: Abstract | None,
        *,
        indexer: str,
        weights: Weights | None = None,
    ) -> tuple[Abstract, Abstract, Abstract | None]:
        """One decoder layer: norm, attention, norm, MLP."""
        setup, tokens = self._setup, inputs.lengths.tokens
        weights = self._weights.layer(layer) if weights is None else weights
        normed_TD, residual_TD = self._norm(x_TD, residual_TD, weights["input_layernorm"])
        if setup.sequence_parallel:
            normed_TD = join_tokens(normed_TD, setup.mesh.tp, tokens)
        x_TD, topk_TK = attention(setup, weights, self._caches, inputs, layer, normed_TD, topk_TK, indexer=indexer)
        if "mlp.gate" in weights:
            normed_TD, residual_TD = self._norm(x_TD, residual_TD, weights["post_attention_layernorm"])
            return moe(setup, weights, inputs, normed_TD), residual_TD, topk_TK
        # A dense MLP is the only reader of its norm, so the norm can hand over quantised values.
        normed_TD, residual_TD = self._norm(
            x_TD, residual_TD, weights["post_attention_layernorm"], reader=weights["mlp.gate_up_proj"]
        )
        if setup.sequence_parallel:
            normed_TD = join_tokens(normed_TD, setup.mesh.tp, tokens)
        return dense_mlp(setup, weights, normed_TD, tokens), residual_TD, topk_TK

    def _norm(
        self, x_TD: Abstract, residual_TD: Abstract | None, weight: Weight, *, reader: Weight | None = None
    ) -> tuple[Abstract, Abstract]:
        """(rms_norm(x + residual), x + residual), with the fusions at hand.

        reader: the one layer that reads the normed value; its activations may come out quantised.
        """
        eps, fusions = self._setup.model.rms_norm_eps, self._setup.fusions
        if residual_TD is None:
            return rms_norm(x_TD, weight, eps), x_TD
        if "add_rms_norm" not in fusions:
            sum_TD = add(x_TD, residual_TD)
            return rms_norm(sum_TD, weight, eps), sum_TD
        form = reader.format if reader is not None and reader.quantizes_activations else None
        if form is not None and form.dynamic and "norm_quant" in fusions:
            return add_rms_norm2_dynamic_quant(x_TD, residual_TD, weight, eps, form)
        return add_rms_norm2(x_TD, residual_TD, weight, eps)

    def _head(self, lengths: Lengths, x_TD: Abstract, residual_TD: Abstract, norm: Weight, *, last: bool) -> Body:
        """Final norm, lm_head and sampling: (normed hidden state, whole; token ids).

        last: sample one token per request instead of one per token.
        """
        setup, eps = self._setup, self._setup.model.rms_norm_eps
        if "add_rms_norm" in setup.fusions:
            hidden_TD = add_rms_norm(x_TD, residual_TD, norm, eps)
        else:
            hidden_TD = rms_norm(add(x_TD, residual_TD), norm, eps)
        if setup.sequence_parallel:
            hidden_TD = join_tokens(hidden_TD, setup.mesh.tp, lengths.tokens)
        rows_TD = select_rows(hidden_TD, lengths.requests) if last else hidden_TD
        return hidden_TD, logits_and_sample(setup, self._outer["lm_head"], rows_TD)

    def _embed(self, ids_T: Abstract, *, split: bool = True) -> Abstract:
        embedded_TD = embed(self._setup, self._outer["embed_tokens"], ids_T)
        return self._split(embedded_TD) if split else embedded_TD

    def _split(self, x_TD: Abstract) -> Abstract:
        return split_tokens(x_TD, self._setup.mesh.tp.size) if self._setup.sequence_parallel else x_TD

    def _next_stage(self, layer: int, x_TD: Abstract | None, residual_TD: Abstract | None) -> Body:
        """Hand the residual stream to the rank that holds the next layers."""
        ranks = self._setup.mesh.stage_ranks
        stage = self._setup.stage_starts.index(layer)
        pp = Group("pp", 2, ranks, first=(stage - 1) * ranks)

        def body(x_TD: Abstract, residual_TD: Abstract | None) -> Body:
            return send_recv(x_TD, pp), None if residual_TD is None else send_recv(residual_TD, pp)

        sent = self._recorder.block(f"next_stage/{stage}", f"to the stage of layer {layer}", body, x_TD, residual_TD)
        self._recorder.next_stage()
        return sent

    def _indexer_kind(self, layer: int) -> str:
        return self._setup.model.indexer_types[layer] if self._setup.model.indexer else "none"
