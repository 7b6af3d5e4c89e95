"""Bytes per device and per host: weights, caches, activations, and what is left.

Everything here follows from shapes and formats, so its origin is `analytic`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from castoff.dims import Dim, ceil_div, maximum, where
from castoff.model.inputs import KV_BLOCK_TOKENS
from castoff.model.offload_sizes import Extent, OffloadBytes, offload_bytes, offloaded_groups
from castoff.model.record import OffloadCast
from castoff.model.setup import Setup
from castoff.model.weights import RankWeights
from castoff.ops.lengths import Lengths
from castoff.ops.linear import Weight
from castoff.ops.program import Abstract, Block, Program, Recorder
from castoff.spec.backend import Backend
from castoff.spec.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes on the fullest device of a deployment; host_kv_bytes is host memory of the device that needs most of it.

    pool_bytes (with rings of the last tokens), selection_bytes, staging_bytes (with buffers of a prompt's layer) and
    host_kv_bytes belong to KV offload and are 0 without it. host_bytes_capacity: a device's share of its host's.
    """

    device_bytes_capacity: int
    host_bytes_capacity: float
    weights_bytes: float
    kv_bytes: Dim
    indexer_cache_bytes: Dim
    pool_bytes: Dim
    selection_bytes: Dim
    staging_bytes: Dim
    metadata_bytes: Dim
    activation_bytes: Dim
    communication_bytes: float
    reserved_bytes: float
    host_kv_bytes: Dim

    @property
    def used_bytes(self) -> Dim:
        """Everything on the device, the reserve included."""
        return (
            self.weights_bytes
            + self.kv_bytes
            + self.indexer_cache_bytes
            + self.pool_bytes
            + self.selection_bytes
            + self.staging_bytes
            + self.metadata_bytes
            + self.activation_bytes
            + self.communication_bytes
            + self.reserved_bytes
        )

    @property
    def free_bytes(self) -> Dim:
        """Capacity minus use; negative where the step does not fit."""
        return self.device_bytes_capacity - self.used_bytes

    @property
    def fits_device(self) -> Any:
        """Whether the device has room (a bool, or one per scenario)."""
        # Expectations make fractions of a byte, which must not decide: sums in another order differ by such.
        return self.free_bytes > -0.3

    @property
    def fits(self) -> Any:
        """Whether device and host have room."""
        return self.fits_device & (self.host_kv_bytes <= self.host_bytes_capacity)


@dataclass(frozen=True, slots=True)
class StageShare:
    """What one pipeline stage holds: bytes of weights, and layers with latent and indexer caches."""

    weights_bytes: float
    latent_layers: int
    indexer_layers: int


def stage_shares(setup: Setup) -> tuple[StageShare, ...]:
    """The share of every pipeline stage on the predicted rank."""
    model, stages = setup.model, setup.mesh.pp.size
    weights = RankWeights(setup, Recorder())
    outer = weights.outer()
    ends = (*setup.stage_starts[1:], model.num_hidden_layers)
    by_kind: dict[tuple[str, str], float] = {}
    shares = []
    for stage, (start, end) in enumerate(zip(setup.stage_starts, ends, strict=True)):
        kinds = Counter(_kind(setup, layer) for layer in range(start, end))
        layer_of_kind = {_kind(setup, layer): layer for layer in range(start, end)}
        for kind, layer in layer_of_kind.items():
            if kind not in by_kind:
                by_kind[kind] = _bytes(weights.layer(layer))
        total = sum(count * by_kind[kind] for kind, count in kinds.items())
        latent, full = end - start, sum(count for kind, count in kinds.items() if kind[0] == "full")
        has_mtp = stage == stages - 1 and setup.mtp.num_mtp_tokens > 0
        if has_mtp:
            # The draft calls iterate one block, with one cache.
            total += _bytes(weights.layer(model.num_hidden_layers))
            latent, full = latent + 1, full + (model.indexer is not None)
        if stage == 0 or has_mtp:
            total += outer["embed_tokens"].bytes
        if stage == stages - 1:
            total += outer["norm"].bytes
            # A tied lm_head is the embedding, where the stage has that.
            tied = model.tie_word_embeddings and (stage == 0 or has_mtp)
            total += 0 if tied else outer["lm_head"].bytes
        shares.append(StageShare(total, latent, full))
    return tuple(shares)


def _kind(setup: Setup, layer: int) -> tuple[str, str]:
    model = setup.model
    return (model.indexer_types[layer] if model.indexer else "none", model.mlp_layer_types[layer])


def _bytes(weights: Mapping[str, Weight]) -> float:
    return sum(weight.bytes for weight in weights.values())


def footprint(
    setup: Setup,
    device: Device,
    backend: Backend,
    program: Program,
    resident: Lengths,
    *,
    reserved_bytes: float,
    offload: OffloadCast | None = None,
) -> Footprint:
    """Memory of one step. `resident`: all requests of the rank, whose caches it holds, micro-batches together.

    Of several pipeline stages the fullest one is reported. offload: with pools for all requests of the rank.
    """
    tokens = resident.total_tokens / setup.mesh.dcp.size
    host = device.host_link
    fullest: Footprint | None = None
    activations = peak_activation_bytes(program)
    host_bytes: Dim = 0
    for stage, share in enumerate(stage_shares(setup)):
        offloaded, held = _offloaded(setup, offload, resident, stage)
        own = Footprint(
            device_bytes_capacity=device.memory.size_bytes,
            host_bytes_capacity=host.host_memory_bytes / min(host.devices_per_host, setup.mesh.num_devices),
            weights_bytes=share.weights_bytes,
            kv_bytes=tokens * ((share.latent_layers - offloaded) * setup.cache.latent_row_bytes),
            indexer_cache_bytes=tokens * (share.indexer_layers * setup.cache.index_row_bytes),
            pool_bytes=held.pool + held.ring,
            selection_bytes=held.selection,
            staging_bytes=held.staging + held.prefill,
            metadata_bytes=_metadata_bytes(setup, resident) + held.metadata,
            activation_bytes=activations,
            communication_bytes=backend.communication_buffer_bytes if setup.mesh.num_devices > 1 else 0,
            reserved_bytes=reserved_bytes,
            host_kv_bytes=held.host,
        )
        fullest = own if fullest is None else _fuller(fullest, own)
        host_bytes = maximum(host_bytes, held.host)
    assert fullest is not None
    return replace(fullest, host_kv_bytes=host_bytes)


def _offloaded(setup: Setup, offload: OffloadCast | None, resident: Lengths, stage: int) -> tuple[int, OffloadBytes]:
    """Layers of a pipeline stage whose rows are in host memory, and what they hold there and on the device."""
    nothing = OffloadBytes(host=0, pool=0, ring=0, staging=0, selection=0, metadata=0, prefill=0)
    if offload is None:
        return 0, nothing
    # Past the last stage lies the MTP block, which it has too.
    starts = (*setup.stage_starts, setup.model.num_hidden_layers + 1)
    groups = [
        group for group in offloaded_groups(setup, offload.options) if starts[stage] <= group[0] < starts[stage + 1]
    ]
    if not groups:
        return 0, nothing
    extent = Extent(requests=resident.requests, host_rows=resident.total_tokens, prompt_rows=resident.longest)
    held = offload_bytes(
        groups, setup, offload.options, offload.sizes, extent, row_bytes=setup.cache.latent_row_bytes
    )  # fmt: skip
    return sum(len(group) for group in groups), held


def _fuller(a: Footprint, b: Footprint) -> Footprint:
    a_is_fuller = a.used_bytes >= b.used_bytes
    return Footprint(
        **{name: where(a_is_fuller, getattr(a, name), getattr(b, name)) for name in Footprint.__dataclass_fields__}  # type: ignore[arg-type]
    )


def _metadata_bytes(setup: Setup, resident: Lengths) -> Dim:
    """Block tables, lengths and slots, int32; and the rotary tables, cos and sin of half a head in bf16."""
    blocks = resident.requests * ceil_div(resident.longest, KV_BLOCK_TOKENS)
    rope = 2 * setup.model.max_position_embeddings * setup.model.qk_rope_head_dim
    return 4 * (blocks + resident.requests + resident.tokens) + rope


def peak_activation_bytes(program: Program) -> Dim:
    """Largest sum of live activations and scratch memory over the ops of a step.

    A value lives from the op that makes it, or the start of its block, to its last reader, or the end of its block.
    """
    peak: Dim = 0
    for block in program.blocks:
        peak = maximum(peak, _block_peak(block))
    return peak


def _block_peak(block: Block) -> Dim:
    last_use: dict[int, int] = {}
    for index, call in enumerate(block.calls):
        for tensor in (*call.inputs, *call.outputs):
            if tensor is not None:
                last_use[tensor.value] = index
    for tensor in block.outputs:
        if tensor is not None:
            last_use[tensor.value] = len(block.calls)
    live: dict[int, Dim] = {t.value: t.bytes for t in block.inputs if _is_activation(t)}  # type: ignore[union-attr]
    peak: Dim = 0
    for index, call in enumerate(block.calls):
        for tensor in (*call.inputs, *call.outputs):
            if tensor is not None and _is_activation(tensor):
                # A view may name a smaller part of a buffer; the buffer counts.
                live[tensor.value] = maximum(live.get(tensor.value, 0), tensor.bytes)
        total: Dim = call.work.workspace_bytes
        for size in live.values():
            total = total + size
        peak = maximum(peak, total)
        for value in [value for value in live if last_use.get(value, -1) <= index]:
            del live[value]
    return peak


def _is_activation(tensor: Abstract | None) -> bool:
    return tensor is not None and tensor.kind == "activation"
