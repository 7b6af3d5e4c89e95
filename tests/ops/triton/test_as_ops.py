"""Kernels as ops call them: with an op's inputs and attributes they give and write what its reference does."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from castoff.ops import accelerator, attention  # noqa: E402
from castoff.ops.attention import AttentionSizes  # noqa: E402
from castoff.ops.program import Op  # noqa: E402
from castoff.spec.quant import CacheFormat  # noqa: E402
from tests.conftest import reason_without_gpu  # noqa: E402
from tests.ops.cases import CASES, rand  # noqa: E402

WITH_KERNELS = [name for name, build in CASES.items() if build().op.kernel is not None]
DEVICE = "cpu" if reason_without_gpu() else "cuda"


def on_device(values: tuple[Any, ...]) -> list[Any]:
    return [None if value is None else value.clone().to(DEVICE) for value in values]


def test_every_kernel_is_met() -> None:
    assert set(WITH_KERNELS) == {
        "offload_plan", "gather_plan", "serve_plan", "install_metadata", "offload_fetch", "offload_serve",
        "offload_install", "host_row_write",
    }  # fmt: skip


@pytest.mark.numerics
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_a_kernel_is_its_reference(name: str) -> None:
    case = CASES[name]()
    op: Op = case.op
    assert op.kernel is not None
    assert op.reference is not None
    mine, theirs = on_device(case.inputs), [None if value is None else value.clone() for value in case.inputs]
    own = op.kernel(*mine, **case.attributes)
    expected = op.reference(*theirs, **case.attributes)
    for value, other in zip(own, expected, strict=True):
        assert torch.equal(value.cpu(), other)
    for value, other in zip(mine, theirs, strict=True):
        if value is not None:
            assert torch.equal(value.cpu(), other)


@pytest.mark.numerics
def test_attention_by_row_is_its_reference() -> None:
    rank, rope, heads = 32, 16, 4
    sizes = AttentionSizes(heads, 8, rope, rank, 8, CacheFormat("DISABLED", 0, 0, 0, "bf16"), 0.3, 5)
    q, stored, staging = (
        rand(6, heads, rank + rope).float(),
        rand(21, rank + rope).float(),
        rand(9, rank + rope).float(),
    )
    rows = torch.tensor(
        [[0, 19, 3, 20, 28], [5, -1, 7, -1, 22], [-1] * 5, [4, 3, 2, 1, 0], [20, 21, 22, 23, 24], [1, -1, -1, -1, -1]],
        dtype=torch.int32,
    )
    expected = attention._attend_rows(q, stored, rows, staging, sizes)
    # Rows of a resident cache come as int64.
    own = accelerator.attend_rows(
        *on_device((q, stored, rows.long(), staging)), kv_lora_rank=rank, softmax_scale=0.3, cache=sizes.cache
    )
    assert torch.allclose(own.cpu(), expected, atol=1e-5)
    assert not own[2].any()
