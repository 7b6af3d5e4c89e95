"""Recording one step: the decoder over abstract tensors."""

from __future__ import annotations

from dataclasses import dataclass

from castoff.dims import Dim
from castoff.model.abstract_offload import AbstractOffloadedCaches, abstract_offload_inputs
from castoff.model.decoder import Decoder, PassOutput
from castoff.model.inputs import AbstractCaches, CacheSource, Selected, StepInputs, abstract_inputs
from castoff.model.setup import Setup
from castoff.model.weights import RankWeights
from castoff.ops.lengths import Lengths
from castoff.ops.offload_plan import PoolSizes
from castoff.ops.program import Program, Recorder, Tensor
from castoff.spec.offload import Offload


@dataclass(frozen=True, slots=True)
class OffloadCast:
    """Offload in a cast: what is asked for, and the pools of a rank with the reads that are expected of them."""

    options: Offload
    sizes: PoolSizes


def record_step(
    setup: Setup,
    lengths: Lengths,
    busy_ranks: Dim | None = None,
    *,
    repeat: bool = True,
    offload: OffloadCast | None = None,
) -> Program:
    """The program of one step for a batch of these lengths on the predicted rank.

    busy_ranks: tokens of all attention-DP ranks over those of this one; None means that all are as full.
    repeat: record each kind of layer once; False records every layer. offload: None keeps all rows on the device.
    """
    recorder = Recorder(repeat=repeat)
    busy: Dim = setup.mesh.dp.size if busy_ranks is None else busy_ranks
    weights = RankWeights(setup, recorder)

    def caches(*, prefill: bool) -> CacheSource:
        if offload is None:
            return AbstractCaches(setup, lengths, recorder)
        return AbstractOffloadedCaches(setup, lengths, offload.options, offload.sizes, recorder, prefill=prefill)

    def inputs(own: Lengths, *, prefill: bool) -> StepInputs:
        told = abstract_offload_inputs(own, recorder, prefill=prefill) if offload is not None else None
        return abstract_inputs(setup, own, busy, recorder, told)

    prefill = setup.mode == "prefill"
    whole = Decoder(setup, weights, caches(prefill=prefill), recorder)
    # Draft calls after the first are a few tokens each, in prefill too.
    later = whole if not prefill or offload is None else Decoder(setup, weights, caches(prefill=False), recorder)
    main = whole.main_pass(inputs(lengths, prefill=prefill), last=prefill)
    hidden_TD = main.hidden_TD
    reused = Selected()
    for draft in range(setup.mtp.num_mtp_tokens):
        window: Dim = 1 + setup.mtp.num_mtp_tokens if setup.mtp_window == "every" else 1
        own = lengths if draft == 0 else lengths.with_query(window, grown_by=draft)
        hidden_TD = hidden_TD.view(own.tokens, setup.model.hidden_size)
        given = inputs(own, prefill=prefill and draft == 0)
        decoder = whole if draft == 0 else later
        call = decoder.draft_call(given, hidden_TD, _of_tokens(reused, own.tokens), draft=draft, last=True)
        hidden_TD, reused = call.hidden_TD, _reused(setup, call, offload)
    return recorder.program


def _reused(setup: Setup, call: PassOutput, offload: OffloadCast | None) -> Selected:
    """What the next draft call reuses of this one: ids, and where they lie; nothing where it scores."""
    if call.topk_TK is None or not setup.shares_topk_among_drafts:
        return Selected()
    keeps_rows = offload is not None and offload.options.reuses_rows_in_drafts
    return Selected(call.topk_TK, call.rows_TK if keeps_rows else None)


def _of_tokens(reused: Selected, tokens: Dim) -> Selected:
    def view(rows_TK: Tensor | None) -> Tensor | None:
        return None if rows_TK is None else rows_TK.view(tokens, rows_TK.shape[1])

    return Selected(view(reused.topk_TK), view(reused.rows_TK))
