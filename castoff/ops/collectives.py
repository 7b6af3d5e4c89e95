"""Collectives. In a group of one rank they do nothing and record nothing.

The first axis is tokens (or rows); the last is features. Real ones run on the process groups of torch.distributed, as
its functional collectives, which leave their inputs alone and can be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import lazy_loader as lazy

from castoff.dims import Dim, ceil_div, maximum
from castoff.ops.linear import Activations, Quantized, Weight, parts_of, product_part, sum_bytes
from castoff.ops.moe import SWIGLU_OPERATIONS, grouped_part
from castoff.ops.program import Abstract, Op, OpCall, Shapes, Tensor
from castoff.ops.work import DTYPE_BYTES, Collective, CollectiveKind, Kernel, Part, Work
from castoff.spec.mesh import Group
from castoff.spec.quant import LinearFormat

torch = lazy.load("torch")


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows of an uneven all_to_all: to and from each rank of the group, and how many the result holds: the first are
    those received, the rest are zeros."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    held: int


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """What an all_to_all of token copies is for: to the ranks of the experts, or back; stacks have kernels for it.

    experts: of all ranks. experts_per_token: copies of a token.
    """

    way: Literal["dispatch", "combine"]
    phase: Literal["prefill", "decode"]
    experts: int
    experts_per_token: int


def _same(x: Abstract, *, group: Group, shape: tuple[Dim, ...] | None = None, **_: object) -> Shapes:
    return ((x.shape if shape is None else shape, x.dtype),)


def _work(call: OpCall) -> Work:
    kind: CollectiveKind = call.op.name  # type: ignore[assignment]
    sent, held = call.tensor(0).bytes, call.outputs[0].bytes
    # The busiest rank of an uneven all_to_all may receive more than it sends.
    message = {"all_gather": held, "all_to_all": maximum(sent, held)}.get(kind, sent)
    group: Group = call.attributes["group"]
    kernel = Kernel(kind, (), {"bytes": message, "ranks": float(group.size)})
    exchange: ExpertExchange | None = call.attributes.get("exchange")
    if exchange is not None:
        rows_RD = call.tensor(0)
        experts = {"experts": exchange.experts, "experts_per_token": exchange.experts_per_token}
        sizes = {**kernel.sizes, **experts, "row_bytes": DTYPE_BYTES[rows_RD.dtype] * rows_RD.shape[1]}
        kernel = Kernel(f"{exchange.way}_{exchange.phase}", (), sizes, general=kind)
    return Work(collectives=(Collective(kind, message, group),), kernels=(kernel,))


def _all_reduce_reference(x: Tensor, *, group: Group) -> tuple[Tensor]:
    functional = torch.ops._c10d_functional
    return (functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group.process_group)),)


def _all_gather_reference(x: Tensor, *, group: Group, shape: tuple[int, ...]) -> tuple[Tensor]:
    pieces = gathered(x, group)
    axis = next((axis for axis, (own, whole) in enumerate(zip(x.shape, shape, strict=True)) if own != whole), 0)
    return (torch.cat(pieces.unbind(), dim=axis),)


def _reduce_scatter_reference(x: Tensor, *, group: Group, shape: tuple[int, ...], stretches: int) -> tuple[Tensor]:
    functional = torch.ops._c10d_functional
    per_stretch = shape[0] * group.size // stretches
    pieces = [pad_rows(stretch, per_stretch) for stretch in x.chunk(stretches)]
    sent = torch.cat(pieces) if stretches > 1 else pieces[0].contiguous()
    return (functional.wait_tensor(functional.reduce_scatter_tensor(sent, "sum", group.size, group.process_group)),)


def _all_to_all_reference(
    x: Tensor, *, group: Group, shape: tuple[int, ...], rows: RowCounts | None = None, exchange: object = None
) -> tuple[Tensor]:
    if rows is not None:
        received = exchange_rows(x[: sum(rows.sent)], rows.sent, rows.received, group)
        return (pad_rows(received, rows.held),)
    if shape[1] < x.shape[1]:
        by_peer_NTI = torch.stack(x.chunk(group.size, dim=1))
        even = [x.shape[0]] * group.size
        return (exchange_rows(by_peer_NTI.flatten(0, 1), even, even, group),)
    even = [shape[0]] * group.size
    received = exchange_rows(pad_rows(x, group.size * shape[0]), even, even, group)
    return (received.view(group.size, shape[0], -1).movedim(0, 1).reshape(shape),)


def gathered(x: Tensor, group: Group) -> Tensor:
    """The x of every rank of the group, in its order, along a new first axis; not an op of the program."""
    functional = torch.ops._c10d_functional
    joined = functional.all_gather_into_tensor(x.contiguous(), group.size, group.process_group)
    return functional.wait_tensor(joined).view(group.size, *x.shape)


def exchange_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Rows of x to the ranks in turn, sent[n] to rank n, and received[n] from it; not an op of the program."""
    functional = torch.ops._c10d_functional
    exchanged = functional.all_to_all_single(x.contiguous(), list(received), list(sent), group.process_group)
    return functional.wait_tensor(exchanged)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """x, with rows of zeros at its end up to so many."""
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - x.shape[0]))


ALL_REDUCE = Op("all_reduce", "collective", _same, _work, _all_reduce_reference)
ALL_GATHER = Op("all_gather", "collective", _same, _work, _all_gather_reference)
REDUCE_SCATTER = Op("reduce_scatter", "collective", _same, _work, _reduce_scatter_reference)
ALL_TO_ALL = Op("all_to_all", "collective", _same, _work, _all_to_all_reference)
SEND_RECV = Op("send_recv", "collective", _same, _work)


def on_parts(collective: Callable[[Tensor], Tensor], x: Activations) -> Activations:
    """A collective on a tensor, or on quantised activations: values and scales.

    A cast counts the values alone: the scales are a few percent of them, and kernels send both in one message.
    """
    if not isinstance(x, Quantized):
        return collective(x)
    has_scales = x.scales is not None and not isinstance(x.scales, Abstract)
    return replace(x, values=collective(x.values), scales=collective(x.scales) if has_scales else x.scales)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum over the group, on every rank."""
    return x if group.size == 1 else ALL_REDUCE(x, group=group)[0]


def all_gather(x: Tensor, group: Group, *, axis: int = 0) -> Tensor:
    """Pieces of the group's ranks, equally large, joined along an axis."""
    if group.size == 1:
        return x
    shape = list(x.shape)
    shape[axis] = shape[axis] * group.size
    return ALL_GATHER(x, group=group, shape=tuple(shape))[0]


def reduce_scatter(x: Tensor, group: Group, *, stretches: int = 1) -> Tensor:
    """Sum over the group; every rank keeps its piece of the first axis (padded to a whole number of pieces).

    stretches: parts of the first axis, each of which is padded and dealt to as many of the ranks.
    """
    if group.size == 1:
        return x
    shape = (ceil_div(x.shape[0], group.size), *x.shape[1:])
    return REDUCE_SCATTER(x, group=group, shape=shape, stretches=stretches)[0]


def all_to_all(
    x: Tensor,
    group: Group,
    *,
    shape: tuple[Dim, ...],
    rows: RowCounts | None = None,
    exchange: ExpertExchange | None = None,
) -> Tensor:
    """Every rank sends a piece of x to every other; `shape` is what one rank holds afterwards.

        out = the ranks' pieces of x, cut along the axis that shrinks, joined along the other;
        a first axis is padded to whole pieces

    rows: how many go where, if they are not the same for all; the second axis is then left whole.
    exchange: what it is for, where x are copies of tokens on the way to experts or back; this changes no result.
    """
    if group.size == 1:
        return x.view(*shape)
    return ALL_TO_ALL(x, group=group, shape=shape, rows=rows, exchange=exchange)[0]


def send_recv(x: Tensor, group: Group) -> Tensor:
    """x, handed to the next pipeline stage."""
    return SEND_RECV(x, group=group)[0]


def split_tokens(x: Tensor, group: Group) -> Tensor:
    """This rank's piece of the first axis, the last piece padded; nothing moves."""
    if group.size == 1:
        return x
    piece = ceil_div(x.shape[0], group.size)
    if isinstance(x, Abstract):
        return x.view(piece, *x.shape[1:])
    return pad_rows(x, group.size * int(piece)).view(group.size, -1, *x.shape[1:])[group.position]


def first_tokens(x: Tensor, tokens: Dim) -> Tensor:
    """x without what pads it: a view."""
    return x.view(tokens, *x.shape[1:]) if isinstance(x, Abstract) else x[:tokens]


def _matmul_all_reduce_shapes(
    x_TI: Abstract, weight_OI: Abstract, x_scales: Abstract | None, weight_scales: Abstract | None,
    *, format: LinearFormat | None, dtype: str, group: Group,
) -> Shapes:  # fmt: skip
    return (((x_TI.shape[0], weight_OI.shape[0]), dtype),)


def _matmul_all_reduce_work(call: OpCall) -> Work:
    weight = Weight(call.tensor(1), call.inputs[3], call.attributes["format"])
    part = product_part("matmul", call.tensor(0), call.inputs[2], weight, weight.values.shape[0])
    return Work((part,), (Collective("all_reduce", call.outputs[0].bytes, call.attributes["group"]),))


MATMUL_ALL_REDUCE = Op("matmul_all_reduce", "matmul", _matmul_all_reduce_shapes, _matmul_all_reduce_work)


def matmul_all_reduce(x_TI: Activations, weight: Weight, group: Group) -> Tensor:
    """all_reduce(linear(x, weight)) in one kernel that sends tiles as they are done; x is in the weight's format."""
    values, scales, dtype = parts_of(x_TI)
    return MATMUL_ALL_REDUCE(
        values, weight.values, scales, weight.scales, format=weight.format, dtype=dtype, group=group
    )[0]


def _dispatch_ffn_combine_shapes(
    rows_RD: Abstract, *_: Abstract | None, formats: tuple[LinearFormat | None, ...], dtype: str, touched: Dim,
    local_rows: Dim, group: Group,
) -> Shapes:  # fmt: skip
    return ((rows_RD.shape, dtype),)


def _dispatch_ffn_combine_work(call: OpCall) -> Work:
    rows_RD, form = call.tensor(0), call.attributes["formats"]
    gate_up = Weight(call.tensor(1), call.inputs[4], form[0])
    down = Weight(call.tensor(2), call.inputs[5], form[1])
    local_rows, touched, group = (call.attributes[name] for name in ("local_rows", "touched", "group"))
    local_RD = rows_RD.view(local_rows, rows_RD.shape[1])
    middle_RI = rows_RD.recorder.tensor(local_rows, down.values.shape[2], dtype=down.matrix_dtype)
    local_scales, middle_scales = _scales(local_RD, gate_up), _scales(middle_RI, down)
    operations = SWIGLU_OPERATIONS + down.quantize_operations
    # Rows that travel in bf16 are quantised where they arrive.
    arriving = 0 if rows_RD.dtype == gate_up.matrix_dtype else gate_up.quantize_operations
    return Work(
        (
            Part("quantize", vector_flops=arriving * local_RD.elements),
            grouped_part(local_RD, local_scales, gate_up, touched, sum_bytes((middle_RI, middle_scales))),
            Part("swiglu", vector_flops=operations * middle_RI.elements),
            grouped_part(middle_RI, middle_scales, down, touched, 2 * local_RD.elements),
        ),
        (
            Collective("all_to_all", maximum(rows_RD.bytes, local_RD.bytes), group),
            Collective("all_to_all", maximum(call.outputs[0].bytes, 2 * local_RD.elements), group),
        ),
    )


def _scales(x_RI: Abstract, weight: Weight) -> Abstract | None:
    """Scales of x once it is in the format that the weight multiplies."""
    width = x_RI.shape[1]
    assert isinstance(width, int)
    if weight.format is None or not weight.quantizes_activations or not weight.format.dynamic:
        return None
    count = weight.format.activation_scales(width)
    return x_RI.recorder.tensor(x_RI.shape[0], count, dtype=weight.format.scale_dtype)


DISPATCH_FFN_COMBINE = Op(
    "dispatch_ffn_combine", "grouped_matmul", _dispatch_ffn_combine_shapes, _dispatch_ffn_combine_work
)


def dispatch_ffn_combine(
    rows_RD: Activations, gate_up: Weight, down: Weight, touched: Dim, local_rows: Dim, group: Group
) -> Tensor:
    """Dispatch, the experts' two products with SwiGLU between, and combine, in one kernel that overlaps them.

    rows_RD: this rank's token copies (R, D) in expert order; local_rows: rows that its experts receive. Returns (R, D).
    """
    values, scales, dtype = parts_of(rows_RD)
    return DISPATCH_FFN_COMBINE(
        values, gate_up.values, down.values, scales, gate_up.scales, down.scales,
        formats=(gate_up.format, down.format), dtype=dtype, touched=touched, local_rows=local_rows, group=group,
    )[0]  # fmt: skip
