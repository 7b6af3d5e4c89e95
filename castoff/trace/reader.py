"""Reading traces: a file is mapped into memory, and only what is used of it is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from castoff.errors import CastoffError
from castoff.trace.header import Layout, TraceHeader, read_layout
from castoff.trace.steps import LITTLE_ENDIAN, Int32Array, Steps, unpack


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """An open trace. `records_NW` are its records, mapped from the file, read-only."""

    path: Path
    header: TraceHeader
    records_NW: Int32Array
    size_bytes: int

    @property
    def num_steps(self) -> int:
        """Steps of the trace (N)."""
        return len(self.records_NW)

    def steps(self, first: int = 0, end: int | None = None) -> Steps:
        """The steps from `first` up to but without `end` (None: all that follow), as views; nothing is read yet.

        Raises CastoffError for steps that the trace does not have.
        """
        end = self.num_steps if end is None else end
        if not 0 <= first <= end <= self.num_steps:
            raise CastoffError(f"{self.path} has {self.num_steps:,} steps; {first}:{end} are not among them")
        return unpack(self.header, self.records_NW[first:end], first=first)


def open_trace(path: Path | str) -> Trace:
    """Open a trace. Raises CastoffError for a file that cannot be read or is not a whole trace of this version."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise CastoffError(f"{path} is {'a directory' if path.is_dir() else 'no regular file'}; name a trace file")
        with path.open("rb") as file:
            layout = read_layout(path, file)
            records_NW = _mapped(file, layout)
    except OSError as error:
        raise CastoffError(f"cannot read {path}: {error.strerror or error}") from None
    return Trace(path=path, header=layout.header, records_NW=records_NW, size_bytes=layout.size_bytes)


def _mapped(file: BinaryIO, layout: Layout) -> Int32Array:
    shape = (layout.num_steps, layout.header.record_words)
    if not layout.num_steps:
        # Nothing to map: an empty map is no map to the operating system.
        return np.empty(shape, LITTLE_ENDIAN)
    # A plain array over the map: slices of np.memmap itself take longer.
    return np.asarray(np.memmap(file, LITTLE_ENDIAN, "r", layout.first_byte, shape))
