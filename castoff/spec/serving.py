"""What a serving stack adds to the steps of a model: host time, graphs, formats, and how it admits requests.

`[serving]` of a backend file. What differs between systems stands in `[serving.systems.DEVICE]`; `default` is for the
devices that have no table of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, get_args

from castoff.spec.quant import AttentionAction
from castoff.spec.toml_file import Table, shown

if TYPE_CHECKING:
    from castoff.spec.backend import Origin

DEFAULT_SYSTEM = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """When a request may join: if what it needs is free, beside what is set aside for the requests that run.

    Set aside is a share of the tokens that each may still generate, counted up to clip_tokens: reserve_start at first,
    falling to reserve_least in reserve_decay_steps decode steps. A request itself needs its prompt and its own tokens
    up to clip_tokens.

    reserve_ranks_factor: what both shares are multiplied by where there are several attention-DP ranks.
    retraction_steps: decode steps for which requests are sent back to the queue once memory is used up.
    retracted_first: whether they wait at the head of the queue, or at its end.
    """

    reserve_start: float
    reserve_least: float
    reserve_decay_steps: int
    reserve_ranks_factor: float
    clip_tokens: int
    retraction_steps: int
    retracted_first: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSystem:
    """The stack on one device.

    host_s_per_decode_step: host time that no device work hides. host_s_per_prefill: the same of a prompt's pass,
        tokenisation and its way through the server included.
    prefill_floor_s_per_layer: what the host needs to launch a layer op by op, the least that a pass takes.
    prefill_chunk_tokens: most tokens of one pass.
    kv_action: format of the latent cache where none is asked for.
    """

    host_s_per_decode_step: float
    host_s_per_prefill: float
    prefill_floor_s_per_layer: float
    prefill_chunk_tokens: int
    kv_action: AttentionAction
    origin: Origin
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCost:
    """A stack's `[serving]` section.

    memory_fraction: of device memory, for weights and caches; what is left over is for activations and graphs.
    graph_batches: decode batches for which there is a graph; others are padded to the next, larger ones run op by op.
    page_tokens: rows that caches are given out by; a request's last page is half empty on average.
    max_running_requests: requests that decode together, per attention-DP rank.
    mixes_prefill: whether decodes go on in the pass that computes a prompt, or wait for it.
    chunk_per_rank: whether every attention-DP rank computes prefill_chunk_tokens in a pass, or all together.
    indexer_action: format of the indexer cache; None means that of the latent cache.
    host_prefill_stall_share: of host_s_per_prefill, the share during which decodes wait. The rest passes before a
        request reaches the queue.
    prefill_factor: seconds of a prompt's pass on the device over what its ops add up to.
    expert_load_alpha: exponent of the power law by which experts are chosen; 0 is an even load.
    systems: by device name.
    """

    memory_fraction: float
    graph_batches: tuple[int, ...]
    page_tokens: int
    max_running_requests: int
    mixes_prefill: bool
    chunk_per_rank: bool
    indexer_action: AttentionAction | None
    host_prefill_stall_share: float
    prefill_factor: float
    expert_load_alpha: float
    admission: Admission
    systems: Mapping[str, ServingSystem] = field(hash=False)
    origin: Origin
    source: str

    def system(self, device: str) -> ServingSystem:
        """The stack on this device."""
        return self.systems.get(device, self.systems[DEFAULT_SYSTEM])


def read_serving(table: Table, origins: tuple[Origin, ...]) -> ServingCost:
    """A `[serving]` section. Raises CastoffError."""
    table.only(item.name for item in fields(ServingCost))
    indexer = "indexer_action"
    systems = table.table("systems")
    if DEFAULT_SYSTEM not in systems.values:
        raise systems.fault(DEFAULT_SYSTEM, "is missing")
    return ServingCost(
        memory_fraction=table.fraction("memory_fraction"),
        graph_batches=_increasing(table, "graph_batches"),
        page_tokens=table.count("page_tokens"),
        max_running_requests=table.count("max_running_requests"),
        mixes_prefill=table.flag("mixes_prefill"),
        chunk_per_rank=table.flag("chunk_per_rank"),
        indexer_action=table.choice(indexer, get_args(AttentionAction)) if indexer in table.values else None,
        host_prefill_stall_share=_share(table, "host_prefill_stall_share"),
        prefill_factor=table.positive("prefill_factor"),
        expert_load_alpha=table.at_least_zero("expert_load_alpha"),
        admission=_read_admission(table.table("admission")),
        systems={name: _read_system(systems.table(name), origins) for name in systems.values},
        origin=table.choice("origin", origins),
        source=table.text("source"),
    )


def serving_sources(serving: ServingCost) -> dict[str, str]:
    """Each part of the section to its source."""
    systems = {f"serving.systems.{name}": system.source for name, system in serving.systems.items()}
    return {"serving": serving.source, "serving.admission": serving.admission.source, **systems}


def _read_admission(table: Table) -> Admission:
    table.only(item.name for item in fields(Admission))
    start, least = _share(table, "reserve_start"), _share(table, "reserve_least")
    if least > start:
        raise table.fault("reserve_least", f"must be at most reserve_start, {start:g}, got {least:g}")
    return Admission(
        reserve_start=start,
        reserve_least=least,
        reserve_decay_steps=table.count("reserve_decay_steps"),
        reserve_ranks_factor=_share(table, "reserve_ranks_factor"),
        clip_tokens=table.count("clip_tokens", at_least=0),
        retraction_steps=table.count("retraction_steps"),
        retracted_first=table.flag("retracted_first"),
        source=table.text("source"),
    )


def _read_system(table: Table, origins: tuple[Origin, ...]) -> ServingSystem:
    table.only(item.name for item in fields(ServingSystem))
    return ServingSystem(
        host_s_per_decode_step=table.at_least_zero("host_s_per_decode_step"),
        host_s_per_prefill=table.at_least_zero("host_s_per_prefill"),
        prefill_floor_s_per_layer=table.at_least_zero("prefill_floor_s_per_layer"),
        prefill_chunk_tokens=table.count("prefill_chunk_tokens"),
        kv_action=table.choice("kv_action", get_args(AttentionAction)),
        origin=table.choice("origin", origins),
        source=table.text("source"),
    )


def _share(table: Table, key: str) -> float:
    value = table.at_least_zero(key)
    if value > 1:
        raise table.fault(key, f"must be from 0 to 1, got {value:g}")
    return value


def _increasing(table: Table, key: str) -> tuple[int, ...]:
    values = table.values.get(key)
    if not isinstance(values, list) or not values:
        raise table.fault(key, f"must be a list of whole numbers, got {shown(values)}")
    whole = all(isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31 for value in values)
    if not whole or any(a >= b for a, b in pairwise(values)):
        raise table.fault(key, "must be whole numbers of at least 1, each greater than the one before")
    return tuple(values)
