"""Offloaded caches without data: the modes of `model/offload.py`, as a cast records them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castoff.dims import Dim, ceil_div
from castoff.model.inputs import KV_BLOCK_TOKENS, AbstractCaches, LatentCache, OffloadInputs
from castoff.model.offload import MODES, GroupMemory, Label, LayerMemory, OffloadMemory, PrefillRows
from castoff.model.offload_sizes import PREFILL_BUFFERS, offloaded_groups, selection_rows
from castoff.model.setup import Setup
from castoff.ops.lengths import Lengths
from castoff.ops.offload_plan import PoolSizes, PoolState
from castoff.ops.program import Abstract, Recorder
from castoff.spec.offload import Offload


@dataclass(frozen=True, slots=True)
class RecordedStreams:
    """Streams as events of a program."""

    recorder: Recorder

    def record(self, label: Label) -> None:
        """An event after what main was given so far."""
        self.recorder.signal(label)

    def wait(self, label: Label) -> None:
        """What main is given from here on comes after it."""
        self.recorder.wait(label)

    def submit(self, stream: str, label: Label, work: Callable[[], None], *, after: Label) -> None:
        """Record it on that stream."""
        with self.recorder.on_stream(stream):
            self.recorder.wait(after)
            work()
            self.recorder.signal(label)


class AbstractOffloadedCaches:
    """Latent rows in host memory, pools on the device, and resident caches for what is not offloaded.

    prefill: whether the calls are those of a prompt.
    """

    def __init__(
        self, setup: Setup, lengths: Lengths, options: Offload, sizes: PoolSizes, recorder: Recorder, *, prefill: bool
    ) -> None:  # fmt: skip
        self._resident = AbstractCaches(setup, lengths, recorder)
        memory = _memory(setup, lengths, options, sizes, recorder)
        streams = RecordedStreams(recorder)
        layers = setup.model.num_hidden_layers

        def rows(layer: int) -> LatentCache:
            if prefill:
                # The MTP block's layer is a pass of its own.
                following = None if layer in (layers - 1, layers) else layer + 1
                return PrefillRows(layer, memory, streams, layer in (0, layers), following)
            return MODES[options.offload](layer, memory, memory.group_of(layer), options, streams)

        self._offloaded = {layer: rows(layer) for layer in memory.layers}

    def latent(self, layer: int) -> LatentCache:
        """Latent rows of a layer."""
        return self._offloaded[layer] if layer in self._offloaded else self._resident.latent(layer)

    def indexer(self, layer: int) -> Abstract:
        """Indexer keys of a full layer."""
        return self._resident.indexer(layer)


def _memory(
    setup: Setup, lengths: Lengths, options: Offload, sizes: PoolSizes, recorder: Recorder
) -> OffloadMemory:  # fmt: skip
    """Layers are alike, so they share what stands for their rows."""

    def rows(count: Dim, *, on_host: bool = False) -> Abstract:
        width = setup.cache.latent_row_bytes
        return recorder.tensor(count, width, dtype="int8", kind="cache", tier="host" if on_host else "device")

    def state(*shape: Dim) -> Abstract:
        return recorder.tensor(sizes.requests, *shape, dtype="int32", kind="metadata")

    layer_rows = LayerMemory(
        host=rows(lengths.total_tokens, on_host=True),
        region=rows(sizes.layer_rows),
        staging=rows(sizes.requests * sizes.staging_rows),
        selection=rows(selection_rows(setup, options, sizes.requests)),
    )
    pools = PoolState(
        state(sizes.sets, sizes.ways), state(sizes.sets, sizes.ways), state(sizes.sets), state(sizes.sets)
    )
    groups: Sequence[tuple[int, ...]] = offloaded_groups(setup, options)
    return OffloadMemory(
        sizes,
        tuple(GroupMemory(index, group, pools, None) for index, group in enumerate(groups)),
        {layer: layer_rows for group in groups for layer in group},
        tuple(rows(lengths.longest) for _ in range(PREFILL_BUFFERS)),
    )


def abstract_offload_inputs(lengths: Lengths, recorder: Recorder, *, prefill: bool) -> OffloadInputs:
    """What a call over offloaded rows is told beside, without data. In a prefill the rows of all requests count."""

    def numbers(count: Dim) -> Abstract:
        return recorder.tensor(count, dtype="int32", kind="metadata")

    requests = lengths.requests
    own = OffloadInputs(numbers(lengths.tokens), numbers(requests), numbers(requests), numbers(requests))
    if not prefill:
        return own
    blocks = ceil_div(lengths.longest, KV_BLOCK_TOKENS)
    return OffloadInputs(
        own.own_rows_T,
        own.committed_B,
        own.request_slots_B,
        own.ring_first_B,
        buffer_tables=recorder.tensor(requests, blocks, dtype="int32", kind="metadata"),
        stored=(lengths.total_tokens - lengths.tokens, lengths.total_tokens, ()),
    )
