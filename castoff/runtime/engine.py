"""One rank's model with its caches: prefill a chunk, decode a step, draft with the MTP block.

Axes: B requests, S tokens of each, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import lazy_loader as lazy

from castoff.model.decoder import Decoder, Direct, PassOutput, WeightSource
from castoff.model.inputs import NOTHING, CacheSource, OffloadInputs, Selected, StepInputs
from castoff.model.offload_sizes import offloaded_groups
from castoff.model.setup import Setup
from castoff.offload.caches import CallRows, OffloadedCaches
from castoff.offload.memory import OffloadRun
from castoff.offload.streams import open_streams
from castoff.ops.program import Tensor
from castoff.runtime.caches import BlockPool, PagedCaches
from castoff.runtime.graphs import GraphMode, Passes, decode_passes
from castoff.runtime.rope import rope_tables
from castoff.spec.scenario import Mode

torch = lazy.load("torch")


@dataclass(frozen=True, slots=True)
class Rows:
    """The requests of a call: which request each row is (None for padding) and its length after the call.

    padding: how many of the first tokens of every row are none of the request's; they are not cached.
    committed: tokens whose cache rows are final; None where those before this call's are.
    """

    requests: Sequence[int | None]
    lengths: Sequence[int]
    padding: int = 0
    committed: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One forward call: of the main model, or with hidden_TD of the MTP block. See `Engine.forward`, `Engine.draft`."""

    ids_BS: Tensor
    rows: Rows
    prefill: bool
    last: bool
    hidden_TD: Tensor | None = None
    reused: Selected = NOTHING
    sampled_B: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StaticShapes:
    """What the decode calls of a graph have in common: rows, and the tokens that the longest request may reach."""

    rows: int
    tokens: int


class Engine:
    """A decoder over real tensors on one rank.

    graph, static: how decode calls are carried out; a graph needs static shapes. phase: of the pass that runs or ran
    last.
    """

    def __init__(
        self, setup: Setup, weights: WeightSource, *, num_blocks: int, block_tokens: int, dtype: Tensor, device: Tensor,
        graph: GraphMode = "eager", static: StaticShapes | None = None, offload: OffloadRun | None = None,
    ) -> None:  # fmt: skip
        assert graph == "eager" or static is not None, "a graph needs static shapes"
        self.setup = setup
        self.weights = weights
        self.pool = BlockPool(num_blocks, block_tokens)
        held = (
            frozenset(layer for group in offloaded_groups(setup, offload.options) for layer in group) if offload else ()
        )
        self.caches = PagedCaches(setup, num_blocks, block_tokens, dtype=dtype, device=device, offloaded=held)
        self.offload: OffloadedCaches | None = None
        if offload is not None:
            streams = open_streams(device, inline=graph == "compile")
            self.offload = OffloadedCaches(setup, offload, self.caches, streams, dtype=dtype, device=device)
        self.device = device
        self.dtype = dtype
        self.phase: Mode = "prefill"
        self._static = static

        # Prefill and decode differ in how a cast prices them, and in dense prefill; the ops are the same.
        def decoder(mode: Mode, caches: CacheSource) -> Decoder:
            return Decoder(replace(setup, mode=mode), weights, caches, Direct())

        self._prefill: Passes = decoder("prefill", self.offload.prefill if self.offload else self.caches)
        decode = decoder("decode", self.offload.decode if self.offload else self.caches)
        self._decode = decode_passes(decode, graph, self.offload.streams.drain if self.offload else _nothing)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all cache blocks hold."""
        return self.pool.num_blocks * self.caches.block_tokens

    def admit(self, request: int, tokens: int, *, prefix_of: int | None = None, shared_tokens: int = 0) -> None:
        """Give a request the room that `tokens` tokens need. Raises CastoffError where there is none.

        prefix_of: a request whose first shared_tokens tokens, whole blocks, are this one's too; their rows are shared.
        """
        if prefix_of is not None:
            self.pool.share(request, prefix_of, shared_tokens // self.caches.block_tokens)
        self.pool.grow(request, tokens)
        if self.offload is not None:
            self.offload.admit(request)

    def release(self, request: int) -> None:
        """Take back all that a request has."""
        if self.offload is not None:
            self.offload.release(request)
        self.pool.release(request)

    def close(self) -> None:
        """End what works beside the engine."""
        if self.offload is not None:
            self.offload.close()

    def whole_blocks(self, tokens: int) -> int:
        """The most tokens, no more than these, that fill whole cache blocks."""
        return tokens // self.caches.block_tokens * self.caches.block_tokens

    def has_room(self, tokens: int) -> bool:
        """Whether so many tokens of a new request would find free blocks."""
        return -(-tokens // self.caches.block_tokens) <= self.pool.free_blocks

    def forward(self, ids_BS: Tensor, rows: Rows, *, prefill: bool, last: bool) -> PassOutput:
        """Main pass over the last S tokens of every row; blocks for their lengths must be there."""
        return self._run(Call(ids_BS, rows, prefill, last))

    def draft(
        self, ids_BS: Tensor, hidden_TD: Tensor, reused: Selected, rows: Rows, *, prefill: bool,
        last: bool = True, sampled_B: Tensor | None = None,
    ) -> PassOutput:  # fmt: skip
        """One MTP call over S tokens of every row. hidden_TD: of the tokens before them; reused: ids, or empty.

        last: draft one token per row, after its token sampled_B (from 0; None for the last), not one per token.
        """
        return self._run(Call(ids_BS, rows, prefill, last, hidden_TD, reused, sampled_B))

    def shared_topk(self, draft: PassOutput, at_B: Tensor) -> Selected:
        """What later drafts of the step reuse of some rows of a draft call: ids, and where they lie; nothing where they
        score."""
        if draft.topk_TK is None or not self.setup.shares_topk_among_drafts:
            return Selected()
        keeps_rows = self.offload is not None and self.offload.options.reuses_rows_in_drafts
        rows_BK = draft.rows_TK[at_B] if keeps_rows and draft.rows_TK is not None else None
        return Selected(draft.topk_TK[at_B], rows_BK)

    def warm_up(self) -> None:
        """Make the graphs of all decode calls and compile what plans them, on padding alone; nothing where there is
        neither."""
        if self._static is None and self.offload is None:
            return
        rows, drafts = self._static.rows if self._static else 1, self.setup.mtp.num_mtp_tokens
        nobody, zeros_B = Rows([None] * rows, [0] * rows), torch.zeros(rows, dtype=torch.long, device=self.device)
        ids_BS = torch.zeros(rows, 1 + drafts, dtype=torch.long, device=self.device)
        main = self.forward(ids_BS, nobody, prefill=False, last=False)
        if not drafts:
            return
        draft = self.draft(ids_BS, main.hidden_TD, Selected(), nobody, prefill=False, sampled_B=zeros_B)
        if drafts > 1:
            at_B = torch.arange(rows, device=self.device) * (1 + drafts)
            # The drafts after a prompt have no top-k to share; those after a step may.
            for reused in (NOTHING, self.shared_topk(draft, at_B)):
                self.draft(zeros_B[:, None], draft.hidden_TD[at_B], reused, nobody, prefill=False)

    def finish(self) -> None:
        """This rank has no more calls to make; others may."""

    def gather(self, value: Any) -> list[Any]:
        """The value of every attention-DP rank, in their order."""
        return [value]

    def _run(self, call: Call) -> PassOutput:
        return self._compute(call)

    def _compute(self, call: Call) -> PassOutput:
        if call.prefill or self._static is None:
            return self._pass(call, max(call.rows.lengths))
        queries = call.ids_BS.shape[1]
        whole = self._pass(padded(call, self._static.rows, queries), self._static.tokens)
        return without_padding(whole, call, self._static.rows, queries)

    def _pass(self, call: Call, longest: int) -> PassOutput:
        self.phase = "prefill" if call.prefill else "decode"
        inputs = self._inputs(call, longest)
        passes = self._prefill if call.prefill else self._decode
        try:
            if call.hidden_TD is None:
                return passes.main_pass(inputs, last=call.last)
            return passes.draft_call(inputs, call.hidden_TD, call.reused, draft=0, last=call.last)
        # An interrupt too: pools may name rows that were still to come.
        except BaseException:
            if self.offload is not None:
                self.offload.abort(call.rows.requests)
            raise

    def _inputs(self, call: Call, longest: int) -> StepInputs:
        ids_BS, rows = call.ids_BS, call.rows
        queries = ids_BS.shape[1]
        lengths_B = torch.tensor(list(rows.lengths), device=self.device)
        positions_BS = lengths_B[:, None] - queries + torch.arange(queries, device=self.device)
        tables = self._block_tables(rows, longest)
        slots_BS = self._slots(tables, positions_BS)
        slots_BS[:, : rows.padding] = -1
        cos_TP, sin_TP = rope_tables(
            positions_BS.reshape(-1), self.setup.model.rope, self.setup.model.qk_rope_head_dim, self.dtype
        )
        return StepInputs(
            ids_T=ids_BS.reshape(-1),
            cos_TP=cos_TP,
            sin_TP=sin_TP,
            slot_mapping_T=slots_BS.reshape(-1),
            block_tables=tables,
            seq_lens_B=lengths_B,
            longest=longest,
            lengths=None,
            sampled_B=call.sampled_B,
            offload=self._offload_inputs(call, positions_BS, slots_BS.reshape(-1), tables.shape[1]),
        )

    def _offload_inputs(self, call: Call, positions_BS: Tensor, slots_T: Tensor, blocks: int) -> OffloadInputs | None:
        if self.offload is None:
            return None
        given = call.rows
        own = call.ids_BS.shape[1] - given.padding
        # A row of padding has no tokens, so none of its own either.
        committed = given.committed or [max(length - own, 0) for length in given.lengths]
        owned = [[] if request is None else self.pool.blocks(request) for request in given.requests]
        rows = CallRows(call.hidden_TD is not None, own, given.requests, given.lengths, committed, owned)
        if call.prefill:
            return self.offload.prefill_inputs(rows, positions_BS, slots_T, blocks)
        return self.offload.decode_inputs(rows, positions_BS, slots_T)

    def _block_tables(self, rows: Rows, longest: int) -> Tensor:
        owned = [[] if request is None else self.pool.blocks(request) for request in rows.requests]
        needed = max(-(-longest // self.caches.block_tokens), 1)
        rows_of_table = [[*blocks[:needed], *[-1] * (needed - len(blocks))] for blocks in owned]
        return torch.tensor(rows_of_table, dtype=torch.long, device=self.device)

    def _slots(self, tables: Tensor, positions_BS: Tensor) -> Tensor:
        """Flat cache slots of positions; −1 where a row has no block for one (padding, or before the first token)."""
        block = (positions_BS // self.caches.block_tokens).clamp(0, tables.shape[1] - 1)
        owned = tables.gather(1, block)
        slots = owned * self.caches.block_tokens + positions_BS % self.caches.block_tokens
        return torch.where((owned < 0) | (positions_BS < 0), -1, slots)


def padded(call: Call, rows: int, queries: int) -> Call:
    """The call with padding before the tokens of every row, and rows of padding after them."""
    own_rows, own_queries = call.ids_BS.shape
    more_rows, more_queries = rows - own_rows, queries - own_queries
    if not more_rows and not more_queries:
        return call

    def pad(x: Tensor | None, value: int = 0) -> Tensor | None:
        if x is None:
            return None
        x_BSX = x.view(own_rows, own_queries, -1)
        padding = (0, 0, more_queries, 0, 0, more_rows)
        return torch.nn.functional.pad(x_BSX, padding, value=value).flatten(0, 1)

    return replace(
        call,
        ids_BS=torch.nn.functional.pad(call.ids_BS, (more_queries, 0, 0, more_rows)),
        rows=Rows(
            [*call.rows.requests, *[None] * more_rows],
            [*call.rows.lengths, *[0] * more_rows],
            padding=call.rows.padding + more_queries,
            committed=None if call.rows.committed is None else [*call.rows.committed, *[0] * more_rows],
        ),
        hidden_TD=pad(call.hidden_TD),
        reused=Selected(pad(call.reused.topk_TK, -1), pad(call.reused.rows_TK, -1)),
        sampled_B=None
        if call.sampled_B is None
        else torch.nn.functional.pad(call.sampled_B + more_queries, (0, more_rows)),
    )


def without_padding(output: PassOutput, call: Call, rows: int, queries: int) -> PassOutput:
    """Of the output of `padded(call, rows, queries)`, what belongs to the call."""
    own_rows, own_queries = call.ids_BS.shape

    def cut(x: Tensor | None, *, last: bool = False) -> Tensor | None:
        if x is None:
            return None
        if last:
            return x[:own_rows]
        x_BSX = x.view(rows, queries, *x.shape[1:])
        return x_BSX[:own_rows, queries - own_queries :].flatten(0, 1)

    return PassOutput(
        cut(output.hidden_TD),
        cut(output.logits_TV, last=call.last),
        cut(output.ids_T, last=call.last),
        cut(output.topk_TK),
        cut(output.rows_TK),
        tuple(cut(topk_TK) for topk_TK in output.chosen),
    )


def _nothing() -> None:
    """Where no streams are open."""
