"""How large everything is that offload holds, and its allocation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.model.offload import PREFILL_BUFFERS, GroupMemory, LayerMemory, OffloadMemory
from castoff.model.setup import Setup
from castoff.offload.host_store import check_host_bytes, host_rows, near, release
from castoff.ops.cache_rows import row_storage
from castoff.ops.offload_plan import PoolSizes, PoolState
from castoff.ops.program import Tensor
from castoff.policy.arrays import STATS
from castoff.spec.offload import Offload

torch = lazy.load("torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRun:
    """Offload on one rank of a run.

    slots: requests at once. num_blocks, block_tokens: of the host's rows. longest: tokens that a request may reach.
    host_bytes: the most host memory that may be taken; None sets no limit. check: verify the rows that attention reads.
    """

    options: Offload
    slots: int
    num_blocks: int
    block_tokens: int
    longest: int
    host_bytes: int | None = None
    check: bool = False


def offloaded_groups(setup: Setup, options: Offload) -> list[tuple[int, ...]]:
    """Layers of each index group, owner first; the MTP block's is one more where it is offloaded.

    Raises CastoffError for a model without an indexer: its attention reads all rows.
    """
    if setup.model.indexer is None:
        raise CastoffError(
            f"--offload {options.offload}: {setup.model.name} has no sparse attention, so every step would read its "
            "whole KV cache over the link; use --offload none"
        )
    groups = [group.layers for group in setup.model.index_groups]
    if options.offloads_mtp and setup.mtp.num_mtp_tokens:
        groups.append((setup.model.num_hidden_layers,))
    return groups


def pool_sizes(setup: Setup, run: OffloadRun) -> PoolSizes:
    """Rows that each request has in every layer."""
    assert setup.topk_limit is not None, "offload is for sparse attention"
    queries, options = 1 + setup.mtp.num_mtp_tokens, run.options
    if options.offload == "gather":
        return PoolSizes(run.slots, queries, setup.topk_limit, queries, 0, "previous")
    sets, ways = options.pool
    if options.offload == "serve_install":
        return PoolSizes(run.slots, sets, ways, queries, 0, "fifo")
    # A token that is committed stays in the ring for one step more, in which it can be promoted.
    return PoolSizes(run.slots, sets, ways, 2 * queries, queries * setup.topk_limit, options.pool_policy)


@dataclass(frozen=True, slots=True)
class OffloadBytes:
    """Bytes on the host, and on the device by use. prefill: buffers of a prompt's layer, one request at a time."""

    host: int
    pool: int
    ring: int
    staging: int
    selection: int
    metadata: int
    prefill: int

    @property
    def device(self) -> int:
        """All on the device."""
        return self.pool + self.ring + self.staging + self.selection + self.metadata + self.prefill


def offload_bytes(setup: Setup, run: OffloadRun, *, dtype: Tensor) -> OffloadBytes:
    """What a run will hold."""
    groups, sizes, row = offloaded_groups(setup, run.options), pool_sizes(setup, run), _row_bytes(setup, dtype)
    layers = sum(len(group) for group in groups)
    per_group = 4 * sizes.requests * (2 * sizes.pool_tokens + 2 * sizes.sets)
    return OffloadBytes(
        host=layers * (run.num_blocks + 1) * run.block_tokens * row,
        pool=layers * sizes.pool_rows * row,
        ring=layers * (sizes.layer_rows - sizes.pool_rows + 1) * row,
        staging=_staging_buffers(groups, run) * max(sizes.requests * sizes.staging_rows, 1) * row,
        selection=layers * _selection_rows(setup, run) * row,
        metadata=len(groups) * (per_group + 8 * len(STATS)),
        prefill=PREFILL_BUFFERS * (_prefill_blocks(run) + 1) * run.block_tokens * row,
    )


def allocate(setup: Setup, run: OffloadRun, *, dtype: Tensor, device: Tensor) -> OffloadMemory:
    """Take all of it, the host's first. Raises CastoffError where there is not as much.

    Device rows start as zeros: a row that nobody has written is multiplied by a weight of zero, and must not be NaN.
    """
    check_host_bytes(offload_bytes(setup, run, dtype=dtype).host, run.host_bytes)
    hosts: dict[int, Tensor] = {}
    try:
        with near(device):
            for group in offloaded_groups(setup, run.options):
                for layer in group:
                    hosts[layer] = _host_rows(setup, run, dtype=dtype, device=device)
        return _around(hosts, setup, run, dtype=dtype, device=device)
    except BaseException:
        for rows in hosts.values():
            release(rows, device)
        raise


def _host_rows(setup: Setup, run: OffloadRun, *, dtype: Tensor, device: Tensor) -> Tensor:
    width, stored = _row(setup, dtype)
    return host_rows((run.num_blocks + 1, run.block_tokens, width), stored, device)


def _around(
    hosts: Mapping[int, Tensor], setup: Setup, run: OffloadRun, *, dtype: Tensor, device: Tensor
) -> OffloadMemory:
    """What the device holds of layers whose rows are in host memory."""
    groups, sizes = offloaded_groups(setup, run.options), pool_sizes(setup, run)
    width, stored = _row(setup, dtype)

    def rows(count: int) -> Tensor:
        return torch.zeros(count, width, dtype=stored, device=device)

    staging = [rows(max(sizes.requests * sizes.staging_rows, 1)) for _ in range(_staging_buffers(groups, run))]
    layers = {
        layer: LayerMemory(
            host=hosts[layer],
            region=rows(sizes.layer_rows + 1),
            staging=staging[place % len(staging)],
            selection=rows(_selection_rows(setup, run)),
        )
        for group in groups
        for place, layer in enumerate(group)
    }
    return OffloadMemory(
        sizes,
        tuple(
            GroupMemory(index, group, _state(sizes, device), torch.zeros(len(STATS), dtype=torch.long, device=device))
            for index, group in enumerate(groups)
        ),
        layers,
        tuple(
            torch.zeros(_prefill_blocks(run) + 1, run.block_tokens, width, dtype=stored, device=device)
            for _ in range(PREFILL_BUFFERS)
        ),
    )


def _state(sizes: PoolSizes, device: Tensor) -> PoolState:
    def filled(value: int, *shape: int) -> Tensor:
        return torch.full((sizes.requests, *shape), value, dtype=torch.int32, device=device)

    return PoolState(
        filled(-1, sizes.sets, sizes.ways),
        filled(-1, sizes.sets, sizes.ways),
        filled(0, sizes.sets),
        filled(0, sizes.sets),
    )


def _row(setup: Setup, dtype: Tensor) -> tuple[int, Tensor]:
    model = setup.model
    values = model.kv_lora_rank + model.qk_rope_head_dim
    return row_storage(values, setup.cache.latent_row_bytes, setup.cache.action, dtype)


def _row_bytes(setup: Setup, dtype: Tensor) -> int:
    width, stored = _row(setup, dtype)
    return int(width * stored.itemsize)


def _staging_buffers(groups: list[tuple[int, ...]], run: OffloadRun) -> int:
    """Layers of a group that are fetched ahead cannot share one."""
    return max(len(group) for group in groups) if run.options.prefetches else 1


def _selection_rows(setup: Setup, run: OffloadRun) -> int:
    if run.options.offload != "serve_install":
        return 0
    assert setup.topk_limit is not None
    return run.slots * (1 + setup.mtp.num_mtp_tokens) * setup.topk_limit


def _prefill_blocks(run: OffloadRun) -> int:
    return -(-run.longest // run.block_tokens)
