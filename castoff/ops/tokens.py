"""Ops at the two ends of the model: embedding, choice of rows, concatenation and sampling.

Axes: T tokens, D hidden, V vocabulary of this rank.
"""

from __future__ import annotations

import lazy_loader as lazy

from castoff.dims import Dim
from castoff.ops.linear import Weight
from castoff.ops.program import Abstract, Op, OpCall, Shapes, Tensor, dtype_name
from castoff.ops.work import Part, Work

torch = lazy.load("torch")


def _embedding_shapes(ids_T: Abstract, table_VD: Abstract, *, first: int | None = None) -> Shapes:
    return (((ids_T.shape[0], table_VD.shape[1]), dtype_name(table_VD)),)


def _copied(call: OpCall) -> Work:
    return Work((Part("copy", bytes=2 * call.outputs[0].bytes),))


def _embedding_reference(ids_T: Tensor, table_VD: Tensor, *, first: int | None = None) -> tuple[Tensor]:
    if first is None:
        return (table_VD[ids_T],)
    local_T = ids_T - first
    is_mine_T = (local_T >= 0) & (local_T < table_VD.shape[0])
    return (table_VD[local_T.where(is_mine_T, 0)] * is_mine_T[:, None],)


EMBEDDING = Op("embedding", "embedding", _embedding_shapes, _copied, _embedding_reference)


def embedding(ids_T: Tensor, table: Weight, *, first: int | None = None) -> Tensor:
    """Rows of the table (V, D): (T, D).

    first: id of the table's first row, where other ranks have the rest; their ids give zeros. None: all ids are here.
    """
    return EMBEDDING(ids_T, table.values, first=first)[0]


def _select_shapes(x_TD: Abstract, at_B: Abstract | None, *, rows: Dim) -> Shapes:
    return (((rows, x_TD.shape[1]), dtype_name(x_TD)),)


def _select_reference(x_TD: Tensor, at_B: Tensor | None, *, rows: int) -> tuple[Tensor]:
    x_BSD = x_TD.view(rows, -1, x_TD.shape[-1])
    return (x_BSD[:, -1] if at_B is None else x_BSD[torch.arange(rows, device=x_TD.device), at_B],)


SELECT_ROWS = Op("select_rows", "embedding", _select_shapes, _copied, _select_reference)


def select_rows(x_TD: Tensor, rows: Dim, at_B: Tensor | None = None) -> Tensor:
    """One row of each of `rows` requests, the last or that of place at_B (from 0): (rows, D)."""
    return SELECT_ROWS(x_TD, at_B, rows=rows)[0]


def _concat_shapes(a_TD: Abstract, b_TD: Abstract) -> Shapes:
    width = a_TD.shape[1] + b_TD.shape[1]
    return (((a_TD.shape[0], width), dtype_name(a_TD)),)


def _concat_reference(a_TD: Tensor, b_TD: Tensor) -> tuple[Tensor]:
    return (torch.cat([a_TD, b_TD], dim=-1),)


CONCAT = Op("concat", "elementwise", _concat_shapes, _copied, _concat_reference)


def concat(a_TD: Tensor, b_TD: Tensor) -> Tensor:
    """Columns of a, then of b."""
    return CONCAT(a_TD, b_TD)[0]


def _sample_shapes(logits_TV: Abstract) -> Shapes:
    return (((logits_TV.shape[0],), "int32"),)


def _sample_work(call: OpCall) -> Work:
    logits_TV = call.tensor(0)
    return Work((Part("argmax", vector_flops=logits_TV.elements, bytes=logits_TV.bytes),))


def _sample_reference(logits_TV: Tensor) -> tuple[Tensor]:
    # torch's argmax may take any of several equals. A row with a NaN has no largest, and gets the last id.
    last = logits_TV.shape[-1] - 1
    ids_V = torch.arange(last + 1, dtype=torch.int32, device=logits_TV.device)
    is_largest = logits_TV == logits_TV.amax(dim=-1, keepdim=True)
    return (ids_V.expand_as(logits_TV).masked_fill(~is_largest, last).amin(dim=-1),)


SAMPLE = Op("sample", "sampling", _sample_shapes, _sample_work, _sample_reference)


def sample(logits_TV: Tensor) -> Tensor:
    """Greedy choice: the id of the largest logit, ties to the lowest id. Returns int32 (T,)."""
    return SAMPLE(logits_TV)[0]
