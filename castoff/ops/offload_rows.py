"""Whole latent rows between host memory and the device, as a plan says.

Axes: B rows of a call, T tokens, K selected tokens, X entries of a list, D a row as stored. A host tensor is
(blocks, block tokens, D); device rows are those of `ops/offload_plan.py`.
"""

from __future__ import annotations

import lazy_loader as lazy

from castoff.dims import Dim
from castoff.ops import accelerator, row_copies
from castoff.ops.attention import row_slots
from castoff.ops.offload_plan import PoolSizes, RowPlan, ServePlan
from castoff.ops.program import Abstract, Op, OpCall, Tensor
from castoff.ops.work import DTYPE_BYTES, Part, Work

torch = lazy.load("torch")


def _no_shapes(*_: Abstract | None, **__: object) -> tuple[()]:
    return ()


def _row_bytes(rows: Abstract) -> Dim:
    return rows.shape[-1] * DTYPE_BYTES[rows.dtype]


def _fetch_work(call: OpCall) -> Work:
    """Every entry of the list is a row that crosses the link."""
    entries = call.tensor(3).elements
    moved = entries * _row_bytes(call.tensor(0))
    return Work((Part("rows", bytes=moved, host_read_bytes=moved, host_rows=entries),), holds_cores=False)


def _serve_work(call: OpCall) -> Work:
    """Every place is written; a share of them comes over the link, the others from the pool."""
    places, row, hosted = call.tensor(2).elements, _row_bytes(call.tensor(0)), call.attributes["hosted"]
    host_rows = places if hosted is None else places * hosted
    pool_rows = places - host_rows
    return Work(
        (
            Part("pool", gather_bytes=pool_rows * row, gather_rows=pool_rows),
            Part("host", host_read_bytes=host_rows * row, host_rows=host_rows),
            Part("selection", bytes=places * row + call.tensor(2).bytes),
        )
    )


def _install_work(call: OpCall) -> Work:
    entries = call.tensor(1).elements
    moved = entries * _row_bytes(call.tensor(0))
    return Work((Part("rows", bytes=moved, gather_bytes=moved, gather_rows=entries),), holds_cores=False)


def _write_work(call: OpCall) -> Work:
    rows = call.tensor(1).elements
    moved = rows * _row_bytes(call.tensor(0))
    part = Part("rows", gather_bytes=moved, gather_rows=rows, host_write_bytes=moved, host_rows=rows)
    return Work((part,), holds_cores=False)


def _store_work(call: OpCall) -> Work:
    moved = (call.attributes["end"] - call.attributes["start"]) * _row_bytes(call.tensor(0))
    return Work((Part("rows", bytes=moved, host_write_bytes=moved),), holds_cores=False)


def _load_work(call: OpCall) -> Work:
    moved = call.attributes["end"] * _row_bytes(call.tensor(0))
    return Work((Part("rows", bytes=moved, host_read_bytes=moved),), holds_cores=False)


def _fetch_reference(
    host: Tensor, block_tables: Tensor, request_slots_B: Tensor, ids_BX: Tensor, to_rows_BX: Tensor, counts_B: Tensor,
    region: Tensor, staging: Tensor, *, sizes: PoolSizes,
) -> tuple[()]:  # fmt: skip
    live_BX = _live(counts_B, ids_BX)
    request_BX = request_slots_B[:, None].expand_as(ids_BX)[live_BX]
    ids, to_rows = ids_BX[live_BX].long(), to_rows_BX[live_BX].long()
    from_host = ids >= 0
    ring_rows = sizes.pool_rows + request_BX * sizes.ring_tokens + (-2 - ids) % max(sizes.ring_tokens, 1)
    slots = row_slots(ids_BX, block_tables, host.shape[1])[live_BX]
    rows = torch.empty(len(ids), host.shape[-1], dtype=host.dtype, device=region.device)
    rows[from_host] = host.flatten(0, 1)[slots[from_host].to(host.device)].to(region.device)
    rows[~from_host] = region[ring_rows[~from_host]]
    staged = to_rows >= sizes.layer_rows
    region[to_rows[~staged]] = rows[~staged]
    staging[to_rows[staged] - sizes.layer_rows] = rows[staged]
    return ()


def _serve_reference(
    host: Tensor, block_tables: Tensor, sources_TK: Tensor, region: Tensor, selection: Tensor
) -> tuple[()]:
    tokens, columns = sources_TK.shape
    sources = sources_TK.flatten().long()
    slots = row_slots(-2 - sources_TK, block_tables, host.shape[1]).flatten()
    pooled, hosted = sources >= 0, sources < -1
    selected = selection[: tokens * columns]
    selected.zero_()
    selected[pooled] = region[sources[pooled]]
    selected[hosted] = host.flatten(0, 1)[slots[hosted].to(host.device)].to(region.device)
    return ()


def _install_reference(
    selection: Tensor, to_rows_BX: Tensor, from_BX: Tensor, counts_B: Tensor, region: Tensor
) -> tuple[()]:
    live_BX = _live(counts_B, to_rows_BX) & (to_rows_BX >= 0)
    region[to_rows_BX[live_BX].long()] = selection[from_BX[live_BX].long()]
    return ()


def _write_reference(region: Tensor, own_rows_T: Tensor, host: Tensor, slot_mapping_T: Tensor) -> tuple[()]:
    live_T = (slot_mapping_T >= 0) & (own_rows_T >= 0)
    host.flatten(0, 1)[slot_mapping_T[live_T].to(host.device)] = region[own_rows_T[live_T]].to(host.device)
    return ()


def _live(counts_B: Tensor, list_BX: Tensor) -> Tensor:
    return torch.arange(list_BX.shape[1], device=list_BX.device) < counts_B[:, None]


def _store_reference(buffer: Tensor, host: Tensor, *, start: int, end: int, blocks: tuple[int, ...]) -> tuple[()]:
    _by_block(buffer, host, start, end, blocks, to_host=True)
    return ()


def _load_reference(host: Tensor, buffer: Tensor, *, end: int, blocks: tuple[int, ...]) -> tuple[()]:
    _by_block(buffer, host, 0, end, blocks, to_host=False)
    return ()


def _by_block(buffer: Tensor, host: Tensor, start: int, end: int, blocks: tuple[int, ...], *, to_host: bool) -> None:
    """Copy positions start to end between a buffer in order of position and their blocks, a copy per run of blocks."""
    tokens, flat_buffer, flat_host = host.shape[1], buffer.flatten(0, 1), host.flatten(0, 1)
    while start < end:
        first = start // tokens
        last = first
        while (last + 1) * tokens < end and blocks[last + 1] == blocks[last] + 1:
            last += 1
        count = min(end, (last + 1) * tokens) - start
        own = flat_buffer[start : start + count]
        slot = blocks[first] * tokens + start % tokens
        theirs = flat_host[slot : slot + count]
        (theirs if to_host else own).copy_(own if to_host else theirs, non_blocking=True)
        start += count


OFFLOAD_FETCH = Op(
    "offload_fetch", "offload_copy", _no_shapes, _fetch_work, _fetch_reference, outputs=0, mutates=(6, 7),
    opaque=True, kernel=accelerator.fetch, cpu_kernel=row_copies.fetch,
)  # fmt: skip
OFFLOAD_SERVE = Op(
    "offload_serve", "offload_serve", _no_shapes, _serve_work, _serve_reference, outputs=0, mutates=(4,),
    opaque=True, kernel=accelerator.serve, cpu_kernel=row_copies.serve, expected=("hosted",),
)  # fmt: skip
OFFLOAD_INSTALL = Op(
    "offload_install", "offload_copy", _no_shapes, _install_work, _install_reference, outputs=0, mutates=(4,),
    opaque=True, kernel=accelerator.install, cpu_kernel=row_copies.install,
)  # fmt: skip
HOST_ROW_WRITE = Op(
    "host_row_write", "offload_copy", _no_shapes, _write_work, _write_reference, outputs=0, mutates=(2,),
    opaque=True, kernel=accelerator.write_to_host,
)  # fmt: skip
STORE_ROWS = Op(
    "store_rows", "offload_copy", _no_shapes, _store_work, _store_reference, outputs=0, mutates=(1,), opaque=True
)
LOAD_ROWS = Op(
    "load_rows", "offload_copy", _no_shapes, _load_work, _load_reference, outputs=0, mutates=(1,), opaque=True
)


def fetch(
    host: Tensor, block_tables: Tensor, request_slots_B: Tensor, plan: RowPlan, region: Tensor, staging: Tensor,
    sizes: PoolSizes,
) -> None:  # fmt: skip
    """Bring the listed rows of one layer to the rows that the plan gave them. Mutates region and staging.

    Each listed token crosses the link once; one that is still in the ring is copied on the device.
    """
    OFFLOAD_FETCH(
        host, block_tables, request_slots_B, plan.ids_BX, plan.to_rows_BX, plan.counts_B, region, staging, sizes=sizes
    )


def serve(
    host: Tensor, block_tables: Tensor, plan: ServePlan, region: Tensor, selection: Tensor, *, hosted: Dim | None = None
) -> None:
    """Copy every selected row, from the pool or from the host, into the selection buffer (≥ T · K, D), which mutates.

        selection[t · K + k] = the row that sources[t, k] names; zeros for none

    hosted: in a cast, which share of them comes from the host; None counts the worst case, all.
    """
    OFFLOAD_SERVE(host, block_tables, plan.sources_TK, region, selection, hosted=hosted)


def install(selection: Tensor, plan: ServePlan, region: Tensor) -> None:
    """Copy served rows from the selection buffer to the pool rows that they get. Mutates region."""
    OFFLOAD_INSTALL(selection, plan.to_rows_BX, plan.from_BX, plan.counts_B, region)


def write_to_host(region: Tensor, own_rows_T: Tensor, host: Tensor, slot_mapping_T: Tensor) -> None:
    """Write this call's rows of a layer to their slots in host memory; negative ones are dropped. Mutates host."""
    HOST_ROW_WRITE(region, own_rows_T, host, slot_mapping_T)


def store_rows(buffer: Tensor, host: Tensor, start: Dim, end: Dim, blocks: tuple[int, ...]) -> None:
    """Copy positions start to end of one request from a buffer in their order to its blocks in host memory.

    buffer: (blocks, block tokens, D). Mutates host. Copies may still go on when this returns, in the stream's order.
    """
    STORE_ROWS(buffer, host, start=start, end=end, blocks=blocks)


def load_rows(host: Tensor, buffer: Tensor, end: Dim, blocks: tuple[int, ...]) -> None:
    """Copy the first `end` positions of one request from its blocks in host memory into a buffer. Mutates buffer."""
    LOAD_ROWS(host, buffer, end=end, blocks=blocks)
