"""Integer arrays in files of others: .npy and safetensors, mapped into memory with numpy alone."""

from __future__ import annotations

import json
import math
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from castoff.errors import CastoffError
from castoff.trace.steps import Integers

NPY_MAGIC = b"\x93NUMPY"
# Integers in the words of safetensors (github.com/huggingface/safetensors, "Format").
SAFETENSORS_DTYPES = {
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1",
}  # fmt: skip


def tensor_names(path: Path) -> tuple[str, ...]:
    """The tensors of a safetensors file; none for an .npy file, whose array has no name. Raises CastoffError."""
    with _opened(path) as file:
        return () if _is_npy(path, file) else tuple(_safetensors_header(path, file)[0])


def read_integers(path: Path, name: str) -> Integers:
    """The array of an .npy file; of a safetensors file the tensor `name`, or the only one whatever it is called.

    The array is mapped, read-only. Raises CastoffError for a file that is neither or is cut short, and for numbers that
    are no integers.
    """
    with _opened(path) as file:
        found = _map_npy(path) if _is_npy(path, file) else _map_tensor(path, file, name)
    if found.dtype.kind not in "iu":
        raise CastoffError(f"{path}: {name} must be integers, got {found.dtype}")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        if path.exists() and not path.is_file():
            raise CastoffError(
                f"{path} is {'a directory' if path.is_dir() else 'no regular file'}; name a file of arrays"
            )
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise CastoffError(f"cannot read {path}: {error.strerror or error}") from None


def _is_npy(path: Path, file: BinaryIO) -> bool:
    begin = file.read(len(NPY_MAGIC))
    file.seek(0)
    if begin != NPY_MAGIC and path.suffix != ".safetensors":
        raise CastoffError(f"{path} is neither an .npy array nor a .safetensors file")
    return begin == NPY_MAGIC


def _map_npy(path: Path) -> npt.NDArray[Any]:
    try:
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))
    # What numpy lets through where a header is damaged, or the data are cut short.
    except (ValueError, OverflowError, SyntaxError, tokenize.TokenError) as error:
        raise CastoffError(f"{path} is no whole .npy array: {' '.join(str(error).split())}") from None


def _map_tensor(path: Path, file: BinaryIO, name: str) -> npt.NDArray[Any]:
    entries, first_byte = _safetensors_header(path, file)
    if name not in entries and len(entries) != 1:
        listed = ", ".join(entries) or "none"
        raise CastoffError(f"{path} must have a tensor {name}, or only one; its tensors: {listed}")
    key = name if name in entries else next(iter(entries))
    try:
        dtype, shape = str(entries[key]["dtype"]), tuple(map(int, entries[key]["shape"]))
        begin, end = map(int, entries[key]["data_offsets"])
    except (TypeError, ValueError, LookupError):
        raise CastoffError(
            f"{path}: the tensor {key} has no usable entry in the header; write the file again"
        ) from None
    if dtype not in SAFETENSORS_DTYPES:
        raise CastoffError(f"{path}: {name} must be integers, got {dtype}")
    itemsize = np.dtype(SAFETENSORS_DTYPES[dtype]).itemsize
    size_bytes = file.seek(0, 2)
    if min(shape, default=0) < 0 or not 0 <= begin <= end or end - begin != itemsize * math.prod(shape):
        raise CastoffError(f"{path}: the tensor {key} has no usable entry in the header; write the file again")
    if first_byte + end > size_bytes:
        raise CastoffError(f"{path} is cut short: the tensor {key} ends at byte {first_byte + end:,} of {size_bytes:,}")
    if begin == end:
        return np.empty(shape, SAFETENSORS_DTYPES[dtype])
    return np.asarray(np.memmap(file, SAFETENSORS_DTYPES[dtype], "r", first_byte + begin, shape))


def _safetensors_header(path: Path, file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The entries of the header by the tensors' names, and the first byte of the data."""
    size_bytes = file.seek(0, 2)
    file.seek(0)
    num_header_bytes = int.from_bytes(file.read(8), "little")
    if size_bytes < 8 + num_header_bytes:
        raise CastoffError(f"{path} is no whole .safetensors file: it ends in its header")
    try:
        header = json.loads(file.read(num_header_bytes))
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise CastoffError(f"{path} is no .safetensors file: its header is no JSON object")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + num_header_bytes
