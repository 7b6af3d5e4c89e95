"""What a plan is by definition, id after id in plain Python, and requests that decode step after step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from castoff.ops.offload_plan import PoolSizes

NUM_STATS = 7
HITS, UNIQUE_HITS, UNIQUE_MISSES, REPEATED_MISSES, WINDOW_READS, PROMOTED, OVERFLOWS = range(NUM_STATS)


def sizes_of(
    *, requests: int, sets: int, ways: int, ring_tokens: int = 8, staging_rows: int = 0, policy: Any = "fifo"
) -> PoolSizes:
    """A pool, with rings of eight rows and without staging unless told."""
    return PoolSizes(requests, sets, ways, ring_tokens, staging_rows, policy)


@dataclass(slots=True)
class State:
    """What a group of layers keeps between steps: int32 (R, N, W) twice, then (R, N) twice."""

    tags: Tensor
    used: Tensor
    hands: Tensor
    marks: Tensor

    @classmethod
    def empty(cls, sizes: PoolSizes, device: str = "cpu") -> State:
        ways, sets = (sizes.requests, sizes.sets, sizes.ways), (sizes.requests, sizes.sets)
        free = [torch.full(ways, -1, dtype=torch.int32, device=device) for _ in range(2)]
        return cls(*free, *(torch.zeros(sets, dtype=torch.int32, device=device) for _ in range(2)))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.tags, self.used, self.hands, self.marks


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of a plan: topk int32 (T, K); the others int64, of T tokens or B requests."""

    topk: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    committed: Tensor
    request_slots: Tensor
    ring_first: Tensor

    @property
    def queries(self) -> int:
        return self.topk.shape[0] // self.request_slots.shape[0]

    def to(self, device: str) -> Step:
        return Step(*(getattr(self, name).to(device) for name in self.__slots__))

    def selected(self, request: int) -> Iterator[tuple[int, int, int]]:
        """(query, rank, id) of a request, in order; rows and ids that count as none are left out."""
        if self.request_slots[request] < 0:
            return
        for query in range(self.queries):
            token = request * self.queries + query
            last = int(self.seq_lens[request]) - self.queries + query
            if self.slot_mapping[token] >= 0:
                yield from ((query, rank, id) for rank, id in enumerate(self.topk[token].tolist()) if 0 <= id <= last)


@dataclass(slots=True, kw_only=True)
class Decode:
    """Requests that decode step after step, selecting what they selected before, other ids, and holes between."""

    rng: Random
    sizes: PoolSizes
    batch: int
    queries: int
    topk: int
    longest: int = 60
    lengths: list[int] = field(default_factory=list)
    wanted: dict[int, list[int]] = field(default_factory=dict)

    def steps(self, count: int) -> Iterator[Step]:
        self.lengths = [self.rng.randint(0, self.longest) for _ in range(self.sizes.requests)]
        for _ in range(count):
            yield self._step()

    def _step(self) -> Step:
        rng = self.rng
        slots = rng.sample(range(self.sizes.requests), self.batch)
        slots = [slot if rng.random() < 0.9 else -1 for slot in slots]
        committed = [self.lengths[slot] for slot in slots]
        topk = [self._select(slot, length) for slot, length in zip(slots, committed, strict=True)]
        for slot in slots:
            self.lengths[slot] += rng.randint(1, self.queries)
        stored = [rng.choice((0, 7, 2**40)) if rng.random() < 0.9 else -1 for _ in range(self.batch * self.queries)]
        window = self.sizes.ring_tokens - self.queries
        committed_B = torch.tensor(committed)
        return Step(
            topk=torch.tensor(topk, dtype=torch.int32).view(-1, self.topk),
            slot_mapping=torch.tensor(stored),
            seq_lens=committed_B + self.queries,
            committed=committed_B,
            request_slots=torch.tensor(slots),
            ring_first=torch.tensor([max(0, length - rng.randint(0, window)) for length in committed]),
        )

    def _select(self, slot: int, committed: int) -> list[list[int]]:
        """Per query, mostly different ids up to one beyond what it may see, and a tail or holes of -1."""
        rng, beyond = self.rng, committed + self.queries + 1
        kept = [id for id in self.wanted.get(slot, []) if rng.random() < 0.7]
        pool = [*kept, *(rng.randrange(beyond) for _ in range(2 * self.topk))]
        self.wanted[slot] = pool[: 2 * self.topk]
        rows = []
        for _ in range(self.queries):
            ids = (
                pool[: rng.randint(0, self.topk)] if rng.random() < 0.3 else rng.sample(pool, rng.randint(0, self.topk))
            )
            if rng.random() < 0.9:
                ids = list(dict.fromkeys(ids))
            ids = [id if rng.random() < 0.95 else -1 for id in ids]
            rows.append(ids + [-1] * (self.topk - len(ids)))
        return rows


def _outputs(step: Step, lists: int) -> tuple[Tensor, ...]:
    """Rows (T, K), `lists` lists (B, X), counts (B,) and stats (B, 7), empty."""
    batch = step.request_slots.shape[0]
    empty = [torch.full((batch, step.queries * step.topk.shape[1]), -1, dtype=torch.int32) for _ in range(lists)]
    counts = torch.zeros(batch, dtype=torch.int32)
    return torch.full_like(step.topk, -1), *empty, counts, torch.zeros(batch, NUM_STATS, dtype=torch.int32)


def plan_direct(step: Step, state: State, sizes: PoolSizes) -> tuple[Tensor, ...]:
    """Rows, fetch ids, fetch rows, counts and stats; changes `state`."""
    rows, fetch_ids, fetch_rows, counts, stats = _outputs(step, 2)
    for b, slot in enumerate(step.request_slots.tolist()):
        now, ring_first, stat = int(step.committed[b]), int(step.ring_first[b]), [0] * NUM_STATS
        if slot < 0:
            continue
        sets = _Sets(state, sizes, slot, now)
        misses, hit_ids, placed, listed = [], set(), {}, []
        for query, rank, id in step.selected(b):
            place = (b * step.queries + query, rank)
            if id >= now:
                rows[place] = sizes.pool_rows + slot * sizes.ring_tokens + id % sizes.ring_tokens
                stat[WINDOW_READS] += 1
            elif (way := sets.way_of(id)) is not None:
                rows[place] = sets.row(id, way)
                sets.touch(id, way)
                stat[HITS] += 1
                hit_ids.add(id)
            else:
                misses.append((place, query * step.topk.shape[1] + rank, id))
        stat[UNIQUE_HITS] = len(hit_ids)
        for place, position, id in misses:
            if id in placed:
                stat[REPEATED_MISSES] += 1
            else:
                way = sets.choose(id)
                if way is None:
                    placed[id] = sizes.layer_rows + slot * sizes.staging_rows + position
                    stat[OVERFLOWS] += 1
                else:
                    sets.enter(id, way)
                    placed[id] = sets.row(id, way)
                promoted = id >= ring_first
                stat[PROMOTED if promoted else UNIQUE_MISSES] += 1
                listed.append((-2 - id if promoted else id, placed[id]))
            rows[place] = placed[id]
        sets.store()
        _write_list(b, (fetch_ids, fetch_rows), listed, counts)
        stats[b] = torch.tensor(stat)
    return rows, fetch_ids, fetch_rows, counts, stats


def _write_list(request: int, lists: tuple[Tensor, ...], entries: list[tuple[int, ...]], counts: Tensor) -> None:
    counts[request] = len(entries)
    for column, values in zip(lists, zip(*entries, strict=True), strict=False):
        column[request, : len(values)] = torch.tensor(values, dtype=torch.int32)


class _Sets:
    """The sets of one request as Python lists, until they are stored."""

    def __init__(self, state: State, sizes: PoolSizes, slot: int, now: int) -> None:
        self._state, self._sizes, self._slot, self._now = state, sizes, slot, now
        self._tags, self._used, self._hands = (x[slot].tolist() for x in (state.tags, state.used, state.hands))
        self._marks = [mark & 0xFFFFFFFF for mark in state.marks[slot].tolist()]

    def way_of(self, id: int) -> int | None:
        tags = self._tags[id % self._sizes.sets]
        return tags.index(id) if id in tags else None

    def row(self, id: int, way: int) -> int:
        return self._slot * self._sizes.pool_tokens + id % self._sizes.sets * self._sizes.ways + way

    def touch(self, id: int, way: int) -> None:
        """A hit. It blocks the way, and leaves the tag, so a way is one that was resident before the plan."""
        self._used[id % self._sizes.sets][way] = self._now
        if self._sizes.policy == "clock":
            self._marks[id % self._sizes.sets] |= 1 << way

    def enter(self, id: int, way: int) -> None:
        self._tags[id % self._sizes.sets][way] = id
        self._used[id % self._sizes.sets][way] = self._now

    def choose(self, id: int) -> int | None:
        """The way that a miss takes, by the policy; None where all are blocked."""
        index, ways = id % self._sizes.sets, self._sizes.ways
        used = self._used[index]
        unblocked = [way for way in range(ways) if used[way] != self._now]
        if not unblocked:
            return None
        if self._sizes.policy == "lru":
            return min(unblocked, key=lambda way: (used[way], way))
        way = self._hands[index]
        while way not in unblocked or self._is_spared(index, way):
            way = (way + 1) % ways
        self._hands[index] = (way + 1) % ways
        return way

    def _is_spared(self, index: int, way: int) -> bool:
        """Whether the hand passes a way because of its mark, which it then loses."""
        marked = self._sizes.policy == "clock" and self._marks[index] >> way & 1 == 1
        if marked:
            self._marks[index] &= ~(1 << way)
        return marked

    def store(self) -> None:
        signed = [mark - (mark >> 31 << 32) for mark in self._marks]
        for tensor, values in zip(self._state.tensors(), (self._tags, self._used, self._hands, signed), strict=True):
            tensor[self._slot] = torch.tensor(values, dtype=torch.int32)


def plan_serve(step: Step, state: State, sizes: PoolSizes) -> tuple[Tensor, ...]:
    """Sources, install ids, install rows, install from, counts and stats; changes nothing."""
    sources, install_ids, install_rows, install_from, counts, stats = _outputs(step, 3)
    for b, slot in enumerate(step.request_slots.tolist()):
        if slot < 0:
            continue
        now, stat = int(step.committed[b]), [0] * NUM_STATS
        sets, hit_ids, listed = _Sets(state, sizes, slot, now), set(), {}
        heads, latest = state.hands[slot].tolist(), {}
        for query, rank, id in step.selected(b):
            token = b * step.queries + query
            way = sets.way_of(id) if id < now else None
            sources[token, rank] = -2 - id if way is None else sets.row(id, way)
            if way is not None:
                stat[HITS] += 1
                hit_ids.add(id)
            elif id >= now:
                stat[WINDOW_READS] += 1
            elif id in listed:
                stat[REPEATED_MISSES] += 1
            else:
                row = sets.row(id, heads[id % sizes.sets] % sizes.ways)
                heads[id % sizes.sets] = (heads[id % sizes.sets] + 1) % sizes.ways
                listed[id] = (row, token * step.topk.shape[1] + rank)
                latest[row] = id
        stat[UNIQUE_HITS], stat[UNIQUE_MISSES] = len(hit_ids), len(listed)
        entries = [(id, row if latest[row] == id else -1, origin) for id, (row, origin) in listed.items()]
        _write_list(b, (install_ids, install_rows, install_from), entries, counts)
        stats[b] = torch.tensor(stat)
    return sources, install_ids, install_rows, install_from, counts, stats


def install_metadata(
    install_ids: Tensor, install_rows: Tensor, counts: Tensor, request_slots: Tensor, state: State, sizes: PoolSizes
) -> None:
    """Change tags and hands of `state` as the listed installs do."""
    for b, slot in enumerate(request_slots.tolist()):
        for j in range(int(counts[b])):
            index, row = int(install_ids[b, j]) % sizes.sets, int(install_rows[b, j])
            state.hands[slot, index] = (state.hands[slot, index] + 1) % sizes.ways
            if row >= 0:
                state.tags.view(-1)[row] = install_ids[b, j]


def plan_gather(step: Step, tags: Tensor, sizes: PoolSizes) -> tuple[Tensor, ...]:
    """Rows, fetch ids, fetch rows, counts and stats; changes `tags`, of which set s is the buffer of query s."""
    rows, fetch_ids, fetch_rows, counts, stats = _outputs(step, 2)
    for b, slot in enumerate(step.request_slots.tolist()):
        if slot < 0:
            continue
        now, listed, hit_ids, missed = int(step.committed[b]), [], [], []
        selected = list(step.selected(b))
        tags[slot][tags[slot] >= now] = -1
        for query in range(step.queries):
            token = b * step.queries + query
            if step.slot_mapping[token] < 0:
                continue
            buffer = tags[slot, query].tolist()
            first = (slot * sizes.sets + query) * sizes.ways
            reads, kept = [], set()
            for _, rank, id in (entry for entry in selected if entry[0] == query):
                if id < now and id in buffer:
                    kept.add(buffer.index(id))
                    rows[token, rank] = first + buffer.index(id)
                    hit_ids.append(id)
                else:
                    reads.append((rank, id))
                    if id < now:
                        missed.append(id)
            buffer = [id if way in kept else -1 for way, id in enumerate(buffer)]
            free = [way for way in range(sizes.ways) if way not in kept]
            for way, (rank, id) in zip(free, reads, strict=False):
                buffer[way] = id
                rows[token, rank] = first + way
                listed.append((id, first + way))
            tags[slot, query] = torch.tensor(buffer, dtype=torch.int32)
        _write_list(b, (fetch_ids, fetch_rows), listed, counts)
        stat = [0] * NUM_STATS
        stat[HITS], stat[UNIQUE_HITS] = len(hit_ids), len(set(hit_ids))
        stat[UNIQUE_MISSES], stat[REPEATED_MISSES] = len(set(missed)), len(missed) - len(set(missed))
        stat[WINDOW_READS] = len(listed) - len(missed)
        stats[b] = torch.tensor(stat)
    return rows, fetch_ids, fetch_rows, counts, stats


def assert_equal(names: str, got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """All tensors are bit-equal; else says at which place the first one is not."""
    for name, mine, right in zip(names.split(), got, wanted, strict=True):
        assert mine.dtype == right.dtype, f"{name} is {mine.dtype}, not {right.dtype}"
        assert mine.shape == right.shape, f"{name} is {tuple(mine.shape)}, not {tuple(right.shape)}"
        mine = mine.cpu()
        if not torch.equal(mine, right):
            place = tuple((mine != right).nonzero()[0].tolist())
            raise AssertionError(f"{name}{list(place)} is {mine[place].item()}, not {right[place].item()}")
