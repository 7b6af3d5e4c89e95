"""How large everything is that offload holds, in closed form: of a run, and of a cast, whose sizes may be arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from castoff.dims import Dim, maximum
from castoff.errors import CastoffError
from castoff.model.setup import Setup
from castoff.ops.offload_plan import PoolSizes
from castoff.policy.arrays import STATS
from castoff.spec.offload import Offload

# Layers of a prompt take turns.
PREFILL_BUFFERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """requests: at once. host_rows: of every layer in host memory. prompt_rows: of the longest prompt, as buffers hold
    it."""

    requests: Dim
    host_rows: Dim
    prompt_rows: Dim


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadBytes:
    """Bytes on the host, and on the device by use: whole numbers in a run, dims in a cast.

    prefill: buffers of a prompt's layer, one request at a time.
    """

    host: Any
    pool: Any
    ring: Any
    staging: Any
    selection: Any
    metadata: Any
    prefill: Any

    @property
    def device(self) -> Any:
        """All on the device."""
        return self.pool + self.ring + self.staging + self.selection + self.metadata + self.prefill


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


def pool_sizes(setup: Setup, options: Offload, requests: Dim, *, pool_tokens: Dim | None = None) -> PoolSizes:
    """Rows that each request has in every layer. pool_tokens: other than the options say."""
    assert setup.topk_limit is not None, "offload is for sparse attention"
    queries = 1 + setup.mtp.num_mtp_tokens
    if options.offload == "gather":
        return PoolSizes(requests, queries, setup.topk_limit, queries, 0, "previous")
    fixed_sets, ways = options.pool
    sets: Dim = fixed_sets if pool_tokens is None else pool_tokens // ways
    if options.offload == "serve_install":
        return PoolSizes(requests, sets, ways, queries, 0, "fifo")
    # A token that is committed stays in the ring for one step more, in which it can be promoted.
    return PoolSizes(requests, sets, ways, 2 * queries, queries * setup.topk_limit, options.pool_policy)


def offload_bytes(
    groups: Sequence[Sequence[int]], setup: Setup, options: Offload, sizes: PoolSizes, extent: Extent, *, row_bytes: int
) -> OffloadBytes:
    """Bytes of these index groups, one spare row a buffer included."""
    layers = sum(len(group) for group in groups)
    per_group = 4 * sizes.requests * (2 * sizes.pool_tokens + 2 * sizes.sets)
    return OffloadBytes(
        host=layers * extent.host_rows * row_bytes,
        pool=layers * sizes.pool_rows * row_bytes,
        ring=layers * (sizes.layer_rows - sizes.pool_rows + 1) * row_bytes,
        staging=staging_buffers(groups, options) * maximum(sizes.requests * sizes.staging_rows, 1) * row_bytes,
        selection=layers * selection_rows(setup, options, extent.requests) * row_bytes,
        metadata=len(groups) * (per_group + 8 * len(STATS)),
        prefill=PREFILL_BUFFERS * extent.prompt_rows * row_bytes,
    )


def staging_buffers(groups: Sequence[Sequence[int]], options: Offload) -> int:
    """Layers of a group that are fetched ahead cannot share one."""
    return max(len(group) for group in groups) if options.prefetches else 1


def selection_rows(setup: Setup, options: Offload, requests: Dim) -> Any:
    """Rows of a layer's selection buffer."""
    if options.offload != "serve_install":
        return 0
    assert setup.topk_limit is not None
    return requests * (1 + setup.mtp.num_mtp_tokens) * setup.topk_limit
