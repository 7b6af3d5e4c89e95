"""One rank's model with its caches: prefill a chunk, decode a step, draft with the MTP block.

Axes: B requests, S tokens of each, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import lazy_loader as lazy

from castoff.model.decoder import Decoder, Direct, PassOutput, WeightSource
from castoff.model.inputs import StepInputs
from castoff.model.setup import Setup
from castoff.ops.program import Tensor
from castoff.runtime.caches import BlockPool, PagedCaches
from castoff.runtime.rope import rope_tables

torch = lazy.load("torch")


@dataclass(frozen=True, slots=True)
class Rows:
    """The requests of a call: which request each row is (None for padding) and its length after the call.

    padding: how many of the first tokens of every row are none of the request's; they are not cached.
    """

    requests: Sequence[int | None]
    lengths: Sequence[int]
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One forward call: of the main model, or with hidden_TD of the MTP block. See `Engine.forward`, `Engine.draft`."""

    ids_BS: Tensor
    rows: Rows
    prefill: bool
    last: bool
    hidden_TD: Tensor | None = None
    topk_TK: Tensor | None = None


class Engine:
    """A decoder over real tensors, unquantised, on one rank."""

    def __init__(
        self, setup: Setup, weights: WeightSource, *, num_blocks: int, block_tokens: int, dtype: Tensor, device: Tensor
    ) -> None:
        # Prefill and decode differ in how a cast prices them, and in dense prefill; the ops are the same.
        self.setup = setup
        self.pool = BlockPool(num_blocks, block_tokens)
        self.caches = PagedCaches(setup, num_blocks, block_tokens, dtype=dtype, device=device)
        self.device = device
        self.dtype = dtype
        self._decoders = {
            mode: Decoder(replace(setup, mode=mode), weights, self.caches, Direct()) for mode in ("prefill", "decode")
        }

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all cache blocks hold."""
        return self.pool.num_blocks * self.caches.block_tokens

    def has_room(self, tokens: int) -> bool:
        """Whether so many tokens of a new request would find free blocks."""
        return -(-tokens // self.caches.block_tokens) <= self.pool.free_blocks

    def forward(self, ids_BS: Tensor, rows: Rows, *, prefill: bool, last: bool) -> PassOutput:
        """Main pass over the last S tokens of every row; blocks for their lengths must be there."""
        return self._run(Call(ids_BS, rows, prefill, last))

    def draft(
        self, ids_BS: Tensor, hidden_TD: Tensor, topk_TK: Tensor | None, rows: Rows, *, prefill: bool
    ) -> PassOutput:
        """One MTP call over S tokens of every row. hidden_TD: of the tokens before them; topk_TK: ids to reuse."""
        return self._run(Call(ids_BS, rows, prefill, False, hidden_TD, topk_TK))

    def finish(self) -> None:
        """This rank has no more calls to make; others may."""

    def gather(self, value: Any) -> list[Any]:
        """The value of every attention-DP rank, in their order."""
        return [value]

    def _run(self, call: Call) -> PassOutput:
        return self._compute(call)

    def _compute(self, call: Call) -> PassOutput:
        inputs = self._inputs(call.ids_BS, call.rows)
        decoder = self._decoders["prefill" if call.prefill else "decode"]
        if call.hidden_TD is None:
            return decoder.main_pass(inputs, last=call.last)
        return decoder.draft_call(inputs, call.hidden_TD, call.topk_TK, draft=0, last=call.last)

    def _inputs(self, ids_BS: Tensor, rows: Rows) -> StepInputs:
        queries = ids_BS.shape[1]
        lengths_B = torch.tensor(list(rows.lengths), device=self.device)
        positions_BS = lengths_B[:, None] - queries + torch.arange(queries, device=self.device)
        tables = self._block_tables(rows)
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
            lengths=None,
        )

    def _block_tables(self, rows: Rows) -> Tensor:
        owned = [[] if request is None else self.pool.blocks(request) for request in rows.requests]
        needed = max(-(-max(rows.lengths) // self.caches.block_tokens), 1)
        table = torch.full((len(owned), needed), -1, dtype=torch.long, device=self.device)
        for row, blocks in enumerate(owned):
            held = blocks[:needed]
            table[row, : len(held)] = torch.tensor(held, dtype=torch.long, device=self.device)
        return table

    def _slots(self, tables: Tensor, positions_BS: Tensor) -> Tensor:
        """Flat cache slots of positions; −1 where a row has no block for one (padding, or before the first token)."""
        block = (positions_BS // self.caches.block_tokens).clamp(0, tables.shape[1] - 1)
        owned = tables.gather(1, block)
        slots = owned * self.caches.block_tokens + positions_BS % self.caches.block_tokens
        return torch.where((owned < 0) | (positions_BS < 0), -1, slots)
