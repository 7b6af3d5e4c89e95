"""A trace is there whole or not at all; what no step can hold is refused."""

import errno
import io
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from castoff.errors import CastoffError
from castoff.trace.reader import open_trace
from castoff.trace.writer import TraceWriter
from tests.trace.traces import HEADER, append, small_trace, step

STEP = step(HEADER, np.random.default_rng(4), requests=[7, 8, 9])


def test_nothing_under_the_name_until_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "x.topk"
    with TraceWriter(path, HEADER) as writer:
        append(writer, STEP)
        assert not path.exists()
        (temporary,) = tmp_path.iterdir()
        assert temporary.name.startswith(".castoff-")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_interrupted_writer_leaves_what_was_there(tmp_path: Path, kind: type[BaseException], steps: int) -> None:
    path = small_trace(tmp_path / "x.topk").path
    before = path.read_bytes()
    for target in (path, tmp_path / "new.topk"):
        with pytest.raises(kind), TraceWriter(target, HEADER) as writer:  # noqa: PT012
            for _ in range(steps):
                append(writer, STEP)
            raise kind
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_an_interrupt_while_the_file_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "x.topk", HEADER) as writer:
        append(writer, STEP)
    assert list(tmp_path.iterdir()) == []


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(CastoffError, match=r"cannot write .*x\.topk: No space left"):
        small_trace(tmp_path / "x.topk")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_on_the_way(tmp_path: Path) -> None:
    with pytest.raises(CastoffError, match="No space left"), TraceWriter(tmp_path / "x.topk", HEADER) as writer:  # noqa: PT012
        with writer._new.file:
            writer._new.file = io.BufferedWriter(io.FileIO("/dev/full", "wb"), buffer_size=16)
        append(writer, STEP)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_replaced_through_links_and_keeps_its_mode(tmp_path: Path) -> None:
    path = small_trace(tmp_path / "x.topk").path
    path.chmod(0o640)
    opened = open_trace(path)
    before = opened.steps().ids_NGBSK.copy()
    link = tmp_path / "link"
    link.symlink_to(path)
    with TraceWriter(link, HEADER) as writer:
        append(writer, STEP)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert open_trace(path).num_steps == 1
    # Who had the old file open still reads that.
    assert (opened.steps().ids_NGBSK == before).all()


@pytest.mark.parametrize("name", ["", "missing/x.topk", "file/x.topk"])
def test_where_no_file_can_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CastoffError, match="cannot write"):
        TraceWriter(tmp_path / name, HEADER)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no /dev/null")
def test_no_device() -> None:
    with pytest.raises(CastoffError, match="no regular file"):
        TraceWriter("/dev/null", HEADER)


def ids(changes: dict[tuple[int, int, int, int], int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ids for two requests of lengths 10 and 20 with 2 query tokens each: ids 0 to 3, but for some places."""
    made = np.broadcast_to(np.arange(4), (2, 2, 2, 4)).copy()
    for place, value in changes.items():
        made[place] = value
    return made


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"request_ids_B": [1, 1]}, "request 1 stands in two rows"),
        ({"request_ids_B": [1, -2]}, "request ids must be from 0 to 2147483647, or -1 for an unused row, got -2"),
        ({"request_ids_B": [1, 2**31]}, "got 2147483648"),
        ({"request_ids_B": [1]}, "request_ids are of 1 request rows, ids of 2"),
        ({"request_ids_B": [[1, 2]]}, r"request_ids must have 1 axis, got shape \(1, 2\)"),
        ({"request_ids_B": [1.0, 2.0]}, "request_ids must be integers, got float64"),
        ({"request_ids_B": [True, False]}, "request_ids must be integers, got bool"),
        ({"lengths_B": [10, 1]}, "request 2 has length 1; a length includes the step's own tokens, 2 here"),
        ({"lengths_B": [10, 2**31]}, "request 2 has length 2147483648"),
        ({"lengths_B": [10, 20, 30]}, "lengths are of 3 request rows"),
        ({"lengths_B": [10.5, 20]}, "lengths must be integers"),
        ({"accepted_B": [3, 0]}, "request 1 keeps 3 of 2 query tokens"),
        ({"accepted_B": [0, -2]}, "request 2 keeps -2 of 2"),
        ({"query_lengths_B": [0, 1]}, "request 1 brings 0 query tokens, but must bring 1 to 2"),
        ({"query_lengths_B": [1, 3]}, "request 2 brings 3 query tokens"),
        (
            {"query_lengths_B": [2, 1], "accepted_B": [1, 1]},
            "request 2, group 0, query 1, rank 0: id 0 is of a query that the request does not",
        ),
        ({"ids_GBSK": ids({(1, 0, 0, 3): 9})}, "request 1, group 1, query 0, rank 3: id 9 lies beyond .* position 8"),
        (
            {"ids_GBSK": ids({(1, 1, 1, 2): 20})},
            "request 2, group 1, query 1, rank 2: id 20 lies beyond .* position 19",
        ),
        (
            {"ids_GBSK": ids({(0, 1, 0, 0): -7})},
            "request 2, group 0, query 0, rank 0: id -7 is negative; -1 means none",
        ),
        ({"ids_GBSK": ids({}).astype(np.float32)}, "ids must be integers, got float32"),
        ({"ids_GBSK": ids({})[:1]}, "ids are of 1 index groups, the trace is of 2"),
        ({"ids_GBSK": ids({})[0]}, "ids must have 4 axes"),
        ({"ids_GBSK": np.zeros((2, 4, 2, 4), int)}, "ids are of 4 request rows, the trace has room for 3"),
        ({"ids_GBSK": np.zeros((2, 2, 3, 4), int)}, "ids are of 3 query tokens, the trace has room for 2"),
        ({"ids_GBSK": np.zeros((2, 2, 2, 5), int)}, "ids are of 5 ids per query, the trace has room for 4"),
    ],
)
def test_steps_that_cannot_be(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {"request_ids_B": [1, 2], "lengths_B": [10, 20], "accepted_B": [1, 2], "ids_GBSK": ids({})}
    with TraceWriter(tmp_path / "x.topk", HEADER) as writer:
        writer.append(**good)
        with pytest.raises(CastoffError, match=f"^step 1 of .*x.topk: .*{says}"):
            writer.append(**{**good, **changes})
        # A refused step leaves no trace, and the writer goes on.
        writer.append(**good)
    steps = open_trace(tmp_path / "x.topk").steps()
    assert steps.num_steps == 2
    assert (steps.ids_NGBSK[0] == steps.ids_NGBSK[1]).all()


def test_ids_that_do_not_fit_without_lengths(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "x.topk", replace(HEADER, lengths_known=False)) as writer:
        writer.append(np.array([0]), None, None, np.full((2, 1, 1, 1), 2**31 - 1))
        for dtype in (np.int64, np.uint64):
            with pytest.raises(CastoffError, match="id 2147483648 does not fit into 32 bits"):
                writer.append(np.array([0]), None, None, np.full((2, 1, 1, 1), 2**31, dtype))
    assert (open_trace(tmp_path / "x.topk").steps().ids_NGBSK.max()) == 2**31 - 1
