"""Ops at the two ends of the model: embedding, choice of rows, concatenation and sampling.

Axes: T tokens, D hidden, V vocabulary of this rank.
"""

from __future__ import annotations

from castoff.dims import Dim
from castoff.ops.linear import Weight
from castoff.ops.program import Abstract, Op, OpCall, Shapes
from castoff.ops.work import Part, Work


def _embedding_shapes(ids_T: Abstract, table_VD: Abstract) -> Shapes:
    return (((ids_T.shape[0], table_VD.shape[1]), "bf16"),)


def _copied(call: OpCall) -> Work:
    return Work((Part("copy", bytes=2 * call.outputs[0].bytes),))


EMBEDDING = Op("embedding", "embedding", _embedding_shapes, _copied)


def embedding(ids_T: Abstract, table: Weight) -> Abstract:
    """Rows of the table (V, D); ids of another rank's vocabulary give zeros. Returns (T, D)."""
    return EMBEDDING(ids_T, table.values)[0]


def _select_shapes(x_TD: Abstract, *, rows: Dim) -> Shapes:
    return (((rows, x_TD.shape[1]), x_TD.dtype),)


SELECT_ROWS = Op("select_rows", "embedding", _select_shapes, _copied)


def select_rows(x_TD: Abstract, rows: Dim) -> Abstract:
    """The last row of every request: (rows, D)."""
    return SELECT_ROWS(x_TD, rows=rows)[0]


def _concat_shapes(a_TD: Abstract, b_TD: Abstract) -> Shapes:
    width = a_TD.shape[1] + b_TD.shape[1]
    return (((a_TD.shape[0], width), a_TD.dtype),)


CONCAT = Op("concat", "elementwise", _concat_shapes, _copied)


def concat(a_TD: Abstract, b_TD: Abstract) -> Abstract:
    """Columns of a, then of b."""
    return CONCAT(a_TD, b_TD)[0]


def _sample_shapes(logits_TV: Abstract) -> Shapes:
    return (((logits_TV.shape[0],), "int32"),)


def _sample_work(call: OpCall) -> Work:
    logits_TV = call.tensor(0)
    return Work((Part("argmax", vector_flops=logits_TV.elements, bytes=logits_TV.bytes),))


SAMPLE = Op("sample", "sampling", _sample_shapes, _sample_work)


def sample(logits_TV: Abstract) -> Abstract:
    """Greedy choice: the id of the largest logit, ties to the lowest id. Returns int32 (T,)."""
    return SAMPLE(logits_TV)[0]
