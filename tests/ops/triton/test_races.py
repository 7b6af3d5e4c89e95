"""Kernels keep their accesses apart by barriers, stay inside their tensors, and programs leave each other alone.

Seen in the interpreter, so for the operations as they are written, whatever threads they end up on.
"""

from random import Random

import numpy as np
import pytest
import torch

from castoff.ops.offload_plan import PoolSizes
from castoff.ops.triton.launch import Launch
from castoff.ops.triton.plan_direct import plan_direct_launch
from castoff.ops.triton.plan_gather import plan_gather_launch
from castoff.ops.triton.plan_serve import install_metadata_launch, plan_serve_launch
from tests.ops.triton import races
from tests.ops.triton.conftest import INTERPRETED
from tests.ops.triton.plans import Decode, State, Step, sizes_of

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.skipif(not INTERPRETED, reason="accesses are seen in the interpreter alone"),
]


def decode(sizes: PoolSizes, topk: int = 12, queries: int = 3) -> Decode:
    return Decode(rng=Random(11), sizes=sizes, batch=2, queries=queries, topk=topk)


@pytest.mark.parametrize("policy", ["lru", "clock"])
def test_plan_direct(policy: str) -> None:
    sizes = sizes_of(requests=3, sets=3, ways=3, staging_rows=36, policy=policy)
    state = State.empty(sizes)
    for step in decode(sizes).steps(3):
        launch, _ = plan_direct_launch(
            step.topk, step.slot_mapping, step.seq_lens, step.committed, step.request_slots, step.ring_first,
            *state.tensors(), sizes,
        )  # fmt: skip
        races.check(launch)


def test_plan_direct_of_several_blocks() -> None:
    """More positions and misses than a block has."""
    sizes = sizes_of(requests=1, sets=200, ways=4, ring_tokens=16, staging_rows=1200, policy="clock")
    state = State.empty(sizes)
    generator = torch.Generator().manual_seed(0)
    for committed in (3000, 3001):
        step = Step(
            topk=torch.randint(0, committed, (2, 600), dtype=torch.int32, generator=generator),
            slot_mapping=torch.zeros(2, dtype=torch.int64), seq_lens=torch.tensor([committed + 2]),
            committed=torch.tensor([committed]), request_slots=torch.tensor([0]),
            ring_first=torch.tensor([committed - 10]),
        )  # fmt: skip
        launch, _ = plan_direct_launch(
            step.topk, step.slot_mapping, step.seq_lens, step.committed, step.request_slots, step.ring_first,
            *state.tensors(), sizes,
        )  # fmt: skip
        races.check(launch)


def test_plan_serve_and_its_metadata() -> None:
    sizes = sizes_of(requests=3, sets=3, ways=3)
    state = State.empty(sizes)
    for step in decode(sizes).steps(3):
        launch, outputs = plan_serve_launch(
            step.topk, step.slot_mapping, step.seq_lens, step.committed, step.request_slots, state.tags, state.hands,
            sizes,
        )  # fmt: skip
        races.check(launch)
        _, ids, rows, _, counts, _ = outputs
        # Whoever reduces a hand modulo the ways, it is the same modulo the ways before and after.
        metadata = install_metadata_launch(ids, rows, counts, step.request_slots, state.tags, state.hands)
        races.check(metadata, benign=[state.hands])


def test_plan_gather() -> None:
    sizes = sizes_of(requests=3, sets=3, ways=16, policy="previous")
    tags = torch.full((3, 3, 16), -1, dtype=torch.int32)
    for step in decode(sizes).steps(3):
        launch, _ = plan_gather_launch(
            step.topk, step.slot_mapping, step.seq_lens, step.committed, step.request_slots, tags, sizes
        )
        races.check(launch)


def test_a_plan_without_barriers_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself sees what a missing barrier does."""
    sizes = sizes_of(requests=3, sets=3, ways=3, staging_rows=36)
    step = next(decode(sizes).steps(1))
    launch, _ = plan_direct_launch(
        step.topk, step.slot_mapping, step.seq_lens, step.committed, step.request_slots, step.ring_first,
        *State.empty(sizes).tensors(), sizes,
    )  # fmt: skip
    monkeypatch.setattr(races.Accesses, "barrier", lambda _: None)
    with pytest.raises(AssertionError, match="races"):
        races.check(launch)


def test_programs_that_write_one_row_race() -> None:
    from castoff.ops.triton.rows import offload_install_launch

    selection = torch.arange(8, dtype=torch.float32)[:, None].repeat(1, 4)
    rows, origins = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([[1], [2]], dtype=torch.int32)
    launch: Launch = offload_install_launch(
        selection, rows, origins, torch.ones(2, dtype=torch.int32), torch.zeros(3, 4)
    )
    with pytest.raises(AssertionError, match="region_ptr"):
        races.check(launch)


def test_what_is_no_race() -> None:
    accesses = races.Accesses()
    everywhere = np.ones(4, dtype=bool)
    shared, own = np.full(4, 64), 128 + 4 * np.arange(4)
    accesses.add(races._WRITE, own, everywhere, np.arange(4))
    accesses.add(races._WRITE, shared, everywhere, 7)
    accesses.barrier()
    accesses.add(races._READ, shared, everywhere, 0)
    accesses.add(races._READ, own, everywhere, 0)
    assert races.races(accesses.table()).size == 0
    accesses.add(races._WRITE, own[:1], everywhere[:1], 0)
    assert races.races(accesses.table()).tolist() == [128]
