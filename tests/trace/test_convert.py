"""Traces from .npy and safetensors arrays."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from castoff.errors import CastoffError, CastoffWarning
from castoff.spec.model import ModelSpec, load_model
from castoff.trace.convert import convert_arrays, read_trace_arrays
from castoff.trace.reader import Trace
from castoff.trace.summary import summarize
from tests.cli.commands import CONFIG

AnyArray = npt.NDArray[Any]
# Steps, index groups, requests, query tokens, ids: the model of CONFIG has three groups and an index_topk of 16.
SHAPE = (4, 3, 2, 3, 16)
LENGTHS = np.array([[20, 40], [22, 0], [24, -1], [27, 50]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return load_model(str(path))


def some_ids() -> AnyArray:
    """Ids that go with LENGTHS, among them some −1."""
    visible_NBS = LENGTHS[:, :, None] - 2 + np.arange(3)
    ids = np.random.default_rng(5).integers(0, 2**31, SHAPE) % np.maximum(visible_NBS, 1)[:, None, :, :, None]
    ids[:, 1, 0, 2, 5:] = -1
    ids[np.broadcast_to((LENGTHS <= 0)[:, None, :, None, None], SHAPE)] = -1
    return ids


def safetensors(path: Path, tensors: dict[str, AnyArray], *, words: dict[str, str] | None = None) -> Path:
    """A file written by its published description; `words` exchanges the name of a tensor's dtype."""
    header: dict[str, Any] = {"__metadata__": {"engine": "x"}}
    data = b""
    for name, values in tensors.items():
        dtype = (words or {}).get(name) or f"{'I' if values.dtype.kind == 'i' else 'F'}{8 * values.dtype.itemsize}"
        raw = values.astype(values.dtype.newbyteorder("<")).tobytes()
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def npy(path: Path, values: AnyArray) -> Path:
    np.save(path, values)
    return path


def converted(model: ModelSpec, folder: Path, ids: Path, lengths: Path | None = None) -> Trace:
    return convert_arrays(read_trace_arrays(ids, lengths), model, folder / "out.topk")


def assert_holds(trace: Trace, ids: AnyArray) -> None:
    steps = trace.steps()
    assert (steps.ids_NGBSK == ids).all()
    assert steps.request_ids_NB.tolist() == np.where(LENGTHS > 0, np.arange(2), -1).tolist()
    assert (steps.accepted_NB == -1).all()
    assert (steps.query_lengths_NB[steps.active] == 3).all()


def test_with_lengths(model: ModelSpec, tmp_path: Path) -> None:
    ids = some_ids()
    trace = converted(model, tmp_path, npy(tmp_path / "ids.npy", ids), npy(tmp_path / "lengths.npy", LENGTHS))
    assert_holds(trace, ids)
    assert (trace.steps().lengths_NB == np.where(LENGTHS > 0, LENGTHS, -1)).all()
    assert (trace.steps().committed == np.maximum(LENGTHS - 3, 0)).all()
    header = trace.header
    assert (header.ids_shape, header.owner_layers, header.lengths_known) == (SHAPE[1:2] + SHAPE[2:], (0, 1, 2), True)
    assert header.provenance == {"converted_from": "ids.npy", "lengths_from": "lengths.npy"}
    assert header.model == model.name


def test_without_lengths(model: ModelSpec, tmp_path: Path) -> None:
    ids = some_ids()
    path = npy(tmp_path / "ids.npy", ids)
    with pytest.warns(CastoffWarning, match="came without lengths, so every id counts as committed"):
        trace = converted(model, tmp_path, path)
    assert_holds(trace, ids)
    assert not trace.header.lengths_known
    assert (trace.steps().committed == np.where(LENGTHS > 0, 2**31 - 1, 0)).all()


@pytest.mark.parametrize("dtype", ["<i2", ">i2", "<i4", ">i4", "<i8", ">i8", "i1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_any_integers_in_any_order(model: ModelSpec, tmp_path: Path, dtype: str, order: Any) -> None:
    ids = some_ids()
    lengths = npy(tmp_path / "lengths.npy", LENGTHS.astype(dtype))
    trace = converted(model, tmp_path, npy(tmp_path / "ids.npy", np.array(ids, dtype, order=order)), lengths)
    assert_holds(trace, ids)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_safetensors(model: ModelSpec, tmp_path: Path, dtype: Any) -> None:
    ids = some_ids()
    both = safetensors(tmp_path / "a.safetensors", {"ids": ids.astype(dtype), "lengths": LENGTHS.astype(dtype)})
    assert_holds(converted(model, tmp_path, both), ids)
    alone = safetensors(tmp_path / "b.safetensors", {"topk": ids.astype(dtype)})
    others = {"x": LENGTHS[:1], "lengths": LENGTHS, "weights": np.ones(3, np.float32)}
    assert_holds(converted(model, tmp_path, alone, safetensors(tmp_path / "c.safetensors", others)), ids)


def test_what_the_safetensors_package_writes(model: ModelSpec, tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.numpy")
    ids = some_ids()
    package.save_file({"ids": ids, "lengths": LENGTHS.astype(np.int16)}, tmp_path / "x.safetensors")
    assert_holds(converted(model, tmp_path, tmp_path / "x.safetensors"), ids)


def changed(values: AnyArray, place: tuple[int, ...], value: int) -> AnyArray:
    values = values.copy()
    values[place] = value
    return values


@pytest.mark.parametrize(
    ("ids", "lengths", "says"),
    [
        (some_ids().astype(np.float32), LENGTHS, r"ids\.npy: ids must be integers, got float32"),
        (some_ids() > 3, LENGTHS, r"ids\.npy: ids must be integers, got bool"),
        (some_ids()[0], LENGTHS, r"must have the axes steps, index groups, .*, got shape \(3, 2, 3, 16\)"),
        (some_ids()[:0], LENGTHS[:0], "none of them empty"),
        (some_ids()[:, :2], LENGTHS, r"has 2 index groups, but .* has 3; its shape is \(4, 2, 2, 3, 16\)"),
        (some_ids()[..., :15], LENGTHS, r"has 15 ids per query \(index_topk\), but .* has 16"),
        (some_ids(), LENGTHS[:3], r"lengths\.npy: lengths must have the axes .* \(4, 2\) as in .*, got shape \(3, 2\)"),
        (some_ids(), LENGTHS.T, r"got shape \(2, 4\)"),
        (some_ids(), LENGTHS + 0.5, r"lengths\.npy: lengths must be integers, got float64"),
        (some_ids(), changed(LENGTHS, (1, 1), -3), "step 1: length -3 is negative; 0 or -1"),
        (some_ids(), changed(LENGTHS, (3, 1), 0), "step 3: request 1 has ids, but its length 0 says"),
        (some_ids(), changed(LENGTHS, (3, 1), 2), "step 3: request 1 has length 2; a length includes"),
        (some_ids(), changed(LENGTHS, (3, 0), 2**31), "step 3: request 0 has length 2147483648"),
        (changed(some_ids(), (2, 1, 0, 1, 7), 23), LENGTHS, "step 2: request 0, group 1, query 1, rank 7: id 23 lies"),
        (changed(some_ids(), (0, 2, 1, 0, 0), -2), LENGTHS, "step 0: request 1, group 2, query 0, rank 0: id -2 is"),
        (changed(some_ids(), (0, 0, 1, 2, 0), 2**31), None, "step 0: request 1, .*: id 2147483648 does not fit"),
        (changed(some_ids(), (0, 0, 1, 2, 0), -(2**40)), None, "step 0: request 1, .*: id -1099511627776 is negative"),
        (some_ids().astype(np.uint64), None, "id 18446744073709551615 does not fit"),
    ],
)
def test_arrays_that_are_refused(
    model: ModelSpec, tmp_path: Path, ids: AnyArray, lengths: AnyArray | None, says: str
) -> None:
    ids_file = npy(tmp_path / "ids.npy", ids)
    lengths_file = None if lengths is None else npy(tmp_path / "lengths.npy", lengths)
    with pytest.raises(CastoffError, match=says):
        converted(model, tmp_path, ids_file, lengths_file)
    assert {path.suffix for path in tmp_path.iterdir()} == {".npy"}


def test_ids_of_64_bits_that_fit(model: ModelSpec, tmp_path: Path) -> None:
    most = 2**31 - 1
    ids = changed(some_ids(), (0, 0, 0, 2, 0), most - 1).astype(">i8")
    lengths = changed(np.maximum(LENGTHS, 0), (0, 0), most).astype(">u8")
    trace = converted(model, tmp_path, npy(tmp_path / "ids.npy", ids), npy(tmp_path / "lengths.npy", lengths))
    assert_holds(trace, ids)
    assert summarize(trace).max_length == most


def test_a_model_without_an_indexer(tmp_path: Path) -> None:
    ids, lengths = npy(tmp_path / "ids.npy", some_ids()), npy(tmp_path / "lengths.npy", LENGTHS)
    with pytest.raises(CastoffError, match="DeepSeek-V3 has no indexer"):
        converted(load_model("deepseek-ai/DeepSeek-V3"), tmp_path, ids, lengths)


def test_damaged_npy(model: ModelSpec, tmp_path: Path) -> None:
    path = npy(tmp_path / "ids.npy", some_ids())
    data = path.read_bytes()
    objects = tmp_path / "objects.npy"
    np.save(objects, np.array([{}], dtype=object), allow_pickle=True)
    npz = tmp_path / "x.npz"
    np.savez(npz, ids=some_ids())
    bad_header = data.replace(b"(4, 3, 2", b"(4, 3, {")
    for wrong in (
        *(data[:size] for size in (6, 8, 9, 40, 127, 128, len(data) - 1)),
        bad_header,
        objects.read_bytes(),
    ):
        path.write_bytes(wrong)
        with pytest.raises(CastoffError, match=r"ids\.npy is no whole \.npy array: "):
            converted(model, tmp_path, path)
    for wrong in (b"", b"\x93NUM", npz.read_bytes()):
        path.write_bytes(wrong)
        with pytest.raises(CastoffError, match="is neither an"):
            converted(model, tmp_path, path)
    for other, says in (
        (tmp_path, "is a directory"),
        (tmp_path / "none.npy", "cannot read"),
        (Path("/dev/null"), "regular"),
    ):
        with pytest.raises(CastoffError, match=says):
            converted(model, tmp_path, other)


def test_damaged_safetensors(model: ModelSpec, tmp_path: Path) -> None:
    path = safetensors(tmp_path / "x.safetensors", {"ids": some_ids(), "lengths": LENGTHS})
    data = path.read_bytes()

    def refused(wrong: bytes, says: str) -> None:
        path.write_bytes(wrong)
        with pytest.raises(CastoffError, match=says):
            converted(model, tmp_path, path)

    refused(b"", "ends in its header")
    refused(data[:7], "ends in its header")
    refused(data[:50], "ends in its header")
    refused(data[:-1], "is cut short: the tensor lengths ends at byte")
    refused(data[: len(data) // 2], "is cut short: the tensor ids ends at byte")
    refused(data[:8] + b"[" + data[9:], "header is no JSON object")
    refused(data.replace(b'"I64"', b'"F64"'), "ids must be integers, got F64")
    refused(data.replace(b"[4, 3, 2", b"[4, 3, 3"), "ids has no usable entry")
    refused(data.replace(b'"shape": [4, 3', b'"shapf": [4, 3'), "ids has no usable entry")
    refused(data.replace(b'"ids"', b'"idx"'), "must have a tensor ids, or only one; its tensors: idx, lengths")
    refused(struct.pack("<Q", 2) + b"{}", "its tensors: none")
