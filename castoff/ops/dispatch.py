"""Where the token copies of a mixture of experts go: the part of dispatch and combine that depends on the router.

A cast prices dispatch and combine by expected numbers of rows; real ranks first tell each other how many they send.

Axes: N ranks of the EP group, M of the moe_tp group, E experts of this rank, R rows of this rank's experts, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import lazy_loader as lazy

from castoff.ops.collectives import RowCounts, exchange_rows, gathered
from castoff.ops.program import Abstract, Tensor
from castoff.spec.mesh import Group

torch = lazy.load("torch")


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Which rows the experts of a rank get.

    counts_E: rows of each expert. dispatched, combined: rows on their way there and back. order_R: of the rows in
    expert order, the places where they lie once all have come. All but counts_E are None in a cast.
    """

    counts_E: Tensor
    dispatched: RowCounts | None = None
    combined: RowCounts | None = None
    order_R: Tensor | None = None

    def in_expert_order(self, rows_RD: Tensor) -> Tensor:
        """Rows as they came, sorted by expert."""
        return rows_RD if self.order_R is None else rows_RD[self.order_R]

    def as_they_came(self, rows_RD: Tensor) -> Tensor:
        """Rows in expert order, back in the order in which they came."""
        if self.order_R is None:
            return rows_RD
        return torch.empty_like(rows_RD).index_copy_(0, self.order_R, rows_RD)


def exchange_counts(counts: Tensor, ep: Group, moe_tp: Group) -> ExpertRows:
    """What the ranks of an EP group will send each other, from how many rows each has for every expert of the group.

    counts: (N · E,). The ranks of a moe_tp group hold slices of the same experts: each receives its rows, and all
    compute those of all, padded with zeros to the most that one of them has; the padding goes to the last expert.
    """
    if isinstance(counts, Abstract):
        return ExpertRows(counts)
    sent_NE = counts.view(ep.size, -1)
    even = [1] * ep.size
    received_NE = exchange_rows(sent_NE, even, even, ep)
    received_MNE = received_NE[None] if moe_tp.size == 1 else gathered(received_NE, moe_tp)
    rows_M = received_MNE.sum(dim=(1, 2)).tolist()
    sent, received = (tuple(counts_NE.sum(dim=1).tolist()) for counts_NE in (sent_NE, received_NE))
    experts_R = torch.cat([_expert_of_rows(counts_NE, max(rows_M)) for counts_NE in received_MNE])
    return ExpertRows(
        counts_E=torch.bincount(experts_R, minlength=sent_NE.shape[1]).to(torch.int32),
        dispatched=RowCounts(sent, received, max(rows_M)),
        combined=RowCounts(received, sent, sum(sent)),
        order_R=experts_R.argsort(stable=True),
    )


def _expert_of_rows(counts_NE: Tensor, held: int) -> Tensor:
    """The expert of every row that one rank holds: by sender, then by expert, then padding."""
    ranks, experts = counts_NE.shape
    ids_E = torch.arange(experts, device=counts_NE.device)
    known_R = ids_E.repeat(ranks).repeat_interleave(counts_NE.reshape(-1))
    return torch.nn.functional.pad(known_R, (0, held - known_R.shape[0]), value=experts - 1)
