"""The decode step as one graph: compiled by torch.compile, or captured as a CUDA graph.

Both need calls of equal shapes: the engine fills batches up and gives every block table all its columns. They have the
two calls of a `Decoder`, and the same results up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from types import FunctionType
from typing import Literal, Protocol

import lazy_loader as lazy

from castoff.dims import Dim
from castoff.model.decoder import Decoder, PassOutput
from castoff.model.inputs import OffloadInputs, Selected, StepInputs
from castoff.ops.library import register
from castoff.ops.program import Tensor, op_observer

torch = lazy.load("torch")

GraphMode = Literal["eager", "compile", "cudagraph"]
Outputs = tuple[Tensor | None, ...]


class Passes(Protocol):
    """What an engine calls: a decoder, or a graph of one."""

    def main_pass(self, inputs: StepInputs, *, last: bool) -> PassOutput:
        """All layers and the head."""

    def draft_call(
        self, inputs: StepInputs, hidden_TD: Tensor, reused: Selected, *, draft: int, last: bool
    ) -> PassOutput:
        """One call of the MTP block."""


def decode_passes(decoder: Decoder, mode: GraphMode, join: Callable[[], None]) -> Passes:
    """The decoder itself, or a graph of it.

    join: has main wait for the streams beside it, of which no graph leaves one open.
    """
    match mode:
        case "eager":
            return decoder
        case "compile":
            return _Graphed(decoder, _compiled, join)
        case "cudagraph":
            return _Graphed(decoder, _Captured, join)


class _Graphed:
    def __init__(
        self, decoder: Decoder, graphed: Callable[[Callable[..., Outputs]], Callable[..., Outputs]],
        join: Callable[[], None],
    ) -> None:  # fmt: skip
        self._decoder = decoder
        self._join = join
        self._main = graphed(self._main_tensors)
        self._draft = graphed(self._draft_tensors)

    def main_pass(self, inputs: StepInputs, *, last: bool) -> PassOutput:
        self._join()
        return _output(self._main(*_tensors(inputs), longest=inputs.longest, last=last))

    def draft_call(
        self, inputs: StepInputs, hidden_TD: Tensor, reused: Selected, *, draft: int, last: bool
    ) -> PassOutput:
        self._join()
        given = (hidden_TD, reused.topk_TK, reused.rows_TK)
        return _output(self._draft(*_tensors(inputs), *given, longest=inputs.longest, last=last))

    def _main_tensors(self, *tensors: Tensor | None, longest: Dim, last: bool) -> Outputs:
        output = self._decoder.main_pass(_inputs(tensors, longest), last=last)
        self._join()
        return _outputs(output)

    def _draft_tensors(self, *tensors: Tensor | None, longest: Dim, last: bool) -> Outputs:
        *given, hidden_TD, topk_TK, rows_TK = tensors
        inputs = _inputs(tuple(given), longest)
        output = self._decoder.draft_call(inputs, hidden_TD, Selected(topk_TK, rows_TK), draft=0, last=last)
        self._join()
        return _outputs(output)


def _compiled(function: Callable[..., Outputs]) -> Callable[..., Outputs]:
    register()

    def own(*tensors: Tensor | None, longest: Dim, last: bool) -> Outputs:
        return function(*tensors, longest=longest, last=last)

    # The compiler counts how often it has compiled a code object, and gives up; every engine has one of its own.
    code = own.__code__.replace()
    fresh = FunctionType(code, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    compiled: Callable[..., Outputs] = torch.compile(fresh, fullgraph=True, dynamic=False)
    return compiled


class _Captured:
    """A function captured once per shape of its inputs, and replayed. Its results live until the next replay."""

    def __init__(self, function: Callable[..., Outputs]) -> None:
        self._function = function
        self._graphs: dict[object, tuple[Tensor, tuple[Tensor | None, ...], Outputs]] = {}

    def __call__(self, *tensors: Tensor | None, longest: Dim, last: bool) -> Outputs:
        shapes = tuple(None if tensor is None else tuple(tensor.shape) for tensor in tensors)
        key = (shapes, longest, last)
        if key not in self._graphs:
            # Events of a clock must not become part of the graph.
            self._graphs[key] = copy_context().run(self._unwatched, tensors, longest, last=last)
        graph, held, outputs = self._graphs[key]
        for own, given in zip(held, tensors, strict=True):
            if own is not None:
                own.copy_(given)
        graph.replay()
        return outputs

    def _unwatched(
        self, tensors: tuple[Tensor | None, ...], longest: Dim, *, last: bool
    ) -> tuple[Tensor, tuple[Tensor | None, ...], Outputs]:
        op_observer.set(lambda _: nullcontext())
        return self._capture(tensors, longest, last=last)

    def _capture(
        self, tensors: tuple[Tensor | None, ...], longest: Dim, *, last: bool
    ) -> tuple[Tensor, tuple[Tensor | None, ...], Outputs]:
        held = tuple(None if tensor is None else tensor.clone() for tensor in tensors)
        # A call before the capture, on a stream of its own, lets libraries allocate what they need. It writes the
        # cache rows that the replay will write again.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._function(*held, longest=longest, last=last)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self._function(*held, longest=longest, last=last)
        return graph, held, outputs


def _tensors(inputs: StepInputs) -> tuple[Tensor | None, ...]:
    own = inputs.offload
    offload = (None,) * 4 if own is None else (own.own_rows_T, own.committed_B, own.request_slots_B, own.ring_first_B)
    return (
        inputs.ids_T, inputs.cos_TP, inputs.sin_TP, inputs.slot_mapping_T, inputs.block_tables, inputs.seq_lens_B,
        inputs.sampled_B, *offload,
    )  # fmt: skip


def _inputs(tensors: tuple[Tensor | None, ...], longest: Dim) -> StepInputs:
    ids_T, cos_TP, sin_TP, slot_mapping_T, block_tables, seq_lens_B, sampled_B, *own = tensors
    own_rows_T, committed_B, request_slots_B, ring_first_B = own
    return StepInputs(
        ids_T, cos_TP, sin_TP, slot_mapping_T, block_tables, seq_lens_B, longest, None, sampled_B=sampled_B,
        offload=None if own_rows_T is None else OffloadInputs(own_rows_T, committed_B, request_slots_B, ring_first_B),
    )  # fmt: skip


def _outputs(output: PassOutput) -> Outputs:
    return output.hidden_TD, output.logits_TV, output.ids_T, output.topk_TK, output.rows_TK, *output.chosen


def _output(tensors: Outputs) -> PassOutput:
    hidden_TD, logits_TV, ids_T, topk_TK, rows_TK, *chosen = tensors
    return PassOutput(hidden_TD, logits_TV, ids_T, topk_TK, rows_TK, tuple(chosen))
