"""The work of every op against closed forms, written from the definitions and not from the code.

Axes as in the ops: T tokens, D hidden, I inputs, O outputs, H heads, N qk_nope, P qk_rope, R kv_lora_rank,
V v_head_dim, Q q_lora_rank, E experts or index_head_dim, K experts per token or selected tokens. Bytes per value are
literal: bf16 2, fp32 and int32 4.
"""

import inspect
from collections.abc import Callable
from math import ceil
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.dims import Dim
from castoff.ops import attention, collectives, dsa_indexer, linear, mlapo, moe, norm, table, tokens
from castoff.ops.lengths import Lengths
from castoff.ops.linear import Weight
from castoff.ops.program import Op, OpCall
from castoff.ops.work import Part, Work
from castoff.spec.mesh import Group
from castoff.spec.quant import AttentionAction, LinearAction, LinearFormat, linear_format
from castoff.spec.scenario import RequestClass
from tests.generators import (
    ATTENTION_ACTIONS,
    MXFP4_GROUP,
    STORED,
    scale_bytes,
    stored_bytes,
)
from tests.ops.bench import (
    CACHES,
    DYNAMIC_ACTIONS,
    Bench,
    Index,
    Indexer,
    Latent,
    actions,
    activation_scale_bytes,
    latents,
    matrix_flops,
    parts_of,
    quantise_operations,
    sizes,
    vector_flops,
)


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
    assert first.work.parts == second.work.parts
    assert [kernel.curve for kernel in first.work.kernels] == [kernel.curve for kernel in second.work.kernels]
