"""The peak of activations and scratch memory, by hand and in sum."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from castoff import cast
from castoff.casting.footprint import peak_activation_bytes
from castoff.ops.program import Abstract, Op, Recorder
from castoff.ops.work import Work
from tests.casting.footprints import H200, step_of, with_memory
from tests.casting.strategies import cast_step, scenario
from tests.generators import ASCEND, DEEPSEEK_V3, GLM_52, device, model


class TestActivations:
    prefill = {"num_devices": 16, "tp_size": 16, "ep_size": 16, "compile": True}  # noqa: RUF012

    def peak(self, **values: object) -> float:
        return float(step_of(**{**self.prefill, **values}).footprint.activation_bytes)

    def test_prefill_peak_grows_with_the_chunk(self) -> None:
        peaks = [self.peak(query_length=chunk) for chunk in (1, 64, 512, 4096, 16_384)]
        assert peaks[0] > 0
        assert peaks == sorted(set(peaks))
        # Nearly in proportion once the chunk is long.
        assert peaks[-1] == pytest.approx(4 * peaks[-2], rel=0.01)

    def test_a_chunk_holds_its_hidden_state_and_residual(self) -> None:
        assert self.peak(query_length=4096) >= 2 * 4096 * 6144 * 2

    def test_the_logits_of_a_large_decode(self) -> None:
        # One bf16 row of the whole vocabulary per request, gathered over the TP group.
        assert self.peak(num_queries=4096) >= 4096 * 154_880 * 2

    def test_expert_rows(self) -> None:
        # A rank of EP 16 without TP dispatches 8 copies of each of its tokens.
        peak = self.peak(tp_size=1, num_queries=16, query_length=4096)
        assert peak >= 8 * 4096 * 6144 * 2

    def test_dense_prefill_expands_keys_and_values(self) -> None:
        # 128 heads of 128 key and 128 value dims for each cached token, in bf16; one new token needs little else.
        step = step_of(on=H200, spec_name=DEEPSEEK_V3, query_length=1, context_length=99_999)
        expanded = 100_000 * 128 * (128 + 128) * 2
        assert expanded <= step.footprint.activation_bytes <= 1.01 * expanded

    def test_context_alone_adds_little(self) -> None:
        short, long = (
            self.peak(query_length=4096, context_length=4096),
            self.peak(query_length=4096, context_length=10**6),
        )
        assert short <= long < 1.05 * short


def made(*inputs: Abstract | None, bytes: int, workspace: int = 0) -> Abstract:
    """A tensor of so many bytes, made from `inputs` by an op that needs so much scratch memory."""
    op = Op("op", "elementwise", lambda *_: (((bytes,), "int8"),), lambda call: Work(workspace_bytes=workspace))
    return op(*inputs)[0]


class TestPeakByHand:
    @staticmethod
    def peak(body: Callable[[Abstract], Sequence[Abstract | None]], *, given: int = 100) -> object:
        recorder = Recorder()
        recorder.block("block", "block", lambda x: tuple(body(x)), recorder.tensor(given, dtype="int8"))
        return peak_activation_bytes(recorder.program)

    def test_a_value_lives_until_its_last_reader(self) -> None:
        assert self.peak(lambda x: [made(made(x, bytes=50), bytes=30)]) == 150
        assert self.peak(lambda x: [made(made(x, bytes=50), bytes=130)]) == 180

    def test_a_result_lives_until_the_end(self) -> None:
        assert self.peak(lambda x: [x, made(made(x, bytes=50), bytes=30)]) == 180

    def test_an_input_lives_from_the_start(self) -> None:
        def body(x: Abstract) -> Sequence[Abstract]:
            first = made(x.recorder.tensor(7, dtype="int8"), bytes=40)
            return [made(first, x, bytes=1)]

        assert self.peak(body) == 100 + 7 + 40

    def test_a_result_that_nobody_reads(self) -> None:
        def body(x: Abstract) -> Sequence[Abstract]:
            made(x, bytes=500)
            return [made(x, bytes=10)]

        assert self.peak(body) == 600

    def test_scratch_memory_is_of_one_op(self) -> None:
        assert self.peak(lambda x: [made(made(x, bytes=50, workspace=1000), bytes=30, workspace=900)]) == 1150

    def test_a_view_is_no_copy_and_keeps_the_whole_buffer(self) -> None:
        assert self.peak(lambda x: [made(x.view(10, 10), x, bytes=50)]) == 150
        assert self.peak(lambda x: [made(x.view(20), bytes=50)]) == 150

    def test_weights_and_caches_are_counted_elsewhere(self) -> None:
        def body(x: Abstract) -> Sequence[Abstract]:
            weight = x.recorder.tensor(10**6, kind="weight")
            return [made(x, weight, x.recorder.tensor(10**6, kind="cache"), bytes=50)]

        assert self.peak(body) == 150

    def test_the_fullest_block(self) -> None:
        recorder = Recorder()
        x: Abstract | None = recorder.tensor(100, dtype="int8")
        for size in (10, 300, 20):
            (x,) = recorder.block(str(size), "layer", lambda x, size=size: (made(x, bytes=size),), x)
        assert peak_activation_bytes(recorder.program) == 300 + 20

    def test_per_scenario(self) -> None:
        recorder = Recorder()
        sizes = np.array([10.0, 400.0])

        def body(x: Abstract) -> tuple[Abstract]:
            op = Op("op", "elementwise", lambda x: ((x.shape, "int8"),), lambda call: Work(workspace_bytes=200 - sizes))
            return op(x)

        recorder.block("block", "block", body, recorder.tensor(sizes, dtype="int8"))
        np.testing.assert_array_equal(peak_activation_bytes(recorder.program), [20 + 190, 800 - 200])


class TestTotals:
    def test_used_is_the_sum_of_the_parts(self) -> None:
        memory = step_of(num_devices=16, tp_size=16, ep_size=16, context_length=9999, reserved_memory_gb=3).footprint
        parts = [
            memory.weights_bytes, memory.kv_bytes, memory.indexer_cache_bytes, memory.metadata_bytes,
            memory.activation_bytes, memory.communication_bytes, memory.reserved_bytes,
        ]  # fmt: skip
        assert memory.used_bytes == pytest.approx(sum(float(part) for part in parts))
        assert memory.free_bytes == memory.device_bytes_capacity - memory.used_bytes
        assert (memory.pool_bytes, memory.selection_bytes, memory.host_kv_bytes) == (0, 0, 0)
        assert memory.reserved_bytes == 3 * 2**30
        assert memory.device_bytes_capacity == 64 * 2**30

    def test_metadata(self) -> None:
        # Block tables of 128 tokens, lengths and slots, int32; half a head of cos and sin for 2**20 positions, bf16.
        memory = step_of(num_devices=16, tp_size=16, num_queries=3, context_length=1000, num_mtp_tokens=1).footprint
        assert memory.metadata_bytes == 4 * (3 * 8 + 3 + 3 * 2) + 2**20 * 64 * 2

    def test_communication_buffers_need_peers(self) -> None:
        assert step_of(on=H200).footprint.communication_bytes == 0
        assert step_of(on=H200, num_devices=2, tp_size=2).footprint.communication_bytes == 411_041_792
        assert step_of(num_devices=2, tp_size=2).footprint.communication_bytes == 4 * 200 * 2**20

    @pytest.mark.parametrize("more", [-1, 0, 1])
    def test_fits_to_the_byte(self, more: int) -> None:
        step = scenario(num_devices=16, tp_size=16, ep_size=16, num_queries=3, context_length=65_536)
        used = cast_step(model(GLM_52), device(ASCEND), step).footprint.used_bytes
        assert float(used).is_integer()
        where = with_memory(device(ASCEND), int(used) + more)
        assert cast(model(GLM_52), where, step).fits is (more >= 0)
