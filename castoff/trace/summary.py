"""What is in a trace: one pass over all of it, which also checks every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from castoff.trace.header import VERSION, ProvenanceValue
from castoff.trace.reader import Trace
from castoff.trace.steps import Integers, located, repack


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """A trace in figures; the fields are the keys of `castoff trace info --json`.

    groups, owner_layers: index groups, and the layer that selects for each. query_length: query tokens of a request in
    a step, at most (S). index_topk: ids of a query, at most (K). batch: rows of a step (B).
    requests: different requests. request_steps: used rows of all steps.
    min_length, max_length: tokens of a request, this step's included; None where none is known.
    mean_distinct_ids: different ids that a request selects in a step with all its queries together, averaged over index
    groups and request steps; None without any.
    """

    file: str
    bytes: int
    format_version: int
    written_by: str
    model: str
    groups: int
    owner_layers: tuple[int, ...]
    query_length: int
    index_topk: int
    batch: int
    steps: int
    requests: int
    request_steps: int
    lengths_known: bool
    min_length: int | None
    max_length: int | None
    mean_distinct_ids: float | None
    provenance: Mapping[str, ProvenanceValue]


def summarize(trace: Trace, *, progress: Callable[[str], None] = lambda _: None) -> TraceSummary:
    """The figures of a trace. Raises CastoffError for a step that no writer would have written."""
    header = trace.header
    steps = trace.steps()
    active_NB = steps.active
    distinct = 0
    for index in range(trace.num_steps):
        progress(f"{trace.path}: step {index + 1:,} of {trace.num_steps:,}")
        with located(f"{trace.path}: step {index}"):
            repack(header, steps, index)
        used = np.flatnonzero(active_NB[index])
        distinct += int(num_distinct(steps.ids_NGBSK[index][:, used]).sum())
    request_steps = int(active_NB.sum())
    lengths = steps.lengths_NB[active_NB] if header.lengths_known else np.empty(0, np.int32)
    return TraceSummary(
        file=str(trace.path),
        bytes=trace.size_bytes,
        format_version=VERSION,
        written_by=header.written_by,
        model=header.model,
        groups=header.num_groups,
        owner_layers=header.owner_layers,
        query_length=header.query_length,
        index_topk=header.index_topk,
        batch=header.batch,
        steps=trace.num_steps,
        requests=len(np.unique(steps.request_ids_NB[active_NB])),
        request_steps=request_steps,
        lengths_known=header.lengths_known,
        min_length=int(lengths.min()) if lengths.size else None,
        max_length=int(lengths.max()) if lengths.size else None,
        mean_distinct_ids=distinct / (request_steps * header.num_groups) if request_steps else None,
        provenance=header.provenance,
    )


def num_distinct(ids_GBSK: Integers) -> npt.NDArray[np.int64]:
    """Different ids, −1 not counted, that all queries of a request select together: int64 (G, B)."""
    groups, rows, queries, ranks = ids_GBSK.shape
    ids_GBM = np.sort(ids_GBSK.reshape(groups, rows, queries * ranks), axis=-1)
    is_new_GBM = ids_GBM >= 0
    is_new_GBM[..., 1:] &= ids_GBM[..., 1:] != ids_GBM[..., :-1]
    counts_GB: npt.NDArray[np.int64] = is_new_GBM.sum(axis=-1, dtype=np.int64)
    return counts_GB
