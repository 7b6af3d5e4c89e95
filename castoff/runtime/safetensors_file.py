"""Writing safetensors files one tensor at a time, and other files beside them: whole, or not there at all.

A file is eight bytes with the length of a JSON header, the header (dtype, shape and place of every tensor), and the
tensors (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.ops.program import Tensor

torch = lazy.load("torch")
safetensors = lazy.load("safetensors")

TEMPORARY_PREFIX = ".castoff-"
DTYPE_BYTES = {
    "F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip

Contents = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensors of a file by name: dtype, in safetensors' words, and shape."""


def shard_bytes(contents: Contents) -> int:
    """Size of a file."""
    return len(_header(contents)) + sum(_tensor_bytes(*entry) for entry in contents.values())


def is_whole(path: Path, contents: Contents) -> bool:
    """Whether a file is there, complete, with just these tensors; no tensor is read."""
    if not path.is_file():
        return False
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (item.get_dtype(), tuple(item.get_shape())) for name, item in slices.items()} == contents
    except (OSError, safetensors.SafetensorError):
        return False


def write_shard(path: Path, contents: Contents, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a file of tensors as they come, in any order; each of `contents` must come once."""
    header = _header(contents)
    places = _places(contents)
    with replacing(path) as file:
        file.write(header)
        for name, values in tensors:
            first, end = places.pop(name)
            raw = values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            assert raw.nbytes == end - first, f"{name} is not as announced"
            file.seek(len(header) + first)
            file.write(raw.data)
        assert not places, f"{min(places)} did not come"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when it is complete and on disk, and is removed if it fails."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise CastoffError(
            f"cannot write {path}: {error.strerror or error}; the same command goes on from what is finished"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in DTYPE_BYTES:
        raise CastoffError(f"tensors of {dtype} cannot be written; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype] * math.prod(shape)


def _places(contents: Contents) -> dict[str, tuple[int, int]]:
    """First byte and end of every tensor, the widest dtypes first, so that all are aligned."""
    places, start = {}, 0
    sizes = {name: _tensor_bytes(*entry) for name, entry in contents.items()}
    for name in sorted(contents, key=lambda name: (-DTYPE_BYTES[contents[name][0]], name)):
        end = start + sizes[name]
        places[name] = (start, end)
        start = end
    return places


def _header(contents: Contents) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, (first, end) in _places(contents).items():
        dtype, shape = contents[name]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [first, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
