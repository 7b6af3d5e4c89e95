"""plan_serve and install_metadata against their definitions, bit for bit, over several steps."""

from random import Random

import pytest
import torch

from castoff.ops.offload_plan import PoolSizes
from castoff.ops.triton.plan_serve import install_metadata, plan_serve
from tests.ops.triton import plans
from tests.ops.triton.plans import Decode, State, Step, assert_equal, sizes_of

OUTPUTS = "sources install_ids install_rows install_from counts stats"


def launch(step: Step, state: State, sizes: PoolSizes) -> tuple[torch.Tensor, ...]:
    return plan_serve(
        step.topk, step.slot_mapping, step.seq_lens, step.committed, step.request_slots, state.tags, state.hands, sizes
    )


def check(decode: Decode, steps: int, device: str) -> tuple[torch.Tensor, bool]:
    """Both, step after step; returns the sum of all counters, and whether an install overwrote another."""
    mine, right = State.empty(decode.sizes, device), State.empty(decode.sizes)
    seen, overwrote = torch.zeros(plans.NUM_STATS, dtype=torch.int64), False
    for step in decode.steps(steps):
        there = step.to(device)
        got = launch(there, mine, decode.sizes)
        wanted = plans.plan_serve(step, right, decode.sizes)
        assert_equal(OUTPUTS, got, wanted)
        install_metadata(got[1], got[2], got[4], there.request_slots, mine.tags, mine.hands)
        plans.install_metadata(wanted[1], wanted[2], wanted[4], step.request_slots, right, decode.sizes)
        assert_equal("tags hands", (mine.tags, mine.hands), (right.tags, right.hands))
        seen += wanted[-1].sum(dim=0)
        overwrote |= bool(((wanted[1] >= 0) & (wanted[2] < 0)).any())
    return seen, overwrote


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("sets", "ways", "queries", "topk"), [(5, 2, 4, 12), (3, 5, 2, 16), (8, 1, 3, 10), (2, 32, 1, 40), (6, 16, 4, 30)]
)
def test_plan_is_the_sequential_one(sets: int, ways: int, queries: int, topk: int, device: str) -> None:
    sizes = sizes_of(requests=3, sets=sets, ways=ways)
    check(Decode(rng=Random(f"{sets}x{ways}"), sizes=sizes, batch=2, queries=queries, topk=topk), 4, device)


@pytest.mark.numerics
def test_every_counter_counts_and_installs_wrap_round(device: str) -> None:
    sizes = sizes_of(requests=2, sets=4, ways=2)
    seen, overwrote = check(Decode(rng=Random(5), sizes=sizes, batch=2, queries=3, topk=20), 4, device)
    assert seen.bool().tolist() == [True, True, True, True, True, False, False]
    assert overwrote


@pytest.mark.numerics
def test_a_plan_changes_nothing(device: str) -> None:
    sizes = sizes_of(requests=2, sets=3, ways=2)
    state = State.empty(sizes, device)
    before = [tensor.clone() for tensor in state.tensors()]
    for step in Decode(rng=Random(1), sizes=sizes, batch=2, queries=2, topk=8).steps(2):
        launch(step.to(device), state, sizes)
    assert all(torch.equal(now, then) for now, then in zip(state.tensors(), before, strict=True))


@pytest.mark.gpu
@pytest.mark.numerics
@pytest.mark.parametrize("queries", [1, 4])
def test_real_sizes(queries: int, device: str) -> None:
    sizes = sizes_of(requests=12, sets=512, ways=16, ring_tokens=64)
    decode = Decode(rng=Random(queries), sizes=sizes, batch=8, queries=queries, topk=2048, longest=60_000)
    check(decode, 4, device)
