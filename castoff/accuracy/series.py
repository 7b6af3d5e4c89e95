"""Which rows of a measured table are comparable, under which names, and which formula prices them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from castoff.accuracy import calls
from castoff.accuracy.calls import Formula
from castoff.accuracy.tables import Rows, TableFile
from castoff.dims import Array
from castoff.spec.model import shipped_models

NOT_MAPPED = "castoff prices no op like it yet"
NO_TIME = "no time measured"

# fp8_block of vLLM is launched from the host row by row: below this its rows show the host.
VLLM_HOST_FLOOR_S = 160e-6
# A prefill of few tokens is launched op by op, slower than the device works.
HOST_FLOOR_ISL = 512
# The largest batch of the captured decode steps.
GRAPH_BATCH, B200_GRAPH_BATCH = 256, 512
GLM_EXPERTS = {"hidden_size": 6144, "inter_size": 2048, "topk": 8, "num_experts": 256}

Exclusions = dict[str, int]


@dataclass(frozen=True, slots=True)
class Series:
    """Rows that one formula prices. sites: columns in which all rows of a recording are equal. rows: all that there
    are; kept: those to score. excluded: why others are not, and how many."""

    name: str
    rows: int
    kept: Rows
    excluded: Exclusions
    formula: Formula
    sites: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of table is read. columns: those that are needed."""

    columns: tuple[str, ...]
    series: Callable[[TableFile, Rows], Iterator[Series]]


def split_off(rows: Rows, excluded: Exclusions, why: str, mask: Array) -> Rows:
    """The rows outside the mask; those inside are counted under `why`."""
    count = int(np.count_nonzero(mask))
    if not count:
        return rows
    excluded[why] = excluded.get(why, 0) + count
    return rows.where(~mask)


def timed(rows: Rows, excluded: Exclusions) -> Rows:
    """Rows with a positive time."""
    return split_off(rows, excluded, NO_TIME, ~(np.isfinite(rows.latency_s) & (rows.latency_s > 0)))


def _gemm(file: TableFile, rows: Rows) -> Iterator[Series]:
    for dtype, own in _by_word(rows, "gemm_dtype"):
        excluded: Exclusions = {}
        kept = timed(own, excluded)
        if dtype not in calls.GEMM_FORMATS:
            kept = split_off(kept, excluded, f"castoff has no format {dtype}", np.ones(len(kept), dtype=bool))
        if file.backend == "vllm" and dtype == "fp8_block":
            floor = kept.latency_s < VLLM_HOST_FLOOR_S
            kept = split_off(kept, excluded, "at or below the host floor of 160 µs", floor)
        yield Series(f"gemm_{_short(dtype)}", len(own), kept, excluded, calls.gemm, ("gemm_dtype", "n", "k"))


def _moe(_: TableFile, rows: Rows) -> Iterator[Series]:
    sites = ("moe_dtype", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    for dtype, own in _by_word(rows, "moe_dtype"):
        is_glm = np.ones(len(own), dtype=bool)
        for name, value in GLM_EXPERTS.items():
            is_glm &= own.columns[name] == value
        for suffix, mask in (("glm5", is_glm), ("other", ~is_glm)):
            part, excluded = own.where(mask), Exclusions()
            if not len(part):
                continue
            kept = timed(part, excluded)
            if dtype not in calls.GEMM_FORMATS:
                kept = split_off(kept, excluded, f"castoff has no format {dtype}", np.ones(len(kept), dtype=bool))
            yield Series(f"moe_{_short(dtype)}_{suffix}", len(part), kept, excluded, calls.moe, sites)


def _all_reduce(_: TableFile, rows: Rows) -> Iterator[Series]:
    excluded: Exclusions = {}
    graph = np.array([str(word).endswith("_graph") for word in rows.columns["backend"]], dtype=bool)
    kept = split_off(rows, excluded, "launched op by op, not from a graph", ~graph)
    kept = timed(kept, excluded)
    yield Series("custom_allreduce", len(rows), kept, excluded, calls.custom_all_reduce, ("num_gpus",))


def _kernel(formula: Formula) -> Callable[[TableFile, Rows], Iterator[Series]]:
    def series(file: TableFile, rows: Rows) -> Iterator[Series]:
        excluded: Exclusions = {}
        name = file.name.removesuffix("_module")
        mode = np.where(rows.columns["isl"] == 1, "decode", "prefill")
        kept = timed(rows.with_column("mode", mode), excluded)
        yield Series(name, len(rows), kept, excluded, formula, ("mode",))

    return series


def _generation_module(file: TableFile, rows: Rows) -> Iterator[Series]:
    most = B200_GRAPH_BATCH if file.system.startswith("b200") else GRAPH_BATCH
    yield from _module(file, rows, "decode", rows.columns["batch_size"] > most, f"batch above {most}: not from a graph")


def _context_module(file: TableFile, rows: Rows) -> Iterator[Series]:
    floor = rows.columns["isl"] <= HOST_FLOOR_ISL
    yield from _module(file, rows, "prefill", floor, f"isl up to {HOST_FLOOR_ISL}: the host is slower than the device")


def _module(file: TableFile, rows: Rows, mode: str, trap: Array, why: str) -> Iterator[Series]:
    rows = rows.with_column("mode", np.full(len(rows), mode)).with_column("trap", trap)
    for op_name, own in _by_word(rows, "op_name"):
        excluded: Exclusions = {}
        kept = split_off(own, excluded, why, own.columns["trap"])
        kept = timed(kept, excluded)
        for column, known in _MODULE_WORDS.items():
            words = kept.columns[column]
            kept = split_off(kept, excluded, f"a {column} that castoff does not have", ~np.isin(words, list(known)))
        sites = ("mode", "op_name", "model", "gemm_type", "kv_cache_dtype", "tp_size")
        yield Series(op_name, len(own), kept, excluded, calls.attention_module, sites)


_MODULE_WORDS = {
    "model": shipped_models(),
    "gemm_type": tuple(calls.MODULE_ACTIONS),
    "kv_cache_dtype": tuple(calls.CACHE_ACTIONS),
}


def _by_word(rows: Rows, column: str) -> Iterator[tuple[str, Rows]]:
    for word in np.unique(rows.columns[column]):
        yield str(word), rows.where(rows.columns[column] == word)


def _short(dtype: str) -> str:
    return "bf16" if dtype == "bfloat16" else dtype


_MOE_COLUMNS = (
    "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size",
    "distribution",
)  # fmt: skip
_KERNEL_COLUMNS = ("batch_size", "isl", "step")
_MODULE_COLUMNS = ("op_name", "model", "gemm_type", "kv_cache_dtype", "tp_size", *_KERNEL_COLUMNS)

KINDS: Mapping[str, Kind] = {
    "gemm": Kind(("gemm_dtype", "m", "n", "k"), _gemm),
    "moe": Kind(_MOE_COLUMNS, _moe),
    "custom_allreduce": Kind(("num_gpus", "message_size", "backend"), _all_reduce),
    "glm5_dsa_attn_module": Kind(_KERNEL_COLUMNS, _kernel(calls.sparse_attention)),
    "glm5_mqa_logits_module": Kind(_KERNEL_COLUMNS, _kernel(calls.indexer_logits)),
    "glm5_topk_module": Kind((*_KERNEL_COLUMNS, "score_mode"), _kernel(calls.topk)),
    "dsa_generation_module": Kind(_MODULE_COLUMNS, _generation_module),
    "dsa_context_module": Kind(_MODULE_COLUMNS, _context_module),
}
"""By the name of the file. Other tables are listed, and not scored."""
