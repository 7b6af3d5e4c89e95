"""The plans again, from their definitions, in dictionaries: of castoff.policy they use the types of arrays only."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from castoff.policy.arrays import STATS, FetchPlan, PoolState, Selection
from castoff.policy.published import ServePlan
from tests.policy.decoding import Array, Sizes


@dataclass
class Pool:
    """One request's pool: token by place (set, way), and when a place was used last."""

    tags: dict[tuple[int, int], int] = field(default_factory=dict)
    used: dict[tuple[int, int], int] = field(default_factory=dict)
    hands: Counter[int] = field(default_factory=Counter)
    marked: set[tuple[int, int]] = field(default_factory=set)

    def place_of(self, token: int) -> tuple[int, int] | None:
        places = [place for place, tag in self.tags.items() if tag == token]
        assert len(places) <= 1, "a token is in one place"
        return places[0] if places else None


def victim(policy: str, pool: Pool, chosen: int, ways: int, now: int) -> int | None:
    """The way that a set gives up, or None where this step uses all of its ways."""
    unblocked = [way for way in range(ways) if pool.used.get((chosen, way), -1) != now]
    if not unblocked:
        return None
    if policy == "lru":
        return min(unblocked, key=lambda way: (pool.used.get((chosen, way), -1), way))
    way = pool.hands[chosen]
    while True:
        place = (chosen, way)
        if way in unblocked and (policy == "fifo" or place not in pool.marked):
            pool.hands[chosen] = (way + 1) % ways
            return way
        if way in unblocked:
            pool.marked.discard(place)
        way = (way + 1) % ways


@dataclass(frozen=True)
class Row:
    """The valid ids of one request in a call: (query, rank, id) in order."""

    slot: int
    committed: int
    ids: list[tuple[int, int, int]]


def rows_of(selection: Selection, b: int) -> Row:
    requests = len(selection.seq_lens_B)
    queries, columns = len(selection.topk_TK) // requests, selection.topk_TK.shape[1]
    slot, length = int(selection.request_slots_B[b]), int(selection.seq_lens_B[b])
    ids = [
        (s, k, token)
        for s in range(queries)
        for k in range(columns)
        if slot >= 0
        and selection.slot_mapping_T[b * queries + s] >= 0
        and 0 <= (token := int(selection.topk_TK[b * queries + s, k])) <= length - queries + s
    ]
    return Row(slot, int(selection.committed_B[b]), ids)


class Outputs:
    """Lists of a plan as they grow, for one call."""

    def __init__(self, selection: Selection) -> None:
        self.requests = len(selection.seq_lens_B)
        tokens, self.columns = selection.topk_TK.shape
        self.queries = tokens // self.requests
        self.rows = np.full((tokens, self.columns), -1, np.int32)
        self.lists: list[list[tuple[int, ...]]] = [[] for _ in range(self.requests)]
        self.stats: list[Counter[str]] = [Counter() for _ in range(self.requests)]

    def put(self, b: int, s: int, k: int, row: int) -> None:
        self.rows[b * self.queries + s, k] = row

    def arrays(self, width: int) -> tuple[Array, ...]:
        """Rows; each column of the lists, padded with -1; lengths; statistics."""
        columns = np.full((width, self.requests, self.queries * self.columns), -1, np.int32)
        for b, entries in enumerate(self.lists):
            for j, entry in enumerate(entries):
                columns[:, b, j] = entry
        stats = [[counter[name] for name in STATS] for counter in self.stats]
        counts = [len(entries) for entries in self.lists]
        return self.rows, *columns, np.array(counts, np.int32), np.array(stats, np.int32)


class Direct:
    """Mode direct."""

    def __init__(self, policy: str, sizes: Sizes) -> None:
        self.policy, self.sizes = policy, sizes
        self.pools = [Pool() for _ in range(sizes.slots)]

    def row_code(self, slot: int, place: tuple[int, int]) -> int:
        return slot * self.sizes.sets * self.sizes.ways + place[0] * self.sizes.ways + place[1]

    def plan(self, selection: Selection, ring_first: Array) -> FetchPlan:
        out = Outputs(selection)
        for b in range(out.requests):
            row = rows_of(selection, b)
            if row.slot >= 0:
                self._plan_request(row, int(ring_first[b]), b, out)
        return FetchPlan(*out.arrays(2))

    def _plan_request(self, row: Row, ring_first: int, b: int, out: Outputs) -> None:
        sizes, pool, stats, now = self.sizes, self.pools[row.slot], out.stats[b], row.committed
        resident = {tag: place for place, tag in pool.tags.items()}
        hit = set()
        for s, k, token in row.ids:
            if token >= row.committed:
                ring_row = row.slot * sizes.ring_tokens + token % sizes.ring_tokens
                out.put(b, s, k, sizes.ring_start + ring_row)
                stats["window_reads"] += 1
            elif token in resident:
                place = resident[token]
                out.put(b, s, k, self.row_code(row.slot, place))
                stats["hits"] += 1
                hit.add(token)
                pool.used[place] = now
                if self.policy == "clock":
                    pool.marked.add(place)
        stats["unique_hits"] = len(hit)
        placed: dict[int, int] = {}
        for s, k, token in row.ids:
            if token >= row.committed or token in hit:
                continue
            if token in placed:
                stats["repeated_misses"] += 1
            else:
                placed[token] = self._place(row.slot, token, now, s * out.columns + k, stats)
                promoted = token >= ring_first
                stats["promoted_rows" if promoted else "unique_misses"] += 1
                out.lists[b].append((-2 - token if promoted else token, placed[token]))
            out.put(b, s, k, placed[token])

    def _place(self, slot: int, token: int, now: int, position: int, stats: Counter[str]) -> int:
        pool, chosen = self.pools[slot], token % self.sizes.sets
        way = victim(self.policy, pool, chosen, self.sizes.ways, now)
        if way is None:
            stats["staged_rows"] += 1
            return self.sizes.staging_start + slot * self.sizes.staging_rows + position
        pool.tags[chosen, way] = token
        pool.used[chosen, way] = now
        return self.row_code(slot, (chosen, way))

    def state(self) -> PoolState:
        sizes = self.sizes
        pool, sets = (sizes.slots, sizes.sets, sizes.ways), (sizes.slots, sizes.sets)
        tags, used = np.full(pool, -1, np.int32), np.full(pool, -1, np.int32)
        hands, marks = np.zeros(sets, np.int32), np.zeros(sets, np.uint32)
        for r, each in enumerate(self.pools):
            for place, tag in each.tags.items():
                tags[r][place] = tag
            for place, when in each.used.items():
                used[r][place] = when
            for chosen, hand in each.hands.items():
                hands[r, chosen] = hand
            for chosen, way in each.marked:
                marks[r, chosen] |= np.uint32(1 << way)
        return PoolState(tags, used, hands, marks.view(np.int32))


class Gather:
    """Mode gather: for every slot and query index, token by place."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.buffers: dict[tuple[int, int], dict[int, int]] = {}

    def plan(self, selection: Selection) -> FetchPlan:
        out = Outputs(selection)
        for b in range(out.requests):
            row = rows_of(selection, b)
            if row.slot < 0:
                continue
            hit: set[int] = set()
            missed: set[int] = set()
            for s in range(self.sizes.sets):
                settled = {
                    place: token
                    for place, token in self.buffers.get((row.slot, s), {}).items()
                    if token < row.committed
                }
                self.buffers[row.slot, s] = settled
            for s in range(out.queries):
                if selection.slot_mapping_T[b * out.queries + s] >= 0:
                    ids = [(k, token) for query, k, token in row.ids if query == s]
                    self._plan_query(row, s, ids, b, out, hit, missed)
            out.stats[b]["unique_hits"] = len(hit)
        return FetchPlan(*out.arrays(2))

    def _plan_query(self, row: Row, s: int, ids: Any, b: int, out: Outputs, hit: set[int], missed: set[int]) -> None:
        before = self.buffers.get((row.slot, s), {})
        place_of = {token: place for place, token in before.items() if token < row.committed}
        after = {place_of[token]: token for _, token in ids if token in place_of}
        self.buffers[row.slot, s] = after
        first_row = (row.slot * self.sizes.sets + s) * self.sizes.ways
        for k, token in ids:
            if token in place_of:
                hit.add(token)
                out.stats[b]["hits"] += 1
                out.put(b, s, k, first_row + place_of[token])
                continue
            place = min(set(range(self.sizes.ways)) - set(after))
            after[place] = token
            out.put(b, s, k, first_row + place)
            out.lists[b].append((token, first_row + place))
            kind = "repeated_misses" if token in missed else "unique_misses"
            out.stats[b]["window_reads" if token >= row.committed else kind] += 1
            if token < row.committed:
                missed.add(token)

    def tags(self) -> Array:
        tags = np.full((self.sizes.slots, self.sizes.sets, self.sizes.ways), -1, np.int32)
        for (slot, s), buffer in self.buffers.items():
            for place, token in buffer.items():
                tags[slot, s, place] = token
        return tags


class Serve:
    """Mode serve_install: pools whose hands alone choose, and change only in `install`."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.pools = [Pool() for _ in range(sizes.slots)]

    def plan(self, selection: Selection) -> ServePlan:
        out = Outputs(selection)
        for b in range(out.requests):
            row = rows_of(selection, b)
            if row.slot >= 0:
                self._plan_request(row, b, out)
        return ServePlan(*out.arrays(3))

    def _plan_request(self, row: Row, b: int, out: Outputs) -> None:
        sizes, pool, stats = self.sizes, self.pools[row.slot], out.stats[b]
        resident = {tag: place for place, tag in pool.tags.items()}
        first: dict[int, int] = {}
        for s, k, token in row.ids:
            if token < row.committed and token in resident:
                chosen, way = resident[token]
                out.put(b, s, k, (row.slot * sizes.sets + chosen) * sizes.ways + way)
                stats["hits"] += 1
                continue
            out.put(b, s, k, -2 - token)
            if token >= row.committed:
                stats["window_reads"] += 1
            elif token in first:
                stats["repeated_misses"] += 1
            else:
                first[token] = (b * out.queries + s) * out.columns + k
        hits = {token for *_, token in row.ids if token < row.committed and token in resident}
        stats["unique_hits"], stats["unique_misses"] = len(hits), len(first)
        hands, last = pool.hands.copy(), {}
        for token in first:
            chosen = token % sizes.sets
            last[token] = (row.slot * sizes.sets + chosen) * sizes.ways + hands[chosen] % sizes.ways
            hands[chosen] += 1
        holder = {place: token for token, place in last.items()}
        out.lists[b] = [(token, last[token] if holder[last[token]] == token else -1, first[token]) for token in first]

    def install(self, selection: Selection, plan: ServePlan) -> None:
        for b, slot in enumerate(selection.request_slots_B):
            pool = self.pools[slot]
            for token in plan.install_ids_BX[b, : plan.counts_B[b]]:
                chosen = int(token) % self.sizes.sets
                pool.tags[chosen, pool.hands[chosen]] = int(token)
                pool.hands[chosen] = (pool.hands[chosen] + 1) % self.sizes.ways

    def state(self) -> tuple[Array, Array]:
        sizes = self.sizes
        tags = np.full((sizes.slots, sizes.sets, sizes.ways), -1, np.int32)
        hands = np.zeros((sizes.slots, sizes.sets), np.int32)
        for r, pool in enumerate(self.pools):
            for place, tag in pool.tags.items():
                tags[r][place] = tag
            for chosen, hand in pool.hands.items():
                hands[r, chosen] = hand
        return tags, hands
