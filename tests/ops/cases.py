"""Every op with a reference, on inputs with numbers: small batches over paged caches. Axes as in the ops."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")


from castoff.ops import (  # noqa: E402
    attention,
    dsa_indexer,
    linear,
    mlapo,
    moe,
    norm,
    offload_plan,
    offload_rows,
    tokens,
)
from castoff.ops.attention import AttentionSizes  # noqa: E402
from castoff.ops.dsa_indexer import IndexerSizes, IndexerWeights  # noqa: E402
from castoff.ops.lengths import Lengths  # noqa: E402
from castoff.ops.linear import Weight  # noqa: E402
from castoff.ops.mlapo import MlapoSizes, MlapoWeights  # noqa: E402
from castoff.ops.offload_plan import PoolSizes  # noqa: E402
from castoff.ops.program import Abstract, Op, Recorder, dtype_name  # noqa: E402
from castoff.ops.quantization import quantize_activations, quantize_weight  # noqa: E402
from castoff.spec.quant import CacheFormat, LinearAction, linear_format  # noqa: E402
from castoff.spec.scenario import RequestClass  # noqa: E402

T, D, Q, R, P, N, V, H = 6, 12, 10, 16, 8, 5, 7, 3
INDEX_HEADS, INDEX_DIM = 16, 12
BLOCK_TOKENS = 4
DTYPES = {
    torch.int32: "int32",
    torch.int64: "int32",
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.float8_e4m3fn: "fp8",
}
CACHE = CacheFormat("DISABLED", 2 * (R + P), 2 * INDEX_DIM, 0, "bf16")


QUANTIZED_ACTIONS: tuple[LinearAction, ...] = ("W8A8_DYNAMIC", "FP8")


def rand(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def ids(*shape: int, below: int) -> Any:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)


def indexer_sizes(topk: int = 4, *, interleave: bool = True) -> IndexerSizes:
    return IndexerSizes(INDEX_HEADS, INDEX_DIM, P, topk, interleave, CACHE)


def attention_sizes(topk: int | None) -> AttentionSizes:
    return AttentionSizes(H, N, P, R, V, CACHE, 0.3, topk)


def angles(positions: Any) -> tuple[Any, Any]:
    turns = positions[:, None].double() / 10.0 ** (torch.arange(0, P, 2).double() / P)
    turns = torch.cat([turns, turns], dim=-1)
    return turns.cos(), turns.sin()


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests of equally many new tokens over a paged cache: tables, slots and lengths."""

    block_tables: Any
    slots_T: Any
    lengths_B: Any
    blocks: int

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.slots_T.shape[0])


def batch(
    lengths: list[int], queries: int, *, block_tokens: int = BLOCK_TOKENS, spare: int = 0, seed: int = 0
) -> Batch:
    """Blocks dealt at random; `spare` more blocks per request than its length needs. The last block is nobody's."""
    needed = [-(-length // block_tokens) + spare for length in lengths]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(seed)).tolist()
    block_tables = torch.full((len(lengths), max(max(needed), 1)), -1, dtype=torch.long)
    slots = []
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        own, order = order[:count], order[count:]
        block_tables[row, :count] = torch.tensor(own, dtype=torch.long)
        for position in range(length - queries, length):
            slots.append(
                own[position // block_tokens] * block_tokens + position % block_tokens if position >= 0 else -1
            )
    return Batch(block_tables, torch.tensor(slots), torch.tensor(lengths), sum(needed) + 1)


def paged(rows: dict[tuple[int, int], Any], own: Batch, width: int, block_tokens: int = BLOCK_TOKENS) -> Any:
    """A cache with a row for each (request, position); the rest is random, since nobody may look at it."""
    cache = rand(own.blocks, block_tokens, width, seed=9)
    for (request, position), row in rows.items():
        block = own.block_tables[request, position // block_tokens]
        cache[block, position % block_tokens] = row
    return cache


def indexer_weights(seed: int = 0) -> IndexerWeights:
    return IndexerWeights(
        *(
            Weight(values)
            for values in (
                rand(INDEX_HEADS * INDEX_DIM, Q, seed=seed),
                rand(INDEX_DIM, D, seed=seed + 1),
                rand(INDEX_HEADS, D, seed=seed + 2),
                rand(INDEX_DIM, seed=seed + 3),
                rand(INDEX_DIM, seed=seed + 4),
            )
        )
    )


def mlapo_weights(*, low_rank: bool) -> MlapoWeights:
    return MlapoWeights(
        q_a=Weight(rand(Q, D)) if low_rank else None,
        q_a_norm=Weight(rand(Q)) if low_rank else None,
        q_b=Weight(rand(H * (N + P), Q if low_rank else D)),
        kv_a=Weight(rand(R + P, D)),
        kv_a_norm=Weight(rand(R)),
    )


@dataclass(frozen=True, slots=True)
class Case:
    """An op's inputs with numbers, and its attributes."""

    op: Op
    inputs: tuple[Any, ...]
    attributes: dict[str, Any]


def _case(op: Op, *inputs: Any, **attributes: Any) -> Case:
    return Case(op, inputs, attributes)


def _gate_case(groups: int, appended: int = 0) -> Case:
    return _case(
        moe.MOE_GATE, rand(T, D), rand(8, D), rand(8), experts_per_token=2, groups=groups, chosen_groups=2, scale=2.5,
        normalize=True, appended=appended,
    )  # fmt: skip


def quantized(weight_XOI: Any, action: LinearAction) -> Weight:
    """A weight in a number format."""
    form = linear_format(action)
    return Weight(*quantize_weight(weight_XOI, form), form)


def _linear_quant_case(action: LinearAction) -> Case:
    weight = quantized(rand(130, 150), action)
    assert weight.format is not None
    x, scales = rand(T, 150), None
    if weight.quantizes_activations:
        x, scales = quantize_activations(x, weight.format)
    return _case(linear.LINEAR_QUANT, x, weight.values, scales, weight.scales, format=weight.format, dtype="bf16")


def _grouped_quant_case(op: Op, action: LinearAction) -> Case:
    weight, counts = quantized(rand(4, 260, 150), action), torch.tensor([3, 0, 1, 2], dtype=torch.int32)
    assert weight.format is not None
    values, scales = quantize_activations(rand(T, 150), weight.format)
    return _case(
        op, values, weight.values, counts, scales, weight.scales, format=weight.format, dtype="bf16", touched=2
    )


def _dynamic_quantize_case(action: LinearAction) -> Case:
    return _case(linear.DYNAMIC_QUANTIZE, rand(T, 150), format=linear_format(action))


def _norm_quant_case(op: Op, inputs: int, action: LinearAction) -> Case:
    return _case(
        op, *(rand(T, 150, seed=at) for at in range(inputs)), rand(150), eps=1e-6, format=linear_format(action)
    )


def _mlapo_quant_case(action: LinearAction) -> Case:
    plain = mlapo_weights(low_rank=True)
    assert plain.q_a is not None
    q_a, q_b, kv_a = (quantized(weight.values, action) for weight in (plain.q_a, plain.q_b, plain.kv_a))
    weights = replace(plain, q_a=q_a, q_b=q_b, kv_a=kv_a)
    case = _mlapo_case(low_rank=True)
    return replace(
        case, op=mlapo.MLAPO_QUANT, inputs=(*case.inputs[:5], *weights.tensors),
        attributes={**case.attributes, "formats": weights.formats},
    )  # fmt: skip


def _mlapo_case(*, low_rank: bool) -> Case:
    weights = mlapo_weights(low_rank=low_rank)
    tensors = weights.tensors
    sizes = MlapoSizes(H, N, P, R, Q if low_rank else 0, CACHE)
    own = batch([8, 8], 3)
    return _case(
        mlapo.MLAPO, rand(T, D), *angles(torch.arange(T)), own.slots_T, rand(own.blocks, BLOCK_TOKENS, R + P), *tensors,
        formats=(None, None, None), sizes=sizes, eps=1e-6,
    )  # fmt: skip


def _indexer_case(length: int, topk: int, *, spare: int = 0) -> Case:
    own, weights = batch([length, length], 3, spare=spare), indexer_weights()
    return _case(
        dsa_indexer.DSA_INDEXER, rand(T, D), rand(T, Q), *angles(torch.arange(T)),
        rand(own.blocks, BLOCK_TOKENS, INDEX_DIM), own.slots_T, own.block_tables, own.lengths_B,
        *weights.tensors, formats=(None, None), sizes=indexer_sizes(topk), topk=min(topk, length),
        lengths=Lengths((RequestClass(2, length - 3, 3),)),
    )  # fmt: skip


def _attention_case(op: Op, topk: int | None) -> Case:
    own, kv_b = batch([8, 8], 3), Weight(rand(H * (N + V), R))
    chosen = None if topk is None else ids(T, topk, below=6)
    return _case(
        op, rand(T, H, N + P), rand(own.blocks, BLOCK_TOKENS, R + P), chosen, own.block_tables, own.lengths_B,
        kv_b.values, sizes=attention_sizes(topk), lengths=Lengths((RequestClass(2, 5, 3),)), phase="prefill",
    )  # fmt: skip


# A latent row and an index key of this format: 128 values, a scale and 8 rope values; 16 values and a scale.
QUANTIZED = CacheFormat("INT8", 128 + 4 + 2 * P, 16, 2, "int8")


def _quantized_attention_case(op: Op, topk: int | None) -> Case:
    plain = _attention_case(op, topk)
    cache = torch.randint(
        0, 60, (plain.inputs[1].shape[0], BLOCK_TOKENS, QUANTIZED.latent_row_bytes), dtype=torch.uint8
    )
    inputs = (plain.inputs[0], cache, *plain.inputs[2:5], rand(H * (N + V), 128))
    sizes = replace(plain.attributes["sizes"], kv_lora_rank=128, cache=QUANTIZED)
    return replace(plain, inputs=inputs, attributes={**plain.attributes, "sizes": sizes})


def _quantized_indexer_case() -> Case:
    plain, width = _indexer_case(8, 4), 16
    cache = torch.randint(0, 60, (plain.inputs[4].shape[0], BLOCK_TOKENS, QUANTIZED.index_row_bytes), dtype=torch.uint8)
    weights = (rand(INDEX_HEADS * width, Q), rand(width, D), plain.inputs[10], rand(width), rand(width), None, None)
    sizes = replace(plain.attributes["sizes"], head_dim=width, cache=QUANTIZED)
    inputs = (*plain.inputs[:4], cache, *plain.inputs[5:8], *weights)
    return replace(plain, inputs=inputs, attributes={**plain.attributes, "sizes": sizes})


def _grouped_case(op: Op) -> Case:
    weight = Weight(rand(4, 10, D))
    counts = torch.tensor([3, 0, 1, 2], dtype=torch.int32)
    return _case(op, rand(T, D), weight.values, counts, touched=2)


POOL = PoolSizes(requests=2, sets=3, ways=2, ring_tokens=4, staging_rows=8, policy="fifo")


def _plan_case(op: Op, sizes: PoolSizes, *, lists: int) -> Case:
    """Two requests of two queries, of four ids each, one of them in the pool already."""
    topk_TK = torch.tensor([[8, 4, 1, 0], [9, 8, 4, 2], [5, 3, 1, -1], [6, 5, 0, 1]], dtype=torch.int32)
    state = torch.full((2, sizes.sets, sizes.ways), -1, dtype=torch.int32)
    tags = state.clone()
    tags[0, 1, 0] = 4
    hands = torch.zeros(2, sizes.sets, dtype=torch.int32)
    return _case(
        op, topk_TK, torch.tensor([8, 9, 5, 6]), torch.tensor([10, 7]), torch.tensor([8, 5]), torch.tensor([0, 1]),
        torch.tensor([6, 3]), tags, state.clone(), hands, hands.clone(), sizes=sizes, lists=lists,
    )  # fmt: skip


def _row_case(op: Op, *inputs: Any, **attributes: Any) -> Case:
    return _case(op, *(value.clone() for value in inputs), **attributes)


HOST = rand(4, BLOCK_TOKENS, 6)
TABLES = torch.tensor([[2, 0], [1, 3]])
REGION = rand(POOL.layer_rows + 1, 6, seed=1)
LISTED = torch.tensor([[3, -2 - 6, -1], [1, -1, -1]], dtype=torch.int32)
TO_ROWS = torch.tensor([[0, POOL.layer_rows + 2, -1], [8, -1, -1]], dtype=torch.int32)
LIST_COUNTS = torch.tensor([2, 1], dtype=torch.int32)
SOURCES = torch.tensor([[0, -2 - 3], [-1, 4]], dtype=torch.int32)

CASES: dict[str, Callable[[], Case]] = {
    "offload_plan": lambda: _plan_case(offload_plan.PLAN_DIRECT, POOL, lists=2),
    "gather_plan": lambda: _plan_case(
        offload_plan.PLAN_GATHER, replace(POOL, sets=2, ways=4, ring_tokens=2, policy="previous"), lists=2
    ),
    "serve_plan": lambda: _plan_case(offload_plan.PLAN_SERVE, POOL, lists=3),
    "install_metadata": lambda: _case(
        offload_plan.INSTALL_METADATA, torch.tensor([0, 1]), LISTED.clamp(min=-1), TO_ROWS.clamp(max=11),
        torch.ones(2, dtype=torch.int32), torch.full((2, 3, 2), -1, dtype=torch.int32),
        torch.zeros(2, 3, dtype=torch.int32), sizes=POOL,
    ),
    "offload_fetch": lambda: _row_case(
        offload_rows.OFFLOAD_FETCH, HOST, TABLES, torch.tensor([0, 1]), LISTED, TO_ROWS, LIST_COUNTS, REGION,
        rand(16, 6, seed=2), sizes=POOL,
    ),
    "offload_serve": lambda: _row_case(
        offload_rows.OFFLOAD_SERVE, HOST, TABLES, SOURCES, REGION, rand(6, 6, seed=3)
    ),
    "offload_install": lambda: _row_case(
        offload_rows.OFFLOAD_INSTALL, rand(6, 6, seed=3), TO_ROWS.clamp(max=11), LISTED.clamp(min=0), LIST_COUNTS,
        REGION,
    ),
    "host_row_write": lambda: _row_case(
        offload_rows.HOST_ROW_WRITE, REGION, torch.tensor([12, -1]), HOST, torch.tensor([5, -1])
    ),
    "store_rows": lambda: _row_case(
        offload_rows.STORE_ROWS, rand(4, BLOCK_TOKENS, 6, seed=4), HOST, start=2, end=7, blocks=(3, 1)
    ),
    "load_rows": lambda: _row_case(
        offload_rows.LOAD_ROWS, HOST, rand(4, BLOCK_TOKENS, 6, seed=4), end=7, blocks=(0, 1)
    ),
    "embedding": lambda: _case(tokens.EMBEDDING, ids(T, below=9), rand(9, D)),
    "select_rows": lambda: _case(tokens.SELECT_ROWS, rand(T, D), None, rows=2),
    "select_rows at places": lambda: _case(tokens.SELECT_ROWS, rand(T, D), torch.tensor([2, 0]), rows=2),
    "concat": lambda: _case(tokens.CONCAT, rand(T, D), rand(T, 3)),
    "sample": lambda: _case(tokens.SAMPLE, rand(T, 9)),
    "rms_norm": lambda: _case(norm.RMS_NORM, rand(T, D), rand(D), eps=1e-6),
    "add_rms_norm": lambda: _case(norm.ADD_RMS_NORM, rand(T, D), rand(T, D), rand(D), eps=1e-6),
    "add_rms_norm2": lambda: _case(norm.ADD_RMS_NORM2, rand(T, D), rand(T, D), rand(D), eps=1e-6),
    "add": lambda: _case(norm.ADD, rand(T, D), rand(T, D)),
    "linear": lambda: _case(linear.LINEAR, rand(T, D), rand(5, D)),
    "mlapo": lambda: _mlapo_case(low_rank=True),
    "mlapo without q_lora_rank": lambda: _mlapo_case(low_rank=False),
    "dsa_indexer": lambda: _indexer_case(8, 4),
    "dsa_indexer shorter than topk": lambda: _indexer_case(8, 20),
    "dsa_indexer whose last block is not full": lambda: _indexer_case(6, 20),
    "dsa_indexer with room to grow": lambda: _indexer_case(8, 20, spare=2),
    "indexer_key_write": lambda: _case(
        dsa_indexer.INDEXER_KEY_WRITE, rand(T, D), *angles(torch.arange(T)), rand(5, BLOCK_TOKENS, INDEX_DIM),
        batch([8, 8], 3).slots_T, indexer_weights().tensors[1], *indexer_weights().tensors[3:5], None,
        format=None, sizes=indexer_sizes(),
    ),
    "sparse attention": lambda: _attention_case(attention.SPARSE, 4),
    "dense attention": lambda: _attention_case(attention.DENSE, None),
    "sparse attention over a quantised cache": lambda: _quantized_attention_case(attention.SPARSE_QUANT, 4),
    "dense attention over a quantised cache": lambda: _quantized_attention_case(attention.DENSE_QUANT, None),
    "dsa_indexer over quantised keys": _quantized_indexer_case,
    "moe_gate": lambda: _gate_case(1),
    "moe_gate with groups": lambda: _gate_case(4),
    "moe_permute": lambda: _case(moe.MOE_PERMUTE, rand(T, D), ids(T, 2, below=5), num_experts=5),
    "moe_unpermute": lambda: _case(
        moe.MOE_UNPERMUTE, rand(2 * T, D), rand(T, 2), torch.randperm(2 * T).to(torch.int32)
    ),
    "grouped_matmul": lambda: _grouped_case(moe.GROUPED_MATMUL),
    "grouped_matmul_swiglu": lambda: _grouped_case(moe.GROUPED_MATMUL_SWIGLU),
    "swiglu": lambda: _case(moe.SWIGLU, rand(T, 10)),
    **{
        f"{name} {action}": partial(make, *arguments, action)
        for action in QUANTIZED_ACTIONS
        for name, make, *arguments in (
            ("dynamic_quantize", _dynamic_quantize_case),
            ("linear_quant", _linear_quant_case),
            ("rms_norm_dynamic_quant", _norm_quant_case, norm.RMS_NORM_DYNAMIC_QUANT, 1),
            ("add_rms_norm_dynamic_quant", _norm_quant_case, norm.ADD_RMS_NORM_DYNAMIC_QUANT, 2),
            ("add_rms_norm2_dynamic_quant", _norm_quant_case, norm.ADD_RMS_NORM2_DYNAMIC_QUANT, 2),
            ("mlapo_quant", _mlapo_quant_case),
            ("grouped_matmul_quant", _grouped_quant_case, moe.GROUPED_MATMUL_QUANT),
            ("grouped_matmul_quant_swiglu", _grouped_quant_case, moe.GROUPED_MATMUL_QUANT_SWIGLU),
        )
    },
    "linear_quant of plain activations": lambda: _linear_quant_case("W8A16_STATIC"),
}  # fmt: skip


def abstract_results(case: Case) -> list[tuple[tuple[int, ...], str]]:
    recorder = Recorder()
    inputs = tuple(
        None if value is None else recorder.tensor(*value.shape, dtype=DTYPES.get(value.dtype, "bf16"))
        for value in case.inputs
    )
    assert all(value is None or isinstance(value, Abstract) for value in inputs)
    return [(tuple(int(size) for size in shape), dtype) for shape, dtype in case.op.shapes(*inputs, **case.attributes)]


def as_dtype(inputs: tuple[Any, ...], dtype: Any) -> tuple[Any, ...]:
    """The inputs with their floats, quantised values aside, in a dtype."""
    return tuple(
        value.to(dtype) if value is not None and value.dtype.is_floating_point and value.itemsize > 1 else value
        for value in inputs
    )


def name_of(dtype: Any) -> str:
    return dtype_name(torch.empty(0, dtype=dtype))


def real_results(case: Case) -> tuple[Any, ...]:
    return case.op(*case.inputs, **case.attributes)
