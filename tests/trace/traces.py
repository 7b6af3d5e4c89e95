"""Small traces, fixed and drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from castoff.trace.header import TraceHeader
from castoff.trace.reader import Trace, open_trace
from castoff.trace.writer import TraceWriter

Ints = npt.NDArray[np.int64]
# Two index groups of a model that does not exist, up to 3 requests of up to 2 query tokens with up to 4 ids.
HEADER = TraceHeader(model="small", owner_layers=(0, 3), batch=3, query_length=2, index_topk=4)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step is written from. A row with the request −1 is unused."""

    request_ids_B: Ints
    lengths_B: Ints
    accepted_B: Ints
    query_lengths_B: Ints
    ids_GBSK: Ints


def step(header: TraceHeader, rng: np.random.Generator, *, requests: Sequence[int]) -> Step:
    """A random step of these requests, −1 for an unused row, in which every query has what it may have."""
    rows = len(requests)
    query_lengths_B = rng.integers(1, header.query_length + 1, rows)
    lengths_B = query_lengths_B + rng.integers(0, 50, rows)
    visible_BS = (lengths_B - query_lengths_B)[:, None] + np.arange(header.query_length) + 1
    shape = (header.num_groups, rows, header.query_length, header.index_topk)
    ids_GBSK = rng.integers(-1, 60, shape) % (visible_BS[None, :, :, None] + 1) - 1
    absent_BS = np.arange(header.query_length) >= query_lengths_B[:, None]
    ids_GBSK[:, absent_BS | (np.array(requests, int) < 0)[:, None]] = -1
    return Step(
        request_ids_B=np.array(requests, int),
        lengths_B=lengths_B,
        accepted_B=rng.integers(-1, query_lengths_B + 1),
        query_lengths_B=query_lengths_B,
        ids_GBSK=ids_GBSK,
    )


def write(path: Path, header: TraceHeader, steps: Sequence[Step]) -> Trace:
    """A trace of these steps, open."""
    with TraceWriter(path, header) as writer:
        for entry in steps:
            append(writer, entry)
    return open_trace(path)


def append(writer: TraceWriter, entry: Step, **changes: Any) -> None:
    """Write one step; `changes` are arguments to exchange."""
    arguments = {
        "request_ids_B": entry.request_ids_B,
        "lengths_B": entry.lengths_B if writer.header.lengths_known else None,
        "accepted_B": entry.accepted_B,
        "ids_GBSK": entry.ids_GBSK,
        "query_lengths_B": entry.query_lengths_B,
    }
    writer.append(**{**arguments, **changes})


def small_trace(path: Path, num_steps: int = 5) -> Trace:
    """Requests 10, 11 and 12, of which 11 comes a step later and 12 leaves before the last."""
    rng = np.random.default_rng(0)
    rows = [[10, 11 if index else -1, 12 if index < num_steps - 1 else -1] for index in range(num_steps)]
    return write(path, HEADER, [step(HEADER, rng, requests=row) for row in rows])


headers = st.builds(
    TraceHeader,
    model=st.sampled_from(["zai-org/GLM-5.2", "a/b", "m"]),
    owner_layers=st.sets(st.integers(0, 90), min_size=1, max_size=4).map(lambda layers: tuple(sorted(layers))),
    batch=st.integers(1, 4),
    query_length=st.integers(1, 4),
    index_topk=st.integers(1, 9),
    lengths_known=st.booleans(),
    provenance=st.dictionaries(
        st.text(max_size=4), st.text(max_size=9) | st.integers() | st.booleans() | st.floats(-9, 9)
    ),
)


@st.composite
def traces(draw: st.DrawFn, /, *, max_steps: int = 4) -> tuple[TraceHeader, list[Step]]:
    """A header and steps that go with it: any number of rows, used ones anywhere among them."""
    header = draw(headers)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = st.lists(st.integers(0, 6), max_size=header.batch, unique=True)
    steps = []
    for requests in draw(st.lists(rows, max_size=max_steps)):
        unused = set(draw(st.lists(st.integers(0, 3), max_size=2)))
        steps.append(
            step(header, rng, requests=[-1 if row in unused else request for row, request in enumerate(requests)])
        )
    return header, steps
