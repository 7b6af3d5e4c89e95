"""What is asked of a model on a device: the workload, the parallelism, number formats, speculation, compilation.

Every class is a group of command-line flags and a function argument at once; a field's name is its flag. Lengths and
batch may be numpy arrays (one entry per scenario) where the caller sweeps; everything else is structure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from castoff.dims import Dim, ceil_div
from castoff.errors import CastoffError
from castoff.spec.checks import check_value, check_whole, declared
from castoff.spec.hit_profile import Hits
from castoff.spec.offload import Offload
from castoff.spec.quant import AttentionAction, LinearAction

Mode = Literal["prefill", "decode"]
PerRequest = Dim | Sequence[int]

ASSUMED_DRAFT_ACCEPTANCE = 0.741739
"""Chance that one more draft token is accepted, so that three draft tokens give 2.7 tokens a step (1 + p + p² + p³)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests of one step.

    num_queries: requests in the step, over all data-parallel ranks. None means one, or one per length given.
    query_length: new tokens per request, one number or one per request. None in decode means 1 + num_mtp_tokens.
    context_length: tokens per request that the cache already holds, one number or one per request.
    decode: a decode step; it is one too when no query_length is given.
    prefix_cache_hit_rate: share of query_length that a prefix cache already holds, in [0, 1).
    """

    num_queries: Dim | None = None
    query_length: PerRequest | None = None
    context_length: PerRequest = 0
    decode: bool = False
    prefix_cache_hit_rate: float = 0.0

    @property
    def mode(self) -> Mode:
        """decode or prefill."""
        return "decode" if self.decode or self.query_length is None else "prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How the model is spread over devices. None means the default that follows from the other sizes.

    num_devices: devices of the deployment; tp_size x dp_size x pp_size.
    tp_size: tensor parallel ranks; they split the attention heads and hold the same KV cache.
    dp_size: attention-data parallel ranks, among which the requests are dealt; what is left by default.
    pp_size: pipeline stages, cut where no top-k crosses.
    dcp_size: ranks of a TP group over which the KV cache is split by token; divides tp_size.
    ep_size: ranks over which the routed experts are dealt; ep_size x moe_tp_size x moe_dp_size = num_devices / pp_size.
    moe_tp_size: ranks over which each routed expert is split; what is left by default.
    moe_dp_size: copies of the routed experts, each with its share of the tokens.
    o_proj_tp_size: ranks over which o_proj is split; default tp_size.
    o_proj_dp_size: copies of o_proj: the same, said from the other side.
    mlp_tp_size: ranks over which the dense MLPs are split; default tp_size.
    mlp_dp_size: copies of the dense MLPs: the same, said from the other side.
    lmhead_tp_size: ranks over which lm_head is split; default tp_size.
    lmhead_dp_size: copies of lm_head: the same, said from the other side.
    word_embedding_tp: split the embedding by vocabulary (row) or hidden size (col); None replicates it.
    word_embedding_tp_size: ranks over which the embedding is split; default tp_size.
    enable_redundant_experts: every expert rank holds one more expert.
    enable_shared_expert_tp: split the shared expert over the TP group instead of replicating it; needs ep_size > 1.
    enable_external_shared_experts: give 1 rank in num_experts_per_tok the shared experts alone.
    host_external_shared_experts: predict such a rank instead of one with routed experts.
    expert_load_imbalance: rows of the busiest expert rank over the mean, at least 1, and at least what a backend's own
        skew of expert loads makes of it.
    """

    num_devices: int = 1
    tp_size: int = 1
    dp_size: int | None = None
    pp_size: int = 1
    dcp_size: int = 1
    ep_size: int = 1
    moe_tp_size: int | None = None
    moe_dp_size: int = 1
    o_proj_tp_size: int | None = None
    o_proj_dp_size: int | None = None
    mlp_tp_size: int | None = None
    mlp_dp_size: int | None = None
    lmhead_tp_size: int | None = None
    lmhead_dp_size: int | None = None
    word_embedding_tp: Literal["col", "row"] | None = None
    word_embedding_tp_size: int | None = None
    enable_redundant_experts: bool = False
    enable_shared_expert_tp: bool = False
    enable_external_shared_experts: bool = False
    host_external_shared_experts: bool = False
    expert_load_imbalance: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quant:
    """Number formats.

    quantize_linear_action: format of the linear layers, experts included.
    quantize_non_expert_linear_action: format of the linear layers that are not routed experts; None means the same.
    quantize_lmhead: quantise lm_head too.
    mxfp4_group_size: values per MXFP4 scale.
    quantize_attention_action: format of the latent KV cache.
    quantize_indexer_action: format of the indexer cache; None means quantize_attention_action.
    """

    quantize_linear_action: LinearAction = "W8A8_DYNAMIC"
    quantize_non_expert_linear_action: LinearAction | None = None
    quantize_lmhead: bool = False
    mxfp4_group_size: int = 32
    quantize_attention_action: AttentionAction = "DISABLED"
    quantize_indexer_action: AttentionAction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mtp:
    """Speculative decoding with the model's MTP block.

    num_mtp_tokens: draft tokens per step, 0 for none.
    mtp_acceptance_length: mean tokens gained per decode step, the certain one included, in [1, 1 + num_mtp_tokens].
        None assumes 2.7 at three draft tokens, and the same chance per draft token at other counts.
    """

    num_mtp_tokens: int = 0
    mtp_acceptance_length: float | None = None

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that one decode step adds to a request."""
        if self.mtp_acceptance_length is not None:
            return self.mtp_acceptance_length
        return sum(ASSUMED_DRAFT_ACCEPTANCE**draft for draft in range(self.num_mtp_tokens + 1))

    @property
    def acceptance_is_assumed(self) -> bool:
        """Whether tokens_per_step rests on the assumed acceptance."""
        return self.num_mtp_tokens > 0 and self.mtp_acceptance_length is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """Which fusions and overlaps the compiler may use; the backend must know them too.

    compile: the compiler's fusions (residual add + norm, norm + quantisation, grouped matmul + SwiGLU).
    enable_multistream: run the shared expert on a stream of its own beside dispatch and combine. None means: when
        compiled.
    enable_sequence_parallel: keep the residual stream split over the TP group between attention and MLP.
    enable_matmul_allreduce: one kernel for a matmul and the all-reduce of its result.
    enable_dispatch_ffn_combine: one kernel for dispatch, experts and combine.
    """

    compile: bool = False
    enable_multistream: bool | None = None
    enable_sequence_parallel: bool = False
    enable_matmul_allreduce: bool = False
    enable_dispatch_ffn_combine: bool = False

    @property
    def multistream(self) -> bool:
        """Whether the shared expert has a stream of its own."""
        return self.compile if self.enable_multistream is None else self.enable_multistream


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One deployment and one step of it.

    backend: shipped name or path of a backend file; None takes the device's default.
    reserved_memory_gb: GiB of device memory that the model may not use.
    prefill_tokens: prompt tokens that a rank computes in one pass before it decodes, its share of them under context
        parallelism; a decode step then needs the memory of that pass too. None counts the step alone.
    disable_repetition: price every layer instead of every kind of layer; changes no result.
    """

    workload: Workload = field(default_factory=Workload)
    parallel: Parallel = field(default_factory=Parallel)
    quant: Quant = field(default_factory=Quant)
    mtp: Mtp = field(default_factory=Mtp)
    compilation: Compilation = field(default_factory=Compilation)
    offload: Offload = field(default_factory=Offload)
    hits: Hits = field(default_factory=Hits)
    backend: str | None = None
    reserved_memory_gb: float = 0.0
    prefill_tokens: int | None = None
    disable_repetition: bool = False


@dataclass(frozen=True, slots=True)
class RequestClass:
    """`count` equal requests, each with `context` tokens in the cache and `query` new ones."""

    count: Dim
    context: Dim
    query: Dim


def request_classes(workload: Workload, mtp: Mtp) -> tuple[RequestClass, ...]:
    """The requests of a step as classes of equal requests: most new tokens first, then longest first.

    Raises CastoffError for lengths that are negative, zero, of the wrong count, or where decode has fewer new tokens
    than 1 + num_mtp_tokens.
    """
    context, query = workload.context_length, workload.query_length
    if query is None:
        query = 1 + mtp.num_mtp_tokens
    hit_rate = workload.prefix_cache_hit_rate
    if not 0 <= hit_rate < 1:
        raise CastoffError(f"--prefix-cache-hit-rate must be in [0, 1), got {hit_rate}")
    if hit_rate and workload.mode == "decode":
        raise CastoffError("--prefix-cache-hit-rate is for prefill; a decode step has no prompt to find in the cache")
    num_queries = workload.num_queries
    if num_queries is not None:
        check_whole("--num-queries", num_queries, least=1)
    if isinstance(context, Sequence) or isinstance(query, Sequence):
        classes = _ragged(num_queries, context, query)
    else:
        check_whole("--context-length", context, least=0)
        check_whole("--query-length", query, least=1)
        classes = [RequestClass(1 if num_queries is None else num_queries, context, query)]
    least_query = 1 + mtp.num_mtp_tokens
    if workload.mode == "decode" and any(np.any(entry.query < least_query) for entry in classes):
        raise CastoffError(
            f"a decode step with --num-mtp-tokens {mtp.num_mtp_tokens} verifies {least_query} tokens per request; "
            f"leave out --query-length or give at least {least_query}"
        )
    return tuple(_apply_prefix_cache(entry, hit_rate) for entry in classes)


def _apply_prefix_cache(entry: RequestClass, hit_rate: float) -> RequestClass:
    if not hit_rate:
        return entry
    # At least one token is always computed. The small term keeps 0.1 * 10 from becoming 0.999….
    cached = np.minimum(np.floor(np.asarray(entry.query) * hit_rate + 1e-9), np.asarray(entry.query) - 1)
    cached_tokens: Dim = cached.astype(np.int64) if cached.ndim else int(cached)
    return RequestClass(entry.count, entry.context + cached_tokens, entry.query - cached_tokens)


def _ragged(num_queries: Dim | None, context: PerRequest, query: PerRequest) -> list[RequestClass]:
    if isinstance(num_queries, np.ndarray) or isinstance(context, np.ndarray) or isinstance(query, np.ndarray):
        raise CastoffError("one length per request cannot be combined with arrays of scenarios; cast them one by one")
    counts = {len(lengths) for lengths in (context, query) if isinstance(lengths, Sequence)}
    if counts == {0}:
        raise CastoffError("--context-length or --query-length is a list of no lengths; give one per request")
    if len(counts) != 1 or (num_queries is not None and {num_queries} != counts):
        given = "" if num_queries is None else f"--num-queries {num_queries}, "
        raise CastoffError(
            f"one length per request: {given}--context-length with {_count(context)} and --query-length with "
            f"{_count(query)} do not agree; give one per request, or one for all"
        )
    count = counts.pop()
    contexts = list(context) if isinstance(context, Sequence) else [int(context)] * count
    queries = list(query) if isinstance(query, Sequence) else [int(query)] * count
    for value in contexts:
        check_whole("--context-length", value, least=0)
    for value in queries:
        check_whole("--query-length", value, least=1)
    pairs = Counter(zip(contexts, queries, strict=True))
    heaviest_first = sorted(pairs.items(), key=lambda item: (-item[0][1], -item[0][0]))
    return [RequestClass(number, *lengths) for lengths, number in heaviest_first]


def _count(lengths: PerRequest) -> str:
    return f"{len(lengths)} values" if isinstance(lengths, Sequence) else "one value"


def deal_to_rank(classes: Sequence[RequestClass], ranks: int) -> tuple[RequestClass, ...]:
    """The requests of the first of `ranks` data-parallel ranks, when classes are dealt round robin in their order.

    No rank has more requests, and in the order of the classes none has heavier ones.
    """
    if len(classes) == 1:
        entry = classes[0]
        return (RequestClass(ceil_div(entry.count, ranks), entry.context, entry.query),)
    dealt, start = [], 0
    for entry in classes:
        count = int(entry.count)
        own = math.ceil((start + count) / ranks) - math.ceil(start / ranks)
        start += count
        if own:
            dealt.append(RequestClass(own, entry.context, entry.query))
    return tuple(dealt)


def check_types(scenario: Scenario) -> None:
    """Refuse fields of a scenario, lengths and batch aside, whose values are not of their declared type."""
    if not isinstance(scenario, Scenario):
        raise CastoffError(f"a Scenario is needed, got {type(scenario).__name__}")
    groups: dict[str, type] = {
        "workload": Workload,
        "parallel": Parallel,
        "quant": Quant,
        "mtp": Mtp,
        "compilation": Compilation,
        "offload": Offload,
        "hits": Hits,
    }
    for part, cls in groups.items():
        if not isinstance(getattr(scenario, part), cls):
            raise CastoffError(f"the scenario's {part} must be of the class {cls.__name__}")
    for group, cls in ((scenario, Scenario), *((getattr(scenario, part), cls) for part, cls in groups.items())):
        for name, allowed in declared(cls).items():
            check_value(name, getattr(group, name), allowed)
