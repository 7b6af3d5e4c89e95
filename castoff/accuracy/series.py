"""Which rows of a measured table are comparable, under which names, and which formula prices them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from castoff.accuracy import calls
from castoff.accuracy.calls import Formula
from castoff.accuracy.tables import LATENCY, TIME_OF, Rows, TableFile, TimeColumn, read_rows
from castoff.dims import Array

NOT_MAPPED = "castoff prices no op like it yet"
NO_TIME = "no time measured"
LEAST_TIME_S, MOST_TIME_S = 1e-7, 1e3

# fp8_block products of vLLM are launched from the host. Products of so few multiplications take the device a few µs, so
# their median time is the host's, and rows within this factor of it show the host more than the device.
SMALL_PRODUCT, NEAR_FLOOR = 1e8, 1.5
# A prefill of few tokens is launched op by op, slower than the device works.
HOST_FLOOR_ISL = 512
# The largest batch of the captured decode steps.
GRAPH_BATCH, B200_GRAPH_BATCH = 256, 512
DEEPEP_SMS = 20
GLM_EXPERTS = {"hidden_size": 6144, "inter_size": 2048, "topk": 8, "num_experts": 256}

Exclusions = dict[str, int]


@dataclass(frozen=True, slots=True)
class Series:
    """Rows that one formula prices. sites: columns in which all rows of a recording are equal. rows: all that there
    are; kept: those to score. excluded: why others are not, and how many. eager: whether the host launches op by op.
    by_time: whether rows were kept for the time that they took, which no fit should be made from."""

    name: str
    rows: int
    kept: Rows
    excluded: Exclusions
    formula: Formula
    sites: tuple[str, ...]
    eager: bool = False
    by_time: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of table is read. words, numbers: the columns that are needed. times: those of times, by what took
    them."""

    words: tuple[str, ...]
    numbers: tuple[str, ...]
    make_series: Callable[[TableFile, Rows], Iterator[Series]]
    times: Mapping[str, TimeColumn] = field(default_factory=lambda: LATENCY)

    def series(self, file: TableFile) -> Iterator[Series]:
        """The series of a file. Raises CastoffError."""
        yield from self.make_series(file, read_rows(file, self.words, self.numbers, self.times))


def split_off(rows: Rows, excluded: Exclusions, why: str, mask: Array) -> Rows:
    """The rows outside the mask; those inside are counted under `why`."""
    count = int(np.count_nonzero(mask))
    if not count:
        return rows
    excluded[why] = excluded.get(why, 0) + count
    return rows.where(~mask)


def timed(rows: Rows, excluded: Exclusions) -> Rows:
    """Rows with a time that a kernel may take."""
    kept = split_off(rows, excluded, NO_TIME, ~(np.isfinite(rows.latency_s) & (rows.latency_s > 0)))
    impossible = (kept.latency_s < LEAST_TIME_S) | (kept.latency_s > MOST_TIME_S)
    return split_off(kept, excluded, f"below {LEAST_TIME_S:g} s or above {MOST_TIME_S:g} s", impossible)


def _of_known_format(rows: Rows, excluded: Exclusions, dtype: str) -> Rows:
    unknown = np.full(len(rows), dtype not in calls.GEMM_FORMATS)
    return split_off(rows, excluded, f"castoff has no format {dtype}", unknown)


def _gemm(file: TableFile, rows: Rows) -> Iterator[Series]:
    for dtype, own in _by_word(rows, "gemm_dtype"):
        excluded: Exclusions = {}
        kept = timed(own, excluded)
        kept = _of_known_format(kept, excluded, dtype)
        by_time = file.backend == "vllm" and dtype == "fp8_block"
        if by_time:
            kept = split_off(kept, excluded, "near the time of the host", _near_host_floor(kept))
        sites = ("gemm_dtype", "n", "k")
        yield Series(f"gemm_{_short(dtype)}", len(own), kept, excluded, calls.gemm, sites, by_time=by_time)


def _near_host_floor(rows: Rows) -> Array:
    near = np.zeros(len(rows), dtype=bool)
    is_small = rows.dim("m") * rows.dim("n") * rows.dim("k") < SMALL_PRODUCT
    for kernel in np.unique(rows.columns["kernel_source"]):
        own = rows.columns["kernel_source"] == kernel
        if (own & is_small).any():
            near |= own & (rows.latency_s < NEAR_FLOOR * np.median(rows.latency_s[own & is_small]))
    return near


def _moe(_: TableFile, rows: Rows) -> Iterator[Series]:
    sites = (
        "moe_dtype", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "distribution",
    )  # fmt: skip
    for dtype, own in _by_word(rows, "moe_dtype"):
        is_glm = np.ones(len(own), dtype=bool)
        for name, value in GLM_EXPERTS.items():
            is_glm &= own.columns[name] == value
        for suffix, mask in (("glm5", is_glm), ("other", ~is_glm)):
            part, excluded = own.where(mask), Exclusions()
            if not len(part):
                continue
            kept = timed(part, excluded)
            kept = _of_known_format(kept, excluded, dtype)
            yield Series(f"moe_{_short(dtype)}_{suffix}", len(part), kept, excluded, calls.moe, sites)


def _all_reduce(_: TableFile, rows: Rows) -> Iterator[Series]:
    excluded: Exclusions = {}
    graph = np.array([str(word).endswith("_graph") for word in rows.columns["backend"]], dtype=bool)
    kept = split_off(rows, excluded, "launched op by op, not from a graph", ~graph)
    kept = timed(kept, excluded)
    yield Series("custom_allreduce", len(rows), kept, excluded, calls.custom_all_reduce, ("num_gpus",))


def _nccl(_: TableFile, rows: Rows) -> Iterator[Series]:
    for op_name, own in _by_word(rows, "op_name"):
        excluded: Exclusions = {}
        kept = timed(own, excluded)
        unknown = ~np.isin(kept.columns["nccl_dtype"], list(calls.NCCL_DTYPES))
        kept = split_off(kept, excluded, "an nccl_dtype that castoff does not have", unknown)
        yield Series(f"nccl_{op_name}", len(own), kept, excluded, calls.nccl, ("op_name", "nccl_dtype", "num_gpus"))


def _expert_exchange(file: TableFile, rows: Rows) -> Iterator[Series]:
    """DeepEP's kernels, dispatch and combine apart; `normal` ones take so many multiprocessors as they are given."""
    kind = file.name.rsplit("_", 1)[1]
    for way, own in _by_word(rows, TIME_OF):
        excluded: Exclusions = {}
        kept = split_off(own, excluded, f"an op_name other than {kind}", own.columns["op_name"] != kind)
        kept = split_off(kept, excluded, "over several nodes", kept.columns["node_num"] > 1)
        too_many = kept.columns["num_topk"] > kept.columns["num_experts"]
        kept = split_off(kept, excluded, "more experts of a token than there are", too_many)
        if (column := f"{way}_sms") in kept.columns:
            other = kept.columns[column] != DEEPEP_SMS
            kept = split_off(kept, excluded, f"on other than {DEEPEP_SMS} multiprocessors, DeepEP's default", other)
        sites = ("hidden_size", "num_topk", "num_experts")
        yield Series(f"deepep_{kind}_{way}", len(own), timed(kept, excluded), excluded, calls.expert_exchange, sites)


def _mla_bmm(_: TableFile, rows: Rows) -> Iterator[Series]:
    for op_name, own in _by_word(rows, "op_name"):
        excluded: Exclusions = {}
        kept = split_off(own, excluded, "castoff absorbs in bf16", own.columns["bmm_dtype"] != "bfloat16")
        yield Series(op_name, len(own), timed(kept, excluded), excluded, calls.absorption, ("op_name", "num_heads"))


def _scale_matrix(_: TableFile, rows: Rows) -> Iterator[Series]:
    excluded: Exclusions = {}
    yield Series("scale_matrix", len(rows), timed(rows, excluded), excluded, calls.scale_matrix, ("k",))


def _kernel(formula: Formula, *kind_words: str) -> Callable[[TableFile, Rows], Iterator[Series]]:
    def series(file: TableFile, rows: Rows) -> Iterator[Series]:
        excluded: Exclusions = {}
        name = file.name.removesuffix("_module")
        kept = timed(rows, excluded)
        yield Series(name, len(rows), kept, excluded, formula, tuple(kind_words))

    return series


def _generation_module(file: TableFile, rows: Rows) -> Iterator[Series]:
    most = B200_GRAPH_BATCH if file.system.startswith("b200") else GRAPH_BATCH
    why = f"batch above {most}: not from a graph"
    yield from _module(rows, "decode", why, lambda own: own.columns["batch_size"] > most)


def _context_module(_: TableFile, rows: Rows) -> Iterator[Series]:
    why = f"isl up to {HOST_FLOOR_ISL}: a host floor per layer"
    yield from _module(rows, "prefill", why, lambda own: own.columns["isl"] <= HOST_FLOOR_ISL)


def _module(rows: Rows, mode: str, why: str, shows_host: Callable[[Rows], Array]) -> Iterator[Series]:
    for op_name, own in _by_word(rows.with_column("mode", np.full(len(rows), mode)), "op_name"):
        excluded: Exclusions = {}
        kept = timed(split_off(own, excluded, why, shows_host(own)), excluded)
        for column, known in _MODULE_WORDS.items():
            unknown = ~np.isin(kept.columns[column], list(known))
            kept = split_off(kept, excluded, f"a {column} that castoff does not have", unknown)
        sites = ("mode", "op_name", "model", "gemm_type", "kv_cache_dtype", "tp_size")
        yield Series(op_name, len(own), kept, excluded, calls.attention_module, sites, eager=mode == "prefill")


_MODULE_WORDS = {
    "model": tuple(calls.MODELS),
    "gemm_type": tuple(calls.MODULE_ACTIONS),
    "kv_cache_dtype": tuple(calls.CACHE_ACTIONS),
}


def _by_word(rows: Rows, column: str) -> Iterator[tuple[str, Rows]]:
    for word in np.unique(rows.columns[column]):
        yield str(word), rows.where(rows.columns[column] == word)


def _short(dtype: str) -> str:
    return "bf16" if dtype == "bfloat16" else dtype


_REQUESTS = ("batch_size", "isl", "step")
_EXPERTS = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
_MODULE = ("op_name", "model", "gemm_type", "kv_cache_dtype")
_EXCHANGE = ("num_token", "hidden_size", "num_topk", "num_experts", "node_num")

KINDS: Mapping[str, Kind] = {
    "gemm": Kind(("gemm_dtype", "kernel_source"), ("m", "n", "k"), _gemm),
    "moe": Kind(("moe_dtype", "distribution"), _EXPERTS, _moe),
    "custom_allreduce": Kind(("backend",), ("num_gpus", "message_size"), _all_reduce),
    "nccl": Kind(("op_name", "nccl_dtype"), ("num_gpus", "message_size"), _nccl),
    "wideep_deepep_ll": Kind(
        ("op_name",),
        _EXCHANGE,
        _expert_exchange,
        {"dispatch": TimeColumn("dispatch_avg_t_us", "µs"), "combine": TimeColumn("combine_avg_t_us", "µs")},
    ),
    "wideep_deepep_normal": Kind(
        ("op_name",),
        (*_EXCHANGE, "dispatch_sms", "combine_sms"),
        _expert_exchange,
        {"dispatch": TimeColumn("dispatch_transmit_us", "µs"), "combine": TimeColumn("combine_transmit_us", "µs")},
    ),
    "mla_bmm": Kind(("op_name", "bmm_dtype"), ("num_heads", "num_tokens"), _mla_bmm),
    "scale_matrix": Kind((), ("m", "k"), _scale_matrix),
    "glm5_dsa_attn_module": Kind((), _REQUESTS, _kernel(calls.sparse_attention)),
    "glm5_mqa_logits_module": Kind((), _REQUESTS, _kernel(calls.indexer_logits)),
    "glm5_topk_module": Kind(("score_mode",), _REQUESTS, _kernel(calls.topk, "score_mode")),
    "dsa_generation_module": Kind(_MODULE, (*_REQUESTS, "tp_size"), _generation_module),
    "dsa_context_module": Kind(_MODULE, (*_REQUESTS, "tp_size"), _context_module),
}
"""By the name of the file. Other tables are listed, and not scored."""
