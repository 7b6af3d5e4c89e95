"""Attention-DP ranks with requests of their own, which must call the model together: its collectives span them all.

Before every call the ranks agree on one. Those that meant another, or none, take part with padding, and try again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import lazy_loader as lazy

from castoff.model.decoder import PassOutput
from castoff.ops.collectives import gathered
from castoff.runtime.engine import Call, Engine, Rows, padded, without_padding

torch = lazy.load("torch")


class Kind(IntEnum):
    """Calls by urgency: drafts first, so that every rank ends its step; prompts before decoding, so that more requests
    decode together."""

    DRAFT = 0
    DRAFT_PREFILL = 1
    PREFILL = 2
    DECODE = 3
    IDLE = 4


@dataclass(frozen=True, slots=True)
class Proposal:
    """A call that a rank wants: its kind, rows, tokens per row, and whether only last tokens reach the head."""

    kind: Kind
    rows: int = 0
    queries: int = 0
    last: bool = False

    @classmethod
    def of(cls, call: Call) -> Proposal:
        """What a call is like."""
        rows, queries = call.ids_BS.shape
        if call.hidden_TD is None:
            kind = Kind.PREFILL if call.prefill else Kind.DECODE
        else:
            kind = Kind.DRAFT_PREFILL if call.prefill else Kind.DRAFT
        return cls(kind, rows, queries, call.last)


class LockstepEngine(Engine):
    """An engine whose calls wait for those of the other attention-DP ranks."""

    def finish(self) -> None:
        """Take part in the calls of the others until nobody wants another."""
        while (agreed := self._agree(Proposal(Kind.IDLE))).kind != Kind.IDLE:
            self._compute(self._padding(agreed))

    def gather(self, value: Any) -> list[Any]:
        """The value of every attention-DP rank, in their order."""
        found: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, value)
        return found[:: self.setup.mesh.tp.size]

    def _run(self, call: Call) -> PassOutput:
        wanted = Proposal.of(call)
        while (agreed := self._agree(wanted)).kind != wanted.kind:
            self._compute(self._padding(agreed))
        output = self._compute(padded(call, agreed.rows, agreed.queries))
        return without_padding(output, call, agreed.rows, agreed.queries)

    def _agree(self, own: Proposal) -> Proposal:
        """The most urgent kind of call that a rank wants, large enough for all that want it."""
        numbers = torch.tensor([own.kind, own.rows, own.queries, own.last])
        wanted = gathered(numbers, self.setup.mesh.dp).tolist()
        kind = min(row[0] for row in wanted)
        # Calls of one kind are all for last tokens, or none is.
        _, rows, queries, last = (
            max(column) for column in zip(*(row for row in wanted if row[0] == kind), strict=True)
        )
        return Proposal(Kind(kind), rows, queries, bool(last))

    def _padding(self, agreed: Proposal) -> Call:
        """A call of that kind with nothing in it."""
        hidden_TD = None
        if agreed.kind in (Kind.DRAFT, Kind.DRAFT_PREFILL):
            hidden_TD = torch.zeros(
                agreed.rows * agreed.queries, self.setup.model.hidden_size, dtype=self.dtype, device=self.device
            )
        return Call(
            torch.zeros(agreed.rows, agreed.queries, dtype=torch.long, device=self.device),
            Rows([None] * agreed.rows, [0] * agreed.rows),
            prefill=agreed.kind in (Kind.PREFILL, Kind.DRAFT_PREFILL),
            last=agreed.last,
            hidden_TD=hidden_TD,
        )
