"""Copies of rows against indexing in torch: whatever bytes a row holds, and no other row is touched."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from castoff.ops.triton.rows import host_row_write, offload_fetch, offload_install, offload_serve
from tests.ops.triton import races
from tests.ops.triton.conftest import INTERPRETED

REQUESTS, POOL, RING, STAGING, BLOCK_TOKENS = 3, 6, 4, 8, 4
POOL_ROWS, LAYER_ROWS = REQUESTS * POOL, REQUESTS * (POOL + RING)
# Width and dtype: tiny and odd rows, rows of the formats of a cache, and some that no wide word divides.
FORMATS = (
    (24, torch.float32),
    (576, torch.bfloat16),
    (656, torch.uint8),
    (9, torch.float16),
    (7, torch.uint8),
    (5, torch.float64),
)

pytestmark = [pytest.mark.numerics, pytest.mark.parametrize("row", FORMATS, ids=lambda row: f"{row[0]}x{row[1]}")]


@dataclass(slots=True)
class Stores:
    """A host store with its block tables, a layer's region, and staging, all of distinct rows."""

    host: Tensor
    block_tables: Tensor
    region: Tensor
    staging: Tensor

    @classmethod
    def random(cls, row: tuple[int, torch.dtype], device: str) -> "Stores":
        generator = torch.Generator().manual_seed(0)

        def rows(*shape: int) -> Tensor:
            size = row[0] * row[1].itemsize
            values = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=generator)
            return values.view(row[1])

        host = rows(10, BLOCK_TOKENS)
        tables = torch.randperm(10, generator=generator)[:9].view(3, 3)
        return cls(
            host if INTERPRETED else host.pin_memory(),
            tables.to(device), rows(LAYER_ROWS + 1).to(device), rows(REQUESTS * STAGING).to(device),
        )  # fmt: skip

    def host_row(self, request: int, token: int) -> Tensor:
        block = int(self.block_tables[request, token // BLOCK_TOKENS])
        return self.host[block, token % BLOCK_TOKENS]


def bits(rows: Tensor) -> Tensor:
    return rows.cpu().view(torch.uint8)


def ints(values: list[list[int]] | list[int], device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def finish(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


@pytest.mark.parametrize("staged", [True, False])
def test_fetch(row: tuple[int, torch.dtype], staged: bool, device: str) -> None:
    """From the host and the ring, to the pool and to staging; entries beyond the count are not looked at."""
    stores = Stores.random(row, device)
    slots = [2, 0, -1]
    beyond = LAYER_ROWS + 2 * STAGING if staged else 2 * POOL + 5
    ids = [[11, -2 - 6, 0, 4, -1, -1], [3, 7, 9, 9, 9, 9], [-1] * 6]
    rows = [
        [2 * POOL, 2 * POOL + 3, beyond, beyond - 1 if staged else 2 * POOL + 1, -1, -1],
        [0, 5, 1, 1, 1, 1],
        [-1] * 6,
    ]
    counts = [4, 2, 0]
    region, staging = bits(stores.region).clone(), bits(stores.staging).clone()
    for b, count in enumerate(counts):
        for id, place in zip(ids[b][:count], rows[b][:count], strict=True):
            ring_row = POOL_ROWS + slots[b] * RING + (-2 - id) % RING
            source = bits(stores.host_row(b, id)) if id >= 0 else bits(stores.region)[ring_row]
            if place < LAYER_ROWS:
                region[place] = source
            else:
                staging[place - LAYER_ROWS] = source
    offload_fetch(
        stores.host, stores.block_tables, ints(slots, device, torch.int64), ints(ids, device), ints(rows, device),
        ints(counts, device), stores.region, stores.staging if staged else None, pool_rows=POOL_ROWS, ring_tokens=RING,
    )  # fmt: skip
    assert torch.equal(bits(stores.region), region)
    assert torch.equal(bits(stores.staging), staging)


@pytest.mark.parametrize("programs", [1, 2, 64])
def test_fetch_of_many(row: tuple[int, torch.dtype], programs: int, device: str) -> None:
    """Lists of more entries than one program holds at once, and more requests than there are programs."""
    stores = Stores.random(row, device)
    columns = 67
    ids = [[(5 * j + b) % 12 for j in range(columns)] for b in range(3)]
    counts = [columns, 0, columns - 1]
    region = torch.zeros(3 * columns + 1, *stores.region.shape[1:], dtype=row[1], device=device)
    rows = [list(range(b * columns, (b + 1) * columns)) for b in range(3)]
    wanted = bits(region).clone()
    for b, count in enumerate(counts):
        for j in range(count):
            wanted[rows[b][j]] = bits(stores.host_row(b, ids[b][j]))
    offload_fetch(
        stores.host, stores.block_tables, ints([0, 1, 2], device, torch.int64), ints(ids, device), ints(rows, device),
        ints(counts, device), region, None, pool_rows=3 * columns, ring_tokens=0,
        programs=programs,
    )  # fmt: skip
    assert torch.equal(bits(region), wanted)


def test_serve(row: tuple[int, torch.dtype], device: str) -> None:
    """Two requests of two tokens: pool rows, host rows, and zeros where there is none."""
    stores = Stores.random(row, device)
    sources = [[3, -2 - 11, -1], [-1, -1, -1], [-2, 17, -2 - 4], [0, -2 - 11, 3]]
    selection = torch.empty(15, row[0], dtype=row[1], device=device)
    wanted = bits(selection).clone()
    for t, codes in enumerate(sources):
        for k, code in enumerate(codes):
            none = torch.zeros_like(wanted[0])
            host = bits(stores.host_row(t // 2, -2 - code)) if code <= -2 else none
            wanted[t * 3 + k] = bits(stores.region)[code] if code >= 0 else host
    offload_serve(stores.host, stores.block_tables[:2], ints(sources, device), stores.region, selection)
    assert torch.equal(bits(selection), wanted)


def test_install(row: tuple[int, torch.dtype], device: str) -> None:
    stores = Stores.random(row, device)
    rows, origins, counts = [[4, -1, 2], [7, 8, 9]], [[5, 1, 3], [0, 2, 4]], [3, 1]
    wanted = bits(stores.region).clone()
    for b, count in enumerate(counts):
        for j in range(count):
            if rows[b][j] >= 0:
                wanted[rows[b][j]] = bits(stores.staging)[origins[b][j]]
    offload_install(stores.staging, ints(rows, device), ints(origins, device), ints(counts, device), stores.region)
    assert torch.equal(bits(stores.region), wanted)


def test_host_write(row: tuple[int, torch.dtype], device: str) -> None:
    """A token without a ring row or without a host slot is skipped."""
    stores = Stores.random(row, device)
    ring_rows, slots = [20, -1, 22, 23, 21], [39, 5, -1, 0, 17]
    wanted = bits(stores.host).flatten(0, 1).clone()
    for ring_row, slot in zip(ring_rows, slots, strict=True):
        if ring_row >= 0 and slot >= 0:
            wanted[slot] = bits(stores.region)[ring_row]
    host_row_write(stores.region, ints(ring_rows, device, torch.int64), stores.host, ints(slots, device, torch.int64))
    finish(device)
    assert torch.equal(bits(stores.host).flatten(0, 1), wanted)


def test_unaligned_stores(row: tuple[int, torch.dtype], device: str) -> None:
    """Stores that begin in the middle of a larger tensor, at any number of it."""
    backing = torch.arange(4 * row[0] + 3, device=device).to(row[1])
    region = backing[3:].view(4, row[0])
    selection = torch.zeros(2, row[0], dtype=row[1], device=device)
    wanted = bits(backing[3:]).clone().view(4, -1)
    wanted[2] = 0
    offload_install(selection, ints([[2]], device), ints([[1]], device), ints([1], device), region)
    assert torch.equal(bits(region), wanted)


@pytest.mark.gpu
def test_real_sizes(row: tuple[int, torch.dtype], device: str) -> None:
    """A step of 16 requests that misses 300 ids each, from pinned memory, and the write of its own tokens to it."""
    generator = torch.Generator().manual_seed(1)
    batch, misses, blocks = 16, 300, 16
    host = torch.randint(
        0, 256, (batch * blocks, 128, row[0] * row[1].itemsize), dtype=torch.uint8, generator=generator
    )
    host = host.view(row[1]).pin_memory()
    tables = torch.randperm(batch * blocks, generator=generator).view(batch, blocks)
    ids = torch.stack([torch.randperm(blocks * 128, generator=generator) for _ in range(batch)])[:, :2048].int()
    rows = torch.stack([b * 8192 + torch.randperm(8192, generator=generator)[:2048] for b in range(batch)]).int()
    counts = torch.full((batch,), misses, dtype=torch.int32)
    region = torch.zeros(batch * 8256 + 1, row[0], dtype=row[1], device=device)
    offload_fetch(
        host, tables.to(device), torch.arange(batch, device=device), ids.to(device), rows.to(device), counts.to(device),
        region, None,
        pool_rows=batch * 8192, ring_tokens=64,
    )  # fmt: skip
    wanted = torch.zeros_like(region, device="cpu")
    for b in range(batch):
        token = ids[b, :misses].long()
        wanted[rows[b, :misses].long()] = host[tables[b, token // 128], token % 128]
    assert torch.equal(bits(region), bits(wanted))


@pytest.mark.skipif(not INTERPRETED, reason="accesses are seen in the interpreter alone")
def test_copies_stay_inside_their_tensors(row: tuple[int, torch.dtype]) -> None:
    from castoff.ops.triton.rows import host_row_write_launch, offload_fetch_launch, offload_serve_launch

    stores = Stores.random(row, "cpu")
    ids, rows = ints([[11, -2 - 6, 0, -1]], "cpu"), ints([[2, 3, LAYER_ROWS + 2, -1]], "cpu")
    races.check(
        offload_fetch_launch(
            stores.host, stores.block_tables[:1], torch.tensor([2]), ids, rows, ints([3], "cpu"), stores.region,
            stores.staging, pool_rows=POOL_ROWS, ring_tokens=RING,
        )
    )  # fmt: skip
    sources, selection = ints([[3, -2 - 11, -1]], "cpu"), torch.empty(3, row[0], dtype=row[1])
    races.check(offload_serve_launch(stores.host, stores.block_tables[:1], sources, stores.region, selection))
    places = torch.tensor([20, -1, 30])
    races.check(host_row_write_launch(stores.region, places, stores.host, torch.tensor([39, 4, -1])))
