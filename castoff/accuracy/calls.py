"""Op calls that do what a row of a measured table does.

Each function is given the rows of one site, which differ in the sizes that are arrays here, and gives the calls whose
times add up to a row's. Axes: T tokens, D hidden, I inputs, O outputs, E experts, K experts per token, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal, get_args

from castoff.accuracy.benchmark_load import drawn_load, even_load
from castoff.accuracy.tables import TIME_OF, Rows
from castoff.casting.price import Pricing
from castoff.dims import minimum
from castoff.errors import CastoffError
from castoff.model.attention import attention
from castoff.model.inputs import AbstractCaches, Selected, abstract_inputs
from castoff.model.setup import resolve_setup
from castoff.model.weights import RankWeights
from castoff.ops.attention import AttentionSizes, absorb_query, expand_value
from castoff.ops.collectives import ExpertExchange, all_gather, all_reduce, all_to_all, reduce_scatter
from castoff.ops.expert_load import ExpertLayer
from castoff.ops.lengths import Lengths
from castoff.ops.linear import QUANTIZE, Activations, Quantized, Weight, linear, quantize
from castoff.ops.moe import (
    grouped_matmul,
    grouped_matmul_swiglu,
    moe_permute,
    moe_unpermute,
    swiglu,
)
from castoff.ops.program import OpCall, Recorder
from castoff.ops.work import Kernel, Work
from castoff.spec.mesh import Group
from castoff.spec.model import ModelSpec, load_model, shipped_models
from castoff.spec.quant import AttentionAction, LinearAction, LinearFormat, cache_format, linear_format
from castoff.spec.scenario import Mode, Parallel, Quant, RequestClass, Scenario

Formula = Callable[[Rows, Pricing], list[OpCall]]

GEMM_FORMATS: Mapping[str, LinearFormat | None] = {
    "bfloat16": None,
    "fp8": LinearFormat("W8A8_DYNAMIC", "fp8", "fp8", True),
    "fp8_block": linear_format("FP8"),
    "nvfp4": LinearFormat("MXFP4", "fp4", "fp4", True, 16),
    "w4a8_mxfp4_mxfp8": LinearFormat("MXFP4", "fp4", "fp8", True, 32),
    "w4a16_mxfp4": LinearFormat("MXFP4", "fp4", "bf16", False, 32),
    "int4_wo": LinearFormat("MXFP4", "int4", "bf16", False, 128),
}
"""Formats of products by the tables' names: fp8 has a scale per token and per output, fp8_block one per block.

MXFP4 says here that scales are one per group of inputs, a byte each.
"""

MODULE_ACTIONS: Mapping[str, LinearAction] = {"bfloat16": "DISABLED", "fp8_block": "FP8"}
CACHE_ACTIONS: Mapping[str, AttentionAction] = {"bfloat16": "DISABLED", "fp8": "FP8"}
NCCL_DTYPES: Mapping[str, str] = {"half": "fp16", "int8": "int8"}
MODELS: Mapping[str, str] = {
    **{name: name for name in shipped_models()},
    # Its experts alone are in another format.
    "nvidia/GLM-5.2-NVFP4": "zai-org/GLM-5.2",
}
"""Models of the tables of whole modules, by what castoff calls one with the same attention."""

RANKS_PER_NODE = 8
# Of DeepEP's kernels: those of low latency are for decode.
EXCHANGE_PHASES: Mapping[str, Mode] = {"ll": "decode", "normal": "prefill"}
KERNEL_MODEL, ABSORPTION_MODEL = "zai-org/GLM-5", "deepseek-ai/DeepSeek-V3"
# Parts of ops that the tables of single kernels measure.
ATTENTION_PARTS = frozenset({"qk", "softmax", "pv", "kv_gather"})
LOGITS_PARTS = frozenset({"score", "relu", "head_reduce", "key_cache_read", "scale_cache_read"})
TOPK_PARTS = frozenset({"topk"})
# Equal scores are the slowest to select from; where the last ones are the largest, the first pass finds most.
TOPK_CURVES: Mapping[str, str] = {"flat": "topk_flat", "top_last": "topk_top_last"}


def gemm(site: Rows, _: Pricing) -> list[OpCall]:
    """One product; its activations are quantised already."""
    form = GEMM_FORMATS[site.word("gemm_dtype")]
    n, k, m = site.number("n"), site.number("k"), site.dim("m")

    def body(recorder: Recorder) -> None:
        x_TI: Activations = recorder.tensor(m, k)
        if form is not None:
            scales = recorder.tensor(m, form.activation_scales(k), dtype=form.scale_dtype)
            x_TI = Quantized(recorder.tensor(m, k, dtype=form.activation_dtype), scales, "bf16")
        linear(x_TI, _weight(recorder, form, n, k))

    return _recorded(body)


def moe(site: Rows, pricing: Pricing) -> list[OpCall]:
    """Routed experts of one rank, the one with most rows: its rows by expert, both products, the weighted sum.

    Without a dispatch every rank has all copies of the tokens, sorts and sums them, and multiplies its own.
    """
    form = GEMM_FORMATS[site.word("moe_dtype")]
    hidden, width = site.number("hidden_size"), site.number("inter_size") // site.number("moe_tp_size")
    experts, chosen, ranks = site.number("num_experts"), site.number("topk"), site.number("moe_ep_size")
    local, tokens = -(-experts // ranks), site.dim("num_tokens")
    skew = _skew(site.word("distribution"))
    load = drawn_load(tokens, experts, chosen, ranks, skew) if skew else even_load(tokens, experts, chosen, ranks)
    layer = ExpertLayer(hidden, experts, skew)

    def body(recorder: Recorder) -> None:
        gate_up, down = (
            _weight(recorder, form, *shape, experts=local) for shape in ((2 * width, hidden), (hidden, width))
        )
        experts_TK = recorder.tensor(tokens, chosen, dtype="int32")
        rows_RD, order_R, counts_E = moe_permute(recorder.tensor(tokens, hidden), experts_TK, local)
        rows_RD = quantize(rows_RD.view(load.rows, hidden), gate_up)
        if "grouped_matmul_swiglu" in pricing.backend.fusions:
            hidden_RI = grouped_matmul_swiglu(rows_RD, gate_up, counts_E, load.touched, layer)
        else:
            hidden_RI = quantize(swiglu(grouped_matmul(rows_RD, gate_up, counts_E, load.touched, layer)), down)
        out_RD = grouped_matmul(hidden_RI, down, counts_E, load.touched, layer)
        all_RD = out_RD.view(tokens * chosen, hidden)
        moe_unpermute(all_RD, recorder.tensor(tokens, chosen, dtype="fp32"), order_R)

    return _recorded(body)


def _skew(distribution: str) -> float:
    """The exponent of `power_law_1.2`; 0 for `balanced`."""
    if distribution == "balanced":
        return 0.0
    try:
        return float(distribution.removeprefix("power_law_"))
    except ValueError:
        raise CastoffError(f"castoff has no distribution {distribution}") from None


def custom_all_reduce(site: Rows, _: Pricing) -> list[OpCall]:
    """One all_reduce inside a node; message_size counts elements of bf16."""
    group = Group("tp", site.number("num_gpus"))
    return _recorded(lambda recorder: all_reduce(recorder.tensor(site.dim("message_size")), group))


def nccl(site: Rows, _: Pricing) -> list[OpCall]:
    """A collective of NCCL inside a node; message_size counts the elements of the whole tensor."""
    group, size, dtype = (
        Group("tp", site.number("num_gpus")),
        site.dim("message_size"),
        NCCL_DTYPES[site.word("nccl_dtype")],
    )
    own = size / group.size

    def body(recorder: Recorder) -> None:
        match site.word("op_name"):
            case "all_reduce":
                all_reduce(recorder.tensor(size, dtype=dtype), group)
            case "all_gather":
                all_gather(recorder.tensor(own, dtype=dtype), group)
            case "reduce_scatter":
                reduce_scatter(recorder.tensor(size, dtype=dtype), group)
            case _:
                all_to_all(recorder.tensor(size, dtype=dtype), group, shape=(size,))

    return _recorded(body)


def expert_exchange(site: Rows, _: Pricing) -> list[OpCall]:
    """Copies of a node's tokens to the ranks of their experts in FP8, or back in bf16."""
    phase = EXCHANGE_PHASES[site.word("op_name")]
    way: Literal["dispatch", "combine"] = "dispatch" if site.word(TIME_OF) == "dispatch" else "combine"
    group, chosen = Group("ep", RANKS_PER_NODE), site.number("num_topk")
    exchange = ExpertExchange(way, phase, site.number("num_experts"), chosen)
    shape = (site.dim("num_token") * chosen, site.number("hidden_size"))
    dtype = "fp8" if way == "dispatch" else "bf16"
    return _recorded(
        lambda recorder: all_to_all(recorder.tensor(*shape, dtype=dtype), group, shape=shape, exchange=exchange)
    )


def absorption(site: Rows, _: Pricing) -> list[OpCall]:
    """One of the two batched products with a half of kv_b, in bf16, at the sizes of DeepSeek-V3."""
    model, heads, tokens = known_model(ABSORPTION_MODEL), site.number("num_heads"), site.dim("num_tokens")
    sizes = AttentionSizes(
        heads=heads,
        qk_nope_head_dim=model.qk_nope_head_dim,
        qk_rope_head_dim=model.qk_rope_head_dim,
        kv_lora_rank=model.kv_lora_rank,
        v_head_dim=model.v_head_dim,
        cache=cache_format(model, "DISABLED"),
        softmax_scale=model.softmax_scale,
        topk_limit=None,
    )

    def body(recorder: Recorder) -> None:
        kv_b = _weight(recorder, None, heads * (model.qk_nope_head_dim + model.v_head_dim), model.kv_lora_rank)
        if site.word("op_name") == "mla_gen_pre":
            absorb_query(recorder.tensor(tokens, heads, model.qk_head_dim), kv_b, sizes)
        else:
            expand_value(recorder.tensor(tokens, heads, model.kv_lora_rank), kv_b, sizes)

    return _recorded(body)


def scale_matrix(site: Rows, _: Pricing) -> list[OpCall]:
    """Activations to FP8 by a known scale."""
    form = LinearFormat("W8A8_STATIC", "fp8", "fp8", False)
    return _recorded(lambda recorder: QUANTIZE(recorder.tensor(site.dim("m"), site.number("k")), format=form))


def sparse_attention(site: Rows, pricing: Pricing) -> list[OpCall]:
    """Attention of 64 heads over selected bf16 rows, without the two products that absorb kv_b."""
    calls = _kernel_layer(site, pricing)
    return [_parts(call, ATTENTION_PARTS) for call in calls if call.op.name.startswith("multihead_latent_attention")]


def indexer_logits(site: Rows, pricing: Pricing) -> list[OpCall]:
    """Scores of the queries against all keys that they see, in FP8."""
    return [_parts(call, LOGITS_PARTS) for call in _kernel_layer(site, pricing) if call.op.name == "dsa_indexer"]


def topk(site: Rows, pricing: Pricing) -> list[OpCall]:
    """The selection among the scores."""
    curve = TOPK_CURVES[site.word("score_mode")]
    return [_parts(call, TOPK_PARTS, curve) for call in _kernel_layer(site, pricing) if call.op.name == "dsa_indexer"]


def attention_module(site: Rows, pricing: Pricing) -> list[OpCall]:
    """Attention of one layer on one rank, mlapo to o_proj, without the all_reduce after it."""
    quant = Quant(
        quantize_linear_action=MODULE_ACTIONS[site.word("gemm_type")],
        quantize_attention_action=CACHE_ACTIONS[site.word("kv_cache_dtype")],
        quantize_indexer_action="FP8",
    )
    kind = "shared" if site.word("op_name").endswith("_skip_indexer") else "full"
    mode = next(mode for mode in get_args(Mode) if mode == site.word("mode"))
    model = known_model(MODELS[site.word("model")])
    calls = _layer(site, pricing, model, quant, mode, kind=kind, tp_size=site.number("tp_size"))
    return [call for call in calls if call.work.parts]


@cache
def known_model(name: str) -> ModelSpec:
    """A shipped model, read once."""
    return load_model(name)


def _kernel_layer(site: Rows, pricing: Pricing) -> list[OpCall]:
    """A layer whose kernels are those of prefill, which the tables measure even for one query of each request."""
    quant = Quant(quantize_linear_action="FP8", quantize_indexer_action="FP8")
    return _layer(site, pricing, known_model(KERNEL_MODEL), quant, "prefill", kind="full", tp_size=1)


def _layer(
    site: Rows, pricing: Pricing, model: ModelSpec, quant: Quant, mode: Mode, *, kind: str, tp_size: int
) -> list[OpCall]:
    """The attention of a layer with this kind of indexer: batch_size requests, isl new tokens each after step."""
    scenario = Scenario(parallel=Parallel(num_devices=tp_size, tp_size=tp_size), quant=quant)
    setup = resolve_setup(model, pricing.device, pricing.backend, scenario, mode)
    lengths = Lengths((RequestClass(site.dim("batch_size"), site.dim("step"), site.dim("isl")),))
    if kind not in model.indexer_types:
        raise CastoffError(f"{model.name} has no layer whose indexer is {kind}")
    layer = model.indexer_types.index(kind)

    def body(recorder: Recorder) -> None:
        inputs = abstract_inputs(setup, lengths, 1, recorder)
        hidden_TD = recorder.tensor(lengths.tokens, model.hidden_size)
        selected = Selected()
        if kind == "shared":
            assert setup.topk_limit is not None
            columns = minimum(setup.topk_limit, lengths.longest)
            selected = Selected(recorder.tensor(lengths.tokens, columns, dtype="int32"))
        weights = RankWeights(setup, recorder).layer(layer)
        caches = AbstractCaches(setup, lengths, recorder)
        attention(setup, weights, caches, inputs, layer, hidden_TD, selected, indexer=kind)

    return _recorded(body)


def _weight(
    recorder: Recorder, form: LinearFormat | None, rows: int, columns: int, *, experts: int | None = None
) -> Weight:
    """A weight (O, I), or (E, O, I) of that many experts."""
    stack = () if experts is None else (experts,)
    if form is None:
        return Weight(recorder.tensor(*stack, rows, columns, kind="weight"))
    scales = recorder.tensor(*stack, *form.weight_scales(rows, columns), dtype=form.scale_dtype, kind="weight")
    return Weight(recorder.tensor(*stack, rows, columns, dtype=form.weight_dtype, kind="weight"), scales, form)


def _recorded(body: Callable[[Recorder], object]) -> list[OpCall]:
    recorder = Recorder()

    def block() -> tuple[()]:
        body(recorder)
        return ()

    recorder.block("row", "row", block)
    return [call for _, call in recorder.program.calls()]


def _parts(call: OpCall, names: frozenset[str], curve: str | None = None) -> OpCall:
    """A call that does some parts of another's work, sparsely however short the contexts; curve: what its kernel is
    fitted as, None for its own name."""
    parts = tuple(part for part in call.work.parts if part.name in names)
    kernels = tuple(
        Kernel(curve or kernel.curve, kernel.parts, {**kernel.sizes, "sparse": 1.0})
        for kernel in call.work.kernels
        if names.issuperset(kernel.parts)
    )
    return call.with_work(Work(parts, kernels=kernels))
