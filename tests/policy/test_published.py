"""plan_serve and install_metadata against the dictionary model and against the published operators, taken literally.

The published system keeps a map from token to slot, reads the selection element by element, writes records in eight
chunks of a row, and recomputes distinct tokens and slots from them in every layer's install. Names are its own.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castoff.policy import published
from castoff.policy.arrays import Selection
from castoff.policy.published import ServePlan, install_metadata, plan_serve
from tests.policy import model
from tests.policy.compare import Strict, assert_equal, plain_python, strict
from tests.policy.decoding import Array, Decoding, Sizes, empty_pools, seeds, sizes


def install(plan: ServePlan, selection: Selection, tags: Array, hands: Array) -> None:
    install_metadata(plan.install_ids_BX, plan.install_rows_BX, plan.counts_B, selection.request_slots_B, tags, hands)


@pytest.mark.property
@given(given_sizes=sizes, seed=seeds)
def test_equals_the_model(given_sizes: Sizes, seed: int) -> None:
    decoding, expected = Decoding(given_sizes, seed), model.Serve(given_sizes)
    tags, _, hands, _ = empty_pools(given_sizes)
    for _ in range(30):
        for slot in decoding.started:
            tags[slot], hands[slot] = -1, 0
            expected.pools[slot] = model.Pool()
        step, before = decoding.step(), (tags.copy(), hands.copy())
        plan = plan_serve(step.selection, tags, hands)
        assert_equal(plan, expected.plan(step.selection))
        for old, new in zip(before, (tags, hands), strict=True):
            np.testing.assert_array_equal(old, new, "a plan mutates nothing")
        install(plan, step.selection, tags, hands)
        expected.install(step.selection, plan)
        for actual, wanted in zip((tags, hands), expected.state(), strict=True):
            np.testing.assert_array_equal(actual, wanted)
        for b, slot in enumerate(step.slots):
            held = tags[slot][tags[slot] >= 0]
            assert slot < 0 or len(np.unique(held)) == len(held), "a token is in one place"
            assert slot < 0 or (held < step.selection.committed_B[b]).all(), "only settled tokens are installed"
        decoding.finish(step)


@pytest.mark.property
@settings(max_examples=15)
@given(given_sizes=sizes, seed=seeds)
def test_plain_python_gives_the_same_and_stays_in_bounds(given_sizes: Sizes, seed: int) -> None:
    decoding = Decoding(given_sizes, seed)
    tags, _, hands, _ = empty_pools(given_sizes)
    plain_tags, plain_hands = tags.copy().view(Strict), hands.copy().view(Strict)
    for _ in range(6):
        step = decoding.step()
        plan = plan_serve(step.selection, tags, hands)
        install(plan, step.selection, tags, hands)
        with plain_python(published):
            plain = plan_serve(strict(step.selection), plain_tags, plain_hands)
            install(strict(plain), strict(step.selection), plain_tags, plain_hands)
        assert_equal(plain, plan)
        np.testing.assert_array_equal(tags, plain_tags)
        np.testing.assert_array_equal(hands, plain_hands)
        decoding.finish(step)


CHUNKS = 8


@dataclass
class PublishedCache:
    """The device structures of one group and one layer of a request; payloads are tokens with a version."""

    sets: int
    ways: int
    id_range: int
    pool_ids: list[int] = field(init=False)
    id_to_slot: list[int] = field(init=False)
    lru_counter: list[int] = field(init=False)
    pool: list[object] = field(init=False)

    def __post_init__(self) -> None:
        self.pool_ids = [-1] * (self.sets * self.ways)
        self.id_to_slot = [-1] * self.id_range
        self.lru_counter = [0] * self.sets
        self.pool = [None] * (self.sets * self.ways)


Kind = tuple[int, int]
Record = tuple[int, int, int, int]


def dsa_plan(cache: PublishedCache, topk: Array, cur_len: int) -> tuple[list[Kind], list[list[Record]]]:
    """Kind and value of each (query, rank), and the records (set, id, s, r) of each slab."""
    queries, columns = topk.shape
    plan: list[Kind] = []
    slabs: list[list[Record]] = [[] for _ in range(queries * CHUNKS)]
    last_committed = max(cur_len - queries - 1, 0)
    for s in range(queries):
        last_visible = cur_len - (queries - 1 - s) - 1
        stopped = False
        for r in range(columns):
            token = int(topk[s, r])
            if stopped:
                plan.append((0, -1))
                continue
            if token < 0:
                stopped = True
                plan.append((5, token))
                continue
            if cur_len <= 0 or last_visible < 0 or token > last_visible:
                plan.append((4, token))
                continue
            slot = cache.id_to_slot[token] if token < cache.id_range else -1
            if 0 <= slot < len(cache.pool) and token <= last_committed:
                plan.append((1, slot))
            elif token > last_committed:
                plan.append((3, token))
            else:
                plan.append((2, token))
                slabs[s * CHUNKS + r // (columns // CHUNKS)].append((token & (cache.sets - 1), token, s, r))
    return plan, slabs


def dsa_serve(cache: PublishedCache, plan: list[Kind], host: dict[int, object]) -> list[object]:
    """The selection buffer."""
    served: list[object] = []
    for kind, value in plan:
        if kind == 1:
            served.append(cache.pool[value])
        elif kind in (2, 3):
            served.append(host[value])
        else:
            served.append(None)
    return served


def dsa_install(
    cache: PublishedCache, slabs: list[list[Record]], selection: list[object], columns: int, *, metadata_update: bool
) -> list[tuple[int, int]]:
    """Copies rows into the pool; returns (token, slot) of each, in order."""
    seen = [False] * cache.id_range
    head = cache.lru_counter if metadata_update else cache.lru_counter.copy()
    installed = []
    for slab in slabs:
        for chosen, token, s, r in slab:
            if seen[token]:
                continue
            seen[token] = True
            way = head[chosen] % cache.ways
            head[chosen] = (head[chosen] + 1) % cache.ways
            slot = chosen * cache.ways + way
            if metadata_update:
                old = cache.pool_ids[slot]
                if 0 <= old < cache.id_range:
                    cache.id_to_slot[old] = -1
                cache.pool_ids[slot] = token
                cache.id_to_slot[token] = slot
            cache.pool[slot] = selection[s * columns + r]
            installed.append((token, slot))
    return installed


@pytest.mark.property
@pytest.mark.parametrize("sets", [1, 2, 8])
@settings(max_examples=12)
@given(seed=seeds, queries=st.integers(1, 4))
def test_equals_the_published_operators(sets: int, seed: int, queries: int) -> None:
    """Two layers, whose owner installs last and alone changes the metadata, over 25 steps with rejected drafts."""
    columns, ways, id_range = 32, 16, 400
    rng = np.random.default_rng(seed)
    layers = [PublishedCache(sets, ways, id_range) for _ in range(2)]
    owner = layers[0]
    hosts: list[dict[int, object]] = [{token: (layer, token, 0) for token in range(id_range)} for layer in range(2)]
    tags, hands = np.full((1, sets, ways), -1, np.int32), np.zeros((1, sets), np.int32)
    committed, wrapped = int(rng.integers(queries + 1, 120)), False
    for version in range(1, 26):
        for layer, host in enumerate(hosts):
            host.update({committed + s: (layer, committed + s, version) for s in range(queries)})
        topk = random_topk(rng, committed, queries, columns)
        selection = Selection(
            topk,
            np.zeros(queries, np.int64),
            np.array([committed + queries]),
            np.array([committed]),
            np.array([0]),
        )
        plan = plan_serve(selection, tags, hands)
        published_plan, slabs = dsa_plan(owner, topk, committed + queries)
        assert plan.sources_TK.reshape(-1).tolist() == [source_of(kind) for kind in published_plan]
        selections = []
        for cache, host in zip(layers, hosts, strict=True):
            cache.id_to_slot = owner.id_to_slot
            selections.append(dsa_serve(cache, published_plan, host))
            expected = [host[int(token)] if token >= 0 else None for token in visible(topk, committed)]
            assert selections[-1] == expected, "attention reads what the host has"
        # The follower sees the owner's heads as they were before the step.
        layers[1].lru_counter = owner.lru_counter.copy()
        dsa_install(layers[1], slabs, selections[1], columns, metadata_update=False)
        installed = dsa_install(owner, slabs, selections[0], columns, metadata_update=True)
        count = plan.counts_B[0]
        assert plan.install_ids_BX[0, :count].tolist() == [token for token, _ in installed]
        last = {slot: token for token, slot in installed}
        wrapped |= len(last) < len(installed)
        expected_rows = [slot if last[slot] == token else -1 for token, slot in installed]
        assert plan.install_rows_BX[0, :count].tolist() == expected_rows
        for row, origin in zip(plan.install_rows_BX[0, :count], plan.install_from_BX[0, :count], strict=True):
            for cache, buffer in zip(layers, selections, strict=True):
                assert row < 0 or cache.pool[row] == buffer[origin], "the pool has what the list says"
        install(plan, selection, tags, hands)
        assert tags.reshape(-1).tolist() == owner.pool_ids
        assert hands.reshape(-1).tolist() == owner.lru_counter
        committed += int(rng.integers(1, queries + 1))
    assert wrapped or sets > 1, "a single set of 16 ways gets more than 16 tokens in some step"


def random_topk(rng: np.random.Generator, committed: int, queries: int, columns: int) -> Array:
    """Distinct ids of each query, recent and old, some of the future; -1 only at the end."""
    topk = np.full((queries, columns), -1, np.int32)
    for s in range(queries):
        often = rng.integers(0, 20, columns) ** 2 % (committed + s + 1)
        ids = np.unique(np.concatenate([rng.integers(0, committed + queries, columns), often]))
        ids = rng.permutation(ids)[: int(rng.integers(columns // 2, columns + 1))]
        topk[s, : len(ids)] = ids
    return topk


def visible(topk: Array, committed: int) -> list[int]:
    """The ids of a selection, -1 for those beyond the query's own position."""
    return [int(token) if token <= committed + s else -1 for s, row in enumerate(topk) for token in row]


def source_of(kind: Kind) -> int:
    """Our source of a published (kind, value), for the only request."""
    return {1: kind[1], 2: -2 - kind[1], 3: -2 - kind[1]}.get(kind[0], -1)
