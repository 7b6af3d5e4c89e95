"""CSV files of measured points, with made-up times."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

LOAD = {
    "model_path": "zhipuai/GLM-5", "system": "h200_sxm", "precision": "fp8", "backend": "sglang", "image": "x",
    "measured": "2026-03-19", "isl": "1024", "osl": "64", "concurrency": "2.0", "tp_size": "8.0",
    "attention_dp_size": "1.0", "moe_tp_size": "8.0", "moe_ep_size": "1.0", "ttft_ms": "300", "tpot_ms": "20",
}  # fmt: skip
PROMPT = {
    "source": "docs", "model": "zai-org/GLM-5.2-FP8", "system": "h200_sxm", "precision": "fp8", "backend": "sglang",
    "kv_dtype": "bf16", "tp_size": "8", "mtp": "5", "mtp_accepted_length": "3.5", "isl": "8192", "osl": "64",
    "concurrency": "1", "ttft_ms": "600", "tpot_ms": "5",
}  # fmt: skip
STEP = {
    "source": "cann-recipes-infer glm_5_2_offload_guide", "model": "GLM-5.2", "device": "ATLAS_800_A3_752T_128G_DIE",
    "num_devices": "32", "parallel": "attention DP32, EP32, embed TP32, lm_head TP32",
    "linear_quant": "W8A8_DYNAMIC", "kv_dtype": "bf16", "mtp": "3", "global_batch": "64", "context_tokens": "65536",
    "query_tokens": "4", "graph": "ge", "offload": "none", "pool_tokens": "", "step_ms": "71.21", "note": "",
}  # fmt: skip


def write_csv(path: Path, *rows: Mapping[str, str]) -> Path:
    """A file with the columns of the first row."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path
