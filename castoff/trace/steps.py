"""The record of one step: int32 values in a row, checked before they are written and read without a copy.

Axes: N steps, G index groups, B request rows, A used ones among them, S query tokens, K ranks, W words of a record.
A record holds request ids (B), lengths (B), query lengths (B), accepted counts (B) and ids (G, B, S, K), in this order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from castoff.errors import CastoffError
from castoff.trace.header import MAX_INT32, WORDS_PER_ROW, TraceHeader

Int32Array = npt.NDArray[np.int32]
Integers = npt.NDArray[np.integer[Any]]
LITTLE_ENDIAN = np.dtype("<i4")
NONE = -1
"""No id, no request, or not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Consecutive steps of a trace; the arrays are views, and of a file only what is used is read.

    first: number of the first of them in its trace.
    request_ids_NB: which request is in a row, −1 for an unused row, whose other values mean nothing. A request keeps
        its id and may change its row.
    lengths_NB: tokens of the request in the cache, those of this step included; −1 where lengths are not known.
    query_lengths_NB: query tokens that the request brings, the last ones of its length, in the first of the S places.
    accepted_NB: how many of them were kept, −1 where that is not known.
    ids_NGBSK: what each query selected, positions in its request, the best first; −1 for none.
    lengths_known: as in the header.
    """

    first: int
    request_ids_NB: Int32Array
    lengths_NB: Int32Array
    query_lengths_NB: Int32Array
    accepted_NB: Int32Array
    ids_NGBSK: Int32Array
    lengths_known: bool

    @property
    def num_steps(self) -> int:
        """Steps (N)."""
        return len(self.request_ids_NB)

    @property
    def active(self) -> npt.NDArray[np.bool_]:
        """Which rows hold a request (N, B)."""
        return self.request_ids_NB >= 0

    @property
    def committed(self) -> Int32Array:
        """Tokens of a request before the step's first query (N, B); ids below that may be cached, others may not.

        2³¹ − 1, hence more than any id, where lengths are not known; 0 for unused rows.
        """
        before = self.lengths_NB - self.query_lengths_NB if self.lengths_known else MAX_INT32
        return np.where(self.active, before, 0).astype(np.int32)


def unpack(header: TraceHeader, records_NW: Int32Array, *, first: int = 0) -> Steps:
    """Records as steps, without a copy."""
    groups, rows, queries, ranks = header.ids_shape
    small_NRB = records_NW[:, : WORDS_PER_ROW * rows].reshape(len(records_NW), WORDS_PER_ROW, rows)
    return Steps(
        first=first,
        request_ids_NB=small_NRB[:, 0],
        lengths_NB=small_NRB[:, 1],
        query_lengths_NB=small_NRB[:, 2],
        accepted_NB=small_NRB[:, 3],
        ids_NGBSK=records_NW[:, WORDS_PER_ROW * rows :].reshape(-1, groups, rows, queries, ranks),
        lengths_known=header.lengths_known,
    )


def pack(
    header: TraceHeader,
    request_ids_B: Integers,
    lengths_B: Integers | None,
    accepted_B: Integers | None,
    ids_GBSK: Integers,
    *,
    query_lengths_B: Integers | None = None,
) -> Int32Array:
    """The record (W) of a step, checked; arguments as in `TraceWriter.append`. Raises CastoffError."""
    ids_GBSK = _integers("ids", ids_GBSK, 4)
    _check_room(header, ids_GBSK.shape)
    _, rows, queries, ranks = ids_GBSK.shape
    if (lengths_B is None) == header.lengths_known:
        state = "is to have them" if header.lengths_known else "is without"
        raise CastoffError(f"lengths are {'missing' if lengths_B is None else 'given'}, but the trace {state}")
    request_ids_B = _row_values("request_ids", request_ids_B, rows)
    used = np.flatnonzero(request_ids_B != NONE)
    request_ids_A = request_ids_B[used]
    lengths_A = _row_values("lengths", lengths_B, rows)[used]
    query_lengths_A = _row_values("query_lengths", query_lengths_B, rows, default=queries)[used]
    accepted_A = _row_values("accepted", accepted_B, rows)[used]
    _check_requests(request_ids_A)
    _check_queries(request_ids_A, query_lengths_A, accepted_A, queries)
    if header.lengths_known:
        _check_lengths(request_ids_A, lengths_A, query_lengths_A)
    visible_AS = _visible(lengths_A if header.lengths_known else None, query_lengths_A, queries)
    ids_GASK = ids_GBSK if len(used) == rows else ids_GBSK[:, used]
    _check_ids(request_ids_A, visible_AS, ids_GASK)

    record_W = np.full(header.record_words, NONE, LITTLE_ENDIAN)
    made = unpack(header, record_W[np.newaxis])
    made.request_ids_NB[0, used] = request_ids_A
    made.lengths_NB[0, used] = lengths_A
    made.query_lengths_NB[0, used] = query_lengths_A
    made.accepted_NB[0, used] = accepted_A
    made.ids_NGBSK[0][:, used, :queries, :ranks] = ids_GASK
    return record_W


def repack(
    header: TraceHeader,
    steps: Steps,
    index: int,
    *,
    groups: Sequence[int] | slice = slice(None),
    rows: Integers | slice = slice(None),
) -> Int32Array:
    """The record (W) of some groups and rows of a step, checked like new; `index` is its place among `steps`."""
    return pack(
        header,
        steps.request_ids_NB[index, rows],
        steps.lengths_NB[index, rows] if steps.lengths_known else None,
        steps.accepted_NB[index, rows],
        steps.ids_NGBSK[index][groups][:, rows],
        query_lengths_B=steps.query_lengths_NB[index, rows],
    )


@contextmanager
def located(place: str) -> Iterator[None]:
    """Faults inside say where they are."""
    try:
        yield
    except CastoffError as error:
        raise CastoffError(f"{place}: {error}") from None


def _integers(name: str, values: Integers, axes: int) -> Integers:
    values = np.asarray(values)
    if values.ndim != axes:
        raise CastoffError(f"{name} must have {axes} {'axis' if axes == 1 else 'axes'}, got shape {values.shape}")
    if values.dtype.kind not in "iu" and values.size:
        raise CastoffError(f"{name} must be integers, got {values.dtype}")
    return values


def _row_values(name: str, values_B: Integers | None, rows: int, *, default: int = NONE) -> Integers:
    if values_B is None:
        return np.full(rows, default)
    values_B = _integers(name, values_B, 1)
    if len(values_B) != rows:
        raise CastoffError(f"{name} are of {len(values_B)} request rows, ids of {rows}")
    return values_B


def _check_room(header: TraceHeader, shape: tuple[int, ...]) -> None:
    if shape[0] != header.num_groups:
        raise CastoffError(f"ids are of {shape[0]} index groups, the trace is of {header.num_groups}")
    names = ("request rows", "query tokens", "ids per query")
    for name, given, room in zip(names, shape[1:], header.ids_shape[1:], strict=True):
        if given > room:
            raise CastoffError(f"ids are of {given} {name}, the trace has room for {room}")


def _check_requests(request_ids_A: Integers) -> None:
    values, counts = np.unique(request_ids_A, return_counts=True)
    if values.size and not 0 <= values[0] <= values[-1] <= MAX_INT32:
        wrong = values[0] if values[0] < 0 else values[-1]
        raise CastoffError(f"request ids must be from 0 to {MAX_INT32}, or -1 for an unused row, got {wrong}")
    if (counts > 1).any():
        raise CastoffError(f"request {values[counts > 1][0]} stands in two rows")


def _check_queries(request_ids_A: Integers, query_lengths_A: Integers, accepted_A: Integers, queries: int) -> None:
    for request, query_length, accepted in zip(request_ids_A, query_lengths_A, accepted_A, strict=True):
        if not 1 <= query_length <= queries:
            raise CastoffError(f"request {request} brings {query_length} query tokens, but must bring 1 to {queries}")
        if not NONE <= accepted <= query_length:
            raise CastoffError(
                f"request {request} keeps {accepted} of {query_length} query tokens; -1 means that it is not known"
            )


def _check_lengths(request_ids_A: Integers, lengths_A: Integers, query_lengths_A: Integers) -> None:
    for request, length, query_length in zip(request_ids_A, lengths_A, query_lengths_A, strict=True):
        if not query_length <= length <= MAX_INT32:
            raise CastoffError(
                f"request {request} has length {length}; a length includes the step's own tokens, {query_length} here, "
                f"and is at most {MAX_INT32}"
            )


def _visible(lengths_A: Integers | None, query_lengths_A: Integers, queries: int) -> npt.NDArray[np.int64]:
    """Tokens that each query may select from, those up to itself, so that every id is less; none for an absent query.

    lengths_A: None where they are not known. Returns int64 (A, S).
    """
    query_S = np.arange(queries)
    query_lengths_A1 = query_lengths_A.astype(np.int64)[:, np.newaxis]
    if lengths_A is None:
        visible_AS = np.full((len(query_lengths_A), queries), MAX_INT32 + 1)
    else:
        visible_AS = lengths_A.astype(np.int64)[:, np.newaxis] - query_lengths_A1 + query_S + 1
    return np.where(query_S < query_lengths_A1, visible_AS, 0)


def _check_ids(request_ids_A: Integers, visible_AS: npt.NDArray[np.int64], ids_GASK: Integers) -> None:
    if not ids_GASK.size or (ids_GASK.min() >= NONE and ids_GASK.max() < visible_AS.min()):
        return
    wrong_GASK = (ids_GASK < NONE) | (ids_GASK >= visible_AS[:, :, np.newaxis])
    if not wrong_GASK.any():
        return
    group, row, query, rank = np.unravel_index(int(wrong_GASK.argmax()), wrong_GASK.shape)
    found, visible = int(ids_GASK[group, row, query, rank]), int(visible_AS[row, query])
    where = f"request {request_ids_A[row]}, group {group}, query {query}, rank {rank}: id {found}"
    if found < NONE:
        raise CastoffError(f"{where} is negative; -1 means none")
    if not visible:
        raise CastoffError(f"{where} is of a query that the request does not have")
    if visible > MAX_INT32:
        raise CastoffError(f"{where} does not fit into 32 bits")
    raise CastoffError(
        f"{where} lies beyond the query's own position {visible - 1}; lengths include the tokens of this step"
    )
