"""Traces from arrays that another engine wrote.

Axes as in `steps`; N steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from castoff.errors import CastoffError, CastoffWarning
from castoff.spec.model import ModelSpec
from castoff.trace.arrays import read_integers, tensor_names
from castoff.trace.header import ProvenanceValue, TraceHeader
from castoff.trace.reader import Trace, open_trace
from castoff.trace.steps import NONE, Integers, located, pack
from castoff.trace.writer import TraceWriter, refuse_sources

AXES = "steps, index groups, requests, query tokens, ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """What is converted: ids_NGBSK, −1 for none, and lengths_NB, 0 or −1 where a request takes no part in a step.

    lengths_NB: None where lengths are not known; a request then takes part in a step if it has an id.
    ids_file, lengths_file: what errors call them.
    """

    ids_NGBSK: Integers
    ids_file: Path
    lengths_NB: Integers | None = None
    lengths_file: Path | None = None

    def __post_init__(self) -> None:
        shape = self.ids_NGBSK.shape
        if len(shape) != 5 or 0 in shape:
            raise CastoffError(f"{self.ids_file}: ids must have the axes {AXES}, none of them empty, got shape {shape}")
        if self.lengths_NB is not None and self.lengths_NB.shape != (shape[0], shape[2]):
            wanted = (shape[0], shape[2])
            raise CastoffError(
                f"{self.lengths_file}: lengths must have the axes steps, requests, {wanted} as in {self.ids_file}, got "
                f"shape {self.lengths_NB.shape}"
            )


def read_trace_arrays(ids: Path, lengths: Path | None = None) -> Arrays:
    """The arrays of a conversion: from .npy files, or from safetensors, where `ids` and `lengths` may be in one file.

    Raises CastoffError.
    """
    if lengths is None and "lengths" in tensor_names(ids):
        lengths = ids
    return Arrays(
        ids_NGBSK=read_integers(ids, "ids"),
        ids_file=ids,
        lengths_NB=None if lengths is None else read_integers(lengths, "lengths"),
        lengths_file=lengths,
    )


def convert_arrays(
    arrays: Arrays,
    model: ModelSpec,
    target: Path,
    *,
    note: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Trace:
    """Write arrays of a model's index groups as a trace to `target`, and open that. A request's id is its place.

    note: how the selections came about, in words.
    Warns where there are no lengths. Raises CastoffError where the arrays do not go with the model, or hold what no
    step can.
    """
    refuse_sources(target, arrays.ids_file, arrays.lengths_file)
    num_steps, groups, requests, queries, ranks = arrays.ids_NGBSK.shape
    origin: dict[str, ProvenanceValue] = {"converted_from": arrays.ids_file.name}
    if arrays.lengths_file is not None:
        origin["lengths_from"] = arrays.lengths_file.name
    if note is not None:
        origin["note"] = note
    header = TraceHeader.of_model(
        model,
        batch=requests,
        query_length=queries,
        lengths_known=arrays.lengths_NB is not None,
        provenance=origin,
    )
    for what, given, wanted in (
        ("index groups", groups, header.num_groups),
        ("ids per query (index_topk)", ranks, header.index_topk),
    ):
        if given != wanted:
            raise CastoffError(
                f"{arrays.ids_file} has {given} {what}, but {model.name} has {wanted}; its shape is "
                f"{arrays.ids_NGBSK.shape}: {AXES}"
            )
    with TraceWriter(target, header) as writer:
        for index in range(num_steps):
            progress(f"{target}: step {index + 1:,} of {num_steps:,}")
            with located(f"{arrays.ids_file}: step {index}"):
                ids_GBSK = arrays.ids_NGBSK[index]
                lengths_B = None if arrays.lengths_NB is None else arrays.lengths_NB[index]
                record_W = pack(header, _request_ids(ids_GBSK, lengths_B), lengths_B, None, ids_GBSK)
            writer.append_record(record_W)
    if not header.lengths_known:
        warnings.warn(
            f"{arrays.ids_file} came without lengths, so every id counts as committed, those of a step's own tokens "
            "too; --lengths gives them",
            CastoffWarning,
            stacklevel=2,
        )
    return open_trace(target)


def _request_ids(ids_GBSK: Integers, lengths_B: Integers | None) -> Integers:
    """Which request is in each row of a step, −1 where it takes no part. Raises CastoffError."""
    selects_B = (ids_GBSK != NONE).any(axis=(0, 2, 3))
    request_ids_B = np.arange(len(selects_B))
    if lengths_B is None:
        return np.where(selects_B, request_ids_B, NONE)
    if (lengths_B < NONE).any():
        raise CastoffError(f"length {lengths_B.min()} is negative; 0 or -1 means that a request takes no part")
    present_B = lengths_B > 0
    odd = np.flatnonzero(selects_B & ~present_B)
    if len(odd):
        raise CastoffError(f"request {odd[0]} has ids, but its length {lengths_B[odd[0]]} says that it takes no part")
    return np.where(present_B, request_ids_B, NONE)
