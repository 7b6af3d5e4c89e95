"""Shapes and scenarios for tests and benchmarks, from one place.

The upper half is fixed and needs no Hypothesis strategy to be drawn: models, the grid of structures and lengths. The
lower half draws random ones, valid by construction, so that a refusal is a failure of the code and not of the draw.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product
from math import ceil, gcd
from typing import Any

from hypothesis import strategies as st

from castoff.model.setup import Setup, resolve_setup
from castoff.ops.lengths import Lengths
from castoff.spec.backend import load_backend
from castoff.spec.device import Device, load_device
from castoff.spec.model import ModelSpec, load_model
from castoff.spec.quant import AttentionAction, LinearAction
from castoff.spec.scenario import Compilation, Mode, Mtp, Parallel, Quant, RequestClass, Scenario, Workload

GLM_5 = "zai-org/GLM-5"
GLM_52 = "zai-org/GLM-5.2"
DEEPSEEK_V32 = "deepseek-ai/DeepSeek-V3.2"
DEEPSEEK_V3 = "deepseek-ai/DeepSeek-V3"
MODELS = (GLM_5, GLM_52, DEEPSEEK_V32, DEEPSEEK_V3)

ASCEND = "ATLAS_800_A3_752T_128G_DIE"
NVIDIA = "b200_sxm"

INTEGER_ACTIONS: tuple[LinearAction, ...] = (
    "W8A16_STATIC",
    "W8A8_STATIC",
    "W4A8_STATIC",
    "W8A16_DYNAMIC",
    "W8A8_DYNAMIC",
    "W4A8_DYNAMIC",
)
LINEAR_ACTIONS: tuple[LinearAction, ...] = ("DISABLED", *INTEGER_ACTIONS, "FP8", "MXFP4")
ATTENTION_ACTIONS: tuple[AttentionAction, ...] = ("DISABLED", "INT8", "FP8")

# By definition of the formats: weight bytes per value, activation bytes per value, dtype of the product.
STORED: dict[LinearAction, tuple[float, float, str]] = {
    "DISABLED": (2, 2, "bf16"),
    "W8A16_STATIC": (1, 2, "bf16"),
    "W8A8_STATIC": (1, 1, "int8"),
    "W4A8_STATIC": (0.5, 1, "int8"),
    "W8A16_DYNAMIC": (1, 2, "bf16"),
    "W8A8_DYNAMIC": (1, 1, "int8"),
    "W4A8_DYNAMIC": (0.5, 1, "int8"),
    "FP8": (1, 1, "fp8"),
    "MXFP4": (0.5, 0.5, "fp4"),
}
MXFP4_GROUP = 32

DECODE_BATCHES = (1, 2, 8, 32, 128, 512)
PREFILL_QUERIES = (1, 128, 2048, 4096, 16_384)
CONTEXTS = (0, 1, 2047, 2048, 8192, 65_536, 1_000_000)


@cache
def model(name: str = GLM_52) -> ModelSpec:
    """A shipped model, read once."""
    return load_model(name)


@cache
def device(name: str = ASCEND) -> Device:
    """A shipped device, read once."""
    return load_device(name)


def setup_of(spec: ModelSpec, scenario: Scenario, *, on: str = ASCEND, mode: Mode | None = None) -> Setup:
    """The structure of a scenario on a shipped device with its default backend; `mode` as the workload's by default."""
    where = device(on)
    backend = load_backend(scenario.backend or where.default_backend)
    return resolve_setup(spec, where, backend, scenario, mode or scenario.workload.mode)


def scale_bytes(action: LinearAction, rows: int, columns: int) -> float:
    """Scales of a weight: fp32 per output channel, fp32 per 128 x 128 block for FP8, one byte per group for MXFP4."""
    if action == "DISABLED":
        return 0
    if action == "FP8":
        return 4 * ceil(rows / 128) * ceil(columns / 128)
    if action == "MXFP4":
        return rows * ceil(columns / MXFP4_GROUP)
    return 4 * rows


def stored_bytes(action: LinearAction, rows: int, columns: int) -> float:
    """A whole weight, scales included."""
    return rows * columns * STORED[action][0] + scale_bytes(action, rows, columns)


def uniform(count: int, context: int, query: int) -> Lengths:
    """`count` equal requests."""
    return Lengths((RequestClass(count, context, query),))


def structures(num_devices: int = 16) -> Iterator[Parallel]:
    """TP x EP grid over `num_devices`, the axes that users tune first."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if num_devices % size == 0]
    for tp, ep in product(sizes, sizes):
        yield Parallel(num_devices=num_devices, tp_size=tp, ep_size=ep)


def decode_shapes() -> Iterator[Workload]:
    """Decode steps over a grid of batch and context."""
    for batch, context in product(DECODE_BATCHES, CONTEXTS):
        yield Workload(num_queries=batch, context_length=context, decode=True)


def prefill_shapes() -> Iterator[Workload]:
    """Prefill steps over a grid of new and cached tokens."""
    for query, context in product(PREFILL_QUERIES, CONTEXTS):
        yield Workload(query_length=query, context_length=context)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def parallels(
    draw: st.DrawFn, spec: ModelSpec, *, max_stage_ranks: int = 64, max_stages: int = 4, balanced: bool = False
) -> Parallel:
    """Valid parallel sizes for a model, every option among them.

    balanced: leave out what makes ranks differ in their share of the work (external, redundant or overloaded experts).
    """
    stage = draw(
        st.sampled_from([size for size in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 64) if size <= max_stage_ranks])
    )
    pp = draw(st.integers(1, max_stages))
    tp = draw(st.sampled_from(divisors(gcd(stage, spec.num_attention_heads))))
    sizes: dict[str, Any] = {
        "num_devices": stage * pp,
        "tp_size": tp,
        "pp_size": pp,
        "dp_size": draw(st.sampled_from([None, stage // tp])),
        "dcp_size": draw(st.sampled_from(divisors(tp))),
        **_part(
            draw, stage, "o_proj", [size for size in divisors(gcd(stage, spec.num_attention_heads)) if _fit(size, tp)]
        ),
        **_part(draw, stage, "mlp", [size for size in divisors(gcd(stage, spec.intermediate_size)) if _fit(size, tp)]),
        **_part(draw, stage, "lmhead", [size for size in divisors(gcd(stage, spec.vocab_size)) if _fit(size, tp)]),
        **_embedding(draw, spec, stage, tp),
        **_experts(draw, spec, stage, tp, balanced=balanced),
    }
    return Parallel(**sizes)


def _fit(a: int, b: int) -> bool:
    return max(a, b) % min(a, b) == 0


def _part(draw: st.DrawFn, stage: int, part: str, allowed: list[int]) -> dict[str, Any]:
    """One part's TP, by itself, by its DP twin, by both or by default."""
    size = draw(st.sampled_from(allowed))
    by_tp, by_dp = {f"{part}_tp_size": size}, {f"{part}_dp_size": stage // size}
    return draw(st.sampled_from([{}, by_tp, by_dp, by_tp | by_dp]))


def _embedding(draw: st.DrawFn, spec: ModelSpec, stage: int, tp: int) -> dict[str, Any]:
    kind = draw(st.sampled_from([None, "row", "col"]))
    width = spec.vocab_size if kind == "row" else spec.hidden_size
    allowed = [size for size in divisors(gcd(stage, width)) if size % tp == 0]
    if kind is None or not allowed:
        return {}
    return {"word_embedding_tp": kind, "word_embedding_tp_size": draw(st.sampled_from(allowed))}


def _experts(draw: st.DrawFn, spec: ModelSpec, stage: int, tp: int, *, balanced: bool) -> dict[str, Any]:
    loads = {} if balanced else {"expert_load_imbalance": draw(st.sampled_from([1.0, 1.25, 3.0]))}
    redundant = {} if balanced else {"enable_redundant_experts": draw(st.booleans())}
    if not balanced and stage >= 2 and spec.moe.n_shared_experts and draw(st.integers(0, 3)) == 0:
        hosts = draw(st.booleans())
        external = {"enable_external_shared_experts": True, "host_external_shared_experts": hosts}
        return {"ep_size": stage, **external, **redundant, **loads}
    width = spec.moe.moe_intermediate_size
    cuts = [
        (ep, moe_tp)
        for ep in divisors(gcd(stage, spec.moe.n_routed_experts))
        for moe_tp in divisors(gcd(stage // ep, width))
        if ep > 1 or _fit(moe_tp, tp)
    ]
    ep, moe_tp = draw(st.sampled_from(cuts))
    moe_dp = stage // (ep * moe_tp)
    shared_width = width * spec.moe.n_shared_experts
    shared_tp = ep > 1 and shared_width % tp == 0 and draw(st.booleans())
    return {
        "ep_size": ep,
        "moe_dp_size": moe_dp,
        "moe_tp_size": draw(st.sampled_from([None, moe_tp])),
        "enable_shared_expert_tp": shared_tp,
        **(redundant if ep > 1 else {}),
        **loads,
    }


def quants(where: Device) -> st.SearchStrategy[Quant]:
    """Number formats that a device can multiply in."""
    has_fp8, has_fp4 = where.supports("fp8"), where.supports("fp4")
    linear = [a for a in LINEAR_ACTIONS if (a != "FP8" or has_fp8) and (a != "MXFP4" or has_fp4)]
    attention = [action for action in ATTENTION_ACTIONS if action != "FP8" or has_fp8]
    return st.builds(
        Quant,
        quantize_linear_action=st.sampled_from(linear),
        quantize_non_expert_linear_action=st.sampled_from([None, *linear]),
        quantize_lmhead=st.booleans(),
        mxfp4_group_size=st.sampled_from([16, MXFP4_GROUP]),
        quantize_attention_action=st.sampled_from(attention),
    )


def compilations(fusions: frozenset[str]) -> st.SearchStrategy[Compilation]:
    """Compilation options that a backend with these fusions takes."""
    return st.builds(
        Compilation,
        compile=st.booleans(),
        enable_multistream=st.sampled_from([None, False, True]),
        enable_sequence_parallel=st.booleans(),
        enable_matmul_allreduce=st.booleans() if "matmul_all_reduce" in fusions else st.just(False),
        enable_dispatch_ffn_combine=st.booleans() if "dispatch_ffn_combine" in fusions else st.just(False),
    )


def workloads(*, num_mtp_tokens: int = 0, max_queries: int = 256) -> st.SearchStrategy[Workload]:
    """Uniform decode or prefill steps within GLM-5.2's context; a chunk is at least as long as its draft window."""
    contexts = st.sampled_from(CONTEXTS) | st.integers(0, 200_000)
    decode = st.builds(Workload, num_queries=st.integers(1, max_queries), context_length=contexts, decode=st.just(True))
    prefill = st.builds(
        Workload,
        num_queries=st.integers(1, 8),
        query_length=st.integers(1 + num_mtp_tokens, 8192),
        context_length=contexts,
        prefix_cache_hit_rate=st.sampled_from([0.0, 0.1, 0.5]),
    )
    return decode | prefill


@st.composite
def scenarios(draw: st.DrawFn, /, spec: ModelSpec, where: Device, **options: Any) -> Scenario:
    """Whole scenarios; `options` go to `parallels`."""
    fusions = load_backend(where.default_backend).fusions
    drafts = draw(st.integers(0, 3)) if spec.num_nextn_predict_layers else 0
    return Scenario(
        workload=draw(workloads(num_mtp_tokens=drafts)),
        parallel=draw(parallels(spec, **options)),
        quant=draw(quants(where)),
        mtp=Mtp(num_mtp_tokens=drafts),
        compilation=draw(compilations(fusions)),
    )


def segments(*, max_count: int = 5, max_context: int = 60, max_query: int = 40) -> st.SearchStrategy[RequestClass]:
    """Equal requests, small enough for a loop over all their positions."""
    return st.builds(RequestClass, st.integers(1, max_count), st.integers(0, max_context), st.integers(1, max_query))


def batches(*, max_segments: int = 4, **limits: int) -> st.SearchStrategy[Lengths]:
    """Batches of up to `max_segments` kinds of requests."""
    return st.lists(segments(**limits), min_size=1, max_size=max_segments).map(lambda parts: Lengths(tuple(parts)))
