"""Files that are no whole trace: each fault is one sentence that names the file and says what to do."""

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff import __version__
from castoff.errors import CastoffError
from castoff.trace.header import MAGIC
from castoff.trace.reader import open_trace
from castoff.trace.summary import summarize
from tests.trace.traces import HEADER, small_trace

RECORD = HEADER.record_bytes
START = len(HEADER.encoded(0))


def refusal(path: Path) -> str:
    with pytest.raises(CastoffError) as caught:
        open_trace(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return small_trace(tmp_path_factory.mktemp("whole") / "x.topk").path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.topk"


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (0, "is empty"),
        (1, "is cut short: it has 1 bytes; the preamble takes 32"),
        (15, "the preamble takes 32"),
        (16, "the preamble takes 32"),
        (19, "the preamble takes 32"),
        (31, "the preamble takes 32"),
        (32, f"it has 32 bytes; preamble and header take {START}"),
        (START - 1, f"preamble and header take {START}"),
        (START, f"0 of its 5 steps are whole, and all take {START + 5 * RECORD:,}"),
        (START + 1, "0 of its 5 steps are whole"),
        (START + RECORD - 1, "0 of its 5 steps are whole"),
        (START + RECORD, "1 of its 5 steps are whole"),
        (START + 4 * RECORD, "4 of its 5 steps are whole"),
        (START + 5 * RECORD - 1, "4 of its 5 steps are whole"),
    ],
)
def test_cut_short(path: Path, whole: bytes, size: int, says: str) -> None:
    path.write_bytes(whole[:size])
    message = refusal(path)
    assert says in message
    assert not size or message.endswith("; copy or write it again")


def test_cut_short_anywhere(path: Path, whole: bytes) -> None:
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        refusal(path)
    path.write_bytes(whole)
    assert open_trace(path).num_steps == 5


@pytest.mark.parametrize("more", [1, RECORD])
def test_too_long(path: Path, whole: bytes, more: int) -> None:
    path.write_bytes(whole + bytes(more))
    assert "tells of 5 steps" in refusal(path)


def test_header_that_does_not_fit_the_records(path: Path, whole: bytes) -> None:
    path.write_bytes(whole.replace(b'"batch":3', b'"batch":2'))
    assert f"has {len(whole):,} bytes, but its header tells of 5 steps" in refusal(path)
    path.write_bytes(whole.replace(b'"index_topk":4', b'"index_topk":9'))
    assert "is cut short" in refusal(path)


@pytest.mark.parametrize(
    "begin",
    [
        b"\x93NUMPY\x01\x00",
        b"castoff-topk\n\x1a\n" + bytes(40),
        b"PK\x03\x04",
        b"{}",
        b"CASTOFF-TOPK\r\n\x1a\n",
        bytes(99),
    ],
)
def test_another_magic(path: Path, begin: bytes) -> None:
    path.write_bytes(begin)
    message = refusal(path)
    assert "is no trace: it begins with" in message
    assert "castoff trace convert" in message


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_another_version(path: Path, whole: bytes, version: int) -> None:
    path.write_bytes(whole[:16] + struct.pack("<I", version) + whole[20:])
    assert f"is a trace of format version {version}, and castoff {__version__} reads version 1; use" in refusal(path)


def with_header(change: Callable[[dict[str, Any]], object]) -> bytes:
    header = json.loads(HEADER.encoded(0)[32:])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<16sIIQ", MAGIC, 1, len(text), 0) + text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda header: header.pop("model"), "header: model is missing"),
        (lambda header: header.pop("owner_layers"), "header: owner_layers is missing"),
        (lambda header: header.pop("batch"), "header: batch is missing"),
        (lambda header: header.pop("lengths_known"), "header: lengths_known is missing"),
        (lambda header: header.pop("provenance"), "header: provenance is missing"),
        (lambda header: header.pop("written_by"), "header: written_by is missing"),
        (lambda header: header.update(seed=1), "unknown key 'seed'"),
        (lambda header: header.update(batch=0), "header: batch must be a whole number"),
        (lambda header: header.update(batch=1.5), "header: batch must be a whole number"),
        (lambda header: header.update(batch=2**40), "header: batch must be a whole number from 1 to 2147483647"),
        (lambda header: header.update(batch=2**31 - 1, index_topk=2**31 - 1), "more than any can"),
        (lambda header: header.update(query_length=True), "header: query_length must be"),
        (lambda header: header.update(owner_layers=3), "header: owner_layers must be a list, got 3"),
        (lambda header: header.update(owner_layers=["0"]), "header: owner_layers must be one or more layers"),
        (lambda header: header.update(owner_layers=[2, 1]), "ascending order, got [2, 1]"),
        (lambda header: header.update(model=""), "header: model must be a non-empty string"),
        (lambda header: header.update(lengths_known=1), "header: lengths_known must be true or false"),
        (lambda header: header.update(provenance=[]), "header: provenance must be a table"),
        (lambda header: header.update(provenance={"x": None}), "header: provenance must give words"),
    ],
)
def test_headers(path: Path, change: Callable[[dict[str, Any]], object], says: str) -> None:
    path.write_bytes(with_header(change))
    assert says in refusal(path)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff{}", b"", b'{"model": NaN', b"[" * 100_000])
def test_headers_that_are_no_object(path: Path, text: bytes) -> None:
    path.write_bytes(struct.pack("<16sIIQ", MAGIC, 1, len(text), 0) + text)
    assert "header: " in refusal(path)


@pytest.mark.property
@given(place=st.integers(0, START - 1), value=st.integers(0, 255))
def test_a_changed_byte_is_an_error_or_another_header(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, place: int, value: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.topk"
    path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
    with suppress(CastoffError):
        trace = open_trace(path)
        assert trace.size_bytes == START + trace.num_steps * trace.header.record_bytes


def test_no_file(tmp_path: Path) -> None:
    assert "cannot read" in refusal(tmp_path / "x.topk")
    assert "is a directory" in refusal(tmp_path)
    assert "no regular file" in refusal(Path("/dev/null"))


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        # Words of the record of step 1: request ids, lengths, query lengths, accepted counts of 3 rows, then ids.
        (0, 11, "request 11 stands in two rows"),
        (0, -9, "got -9"),
        (3, 0, "request 10 has length 0"),
        (6, 3, "request 10 brings 3 query tokens"),
        (9, 7, "request 10 keeps 7 of"),
        (12, 1000, "request 10, group 0, query 0, rank 0: id 1000 lies beyond"),
        (12, -2, "id -2 is negative"),
    ],
)
def test_steps_that_no_writer_wrote(path: Path, whole: bytes, word: int, value: int, says: str) -> None:
    changed = np.frombuffer(whole, np.uint8).copy()
    changed[START + RECORD :][: 4 * word + 4].view("<i4")[word] = value
    path.write_bytes(changed.tobytes())
    with pytest.raises(CastoffError, match=f"^{path}: step 1: .*{says}"):
        summarize(open_trace(path))
