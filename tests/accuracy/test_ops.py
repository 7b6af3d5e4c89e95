"""Prices of measured rows, and their errors."""

from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from castoff.accuracy.ops import TableAccuracy, ops_accuracy, score_file
from castoff.accuracy.tables import find_tables
from castoff.errors import CastoffError
from castoff.spec.backend import load_backend
from castoff.spec.device import load_device
from tests.accuracy.measured import EXPERTS, GEMM, KERNEL, MODULE, only_table, repeated, write_table
from tests.casting.fitted import fitted_backend

H200 = load_device("h200_sxm")
NVIDIA = load_backend("nvidia")


def predicted_s(table: TableAccuracy) -> float:
    return table.worst[0].predicted_s


def roofline_s(table: TableAccuracy) -> float:
    """The roofline of a table's only row, whose measured time is above it."""
    assert table.roofline_median_abs_error is not None
    return table.worst[0].measured_s * (1 - table.roofline_median_abs_error)


def test_gemm(tmp_path: Path) -> None:
    write_table(tmp_path, GEMM, "gemm")
    table = only_table(tmp_path, backend="nvidia")
    peak_s = 2 * 4096 * 6144 * 2048 / H200.matrix_flops_per_s["bf16"]
    curve = NVIDIA.curve("matmul")
    expected_s = curve.launch_s + peak_s / curve.compute_efficiency
    assert predicted_s(table) == pytest.approx(expected_s)
    assert roofline_s(table) == pytest.approx(peak_s)
    assert (table.name, table.system, table.backend, table.priced_by) == ("gemm_bf16", "h200_sxm", "sglang", "nvidia")
    assert (table.rows, table.rows_scored, table.excluded) == (1, 1, {})
    assert table.bias == pytest.approx(expected_s / 0.2e-3 - 1)
    assert table.median_abs_error == table.p90_abs_error == pytest.approx(abs(expected_s / 0.2e-3 - 1))
    assert table.worst[0].row == {"gemm_dtype": "bfloat16", "kernel_source": "linear", "m": 4096, "n": 6144, "k": 2048}


def test_a_product_of_few_tokens_reads_its_weight(tmp_path: Path) -> None:
    write_table(tmp_path, repeated(GEMM, 1, gemm_dtype=["fp8_block"], m=[1]), "gemm")
    moved = 6144 * 2048 + 4 * 48 * 16 + 2048 + 4 * 16 + 2 * 6144
    assert roofline_s(only_table(tmp_path)) == pytest.approx(moved / 4.8e12)


def test_every_format_has_a_series(tmp_path: Path) -> None:
    dtypes = ["bfloat16", "fp8", "fp8_block", "nvfp4", "int3"]
    write_table(tmp_path, repeated(GEMM, 5, gemm_dtype=dtypes), "gemm")
    tables = {table.name: table for table in ops_accuracy(tmp_path).tables}
    assert list(tables) == ["gemm_bf16", "gemm_fp8", "gemm_fp8_block", "gemm_int3", "gemm_nvfp4"]
    assert tables["gemm_int3"].excluded == {"castoff has no format int3": 1}
    assert tables["gemm_nvfp4"].excluded == {"h200_sxm does not compute in fp4": 1}
    assert [table.rows_scored for table in tables.values()] == [1, 1, 1, 0, 0]
    assert tables["gemm_int3"].median_abs_error is None


def test_errors_over_rows(tmp_path: Path) -> None:
    write_table(tmp_path, GEMM, "gemm")
    exact_ms = predicted_s(only_table(tmp_path)) * 1e3
    write_table(tmp_path, repeated(GEMM, 3, latency=[exact_ms, 2 * exact_ms, exact_ms / 2]), "gemm")
    table = only_table(tmp_path)
    assert table.median_abs_error == pytest.approx(0.5)
    assert table.p90_abs_error == pytest.approx(0.9)
    assert table.bias == pytest.approx(0.5 / 3)
    assert sum(bucket.rows_scored for bucket in table.buckets) == 3
    assert all(bucket.to_s is None or bucket.from_s < bucket.to_s for bucket in table.buckets)


def test_rows_are_priced_alike_alone_and_together(tmp_path: Path) -> None:
    sizes = {"m": [1, 300, 8192, 300], "n": [768, 768, 256, 256], "k": [512, 512, 7168, 7168]}
    write_table(tmp_path, repeated(GEMM, 4, **sizes), "gemm")
    together = {tuple(worst.row.values()): worst.predicted_s for worst in only_table(tmp_path).worst}
    for row in range(4):
        write_table(
            tmp_path, repeated(GEMM, 1, **{name: values[row : row + 1] for name, values in sizes.items()}), "gemm"
        )
        (alone,) = only_table(tmp_path).worst
        assert together.get(tuple(alone.row.values()), alone.predicted_s) == pytest.approx(alone.predicted_s)


def test_rows_without_a_time_are_left_out(tmp_path: Path) -> None:
    write_table(tmp_path, repeated(GEMM, 3, latency=[0.0, float("nan"), 0.2]), "gemm")
    table = only_table(tmp_path)
    assert (table.rows, table.rows_scored, table.excluded) == (3, 1, {"no time measured": 2})


def test_products_at_the_host_s_pace_are_left_out(tmp_path: Path) -> None:
    latency = [0.06, 0.058, 0.062, 0.08, 2.0]
    columns = repeated(GEMM, 5, gemm_dtype=["fp8_block"] * 5, m=[1, 2, 4, 512, 32768], latency=latency)
    write_table(tmp_path, columns, "gemm", backend="vllm")
    assert only_table(tmp_path).excluded == {"near the time of the host": 4}
    write_table(tmp_path / "other", columns, "gemm")
    assert only_table(tmp_path / "other").excluded == {}


def test_all_reduce(tmp_path: Path) -> None:
    columns = {"backend": ["sglang_graph", "sglang_eager"], "num_gpus": [8, 8], "message_size": [2**24, 2**24]}
    write_table(tmp_path, {**columns, "latency": [0.2, 0.4]}, "custom_allreduce")
    table = only_table(tmp_path)
    assert table.excluded == {"launched op by op, not from a graph": 1}
    assert roofline_s(table) == pytest.approx(2 * 2 * 2**24 * 7 / 8 / 450e9)


@pytest.mark.parametrize("op_name", ["all_gather", "reduce_scatter", "alltoall"])
def test_nccl(tmp_path: Path, op_name: str) -> None:
    columns = {"op_name": [op_name], "nccl_dtype": ["half"], "num_gpus": [4], "message_size": [2**26], "latency": [1.0]}
    write_table(tmp_path, columns, "nccl")
    assert roofline_s(only_table(tmp_path)) == pytest.approx(2 * 2**26 * 3 / 4 / 450e9)


def test_exchanges_with_experts(tmp_path: Path) -> None:
    columns = {
        "op_name": ["ll", "ll"], "num_token": [64, 64], "hidden_size": [6144, 6144], "num_topk": [8, 8],
        "num_experts": [256, 256], "node_num": [1, 2], "dispatch_avg_t_us": [1e5, 9.0], "combine_avg_t_us": [2e5, 9.0],
    }  # fmt: skip
    write_table(tmp_path, columns, "wideep_deepep_ll")
    tables = {table.name: table for table in ops_accuracy(tmp_path, backend="nvidia").tables}
    assert list(tables) == ["deepep_ll_combine", "deepep_ll_dispatch"]
    for table in tables.values():
        assert (table.rows, table.rows_scored, table.excluded) == (2, 1, {"over several nodes": 1})
    moved = 64 * 8 * 6144 * 7 / 8 / H200.tiers[0].bandwidth_bytes_per_s
    assert [table.worst[0].measured_s for table in tables.values()] == pytest.approx([0.2, 0.1])
    assert roofline_s(tables["deepep_ll_dispatch"]) == pytest.approx(moved)
    assert roofline_s(tables["deepep_ll_combine"]) == pytest.approx(2 * moved)


def test_exchanges_that_cannot_be(tmp_path: Path) -> None:
    columns = {
        "op_name": ["ll", "normal"], "num_token": [64] * 2, "hidden_size": [6144] * 2, "num_topk": [1000, 8],
        "num_experts": [256] * 2, "node_num": [1] * 2, "dispatch_avg_t_us": [9.0] * 2, "combine_avg_t_us": [9.0] * 2,
    }  # fmt: skip
    write_table(tmp_path, columns, "wideep_deepep_ll")
    for table in ops_accuracy(tmp_path).tables:
        assert table.rows_scored == 0
        assert table.excluded == {"an op_name other than ll": 1, "more experts of a token than there are": 1}


def test_normal_exchanges_on_other_multiprocessors_are_left_out(tmp_path: Path) -> None:
    columns = {
        "op_name": ["normal"] * 2, "num_token": [64] * 2, "hidden_size": [6144] * 2, "num_topk": [8] * 2,
        "num_experts": [256] * 2, "node_num": [1] * 2, "dispatch_sms": [20, 24], "combine_sms": [24, 20],
        "dispatch_transmit_us": [50.0, 40.0], "combine_transmit_us": [80.0, 90.0],
    }  # fmt: skip
    write_table(tmp_path, columns, "wideep_deepep_normal")
    combine, dispatch = ops_accuracy(tmp_path).tables
    assert (combine.name, dispatch.name) == ("deepep_normal_combine", "deepep_normal_dispatch")
    assert [table.worst[0].measured_s for table in (combine, dispatch)] == pytest.approx([90e-6, 50e-6])
    (reason,) = dispatch.excluded
    assert reason == "on other than 20 multiprocessors, DeepEP's default"


def test_a_collective_of_one_has_nothing_to_do(tmp_path: Path) -> None:
    columns = {"backend": ["sglang_graph"], "num_gpus": [1], "message_size": [64], "latency": [0.2]}
    write_table(tmp_path, columns, "custom_allreduce")
    assert only_table(tmp_path).excluded == {"nothing to do": 1}


def test_experts(tmp_path: Path) -> None:
    write_table(tmp_path, EXPERTS, "moe")
    table = only_table(tmp_path)
    assert table.name == "moe_fp8_block_glm5"
    # Dealt in turn, 512 copies reach every expert.
    weights_bytes = 32 * 3 * 6144 * 2048 * (1 + 4 / 128**2)
    assert weights_bytes / 4.8e12 < roofline_s(table) < 1.05 * weights_bytes / 4.8e12
    write_table(tmp_path, repeated(EXPERTS, 1, num_experts=[128]), "moe")
    assert only_table(tmp_path).name == "moe_fp8_block_other"


@pytest.mark.parametrize("name", ["glm5_dsa_attn", "glm5_mqa_logits", "glm5_topk"])
def test_kernels(tmp_path: Path, name: str) -> None:
    write_table(tmp_path, {**KERNEL, "score_mode": ["flat", "flat"]}, f"{name}_module")
    table = only_table(tmp_path)
    assert (table.name, table.rows_scored) == (name, 2)


def test_attention_without_absorption(tmp_path: Path) -> None:
    """Nearly all of it is products of 2048 rows with 64 heads."""
    write_table(tmp_path, {"batch_size": [1], "isl": [4096], "step": [65536], "latency": [9.0]}, "glm5_dsa_attn_module")
    rows_bytes = 4096 * 2048 * 1152
    assert roofline_s(only_table(tmp_path)) == pytest.approx(rows_bytes / 4.8e12, rel=0.2)


def test_modules(tmp_path: Path) -> None:
    names = ["dsa_generation_module_skip_indexer"] * 2
    models = ["zai-org/GLM-5.2", "nvidia/GLM-5.2-NVFP4"]
    write_table(tmp_path, repeated(MODULE, 2, op_name=names, model=models), "dsa_generation_module")
    shared = only_table(tmp_path)
    assert shared.worst[0].predicted_s == shared.worst[1].predicted_s
    write_table(tmp_path, MODULE, "dsa_generation_module")
    full = only_table(tmp_path)
    assert predicted_s(full) > predicted_s(shared) > 3 * NVIDIA.curve("matmul").launch_s


def test_modules_that_do_not_exist(tmp_path: Path) -> None:
    columns = repeated(
        MODULE, 5,
        op_name=["dsa_generation_module_skip_indexer"] * 5,
        model=["zai-org/GLM-5", "zai-org/GLM-5.2", "zai-org/GLM-5.2", "me/Mine", "zai-org/GLM-5.2"],
        tp_size=[8, 7, 8, 8, 8], batch_size=[1, 1, 512, 1, 1], gemm_type=[*["bfloat16"] * 4, "int3"],
    )  # fmt: skip
    write_table(tmp_path, columns, "dsa_generation_module")
    table = only_table(tmp_path)
    assert (table.rows, table.rows_scored) == (5, 0)
    assert list(table.excluded.values()) == [1] * 5
    why = " ".join(table.excluded)
    for part in ("batch above 256", "a model that", "a gemm_type that", "no layer whose indexer is shared", "7"):
        assert part in why


def test_short_prefill_is_left_out(tmp_path: Path) -> None:
    columns = repeated(MODULE, 2, op_name=["dsa_context_module"] * 2, isl=[512, 1024])
    write_table(tmp_path, columns, "dsa_context_module")
    table = only_table(tmp_path)
    assert table.excluded == {"isl up to 512: a host floor per layer": 1}


def test_tables_without_a_formula_are_listed(tmp_path: Path) -> None:
    write_table(tmp_path, {"latency": [1.0, 2.0]}, "computescale")
    write_table(tmp_path, GEMM, "gemm", system="my_gpu")
    scales, gemm = ops_accuracy(tmp_path).tables
    assert (scales.rows, scales.rows_scored, scales.excluded) == (2, 0, {"castoff prices no op like it yet": 2})
    assert gemm.excluded == {"castoff has no device my_gpu": 1}


def test_another_backend(tmp_path: Path) -> None:
    write_table(tmp_path, GEMM, "gemm")
    other = only_table(tmp_path, backend="castoff")
    assert other.priced_by == "castoff"
    with pytest.raises(CastoffError, match="nvidai"):
        ops_accuracy(tmp_path, backend="nvidai")


GOALS = {
    "gemm_bf16", "gemm_fp8_block", "moe_fp8_block_glm5", "glm5_mqa_logits", "glm5_topk", "glm5_dsa_attn",
    "custom_allreduce", "dsa_generation_module", "dsa_generation_module_skip_indexer", "dsa_context_module",
}  # fmt: skip


def test_public_tables(shared_data: Path) -> None:
    folder = shared_data / "silicon"
    if not folder.is_dir():
        pytest.skip(f"no measured tables at {folder}")
    files = [file for file in find_tables(folder) if file.system == "h200_sxm"]
    tables = [table for file in files for table in score_file(file, None)]
    for table in tables:
        assert table.rows == table.rows_scored + sum(table.excluded.values()), table.name
        if table.rows_scored:
            assert table.median_abs_error is not None
            assert 0 <= table.median_abs_error < 1
    assert {table.name for table in tables if table.rows_scored} >= GOALS


def test_tables_of_systems_that_a_file_was_not_fitted_on(tmp_path: Path) -> None:
    backend = fitted_backend(tmp_path)
    write_table(tmp_path, GEMM, "gemm")
    write_table(tmp_path, GEMM, "gemm", system="b200_sxm")
    other, own = ops_accuracy(tmp_path, backend=backend).tables
    assert (other.system, other.rows_scored, other.excluded) == ("b200_sxm", 0, {f"{backend} is fitted on h200_sxm": 1})
    assert (own.system, own.rows_scored, own.priced_by) == ("h200_sxm", 1, "fitted")
    flops_s = 2 * 4096 * 6144 * 2048 / 989e12
    assert own.worst[0].predicted_s == pytest.approx(4e-6 + flops_s / 0.5, rel=1e-3)


def test_a_stack_that_castoff_has_no_backend_for_is_priced_by_the_devices_own(tmp_path: Path) -> None:
    write_table(tmp_path, GEMM, "gemm", backend="trtllm")
    write_table(tmp_path, GEMM, "gemm", backend="vllm")
    assert [table.priced_by for table in ops_accuracy(tmp_path).tables] == ["sglang", "vllm"]


@pytest.mark.parametrize(("word", "scored"), [("power_law_1.2", 1), ("balanced", 1), ("gaussian", 0)])
def test_distributions_of_experts(tmp_path: Path, word: str, scored: int) -> None:
    write_table(tmp_path, repeated(EXPERTS, 1, distribution=[word]), "moe")
    table = only_table(tmp_path)
    assert table.rows_scored == scored
    assert table.excluded == ({} if scored else {"castoff has no distribution gaussian": 1})
