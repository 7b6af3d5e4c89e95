"""Recording: blocks and their repetition, values and views, streams, stages."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from castoff.ops.program import MAIN, Abstract, Block, Op, OpCall, Program, Recorder, Shapes
from castoff.ops.work import Part, Work


def _double_shapes(x: Abstract, *_: Abstract | None, times: int = 1) -> Shapes:
    return ((x.shape, x.dtype),) * times


def _double_work(call: OpCall) -> Work:
    return Work((Part("double", vector_flops=call.tensor(0).elements),))


DOUBLE = Op("double", "elementwise", _double_shapes, _double_work)
FORGET = Op("forget", "elementwise", lambda x: (), lambda call: Work())


def double(x: Abstract | None, **attributes: Any) -> Abstract:
    return DOUBLE(x, **attributes)[0]


def twice(x: Abstract | None) -> tuple[Abstract | None, ...]:
    return (double(double(x)),)


class TestAbstract:
    @pytest.mark.parametrize(
        ("dtype", "bytes_each"),
        [
            ("fp32", 4),
            ("int32", 4),
            ("bf16", 2),
            ("fp16", 2),
            ("int8", 1),
            ("fp8", 1),
            ("e8m0", 1),
            ("int4", 0.5),
            ("fp4", 0.5),
        ],
    )
    def test_bytes(self, dtype: str, bytes_each: float) -> None:
        tensor = Recorder().tensor(3, 5, 7, dtype=dtype)
        assert tensor.elements == 105
        assert tensor.bytes == 105 * bytes_each

    def test_a_scalar_has_one_element(self) -> None:
        assert Recorder().tensor(dtype="fp32").bytes == 4

    def test_dims_may_be_arrays(self) -> None:
        tensor = Recorder().tensor(np.array([1, 2, 3]), 8)
        assert np.asarray(tensor.bytes).tolist() == [16, 32, 48]

    def test_every_tensor_has_a_value_of_its_own(self) -> None:
        recorder = Recorder()
        assert len({recorder.tensor(1).value for _ in range(10)}) == 10

    def test_a_view_is_the_same_buffer(self) -> None:
        recorder = Recorder()
        cache = recorder.tensor(4, 6, dtype="int8", kind="cache", tier="host")
        view = cache.view(24)
        assert view.shape == (24,)
        assert (view.value, view.dtype, view.kind, view.tier, view.recorder) == (
            cache.value, "int8", "cache", "host", recorder
        )  # fmt: skip
        assert cache.shape == (4, 6)


class TestRecording:
    def test_a_call_keeps_inputs_attributes_and_results(self) -> None:
        recorder = Recorder()
        x = recorder.tensor(2, 3)
        recorder.block("b", "b", lambda x: DOUBLE(x, None, times=2), x)
        (call,) = recorder.program.blocks[0].calls
        assert call.op is DOUBLE
        assert call.inputs == (x, None)
        assert call.attributes == {"times": 2}
        assert [output.shape for output in call.outputs] == [(2, 3), (2, 3)]
        assert call.outputs[0].value != call.outputs[1].value
        assert call.input_shapes == ((2, 3),)
        assert call.tensor(0) is x
        assert call.op.work(call).flops == 6
        with pytest.raises(AssertionError, match="double: input 1 is missing"):
            call.tensor(1)

    def test_an_op_may_have_no_result(self) -> None:
        recorder = Recorder()
        recorder.block("b", "b", lambda x: FORGET(x), recorder.tensor(1))
        assert [call.outputs for _, call in recorder.program.calls()] == [()]

    def test_an_op_without_an_abstract_tensor_is_computed(self) -> None:
        given: list[Any] = []

        def reference(*inputs: Any, **attributes: Any) -> tuple[str]:
            given.append((inputs, attributes))
            return ("computed",)

        op = replace(DOUBLE, reference=reference)
        real = SimpleNamespace(is_cpu=True)
        assert op(real, None, times=2) == ("computed",)
        assert given == [((real, None), {"times": 2})]

    def test_an_op_with_one_abstract_tensor_is_recorded_and_not_computed(self) -> None:
        def reference(*_: Any, **__: Any) -> tuple[Any, ...]:
            raise AssertionError("computed")

        recorder, op = Recorder(), replace(DOUBLE, reference=reference)
        recorder.block("b", "b", lambda x: op(x, None), recorder.tensor(1))
        assert [call.op for _, call in recorder.program.calls()] == [op]

    def test_an_op_that_can_only_be_cast_says_so(self) -> None:
        with pytest.raises(NotImplementedError, match="double can be cast, and cannot be run yet"):
            DOUBLE(None)

    def test_an_op_outside_a_block_is_an_error(self) -> None:
        with pytest.raises(AssertionError, match="double was called outside a block"):
            double(Recorder().tensor(1))

    def test_blocks_do_not_nest(self) -> None:
        recorder = Recorder()

        def outer(x: Abstract) -> tuple[Abstract | None, ...]:
            return recorder.block("inner", "inner", twice, x)

        with pytest.raises(AssertionError, match="blocks do not nest"):
            recorder.block("outer", "outer", outer, recorder.tensor(1))

    def test_a_body_that_fails_leaves_no_open_block(self) -> None:
        recorder = Recorder()

        def failing(x: Abstract) -> tuple[Abstract | None, ...]:
            raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            recorder.block("b", "b", failing, recorder.tensor(1))
        recorder.block("b", "b", twice, recorder.tensor(1))
        assert [entry.label for entry in recorder.program.schedule] == ["b"]

    @pytest.mark.parametrize(("phase", "family"), [(None, "elementwise"), ("decode", "elementwise_decode")])
    def test_the_phase_is_part_of_the_cost_family(self, phase: str | None, family: str) -> None:
        call = OpCall(DOUBLE, (), (), {} if phase is None else {"phase": phase}, MAIN)
        assert call.family == family


def chain(recorder: Recorder, keys: list[str], body: Callable[..., Any] = twice) -> Program:
    """Blocks in a row, each fed by the one before."""
    x: Abstract | None = recorder.tensor(5)
    for index, key in enumerate(keys):
        (x,) = recorder.block(key, f"{key} {index}", body, x)
    return recorder.program


KEYS = ["a", "b", "b", "a", "b"]


class TestRepetition:
    def test_equal_blocks_are_recorded_once(self) -> None:
        program = chain(Recorder(), KEYS)
        assert [block.key for block in program.blocks] == ["a", "b"]
        assert [entry.block.key for entry in program.schedule] == KEYS

    def test_without_repetition_every_block_is_its_own(self) -> None:
        program = chain(Recorder(repeat=False), KEYS)
        assert [block.key for block in program.blocks] == KEYS
        assert len({entry.block for entry in program.schedule}) == len(KEYS)

    @pytest.mark.parametrize("repeat", [True, False])
    def test_the_schedule_shows_every_call_in_order(self, repeat: bool) -> None:
        program = chain(Recorder(repeat=repeat), KEYS)
        assert [entry.label for entry in program.schedule] == ["a 0", "b 1", "b 2", "a 3", "b 4"]
        assert [entry.label for entry, _ in program.calls()] == [
            label for entry in program.schedule for label in [entry.label] * 2
        ]

    @pytest.mark.parametrize("repeat", [True, False])
    def test_values_flow_from_block_to_block(self, repeat: bool) -> None:
        program = chain(Recorder(repeat=repeat), KEYS)
        for before, after in pairwise(program.schedule):
            assert before.outputs == after.inputs
        produced = [value for entry in program.schedule for value in entry.outputs]
        assert len(set(produced)) == len(produced)

    def test_a_repeated_block_gives_results_of_the_same_shape_and_dtype(self) -> None:
        recorder = Recorder()
        results: list[Abstract | None] = []
        for _ in range(2):
            results += recorder.block("b", "b", lambda x: (DOUBLE(x)[0].view(3, 2),), recorder.tensor(6, dtype="fp8"))
        first, second = results
        assert first is not None
        assert second is not None
        assert (first.shape, first.dtype) == (second.shape, second.dtype) == ((3, 2), "fp8")
        assert first.value != second.value

    @pytest.mark.parametrize("repeat", [True, False])
    def test_an_input_that_is_passed_through_stays_the_same_value(self, repeat: bool) -> None:
        recorder = Recorder(repeat=repeat)
        topk: Abstract | None = recorder.tensor(4, 8, dtype="int32")
        x: Abstract | None = recorder.tensor(4)
        assert topk is not None
        for _ in range(3):
            x, passed = recorder.block("b", "b", lambda x, topk: (double(x), topk), x, topk)
            assert passed is not None
            assert passed.value == topk.value
            topk = passed
        assert [entry.inputs[1] for entry in recorder.program.schedule] == [topk.value] * 3

    def test_a_result_that_is_not_there_stays_not_there(self) -> None:
        recorder = Recorder()
        for _ in range(2):
            assert recorder.block("b", "b", lambda x: (None,), recorder.tensor(1)) == (None,)
        assert [entry.outputs for entry in recorder.program.schedule] == [(None,), (None,)]

    def test_an_input_that_is_not_there(self) -> None:
        recorder = Recorder()
        recorder.block("b", "b", lambda x, _: twice(x), recorder.tensor(1), None)
        assert recorder.program.schedule[0].inputs[1] is None
        assert next(call.inputs for _, call in recorder.program.calls())[0] is not None

    def test_the_body_of_a_known_block_does_not_run_again(self) -> None:
        ran: list[str] = []

        def body(x: Abstract) -> tuple[Abstract | None, ...]:
            ran.append("once")
            return twice(x)

        chain(Recorder(), ["a", "a", "a"], body)
        assert ran == ["once"]


class TestStreams:
    def test_main_is_always_first(self) -> None:
        recorder = Recorder()

        def body(x: Abstract) -> tuple[Abstract | None, ...]:
            with recorder.on_stream("side"):
                y = double(x)
                with recorder.on_stream("copy"):
                    y = double(y)
                y = double(y)
            return (double(y),)

        recorder.block("b", "b", body, recorder.tensor(1))
        assert [call.stream for _, call in recorder.program.calls()] == ["side", "copy", "side", MAIN]
        assert recorder.program.streams == (MAIN, "side", "copy")

    def test_main_alone(self) -> None:
        assert chain(Recorder(), ["a"]).streams == (MAIN,)
        assert Program().streams == (MAIN,)

    def test_a_failure_gives_the_stream_back(self) -> None:
        recorder = Recorder()

        def fail_on_side(x: Abstract) -> tuple[Abstract | None, ...]:
            with pytest.raises(RuntimeError), recorder.on_stream("side"):
                raise RuntimeError
            return (double(x),)

        recorder.block("b", "b", fail_on_side, recorder.tensor(1))
        assert [call.stream for _, call in recorder.program.calls()] == [MAIN]


class TestStages:
    def test_blocks_carry_the_stage_that_they_were_called_in(self) -> None:
        recorder = Recorder()
        x = recorder.tensor(1)
        recorder.block("a", "0", twice, x)
        recorder.next_stage()
        recorder.block("a", "1", twice, x)
        recorder.block("b", "2", twice, x)
        recorder.next_stage()
        recorder.block("a", "3", twice, x)
        assert [(entry.label, entry.stage) for entry in recorder.program.schedule] == [
            ("0", 0), ("1", 1), ("2", 1), ("3", 2),
        ]  # fmt: skip

    def test_two_recorders_do_not_meet(self) -> None:
        one, other = Recorder(), Recorder()
        chain(one, ["a"])
        assert other.program.schedule == []
        assert one.program.blocks != []
        assert isinstance(one.program.blocks[0], Block)
