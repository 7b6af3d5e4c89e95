"""The stages of a calibration, in order: what each fits, to which rows, and which rows are left out together."""

from __future__ import annotations

from castoff.accuracy.fit import Recipe
from castoff.accuracy.stage import Stage
from castoff.accuracy.stages_attention import KERNEL_STAGES, MODULE_STAGES

_PRODUCT_KNOTS = {"m": (1, 8, 64, 128, 256, 1024, 8192), "n": (128, 1024, 8192), "k": (128, 1024, 8192)}

PRODUCT_STAGES: tuple[Stage, ...] = (
    Stage(
        name="matrix products in bf16",
        tables=("gemm",),
        series=("gemm_bf16",),
        sites=("n", "k"),
        recipes={"matmul_bf16": Recipe(form="matmul", knots=_PRODUCT_KNOTS)},
    ),
    Stage(
        name="matrix products in fp8_block",
        tables=("gemm",),
        series=("gemm_fp8_block",),
        sites=("n", "k"),
        recipes={"matmul_fp8_block": Recipe(form="matmul", knots=_PRODUCT_KNOTS)},
    ),
)

STAGES: tuple[Stage, ...] = (*PRODUCT_STAGES, *KERNEL_STAGES, *MODULE_STAGES)
