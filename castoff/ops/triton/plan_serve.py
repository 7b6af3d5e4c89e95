"""serve_plan and install_metadata: the published path, which reads into a selection buffer and installs later.

Axes: B requests of a call, S queries of each, T = B·S, K top-k columns, X = S·K, R request slots, N sets, W ways.

The plan changes nothing. It says where each selected row is, and what a later install will do with the misses: the
j-th of a set takes the j-th way from the set's head on. More than W of one set wrap round, and the last at a way stays.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from castoff.ops.offload_plan import PoolSizes
from castoff.ops.triton.launch import Launch, power_of_two
from castoff.ops.triton.sets import (
    HOST_TOKEN,
    MAX_POSITIONS,
    NEVER,
    NONE,
    NUM_STATS,
    THREADS,
    count_bits,
    distinct_in_set,
    fill,
    list_misses,
    look_up,
    rank_misses,
    store_stats,
)


@triton.jit
def _look_up(
    topk_ptr, slot_mapping_ptr, length, now, tags_ptr, pool_row, sources_ptr,
    heads_ptr, hit_ways_ptr, miss_ids_ptr, miss_places_ptr, states_ptr,
    QUERIES: tl.constexpr, TOPK: tl.constexpr, SETS: tl.constexpr, WAYS: tl.constexpr,
    WAYS_POW2: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sources, and the list of committed misses: returns numbers of hits, window reads and listed misses."""
    POSITIONS: tl.constexpr = QUERIES * TOPK
    misses = 0
    hits_X = tl.full((BLOCK,), 0, tl.int32)
    window_X = tl.full((BLOCK,), 0, tl.int32)
    for start in range(0, POSITIONS, BLOCK):
        place_X = start + tl.arange(0, BLOCK)
        id_X, own_X, asked_X, way_X = look_up(
            topk_ptr, slot_mapping_ptr, length, now, tags_ptr, pool_row, place_X, QUERIES, TOPK, SETS, WAYS, WAYS_POW2
        )
        set_X = id_X % SETS
        hit_X = asked_X & (way_X < WAYS)
        source_X = tl.where(hit_X, pool_row + set_X * WAYS + way_X, tl.where(asked_X | own_X, HOST_TOKEN - id_X, NONE))
        tl.store(sources_ptr + place_X, source_X, mask=place_X < POSITIONS)
        bit_X = tl.full((BLOCK,), 1, tl.int32) << (way_X & 31)
        tl.atomic_or(hit_ways_ptr + set_X, bit_X, mask=hit_X, sem="relaxed")
        miss_X = asked_X & (way_X >= WAYS)
        misses = list_misses(
            misses, miss_ids_ptr, miss_places_ptr, states_ptr, heads_ptr, place_X, id_X, miss_X, SETS, SPAN
        )
        hits_X += hit_X.to(tl.int32)
        window_X += own_X.to(tl.int32)
    return tl.sum(hits_X), tl.sum(window_X), misses


@triton.jit
def plan_serve_kernel(
    topk_ptr, slot_mapping_ptr, seq_lens_ptr, committed_ptr, request_slots_ptr, tags_ptr, hands_ptr,
    sources_ptr, install_ids_ptr, install_rows_ptr, install_from_ptr, counts_ptr, stats_ptr, scratch_ptr,
    QUERIES: tl.constexpr, TOPK: tl.constexpr, SETS: tl.constexpr, WAYS: tl.constexpr,
    WAYS_POW2: tl.constexpr, SPAN: tl.constexpr, SCRATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request row. scratch: (B, SCRATCH)."""
    POSITIONS: tl.constexpr = QUERIES * TOPK
    request = tl.program_id(0)
    slot = tl.load(request_slots_ptr + request).to(tl.int32)
    # A padding row is a request of length 0, which may see nothing.
    length = tl.load(seq_lens_ptr + request, mask=slot >= 0, other=0).to(tl.int32)
    slot = tl.maximum(slot, 0)
    now = tl.load(committed_ptr + request).to(tl.int32)
    pool_row = slot * (SETS * WAYS)
    first_place = request * POSITIONS
    install_ids_ptr += first_place
    install_rows_ptr += first_place
    install_from_ptr += first_place

    heads_ptr = scratch_ptr + request * SCRATCH
    hit_ways_ptr = heads_ptr + 2 * SETS
    miss_ids_ptr = hit_ways_ptr + SETS
    miss_places_ptr = miss_ids_ptr + POSITIONS
    states_ptr = miss_places_ptr + POSITIONS
    fill(heads_ptr, NEVER, 0, 2 * SETS, BLOCK)
    fill(hit_ways_ptr, 0, 0, SETS, BLOCK)
    tl.debug_barrier()
    hits, window_reads, misses = _look_up(
        topk_ptr + first_place, slot_mapping_ptr + request * QUERIES, length, now, tags_ptr, pool_row,
        sources_ptr + first_place, heads_ptr, hit_ways_ptr, miss_ids_ptr, miss_places_ptr, states_ptr,
        QUERIES, TOPK, SETS, WAYS, WAYS_POW2, SPAN, BLOCK,
    )  # fmt: skip
    tl.debug_barrier()
    unique_hits = count_bits(hit_ways_ptr, SETS, BLOCK)
    rank_misses(miss_ids_ptr, states_ptr, heads_ptr, misses, SETS, SPAN, BLOCK)

    count = 0
    for start in range(0, misses, BLOCK):
        miss_X = start + tl.arange(0, BLOCK)
        rank_X = tl.load(states_ptr + miss_X, mask=miss_X < misses, other=NONE)
        first_X = rank_X >= 0
        id_X = tl.load(miss_ids_ptr + miss_X, mask=first_X, other=0)
        place_X = tl.load(miss_places_ptr + miss_X, mask=first_X, other=0)
        set_X = id_X % SETS
        way_X = (tl.load(hands_ptr + slot * SETS + set_X, mask=first_X, other=0) + rank_X) % WAYS
        stays_X = rank_X + WAYS >= distinct_in_set(heads_ptr, set_X, first_X, SETS, SPAN)
        row_X = tl.where(stays_X, pool_row + set_X * WAYS + way_X, NONE)
        index_X = count + tl.cumsum(first_X.to(tl.int32), axis=0) - 1
        tl.store(install_ids_ptr + index_X, id_X, mask=first_X)
        tl.store(install_rows_ptr + index_X, row_X, mask=first_X)
        tl.store(install_from_ptr + index_X, first_place + place_X, mask=first_X)
        count += tl.sum(first_X.to(tl.int32))
    fill(install_ids_ptr, NONE, count, POSITIONS, BLOCK)
    fill(install_rows_ptr, NONE, count, POSITIONS, BLOCK)
    fill(install_from_ptr, NONE, count, POSITIONS, BLOCK)
    tl.store(counts_ptr + request, count)
    store_stats(stats_ptr + request * NUM_STATS, hits, unique_hits, count, misses - count, window_reads, 0, 0)


@triton.jit
def install_metadata_kernel(
    install_ids_ptr, install_rows_ptr, counts_ptr, request_slots_ptr, tags_ptr, hands_ptr,
    POSITIONS: tl.constexpr, SETS: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request row; a padding row has a count of 0."""
    request = tl.program_id(0)
    count = tl.load(counts_ptr + request)
    hands_ptr += tl.maximum(tl.load(request_slots_ptr + request).to(tl.int32), 0) * SETS
    install_ids_ptr += request * POSITIONS
    install_rows_ptr += request * POSITIONS
    for start in range(0, count, BLOCK):
        index_X = start + tl.arange(0, BLOCK)
        listed_X = index_X < count
        id_X = tl.load(install_ids_ptr + index_X, mask=listed_X, other=0)
        row_X = tl.load(install_rows_ptr + index_X, mask=listed_X, other=NONE)
        # Pool rows are numbered as tags are.
        tl.store(tags_ptr + row_X, id_X, mask=row_X >= 0)
        tl.atomic_add(hands_ptr + id_X % SETS, 1, mask=listed_X, sem="relaxed")
    tl.debug_barrier()
    # Several entries reduce one hand: what any of them reads is the same modulo W.
    for start in range(0, count, BLOCK):
        index_X = start + tl.arange(0, BLOCK)
        listed_X = index_X < count
        set_X = tl.load(install_ids_ptr + index_X, mask=listed_X, other=0) % SETS
        hand_X = tl.load(hands_ptr + set_X, mask=listed_X, other=0, volatile=True)
        tl.store(hands_ptr + set_X, hand_X % WAYS, mask=listed_X)


def plan_serve_launch(
    topk_TK: torch.Tensor, slot_mapping_T: torch.Tensor, seq_lens_B: torch.Tensor, committed_B: torch.Tensor,
    request_slots_B: torch.Tensor, tags_RNW: torch.Tensor, hands_RN: torch.Tensor, sizes: PoolSizes,
) -> tuple[Launch, tuple[torch.Tensor, ...]]:  # fmt: skip
    """The launch of `plan_serve`, and the tensors that it will write."""
    batch, (tokens, topk) = request_slots_B.shape[0], topk_TK.shape
    queries = tokens // max(1, batch)
    positions = queries * topk
    assert positions <= MAX_POSITIONS, f"a plan has at most {MAX_POSITIONS} ids per request, got {positions}"
    assert sizes.ways <= 32, "the ways of a set are the bits of one int32"
    sources_TK = torch.empty_like(topk_TK)
    lists = tuple(topk_TK.new_empty(batch, positions) for _ in range(3))
    counts_B, stats_BC = topk_TK.new_empty(batch), topk_TK.new_empty(batch, NUM_STATS.value)
    scratch = 3 * sizes.sets + 3 * positions
    arguments = {
        "topk_ptr": topk_TK, "slot_mapping_ptr": slot_mapping_T, "seq_lens_ptr": seq_lens_B,
        "committed_ptr": committed_B, "request_slots_ptr": request_slots_B,
        "tags_ptr": tags_RNW, "hands_ptr": hands_RN, "sources_ptr": sources_TK,
        "install_ids_ptr": lists[0], "install_rows_ptr": lists[1], "install_from_ptr": lists[2],
        "counts_ptr": counts_B, "stats_ptr": stats_BC, "scratch_ptr": topk_TK.new_empty(batch, scratch),
        "QUERIES": queries, "TOPK": topk, "SETS": sizes.sets, "WAYS": sizes.ways,
        "WAYS_POW2": power_of_two(sizes.ways), "SPAN": power_of_two(positions), "SCRATCH": scratch, "BLOCK": THREADS,
    }  # fmt: skip
    launch = Launch(kernel=plan_serve_kernel, grid=(batch,), arguments=arguments, threads=THREADS)
    return launch, (sources_TK, *lists, counts_B, stats_BC)


def plan_serve(
    topk_TK: torch.Tensor, slot_mapping_T: torch.Tensor, seq_lens_B: torch.Tensor, committed_B: torch.Tensor,
    request_slots_B: torch.Tensor, tags_RNW: torch.Tensor, hands_RN: torch.Tensor, sizes: PoolSizes,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Sources (T, K), install ids, rows and from (B, X) each, counts (B,), stats (B, 7); all int32. Changes nothing."""
    launch, outputs = plan_serve_launch(
        topk_TK, slot_mapping_T, seq_lens_B, committed_B, request_slots_B, tags_RNW, hands_RN, sizes
    )
    launch.run()
    return outputs


def install_metadata_launch(
    install_ids_BX: torch.Tensor, install_rows_BX: torch.Tensor, counts_B: torch.Tensor, request_slots_B: torch.Tensor,
    tags_RNW: torch.Tensor, hands_RN: torch.Tensor,
) -> Launch:  # fmt: skip
    """The launch of `install_metadata`."""
    batch, positions = install_ids_BX.shape
    arguments = {
        "install_ids_ptr": install_ids_BX, "install_rows_ptr": install_rows_BX, "counts_ptr": counts_B,
        "request_slots_ptr": request_slots_B, "tags_ptr": tags_RNW, "hands_ptr": hands_RN,
        "POSITIONS": positions, "SETS": tags_RNW.shape[1], "WAYS": tags_RNW.shape[2], "BLOCK": THREADS,
    }  # fmt: skip
    return Launch(kernel=install_metadata_kernel, grid=(batch,), arguments=arguments, threads=THREADS)


def install_metadata(
    install_ids_BX: torch.Tensor, install_rows_BX: torch.Tensor, counts_B: torch.Tensor, request_slots_B: torch.Tensor,
    tags_RNW: torch.Tensor, hands_RN: torch.Tensor,
) -> None:  # fmt: skip
    """Advance the head of each listed id's set in `hands`, and enter the ids that stay in `tags`."""
    install_metadata_launch(install_ids_BX, install_rows_BX, counts_B, request_slots_B, tags_RNW, hands_RN).run()
