"""The reference maths of ops: shapes equal to the abstract ones, and against definitions written out naively.

Axes as in the ops.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from castoff.ops import (  # noqa: E402
    attention,
    cache_rows,
    collectives,
    dsa_indexer,
    library,
    linear,
    mlapo,
    moe,
    norm,
    table,
    tokens,
)
from castoff.ops.attention import AttentionSizes  # noqa: E402
from castoff.ops.dsa_indexer import IndexerSizes, IndexerWeights  # noqa: E402
from castoff.ops.lengths import Lengths  # noqa: E402
from castoff.ops.linear import Weight  # noqa: E402
from castoff.ops.mlapo import MlapoSizes, MlapoWeights  # noqa: E402
from castoff.ops.program import Abstract, Op, Recorder, call_registered, dtype_name  # noqa: E402
from castoff.ops.quantization import quantize_activations, quantize_weight  # noqa: E402
from castoff.spec.quant import AttentionAction, CacheFormat, LinearAction, linear_format  # noqa: E402
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


CASES: dict[str, Callable[[], Case]] = {
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


def test_every_reference_has_a_case() -> None:
    """Collectives aside, which take several processes: see tests/runtime/test_distributed.py."""
    covered = {id(build().op) for build in CASES.values()}
    own = [op for op in table.OPS if op.reference is not None and op.family != "collective"]
    assert [op.name for op in own if id(op) not in covered] == []


@pytest.mark.parametrize("name", CASES)
def test_real_shapes_are_the_abstract_ones(name: str) -> None:
    case = CASES[name]()
    assert [tuple(value.shape) for value in real_results(case)] == [shape for shape, _ in abstract_results(case)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_registered_ops_compute_the_same_and_their_fakes_have_the_same_shapes(name: str, dtype: Any) -> None:
    """As `torch.ops.castoff.…`, on real tensors and on torch's fake ones; what a call writes is written."""
    library.register()
    case = CASES[name]()
    inputs = as_dtype(case.inputs, dtype)
    attributes = {**case.attributes, **({"dtype": name_of(dtype)} if "dtype" in case.attributes else {})}
    # Only casts are given these.
    attributes |= {key: None for key in ("lengths", "touched") if key in attributes}
    case = replace(case, inputs=inputs, attributes=attributes)
    copies = tuple(None if value is None else value.clone() for value in inputs)
    real = real_results(case)
    registered = call_registered(case.op, copies, attributes)
    assert len(real) == len(registered)
    for own, other in zip(real, registered, strict=True):
        assert torch.equal(own, other)
    for own, copy in zip(inputs, copies, strict=True):
        if own is not None:
            assert torch.equal(own, copy)
    with FakeTensorMode() as mode:
        fakes = tuple(None if value is None else mode.from_tensor(value) for value in inputs)
        fake = call_registered(case.op, fakes, attributes)
    assert [(tuple(value.shape), value.dtype) for value in fake] == [
        (tuple(value.shape), value.dtype) for value in real
    ]


@pytest.mark.parametrize("name", CASES)
def test_narrow_values_are_where_the_abstract_results_say(name: str) -> None:
    case = CASES[name]()
    narrow = {"int32", "int8", "fp8"}
    real = [dtype_name(value) if dtype_name(value) in narrow else "float" for value in real_results(case)]
    assert real == [dtype if dtype in narrow else "float" for _, dtype in abstract_results(case)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_have_the_dtype_of_the_inputs(name: str, dtype: Any) -> None:
    """Whatever the width, save router weights and scales, which are never narrower than fp32."""
    case = CASES[name]()
    inputs = as_dtype(case.inputs, dtype)
    attributes = {**case.attributes, **({"dtype": name_of(dtype)} if "dtype" in case.attributes else {})}
    for value, (_, abstract) in zip(
        real_results(replace(case, inputs=inputs, attributes=attributes)), abstract_results(case), strict=True
    ):
        if value.dtype.is_floating_point and value.itemsize > 1:
            assert value.dtype == (torch.promote_types(dtype, torch.float32) if abstract == "fp32" else dtype)
            assert torch.isfinite(value).all()


@pytest.mark.parametrize("name", CASES)
def test_inputs_are_left_as_they_are(name: str) -> None:
    """Caches aside, which mlapo and the indexer write."""
    case = CASES[name]()
    written = {mlapo.MLAPO: 4, mlapo.MLAPO_QUANT: 4, dsa_indexer.DSA_INDEXER: 4, dsa_indexer.INDEXER_KEY_WRITE: 3}.get(
        case.op
    )
    before = [None if value is None else value.clone() for value in case.inputs]
    real_results(case)
    for index, (value, copy) in enumerate(zip(case.inputs, before, strict=True)):
        if value is not None:
            assert torch.equal(value, copy) == (index != written), index


def select(own: Batch, cache: Any, hidden_TD: Any, qa_TQ: Any, positions: Any, sizes: IndexerSizes) -> Any:
    weights, topk = indexer_weights(), min(sizes.topk_limit, max(own.lengths_B.tolist()))
    (ids_TK,) = dsa_indexer.dsa_indexer(
        hidden_TD,
        qa_TQ,
        *angles(positions),
        cache,
        own.slots_T,
        own.block_tables,
        own.lengths_B,
        weights,
        sizes,
        topk,
        None,
    )
    return ids_TK


def chosen_sets(ids_TK: Any) -> list[set[int]]:
    return [{token for token in row.tolist() if token >= 0} for row in ids_TK]


@pytest.mark.numerics
@pytest.mark.parametrize("interleave", [True, False])
def test_indexer_against_its_definition(interleave: bool) -> None:
    """One score at a time, from the docstring; keys of earlier calls come from the cache."""
    length, queries, topk = 14, 5, 4
    own, sizes, weights = batch([length], queries), indexer_sizes(topk, interleave=interleave), indexer_weights()
    hidden, qa = rand(queries, D, seed=5), rand(queries, Q, seed=6)
    positions = torch.arange(length - queries, length)
    earlier = rand(length - queries, INDEX_DIM, seed=7)
    cache = paged({(0, at): row for at, row in enumerate(earlier)}, own, INDEX_DIM)
    cos, sin = angles(positions)

    def rotated(x: Any, at: int) -> Any:
        out, half = x.clone(), P // 2
        for pair in range(half):
            first, second = (2 * pair, 2 * pair + 1) if interleave else (pair, half + pair)
            # The op lays the members of interleaved pairs out one after the other; so are the keys in the cache.
            out[pair] = x[first] * cos[at, pair] - x[second] * sin[at, pair]
            out[half + pair] = x[second] * cos[at, pair] + x[first] * sin[at, pair]
        return out

    keys = list(earlier)
    for at in range(queries):
        key = weights.wk.values @ hidden[at]
        key = (key - key.mean()) / (key.var(unbiased=False) + 1e-6).sqrt()
        keys.append(rotated(key * weights.k_norm.values + weights.k_norm_bias.values, at))
    ids_TK = select(own, cache, hidden, qa, positions, sizes)
    for at in range(queries):
        q_HE = (weights.wq_b.values @ qa[at]).view(INDEX_HEADS, INDEX_DIM)
        weight_H = weights.weights_proj.values @ hidden[at] / INDEX_HEADS**0.5
        scores = []
        for token in range(length - queries + at + 1):
            score = sum(weight_H[h] * max(rotated(q_HE[h], at) @ keys[token], 0) for h in range(INDEX_HEADS))
            scores.append(float(score) / INDEX_DIM**0.5)
        best = sorted(range(len(scores)), key=lambda token: (-scores[token], token))[:topk]
        assert ids_TK[at].tolist() == best


def test_ties_go_to_the_lowest_id() -> None:
    """Queries of zero score every token alike, whatever the keys."""
    own = batch([11, 9], 3)
    cache = rand(own.blocks, BLOCK_TOKENS, INDEX_DIM)
    ids_TK = select(own, cache, rand(6, D), torch.zeros(6, Q, dtype=torch.float64), torch.arange(6), indexer_sizes(5))
    assert ids_TK.tolist() == [[0, 1, 2, 3, 4]] * 6


def test_ties_below_the_best_go_to_the_lowest_id() -> None:
    """Two kinds of key in alternation: all of the better kind in order, then the worse ones in order."""
    length = 12
    own = batch([length], 1)
    hidden, qa = rand(1, D, seed=3), rand(1, Q, seed=4)
    good, bad = rand(INDEX_DIM, seed=5), rand(INDEX_DIM, seed=6)
    rows = {(0, at): good if at % 3 == 1 else bad for at in range(length - 1)}
    cache = paged(rows, own, INDEX_DIM)
    ids_TK = select(own, cache, hidden, qa, torch.tensor([length - 1]), indexer_sizes(length))
    order = [token for token in ids_TK[0].tolist() if token != length - 1]
    goods, bads = [1, 4, 7, 10], [0, 2, 3, 5, 6, 8, 9]
    assert order in (goods + bads, bads + goods)


batches = st.tuples(st.lists(st.integers(0, 15), min_size=1, max_size=4), st.integers(1, 6))


@pytest.mark.property
@given(batches, st.integers(1, 20))
@settings(max_examples=30)
def test_indexer_is_causal(lengths_and_queries: tuple[list[int], int], topk: int) -> None:
    """min(topk, visible) distinct tokens, none later than the query; padded queries select nothing."""
    lengths, queries = lengths_and_queries
    own = batch(lengths, queries)
    count = own.tokens
    positions = (own.lengths_B[:, None] - queries + torch.arange(queries)).flatten()
    cache = rand(own.blocks, BLOCK_TOKENS, INDEX_DIM)
    ids_TK = select(own, cache, rand(count, D), rand(count, Q), positions, indexer_sizes(topk))
    for row, position in zip(ids_TK.tolist(), positions.tolist(), strict=True):
        chosen = [token for token in row if token >= 0]
        assert len(set(chosen)) == len(chosen) == min(topk, max(position + 1, 0))
        assert all(token <= position for token in chosen)
        assert row == chosen + [-1] * (len(row) - len(chosen)), "unused columns come last and hold −1"


@pytest.mark.property
@given(batches, st.integers(1, 5), st.integers(0, 3), st.integers(0, 9))
@settings(max_examples=30)
def test_layout_of_the_cache_does_not_matter(
    lengths_and_queries: tuple[list[int], int], block_tokens: int, spare: int, seed: int
) -> None:
    """Ids and attention are those of one large block per request."""
    lengths, queries = lengths_and_queries
    results = []
    for size, more, order in ((32, 0, 0), (block_tokens, spare, seed)):
        own = batch(lengths, queries, block_tokens=size, spare=more, seed=order)
        positions = (own.lengths_B[:, None] - queries + torch.arange(queries)).flatten()
        earlier = {
            (request, position): torch.cat([rand(INDEX_DIM, seed=at), rand(R + P, seed=at)])
            for request, length in enumerate(lengths)
            for position in range(max(length - queries, 0))
            for at in [100 * request + position]
        }
        cache = paged({key: row[:INDEX_DIM] for key, row in earlier.items()}, own, INDEX_DIM, size)
        ids_TK = select(own, cache, rand(own.tokens, D), rand(own.tokens, Q), positions, indexer_sizes(4))
        latent = paged({key: row[INDEX_DIM:] for key, row in earlier.items()}, own, R + P, size)
        mlapo.write_rows(latent, own.slots_T, rand(own.tokens, R + P))
        results.append((chosen_sets(ids_TK), attend(own, latent, rand(own.tokens, H, N + P), ids_TK)))
    (ids_one, out_one), (ids_two, out_two) = results
    assert ids_one == ids_two
    torch.testing.assert_close(out_one, out_two)


KV_B = Weight(rand(H * (N + V), R))


def attend(own: Batch, cache: Any, q_THX: Any, topk_TK: Any) -> Any:
    sizes = attention_sizes(None if topk_TK is None else topk_TK.shape[1])
    return attention.multihead_latent_attention(
        q_THX, cache, topk_TK, own.block_tables, own.lengths_B, KV_B, sizes, None, phase="decode", quantized=False
    )[0]


@pytest.mark.numerics
@pytest.mark.parametrize("sparse", [True, False])
def test_attention_against_expanded_keys_and_values(sparse: bool) -> None:
    """Per token and head, keys and values expanded through kv_b; an empty request in the middle gives zeros."""
    lengths, queries = [9, 0, 5], 2
    own = batch(lengths, queries)
    rows = {(request, at): rand(R + P, seed=50 * request + at) for request, n in enumerate(lengths) for at in range(n)}
    cache = paged(rows, own, R + P)
    q_THX = rand(own.tokens, H, N + P)
    topk_TK = torch.full((own.tokens, 3), -1, dtype=torch.int32)
    topk_TK[0], topk_TK[1] = torch.tensor([7, 2, 0]), torch.tensor([8, -1, 3])
    # Ids past the query's own position are not visible, and count for nothing.
    topk_TK[4], topk_TK[5] = torch.tensor([3, 4, 1]), torch.tensor([0, -1, -1])
    out_THV = attend(own, cache, q_THX, topk_TK if sparse else None)
    w_uk_uv = KV_B.values.view(H, N + V, R)
    for token in range(own.tokens):
        request, position = token // queries, lengths[token // queries] - queries + token % queries
        visible = [at for at in range(position + 1) if not sparse or at in topk_TK[token].tolist()]
        if not visible:
            assert torch.equal(out_THV[token], torch.zeros(H, V, dtype=torch.float64))
            continue
        for head in range(H):
            scores, values = [], []
            for at in visible:
                latent, key = rows[request, at][:R], rows[request, at][R:]
                expanded = w_uk_uv[head] @ latent
                scores.append(q_THX[token, head] @ torch.cat([expanded[:N], key]) * 0.3)
                values.append(expanded[N:])
            weights = torch.stack(scores).softmax(dim=0)
            torch.testing.assert_close(out_THV[token, head], weights @ torch.stack(values))


@pytest.mark.numerics
@pytest.mark.parametrize("action", ["INT8", "FP8"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("topk", [3, None])
def test_attention_over_quantised_rows_is_that_over_the_numbers_they_stand_for(
    action: AttentionAction, phase: str, topk: int | None
) -> None:
    rank = 256
    form = CacheFormat(action, rank + 4 * (rank // 128) + 2 * P, 16, {"INT8": 2, "FP8": 4}[action], action.lower())
    own = batch([9, 6], 2)
    latent, key = rand(own.blocks, BLOCK_TOKENS, rank), rand(own.blocks, BLOCK_TOKENS, P, seed=1)
    stored = cache_rows.latent_rows(latent, key, form)
    numbers = cache_rows.latent_values(stored, rank, form, torch.float64)
    q_THX, kv_b = rand(own.tokens, H, N + P), Weight(rand(H * (N + V), rank))
    sizes = AttentionSizes(H, N, P, rank, V, form, 0.3, topk)
    chosen = None if topk is None else ids(own.tokens, topk, below=6)
    (over_rows,), (over_numbers,) = (
        attention.multihead_latent_attention(
            q_THX, cache, chosen, own.block_tables, own.lengths_B, kv_b, given, None, phase=phase,
            quantized=given.cache.action != "DISABLED",
        )
        for cache, given in ((stored, sizes), (numbers, replace(sizes, cache=CACHE)))
    )  # fmt: skip
    assert torch.equal(over_rows, over_numbers)
    exact = attention.multihead_latent_attention(
        q_THX, torch.cat([latent, key], -1), chosen, own.block_tables, own.lengths_B, kv_b,
        replace(sizes, cache=CACHE), None, phase=phase, quantized=False,
    )[0]  # fmt: skip
    assert (over_rows - exact).norm() <= {"INT8": 0.05, "FP8": 0.15}[action] * exact.norm()


def test_attention_is_causal() -> None:
    """Rows after a query's own position, of the same request or of another, do not reach it."""
    own = batch([9, 12], 4)
    cache, q_THX = rand(own.blocks, BLOCK_TOKENS, R + P), rand(8, H, N + P)
    before = attend(own, cache, q_THX, None)
    for position in range(9):
        other = cache.clone()
        other[own.block_tables[0, position // BLOCK_TOKENS], position % BLOCK_TOKENS] += 1
        after = attend(own, other, q_THX, None)
        for query in range(4):
            assert torch.equal(after[query], before[query]) == (position > 5 + query)
        assert torch.equal(after[4:], before[4:])


def test_attention_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prefills are scored a few queries at a time, with equal results."""
    own = batch([16, 13], 7)
    cache, q_THX = rand(own.blocks, BLOCK_TOKENS, R + P), rand(14, H, N + P)
    whole = attend(own, cache, q_THX, None)
    for elements in (1, 2 * H * 16 * 3):
        monkeypatch.setattr(attention, "SCORE_ELEMENTS", elements)
        torch.testing.assert_close(attend(own, cache, q_THX, None), whole)


def test_a_batch_of_padding_gives_zeros() -> None:
    own = batch([0, 0], 3)
    cache = rand(own.blocks, BLOCK_TOKENS, R + P)
    ids_TK = select(
        own, rand(own.blocks, BLOCK_TOKENS, INDEX_DIM), rand(6, D), rand(6, Q), -torch.ones(6), indexer_sizes()
    )
    assert (ids_TK == -1).all()
    for topk_TK in (ids_TK, None):
        assert torch.equal(attend(own, cache, rand(6, H, N + P), topk_TK), torch.zeros(6, H, V, dtype=torch.float64))


def test_rows_without_a_slot_are_dropped() -> None:
    """They land in the last row, which no block table names; all other rows are kept."""
    cache = rand(4, BLOCK_TOKENS, 5)
    before, rows = cache.clone(), rand(4, 5)
    mlapo.write_rows(cache, torch.tensor([2, -1, 9, -1]), rows)
    flat, kept = cache.view(-1, 5), before.view(-1, 5)
    assert torch.equal(flat[2], rows[0])
    assert torch.equal(flat[9], rows[2])
    others = [row for row in range(15) if row not in (2, 9)]
    assert torch.equal(flat[others], kept[others])


@pytest.mark.numerics
def test_rotations_are_rotations() -> None:
    """Lengths are kept, and the product of two vectors depends on the distance of their positions alone."""
    for rotate in (mlapo.rotate_interleaved, mlapo.rotate_half_split):
        a, b = rand(1, P, seed=1), rand(1, P, seed=2)

        def at(x: Any, position: int) -> Any:
            return rotate(x, *angles(torch.tensor([position])))[0]  # noqa: B023

        torch.testing.assert_close(at(a, 7).norm(), a.norm())
        torch.testing.assert_close(at(a, 7) @ at(b, 4), at(a, 103) @ at(b, 100))
        assert not torch.allclose(at(a, 7) @ at(b, 4), at(a, 7) @ at(b, 5))


@pytest.mark.numerics
@pytest.mark.parametrize(("groups", "chosen_groups"), [(1, 1), (4, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("normalize", [True, False])
def test_router_against_its_definition(groups: int, chosen_groups: int, *, normalize: bool) -> None:
    experts, chosen, scale = 8, 2, 2.5
    x, gate, bias = rand(20, D), rand(experts, D), rand(experts)
    weights_TK, experts_TK = moe.MOE_GATE(
        x, gate, bias, experts_per_token=chosen, groups=groups, chosen_groups=chosen_groups, scale=scale,
        normalize=normalize, appended=0,
    )  # fmt: skip
    size = experts // groups
    for token in range(20):
        scores = [float(torch.sigmoid(x[token] @ gate[expert])) for expert in range(experts)]
        choice = [score + float(bias[expert]) for expert, score in enumerate(scores)]
        by_group = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda group: -by_group[group])[:chosen_groups]
        allowed = [expert for expert in range(experts) if expert // size in kept]
        best = sorted(allowed, key=lambda expert: -choice[expert])[:chosen]
        assert sorted(experts_TK[token].tolist()) == sorted(best)
        total = sum(scores[expert] for expert in best) if normalize else 1.0
        for weight, expert in zip(weights_TK[token].tolist(), experts_TK[token].tolist(), strict=True):
            assert weight == pytest.approx(scores[expert] / total * scale)


@pytest.mark.property
@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=30)
def test_experts_against_one_token_at_a_time(count: int, chosen: int, seed: int) -> None:
    """Permute, grouped products and weighted sum together; experts without a token and tokens without company too."""
    experts = 5
    generator = torch.Generator().manual_seed(seed)
    experts_TK = torch.stack([torch.randperm(experts, generator=generator)[:chosen] for _ in range(count)]).int()
    x, weights_TK = rand(count, D, seed=seed), rand(count, chosen, seed=seed)
    gate_up, down = Weight(rand(experts, 8, D)), Weight(rand(experts, D, 4))
    rows, order, counts = moe.moe_permute(x, experts_TK, experts)
    assert counts.tolist() == [int((experts_TK == expert).sum()) for expert in range(experts)]
    fused = moe.grouped_matmul_swiglu(rows, gate_up, counts, None)
    apart = moe.swiglu(moe.grouped_matmul(rows, gate_up, counts, None))
    assert torch.equal(fused, apart)
    out = moe.moe_unpermute(moe.grouped_matmul(fused, down, counts, None), weights_TK, order)
    for token in range(count):
        expected = torch.zeros(D, dtype=torch.float64)
        for weight, expert in zip(weights_TK[token], experts_TK[token].tolist(), strict=True):
            gate, up = (gate_up.values[expert] @ x[token]).chunk(2)
            expected += weight * (down.values[expert] @ (gate / (1 + (-gate).exp()) * up))
        torch.testing.assert_close(out[token], expected)


def test_norms_against_their_definition() -> None:
    x, y, weight = rand(T, D), rand(T, D, seed=1), Weight(rand(D))

    def normed(values: Any) -> Any:
        return values / (values.square().sum(-1, keepdim=True) / D + 0.1).sqrt() * weight.values

    torch.testing.assert_close(norm.rms_norm(x, weight, 0.1), normed(x))
    torch.testing.assert_close(norm.add_rms_norm(x, y, weight, 0.1), normed(x + y))
    torch.testing.assert_close(norm.add_rms_norm2(x, y, weight, 0.1), (normed(x + y), x + y))


def test_ends_of_the_model() -> None:
    table_VD, ids_T = Weight(rand(9, D)), torch.tensor([4, 0, 8, 4])
    assert torch.equal(tokens.embedding(ids_T, table_VD), table_VD.values[[4, 0, 8, 4]])
    # Of a vocabulary in pieces of three rows, the second.
    piece_TD = tokens.embedding(ids_T, Weight(table_VD.values[3:6]), first=3)
    assert torch.equal(piece_TD, table_VD.values[[4, 0, 8, 4]] * torch.tensor([1, 0, 0, 1])[:, None])
    x = rand(6, D)
    assert torch.equal(tokens.select_rows(x, 2), x[[2, 5]])
    assert torch.equal(tokens.concat(x, x[:, :1]), torch.cat([x, x[:, :1]], dim=1))
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0], [-1.0, -2.0, -3.0, -0.5]])
    assert tokens.sample(logits).tolist() == [1, 0, 3], "ties to the lowest id"


def test_an_op_without_a_reference_says_so() -> None:
    with pytest.raises(NotImplementedError, match="send_recv"):
        collectives.SEND_RECV(rand(2, 2))
