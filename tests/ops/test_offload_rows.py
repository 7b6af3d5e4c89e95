"""Copies of whole rows: compiled loops against references, and references against what a plan says, row by row."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from castoff.ops import offload_rows, row_copies  # noqa: E402
from castoff.ops.offload_plan import PoolSizes  # noqa: E402

BLOCK_TOKENS, BLOCKS, TABLE = 4, 9, 4
SIZES = PoolSizes(requests=3, sets=4, ways=2, ring_tokens=3, staging_rows=10, policy="fifo")
LISTED = 10


def drawn(random: Any, low: int, high: int, *shape: int) -> Any:
    return torch.randint(low, high, shape, generator=random)


def rows_of(random: Any, count: int, width: int, dtype: Any) -> Any:
    values = torch.randn(count, width, generator=random)
    return (values * 50).to(dtype) if dtype.is_floating_point else (values * 50).to(torch.int8).view(dtype)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, int, Any]:
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    width = draw(st.sampled_from([1, 3, 8, 24, 82]))
    return random, width, draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float64]))


def same_bits(own: Any, other: Any) -> bool:
    return torch.equal(own.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.property
@settings(max_examples=60, deadline=None)
@given(cases())
def test_compiled_fetches_are_the_reference(case: tuple[Any, int, Any]) -> None:
    random, width, dtype = case
    host = rows_of(random, BLOCKS * BLOCK_TOKENS, width, dtype).view(BLOCKS, BLOCK_TOKENS, width)
    tables = drawn(random, 0, BLOCKS, 2, TABLE)
    # Distinct destinations: a plan gives every row away once.
    places = torch.randperm(SIZES.layer_rows + 20, generator=random)[: 2 * LISTED].view(2, LISTED).to(torch.int32)
    entries = drawn(random, -2 - 12, TABLE * BLOCK_TOKENS, 2, LISTED).to(torch.int32)
    entries[entries == -1] = 0
    ring_rows = {SIZES.pool_rows + place for place in range(9)}
    places = torch.tensor([[place if place not in ring_rows else -1 for place in row] for row in places.tolist()])
    entries[places < 0] = 0
    places = torch.where(places < 0, SIZES.layer_rows + 20 + torch.arange(2 * LISTED).view(2, LISTED), places)
    counts = drawn(random, 0, LISTED + 1, 2).to(torch.int32)
    slots = torch.randperm(3, generator=random)[:2]
    results = []
    for fetch in (offload_rows.OFFLOAD_FETCH.reference, row_copies.fetch):
        assert fetch is not None
        seed = torch.Generator().manual_seed(1)
        region = rows_of(seed, SIZES.layer_rows + 1, width, dtype)
        staging = rows_of(seed, 20 + 2 * LISTED, width, dtype)
        fetch(host, tables, slots, entries, places.to(torch.int32), counts, region, staging, sizes=SIZES)
        results.append((region, staging))
    (region, staging), (compiled_region, compiled_staging) = results
    assert same_bits(region, compiled_region)
    assert same_bits(staging, compiled_staging)
    for b in range(2):
        for entry, place in list(zip(entries[b].tolist(), places[b].tolist(), strict=True))[: int(counts[b])]:
            if entry >= 0:
                expected = host[tables[b, entry // BLOCK_TOKENS], entry % BLOCK_TOKENS]
                at = region[place] if place < SIZES.layer_rows else staging[place - SIZES.layer_rows]
                assert same_bits(at, expected)


@pytest.mark.property
@settings(max_examples=60, deadline=None)
@given(cases())
def test_compiled_serves_and_installs_are_the_references(case: tuple[Any, int, Any]) -> None:
    random, width, dtype = case
    host = rows_of(random, BLOCKS * BLOCK_TOKENS, width, dtype).view(BLOCKS, BLOCK_TOKENS, width)
    tables = drawn(random, 0, BLOCKS, 2, TABLE)
    sources = drawn(random, -2 - TABLE * BLOCK_TOKENS + 1, SIZES.pool_rows, 4, 5).to(torch.int32)
    places = torch.randperm(SIZES.pool_rows, generator=random)[:20].view(2, 10).to(torch.int32)
    places[drawn(random, 0, 4, 2, 10) == 0] = -1
    origins = drawn(random, 0, 20, 2, 10).to(torch.int32)
    counts = drawn(random, 0, 11, 2).to(torch.int32)
    results = []
    for serve, install in (
        (offload_rows.OFFLOAD_SERVE.reference, offload_rows.OFFLOAD_INSTALL.reference),
        (row_copies.serve, row_copies.install),
    ):
        assert serve is not None
        assert install is not None
        seed = torch.Generator().manual_seed(1)
        region = rows_of(seed, SIZES.layer_rows + 1, width, dtype)
        selection = rows_of(seed, 24, width, dtype)
        serve(host, tables, sources, region, selection)
        install(selection, places, origins, counts, region)
        results.append((region, selection))
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])
    served = results[0][1]
    for t, row in enumerate(sources.tolist()):
        for k, code in enumerate(row):
            if code < -1:
                token = -2 - code
                expected = host[tables[t // 2, token // BLOCK_TOKENS], token % BLOCK_TOKENS]
                assert same_bits(served[5 * t + k], expected)
            elif code == -1:
                assert not served[5 * t + k].any()


def test_prompts_are_stored_and_loaded_by_block() -> None:
    host, buffer = torch.zeros(6, 4, 3), torch.arange(60.0).view(5, 4, 3)
    offload_rows.store_rows(buffer, host, 2, 15, (4, 5, 1, 0))
    flat = host[[4, 5, 1, 0]].flatten(0, 1)
    assert torch.equal(flat[2:15], buffer.flatten(0, 1)[2:15])
    assert not flat[:2].any()
    assert not flat[15:].any()
    loaded = torch.zeros(5, 4, 3)
    offload_rows.load_rows(host, loaded, 15, (4, 5, 1, 0))
    assert torch.equal(loaded.flatten(0, 1)[:15], flat[:15])
    assert not loaded.flatten(0, 1)[15:].any()
