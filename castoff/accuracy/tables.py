"""Measured op tables in aiconfigurator's layout: DIR/data/SYSTEM/FAMILY/BACKEND/VERSION/NAME_perf.parquet.

They come from ai-dynamo/aiconfigurator (`src/aiconfigurator/systems`), whose latencies are in ms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from castoff.dims import Array
from castoff.errors import CastoffError

SUFFIX = "_perf.parquet"
UNITS_S = {"ms": 1e-3, "µs": 1e-6}
# Where a table has times of several things, the column that says which one a row is of.
TIME_OF = "time_of"
MAY_BE_ZERO = ("step",)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """One file and what its path says. name: of the file, without its ending. backend: the stack that was measured."""

    path: Path
    system: str
    backend: str
    version: str
    name: str


@dataclass(frozen=True, slots=True)
class TimeColumn:
    """Where times stand, and in which of UNITS_S."""

    name: str
    unit: str


LATENCY: Mapping[str, TimeColumn] = {"op": TimeColumn("latency", "ms")}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a table: one array per column, equally long."""

    columns: Mapping[str, Array]
    latency_s: Array

    def __len__(self) -> int:
        return len(self.latency_s)

    def where(self, chosen: Array) -> Rows:
        """Some of the rows, by a mask or by their places."""
        return Rows({name: values[chosen] for name, values in self.columns.items()}, self.latency_s[chosen])

    def with_column(self, name: str, values: Array) -> Rows:
        """The same with one column more."""
        return Rows({**self.columns, name: values}, self.latency_s)

    def dim(self, name: str) -> Array:
        """A column of numbers as a dim: an entry per row."""
        return self.columns[name].astype(np.float64)

    def number(self, name: str) -> int:
        """The whole number that all rows have."""
        return int(self.columns[name][0])

    def word(self, name: str) -> str:
        """The word that all rows have."""
        return str(self.columns[name][0])

    def sites(self, names: Sequence[str]) -> Iterator[Array]:
        """Places of the rows that are equal in all of these columns, group by group."""
        codes = np.zeros(len(self), dtype=np.int64)
        for name in names:
            values, places = np.unique(self.columns[name], return_inverse=True)
            codes = codes * len(values) + places
        order = np.argsort(codes, kind="stable")
        starts = np.flatnonzero(np.diff(codes[order])) + 1
        yield from (site for site in np.split(order, starts) if len(site))


def find_tables(directory: Path) -> tuple[TableFile, ...]:
    """The tables under DIR/data, or under DIR itself where it has no folder `data`; raises CastoffError for none."""
    root = directory / "data" if (directory / "data").is_dir() else directory
    files = sorted(root.glob(f"*/*/*/*/*{SUFFIX}"))
    if not files:
        raise CastoffError(
            f"--tables {directory} holds no measured tables, which lie at data/SYSTEM/FAMILY/BACKEND/VERSION/"
            f"NAME{SUFFIX}; name a folder like src/aiconfigurator/systems of ai-dynamo/aiconfigurator"
        )
    return tuple(_table_file(path) for path in files)


def _table_file(path: Path) -> TableFile:
    system, _, backend, version, file = path.parts[-5:]
    return TableFile(path=path, system=system, backend=backend, version=version, name=file.removesuffix(SUFFIX))


def read_rows(
    file: TableFile, words: Sequence[str], numbers: Sequence[str], times: Mapping[str, TimeColumn] = LATENCY
) -> Rows:
    """The named columns and the latency, in seconds. Raises CastoffError for a file that is no such table.

    times: by what took them. Of several, each makes a row of every one.
    """
    names = (*words, *numbers)
    with _opened(file) as opened:
        table = opened.read()
    wanted = (*names, *(column.name for column in times.values()))
    missing = [name for name in wanted if name not in table.column_names]
    if missing:
        raise CastoffError(f"{file.path} has no column {', '.join(missing)}; it has {', '.join(table.column_names)}")
    columns = {name: _column(file, table, name) for name in names}
    for name in numbers:
        least = 0 if name in MAY_BE_ZERO else 1
        if columns[name].dtype.kind not in "iu" or (len(columns[name]) and columns[name].min() < least):
            raise CastoffError(f"{file.path}: {name} must be whole numbers of at least {least}")
    seconds = [_seconds(file, table, column) for column in times.values()]
    if len(times) > 1:
        columns = {name: np.tile(values, len(times)) for name, values in columns.items()}
        columns[TIME_OF] = np.repeat(list(times), table.num_rows)
    return Rows(columns, np.concatenate(seconds))


def _seconds(file: TableFile, table: Any, column: TimeColumn) -> Array:
    values = _column(file, table, column.name)
    if values.dtype.kind not in "iuf":
        raise CastoffError(f"{file.path}: {column.name} must be numbers, in {column.unit}")
    return values.astype(np.float64) * UNITS_S[column.unit]


def count_rows(file: TableFile) -> int:
    """Rows of a table that is not read."""
    with _opened(file) as opened:
        return int(opened.metadata.num_rows)


@contextmanager
def _opened(file: TableFile) -> Iterator[Any]:
    """The file alone, so that the folders of its path do not become columns."""
    parquet = _parquet()
    try:
        with parquet.ParquetFile(file.path) as opened:
            yield opened
    # Arrow's own errors are ValueErrors, OSErrors and NotImplementedErrors.
    except (ValueError, OSError, NotImplementedError) as error:
        raise CastoffError(f"{file.path} cannot be read as parquet: {' '.join(str(error).split())}") from None


def _column(file: TableFile, table: Any, name: str) -> Array:
    column = table.column(name)
    if column.null_count:
        raise CastoffError(f"{file.path}: {name} lacks a value in {column.null_count} rows")
    values: Array = column.to_numpy()
    return values


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise CastoffError(
            "measured tables are parquet files, which need pyarrow: pip install 'castoff[tables]'"
        ) from None
    return parquet
