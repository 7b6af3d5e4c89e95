"""The stages of a calibration, in order: what each fits, to which rows, and which rows are left out together."""

from __future__ import annotations

from castoff.accuracy.stage import Stage
from castoff.accuracy.stages_attention import KERNEL_STAGES, MODULE_STAGES
from castoff.accuracy.stages_products import PRODUCT_STAGES

STAGES: tuple[Stage, ...] = (*PRODUCT_STAGES, *KERNEL_STAGES, *MODULE_STAGES)
