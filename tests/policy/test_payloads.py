"""What attention would read: rows are carried along plans and fetches, and must be the host's newest.

A row is (token, version). This step's tokens are written with a new version, to the host and to the device's ring; a
rejected draft's position is written again in a later step. So a row of a rejected draft that a plan took for a hit
would show.
"""

import dataclasses
from typing import get_args

import pytest
from hypothesis import given, settings

from castoff.policy.arrays import FetchPlan
from castoff.policy.direct import plan_direct
from castoff.policy.previous import plan_gather
from castoff.policy.published import install_metadata, plan_serve
from castoff.spec.offload import PoolPolicy
from tests.policy.decoding import Array, Decoding, Sizes, Step, clear_slot, empty_pools, seeds, sizes
from tests.policy.model import rows_of

Payload = tuple[int, int]
STEPS = 40
fewer = settings(max_examples=35)


class World:
    """Rows of one layer: the host has all, the device what was written or fetched."""

    def __init__(self, given_sizes: Sizes, seed: int) -> None:
        self.sizes = given_sizes
        self.decoding = Decoding(given_sizes, seed, odd=False)
        self.host: list[dict[int, Payload]] = [{} for _ in range(given_sizes.slots)]
        self.device: dict[int, Payload] = {}
        self.version = 0

    def start(self, slot: int) -> None:
        """A new request's prompt is in the host, and nothing of it on the device."""
        self.version += 1
        self.host[slot] = {token: (token, self.version) for token in range(self.decoding.requests[slot].first)}

    def ring_row(self, slot: int, token: int) -> int:
        return self.sizes.ring_start + slot * self.sizes.ring_tokens + token % self.sizes.ring_tokens

    def write(self, step: Step) -> None:
        """The rows of this step's real tokens."""
        self.version += 1
        for b, slot in enumerate(step.slots):
            for s in range(step.real[b] if slot >= 0 else 0):
                token = int(step.selection.committed_B[b]) + s
                self.host[slot][token] = self.device[self.ring_row(slot, token)] = (token, self.version)

    def fetch(self, step: Step, plan: FetchPlan) -> None:
        for b, slot in enumerate(step.slots):
            for j in range(plan.counts_B[b]):
                entry, row = int(plan.fetch_ids_BX[b, j]), int(plan.fetch_rows_BX[b, j])
                self.device[row] = (
                    self.host[slot][entry] if entry >= 0 else self.device[self.ring_row(slot, -2 - entry)]
                )

    def check(self, step: Step, rows: Array) -> None:
        """Every valid id is read as the host has it."""
        reads = 0
        for b, slot in enumerate(step.slots):
            queries = len(rows) // len(step.slots)
            for s, k, token in rows_of(step.selection, b).ids:
                assert self.device[int(rows[b * queries + s, k])] == self.host[slot][token]
                reads += 1
        assert reads == (rows >= 0).sum()


@pytest.mark.property
@pytest.mark.parametrize("policy", get_args(PoolPolicy))
@fewer
@given(given_sizes=sizes, seed=seeds)
def test_direct(policy: PoolPolicy, given_sizes: Sizes, seed: int) -> None:
    world, state = World(given_sizes, seed), empty_pools(given_sizes)
    for _ in range(STEPS):
        for slot in world.decoding.started:
            clear_slot(state, slot)
            world.start(slot)
        step = world.decoding.step()
        world.write(step)
        plan = plan_direct(
            policy,
            step.selection,
            step.ring_first,
            state,
            ring_tokens=given_sizes.ring_tokens,
            staging_rows=given_sizes.staging_rows,
        )
        world.fetch(step, plan)
        world.check(step, plan.rows_TK)
        # Staging is shared by layers and steps: nothing in it lasts.
        world.device = {row: payload for row, payload in world.device.items() if row < given_sizes.staging_start}
        world.decoding.finish(step)


@pytest.mark.property
@fewer
@given(given_sizes=sizes, seed=seeds)
def test_gather(given_sizes: Sizes, seed: int) -> None:
    given_sizes = dataclasses.replace(
        given_sizes, sets=given_sizes.queries, ways=max(given_sizes.ways, given_sizes.columns)
    )
    world, tags = World(given_sizes, seed), empty_pools(given_sizes).tags_RNW
    for _ in range(STEPS):
        for slot in world.decoding.started:
            tags[slot] = -1
            world.start(slot)
        step = world.decoding.step()
        world.write(step)
        plan = plan_gather(step.selection, tags)
        world.fetch(step, plan)
        world.check(step, plan.rows_TK)
        world.decoding.finish(step)


@pytest.mark.property
@fewer
@given(given_sizes=sizes, seed=seeds)
def test_serve_install(given_sizes: Sizes, seed: int) -> None:
    world = World(given_sizes, seed)
    tags, _, hands, _ = empty_pools(given_sizes)
    for _ in range(STEPS):
        for slot in world.decoding.started:
            tags[slot], hands[slot] = -1, 0
            world.start(slot)
        step = world.decoding.step()
        world.write(step)
        plan = plan_serve(step.selection, tags, hands)
        buffer = read_sources(world, step, plan.sources_TK)
        for b in range(len(step.slots)):
            for j in range(plan.counts_B[b]):
                if plan.install_rows_BX[b, j] >= 0:
                    world.device[int(plan.install_rows_BX[b, j])] = buffer[int(plan.install_from_BX[b, j])]
        install_metadata(
            plan.install_ids_BX, plan.install_rows_BX, plan.counts_B, step.selection.request_slots_B, tags, hands
        )
        world.decoding.finish(step)


def read_sources(world: World, step: Step, sources_TK: Array) -> dict[int, Payload]:
    """The buffer that attention reads, by flat position, checked against the host."""
    queries, columns = len(sources_TK) // len(step.slots), sources_TK.shape[1]
    buffer: dict[int, Payload] = {}
    for b, slot in enumerate(step.slots):
        for s, k, token in rows_of(step.selection, b).ids:
            t = b * queries + s
            source = int(sources_TK[t, k])
            row = world.device[source] if source >= 0 else world.host[slot][-2 - source]
            assert row == world.host[slot][token]
            buffer[t * columns + k] = row
    assert len(buffer) == (sources_TK != -1).sum()
    return buffer
