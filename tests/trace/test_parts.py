"""Cutting traces and summing them up."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.errors import CastoffError
from castoff.trace.cut import cut_trace
from castoff.trace.header import TraceHeader
from castoff.trace.reader import Trace, open_trace
from castoff.trace.summary import num_distinct, summarize
from tests.trace.traces import HEADER, Step, small_trace, traces, write

Selection = dict[tuple[int, int, int], tuple[int, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


def contents(trace: Trace, first: int = 0) -> Selection:
    """What is in a trace, wherever a request sits: by step, request and owner layer; numbers and ids."""
    found: Selection = {}
    steps = trace.steps()
    for index, row in np.argwhere(steps.active):
        numbers = [steps.lengths_NB, steps.query_lengths_NB, steps.accepted_NB]
        for group, layer in enumerate(trace.header.owner_layers):
            key = (int(index) + first, int(steps.request_ids_NB[index, row]), layer)
            ids = steps.ids_NGBSK[index, group, row].ravel()
            found[key] = (*(int(values[index, row]) for values in numbers), *ids.tolist())
    return found


@pytest.mark.property
@given(case=traces(max_steps=6), data=st.data())
def test_a_cut_holds_what_was_chosen(folder: Path, case: tuple[TraceHeader, list[Step]], data: st.DataObject) -> None:
    trace = write(folder / "x.topk", *case)
    first = data.draw(st.integers(0, trace.num_steps))
    end = data.draw(st.integers(first, trace.num_steps))
    groups = data.draw(st.none() | st.sets(st.integers(0, trace.header.num_groups - 1), min_size=1))
    part = trace.steps(first, end)
    there = sorted(set(part.request_ids_NB[part.active].tolist()))
    requests = data.draw(st.none() | st.sets(st.sampled_from(there), min_size=1)) if there else None
    made = cut_trace(trace, folder / "y.topk", steps=(first, end), groups=groups, requests=requests)
    layers = [layer for group, layer in enumerate(trace.header.owner_layers) if groups is None or group in groups]
    assert made.num_steps == end - first
    assert contents(made, first) == {
        key: value
        for key, value in contents(trace).items()
        if first <= key[0] < end and (requests is None or key[1] in requests) and key[2] in layers
    }
    if requests is not None:
        assert made.header.batch == max(made.steps().active.sum(axis=1))
    summarize(made)


def test_a_cut_of_a_cut(tmp_path: Path) -> None:
    trace = small_trace(tmp_path / "x.topk", num_steps=8)
    once = cut_trace(trace, tmp_path / "a.topk", steps=(1, 7), groups=[1])
    twice = cut_trace(once, tmp_path / "b.topk", steps=(2, 4), requests=[11, 10])
    straight = cut_trace(trace, tmp_path / "c.topk", steps=(3, 5), groups=[1], requests=[10, 11])
    assert contents(twice) == contents(straight)
    assert twice.header.owner_layers == (3,)
    assert twice.header.provenance == {"cut": "steps 1:7, groups 1; of that steps 2:4, requests 10, 11"}
    assert replace(twice.header, provenance={}) == replace(straight.header, provenance={})


def test_a_cut_of_everything_is_the_same(tmp_path: Path) -> None:
    trace = small_trace(tmp_path / "x.topk")
    made = cut_trace(trace, tmp_path / "y.topk")
    assert (made.records_NW == trace.records_NW).all()


def test_steps_without_the_request_stay(tmp_path: Path) -> None:
    made = cut_trace(small_trace(tmp_path / "x.topk"), tmp_path / "y.topk", requests=[11])
    assert made.steps().active.tolist() == [[False], [True], [True], [True], [True]]


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"steps": (0, 6)}, "has 5 steps; 0:6 are not among them"),
        ({"groups": [2, 0]}, "has the index groups 0 to 1, not 2"),
        ({"groups": [-1]}, "not -1"),
        ({"groups": []}, "none is chosen"),
        ({"requests": [10, 3, 4]}, "has the requests 10, 11, 12 in steps 0:5, not 3, 4"),
        ({"requests": [11], "steps": (0, 1)}, "has the requests 10, 12 in steps 0:1, not 11"),
        ({"requests": []}, "none is chosen"),
        ({"requests": list(range(100, 150))}, "not 100, 101, 102, 103, 104, … 145, 146, 147, 148, 149"),
    ],
)
def test_what_is_not_there(tmp_path: Path, choice: dict[str, object], says: str) -> None:
    trace = small_trace(tmp_path / "x.topk")
    with pytest.raises(CastoffError, match=says):
        cut_trace(trace, tmp_path / "y.topk", **choice)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == [trace.path]


def test_not_onto_itself(tmp_path: Path) -> None:
    trace = small_trace(tmp_path / "x.topk")
    link = tmp_path / "link"
    link.symlink_to(trace.path)
    for target in (trace.path, link):
        with pytest.raises(CastoffError, match="is what is read"):
            cut_trace(trace, target, groups=[0])
    assert open_trace(trace.path).header == HEADER


@pytest.mark.property
@given(case=traces())
def test_summary(folder: Path, case: tuple[TraceHeader, list[Step]]) -> None:
    header, written = case
    summary = summarize(write(folder / "x.topk", header, written))
    requests: Counter[int] = Counter()
    lengths, distinct = [], 0
    for entry in written:
        for row in np.flatnonzero(entry.request_ids_B >= 0):
            requests[int(entry.request_ids_B[row])] += 1
            lengths.append(int(entry.lengths_B[row]))
            distinct += sum(len(set(ids_SK.ravel().tolist()) - {-1}) for ids_SK in entry.ids_GBSK[:, row])
    known = lengths if header.lengths_known else []
    assert (summary.requests, summary.request_steps, summary.steps) == (len(requests), len(lengths), len(written))
    assert (summary.min_length, summary.max_length) == (min(known, default=None), max(known, default=None))
    if lengths:
        assert summary.mean_distinct_ids == pytest.approx(distinct / len(lengths) / header.num_groups)
    else:
        assert summary.mean_distinct_ids is None


def test_distinct_ids_at_the_ends_of_their_range() -> None:
    ids_GBSK = np.array([[[[-1, 0], [0, 2**31 - 1]], [[-1, -1], [-1, -1]]]], np.int32)
    assert num_distinct(ids_GBSK).tolist() == [[2, 0]]
