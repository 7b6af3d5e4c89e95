"""What a trace says of itself, and how its file begins.

A file is a preamble of 32 bytes (magic, version, length of the header, number of steps), the header as JSON, padded
with spaces so that both take a multiple of 64 bytes, and one record of int32 per step. Everything is little endian.
docs/traces.md has it to the byte.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from castoff import __version__
from castoff.errors import CastoffError
from castoff.spec.model import ModelSpec
from castoff.spec.toml_file import Table, shown

MAGIC = b"castoff-topk\r\n\x1a\n"
"""The line ends are there because a transfer as text would change them."""
VERSION = 1
PREAMBLE = struct.Struct("<16sIIQ")
ALIGNMENT_BYTES = 64
# Request id, length, query length, accepted.
WORDS_PER_ROW = 4
WORD_BYTES = 4
MAX_INT32 = 2**31 - 1
MAX_RECORD_BYTES = 2**40

ProvenanceValue = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """The sizes of a trace and where it comes from.

    model: the name of the model, as `load_model` takes it.
    owner_layers: for each index group of the trace, in layer order, the layer whose indexer selects for it.
    batch: rows of a step (B), the most requests that a step can hold.
    query_length: most query tokens of a request in a step (S): 1 plus the draft tokens.
    index_topk: most tokens that a query selects (K).
    lengths_known: whether the lengths of the requests were recorded; without, every id counts as committed.
    provenance: how the selections came about, by key.
    written_by: the program that wrote the trace, with its version; a cut keeps it.

    Raises CastoffError for sizes that no trace can have.
    """

    model: str
    owner_layers: tuple[int, ...]
    batch: int
    query_length: int
    index_topk: int
    lengths_known: bool = True
    provenance: Mapping[str, ProvenanceValue] = field(default_factory=dict)
    written_by: str = f"castoff {__version__}"

    def __post_init__(self) -> None:
        for name in ("batch", "query_length", "index_topk"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MAX_INT32:
                raise CastoffError(f"{name} must be a whole number from 1 to {MAX_INT32}, got {shown(value)}")
        if not (self.model.strip() and self.written_by.strip()):
            raise CastoffError("model and written_by must be words, got nothing")
        layers = self.owner_layers
        whole = all(type(layer) is int and 0 <= layer <= MAX_INT32 for layer in layers)
        if not layers or not whole or any(before >= layer for before, layer in pairwise(layers)):
            raise CastoffError(f"owner_layers must be one or more layers in ascending order, got {list(layers)}")
        if self.record_bytes > MAX_RECORD_BYTES:
            raise CastoffError(f"a step of {self.ids_shape} ids takes {self.record_bytes:,} bytes, more than any can")
        for key, entry in self.provenance.items():
            is_value = isinstance(entry, ProvenanceValue)
            if not is_value or (isinstance(entry, float) and not math.isfinite(entry)):
                raise CastoffError(f"provenance must give words, numbers, true or false, got {key!r}: {shown(entry)}")

    @classmethod
    def of_model(
        cls,
        model: ModelSpec,
        *,
        batch: int,
        query_length: int,
        lengths_known: bool = True,
        provenance: Mapping[str, ProvenanceValue] | None = None,
    ) -> TraceHeader:
        """The header of a trace of all main layers of a model. Raises CastoffError for a model without an indexer."""
        if model.indexer is None:
            raise CastoffError(f"{model.name} has no indexer, hence no top-k to trace")
        return cls(
            model=model.name,
            owner_layers=tuple(group.owner for group in model.index_groups),
            batch=batch,
            query_length=query_length,
            index_topk=model.indexer.index_topk,
            lengths_known=lengths_known,
            provenance=provenance or {},
        )

    @property
    def num_groups(self) -> int:
        """Index groups (G)."""
        return len(self.owner_layers)

    @property
    def ids_shape(self) -> tuple[int, int, int, int]:
        """G, B, S, K."""
        return self.num_groups, self.batch, self.query_length, self.index_topk

    @property
    def record_words(self) -> int:
        """int32 values in the record of a step."""
        return WORDS_PER_ROW * self.batch + math.prod(self.ids_shape)

    @property
    def record_bytes(self) -> int:
        """Bytes of the record of a step."""
        return WORD_BYTES * self.record_words

    def encoded(self, num_steps: int) -> bytes:
        """The first bytes of a file, up to the first record; their number does not depend on `num_steps`."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["owner_layers"] = list(self.owner_layers)
        values["provenance"] = dict(self.provenance)
        text = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()
        text += b" " * (-(PREAMBLE.size + len(text)) % ALIGNMENT_BYTES)
        return PREAMBLE.pack(MAGIC, VERSION, len(text), num_steps) + text


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a trace lies in its file: from `first_byte` on there are `num_steps` records, to the end at `size_bytes`."""

    header: TraceHeader
    first_byte: int
    num_steps: int
    size_bytes: int


def read_layout(path: Path, file: BinaryIO) -> Layout:
    """The layout of a file by its preamble and header, checked against its size; `path` is what errors call it.

    Raises CastoffError for anything but a whole trace of this version.
    """
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    num_header_bytes, num_steps = _read_preamble(path, file.read(PREAMBLE.size), size_bytes)
    first_byte = PREAMBLE.size + num_header_bytes
    if size_bytes < first_byte:
        _cut_short(path, size_bytes, f"preamble and header take {first_byte:,}")
    header = _read_header(path, file.read(num_header_bytes))
    expected = first_byte + num_steps * header.record_bytes
    if size_bytes < expected:
        whole = (size_bytes - first_byte) // header.record_bytes
        _cut_short(path, size_bytes, f"{whole:,} of its {num_steps:,} steps are whole, and all take {expected:,}")
    if size_bytes > expected:
        raise CastoffError(
            f"{path} has {size_bytes:,} bytes, but its header tells of {num_steps:,} steps, which take {expected:,}; "
            "it was changed after it was written; copy or write it again"
        )
    return Layout(header=header, first_byte=first_byte, num_steps=num_steps, size_bytes=size_bytes)


def _read_preamble(path: Path, begin: bytes, size_bytes: int) -> tuple[int, int]:
    """Bytes of the header, and the number of steps."""
    magic = begin[: len(MAGIC)]
    if not begin:
        raise CastoffError(f"{path} is empty; a trace begins with {MAGIC!r}")
    if not MAGIC.startswith(magic):
        raise CastoffError(
            f"{path} is no trace: it begins with {magic!r}, not with {MAGIC!r}; castoff trace convert makes one of "
            ".npy and safetensors arrays"
        )
    if len(begin) < PREAMBLE.size:
        _cut_short(path, size_bytes, f"the preamble takes {PREAMBLE.size}")
    _, version, num_header_bytes, num_steps = PREAMBLE.unpack(begin)
    if version != VERSION:
        raise CastoffError(
            f"{path} is a trace of format version {version}, and castoff {__version__} reads version {VERSION}; use "
            "the castoff that wrote it, or write it again"
        )
    return num_header_bytes, num_steps


def _cut_short(path: Path, size_bytes: int, what: str) -> NoReturn:
    raise CastoffError(f"{path} is cut short: it has {size_bytes:,} bytes; {what}; copy or write it again")


def _read_header(path: Path, text: bytes) -> TraceHeader:
    where = f"{path}: header"
    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise CastoffError(f"{where}: not valid JSON, so the file is damaged; copy or write it again") from None
    if not isinstance(values, dict):
        raise CastoffError(f"{where}: must be a JSON object, got {shown(values)}; write it again")
    table = Table(file=where, values=values)
    table.only(item.name for item in fields(TraceHeader))
    layers = values.get("owner_layers")
    if not isinstance(layers, list):
        raise table.fault("owner_layers", "is missing" if layers is None else f"must be a list, got {shown(layers)}")
    sizes = {key: table.count(key) for key in ("batch", "query_length", "index_topk")}
    model, written_by = table.text("model"), table.text("written_by")
    lengths_known, provenance = table.flag("lengths_known"), table.table("provenance").values
    try:
        return TraceHeader(
            model=model,
            owner_layers=tuple(layers),
            **sizes,
            lengths_known=lengths_known,
            provenance=cast("Mapping[str, ProvenanceValue]", provenance),
            written_by=written_by,
        )
    except CastoffError as error:
        raise CastoffError(f"{where}: {error}") from None
