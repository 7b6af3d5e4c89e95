"""Copies of whole rows between the host store, pool and ring, staging and selection buffer.

Axes: B requests of a call, S queries of each, T = B·S, K top-k columns, X list columns, D width of a row.

A row is copied as the words that it is made of, whatever they mean. Programs hold a few rows each: one tile of
(rows, words), all of whose loads are under way before the first store, so that a slow link is kept busy.
The host store is pinned memory, which devices read and write at its address in the process.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from castoff.ops.triton.launch import Launch, ceil_div, power_of_two
from castoff.ops.triton.sets import HOST_TOKEN, NONE, RING_POSITION

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
_THREADS = 128
# Registers bound a tile.
_TILE_BYTES = 16_384
# A program has 8 rows of 1152 bytes under way, and waits 2 µs or so for a link: this many keep one of 100 GB/s busy,
# and leave half of a large device's multiprocessors to whoever computes meanwhile.
LINK_PROGRAMS = 64
# A few per multiprocessor, for copies within the device's memory.
_DEVICE_PROGRAMS = 1024


@triton.jit
def _load_rows(ptr, row_X, mask_X, WIDTH: tl.constexpr, WIDTH_POW2: tl.constexpr):
    """Words of rows, (X, WIDTH_POW2); zeros where masked."""
    word_D = tl.arange(0, WIDTH_POW2)
    place_XD = row_X.to(tl.int64)[:, None] * WIDTH + word_D[None, :]
    return tl.load(ptr + place_XD, mask=mask_X[:, None] & (word_D < WIDTH)[None, :], other=0)


@triton.jit
def _store_rows(ptr, row_X, words_XD, mask_X, WIDTH: tl.constexpr, WIDTH_POW2: tl.constexpr):
    word_D = tl.arange(0, WIDTH_POW2)
    place_XD = row_X.to(tl.int64)[:, None] * WIDTH + word_D[None, :]
    tl.store(ptr + place_XD, words_XD, mask=mask_X[:, None] & (word_D < WIDTH)[None, :])


@triton.jit
def _host_rows(block_table_ptr, id_X, mask_X, block_tokens):
    """Rows of token positions in the host store."""
    block_X = tl.load(block_table_ptr + id_X // block_tokens, mask=mask_X, other=0)
    return block_X * block_tokens + id_X % block_tokens


@triton.jit
def offload_fetch_kernel(
    host_ptr, block_tables_ptr, request_slots_ptr, fetch_ids_ptr, fetch_rows_ptr, counts_ptr, region_ptr, staging_ptr,
    batch, columns, table_columns, block_tokens, pool_rows, layer_rows, ring_tokens,
    STAGED: tl.constexpr, WIDTH: tl.constexpr, WIDTH_POW2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Programs (request, part), or fewer than there are requests: each goes on to the next one that has none.

    A program copies every part-th group of ROWS entries of a request's list.
    """
    for request in range(tl.program_id(0), batch, tl.num_programs(0)):
        count = tl.load(counts_ptr + request)
        slot = tl.maximum(tl.load(request_slots_ptr + request).to(tl.int32), 0)
        for start in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
            index_X = start + tl.arange(0, ROWS)
            listed_X = index_X < count
            id_X = tl.load(fetch_ids_ptr + request * columns + index_X, mask=listed_X, other=NONE)
            row_X = tl.load(fetch_rows_ptr + request * columns + index_X, mask=listed_X, other=0)
            from_host_X = id_X >= 0
            from_ring_X = id_X <= RING_POSITION
            host_row_X = _host_rows(block_tables_ptr + request * table_columns, id_X, from_host_X, block_tokens)
            ring_row_X = pool_rows + slot * ring_tokens + (RING_POSITION - id_X) % ring_tokens
            words_XD = _load_rows(host_ptr, host_row_X, from_host_X, WIDTH, WIDTH_POW2)
            # A masked load leaves zeros.
            words_XD |= _load_rows(region_ptr, ring_row_X, from_ring_X, WIDTH, WIDTH_POW2)
            kept_X = listed_X
            if STAGED:
                kept_X = listed_X & (row_X < layer_rows)
                staged_X = listed_X & (row_X >= layer_rows)
                _store_rows(staging_ptr, row_X - layer_rows, words_XD, staged_X, WIDTH, WIDTH_POW2)
            _store_rows(region_ptr, row_X, words_XD, kept_X, WIDTH, WIDTH_POW2)


@triton.jit
def offload_serve_kernel(
    host_ptr, block_tables_ptr, sources_ptr, region_ptr, selection_ptr,
    places, request_places, table_columns, block_tokens,
    WIDTH: tl.constexpr, WIDTH_POW2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Every program fills ROWS rows of the selection buffer."""
    place_X = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_X = place_X < places
    source_X = tl.load(sources_ptr + place_X, mask=inside_X, other=NONE)
    id_X = HOST_TOKEN - source_X
    from_host_X = source_X <= HOST_TOKEN
    table_X = (place_X // request_places) * table_columns
    block_X = tl.load(block_tables_ptr + table_X + id_X // block_tokens, mask=from_host_X, other=0)
    host_row_X = block_X * block_tokens + id_X % block_tokens
    words_XD = _load_rows(host_ptr, host_row_X, from_host_X, WIDTH, WIDTH_POW2)
    words_XD |= _load_rows(region_ptr, source_X, source_X >= 0, WIDTH, WIDTH_POW2)
    _store_rows(selection_ptr, place_X, words_XD, inside_X, WIDTH, WIDTH_POW2)


@triton.jit
def offload_install_kernel(
    selection_ptr, install_rows_ptr, install_from_ptr, counts_ptr, region_ptr, columns,
    WIDTH: tl.constexpr, WIDTH_POW2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Programs (request, part): every part-th group of ROWS entries of the request's list."""
    request = tl.program_id(0)
    count = tl.load(counts_ptr + request)
    install_rows_ptr += request * columns
    install_from_ptr += request * columns
    for start in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        index_X = start + tl.arange(0, ROWS)
        row_X = tl.load(install_rows_ptr + index_X, mask=index_X < count, other=NONE)
        stays_X = row_X >= 0
        from_X = tl.load(install_from_ptr + index_X, mask=stays_X, other=0)
        words_XD = _load_rows(selection_ptr, from_X, stays_X, WIDTH, WIDTH_POW2)
        _store_rows(region_ptr, row_X, words_XD, stays_X, WIDTH, WIDTH_POW2)


@triton.jit
def host_row_write_kernel(
    region_ptr, ring_rows_ptr, host_ptr, slot_mapping_ptr, tokens,
    WIDTH: tl.constexpr, WIDTH_POW2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Every program writes ROWS tokens."""
    token_X = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_X = token_X < tokens
    ring_row_X = tl.load(ring_rows_ptr + token_X, mask=inside_X, other=NONE)
    host_row_X = tl.load(slot_mapping_ptr + token_X, mask=inside_X, other=NONE)
    written_X = (ring_row_X >= 0) & (host_row_X >= 0)
    words_XD = _load_rows(region_ptr, ring_row_X, written_X, WIDTH, WIDTH_POW2)
    _store_rows(host_ptr, host_row_X, words_XD, written_X, WIDTH, WIDTH_POW2)


def _words(*stores: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Stores of rows (…, D) as rows of the widest word that divides the rows of all and at which all begin."""
    given = [store for store in stores if store is not None]
    row_bytes = given[0].shape[-1] * given[0].element_size()
    word = max(
        size for size in _WORDS
        if row_bytes % size == 0 and all(store.data_ptr() % size == 0 for store in given)
    )  # fmt: skip
    for store in given:
        assert store.is_contiguous(), "rows stand one after the other"
        assert store.shape[-1] * store.element_size() == row_bytes, "rows of one layer have one size"
    # Bytes first: torch does not view every float as an integer that is wider.
    return [None if store is None else store.view(torch.uint8).view(_WORDS[word]) for store in stores]


def _tile(words: torch.Tensor, rows: int) -> dict[str, int]:
    """Words of a row, and how many of up to `rows` rows a program holds at once."""
    width = words.shape[-1]
    padded = power_of_two(width)
    most = max(1, _TILE_BYTES // (padded * words.element_size()))
    return {"WIDTH": width, "WIDTH_POW2": padded, "ROWS": min(power_of_two(rows), most)}


def _list_grid(batch: int, columns: int, rows: int, programs: int) -> tuple[int, int]:
    """Requests and parts of their lists: as many parts as `programs` need to be busy."""
    return (batch, min(ceil_div(programs, max(batch, 1)), ceil_div(columns, rows)))


def offload_fetch_launch(
    host_PTD: torch.Tensor, block_tables_BN: torch.Tensor, request_slots_B: torch.Tensor,
    fetch_ids_BX: torch.Tensor, fetch_rows_BX: torch.Tensor, counts_B: torch.Tensor,
    region_LD: torch.Tensor, staging_GD: torch.Tensor | None, *, pool_rows: int, ring_tokens: int,
    programs: int = LINK_PROGRAMS,
) -> Launch:  # fmt: skip
    """The launch of `offload_fetch`."""
    host, region, staging = _words(host_PTD, region_LD, staging_GD)
    assert host is not None
    assert region is not None
    batch, columns = fetch_ids_BX.shape
    tile = _tile(region, columns)
    arguments = {
        "host_ptr": host, "block_tables_ptr": block_tables_BN, "request_slots_ptr": request_slots_B,
        "fetch_ids_ptr": fetch_ids_BX, "fetch_rows_ptr": fetch_rows_BX, "counts_ptr": counts_B,
        "region_ptr": region, "staging_ptr": region if staging is None else staging,
        "batch": batch, "columns": columns, "table_columns": block_tables_BN.shape[1], "block_tokens": host.shape[1],
        "pool_rows": pool_rows, "layer_rows": region.shape[0] - 1, "ring_tokens": max(1, ring_tokens),
        "STAGED": staging is not None, **tile,
    }  # fmt: skip
    requests, parts = _list_grid(batch, columns, tile["ROWS"], programs)
    grid = (min(requests, programs), parts)
    return Launch(kernel=offload_fetch_kernel, grid=grid, arguments=arguments, threads=_THREADS)


def offload_fetch(
    host_PTD: torch.Tensor, block_tables_BN: torch.Tensor, request_slots_B: torch.Tensor,
    fetch_ids_BX: torch.Tensor, fetch_rows_BX: torch.Tensor, counts_B: torch.Tensor,
    region_LD: torch.Tensor, staging_GD: torch.Tensor | None, *, pool_rows: int, ring_tokens: int,
    programs: int = LINK_PROGRAMS,
) -> None:  # fmt: skip
    """Copy the rows of a fetch list to their places, from the host or, where they are promoted, from the ring.

    host: (blocks, tokens of a block, D), pinned. block_tables: int64 (B, blocks of a request). region: (rows, D), of
    which `pool_rows` are pool, then `ring_tokens` per request ring, and the last is spare; written, as is staging.
    programs: how many share the copy, at most; more of them use more of the device, and a faster link.
    """
    offload_fetch_launch(
        host_PTD, block_tables_BN, request_slots_B, fetch_ids_BX, fetch_rows_BX, counts_B, region_LD, staging_GD,
        pool_rows=pool_rows, ring_tokens=ring_tokens, programs=programs,
    ).run()  # fmt: skip


def offload_serve_launch(
    host_PTD: torch.Tensor, block_tables_BN: torch.Tensor, sources_TK: torch.Tensor, region_LD: torch.Tensor,
    selection_CD: torch.Tensor,
) -> Launch:  # fmt: skip
    """The launch of `offload_serve`."""
    host, region, selection = _words(host_PTD, region_LD, selection_CD)
    assert host is not None
    assert region is not None
    places = sources_TK.numel()
    tile = _tile(region, places)
    arguments = {
        "host_ptr": host, "block_tables_ptr": block_tables_BN, "sources_ptr": sources_TK,
        "region_ptr": region, "selection_ptr": selection,
        "places": places, "request_places": places // max(1, block_tables_BN.shape[0]),
        "table_columns": block_tables_BN.shape[1], "block_tokens": host.shape[1], **tile,
    }  # fmt: skip
    grid = (ceil_div(places, tile["ROWS"]),)
    return Launch(kernel=offload_serve_kernel, grid=grid, arguments=arguments, threads=_THREADS)


def offload_serve(
    host_PTD: torch.Tensor, block_tables_BN: torch.Tensor, sources_TK: torch.Tensor, region_LD: torch.Tensor,
    selection_CD: torch.Tensor,
) -> None:  # fmt: skip
    """Fill row t·K + k of `selection` for every source: a pool row, a host row, or zeros where there is none."""
    offload_serve_launch(host_PTD, block_tables_BN, sources_TK, region_LD, selection_CD).run()


def offload_install_launch(
    selection_CD: torch.Tensor, install_rows_BX: torch.Tensor, install_from_BX: torch.Tensor, counts_B: torch.Tensor,
    region_LD: torch.Tensor,
) -> Launch:  # fmt: skip
    """The launch of `offload_install`."""
    selection, region = _words(selection_CD, region_LD)
    assert region is not None
    batch, columns = install_rows_BX.shape
    tile = _tile(region, columns)
    arguments = {
        "selection_ptr": selection, "install_rows_ptr": install_rows_BX, "install_from_ptr": install_from_BX,
        "counts_ptr": counts_B, "region_ptr": region, "columns": columns, **tile,
    }  # fmt: skip
    grid = _list_grid(batch, columns, tile["ROWS"], _DEVICE_PROGRAMS)
    return Launch(kernel=offload_install_kernel, grid=grid, arguments=arguments, threads=_THREADS)


def offload_install(
    selection_CD: torch.Tensor, install_rows_BX: torch.Tensor, install_from_BX: torch.Tensor, counts_B: torch.Tensor,
    region_LD: torch.Tensor,
) -> None:  # fmt: skip
    """Copy listed rows of the selection buffer to their pool rows in `region`; entries without a row are skipped."""
    offload_install_launch(selection_CD, install_rows_BX, install_from_BX, counts_B, region_LD).run()


def host_row_write_launch(
    region_LD: torch.Tensor, ring_rows_T: torch.Tensor, host_PTD: torch.Tensor, slot_mapping_T: torch.Tensor
) -> Launch:
    """The launch of `host_row_write`."""
    region, host = _words(region_LD, host_PTD)
    assert region is not None
    tokens = ring_rows_T.shape[0]
    tile = _tile(region, tokens)
    arguments = {
        "region_ptr": region, "ring_rows_ptr": ring_rows_T, "host_ptr": host, "slot_mapping_ptr": slot_mapping_T,
        "tokens": tokens, **tile,
    }  # fmt: skip
    grid = (ceil_div(tokens, tile["ROWS"]),)
    return Launch(kernel=host_row_write_kernel, grid=grid, arguments=arguments, threads=_THREADS)


def host_row_write(
    region_LD: torch.Tensor, ring_rows_T: torch.Tensor, host_PTD: torch.Tensor, slot_mapping_T: torch.Tensor
) -> None:
    """Copy rows of `region` to flat host slots, int64 (T,) each; a token with a negative row or slot is skipped."""
    host_row_write_launch(region_LD, ring_rows_T, host_PTD, slot_mapping_T).run()
