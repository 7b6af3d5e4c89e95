"""What is written is what is read."""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inline_snapshot import snapshot

from castoff.errors import CastoffError
from castoff.spec.model import load_model
from castoff.trace.header import TraceHeader
from castoff.trace.reader import open_trace
from castoff.trace.writer import TraceWriter
from tests.trace.traces import HEADER, Step, append, small_trace, step, traces, write

property_test = pytest.mark.property


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@property_test
@given(case=traces())
def test_round_trip(folder: Path, case: tuple[TraceHeader, list[Step]]) -> None:
    header, written = case
    trace = write(folder / "x.topk", header, written)
    assert trace.header == header
    assert trace.num_steps == len(written)
    assert trace.size_bytes == trace.path.stat().st_size
    assert trace.size_bytes == len(header.encoded(0)) + len(written) * header.record_bytes
    read = trace.steps()
    assert read.ids_NGBSK.shape == (len(written), *header.ids_shape)
    for index, entry in enumerate(written):
        rows = len(entry.request_ids_B)
        used = entry.request_ids_B >= 0
        assert read.active[index].tolist() == [*used, *[False] * (header.batch - rows)]
        assert (read.request_ids_NB[index, rows:] == -1).all()
        for name, values_NB, written_B in (
            ("request id", read.request_ids_NB, entry.request_ids_B),
            ("query length", read.query_lengths_NB, entry.query_lengths_B),
            ("accepted", read.accepted_NB, entry.accepted_B),
            ("length", read.lengths_NB, entry.lengths_B if header.lengths_known else np.full(rows, -1)),
        ):
            assert (values_NB[index, :rows][used] == written_B[used]).all(), name
        assert (read.ids_NGBSK[index, :, :rows] == entry.ids_GBSK).all()
        assert (read.ids_NGBSK[index, :, rows:] == -1).all()
        committed_B = (entry.lengths_B - entry.query_lengths_B) if header.lengths_known else np.full(rows, 2**31 - 1)
        assert (read.committed[index, :rows] == np.where(used, committed_B, 0)).all()


@property_test
@given(case=traces(max_steps=6), bounds=st.tuples(st.integers(0, 6), st.integers(0, 6)))
def test_a_part_is_the_same_part_of_the_whole(
    folder: Path, case: tuple[TraceHeader, list[Step]], bounds: tuple[int, int]
) -> None:
    trace = write(folder / "x.topk", *case)
    first, end = (min(bound, trace.num_steps) for bound in sorted(bounds))
    part = trace.steps(first, end)
    assert (part.first, part.num_steps) == (first, end - first)
    assert (part.ids_NGBSK == trace.steps().ids_NGBSK[first:end]).all()
    assert (part.request_ids_NB == trace.steps().request_ids_NB[first:end]).all()


@pytest.mark.parametrize(("first", "end"), [(-1, 2), (3, 2), (0, 6), (6, None)])
def test_steps_that_are_not_there(tmp_path: Path, first: int, end: int | None) -> None:
    trace = small_trace(tmp_path / "x.topk")
    with pytest.raises(CastoffError, match="has 5 steps"):
        trace.steps(first, end)


def test_a_file_is_read_where_it_is_used(tmp_path: Path) -> None:
    trace = small_trace(tmp_path / "x.topk")
    steps = trace.steps(1, 4)
    for array in (steps.request_ids_NB, steps.lengths_NB, steps.query_lengths_NB, steps.accepted_NB, steps.ids_NGBSK):
        assert array.base is not None
        assert np.shares_memory(array, trace.records_NW)
        assert not array.flags.writeable


@pytest.mark.golden
def test_bytes(tmp_path: Path) -> None:
    header = TraceHeader(
        model="m", owner_layers=(5,), batch=2, query_length=1, index_topk=3, provenance={"seed": 1}, written_by="hand"
    )
    with TraceWriter(tmp_path / "x.topk", header) as writer:
        writer.append(np.array([7]), np.array([600]), np.array([1]), np.array([[[[258, 0]]]]))
    data = (tmp_path / "x.topk").read_bytes()
    magic, version, header_bytes, num_steps = struct.unpack("<16sIIQ", data[:32])
    assert (magic, version, num_steps) == (b"castoff-topk\r\n\x1a\n", 1, 1)
    assert (32 + header_bytes) % 64 == 0
    assert data[32 : 32 + header_bytes].decode().rstrip() == snapshot(
        '{"model":"m","owner_layers":[5],"batch":2,"query_length":1,"index_topk":3,"lengths_known":true,"provenance":{"seed":1},"written_by":"hand"}'
    )
    words = struct.unpack("<14i", data[32 + header_bytes :])
    assert words == (7, -1, 600, -1, 1, -1, 1, -1, 258, 0, -1, -1, -1, -1)


def test_no_steps(tmp_path: Path) -> None:
    trace = write(tmp_path / "x.topk", HEADER, [])
    assert trace.num_steps == 0
    assert trace.steps().ids_NGBSK.shape == (0, *HEADER.ids_shape)
    assert trace.steps().committed.shape == (0, 3)


def test_fewer_rows_queries_and_ranks(tmp_path: Path) -> None:
    ids_GBSK = np.arange(2)[:, None, None, None]
    with TraceWriter(tmp_path / "x.topk", HEADER) as writer:
        writer.append(np.array([4]), np.array([9]), None, ids_GBSK)
        writer.append(np.array([], int), np.array([], int), None, np.empty((2, 0, 2, 4), int))
        writer.append(np.array([4, 5]), np.array([9, 9]), None, np.empty((2, 2, 1, 0), int))
    steps = open_trace(tmp_path / "x.topk").steps()
    assert steps.query_lengths_NB[0].tolist() == [1, -1, -1]
    assert steps.committed.tolist() == [[8, 0, 0], [0, 0, 0], [8, 8, 0]]
    assert (steps.ids_NGBSK[0] >= 0).sum() == 2
    assert (steps.ids_NGBSK[1:] == -1).all()


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<i8", ">i8", "<i2", "i1", "u1", ">u4", "<u8"])
def test_any_integers(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(1)
    entry = step(HEADER, rng, requests=[0, 1, 2])
    entry = replace(
        entry, ids_GBSK=np.maximum(entry.ids_GBSK, 0), query_lengths_B=np.full(3, 2), lengths_B=np.full(3, 70)
    )
    entry = replace(entry, accepted_B=np.full(3, 1))
    expected = write(tmp_path / "x.topk", HEADER, [entry]).path.read_bytes()
    cast = {name: getattr(entry, name).astype(dtype) for name in Step.__dataclass_fields__}
    assert write(tmp_path / "y.topk", HEADER, [Step(**cast)]).path.read_bytes() == expected


def test_unused_rows_are_ignored(tmp_path: Path) -> None:
    entry = step(HEADER, np.random.default_rng(2), requests=[3, -1, 5])
    unused = entry.request_ids_B < 0
    noise = replace(
        entry,
        lengths_B=np.where(unused, -(2**40), entry.lengths_B),
        accepted_B=np.where(unused, 99, entry.accepted_B),
        query_lengths_B=np.where(unused, -5, entry.query_lengths_B),
        ids_GBSK=np.where(unused[:, None, None], 2**40, entry.ids_GBSK),
    )
    expected = write(tmp_path / "x.topk", HEADER, [entry]).path.read_bytes()
    assert write(tmp_path / "y.topk", HEADER, [noise]).path.read_bytes() == expected


def test_header_of_a_model() -> None:
    header = TraceHeader.of_model(load_model("glm52"), batch=4, query_length=4)
    assert header.ids_shape == (21, 4, 4, 2048)
    assert header.owner_layers[:5] == (0, 1, 2, 6, 10)
    with pytest.raises(CastoffError, match="DeepSeek-R1 has no indexer"):
        TraceHeader.of_model(load_model("deepseek-ai/DeepSeek-R1"), batch=4, query_length=4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": " "}, "model and written_by must be words"),
        ({"batch": 0}, "batch must be a whole number from 1"),
        ({"query_length": True}, "query_length must be"),
        ({"index_topk": 2**31}, "index_topk must be"),
        ({"owner_layers": ()}, "owner_layers must be one or more"),
        ({"owner_layers": (3, 3)}, r"ascending order, got \[3, 3\]"),
        ({"owner_layers": (-1,)}, "owner_layers"),
        ({"provenance": {"x": float("nan")}}, "provenance"),
        ({"provenance": {"x": [1]}}, "provenance"),
        ({"batch": 2**31 - 1, "index_topk": 2**31 - 1}, "more than any can"),
    ],
)
def test_headers_that_cannot_be(changes: dict[str, object], says: str) -> None:
    with pytest.raises(CastoffError, match=says):
        replace(HEADER, **changes)  # type: ignore[arg-type]


def test_lengths_where_they_do_not_belong(tmp_path: Path) -> None:
    entry = step(HEADER, np.random.default_rng(3), requests=[0])
    with TraceWriter(tmp_path / "x.topk", HEADER) as writer, pytest.raises(CastoffError, match="lengths are missing"):
        append(writer, entry, lengths_B=None)
    unknown = replace(HEADER, lengths_known=False)
    with TraceWriter(tmp_path / "x.topk", unknown) as writer, pytest.raises(CastoffError, match="lengths are given"):
        append(writer, entry, lengths_B=entry.lengths_B)
