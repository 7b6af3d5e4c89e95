"""Whole rows between host memory and a CPU's own, compiled where numba is installed: see `ops/offload_rows.py`.

Rows are numpy arrays of whole words; lists are those of a plan. Axes as in `ops/offload_rows.py`, E rows of a tensor.
"""

from __future__ import annotations

from typing import Any

import lazy_loader as lazy
import numpy as np
import numpy.typing as npt

from castoff.ops.offload_plan import PoolSizes
from castoff.ops.program import Tensor
from castoff.policy.compiled import compiled

torch = lazy.load("torch")

Words = npt.NDArray[np.int64] | npt.NDArray[np.int32] | npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


def fetch(
    host: Tensor, block_tables: Tensor, request_slots_B: Tensor, ids_BX: Tensor, to_rows_BX: Tensor, counts_B: Tensor,
    region: Tensor, staging: Tensor, *, sizes: PoolSizes,
) -> tuple[()]:  # fmt: skip
    """As `offload_rows.fetch`."""
    compiled(_fetch)(
        words(host), host.shape[1], block_tables.numpy(), request_slots_B.numpy(), ids_BX.numpy(), to_rows_BX.numpy(),
        counts_B.numpy(), words(region), words(staging), sizes.pool_rows, sizes.ring_tokens,
    )  # fmt: skip
    return ()


def serve(host: Tensor, block_tables: Tensor, sources_TK: Tensor, region: Tensor, selection: Tensor) -> tuple[()]:
    """As `offload_rows.serve`."""
    compiled(_serve)(
        words(host), host.shape[1], block_tables.numpy(), sources_TK.numpy(), words(region), words(selection)
    )
    return ()


def install(selection: Tensor, to_rows_BX: Tensor, from_BX: Tensor, counts_B: Tensor, region: Tensor) -> tuple[()]:
    """As `offload_rows.install`."""
    compiled(_install)(words(selection), to_rows_BX.numpy(), from_BX.numpy(), counts_B.numpy(), words(region))
    return ()


def words(tensor: Tensor) -> Any:
    """The rows of a tensor, (E, words), as the widest integers that they are made of; the same memory."""
    width = tensor.shape[-1] * tensor.itemsize
    for size, dtype in ((8, np.int64), (4, np.int32)):
        if width % size == 0 and tensor.data_ptr() % size == 0:
            return _bytes(tensor, width).view(dtype)
    return _bytes(tensor, width)


def _bytes(tensor: Tensor, width: int) -> Any:
    return tensor.flatten(0, -2).view(torch.uint8).numpy().reshape(-1, width)


def _fetch(
    host_EW: Words, block_tokens: int, tables_BN: Longs, slots_B: Longs, ids_BX: Ints, to_rows_BX: Ints, counts_B: Ints,
    region_EW: Words, staging_EW: Words, pool_rows: int, ring_tokens: int,
) -> None:  # fmt: skip
    # The last row of a region is a spare; codes go on with staging rows in its place.
    layer_rows = len(region_EW) - 1
    for b in range(len(counts_B)):
        for x in range(counts_B[b]):
            entry, row = int(ids_BX[b, x]), int(to_rows_BX[b, x])
            if entry >= 0:
                block = tables_BN[b, entry // block_tokens]
                source_W = host_EW[block * block_tokens + entry % block_tokens]
            else:
                source_W = region_EW[pool_rows + slots_B[b] * ring_tokens + (-2 - entry) % ring_tokens]
            if row < layer_rows:
                region_EW[row] = source_W
            else:
                staging_EW[row - layer_rows] = source_W


def _serve(
    host_EW: Words, block_tokens: int, tables_BN: Longs, sources_TK: Ints, region_EW: Words, selection_EW: Words
) -> None:
    tokens, columns = sources_TK.shape
    queries = tokens // len(tables_BN)
    for t in range(tokens):
        for k in range(columns):
            code = int(sources_TK[t, k])
            if code >= 0:
                selection_EW[t * columns + k] = region_EW[code]
            elif code == -1:
                selection_EW[t * columns + k] = 0
            else:
                block = tables_BN[t // queries, (-2 - code) // block_tokens]
                selection_EW[t * columns + k] = host_EW[block * block_tokens + (-2 - code) % block_tokens]


def _install(selection_EW: Words, to_rows_BX: Ints, from_BX: Ints, counts_B: Ints, region_EW: Words) -> None:
    for b in range(len(counts_B)):
        for x in range(counts_B[b]):
            if to_rows_BX[b, x] >= 0:
                region_EW[to_rows_BX[b, x]] = selection_EW[from_BX[b, x]]
