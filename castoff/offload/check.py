"""`--check`: in decode, every row that attention will read is compared with the host's, and pools with their rules.

A step's own rows are equal by construction, since the host has them from where attention reads them, save in
serve_install and gather, which read them back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.model.inputs import AttendedRows, LatentCache, Selected, StepInputs
from castoff.model.offload import OffloadMemory
from castoff.ops.attention import row_slots, rows_of
from castoff.ops.program import Tensor

torch = lazy.load("torch")


@dataclass(frozen=True, slots=True)
class CheckedRows:
    """A layer's rows, verified before attention reads them. owner_of: the request that has a slot."""

    layer: int
    rows: LatentCache
    memory: OffloadMemory
    owner_of: Callable[[int], int | None]

    @property
    def block_kind(self) -> str:
        """That of the rows."""
        return self.rows.block_kind

    def written_to(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """As without a check."""
        return self.rows.written_to(inputs)

    def select(self, inputs: StepInputs, selected: Selected, *, chosen_here: bool) -> tuple[AttendedRows, Selected]:
        """Raises CastoffError that names layer, request, rank and token of a row that is not the host's."""
        attended, selected = self.rows.select(inputs, selected, chosen_here=chosen_here)
        # A draft call that reuses rows as they were attends to what may have been rewritten since.
        if chosen_here or len(selected.lists) > 0:
            self._compare(inputs, selected, attended)
        if chosen_here:
            self._check_pools(inputs)
        return attended, selected

    def attended(self, inputs: StepInputs, selected: Selected) -> None:
        """As without a check."""
        self.rows.attended(inputs, selected)

    def _compare(self, inputs: StepInputs, selected: Selected, attended: AttendedRows) -> None:
        topk_TK, rows_TK = selected.topk_TK, attended.ids_TK
        assert topk_TK is not None
        assert rows_TK is not None
        host = self.memory.layers[self.layer].host
        slots_TK = row_slots(topk_TK, inputs.block_tables, host.shape[1])
        is_read_TK = self._own(inputs, topk_TK)
        unread_TK = is_read_TK & (rows_TK < 0)
        if unread_TK.any():
            raise self._fault(inputs, topk_TK, unread_TK, "has no row on the device")
        surplus_TK = ~is_read_TK & (rows_TK >= 0)
        if surplus_TK.any():
            raise self._fault(inputs, topk_TK, surplus_TK, "is read, and must not be")
        staging = attended.staging
        read = rows_of(attended.cache, staging, rows_TK.clamp(min=0).long())[is_read_TK]
        expected = host.flatten(0, 1)[slots_TK[is_read_TK].to(host.device)].to(read.device)
        differs = (read.view(torch.uint8) != expected.view(torch.uint8)).any(-1)
        if differs.any():
            wrong_TK = torch.zeros_like(is_read_TK)
            wrong_TK[is_read_TK] = differs
            raise self._fault(inputs, topk_TK, wrong_TK, "is not the row that the host has")

    def _own(self, inputs: StepInputs, topk_TK: Tensor) -> Tensor:
        """Which (query, rank) pairs name a token that the query may see."""
        requests = inputs.seq_lens_B.shape[0]
        queries = topk_TK.shape[0] // requests
        own_BS = inputs.seq_lens_B[:, None] - queries + torch.arange(queries, device=topk_TK.device)
        real_T = inputs.slot_mapping_T >= 0
        return (topk_TK >= 0) & (topk_TK <= own_BS.view(-1, 1)) & real_T[:, None]

    def _fault(self, inputs: StepInputs, topk_TK: Tensor, wrong_TK: Tensor, what: str) -> CastoffError:
        token, rank = (int(place) for place in wrong_TK.nonzero()[0])
        assert inputs.offload is not None
        row = token // (topk_TK.shape[0] // inputs.seq_lens_B.shape[0])
        request = self.owner_of(int(inputs.offload.request_slots_B[row]))
        return CastoffError(
            f"--check: layer {self.layer}, request {request}, rank {rank}: token {int(topk_TK[token, rank])} {what} "
            f"({int(wrong_TK.sum())} such rows in this layer)"
        )

    def _check_pools(self, inputs: StepInputs) -> None:
        """No token twice in a pool, each in its own set, all committed. Last selections have no such rules."""
        assert inputs.offload is not None
        group, sizes = self.memory.group_of(self.layer), self.memory.sizes
        if sizes.policy == "previous":
            return
        for slot, committed in zip(
            inputs.offload.request_slots_B.tolist(), inputs.offload.committed_B.tolist(), strict=True
        ):
            if slot < 0:
                continue
            tags_NW = group.state.tags_RNW[slot]
            held = tags_NW[tags_NW >= 0]
            unique, counts = held.unique(return_counts=True)
            request = self.owner_of(slot)
            for wrong, what in (
                (unique[counts > 1], "is in the pool more than once"),
                (held[held >= committed], "is in the pool before it is committed"),
                (tags_NW[(tags_NW >= 0) & (tags_NW % sizes.sets != _sets(tags_NW))], "is in a set that is not its own"),
            ):
                if len(wrong):
                    raise CastoffError(f"--check: layer {self.layer}, request {request}: token {int(wrong[0])} {what}")


def _sets(tags_NW: Tensor) -> Tensor:
    return torch.arange(tags_NW.shape[0], device=tags_NW.device)[:, None]
