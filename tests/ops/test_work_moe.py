"""The work of experts and of collectives against closed forms; axes as in test_work."""

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.ops import collectives, linear, moe
from castoff.ops.program import Abstract, OpCall
from castoff.ops.work import Collective
from castoff.spec.mesh import Group
from castoff.spec.quant import LinearAction
from tests.generators import (
    STORED,
    model,
    stored_bytes,
)
from tests.ops.bench import (
    Bench,
    Experts,
    actions,
    activation_scale_bytes,
    does_something,
    expert_sizes,
    matrix_flops,
    quantise_operations,
    sizes,
    vector_flops,
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
