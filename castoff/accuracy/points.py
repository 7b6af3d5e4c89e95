"""Measured points of whole deployments, read from CSV files: requests under load, or single decode steps.

Which of the two a file holds is told by its columns. Times are in ms there, and in seconds here.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from castoff.errors import CastoffError
from castoff.spec.quant import LinearAction
from castoff.spec.toml_file import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """Requests in a closed loop on one instance. row: its line in the file. Lengths are nominal.

    ttft_s, tpot_s: measured means. kv_dtype: None where the file does not say.
    """

    row: int
    model: str
    system: str
    precision: str
    backend: str
    kv_dtype: str | None
    tp_size: int
    attention_dp_size: int
    moe_tp_size: int | None
    moe_ep_size: int
    mtp: int
    mtp_accepted_length: float | None
    isl: int
    osl: int
    concurrency: int
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One decode step of a deployment. row: its line in the file. parallel: in words. step_s: measured."""

    row: int
    source: str
    model: str
    device: str
    num_devices: int
    parallel: str
    linear_quant: str
    kv_dtype: str
    mtp: int
    global_batch: int
    context_tokens: int
    query_tokens: int
    graph: str
    offload: str
    pool_tokens: int | None
    step_s: float


@dataclass(frozen=True, slots=True)
class Cell:
    """A value of a row, and where it stands."""

    path: Path
    row: int
    column: str
    text: str

    def fault(self, wanted: str) -> CastoffError:
        """What is wrong with it."""
        return CastoffError(f"{self.path}, row {self.row}: {self.column} must be {wanted}, got {self.text!r}")

    def word(self) -> str:
        """Any text."""
        if not self.text:
            raise self.fault("given")
        return self.text

    def one_of(self, allowed: Sequence[str]) -> str:
        """One of some words."""
        if self.text not in allowed:
            raise self.fault(f"one of {', '.join(allowed)}")
        return self.text

    def number(self) -> float:
        """A number greater than 0."""
        try:
            value = float(self.text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise self.fault("a number greater than 0")
        return value

    def whole(self, least: int = 1) -> int:
        """A whole number; 4.0 is one."""
        try:
            value = float(self.text)
        except ValueError:
            value = math.nan
        if not (least <= value < 2**40 and value.is_integer()):
            raise self.fault(f"a whole number of at least {least}")
        return int(value)


# castoff serves the first two; rows of the others are understood, and left out.
PRECISIONS = ("fp8", "bf16", "fp16", "int8", "int4", "nvfp4", "mxfp4", "fp4")
KV_DTYPES = ("bf16", "fp8", "int8")
OFFLOADS = ("none", "gather", "serve_install", "direct")
# Columns that a kind of file must have, and those that it may have.
LOAD_COLUMNS = ("system", "precision", "backend", "isl", "osl", "concurrency", "tp_size", "ttft_ms", "tpot_ms")
MODEL_COLUMNS = ("model_path", "model")
MAY_HAVE = (
    "source", "image", "measured", "attention_dp_size", "moe_tp_size", "moe_ep_size", "kv_dtype", "mtp",
    "mtp_accepted_length",
)  # fmt: skip
STEP_COLUMNS = (
    "model", "device", "num_devices", "parallel", "linear_quant", "kv_dtype", "mtp", "global_batch", "context_tokens",
    "query_tokens", "graph", "offload", "pool_tokens", "step_ms",
)  # fmt: skip
STEPS_MAY_HAVE = ("source", "note")

# Words for parallel sizes, each followed by a number, and the fields of `Parallel` that they mean.
PARALLEL_PARTS: Mapping[str, str] = {
    "TP": "tp_size",
    "DP": "dp_size",
    "EP": "ep_size",
    "attention TP": "tp_size",
    "attention DP": "dp_size",
    "embed TP": "word_embedding_tp_size",
    "lm_head TP": "lmhead_tp_size",
    "o_proj TP": "o_proj_tp_size",
    "MLP TP": "mlp_tp_size",
}
PARALLEL_REMARKS = ("perfect expert balance",)
_PART = re.compile(rf"(?<!\w)({'|'.join(sorted(PARALLEL_PARTS, key=len, reverse=True))}) ?(\d+)(?!\w)")

Row = Callable[[str], Cell]


def read_points(path: Path) -> Sequence[LoadPoint | StepPoint]:
    """All points of a file, which are of one kind. Raises CastoffError, naming row and column."""
    columns, rows = _read(path)
    if "step_ms" in columns:
        _check_columns(path, columns, STEP_COLUMNS, STEPS_MAY_HAVE)
        return tuple(_step(number, row) for number, row in rows)
    _check_columns(path, columns, LOAD_COLUMNS, (*MODEL_COLUMNS, *MAY_HAVE))
    if not set(MODEL_COLUMNS) & set(columns):
        raise CastoffError(f"{path} has neither a column model_path nor model")
    return tuple(_load(number, row) for number, row in rows)


def _read(path: Path) -> tuple[Sequence[str], Iterator[tuple[int, Row]]]:
    """Columns, and rows by their lines: functions from a column to its cell, empty where there is none."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise CastoffError(f"{path}: cannot read this file: {error.strerror or error}") from None
    except ValueError as error:
        raise CastoffError(f"{path} is no text in UTF-8: {error}") from None
    try:
        reader = csv.reader(text.splitlines(), strict=True)
        lines = [(reader.line_num, line) for line in reader if line]
    except csv.Error as error:
        raise CastoffError(f"{path} is no CSV file: {error}") from None
    if len(lines) < 2:
        raise CastoffError(f"{path} has no rows: a line of column names and at least one point are needed")
    columns = [name.strip() for name in lines[0][1]]
    for number, line in lines[1:]:
        if len(line) != len(columns):
            raise CastoffError(f"{path}, row {number} has {len(line)} values for {len(columns)} columns")
    return columns, (
        (number, _cells(path, number, dict(zip(columns, line, strict=True)))) for number, line in lines[1:]
    )


def _cells(path: Path, number: int, values: Mapping[str, str]) -> Row:
    return lambda column: Cell(path, number, column, values.get(column, "").strip())


def _check_columns(path: Path, columns: Sequence[str], needed: Sequence[str], others: Sequence[str]) -> None:
    allowed = (*needed, *others)
    for name in columns:
        if name not in allowed:
            raise CastoffError(
                f"{path}: unknown column {name!r}{did_you_mean(name, allowed)}; allowed: {', '.join(allowed)}"
            )
        if columns.count(name) > 1:
            raise CastoffError(f"{path} has the column {name} twice")
    missing = [name for name in needed if name not in columns]
    if missing:
        raise CastoffError(f"{path} lacks the column {', '.join(missing)}; it has {', '.join(columns)}")


def _load(number: int, row: Row) -> LoadPoint:
    drafts = row("mtp").whole(least=0) if row("mtp").text else 0
    accepted = row("mtp_accepted_length")
    return LoadPoint(
        row=number,
        model=(row("model_path") if row("model_path").text else row("model")).word(),
        system=row("system").word(),
        precision=row("precision").one_of(PRECISIONS),
        backend=row("backend").word(),
        kv_dtype=row("kv_dtype").one_of(KV_DTYPES) if row("kv_dtype").text else None,
        tp_size=row("tp_size").whole(),
        attention_dp_size=_whole_or(row("attention_dp_size"), 1),
        moe_tp_size=row("moe_tp_size").whole() if row("moe_tp_size").text else None,
        moe_ep_size=_whole_or(row("moe_ep_size"), 1),
        mtp=drafts,
        mtp_accepted_length=accepted.number() if accepted.text else None,
        isl=row("isl").whole(),
        osl=row("osl").whole(),
        concurrency=row("concurrency").whole(),
        ttft_s=row("ttft_ms").number() * 1e-3,
        tpot_s=row("tpot_ms").number() * 1e-3,
    )


def _step(number: int, row: Row) -> StepPoint:
    offload = row("offload").one_of(OFFLOADS)
    point = StepPoint(
        row=number,
        source=row("source").text,
        model=row("model").word(),
        device=row("device").word(),
        num_devices=row("num_devices").whole(),
        parallel=row("parallel").word(),
        linear_quant=row("linear_quant").one_of(get_args(LinearAction)),
        kv_dtype=row("kv_dtype").one_of(KV_DTYPES),
        mtp=row("mtp").whole(least=0),
        global_batch=row("global_batch").whole(),
        context_tokens=row("context_tokens").whole(least=0),
        query_tokens=row("query_tokens").whole(),
        graph=row("graph").one_of(tuple(GRAPHS)),
        offload=offload,
        pool_tokens=row("pool_tokens").whole() if row("pool_tokens").text else None,
        step_s=row("step_ms").number() * 1e-3,
    )
    if unread_parallel(point.parallel):
        raise row("parallel").fault(f"parts like {', '.join(PARALLEL_PARTS)}, then {' or '.join(PARALLEL_REMARKS)}")
    return point


def parallel_sizes(text: str) -> dict[str, int]:
    """Sizes that the words of a step name, by fields of `Parallel`."""
    return {PARALLEL_PARTS[part]: int(size) for part, size in _PART.findall(text)}


def unread_parallel(text: str) -> str:
    """What is left of such words once all that is understood is taken out."""
    left = _PART.sub("", text)
    for remark in PARALLEL_REMARKS:
        left = left.replace(remark, "")
    return left.strip(" ,")


def _whole_or(cell: Cell, default: int) -> int:
    return cell.whole() if cell.text else default


# Graph modes of CANN, and the backend that drives each. A step that only says that it ran as a graph is GE's.
GRAPHS: Mapping[str, str] = {"ge": "cann-ge", "npugraph_ex": "cann-npugraph_ex", "graph": "cann-ge"}
