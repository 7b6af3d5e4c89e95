"""Stages of matrix products, experts, collectives and small kernels."""

from __future__ import annotations

from dataclasses import replace

from castoff.accuracy.recipe import Recipe, Robustness
from castoff.accuracy.stage import Stage

# Both sides of the edges of tiles.
_TILED_M = (1, 8, 16, 17, 32, 64, 65, 128, 129, 256, 257, 512, 1024, 2048, 8192)
_N = (32, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 65536)
_K = (32, 128, 512, 1024, 2048, 4096, 8192, 65536)
_FEW_K = (64, 512, 2048, 8192, 65536)
_COARSE = {"m": (1, 8, 64, 128, 256, 1024, 8192), "n": (128, 1024, 8192), "k": (128, 1024, 8192)}
_PRODUCT_SITES = ("n", "k")
_EXPERT_SITES = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
# Of the small kernels beside the two products only the sum is measured: what most of it is not is held.
_SMALL = Recipe(
    form="stream",
    start={"launch_s": 1.5e-6, "memory_efficiency": 0.7},
    held=frozenset({"launch_s", "memory_efficiency"}),
)
_COPIES = replace(_SMALL, held=frozenset({"launch_s"}))
_EXPERT_KNOTS = {
    "rows_per_expert": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096),
    "touched": (1, 4, 16, 64, 256),
    "area": (4e5, 1e6, 3e6, 1e7, 3e7),
    "skew": (1, 2),
}
_SMOOTH = Robustness(ridge=1e-6, smooth=1e-5)


def _products(dtype: str, recipe: Recipe, how: Robustness) -> Stage:
    curves = {"bf16": "bf16", "fp8_block": "fp8_block", "fp8": "fp8_fp8", "nvfp4": "fp4_fp4"}
    return Stage(
        name=f"matrix products in {dtype}",
        tables=("gemm",),
        series=(f"gemm_{dtype}",),
        sites=_PRODUCT_SITES,
        recipes={f"matmul_{curves[dtype]}": recipe},
        how=how,
    )


def _library_collective(name: str, series: str) -> Stage:
    knots = {"bytes": tuple(float(4**power) for power in range(5, 15, 2)), "ranks": (2.0, 4.0, 8.0)}
    return Stage(
        name=f"{name} by the library",
        tables=("nccl",),
        series=(f"nccl_{series}",),
        sites=("num_gpus", "message_size"),
        recipes={name: Recipe(form="exchange", knots=knots)},
        how=Robustness(ridge=1e-5, smooth=1e-4),
    )


def _expert_exchange(phase: str, kind: str, form: str) -> Stage:
    recipe = Recipe(form=form, knots={"bytes": tuple(2.0 ** (13 + 3 * step) for step in range(7))})
    return Stage(
        name=f"exchanges with experts in {phase}",
        tables=(f"wideep_deepep_{kind}",),
        series=(f"deepep_{kind}_dispatch", f"deepep_{kind}_combine"),
        sites=("hidden_size", "num_topk", "num_experts"),
        recipes={f"{way}_{phase}": recipe for way in ("dispatch", "combine")},
        how=Robustness(ridge=1e-5, smooth=1e-4),
    )


PRODUCT_STAGES: tuple[Stage, ...] = (
    _products(
        "bf16",
        Recipe(form="matmul", knots={"m": _TILED_M, "n": _N, "k": _K}),
        Robustness(ridge=1e-6, smooth=1e-5, tail=0.2, tail_edge=0.15),
    ),
    _products(
        "fp8_block",
        Recipe(form="matmul_tiles_fp8", knots={"m": _TILED_M, "n": _N, "k": _FEW_K}, features=True),
        Robustness(ridge=1e-5, smooth=3e-6, tail=0.35, tail_edge=0.2),
    ),
    _products("fp8", Recipe(form="matmul_fp8", knots=_COARSE), _SMOOTH),
    _products("nvfp4", Recipe(form="matmul_fp4", knots=_COARSE), _SMOOTH),
    Stage(
        name="quantisation by a known scale",
        tables=("scale_matrix",),
        series=("scale_matrix",),
        sites=("k",),
        recipes={"quantize_fp8": Recipe(form="stream", knots={"bytes": tuple(4.0**power for power in range(4, 16))})},
        how=Robustness(ridge=1e-5, smooth=1e-4),
    ),
    Stage(
        name="experts of GLM-5 in fp8_block",
        tables=("moe",),
        series=("moe_fp8_block_glm5",),
        sites=_EXPERT_SITES,
        recipes={
            "grouped_fp8_block_256x6144": Recipe(form="grouped_fp8", knots=_EXPERT_KNOTS),
            **dict.fromkeys(("quantize_fp8_block", "swiglu"), _SMALL),
            **dict.fromkeys(("permute", "weighted_sum"), _COPIES),
        },
        how=_SMOOTH,
    ),
    Stage(
        name="experts of GLM-5 in bf16",
        tables=("moe",),
        series=("moe_bf16_glm5",),
        sites=_EXPERT_SITES,
        recipes={"grouped_bf16_256x6144": Recipe(form="grouped_bf16", knots=_EXPERT_KNOTS)},
        how=_SMOOTH,
    ),
    Stage(
        name="other experts in fp8_block",
        tables=("moe",),
        series=("moe_fp8_block_other",),
        sites=_EXPERT_SITES,
        recipes={"grouped_fp8_block": Recipe(form="grouped_fp8", knots=_EXPERT_KNOTS)},
        how=_SMOOTH,
    ),
    Stage(
        name="all_reduce of the stack",
        tables=("custom_allreduce",),
        series=("custom_allreduce",),
        sites=("num_gpus", "message_size"),
        recipes={"all_reduce": Recipe(form="all_reduce")},
        how=Robustness(huber=0.03, prior=1e-6, steps=200),
    ),
    _library_collective("all_reduce", "all_reduce"),
    _library_collective("all_gather", "all_gather"),
    _library_collective("reduce_scatter", "reduce_scatter"),
    _library_collective("all_to_all", "alltoall"),
    _expert_exchange("decode", "ll", "expert_copies"),
    _expert_exchange("prefill", "normal", "expert_tokens"),
)
