"""Measured tables that tests make up."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from castoff.accuracy.ops import TableAccuracy, ops_accuracy

GEMM = {
    "gemm_dtype": ["bfloat16"],
    "kernel_source": ["linear"],
    "m": [4096],
    "n": [6144],
    "k": [2048],
    "latency": [0.2],
}
MODULE = {
    "op_name": ["dsa_generation_module"], "model": ["zai-org/GLM-5.2"], "gemm_type": ["bfloat16"],
    "kv_cache_dtype": ["bfloat16"], "tp_size": [8], "batch_size": [16], "isl": [1], "step": [8192], "latency": [0.1],
}  # fmt: skip
EXPERTS = {
    "moe_dtype": ["fp8_block"], "distribution": ["balanced"], "num_tokens": [64], "hidden_size": [6144],
    "inter_size": [2048], "topk": [8], "num_experts": [256], "moe_tp_size": [1], "moe_ep_size": [8], "latency": [1.0],
}  # fmt: skip
KERNEL = {"batch_size": [4, 1], "isl": [1, 4096], "step": [32768, 0], "latency": [0.05, 1.5]}


def write_table(
    folder: Path, columns: Mapping[str, Sequence[Any]], name: str, *, system: str = "h200_sxm", backend: str = "sglang"
) -> Path:
    """A table of `name` in aiconfigurator's layout under a folder; returns its path."""
    path = folder / "data" / system / "family" / backend / "1.0" / f"{name}_perf.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(dict(columns)), path)
    return path


def repeated(columns: Mapping[str, Sequence[Any]], count: int, **changed: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """The first row of a table so many times, with some columns given."""
    return {**{name: [values[0]] * count for name, values in columns.items()}, **changed}


def only_table(folder: Path, **options: Any) -> TableAccuracy:
    """The result for a folder whose tables make one series."""
    (table,) = ops_accuracy(folder, **options).tables
    return table
