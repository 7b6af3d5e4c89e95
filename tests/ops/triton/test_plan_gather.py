"""plan_gather against its definition, bit for bit: outputs and tags, over several steps."""

from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from castoff.ops.triton.plan_gather import plan_gather
from tests.ops.triton import plans
from tests.ops.triton.conftest import INTERPRETED
from tests.ops.triton.plans import Decode, assert_equal, sizes_of

OUTPUTS = "rows fetch_ids fetch_rows counts stats"


def check(decode: Decode, steps: int, device: str) -> torch.Tensor:
    """Both, step after step; returns the sum of all counters."""
    sizes = decode.sizes
    right = torch.full((sizes.requests, sizes.sets, sizes.ways), -1, dtype=torch.int32)
    mine = right.to(device, copy=True)
    seen = torch.zeros(plans.NUM_STATS, dtype=torch.int64)
    for step in decode.steps(steps):
        there = step.to(device)
        got = plan_gather(
            there.topk, there.slot_mapping, there.seq_lens, there.committed, there.request_slots, mine, sizes
        )
        wanted = plans.plan_gather(step, right, sizes)
        assert_equal(OUTPUTS, got, wanted)
        assert_equal("tags", (mine,), (right,))
        seen += wanted[-1].sum(dim=0)
    return seen


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("buffers", "columns", "queries", "topk"),
    [(4, 12, 4, 12), (4, 20, 2, 16), (1, 1, 1, 1), (2, 40, 1, 40), (3, 17, 3, 10)],
)
def test_plan_is_the_sequential_one(buffers: int, columns: int, queries: int, topk: int, device: str) -> None:
    """Buffers for more queries and more columns than this call has, among them."""
    sizes = sizes_of(requests=3, sets=buffers, ways=columns, policy="previous")
    check(Decode(rng=Random(f"{buffers}x{columns}"), sizes=sizes, batch=2, queries=queries, topk=topk), 4, device)


@pytest.mark.numerics
def test_every_counter_counts(device: str) -> None:
    sizes = sizes_of(requests=2, sets=3, ways=20, policy="previous")
    seen = check(Decode(rng=Random(5), sizes=sizes, batch=2, queries=3, topk=20), 5, device)
    assert seen.bool().tolist() == [True, True, True, True, True, False, False]


@pytest.mark.numerics
def test_buffers_of_several_blocks(device: str) -> None:
    """More columns than are looked up at once."""
    sizes = sizes_of(requests=1, sets=2, ways=1300, policy="previous")
    check(Decode(rng=Random(0), sizes=sizes, batch=1, queries=2, topk=1200, longest=3000), 3, device)


@pytest.mark.numerics
@pytest.mark.skipif(not INTERPRETED, reason="a device has its own order")
def test_order_of_atomics_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device lets threads enter chains in any order; the interpreter, in that of the block but for this test."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    in_order, rng = InterpreterBuilder.create_atomic_rmw, np.random.default_rng(0)

    def in_any_order(builder: Any, operation: Any, ptr: Any, value: Any, mask: Any, *how: Any) -> Any:
        order = rng.permutation(ptr.data.size)
        moved = [TensorHandle(x.data.ravel()[order], x.dtype) for x in (ptr, value, mask)]
        before = in_order(builder, operation, *moved, *how)
        return TensorHandle(before.data[order.argsort()].reshape(ptr.data.shape), before.dtype)

    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", in_any_order)
    sizes = sizes_of(requests=2, sets=3, ways=40, policy="previous")
    check(Decode(rng=Random(2), sizes=sizes, batch=2, queries=3, topk=40, longest=90), 4, "cpu")


@pytest.mark.gpu
@pytest.mark.numerics
@pytest.mark.parametrize("queries", [1, 4])
def test_real_sizes(queries: int, device: str) -> None:
    sizes = sizes_of(requests=6, sets=4, ways=2048, ring_tokens=64, policy="previous")
    decode = Decode(rng=Random(queries), sizes=sizes, batch=4, queries=queries, topk=2048, longest=60_000)
    check(decode, 4, device)
