"""Sparse attention by row against a softmax over the same rows in float64."""

from dataclasses import dataclass
from typing import Literal, cast

import pytest
import torch
from torch import Tensor

from castoff.ops.cache_rows import latent_values, pack_latent
from castoff.ops.triton.attention import RowFormat, sparse_attention
from castoff.spec.quant import CacheFormat

SCALE = 0.2
# What rounding of weights, of the result, and of stored values of the type leaves.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
Action = Literal["DISABLED", "INT8", "FP8"]
ACTIONS: dict[RowFormat, Action] = {"plain": "DISABLED", "int8": "INT8", "fp8": "FP8"}


@dataclass(slots=True, kw_only=True)
class Case:
    """Queries, rows in two stores, and codes; `values` are the rows as numbers, by code."""

    q: Tensor
    region: Tensor
    staging: Tensor
    rows: Tensor
    values: Tensor
    rank: int
    row_format: RowFormat

    @classmethod
    def random(
        cls, row_format: RowFormat, dtype: torch.dtype, device: str, *, tokens: int = 4, heads: int = 3, rank: int = 8,
        rope: int = 4, topk: int = 5, stored: int = 30, staged: int = 7,
    ) -> "Case":  # fmt: skip
        """Rows of every kind: none at all, a tail and holes of -1, all columns; codes of both stores."""
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(stored + 1 + staged, rank + rope, generator=generator)
        format = CacheFormat(ACTIONS[row_format], rank + rank // 32 + 2 * rope, 0, 0, "bf16")
        stores = (
            numbers.to(dtype) if row_format == "plain" else pack_latent(numbers[:, :rank], numbers[:, rank:], format)
        )
        rows = torch.randint(0, stored + staged, (tokens, topk), dtype=torch.int32, generator=generator)
        rows[0] = -1
        rows[1, topk // 2 :] = -1
        rows[2] = torch.where(torch.rand(topk, generator=generator) < 0.3, -1, rows[2])
        # The spare row has no code.
        values = cast(Tensor, latent_values(stores, rank, format, dtype))
        return cls(
            q=torch.randn(tokens, heads, rank + rope, generator=generator).to(dtype).to(device),
            region=stores[: stored + 1].contiguous().to(device),
            staging=stores[stored + 1 :].contiguous().to(device),
            rows=rows.to(device),
            values=torch.cat([values[:stored], values[stored + 1 :]]),
            rank=rank,
            row_format=row_format,
        )

    def run(self) -> tuple[Tensor, Tensor]:
        return sparse_attention(
            self.q, self.region, self.staging, self.rows,
            kv_lora_rank=self.rank, softmax_scale=SCALE, row_format=self.row_format,
        )  # fmt: skip

    def expected(self) -> tuple[Tensor, Tensor]:
        """In float64."""
        q, rows, values = self.q.double().cpu(), self.rows.long().cpu(), self.values.double()
        scores = torch.einsum("thx,tkx->thk", q, values[rows.clamp(min=0)]) * SCALE
        scores = scores.masked_fill((rows < 0)[:, None], -torch.inf)
        weights = scores.softmax(dim=-1).nan_to_num(0.0)
        out = torch.einsum("thk,tkr->thr", weights, values[rows.clamp(min=0)][..., : self.rank])
        return out, scores.logsumexp(dim=-1)


def assert_close(case: Case) -> None:
    """Runs the kernel before the reference, and names the worst coordinate."""
    out, lse = case.run()
    wanted, wanted_lse = case.expected()
    limit = TOLERANCE[case.q.dtype]
    for name, mine, right in (("out", out, wanted), ("lse", lse, wanted_lse)):
        mine = mine.double().cpu()
        assert torch.equal(mine.isfinite(), right.isfinite()), f"{name}: other numbers are finite"
        error = (mine - right).abs().nan_to_num(0.0)
        worst = torch.unravel_index(error.argmax(), error.shape)
        scale = right[right.isfinite()].abs().max().clamp(min=1.0)
        assert error[worst] <= limit * scale, f"{name}{[int(i) for i in worst]}: {mine[worst]} for {right[worst]}"
    likeness = torch.nn.functional.cosine_similarity(out.double().cpu().flatten(), wanted.flatten(), dim=0)
    assert 1 - likeness < limit


@pytest.mark.numerics
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"heads": 1, "rank": 16, "rope": 16, "topk": 1},
        {"heads": 20, "rank": 24, "rope": 6, "topk": 70},
        {"heads": 33, "rank": 64, "rope": 8, "topk": 33, "tokens": 3},
    ],
    ids=str,
)
def test_plain_rows(sizes: dict[str, int], dtype: torch.dtype, device: str) -> None:
    assert_close(Case.random("plain", dtype, device, **sizes))


@pytest.mark.numerics
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("row_format", ["int8", "fp8"])
@pytest.mark.parametrize("rank", [128, 384])
def test_quantised_rows(rank: int, row_format: RowFormat, dtype: torch.dtype, device: str) -> None:
    assert_close(Case.random(row_format, dtype, device, rank=rank, rope=8, topk=40, heads=5, tokens=3))


@pytest.mark.numerics
def test_no_staging(device: str) -> None:
    case = Case.random("plain", torch.float32, device, topk=20)
    case.rows = torch.where(case.rows >= 30, -1, case.rows)
    wanted, _ = case.run()
    out, _ = sparse_attention(
        case.q, case.region, None, case.rows, kv_lora_rank=case.rank, softmax_scale=SCALE, row_format="plain"
    )
    assert torch.equal(out, wanted)


@pytest.mark.numerics
def test_nothing_selected_is_zero(device: str) -> None:
    case = Case.random("plain", torch.bfloat16, device)
    out, lse = case.run()
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()
    assert not sparse_attention(
        case.q[:0], case.region, None, case.rows[:0], kv_lora_rank=case.rank, softmax_scale=SCALE, row_format="plain"
    )[0].numel()


@pytest.mark.numerics
@pytest.mark.parametrize("row_format", ACTIONS)
def test_places_of_rows_do_not_matter(row_format: RowFormat, device: str) -> None:
    """Rows moved within and between the stores, with codes moved alike, give the same bits."""
    case = Case.random(row_format, torch.bfloat16, device, rank=128, rope=8, topk=40)
    wanted = case.run()
    stored, staged = case.region.shape[0] - 1, case.staging.shape[0]
    order = torch.randperm(stored + staged, generator=torch.Generator().manual_seed(1)).to(device)
    rows = torch.cat([case.region[:stored], case.staging])[order]
    case.region, case.staging = torch.cat([rows[:stored], rows[:1]]), rows[stored:].contiguous()
    code = order.argsort().int()
    case.rows = torch.where(case.rows >= 0, code[case.rows.clamp(min=0).long()], -1)
    for mine, right in zip(case.run(), wanted, strict=True):
        assert torch.equal(mine, right)


@pytest.mark.numerics
def test_large_scores_do_not_overflow(device: str) -> None:
    case = Case.random("plain", torch.float32, device, topk=40)
    case.q *= 1e4
    out, _ = case.run()
    assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.numerics
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("row_format", ACTIONS)
def test_real_sizes(row_format: RowFormat, heads: int, device: str) -> None:
    case = Case.random(
        row_format, torch.bfloat16, device, tokens=8, heads=heads, rank=512, rope=64, topk=2048, stored=20_000,
        staged=3000,
    )  # fmt: skip
    assert_close(case)
    again = case.run()
    for mine, right in zip(case.run(), again, strict=True):
        assert torch.equal(mine, right)
