"""The caches of a run whose latent rows lie in host memory: slots of requests, inputs of calls, figures at the end.

Axes: B rows of a call, S tokens of each, T = B · S.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.model.inputs import CacheSource, LatentCache, OffloadInputs
from castoff.model.offload import MODES, GroupMemory, PrefillRows
from castoff.model.setup import Setup
from castoff.offload.check import CheckedRows
from castoff.offload.host_store import release
from castoff.offload.memory import OffloadRun, allocate, run_bytes
from castoff.offload.report import GroupReport, OffloadReport
from castoff.offload.streams import RunStreams
from castoff.ops.program import Tensor
from castoff.policy.arrays import STATS
from castoff.spec.offload import Offload

torch = lazy.load("torch")


@dataclass(frozen=True, slots=True)
class CallRows:
    """The rows of a call on the host's side: who they are, how long, how much of it is final, and their blocks.

    is_draft: of the MTP block. tokens: of each row in this call.
    """

    is_draft: bool
    tokens: int
    requests: Sequence[int | None]
    lengths: Sequence[int]
    committed: Sequence[int]
    blocks: Sequence[Sequence[int]]


class OffloadedCaches:
    """Latent rows in host memory, pools on the device, and which request has which slot of them.

    prefill, decode: the caches for calls of each kind. held: bytes. Raises CastoffError where memory is not enough.
    """

    def __init__(
        self, setup: Setup, run: OffloadRun, resident: CacheSource, streams: RunStreams, *, dtype: Tensor,
        device: Tensor,
    ) -> None:  # fmt: skip
        self._setup = setup
        self._run = run
        self._device = device
        self.streams = streams
        self.held = run_bytes(setup, run, dtype=dtype)
        try:
            self.memory = allocate(setup, run, dtype=dtype, device=device)
        # What torch raises for memory that a device does not have.
        except RuntimeError as error:
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise CastoffError(
                f"memory for the pools of --offload {run.options.offload} could not be taken: {reason}; take smaller "
                "--pool-tokens, or fewer requests at once (--batch)"
            ) from None
        self._written_rows = 0
        self._prompt_rows = 0
        self._free = list(range(run.slots - 1, -1, -1))
        self._slots: dict[int, int] = {}
        # Where a request's first decode step began: the ring has no earlier rows.
        self._decoded_from: dict[int | None, int] = {}
        self._occupancy = [[0, 0] for _ in self.memory.groups]
        layers = self.memory.layers
        self.prefill: CacheSource = _Source({layer: self._prefill_rows(layer) for layer in layers}, resident)
        self.decode: CacheSource = _Source({layer: self._decode_rows(layer) for layer in layers}, resident)

    @property
    def options(self) -> Offload:
        """Mode and pool."""
        return self._run.options

    def close(self) -> None:
        """End the streams, and give the host's memory back."""
        self.streams.close()
        for rows in self.memory.layers.values():
            release(rows.host, self._device)

    def admit(self, request: int) -> None:
        """Give a request an empty slot."""
        slot = self._free.pop()
        self._slots[request] = slot
        self._clear(slot)

    def release(self, request: int) -> None:
        """Take a request's slot back, in whatever state; what its pools held counts for the run's occupancy."""
        slot = self._slots.pop(request, None)
        if slot is None:
            return
        self._decoded_from.pop(request, None)
        self.streams.drain()
        for held, count in zip(self._occupancy, self._filled([slot]), strict=True):
            held[0] += count
            held[1] += self.memory.sizes.pool_tokens
        self._free.append(slot)

    def abort(self, requests: Sequence[int | None]) -> None:
        """After a call that did not end: forget what the pools of its requests were to hold. Their rows in host memory
        are whole up to the call, so it may be made again."""
        self.streams.abandon()
        for request in requests:
            if request in self._slots:
                self._clear(self._slots[request])

    def _prefill_rows(self, layer: int) -> LatentCache:
        # The MTP block's layer is a pass of its own.
        layers = self._setup.model.num_hidden_layers
        following = None if layer in (layers - 1, layers) else layer + 1
        return PrefillRows(layer, self.memory, self.streams, layer in (0, layers), following)

    def _decode_rows(self, layer: int) -> LatentCache:
        mode = MODES[self.options.offload]
        rows = mode(layer, self.memory, self.memory.group_of(layer), self.options, self.streams)
        return CheckedRows(layer, rows, self.memory, self.owner_of) if self._run.check else rows

    def owner_of(self, slot: int) -> int | None:
        """The request that has a slot."""
        return next((request for request, held in self._slots.items() if held == slot), None)

    def decode_inputs(self, rows: CallRows, positions_BS: Tensor, slot_mapping_T: Tensor) -> OffloadInputs:
        """What a decode call is told beside."""
        sizes, device = self.memory.sizes, self._device
        slots = [-1 if request is None else self._slots[request] for request in rows.requests]
        ring_first = [self._ring_first(*row) for row in zip(rows.requests, rows.committed, strict=True)]
        live = sum(request is not None for request in rows.requests)
        self._written_rows += live * rows.tokens * self._layers(draft=rows.is_draft)
        slots_B = torch.tensor(slots, device=device)
        ring_rows_BS = sizes.pool_rows + slots_B[:, None] * sizes.ring_tokens + positions_BS % sizes.ring_tokens
        return OffloadInputs(
            own_rows_T=torch.where(slot_mapping_T < 0, -1, ring_rows_BS.flatten()),
            committed_B=torch.tensor(list(rows.committed), device=device),
            request_slots_B=slots_B,
            ring_first_B=torch.tensor(ring_first, device=device),
        )

    def prefill_inputs(
        self, rows: CallRows, positions_BS: Tensor, slot_mapping_T: Tensor, blocks: int
    ) -> OffloadInputs:
        """What a prefill call of one request is told beside. blocks: columns of its block tables."""
        (length,), (committed,), (owned,) = rows.lengths, rows.committed, rows.blocks
        # These rows pass the ring by: decoding begins anew after them.
        self._decoded_from.pop(rows.requests[0], None)
        self._prompt_rows += length * self._layers(draft=rows.is_draft)
        nothing_B = torch.zeros(1, dtype=torch.long, device=self._device)
        return OffloadInputs(
            own_rows_T=torch.where(slot_mapping_T < 0, -1, positions_BS.flatten()),
            committed_B=nothing_B,
            request_slots_B=nothing_B,
            ring_first_B=nothing_B,
            buffer_tables=torch.arange(blocks, device=self._device)[None],
            stored=(committed, length, tuple(owned)),
        )

    def report(self) -> OffloadReport:
        """The figures of the run so far."""
        self.streams.drain()
        row_bytes = self._row_bytes
        filled = self._filled(list(self._slots.values()))
        here = len(self._slots) * self.memory.sizes.pool_tokens
        groups = tuple(
            GroupReport(
                group=group.index,
                layers=group.layers,
                **_figures(group),
                link_bytes=row_bytes * len(group.layers) * self._link_rows(group),
                is_mtp=group.layers[0] >= self._setup.model.num_hidden_layers,
                occupancy=(left + own) / max(room + here, 1),
            )
            for group, (left, room), own in zip(self.memory.groups, self._occupancy, filled, strict=True)
        )
        figures = self.streams.figures
        return OffloadReport(
            options=self.options,
            pool_tokens=self.memory.sizes.pool_tokens,
            ways=self.memory.sizes.ways,
            groups=groups,
            written_bytes=row_bytes * self._written_rows,
            prefill_bytes=row_bytes * self._prompt_rows,
            stall_s=figures.stall_s,
            most_behind=figures.most_behind,
            host_bytes=self.held.host,
            device_bytes=self.held.device,
        )

    def _filled(self, slots: list[int]) -> list[int]:
        """Rows of some slots' pools that hold a token, in each group."""
        counts = [(group.state.tags_RNW[slots] >= 0).sum() for group in self.memory.groups]
        return [int(count) for count in torch.stack(counts).tolist()]

    def _link_rows(self, group: GroupMemory) -> int:
        """Rows that each layer of a group has read from the host in decode steps."""
        figures = _figures(group)
        if self.options.offload == "direct":
            return figures["unique_misses"]
        return figures["unique_misses"] + figures["repeated_misses"] + figures["window_reads"]

    @property
    def _row_bytes(self) -> int:
        host = next(iter(self.memory.layers.values())).host
        return int(host.shape[-1]) * int(host.itemsize)

    def _layers(self, *, draft: bool) -> int:
        """Offloaded layers that a call writes to."""
        return sum((layer >= self._setup.model.num_hidden_layers) == draft for layer in self.memory.layers)

    def _ring_first(self, request: int | None, committed: int) -> int:
        """The first position that the ring still has: all tokens of a step overwrite older ones, kept or not."""
        if request is None:
            return 0
        start = self._decoded_from.setdefault(request, committed)
        return max(start, committed + 1 + self._setup.mtp.num_mtp_tokens - self.memory.sizes.ring_tokens)

    def _clear(self, slot: int) -> None:
        """Forget all that a slot's pools hold."""
        for group in self.memory.groups:
            state = group.state
            state.tags_RNW[slot] = -1
            state.used_RNW[slot] = -1
            state.hands_RN[slot] = 0
            state.marks_RN[slot] = 0


def _figures(group: GroupMemory) -> dict[str, int]:
    """The counts of a group so far, by name."""
    assert group.figures_C is not None, "a run counts"
    return {name: int(value) for name, value in zip(STATS, group.figures_C.tolist(), strict=True)}


@dataclass(frozen=True, slots=True)
class _Source:
    """The caches as the decoder of one kind of call sees them: offloaded rows, and what stays on the device."""

    offloaded: Mapping[int, LatentCache]
    resident: CacheSource

    def latent(self, layer: int) -> LatentCache:
        """Latent rows of a layer."""
        return self.offloaded[layer] if layer in self.offloaded else self.resident.latent(layer)

    def indexer(self, layer: int) -> Tensor:
        """Indexer keys of a full layer."""
        return self.resident.indexer(layer)
