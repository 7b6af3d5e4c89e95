"""The work of every op against closed forms, written from the definitions and not from the code.

Axes as in the ops: T tokens, D hidden, I inputs, O outputs, H heads, N qk_nope, P qk_rope, R kv_lora_rank,
V v_head_dim, Q q_lora_rank, E experts or index_head_dim, K experts per token or selected tokens. Bytes per value are
literal: bf16 2, fp32 and int32 4.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.dims import Dim, ceil_div, minimum
from castoff.ops import attention, collectives, dsa_indexer, linear, mlapo, moe, norm, table, tokens
from castoff.ops.lengths import Lengths
from castoff.ops.linear import Weight
from castoff.ops.program import Abstract, Op, OpCall, Recorder
from castoff.ops.work import Collective, Part, Work
from castoff.spec.mesh import Group
from castoff.spec.quant import AttentionAction, CacheFormat, LinearAction, LinearFormat, cache_format, linear_format
from castoff.spec.scenario import RequestClass
from tests.generators import (
    ATTENTION_ACTIONS,
    LINEAR_ACTIONS,
    MXFP4_GROUP,
    STORED,
    batches,
    model,
    scale_bytes,
    stored_bytes,
    uniform,
)

DYNAMIC_ACTIONS: tuple[LinearAction, ...] = ("W8A8_DYNAMIC", "W4A8_DYNAMIC", "FP8", "MXFP4")

sizes = st.integers(1, 700)
actions = st.sampled_from(LINEAR_ACTIONS)


def quantise_operations(action: LinearAction) -> int:
    """A value: abs, max, scale, round; or, where the scale is stored, scale and round."""
    if STORED[action][2] == "bf16":
        return 0
    return 4 if action in DYNAMIC_ACTIONS else 2


def activation_scale_bytes(action: LinearAction, tokens: int, width: int) -> int:
    """Scales found at run time: fp32 per token, or per 128 values for FP8; a byte per group for MXFP4."""
    if action not in DYNAMIC_ACTIONS:
        return 0
    per_token = {"FP8": 4 * ceil(width / 128), "MXFP4": ceil(width / MXFP4_GROUP)}.get(action, 4)
    return tokens * per_token


class Bench:
    """A recorder with one open block, and what an op recorded in it."""

    def __init__(self) -> None:
        self.recorder = Recorder()

    def x(self, *shape: Dim, dtype: str = "bf16") -> Abstract:
        return self.recorder.tensor(*shape, dtype=dtype)

    def activations(self, tokens: int, width: int, action: LinearAction) -> linear.Activations:
        """A product's input in a format, as `quantize` leaves it."""
        form = linear_format(action, mxfp4_group_size=MXFP4_GROUP)
        values = self.x(tokens, width, dtype=form.activation_dtype)
        if not form.quantizes_activations:
            return values
        count = form.activation_scales(width)
        return linear.Quantized(values, self.x(tokens, count, dtype=form.scale_dtype) if count else None, "bf16")

    def cache(self, *shape: Dim) -> Abstract:
        return self.recorder.tensor(*shape, dtype="int8", kind="cache")

    def plain(self, *shape: int, dtype: str = "bf16") -> Weight:
        return Weight(self.recorder.tensor(*shape, dtype=dtype, kind="weight"))

    def weight(self, *shape: int, action: LinearAction = "DISABLED") -> Weight:
        form = linear_format(action, mxfp4_group_size=MXFP4_GROUP)
        values = self.recorder.tensor(*shape, dtype=form.weight_dtype, kind="weight")
        if action == "DISABLED":
            return Weight(values, None, form)
        scales = (*shape[:-2], *form.weight_scales(*shape[-2:]))
        return Weight(values, self.recorder.tensor(*scales, dtype=form.scale_dtype, kind="weight"), form)

    def calls(self, run: Callable[[], Any]) -> list[OpCall]:
        """The calls that `run` records."""

        def body() -> tuple[Abstract | None, ...]:
            run()
            return ()

        self.recorder.block(f"block {len(self.recorder.program.schedule)}", "", body)
        return self.recorder.program.schedule[-1].block.calls

    def call(self, run: Callable[[], Any]) -> OpCall:
        """The only call that `run` records."""
        (call,) = self.calls(run)
        return call

    def work(self, run: Callable[[], Any]) -> Work:
        """The work of that only call."""
        call = self.call(run)
        return call.op.work(call)


def parts_of(work: Work) -> dict[str, Part]:
    parts = {part.name: part for part in work.parts}
    assert len(parts) == len(work.parts), "two buckets of one name"
    return parts


def does_something(part: Part) -> bool:
    return part != Part(part.name)


def matrix_flops(work: Work) -> Dim:
    return sum(part.matrix_flops for part in work.parts)


def vector_flops(work: Work) -> Dim:
    return sum(part.vector_flops for part in work.parts)


class TestTable:
    MODULES = (attention, collectives, dsa_indexer, linear, mlapo, moe, norm, tokens)

    @pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
    def test_holds_every_op(self, module: ModuleType) -> None:
        defined = [value for _, value in inspect.getmembers(module) if isinstance(value, Op)]
        assert defined
        assert all(any(op is listed for listed in table.OPS) for op in defined)

    def test_lists_no_op_twice(self) -> None:
        assert len({id(op) for op in table.OPS}) == len(table.OPS)

    def test_work_adds_up_its_parts(self) -> None:
        work = Work(
            (
                Part("a", matrix_flops=1, vector_flops=20, bytes=300),
                Part("b", matrix_flops=4000, gather_bytes=50_000, gather_rows=7),
            )
        )
        assert work.flops == 4021
        assert work.bytes == 50_300


class TestLinear:
    @pytest.mark.property
    @given(T=sizes, I=sizes, O=sizes, action=actions)
    def test_product(self, T: int, I: int, O: int, action: LinearAction) -> None:  # noqa: E741
        bench = Bench()
        weight_bytes, activation_bytes, matrix_dtype = STORED[action]
        weight = bench.weight(O, I, action=action)
        *_, call = bench.calls(lambda: linear.linear(bench.x(T, I), weight))
        work = call.op.work(call)
        assert call.op.name == ("linear" if action == "DISABLED" else "linear_quant")
        assert call.outputs[0].shape == (T, O)
        assert call.outputs[0].dtype == "bf16"
        (part,) = work.parts
        assert part.matrix_flops == 2 * T * I * O
        assert part.matrix_dtype == matrix_dtype
        assert part.vector_flops == 0
        assert work.bytes == pytest.approx(
            T * I * activation_bytes
            + activation_scale_bytes(action, T, I)
            + O * I * weight_bytes
            + scale_bytes(action, O, I)
            + 2 * T * O
        )

    @pytest.mark.golden
    @pytest.mark.parametrize(
        ("action", "weight_bytes"),
        [
            # kv_a_proj of GLM-5.2: 576 x 6144 values.
            ("DISABLED", 576 * 6144 * 2),
            ("W8A8_DYNAMIC", 576 * 6144 + 4 * 576),
            ("W4A8_STATIC", 576 * 6144 // 2 + 4 * 576),
            # 576 rows are 4.5 blocks of 128, so 5 rows of scales.
            ("FP8", 576 * 6144 + 4 * 5 * 48),
            ("MXFP4", 576 * 6144 // 2 + 576 * 192),
        ],
    )
    def test_scales_of_a_real_weight(self, action: LinearAction, weight_bytes: int) -> None:
        assert Bench().weight(576, 6144, action=action).bytes == weight_bytes

    @pytest.mark.property
    @given(T=sizes, I=sizes, action=actions)
    def test_quantisation_of_the_input(self, T: int, I: int, action: LinearAction) -> None:  # noqa: E741
        bench = Bench()
        calls = bench.calls(lambda: linear.quantize(bench.x(T, I), bench.weight(3, I, action=action)))
        if STORED[action][2] == "bf16":
            # 16-bit activations are used as they are.
            assert calls == []
            return
        (call,) = calls
        dynamic = action in DYNAMIC_ACTIONS
        assert call.op.name == ("dynamic_quantize" if dynamic else "quantize")
        assert call.outputs[0].dtype == STORED[action][2]
        work = call.op.work(call)
        assert work.flops == T * I * quantise_operations(action)
        assert work.bytes == T * I * (2 + STORED[action][1]) + activation_scale_bytes(action, T, I)

    def test_values_that_are_quantised_already_are_left_alone(self) -> None:
        bench = Bench()
        weight = bench.weight(8, 16, action="W8A8_DYNAMIC")
        given = linear.Quantized(bench.x(4, 16, dtype="int8"), bench.x(4, 1, dtype="fp32"), "bf16")
        assert bench.calls(lambda: linear.quantize(given, weight)) == []
        call = bench.call(lambda: linear.linear(given, weight))
        assert call.op.name == "linear_quant"
        assert call.outputs[0].dtype == "bf16"
        # Values and scales of both operands, and the result.
        assert call.work.bytes == (4 * 16 + 4 * 4) + (8 * 16 + 4 * 8) + 2 * 4 * 8

    def test_weights_that_are_never_quantised(self) -> None:
        bench = Bench()
        call = bench.call(lambda: linear.linear(bench.x(4, 16), bench.plain(8, 16)))
        assert call.op.name == "linear"
        assert call.op.work(call).bytes == 2 * (4 * 16 + 8 * 16 + 4 * 8)


class TestNorm:
    """x, the residual, the sum and the normed value are (T, D); 4 vector operations a value, and 1 for the addition."""

    EPS = (1e-5, 1e-6)

    @staticmethod
    def run(bench: Bench, name: str, T: int, D: int, eps: float, action: LinearAction) -> OpCall:
        form = linear_format(action, mxfp4_group_size=MXFP4_GROUP)
        inputs = [bench.x(T, D)] + [bench.x(T, D)] * name.startswith("add")
        tail: list[Any] = [bench.plain(D), eps] + [form] * name.endswith("quant")
        return bench.call(lambda: getattr(norm, name)(*inputs, *tail))

    @pytest.mark.property
    @pytest.mark.parametrize("eps", EPS)
    @pytest.mark.parametrize(
        ("name", "operations", "tensors"),
        [
            # read x; write normed
            ("rms_norm", 4, 2),
            # read x, residual; write normed
            ("add_rms_norm", 5, 3),
            # read x, residual; write normed, sum
            ("add_rms_norm2", 5, 4),
        ],
    )
    @given(T=sizes, D=sizes)
    def test_in_bf16(self, name: str, operations: int, tensors: int, eps: float, T: int, D: int) -> None:
        call = self.run(Bench(), name, T, D, eps, "DISABLED")
        work = call.op.work(call)
        assert call.op.name == name
        assert work.flops == vector_flops(work) == operations * T * D
        assert work.bytes == 2 * (tensors * T * D + D)
        assert call.outputs[0].shape == (T, D)
        assert call.attributes["eps"] == eps

    @pytest.mark.property
    @pytest.mark.parametrize("eps", EPS)
    @pytest.mark.parametrize(
        ("name", "operations", "bf16_tensors"),
        [
            ("rms_norm_dynamic_quant", 8, 1),
            ("add_rms_norm_dynamic_quant", 9, 2),
            # The sum is written in bf16 beside the quantised values.
            ("add_rms_norm2_dynamic_quant", 9, 3),
        ],
    )
    @given(T=sizes, D=sizes, action=st.sampled_from(["W8A8_DYNAMIC", "W4A8_DYNAMIC", "FP8"]))
    def test_with_dynamic_quantisation(
        self, name: str, operations: int, bf16_tensors: int, eps: float, T: int, D: int, action: LinearAction
    ) -> None:
        call = self.run(Bench(), name, T, D, eps, action)
        work = call.op.work(call)
        assert call.op.name == name
        assert work.flops == operations * T * D
        scales = ceil(D / 128) if action == "FP8" else 1
        assert work.bytes == 2 * (bf16_tensors * T * D + D) + T * D * STORED[action][1] + 4 * T * scales
        assert call.outputs[0].dtype == STORED[action][2]

    @pytest.mark.parametrize(
        "name", ["rms_norm_dynamic_quant", "add_rms_norm_dynamic_quant", "add_rms_norm2_dynamic_quant"]
    )
    def test_mxfp4_values_are_half_a_byte(self, name: str) -> None:
        call = self.run(Bench(), name, 7, 64, 1e-5, "MXFP4")
        assert call.outputs[0].dtype == "fp4"
        assert call.outputs[0].bytes == 7 * 32
        assert call.outputs[1].shape == (7, 2)

    @pytest.mark.parametrize(
        "name",
        [
            "rms_norm",
            "add_rms_norm",
            "add_rms_norm2",
            "rms_norm_dynamic_quant",
            "add_rms_norm_dynamic_quant",
            "add_rms_norm2_dynamic_quant",
        ],
    )
    def test_eps_changes_no_work(self, name: str) -> None:
        first, second = (self.run(Bench(), name, 5, 96, eps, "W8A8_DYNAMIC") for eps in self.EPS)
        assert first.op.work(first) == second.op.work(second)
        assert [output.shape for output in first.outputs] == [output.shape for output in second.outputs]

    def test_add(self) -> None:
        bench = Bench()
        work = bench.work(lambda: norm.add(bench.x(5, 9), bench.x(5, 9)))
        assert work.flops == 45
        assert work.bytes == 3 * 2 * 45


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of latent attention for one rank."""

    T: int
    D: int
    H: int
    N: int
    P: int
    R: int
    Q: int | None


latents = st.builds(
    Latent,
    T=st.integers(1, 50),
    D=st.integers(1, 200),
    H=st.integers(1, 9),
    N=st.integers(1, 40),
    P=st.integers(1, 20).map(lambda half: 2 * half),
    R=st.integers(1, 90),
    Q=st.none() | st.integers(1, 70),
)
# Of the real models' format, whatever the sizes in a test: only the row's bytes count.
CACHES: dict[AttentionAction, CacheFormat] = {action: cache_format(model(), action) for action in ATTENTION_ACTIONS}


class TestMlapo:
    @staticmethod
    def run(
        s: Latent, action: LinearAction, cache: AttentionAction = "DISABLED", q_b: LinearAction | None = None
    ) -> OpCall:
        bench = Bench()
        weights = mlapo.MlapoWeights(
            q_a=None if s.Q is None else bench.weight(s.Q, s.D, action=action),
            q_a_norm=None if s.Q is None else bench.plain(s.Q),
            q_b=bench.weight(s.H * (s.N + s.P), s.Q or s.D, action=q_b or action),
            kv_a=bench.weight(s.R + s.P, s.D, action=action),
            kv_a_norm=bench.plain(s.R),
        )
        row_bytes = CACHES[cache].latent_row_bytes
        own = mlapo.MlapoSizes(s.H, s.N, s.P, s.R, s.Q or 0, CACHES[cache])
        return bench.call(
            lambda: mlapo.mlapo(
                bench.x(s.T, s.D), bench.x(s.T, s.P), bench.x(s.T, s.P), bench.x(s.T, dtype="int32"),
                bench.cache(10 * s.T, row_bytes), weights, own, 1e-6,
            )
        )  # fmt: skip

    @pytest.mark.property
    @given(s=latents, action=actions, cache=st.sampled_from(ATTENTION_ACTIONS))
    def test_work(self, s: Latent, action: LinearAction, cache: AttentionAction) -> None:
        call = self.run(s, action, cache)
        work = call.op.work(call)
        q_in, q_width = s.Q or s.D, s.H * (s.N + s.P)
        assert call.op.name == ("mlapo" if action == "DISABLED" else "mlapo_quant")
        assert matrix_flops(work) == 2 * s.T * (s.D * (s.Q or 0) + q_in * q_width + s.D * (s.R + s.P))
        dtypes = {part.matrix_dtype for part in work.parts if part.matrix_flops}
        assert dtypes == {STORED[action][2]}
        weights = stored_bytes(action, q_width, q_in) + stored_bytes(action, s.R + s.P, s.D)
        if s.Q is not None:
            weights += stored_bytes(action, s.Q, s.D) + 2 * s.Q
        expected = (
            2 * s.T * s.D  # hidden, once
            + weights
            + 2 * s.R  # kv norm
            + 2 * s.T * (s.Q or 0)  # qa_normed, which the indexer reads again
            + 2 * s.T * (s.R + s.P)  # kv_c_normed, k_rot
            + 2 * 2 * s.T * s.P  # cos, sin
            + 2 * s.T * q_width  # q_states
            + s.T * {"DISABLED": 1152, "INT8": 656, "FP8": 656}[cache]
        )
        assert work.bytes == pytest.approx(expected)

    @pytest.mark.property
    @given(s=latents, action=actions)
    def test_vector_operations(self, s: Latent, action: LinearAction) -> None:
        call = self.run(s, action)
        # 4 a normed value, 3 a rotated one (every head's query and the one key).
        norms = 4 * s.T * ((s.Q or 0) + s.R)
        rope = 3 * s.T * (s.H + 1) * s.P
        quantised = quantise_operations(action) * s.T * (s.D + (s.Q or 0))
        assert vector_flops(call.op.work(call)) == norms + rope + quantised

    @pytest.mark.parametrize(
        ("others", "q_b", "quantised"),
        [
            # The two inputs: hidden (3 x 8) for q_a and kv_a, qa_normed (3 x 5) for q_b.
            ("W8A8_DYNAMIC", "W8A8_DYNAMIC", 24 + 15),
            ("DISABLED", "W8A8_DYNAMIC", 15),
            ("W8A8_DYNAMIC", "DISABLED", 24),
            ("DISABLED", "DISABLED", 0),
        ],
    )
    def test_only_inputs_of_quantised_weights_are_quantised(
        self, others: LinearAction, q_b: LinearAction, quantised: int
    ) -> None:
        call = self.run(Latent(T=3, D=8, H=2, N=4, P=2, R=6, Q=5), others, q_b=q_b)
        parts = parts_of(call.op.work(call))
        assert sum(part.vector_flops for name, part in parts.items() if name == "quantize") == 4 * quantised

    @given(s=latents)
    def test_results(self, s: Latent) -> None:
        call = self.run(s, "DISABLED")
        q_states, kv_c_normed, k_rot, qa_normed = (output.shape for output in call.outputs)
        assert q_states == (s.T, s.H, s.N + s.P)
        assert kv_c_normed == (s.T, s.R)
        assert k_rot == (s.T, s.P)
        # Without q_lora_rank, qa_normed is empty.
        assert qa_normed == (s.T, s.Q or 0)

    def test_buckets(self) -> None:
        call = self.run(Latent(T=3, D=8, H=2, N=4, P=2, R=6, Q=5), "W8A8_DYNAMIC")
        assert set(parts_of(call.op.work(call))) == {
            "q_a_proj", "q_a_norm", "q_b_proj", "kv_a_proj", "kv_a_norm", "rope", "q_states", "kv_cache_write",
            "quantize",
        }  # fmt: skip

    @pytest.mark.golden
    def test_glm_52(self) -> None:
        """One token of GLM-5.2 on 16 ranks: 4 heads."""
        call = self.run(Latent(T=1, D=6144, H=4, N=192, P=64, R=512, Q=2048), "DISABLED")
        work = call.op.work(call)
        # q_a 2048 x 6144, q_b 1024 x 2048, kv_a 576 x 6144
        assert matrix_flops(work) == 2 * (12_582_912 + 2_097_152 + 3_538_944)
        # weights and norms 2 x (18,219,008 + 2560); hidden 12,288; latents 4096 + 1152; rope 256; q 2048; row 1152
        assert work.bytes == 36_443_136 + 12_288 + 4096 + 1152 + 256 + 2048 + 1152


@dataclass(frozen=True, kw_only=True)
class Index:
    """Sizes of an indexer: H heads of E values, P of them rotated, K selected."""

    D: int
    Q: int
    H: int
    E: int
    P: int
    K: int
    shards: int = 1


indexes = st.builds(
    Index,
    D=st.integers(1, 200),
    Q=st.integers(1, 90),
    H=st.integers(1, 9),
    E=st.sampled_from([16, 64, 128]),
    P=st.sampled_from([2, 8, 16]),
    K=st.integers(1, 60),
)
# key bytes per value, scale bytes, dtype of the score
KEYS: dict[AttentionAction, tuple[int, int, str]] = {
    "DISABLED": (2, 0, "bf16"),
    "FP8": (1, 4, "fp8"),
    "INT8": (1, 2, "int8"),
}


def index_cache(action: AttentionAction, E: int) -> CacheFormat:
    key, scale, dtype = KEYS[action]
    return CacheFormat(action, 0, key * E, scale, dtype)


class Indexer:
    """One dsa_indexer call, or one indexer_key_write, on its bench."""

    def __init__(self, s: Index, lengths: Lengths, cache: AttentionAction, action: LinearAction = "DISABLED") -> None:
        self.bench, self.s, self.lengths = Bench(), s, lengths
        self.T = lengths.tokens
        self.weights = dsa_indexer.IndexerWeights(
            wq_b=self.bench.weight(s.H * s.E, s.Q, action=action),
            wk=self.bench.weight(s.E, s.D, action=action),
            weights_proj=self.bench.plain(s.H, s.D),
            k_norm=self.bench.plain(s.E),
            k_norm_bias=self.bench.plain(s.E),
        )
        self.sizes = dsa_indexer.IndexerSizes(s.H, s.E, s.P, s.K, True, index_cache(cache, s.E), s.shards)
        self.columns = minimum(s.K, ceil_div(lengths.longest, s.shards))

    def select(self, *, cached_rows: int = 1000, blocks: int = 8) -> OpCall:
        b, T, s = self.bench, self.T, self.s
        return b.call(
            lambda: dsa_indexer.dsa_indexer(
                b.x(T, s.D), b.x(T, s.Q), b.x(T, s.P), b.x(T, s.P), b.cache(cached_rows, 1), b.x(T, dtype="int32"),
                b.x(self.lengths.requests, blocks, dtype="int32"), b.x(self.lengths.requests, dtype="int32"),
                self.weights, self.sizes, self.columns, self.lengths,
            )
        )  # fmt: skip

    def write(self) -> OpCall:
        b, T, s = self.bench, self.T, self.s
        return b.call(
            lambda: dsa_indexer.indexer_key_write(
                b.x(T, s.D), b.x(T, s.P), b.x(T, s.P), b.cache(1000, 1), b.x(T, dtype="int32"), self.weights, self.sizes
            )
        )


def rotate_and_quantise(vectors: Dim, E: int) -> Dim:
    """log2 E butterflies a value for the Hadamard rotation; abs, max, scale and round for the quantisation."""
    return vectors * E * ({16: 4, 64: 6, 128: 7}[E] + 4)


class TestIndexer:
    WRITE_BUCKETS = frozenset({"k_proj", "k_norm", "k_rope", "key_cache_write"})
    BUCKETS = WRITE_BUCKETS | {
        "q_proj", "head_weights_proj", "rope", "score", "relu", "head_reduce", "topk", "key_cache_read",
    }  # fmt: skip
    QUANTISED_WRITE = frozenset({"k_rotate_quantize", "scale_cache_write"})
    QUANTISED = QUANTISED_WRITE | {"rotate_quantize", "scale_cache_read"}

    @pytest.mark.parametrize("cache", ATTENTION_ACTIONS)
    def test_buckets(self, cache: AttentionAction) -> None:
        """The quantised path rotates, quantises and keeps scales; the BF16 path does none of it."""
        s = Index(D=20, Q=10, H=4, E=16, P=8, K=6)
        quantised = cache != "DISABLED"
        select, write = (Indexer(s, uniform(2, 30, 3), cache).select(), Indexer(s, uniform(2, 30, 3), cache).write())
        assert set(parts_of(select.op.work(select))) == self.BUCKETS | (self.QUANTISED if quantised else set())
        assert set(parts_of(write.op.work(write))) == self.WRITE_BUCKETS | (
            self.QUANTISED_WRITE if quantised else set()
        )

    @pytest.mark.property
    @pytest.mark.parametrize("cache", ATTENTION_ACTIONS)
    @given(s=indexes, lengths=batches(), action=actions)
    def test_projections(self, cache: AttentionAction, s: Index, lengths: Lengths, action: LinearAction) -> None:
        indexer = Indexer(s, lengths, cache, action)
        call = indexer.select()
        parts, T = parts_of(call.op.work(call)), indexer.T
        assert parts["q_proj"].matrix_flops == 2 * T * s.Q * s.H * s.E
        assert parts["k_proj"].matrix_flops == 2 * T * s.D * s.E
        assert parts["head_weights_proj"].matrix_flops == 2 * T * s.D * s.H
        assert parts["q_proj"].matrix_dtype == parts["k_proj"].matrix_dtype == STORED[action][2]
        # weights_proj stays in high precision, whatever the linear layers are.
        assert parts["head_weights_proj"].matrix_dtype == "bf16"
        assert parts["q_proj"].bytes == pytest.approx(2 * T * s.Q + stored_bytes(action, s.H * s.E, s.Q))
        # hidden is read once for the two projections that need it.
        assert parts["k_proj"].bytes == pytest.approx(2 * T * s.D + stored_bytes(action, s.E, s.D))
        assert parts["head_weights_proj"].bytes == 2 * s.H * s.D
        assert parts["k_norm"].bytes == 2 * 2 * s.E
        assert parts["rope"].vector_flops == 3 * T * s.H * s.P
        assert parts["k_rope"].vector_flops == 3 * T * s.P

    @pytest.mark.property
    @pytest.mark.parametrize("cache", ATTENTION_ACTIONS)
    @given(s=indexes, lengths=batches())
    def test_scores(self, cache: AttentionAction, s: Index, lengths: Lengths) -> None:
        call = Indexer(s, lengths, cache).select()
        parts, T = parts_of(call.op.work(call)), lengths.tokens
        pairs = sum(
            context + i + 1
            for segment in lengths.classes
            for _ in range(int(segment.count))
            for context, query in [(int(segment.context), int(segment.query))]
            for i in range(query)
        )
        assert parts["score"].matrix_flops == 2 * pairs * s.H * s.E
        assert parts["score"].matrix_dtype == KEYS[cache][2]
        assert parts["relu"].vector_flops == pairs * s.H
        # A quantised key scales each sum; its query's scale goes into the head weights.
        scales = 0 if cache == "DISABLED" else pairs + T * s.H
        assert parts["head_reduce"].vector_flops == 2 * pairs * s.H + scales
        # Four 8-bit digits of a 32-bit key.
        assert parts["topk"].vector_flops == 4 * pairs
        if cache != "DISABLED":
            assert parts["rotate_quantize"].vector_flops == rotate_and_quantise(T * s.H, s.E)
            assert parts["k_rotate_quantize"].vector_flops == rotate_and_quantise(T, s.E)

    @pytest.mark.property
    @pytest.mark.parametrize("cache", ATTENTION_ACTIONS)
    @given(s=indexes, lengths=batches())
    def test_cache_traffic(self, cache: AttentionAction, s: Index, lengths: Lengths) -> None:
        call = Indexer(s, lengths, cache).select()
        parts, T = parts_of(call.op.work(call)), lengths.tokens
        in_cache = sum(int(p.count) * (int(p.context) + int(p.query)) for p in lengths.classes)
        key, scale, _ = KEYS[cache]
        assert parts["key_cache_read"].bytes == in_cache * key * s.E
        assert parts["key_cache_write"].bytes == T * key * s.E
        if cache != "DISABLED":
            assert parts["scale_cache_read"].bytes == in_cache * scale
            assert parts["scale_cache_write"].bytes == T * scale

    @pytest.mark.property
    @given(s=indexes, lengths=batches(), rows=st.integers(1, 10**7), blocks=st.integers(1, 10**4))
    def test_the_allocated_buffer_changes_nothing(self, s: Index, lengths: Lengths, rows: int, blocks: int) -> None:
        small, large = (
            Indexer(s, lengths, "FP8").select(),
            Indexer(s, lengths, "FP8").select(cached_rows=rows, blocks=blocks),
        )
        assert small.op.work(small) == large.op.work(large)
        assert small.outputs[0].shape == large.outputs[0].shape

    @pytest.mark.property
    @given(s=indexes, lengths=batches())
    def test_result(self, s: Index, lengths: Lengths) -> None:
        (ids,) = Indexer(s, lengths, "DISABLED").select().outputs
        longest = max(int(p.context) + int(p.query) for p in lengths.classes)
        assert ids.shape == (lengths.tokens, min(s.K, longest))
        assert ids.dtype == "int32"

    @pytest.mark.property
    @pytest.mark.parametrize("cache", ATTENTION_ACTIONS)
    @given(s=indexes, lengths=batches(), action=actions)
    def test_a_key_write_is_the_indexer_without_its_queries(
        self, cache: AttentionAction, s: Index, lengths: Lengths, action: LinearAction
    ) -> None:
        select, write = Indexer(s, lengths, cache, action).select(), Indexer(s, lengths, cache, action).write()
        written = parts_of(write.op.work(write))
        assert write.outputs == ()
        assert write.op.name == "indexer_key_write"
        selected = parts_of(select.op.work(select))
        assert written == {name: selected[name] for name in written}

    @pytest.mark.property
    @given(s=indexes, lengths=batches(), shards=st.sampled_from([2, 4]))
    def test_shards_split_the_keys_and_not_the_queries(self, s: Index, lengths: Lengths, shards: int) -> None:
        split = Index(**{**{name: getattr(s, name) for name in "D Q H E P K".split()}, "shards": shards})
        whole_call, split_call = Indexer(s, lengths, "FP8").select(), Indexer(split, lengths, "FP8").select()
        whole, part = parts_of(whole_call.op.work(whole_call)), parts_of(split_call.op.work(split_call))
        for name in ("score", "relu"):
            assert part[name].matrix_flops * shards == pytest.approx(whole[name].matrix_flops)
            assert part[name].vector_flops * shards == pytest.approx(whole[name].vector_flops)
        for name in ("key_cache_read", "scale_cache_read"):
            assert part[name].bytes * shards == pytest.approx(whole[name].bytes)
        assert part["q_proj"] == whole["q_proj"]

    @pytest.mark.golden
    @pytest.mark.parametrize(
        ("cache", "read"), [("DISABLED", 65_537 * 256), ("FP8", 65_537 * 132), ("INT8", 65_537 * 130)]
    )
    def test_decode_of_glm_52_at_64k(self, cache: AttentionAction, read: int) -> None:
        s = Index(D=6144, Q=2048, H=32, E=128, P=64, K=2048)
        call = Indexer(s, uniform(1, 65_536, 1), cache).select()
        parts = parts_of(call.op.work(call))
        assert parts["score"].matrix_flops == 2 * 65_537 * 32 * 128
        scales = parts["scale_cache_read"].bytes if cache != "DISABLED" else 0
        assert parts["key_cache_read"].bytes + scales == read

    def test_merge_of_the_candidates_of_several_ranks(self) -> None:
        bench = Bench()
        call = bench.call(
            lambda: dsa_indexer.merge_topk(bench.x(5, 40, dtype="fp32"), bench.x(5, 40, dtype="int32"), 10)
        )
        work = call.op.work(call)
        assert call.outputs[0].shape == (5, 10)
        assert work.flops == 4 * 200
        assert work.bytes == 4 * 200 + 4 * 200 + 4 * 50


class TestAttention:
    @staticmethod
    def run(
        s: Latent, V: int, lengths: Lengths, *, topk: int | None, phase: str, cache: AttentionAction = "DISABLED",
        shards: int = 1, buffer: int = 1000,
    ) -> OpCall:  # fmt: skip
        bench = Bench()
        T, row_bytes = lengths.tokens, CACHES[cache].latent_row_bytes
        kv_b = bench.plain(s.H * (s.N + V), s.R)
        own = attention.AttentionSizes(s.H, s.N, s.P, s.R, V, CACHES[cache], 1.0, topk, shards)
        ids = None if topk is None else bench.x(T, min(topk, int(lengths.longest)), dtype="int32")
        return bench.call(
            lambda: attention.multihead_latent_attention(
                bench.x(T, s.H, s.N + s.P), bench.cache(buffer, row_bytes), ids, bench.x(1, 1, dtype="int32"),
                bench.x(1, dtype="int32"), kv_b, own, lengths, phase=phase, quantized=cache != "DISABLED",
            )
        )  # fmt: skip

    @staticmethod
    def seen(lengths: Lengths) -> list[int]:
        return [
            int(segment.context) + i + 1
            for segment in lengths.classes
            for _ in range(int(segment.count))
            for i in range(int(segment.query))
        ]

    @pytest.mark.property
    @pytest.mark.parametrize("cache", ATTENTION_ACTIONS)
    @given(
        s=latents, V=st.integers(1, 40), lengths=batches(), K=st.integers(1, 60),
        phase=st.sampled_from(["prefill", "decode"]),
    )  # fmt: skip
    def test_sparse(self, cache: AttentionAction, s: Latent, V: int, lengths: Lengths, K: int, phase: str) -> None:
        call = self.run(s, V, lengths, topk=K, phase=phase, cache=cache)
        work, T = call.op.work(call), lengths.tokens
        rows = sum(min(K, seen) for seen in self.seen(lengths))
        # q_nope into the latent space, scores over latent and rope, the weighted sum of latents, and values out of it.
        per_token = 2 * s.H * (s.N * s.R + s.R * V)
        per_row = 2 * s.H * (s.R + s.P) + 2 * s.H * s.R
        assert matrix_flops(work) == per_token * T + per_row * rows
        assert vector_flops(work) == 5 * s.H * rows
        gather = parts_of(work)["kv_gather"]
        assert gather.gather_rows == rows
        assert gather.gather_bytes == rows * {"DISABLED": 1152, "INT8": 656, "FP8": 656}[cache]
        ids = 4 * T * min(K, int(lengths.longest))
        streamed = 2 * T * s.H * (s.N + s.P) + 2 * s.H * (s.N + V) * s.R + 2 * T * s.H * V + ids
        assert work.bytes == streamed + gather.gather_bytes
        assert call.outputs[0].shape == (T, s.H, V)
        assert call.op is (attention.SPARSE if cache == "DISABLED" else attention.SPARSE_QUANT)
        assert call.op.name == "multihead_latent_attention" + ("" if cache == "DISABLED" else "_quant")
        assert call.family == f"sparse_attention_{phase}"

    @pytest.mark.property
    @given(s=latents, V=st.integers(1, 40), lengths=batches())
    def test_dense_decode(self, s: Latent, V: int, lengths: Lengths) -> None:
        call = self.run(s, V, lengths, topk=None, phase="decode")
        work, T, pairs = call.op.work(call), lengths.tokens, sum(self.seen(lengths))
        in_cache = sum(int(p.count) * (int(p.context) + int(p.query)) for p in lengths.classes)
        per_token = 2 * s.H * (s.N * s.R + s.R * V)
        per_pair = 2 * s.H * (s.R + s.P) + 2 * s.H * s.R
        assert matrix_flops(work) == per_token * T + per_pair * pairs
        assert vector_flops(work) == 5 * s.H * pairs
        # The rows of a request are streamed once for all its heads.
        assert parts_of(work)["kv_read"].bytes == 1152 * in_cache
        assert work.bytes == 1152 * in_cache + 2 * T * s.H * (s.N + s.P + V) + 2 * s.H * (s.N + V) * s.R
        assert call.family == "dense_attention_decode"

    @pytest.mark.property
    @given(s=latents, V=st.integers(1, 40), lengths=batches())
    def test_dense_prefill(self, s: Latent, V: int, lengths: Lengths) -> None:
        """Keys and values of all rows are expanded; then every pair costs N + P for its score and V for its value."""
        call = self.run(s, V, lengths, topk=None, phase="prefill")
        work, T, pairs = call.op.work(call), lengths.tokens, sum(self.seen(lengths))
        in_cache = sum(int(p.count) * (int(p.context) + int(p.query)) for p in lengths.classes)
        expanded = in_cache * s.H * (s.N + V)
        assert matrix_flops(work) == 2 * s.R * expanded + 2 * pairs * s.H * (s.N + s.P + V)
        assert vector_flops(work) == 5 * s.H * pairs
        # Expanded rows are written and read once in bf16.
        rows_and_weight = 1152 * in_cache + 2 * s.H * (s.N + V) * s.R
        assert work.bytes == rows_and_weight + 2 * 2 * expanded + 2 * T * s.H * (s.N + s.P + V)
        assert work.workspace_bytes == 2 * expanded
        assert call.family == "dense_attention_prefill"

    @pytest.mark.property
    @given(s=latents, V=st.integers(1, 40), lengths=batches(), K=st.integers(1, 60), dcp=st.sampled_from([2, 4]))
    def test_split_by_token_the_ranks_do_the_work_of_one(
        self, s: Latent, V: int, lengths: Lengths, K: int, dcp: int
    ) -> None:
        """With DCP a rank absorbs its own heads, scores those of its group against its rows, and expands its own."""
        bench, T = Bench(), lengths.tokens
        kv_b = bench.plain(s.H * (s.N + V), s.R)
        own = attention.AttentionSizes(
            s.H * dcp, s.N, s.P, s.R, V, CACHES["DISABLED"], 1.0, topk_limit=K, shards=dcp, absorbs=False
        )
        absorb = bench.call(lambda: attention.absorb_query(bench.x(T, s.H, s.N + s.P), kv_b, own))
        assert absorb.outputs[0].shape == (T, s.H, s.R + s.P)
        core = bench.call(
            lambda: attention.multihead_latent_attention(
                bench.x(T, s.H * dcp, s.R + s.P), bench.cache(1, 1), bench.x(T, K, dtype="int32"),
                bench.x(1, 1, dtype="int32"), bench.x(1, dtype="int32"), kv_b, own, lengths,
                phase="decode", quantized=False,
            )
        )  # fmt: skip
        assert core.outputs[0].shape == (T, s.H * dcp, s.R)
        expand = bench.call(lambda: attention.expand_value(bench.x(T, s.H, s.R), kv_b, own))
        assert expand.outputs[0].shape == (T, s.H, V)
        works = [call.op.work(call) for call in (absorb, core, expand)]
        alone = self.run(s, V, lengths, topk=K, phase="decode")
        assert sum(map(matrix_flops, works)) == pytest.approx(matrix_flops(alone.op.work(alone)))
        assert sum(map(vector_flops, works)) == pytest.approx(vector_flops(alone.op.work(alone)))
        rows = sum(min(K, seen) for seen in self.seen(lengths)) / dcp
        assert parts_of(works[1])["kv_gather"].gather_bytes == pytest.approx(1152 * rows)
        # Each half of kv_b is read by the op that needs it.
        assert works[0].bytes == 2 * (T * s.H * (s.N + s.P) + s.H * s.N * s.R + T * s.H * (s.R + s.P))
        assert works[2].bytes == 2 * (T * s.H * s.R + s.H * V * s.R + T * s.H * V)

    @pytest.mark.property
    @given(s=latents, lengths=batches())
    def test_a_limit_beyond_the_longest_request_selects_what_dense_attention_sees(
        self, s: Latent, lengths: Lengths
    ) -> None:
        sparse = self.run(s, 8, lengths, topk=10**6, phase="decode")
        dense = self.run(s, 8, lengths, topk=None, phase="decode")
        assert matrix_flops(sparse.op.work(sparse)) == matrix_flops(dense.op.work(dense))

    @pytest.mark.property
    @given(s=latents, lengths=batches(), buffer=st.integers(1, 10**8))
    def test_the_allocated_buffer_changes_nothing(self, s: Latent, lengths: Lengths, buffer: int) -> None:
        small, large = (
            self.run(s, 8, lengths, topk=5, phase="decode"),
            self.run(s, 8, lengths, topk=5, phase="decode", buffer=buffer),
        )
        assert small.op.work(small) == large.op.work(large)

    @pytest.mark.golden
    def test_decode_of_glm_52_at_64k_on_16_ranks(self) -> None:
        s = Latent(T=1, D=6144, H=4, N=192, P=64, R=512, Q=2048)
        call = self.run(s, 256, uniform(1, 65_536, 1), topk=2048, phase="decode")
        work = call.op.work(call)
        # 2 · 4 heads · (192 · 512 + 512 · 256) a token; 2 · 4 · (576 + 512) a row
        assert matrix_flops(work) == 1_835_008 + 17_825_792
        assert parts_of(work)["kv_gather"].gather_bytes == 2048 * 1152

    def test_ids_and_limit_belong_together(self) -> None:
        bench = Bench()
        own = attention.AttentionSizes(1, 2, 2, 4, 2, CACHES["DISABLED"], 1.0, 16)
        with pytest.raises(AssertionError, match="top-k"):
            attention.multihead_latent_attention(
                bench.x(1, 1, 4), bench.cache(1, 1), None, bench.x(1, 1), bench.x(1), bench.plain(4, 4), own,
                uniform(1, 0, 1), phase="decode", quantized=False,
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Experts:
    T: int
    D: int
    E: int
    K: int
    I: int  # noqa: E741
    touched: float


expert_sizes = st.builds(
    Experts,
    T=st.integers(1, 60),
    D=st.integers(1, 90),
    E=st.integers(8, 64),
    K=st.integers(1, 8),
    I=st.integers(1, 50),
    touched=st.floats(0, 80),
)


class TestMoe:
    @pytest.mark.property
    @given(s=expert_sizes, groups=st.sampled_from([1, 8]), own=st.integers(8, 64), appended=st.sampled_from([0, 1]))
    def test_gate(self, s: Experts, groups: int, own: int, appended: int) -> None:
        bench, E = Bench(), groups * own
        router = replace(model().moe, n_routed_experts=E, num_experts_per_tok=s.K, n_group=groups)
        call = bench.call(
            lambda: moe.moe_gate(
                bench.x(s.T, s.D), bench.plain(E, s.D, dtype="fp32"), bench.plain(E, dtype="fp32"),
                router, appended=appended,
            )
        )  # fmt: skip
        work = call.op.work(call)
        scores, select = work.parts
        assert scores.matrix_flops == 2 * s.T * s.D * E
        # fp32 gate
        assert scores.matrix_dtype == "fp32"
        assert scores.bytes == 2 * s.T * s.D + 4 * E * s.D
        # Sigmoid 3 and bias 1 a score, a pass over the scores and 3 more per choice; groups add up two scores.
        group_sums = 2 * E if groups > 1 else 0
        assert select.vector_flops == s.T * (4 * E + s.K * E + 3 * s.K + group_sums)
        chosen = s.K + appended
        assert select.bytes == s.T * chosen * (4 + 4)
        assert [output.shape for output in call.outputs] == [(s.T, chosen)] * 2

    @pytest.mark.property
    @given(s=expert_sizes)
    def test_permutation_and_its_inverse(self, s: Experts) -> None:
        bench = Bench()
        chosen = bench.x(s.T, s.K, dtype="int32")
        call = bench.call(lambda: moe.moe_permute(bench.x(s.T, s.D), chosen, s.E))
        rows, order, counts = call.outputs
        assert (rows.shape, rows.dtype) == ((s.T * s.K, s.D), "bf16")
        # Which copy each row is, and how many rows each expert gets.
        assert (order.shape, order.dtype) == ((s.T * s.K,), "int32")
        assert (counts.shape, counts.dtype) == ((s.E,), "int32")
        read, written = 2 * s.T * s.D + 4 * s.T * s.K, 2 * s.T * s.K * s.D + 4 * s.T * s.K + 4 * s.E
        assert call.op.work(call).bytes == read + written
        weights = bench.x(s.T, s.K, dtype="fp32")
        call = bench.call(lambda: moe.moe_unpermute(bench.x(s.T * s.K, s.D), weights, order))
        assert call.outputs[0].shape == (s.T, s.D)
        # Rows, a weight and a place for each, and the sums.
        assert call.op.work(call).bytes == 2 * s.T * s.K * s.D + (4 + 4) * s.T * s.K + 2 * s.T * s.D
        # Multiply and add a copy.
        assert call.op.work(call).flops == 2 * s.T * s.K * s.D

    @pytest.mark.property
    @given(s=expert_sizes, rows=st.integers(1, 300), action=actions)
    def test_grouped_matmul(self, s: Experts, rows: int, action: LinearAction) -> None:
        bench = Bench()
        weight = bench.weight(s.E, s.D, s.I, action=action)
        x = bench.activations(rows, s.I, action)
        call = bench.call(lambda: moe.grouped_matmul(x, weight, bench.x(s.E, dtype="int32"), s.touched))
        work = call.op.work(call)
        assert call.op.name == "grouped_matmul" + ("" if action == "DISABLED" else "_quant")
        assert work.flops == matrix_flops(work) == 2 * rows * s.I * s.D
        # Only the experts that got rows are read, and each of them once.
        read = min(s.touched, s.E) * stored_bytes(action, s.D, s.I)
        assert work.bytes == pytest.approx(
            rows * s.I * STORED[action][1] + activation_scale_bytes(action, rows, s.I) + read + 2 * rows * s.D
        )

    @pytest.mark.property
    @given(s=expert_sizes, rows=st.integers(1, 300), action=actions)
    def test_grouped_matmul_with_swiglu(self, s: Experts, rows: int, action: LinearAction) -> None:
        bench = Bench()
        weight = bench.weight(s.E, 2 * s.I, s.D, action=action)
        x = bench.activations(rows, s.D, action)
        call = bench.call(lambda: moe.grouped_matmul_swiglu(x, weight, bench.x(s.E, dtype="int32"), s.touched))
        work = call.op.work(call)
        assert call.op.name == "grouped_matmul" + ("" if action == "DISABLED" else "_quant") + "_swiglu"
        assert matrix_flops(work) == 2 * rows * s.D * 2 * s.I
        read = min(s.touched, s.E) * stored_bytes(action, 2 * s.I, s.D)
        scales = activation_scale_bytes(action, rows, s.D) + activation_scale_bytes(action, rows, s.I)
        # The product stays on chip; what leaves is (R, I) in the format that the next product takes.
        assert work.bytes == pytest.approx(rows * (s.D + s.I) * STORED[action][1] + scales + read)
        assert vector_flops(work) == rows * s.I * (5 + quantise_operations(action))
        assert call.outputs[0].shape == (rows, s.I)

    @pytest.mark.property
    @given(T=sizes, I=sizes)
    def test_swiglu(self, T: int, I: int) -> None:  # noqa: E741
        bench = Bench()
        call = bench.call(lambda: moe.swiglu(bench.x(T, 2 * I)))
        work = call.op.work(call)
        assert call.outputs[0].shape == (T, I)
        assert work.flops == 5 * T * I
        assert work.bytes == 2 * T * 3 * I


class TestExpertsTouched:
    @pytest.mark.numerics
    @pytest.mark.parametrize(("experts", "per_token", "local"), [(256, 8, 16), (256, 8, 256), (16, 4, 2), (8, 8, 8)])
    @pytest.mark.parametrize("num_tokens", [1, 3, 40])
    def test_against_draws(self, experts: int, per_token: int, local: int, num_tokens: int) -> None:
        rng = np.random.default_rng(20260801)
        trials = 400
        touched = np.empty(trials)
        for trial in range(trials):
            chosen = {int(e) for _ in range(num_tokens) for e in rng.choice(experts, size=per_token, replace=False)}
            touched[trial] = sum(expert < local for expert in chosen)
        expected = moe.expected_experts_touched(num_tokens, experts, per_token, local)
        # Five standard errors, and something for experts that hardly any draw misses.
        tolerance = 5 * touched.std() / np.sqrt(trials) + 1e-3
        assert abs(touched.mean() - cast(float, expected)) <= tolerance

    @pytest.mark.property
    @given(st.integers(1, 10_000), st.sampled_from([1, 16, 256]))
    def test_limits(self, num_tokens: int, local: int) -> None:
        found = cast(float, moe.expected_experts_touched(num_tokens, 256, 8, local))
        assert found <= local
        # No more than there are choices.
        assert found <= num_tokens * 8 * local / 256 * (1 + 1e-12)
        assert found <= cast(float, moe.expected_experts_touched(num_tokens + 1, 256, 8, local))

    @pytest.mark.golden
    def test_values(self) -> None:
        assert moe.expected_experts_touched(1, 256, 8, 256) == pytest.approx(8)
        # 256 · (1 − (248/256)^32)
        assert moe.expected_experts_touched(32, 256, 8, 256) == pytest.approx(163.3, abs=0.1)
        assert moe.expected_experts_touched(0, 256, 8, 256) == 0

    def test_array(self) -> None:
        counts = np.array([1, 2, 50])
        found = moe.expected_experts_touched(counts, 256, 8, 16)
        singles = [moe.expected_experts_touched(int(n), 256, 8, 16) for n in counts]
        assert np.asarray(found).tolist() == pytest.approx(singles)


class TestEnds:
    def test_embedding(self) -> None:
        bench = Bench()
        call = bench.call(lambda: tokens.embedding(bench.x(6, dtype="int32"), bench.plain(1000, 32)))
        assert call.outputs[0].shape == (6, 32)
        # Rows are read and written, whatever the size of the table.
        assert call.op.work(call).bytes == 2 * 2 * 6 * 32

    def test_select_rows(self) -> None:
        bench = Bench()
        call = bench.call(lambda: tokens.select_rows(bench.x(4096, 32), 3))
        assert call.outputs[0].shape == (3, 32)
        assert call.op.work(call).bytes == 2 * 2 * 3 * 32

    def test_concat(self) -> None:
        bench = Bench()
        call = bench.call(lambda: tokens.concat(bench.x(4, 32), bench.x(4, 16)))
        assert call.outputs[0].shape == (4, 48)
        assert call.op.work(call).bytes == 2 * 2 * 4 * 48

    def test_sample(self) -> None:
        bench = Bench()
        call = bench.call(lambda: tokens.sample(bench.x(4, 1000)))
        work = call.op.work(call)
        assert call.outputs[0].shape == (4,)
        assert call.outputs[0].dtype == "int32"
        assert (work.flops, work.bytes) == (4000, 8000)


group_sizes = st.integers(2, 64)


class TestCollectives:
    """`bytes` of a collective: what all ranks end with (all_gather), start with (reduce_scatter), or send."""

    @staticmethod
    def message(run: Callable[[Bench], Any]) -> tuple[OpCall, Collective]:
        bench = Bench()
        call = bench.call(lambda: run(bench))
        work = call.op.work(call)
        assert work.parts == ()
        (collective,) = work.collectives
        return call, collective

    @pytest.mark.property
    @given(T=sizes, D=sizes, n=group_sizes)
    def test_all_reduce(self, T: int, D: int, n: int) -> None:
        group = Group("tp", n)
        call, collective = self.message(lambda bench: collectives.all_reduce(bench.x(T, D), group))
        assert collective == Collective("all_reduce", 2 * T * D, group)
        assert call.outputs[0].shape == (T, D)

    @pytest.mark.property
    @given(T=sizes, D=sizes, n=group_sizes, axis=st.sampled_from([0, 1]))
    def test_all_gather(self, T: int, D: int, n: int, axis: int) -> None:
        group = Group("tp", n)
        call, collective = self.message(lambda bench: collectives.all_gather(bench.x(T, D), group, axis=axis))
        assert collective == Collective("all_gather", 2 * T * D * n, group)
        assert call.outputs[0].shape == ((T * n, D) if axis == 0 else (T, D * n))

    @pytest.mark.property
    @given(T=sizes, D=sizes, n=group_sizes)
    def test_reduce_scatter(self, T: int, D: int, n: int) -> None:
        group = Group("tp", n)
        call, collective = self.message(lambda bench: collectives.reduce_scatter(bench.x(T, D), group))
        assert collective == Collective("reduce_scatter", 2 * T * D, group)
        # The last rank's piece is padded.
        assert call.outputs[0].shape == (ceil(T / n), D)

    @pytest.mark.property
    @given(sent=sizes, held=sizes, D=sizes, n=group_sizes, dtype=st.sampled_from(["bf16", "int8"]))
    def test_all_to_all(self, sent: int, held: int, D: int, n: int, dtype: str) -> None:
        group = Group("ep", n, 4)
        call, collective = self.message(
            lambda bench: collectives.all_to_all(bench.x(sent, D, dtype=dtype), group, shape=(held, D))
        )
        # A rank that receives more than it sends is as busy as what it receives.
        assert collective == Collective("all_to_all", max(sent, held) * D * (2 if dtype == "bf16" else 1), group)
        assert call.outputs[0].shape == (held, D)
        assert call.outputs[0].dtype == dtype

    def test_send_recv(self) -> None:
        group = Group("pp", 2, 16)
        call, collective = self.message(lambda bench: collectives.send_recv(bench.x(7, 9), group))
        assert collective == Collective("send_recv", 2 * 63, group)
        assert call.outputs[0].shape == (7, 9)

    def test_none_in_a_group_of_one(self) -> None:
        bench, alone = Bench(), Group("tp", 1)
        x = bench.x(6, 4)
        results: list[Abstract] = []

        def run() -> None:
            results.append(collectives.all_reduce(x, alone))
            results.append(collectives.all_gather(x, alone, axis=1))
            results.append(collectives.reduce_scatter(x, alone))
            results.append(collectives.all_to_all(x, alone, shape=(3, 8)))
            results.append(collectives.split_tokens(x, alone))

        assert bench.calls(run) == []
        assert [result.value for result in results] == [x.value] * 5
        assert [result.shape for result in results] == [(6, 4), (6, 4), (6, 4), (3, 8), (6, 4)]

    def test_a_split_moves_nothing(self) -> None:
        bench = Bench()
        x = bench.x(10, 4)
        assert bench.calls(lambda: collectives.split_tokens(x, Group("tp", 4))) == []
        piece = collectives.split_tokens(x, Group("tp", 4))
        assert (piece.shape, piece.value) == ((3, 4), x.value)

    @pytest.mark.property
    @given(T=sizes, I=sizes, O=sizes, n=group_sizes, action=actions)
    def test_matmul_all_reduce_is_a_matmul_and_an_all_reduce(
        self, T: int, I: int, O: int, n: int, action: LinearAction  # noqa: E741
    ) -> None:  # fmt: skip
        bench, group = Bench(), Group("tp", n)
        weight = bench.weight(O, I, action=action)
        x = bench.activations(T, I, action)
        fused = bench.work(lambda: collectives.matmul_all_reduce(x, weight, group))
        plain = bench.calls(lambda: collectives.all_reduce(linear.linear(x, weight), group))
        product, reduction = (call.op.work(call) for call in plain)
        assert fused.parts == product.parts
        assert fused.collectives == reduction.collectives

    @pytest.mark.property
    @given(
        s=expert_sizes, rows=st.integers(1, 300), local_rows=st.integers(1, 300), n=group_sizes,
        action=actions,
    )  # fmt: skip
    def test_dispatch_ffn_combine_is_the_sum_of_its_parts(
        self, s: Experts, rows: int, local_rows: int, n: int, action: LinearAction
    ) -> None:
        """Rows that travel in the experts' format: dispatch, two products with SwiGLU between, combine."""
        bench, group = Bench(), Group("ep", n)
        gate_up = bench.weight(s.E, 2 * s.I, s.D, action=action)
        down = bench.weight(s.E, s.D, s.I, action=action)
        x = bench.activations(rows, s.D, action)
        fused = bench.work(lambda: collectives.dispatch_ffn_combine(x, gate_up, down, s.touched, local_rows, group))

        def unfused() -> None:
            mine = bench.activations(local_rows, s.D, action)
            collectives.on_parts(lambda rows: collectives.all_to_all(rows, group, shape=(local_rows, s.D)), x)
            counts = bench.x(s.E, dtype="int32")
            hidden = moe.grouped_matmul_swiglu(mine, gate_up, counts, s.touched)
            out = moe.grouped_matmul(hidden, down, counts, s.touched)
            collectives.all_to_all(out, group, shape=(rows, s.D))

        works = [call.op.work(call) for call in bench.calls(unfused)]
        assert tuple(filter(does_something, fused.parts)) == tuple(part for work in works for part in work.parts)
        assert fused.collectives == tuple(message for work in works for message in work.collectives)

    def test_dispatch_ffn_combine_quantises_rows_that_arrive_in_bf16(self) -> None:
        bench, group = Bench(), Group("ep", 4)
        gate_up, down = (bench.weight(8, *shape, action="W8A8_DYNAMIC") for shape in ((32, 24), (24, 16)))
        fused = bench.work(lambda: collectives.dispatch_ffn_combine(bench.x(10, 24), gate_up, down, 8, 12, group))
        # 4 a value of the 12 rows that arrive, 5 + 4 a value of the SwiGLU's result.
        assert vector_flops(fused) == 12 * 24 * 4 + 12 * 16 * 9


class TestArrays:
    """An op that is given arrays does what it does for each entry alone."""

    COUNTS = np.array([1, 3, 8])
    CONTEXTS = np.array([0, 40, 5000])

    def check(self, run: Callable[[Dim, Dim], Work]) -> None:
        together = run(self.COUNTS, self.CONTEXTS)
        for index, (count, context) in enumerate(zip(self.COUNTS.tolist(), self.CONTEXTS.tolist(), strict=True)):
            alone = run(count, context)
            for ours, single in zip(together.parts, alone.parts, strict=True):
                for name in ("matrix_flops", "vector_flops", "bytes", "gather_bytes", "gather_rows"):
                    entries = np.broadcast_to(getattr(ours, name), 3)
                    assert entries[index] == pytest.approx(getattr(single, name), rel=1e-12), (ours.name, name)
            for sent, message in zip(together.collectives, alone.collectives, strict=True):
                assert np.broadcast_to(sent.bytes, 3)[index] == pytest.approx(message.bytes, rel=1e-12)

    def test_indexer(self) -> None:
        s = Index(D=20, Q=10, H=4, E=16, P=8, K=60)

        def run(count: Dim, context: Dim) -> Work:
            call = Indexer(s, Lengths((RequestClass(count, context, 4),)), "FP8").select()
            return call.op.work(call)

        self.check(run)

    @pytest.mark.parametrize(("topk", "phase"), [(60, "decode"), (None, "decode"), (None, "prefill")])
    def test_attention(self, topk: int | None, phase: str) -> None:
        def run(count: Dim, context: Dim) -> Work:
            bench, lengths = Bench(), Lengths((RequestClass(count, context, 4),))
            own = attention.AttentionSizes(2, 4, 2, 8, 6, CACHES["DISABLED"], 1.0, topk)
            ids = None if topk is None else bench.x(lengths.tokens, topk, dtype="int32")
            return bench.work(
                lambda: attention.multihead_latent_attention(
                    bench.x(lengths.tokens, 2, 6), bench.cache(1, 1), ids, bench.x(1, 1), bench.x(1),
                    bench.plain(20, 8), own, lengths, phase=phase, quantized=False,
                )
            )  # fmt: skip

        self.check(run)

    def test_experts_and_collectives(self) -> None:
        def run(count: Dim, _: Dim) -> Work:
            bench = Bench()
            gate_up, down = bench.weight(8, 32, 24), bench.weight(8, 24, 16)
            rows = count * 4
            touched = moe.expected_experts_touched(count, 32, 4, 8)
            return bench.work(
                lambda: collectives.dispatch_ffn_combine(
                    bench.x(rows, 24), gate_up, down, touched, rows / 2, Group("ep", 4)
                )
            )

        self.check(run)


def test_a_format_that_quantises_nothing_is_plain() -> None:
    """DISABLED weights behave as weights without a format."""
    form = LinearFormat("DISABLED", "bf16", "bf16", False)
    bench = Bench()
    disabled = Weight(bench.recorder.tensor(8, 16, kind="weight"), 0, form)
    plain = bench.plain(8, 16)
    first, second = (bench.call(lambda w=w: linear.linear(bench.x(4, 16), w)) for w in (disabled, plain))  # type: ignore[misc]
    assert first.op is second.op
    assert first.op.work(first) == second.op.work(second)
