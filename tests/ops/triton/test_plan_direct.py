"""plan_direct against its definition, bit for bit: outputs and group state, over several steps."""

from random import Random

import pytest
import torch

from castoff.ops.offload_plan import PoolSizes
from castoff.ops.triton.plan_direct import plan_direct
from tests.ops.triton import plans
from tests.ops.triton.plans import Decode, State, Step, assert_equal, sizes_of

OUTPUTS = "rows fetch_ids fetch_rows counts stats"
STATE = "tags used hands marks"
POLICIES = ("fifo", "lru", "clock")


def launch(step: Step, state: State, sizes: PoolSizes) -> tuple[torch.Tensor, ...]:
    return plan_direct(
        step.topk, step.slot_mapping, step.seq_lens, step.committed, step.request_slots, step.ring_first,
        *state.tensors(), sizes,
    )  # fmt: skip


def check(decode: Decode, steps: int, device: str) -> torch.Tensor:
    """Both, step after step; returns the sum of all counters."""
    mine, right = State.empty(decode.sizes, device), State.empty(decode.sizes)
    seen = torch.zeros(plans.NUM_STATS, dtype=torch.int64)
    for step in decode.steps(steps):
        got = launch(step.to(device), mine, decode.sizes)
        wanted = plans.plan_direct(step, right, decode.sizes)
        assert_equal(OUTPUTS, got, wanted)
        assert_equal(STATE, mine.tensors(), right.tensors())
        seen += wanted[-1].sum(dim=0)
    return seen


# sets, ways, queries, top-k
SHAPES = ((5, 2, 4, 12), (3, 5, 2, 16), (8, 1, 3, 10), (4, 16, 1, 40), (1, 32, 2, 24), (7, 3, 1, 1))


@pytest.mark.numerics
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plan_is_the_sequential_one(shape: tuple[int, int, int, int], policy: str, device: str) -> None:
    sets, ways, queries, topk = shape
    sizes = sizes_of(requests=3, sets=sets, ways=ways, staging_rows=queries * topk, policy=policy)
    check(Decode(rng=Random(f"{shape}{policy}"), sizes=sizes, batch=2, queries=queries, topk=topk), 4, device)


@pytest.mark.numerics
@pytest.mark.parametrize("policy", POLICIES)
def test_every_counter_counts(policy: str, device: str) -> None:
    """A pool smaller than a selection: hits, repeats, overflow and promotion all occur."""
    sizes = sizes_of(requests=2, sets=4, ways=4, staging_rows=60, policy=policy)
    seen = check(Decode(rng=Random(5), sizes=sizes, batch=1, queries=3, topk=20), 5, device)
    assert (seen > 0).all(), seen


@pytest.mark.numerics
def test_positions_of_several_blocks(device: str) -> None:
    """More positions than are looked up at once, and more misses than are ranked at once."""
    sizes = sizes_of(requests=1, sets=300, ways=8, ring_tokens=16, staging_rows=2400, policy="clock")
    decode = Decode(rng=Random(0), sizes=sizes, batch=1, queries=2, topk=1200, longest=4000)
    check(decode, 2, device)


@pytest.mark.numerics
def test_bit_31_is_a_mark(device: str) -> None:
    """All 32 ways hit: the marks are -1, and the next plan clears them on a lap."""
    sizes = sizes_of(requests=1, sets=1, ways=32, staging_rows=32, policy="clock")
    state = State.empty(sizes, device)
    first = torch.arange(32, dtype=torch.int32)[None]
    for committed, ids in ((40, first), (41, first), (42, first + 100)):
        step = Step(
            topk=ids, slot_mapping=torch.zeros(1, dtype=torch.int64), seq_lens=torch.tensor([committed + 101]),
            committed=torch.tensor([committed + 100]), request_slots=torch.tensor([0]), ring_first=torch.tensor([1000]),
        ).to(device)  # fmt: skip
        launch(step, state, sizes)
        if committed == 41:
            assert state.marks.item() == -1
    assert state.marks.item() == 0
    assert sorted(state.tags.view(-1).tolist()) == list(range(100, 132))


@pytest.mark.numerics
def test_padding_changes_nothing(device: str) -> None:
    """A call of padding rows and padding tokens alone has empty results and leaves the state as it is."""
    sizes = sizes_of(requests=2, sets=3, ways=2, staging_rows=8)
    state = State.empty(sizes, device)
    before = [tensor.clone() for tensor in state.tensors()]
    step = Step(
        topk=torch.zeros(4, 4, dtype=torch.int32), slot_mapping=torch.tensor([5, 6, -1, -1]),
        seq_lens=torch.tensor([30, 30]), committed=torch.tensor([28, 28]), request_slots=torch.tensor([-1, 1]),
        ring_first=torch.tensor([20, 20]),
    ).to(device)  # fmt: skip
    rows, fetch_ids, fetch_rows, counts, stats = launch(step, state, sizes)
    assert all((tensor == -1).all() for tensor in (rows, fetch_ids, fetch_rows))
    assert not counts.any()
    assert not stats.any()
    assert all(torch.equal(now, then) for now, then in zip(state.tensors(), before, strict=True))


@pytest.mark.gpu
@pytest.mark.numerics
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("queries", [1, 4])
def test_real_sizes(queries: int, policy: str, device: str) -> None:
    sizes = sizes_of(requests=12, sets=512, ways=16, ring_tokens=64, staging_rows=queries * 2048, policy=policy)
    decode = Decode(rng=Random(queries), sizes=sizes, batch=8, queries=queries, topk=2048, longest=60_000)
    check(decode, 4, device)


@pytest.mark.gpu
@pytest.mark.numerics
def test_replay_of_a_graph() -> None:
    """A captured plan, replayed on other inputs, is the plan of those."""
    sizes = sizes_of(requests=6, sets=64, ways=16, ring_tokens=16, staging_rows=512, policy="clock")
    decode = Decode(rng=Random(3), sizes=sizes, batch=4, queries=2, topk=256, longest=4000)
    steps = list(decode.steps(5))
    launch(steps[0].to("cuda"), State.empty(sizes, "cuda"), sizes)
    inputs, mine, right = steps[0].to("cuda"), State.empty(sizes, "cuda"), State.empty(sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = launch(inputs, mine, sizes)
    for step in steps:
        for name in Step.__slots__:
            getattr(inputs, name).copy_(getattr(step, name))
        graph.replay()
        assert_equal(OUTPUTS, got, plans.plan_direct(step, right, sizes))
        assert_equal(STATE, mine.tensors(), right.tensors())
