"""The forward pass: embedding, decoder layers, head, and the MTP block's draft calls.

Axes: T tokens of this attention-DP rank, D hidden, K selected tokens, V vocabulary, B requests.
The residual stream is a pair (x, residual) whose sum is the hidden state, so that the next norm can fuse the addition.
Under sequence parallelism both are split over the TP group between attention and MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from castoff.model.attention import Weights, attention
from castoff.model.head import embed, logits_and_sample
from castoff.model.inputs import CacheSource, Selected, StepInputs
from castoff.model.moe import dense_mlp, moe
from castoff.model.setup import Setup
from castoff.model.sharding import join_tokens
from castoff.ops.collectives import send_recv, split_tokens
from castoff.ops.linear import Weight, linear
from castoff.ops.norm import (
    add,
    add_rms_norm,
    add_rms_norm2,
    add_rms_norm2_dynamic_quant,
    rms_norm,
)
from castoff.ops.program import Tensor
from castoff.ops.tokens import concat, select_rows
from castoff.spec.mesh import Group

Body = tuple[Tensor, ...]


class WeightSource(Protocol):
    """Where a decoder finds its weights, abstract or real."""

    def layer(self, layer: int) -> Weights:
        """Weights of a layer by relative name; layers past num_hidden_layers are MTP blocks."""

    def outer(self) -> Weights:
        """embed_tokens, norm and lm_head."""


class Runner(Protocol):
    """What carries out blocks: a `Recorder`, or plain calls."""

    def block(self, key: str, label: str, body: Callable[..., Body], *inputs: Tensor | None, layer: int = 0) -> Body:
        """Run `body(*inputs)`; equal keys mean equal ops and dims, on the layers that stand alike to `layer`."""

    def next_stage(self) -> None:
        """Blocks from here on belong to the next pipeline stage."""


class Direct:
    """Runs blocks as they come."""

    def block(self, key: str, label: str, body: Callable[..., Body], *inputs: Tensor | None, layer: int = 0) -> Body:
        """Call the body."""
        return body(*inputs)

    def next_stage(self) -> None:
        """Nothing to do: real stages are other processes."""


@dataclass(frozen=True, slots=True)
class PassOutput:
    """hidden_TD: after the final norm, whole. logits_TV, ids_T: of the rows sampled; logits are None where groups of
    lm_head ranks smaller than TP share the tokens, so that no rank has those of all. topk_TK: of the last layer, and
    rows_TK where they lie, if offloaded. chosen: what each full layer of a main pass chose."""

    hidden_TD: Tensor
    logits_TV: Tensor | None
    ids_T: Tensor
    topk_TK: Tensor | None
    rows_TK: Tensor | None = None
    chosen: tuple[Tensor, ...] = ()


class Decoder:
    """The forward pass of one rank, cast and run alike."""

    def __init__(self, setup: Setup, weights: WeightSource, caches: CacheSource, runner: Runner) -> None:
        self._setup = setup
        self._weights = weights
        self._caches = caches
        self._runner = runner
        self._outer = weights.outer()

    def main_pass(self, inputs: StepInputs, *, last: bool) -> PassOutput:
        """All layers and the head.

        last: sample one token per request (see `StepInputs.sampled_B`), not one per token.
        """
        setup, block = self._setup, self._runner.block
        (x_TD,) = block("embedding", "embedding", lambda ids_T: (self._embed(ids_T),), inputs.ids_T)
        residual_TD: Tensor | None = None
        selected = Selected()
        chosen = []
        for layer in range(setup.model.num_hidden_layers):
            if layer in setup.stage_starts[1:]:
                x_TD, residual_TD = self._next_stage(layer, x_TD, residual_TD)
            indexer = self._indexer_kind(layer)

            def body(x_TD: Tensor, residual_TD: Tensor | None, *selected: Tensor | None) -> Body:
                given = Selected.of(*selected)
                return self._layer(layer, inputs, x_TD, residual_TD, given, indexer=indexer)  # noqa: B023

            kind = f"{indexer}/{setup.model.mlp_layer_types[layer]}/{'first' if residual_TD is None else 'next'}"
            kind += self._caches.latent(layer).block_kind
            # A full layer has no use for the previous group's ids: their life ends with their group.
            given = selected if indexer == "shared" else Selected()
            x_TD, residual_TD, *tensors = block(
                f"layer/{kind}", f"layer {layer}", body, x_TD, residual_TD, *given.tensors, layer=layer
            )
            selected = Selected.of(*tensors)
            if indexer == "full":
                chosen.append(selected.topk_TK)

        def head(x_TD: Tensor, residual_TD: Tensor) -> Body:
            return self._head(inputs, x_TD, residual_TD, self._outer["norm"], last=last)

        hidden_TD, logits_TV, ids_T = block("head", "head", head, x_TD, residual_TD)
        return PassOutput(hidden_TD, logits_TV, ids_T, selected.topk_TK, selected.rows_TK, tuple(chosen))

    def draft_call(
        self, inputs: StepInputs, hidden_TD: Tensor, reused: Selected, *, draft: int, last: bool
    ) -> PassOutput:
        """One call of the MTP block. inputs: its tokens, each one after the token whose hidden state it is given.

        reused: an earlier draft call's choice; empty to score anew. last: as for `main_pass`.
        """
        layer = self._setup.model.num_hidden_layers
        scores = "full" if reused.topk_TK is None else "reuse"
        indexer = "none" if self._setup.model.indexer is None else scores

        def body(hidden_TD: Tensor, *selected: Tensor | None) -> Body:
            weights, eps = self._weights.layer(layer), self._setup.model.rms_norm_eps
            embedded_TD = self._embed(inputs.ids_T, split=False)
            joined = concat(rms_norm(embedded_TD, weights["enorm"], eps), rms_norm(hidden_TD, weights["hnorm"], eps))
            x_TD = self._split(linear(joined, weights["eh_proj"]))
            x_TD, residual_TD, *used = self._layer(
                layer, inputs, x_TD, None, Selected.of(*selected), indexer=indexer, weights=weights
            )
            return (*self._head(inputs, x_TD, residual_TD, weights["shared_head.norm"], last=last), *used[:2])

        # The lengths grow by one from call to call, so no two calls are equal.
        outputs = self._runner.block(f"mtp/{draft}", f"mtp {draft}", body, hidden_TD, *reused.tensors, layer=layer)
        return PassOutput(*outputs)

    def _layer(
        self,
        layer: int,
        inputs: StepInputs,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        selected: Selected,
        *,
        indexer: str,
        weights: Weights | None = None,
    ) -> Body:
        """One decoder layer: norm, attention, norm, MLP. Returns x, residual, and the tensors of what was selected."""
        setup, tokens = self._setup, inputs.tokens
        weights = self._weights.layer(layer) if weights is None else weights
        normed_TD, residual_TD = self._norm(x_TD, residual_TD, weights["input_layernorm"])
        if setup.sequence_parallel:
            normed_TD = join_tokens(normed_TD, setup.mesh.tp, tokens)
        x_TD, selected = attention(setup, weights, self._caches, inputs, layer, normed_TD, selected, indexer=indexer)
        if "mlp.gate" in weights:
            normed_TD, residual_TD = self._norm(x_TD, residual_TD, weights["post_attention_layernorm"])
            return (moe(setup, weights, inputs, normed_TD), residual_TD, *selected.tensors)
        # A dense MLP is the only reader of its norm, so the norm can hand over quantised values.
        normed_TD, residual_TD = self._norm(
            x_TD, residual_TD, weights["post_attention_layernorm"], reader=weights["mlp.gate_up_proj"]
        )
        if setup.sequence_parallel:
            normed_TD = join_tokens(normed_TD, setup.mesh.tp, tokens)
        return (dense_mlp(setup, weights, normed_TD, tokens), residual_TD, *selected.tensors)

    def _norm(
        self, x_TD: Tensor, residual_TD: Tensor | None, weight: Weight, *, reader: Weight | None = None
    ) -> tuple[Tensor, Tensor]:
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

    def _head(self, inputs: StepInputs, x_TD: Tensor, residual_TD: Tensor, norm: Weight, *, last: bool) -> Body:
        """Final norm, lm_head and sampling: (normed hidden state, whole; logits; token ids)."""
        setup, eps = self._setup, self._setup.model.rms_norm_eps
        if "add_rms_norm" in setup.fusions:
            hidden_TD = add_rms_norm(x_TD, residual_TD, norm, eps)
        else:
            hidden_TD = rms_norm(add(x_TD, residual_TD), norm, eps)
        if setup.sequence_parallel:
            hidden_TD = join_tokens(hidden_TD, setup.mesh.tp, inputs.tokens)
        rows_TD = select_rows(hidden_TD, inputs.requests, inputs.sampled_B) if last else hidden_TD
        return (hidden_TD, *logits_and_sample(setup, self._outer["lm_head"], rows_TD))

    def _embed(self, ids_T: Tensor, *, split: bool = True) -> Tensor:
        embedded_TD = embed(self._setup, self._outer["embed_tokens"], ids_T)
        return self._split(embedded_TD) if split else embedded_TD

    def _split(self, x_TD: Tensor) -> Tensor:
        return split_tokens(x_TD, self._setup.mesh.tp) if self._setup.sequence_parallel else x_TD

    def _next_stage(self, layer: int, x_TD: Tensor | None, residual_TD: Tensor | None) -> Body:
        """Hand the residual stream to the rank that holds the next layers."""
        ranks = self._setup.mesh.stage_ranks
        stage = self._setup.stage_starts.index(layer)
        pp = Group("pp", 2, ranks, first=(stage - 1) * ranks)

        def body(x_TD: Tensor, residual_TD: Tensor | None) -> Body:
            return send_recv(x_TD, pp), None if residual_TD is None else send_recv(residual_TD, pp)

        sent = self._runner.block(f"next_stage/{stage}", f"to the stage of layer {layer}", body, x_TD, residual_TD)
        self._runner.next_stage()
        return sent

    def _indexer_kind(self, layer: int) -> str:
        return self._setup.model.indexer_types[layer] if self._setup.model.indexer else "none"
