"""Taking the memory that offload holds in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import lazy_loader as lazy

from castoff.model.offload import GroupMemory, LayerMemory, OffloadMemory
from castoff.model.offload_sizes import (
    PREFILL_BUFFERS,
    Extent,
    OffloadBytes,
    offload_bytes,
    offloaded_groups,
    pool_sizes,
    selection_rows,
    staging_buffers,
)
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


def run_sizes(setup: Setup, run: OffloadRun) -> PoolSizes:
    """Rows that each request has in every layer."""
    return pool_sizes(setup, run.options, run.slots)


def run_bytes(setup: Setup, run: OffloadRun, *, dtype: Tensor) -> OffloadBytes:
    """What a run will hold; whole numbers."""
    extent = Extent(
        requests=run.slots,
        host_rows=(run.num_blocks + 1) * run.block_tokens,
        prompt_rows=(_prefill_blocks(run) + 1) * run.block_tokens,
    )
    groups, row_bytes = offloaded_groups(setup, run.options), _row_bytes(setup, dtype)
    return offload_bytes(groups, setup, run.options, run_sizes(setup, run), extent, row_bytes=row_bytes)


def allocate(setup: Setup, run: OffloadRun, *, dtype: Tensor, device: Tensor) -> OffloadMemory:
    """Take all of it, the host's first. Raises CastoffError where there is not as much.

    Device rows start as zeros: a row that nobody has written is multiplied by a weight of zero, and must not be NaN.
    """
    check_host_bytes(run_bytes(setup, run, dtype=dtype).host, run.host_bytes)
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
    groups, sizes = offloaded_groups(setup, run.options), run_sizes(setup, run)
    width, stored = _row(setup, dtype)

    def rows(count: int) -> Tensor:
        return torch.zeros(count, width, dtype=stored, device=device)

    staging = [rows(max(sizes.requests * sizes.staging_rows, 1)) for _ in range(staging_buffers(groups, run.options))]
    layers = {
        layer: LayerMemory(
            host=hosts[layer],
            region=rows(sizes.layer_rows + 1),
            staging=staging[place % len(staging)],
            selection=rows(selection_rows(setup, run.options, run.slots)),
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


def _prefill_blocks(run: OffloadRun) -> int:
    return -(-run.longest // run.block_tokens)
