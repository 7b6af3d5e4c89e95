"""The latent cache in host memory: what each offload mode does in a layer, in which order, on which stream.

Main computes. Under `direct` the copy stream brings the rows of a group's later layers while the first ones compute;
under `serve_install` the install stream moves served rows into the pool afterwards. Labels name what has been done: a
stream that waits for one goes on after all that came before it. Of a layer l of group g, in decode:

    direct         owner: plan(g), fetch(l); on copy, after that, fetch of the later layers, which wait for it; write to
                   host, attention
    serve_install  owner: wait for installed(g), plan(g); wait for installed(l), write to host, serve, attention; on
                   install: the later layers, the owner last, then the metadata
    gather         owner: plan(g); write to host, fetch(l), attention

A group's labels have its owner's number.

and in prefill, with two buffers in turn: the layer's earlier rows come on copy, after what was stored from the buffer;
write the rows, and while attention reads them, store the new ones on copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import lazy_loader as lazy

from castoff.model.inputs import AttendedRows, OffloadInputs, Selected, StepInputs
from castoff.model.offload_sizes import PREFILL_BUFFERS
from castoff.ops.offload_plan import (
    PlanInputs,
    PoolSizes,
    PoolState,
    RowPlan,
    ServePlan,
    install_metadata,
    plan_direct,
    plan_gather,
    plan_serve,
)
from castoff.ops.offload_rows import fetch, install, load_rows, serve, store_rows, write_to_host
from castoff.ops.program import Abstract, Tensor
from castoff.spec.offload import Offload

torch = lazy.load("torch")

Label = tuple[str, int]
COPY, INSTALL = "copy", "install"


class Streams(Protocol):
    """Streams beside main. Calls of `work` go in the order of submission, each stream at its own pace."""

    def record(self, label: Label) -> None:
        """Name the point that main has reached."""

    def wait(self, label: Label) -> None:
        """Main goes on after what last had this label; at once where nothing had, or main has waited for it before."""

    def submit(self, stream: str, label: Label, work: Callable[[], None], *, after: Label) -> None:
        """Have `work` done on a stream; what is done then has `label`.

        after: what main has recorded before it; all that main has done, where nothing has that label.
        """


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """An index group on the device: its layers, owner first, what is known of their pools, and counts so far, which a
    cast has none of."""

    index: int
    layers: tuple[int, ...]
    state: PoolState
    figures_C: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Rows of one layer: in host memory (blocks, block tokens, X), and on the device.

    region: as `ops/offload_plan.py` says, (rows, X). staging: what layers share in turn, (rows, X). selection: of
    serve_install, (T · K, X); an empty tensor otherwise.
    """

    host: Tensor
    region: Tensor
    staging: Tensor
    selection: Tensor


@dataclass(frozen=True, slots=True)
class OffloadMemory:
    """All that offload holds. layers: by number, the MTP block's after the last where it is offloaded.

    prompts: buffers for one layer's rows of one request in order of position, (blocks, block tokens, X), of which the
    last block takes what has no place.
    """

    sizes: PoolSizes
    groups: tuple[GroupMemory, ...]
    layers: dict[int, LayerMemory]
    prompts: tuple[Tensor, ...]

    def group_of(self, layer: int) -> GroupMemory:
        """The group that a layer belongs to."""
        return next(group for group in self.groups if layer in group.layers)

    @property
    def last_of_passes(self) -> list[int]:
        """The last layer of the main pass and, where it is offloaded, the MTP block's."""
        return list(self.layers)[-2:]


@dataclass(frozen=True, slots=True)
class _Offloaded:
    """One layer in a decode call."""

    layer: int
    memory: OffloadMemory
    group: GroupMemory
    options: Offload
    streams: Streams

    @property
    def block_kind(self) -> str:
        """An owner sends for as many layers as its group has; the last of a group ends it."""
        layers = self.group.layers
        if self.layer == layers[0]:
            return f"/owner of {len(layers)}"
        return "/last" if self.layer == layers[-1] else ""

    @property
    def rows(self) -> LayerMemory:
        return self.memory.layers[self.layer]

    def written_to(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """The layer's region, at the ring rows of the tokens."""
        return self.rows.region, _of(inputs).own_rows_T

    def select(self, inputs: StepInputs, selected: Selected, *, chosen_here: bool) -> tuple[AttendedRows, Selected]:
        """What a mode is."""
        raise NotImplementedError

    def attended(self, inputs: StepInputs, selected: Selected) -> None:
        """Nothing is left to do."""

    def _write(self, inputs: StepInputs) -> None:
        write_to_host(self.rows.region, _of(inputs).own_rows_T, self.rows.host, inputs.slot_mapping_T)

    def _count(self, figures_BC: Tensor) -> None:
        if self.group.figures_C is not None:
            self.group.figures_C.add_(figures_BC.sum(0))

    def _plan_inputs(self, inputs: StepInputs) -> PlanInputs:
        own = _of(inputs)
        return PlanInputs(
            inputs.slot_mapping_T, inputs.seq_lens_B, own.committed_B, own.request_slots_B, own.ring_first_B
        )

    def _fetch(self, layer: int, inputs: StepInputs, plan: RowPlan) -> None:
        rows = self.memory.layers[layer]
        fetch(
            rows.host, inputs.block_tables, _of(inputs).request_slots_B, plan, rows.region, rows.staging,
            self.memory.sizes,
        )  # fmt: skip

    def _wait_for_prompts(self) -> None:
        """Rows of prompts may still be on their way to host memory; each pass stores its last layer last."""
        for layer in self.memory.last_of_passes:
            self.streams.wait(("stored", layer))


class DirectRows(_Offloaded):
    """Every missed row lands once, in its final place; attention reads it there."""

    __slots__ = ()

    def select(self, inputs: StepInputs, selected: Selected, *, chosen_here: bool) -> tuple[AttendedRows, Selected]:
        """The owner plans and fetches its rows, and sends for those of its group; the others wait for theirs."""
        if chosen_here:
            self._wait_for_prompts()
            plan = plan_direct(selected.topk_TK, self._plan_inputs(inputs), self.group.state, self.memory.sizes)
            self._count(plan.figures_BC)
            self._fetch(self.layer, inputs, plan)
            if self.options.prefetches:
                # Not before the owner's own rows, which its attention waits for.
                self.streams.record(("owner fetched", self.layer))
                for layer in self.group.layers[1:]:
                    self._prefetch(layer, inputs, plan)
            selected = _with_rows(selected, plan)
        elif self.options.prefetches:
            self.streams.wait(("fetched", self.layer))
        else:
            self._fetch(self.layer, inputs, _row_plan(selected))
        self._write(inputs)
        return AttendedRows(self.rows.region, selected.rows_TK, staging=self.rows.staging), selected

    def _prefetch(self, layer: int, inputs: StepInputs, plan: RowPlan) -> None:
        self.streams.submit(
            COPY,
            ("fetched", layer),
            lambda: self._fetch(layer, inputs, plan),
            after=("owner fetched", self.group.layers[0]),
        )


class GatherRows(_Offloaded):
    """Each query keeps the rows of its last selection; all others are read from the host."""

    __slots__ = ()

    def select(self, inputs: StepInputs, selected: Selected, *, chosen_here: bool) -> tuple[AttendedRows, Selected]:
        """The owner plans; every layer fetches. A draft call that reuses rows does neither."""
        self._write(inputs)
        rows_TK = selected.rows_TK
        reuses = not chosen_here and len(selected.lists) == 0 and rows_TK is not None
        if chosen_here or rows_TK is None:
            self._wait_for_prompts()
            plan = plan_gather(selected.topk_TK, self._plan_inputs(inputs), self.group.state, self.memory.sizes)
            self._count(plan.figures_BC)
            selected = _with_rows(selected, plan)
        if not reuses:
            self._fetch(self.layer, inputs, _row_plan(selected))
        return AttendedRows(self.rows.region, selected.rows_TK, staging=self.rows.staging), selected


class ServeInstallRows(_Offloaded):
    """The published shared-indexer route: rows are served into a selection buffer, and installed in the pool later."""

    __slots__ = ()

    def select(self, inputs: StepInputs, selected: Selected, *, chosen_here: bool) -> tuple[AttendedRows, Selected]:
        """The owner plans; every layer serves."""
        if chosen_here:
            self._wait_for_prompts()
            self.streams.wait(("group installed", self.layer))
            plan = plan_serve(selected.topk_TK, self._plan_inputs(inputs), self.group.state, self.memory.sizes)
            self._count(plan.figures_BC)
            lists = (plan.sources_TK, plan.ids_BX, plan.to_rows_BX, plan.from_BX, plan.counts_B, plan.figures_BC)
            selected = Selected(selected.topk_TK, _places(plan.sources_TK), lists)
        self.streams.wait(("installed", self.layer))
        self._write(inputs)
        rows = self.rows
        hosted = self.memory.sizes.hosted
        serve(rows.host, inputs.block_tables, _serve_plan(selected), rows.region, rows.selection, hosted=hosted)
        self.streams.record(("served", self.layer))
        return AttendedRows(rows.selection, selected.rows_TK), selected

    def attended(self, inputs: StepInputs, selected: Selected) -> None:
        """Install what was served; the owner's rows and the metadata come after the last layer of the group."""
        owner, last = self.group.layers[0], self.group.layers[-1]
        plan, slots_B = _serve_plan(selected), _of(inputs).request_slots_B
        if self.layer != owner:
            self._install(self.layer, plan)
        if self.layer == last:
            self._install(owner, plan)
            self._submit(
                ("group installed", owner),
                lambda: install_metadata(slots_B, plan, self.group.state, self.memory.sizes),
                after=("served", last),
            )

    def _install(self, layer: int, plan: ServePlan) -> None:
        rows = self.memory.layers[layer]
        self._submit(("installed", layer), lambda: install(rows.selection, plan, rows.region), after=("served", layer))

    def _submit(self, label: Label, work: Callable[[], None], *, after: Label) -> None:
        if self.options.has_install_stream:
            self.streams.submit(INSTALL, label, work, after=after)
        else:
            work()
            self.streams.record(label)


MODES = {"direct": DirectRows, "gather": GatherRows, "serve_install": ServeInstallRows}


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """One layer in a prefill call of one request: its rows lie in one of two buffers meanwhile, in order of position.

    is_first: of its pass. following: the next layer of the pass, whose earlier rows come while this one computes.
    """

    layer: int
    memory: OffloadMemory
    streams: Streams
    is_first: bool
    following: int | None

    @property
    def block_kind(self) -> str:
        """A pass begins with a load of its own, and its last layer sends for nothing."""
        return "/first" if self.is_first else "/last" if self.following is None else ""

    def written_to(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """The buffer, with the rows of earlier chunks in it."""
        own = _of(inputs)
        if self.is_first:
            self._load(self.layer, own)
        self.streams.wait(("loaded", self.layer))
        if self.following is not None:
            self._load(self.following, own)
        return self.memory.prompts[_buffer(self.layer)], own.own_rows_T

    def select(self, inputs: StepInputs, selected: Selected, *, chosen_here: bool) -> tuple[AttendedRows, Selected]:
        """Attention reads the buffer, while the new rows go to host memory."""
        own = _of(inputs)
        buffer, host = self.memory.prompts[_buffer(self.layer)], self.memory.layers[self.layer].host
        self.streams.record(("written", self.layer))
        self.streams.submit(
            COPY, ("stored", self.layer), lambda: store_rows(buffer, host, *own.stored), after=("written", self.layer)
        )
        return AttendedRows(buffer, selected.topk_TK, own.buffer_tables, inputs.seq_lens_B), selected

    def attended(self, inputs: StepInputs, selected: Selected) -> None:
        """Nothing is left to do."""

    def _load(self, layer: int, own: OffloadInputs) -> None:
        """Send for the rows that a layer has in host memory, after all that uses its buffer now."""
        start, _, blocks = own.stored
        buffer, host = self.memory.prompts[_buffer(layer)], self.memory.layers[layer].host
        # Main has attended to what the buffer held, and has written all rows of earlier steps to the host.
        self.streams.record(("free", layer))
        self.streams.submit(
            COPY, ("loaded", layer), lambda: load_rows(host, buffer, start, blocks), after=("free", layer)
        )


def _buffer(layer: int) -> int:
    return layer % PREFILL_BUFFERS


def _of(inputs: StepInputs) -> OffloadInputs:
    assert inputs.offload is not None, "a call over offloaded rows is told where they lie"
    return inputs.offload


def _places(sources_TK: Tensor) -> Tensor:
    """The row of the selection buffer that each place has: the place itself; −1 where nothing is selected."""
    if isinstance(sources_TK, Abstract):
        return sources_TK
    positions_TK = torch.arange(sources_TK.numel(), dtype=torch.int32, device=sources_TK.device)
    return torch.where(sources_TK == -1, -1, positions_TK.view(sources_TK.shape))


def _with_rows(selected: Selected, plan: RowPlan) -> Selected:
    """The selection with all that the later layers of its group need of its plan."""
    return Selected(selected.topk_TK, plan.rows_TK, (plan.ids_BX, plan.to_rows_BX, plan.counts_B, plan.figures_BC))


def _row_plan(selected: Selected) -> RowPlan:
    assert selected.rows_TK is not None, "an owner plans for its group"
    return RowPlan(selected.rows_TK, *selected.lists)


def _serve_plan(selected: Selected) -> ServePlan:
    return ServePlan(*selected.lists)
