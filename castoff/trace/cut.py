"""A part of a trace as a trace of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from castoff.errors import CastoffError
from castoff.trace.reader import Trace, open_trace
from castoff.trace.steps import Steps, located, repack
from castoff.trace.writer import TraceWriter, refuse_sources

MOST_LISTED = 10


def cut_trace(
    trace: Trace,
    target: Path,
    *,
    steps: tuple[int, int | None] = (0, None),
    groups: Collection[int] | None = None,
    requests: Collection[int] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Trace:
    """Write some steps, index groups and requests of a trace to `target`, and open that.

    steps: the first one and the one behind the last (None: to the end).
    groups: by their place in the trace, from 0 on; None keeps all.
    requests: by their ids; None keeps all. A step in which none of them takes part stays, without requests.

    Raises CastoffError for what the trace does not have, and where the file cannot be written.
    """
    refuse_sources(target, trace.path)
    part = trace.steps(*steps)
    chosen_G = _groups(trace, groups)
    kept_NB = part.active if requests is None else _of_requests(trace, part, requests)
    selection = f"steps {part.first}:{part.first + part.num_steps}"
    selection += "" if groups is None else f", groups {_listed(chosen_G)}"
    selection += "" if requests is None else f", requests {_listed(sorted(set(requests)))}"
    earlier = trace.header.provenance.get("cut")
    header = replace(
        trace.header,
        owner_layers=tuple(trace.header.owner_layers[group] for group in chosen_G),
        # Which row a request is in means nothing, so those of others need no room.
        batch=trace.header.batch if requests is None else int(kept_NB.sum(axis=1).max()),
        provenance={**trace.header.provenance, "cut": f"{earlier}; of that {selection}" if earlier else selection},
    )
    with TraceWriter(target, header) as writer:
        for index in range(part.num_steps):
            progress(f"{target}: step {index + 1:,} of {part.num_steps:,}")
            with located(f"{trace.path}: step {part.first + index}"):
                rows = slice(None) if requests is None else np.flatnonzero(kept_NB[index])
                record_W = repack(header, part, index, groups=chosen_G, rows=rows)
            writer.append_record(record_W)
    return open_trace(target)


def _groups(trace: Trace, groups: Collection[int] | None) -> list[int]:
    """The chosen groups in the order of the trace."""
    num_groups = trace.header.num_groups
    chosen = range(num_groups) if groups is None else sorted(set(groups))
    unknown = [group for group in chosen if not 0 <= group < num_groups]
    if unknown or not chosen:
        what = f"not {_listed(unknown)}" if unknown else "and none is chosen"
        raise CastoffError(f"{trace.path} has the index groups 0 to {num_groups - 1}, {what}")
    return list(chosen)


def _of_requests(trace: Trace, part: Steps, requests: Collection[int]) -> npt.NDArray[np.bool_]:
    """Which rows (N, B) hold one of the requests, each of which must be there."""
    there = np.unique(part.request_ids_NB[part.active])
    missing = sorted(set(requests).difference(there.tolist()))
    if missing or not requests:
        what = f"not {_listed(missing)}" if missing else "and none is chosen"
        steps = f"steps {part.first}:{part.first + part.num_steps}"
        raise CastoffError(f"{trace.path} has the requests {_listed(there.tolist()) or 'none'} in {steps}, {what}")
    return np.isin(part.request_ids_NB, list(requests))


def _listed(numbers: Sequence[int]) -> str:
    """The numbers, or the first and the last few where they are many."""
    if len(numbers) <= MOST_LISTED:
        return ", ".join(map(str, numbers))
    few = MOST_LISTED // 2
    return f"{_listed(numbers[:few])}, … {_listed(numbers[-few:])}"
