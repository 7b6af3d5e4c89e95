"""Kernels that the ops of sparse attention name, and their sizes."""

from collections.abc import Mapping

import pytest

from castoff.model.attention import attention
from castoff.model.inputs import AbstractCaches, Selected, abstract_inputs
from castoff.model.weights import RankWeights
from castoff.ops.lengths import Lengths
from castoff.ops.program import OpCall, Recorder
from castoff.ops.work import Kernel
from castoff.spec.scenario import Mode, Parallel, Quant, RequestClass, Scenario
from tests.generators import model, setup_of, uniform


def kernels(lengths: Lengths, mode: Mode, **quant: str) -> Mapping[str, Kernel]:
    """Kernels of a full layer of GLM-5.2 on one of eight ranks."""
    scenario = Scenario(parallel=Parallel(num_devices=8, tp_size=8), quant=Quant(**quant))  # type: ignore[arg-type]
    setup = setup_of(model(), scenario, on="h200_sxm", mode=mode)
    recorder = Recorder()

    def block() -> tuple[()]:
        inputs = abstract_inputs(setup, lengths, 1, recorder)
        hidden_TD = recorder.tensor(lengths.tokens, setup.model.hidden_size)
        weights, caches = RankWeights(setup, recorder).layer(0), AbstractCaches(setup, lengths, recorder)
        attention(setup, weights, caches, inputs, 0, hidden_TD, Selected(), indexer="full")
        return ()

    recorder.block("row", "row", block)
    calls: list[OpCall] = [call for _, call in recorder.program.calls()]
    found = [kernel for call in calls for kernel in call.work.kernels]
    for call in calls:
        own = [name for kernel in call.work.kernels for name in kernel.parts]
        assert len(own) == len(set(own))
        assert set(own) <= {part.name for part in call.work.parts}
    return {kernel.curve: kernel for kernel in found}


def test_decode_names_its_kernels_by_format_and_phase() -> None:
    found = kernels(uniform(4, 9999, 1), "decode", quantize_linear_action="FP8", quantize_attention_action="FP8")
    assert set(found) == {
        "mlapo_fp8_block_decode", "indexer_project_fp8_block_decode", "indexer_logits_fp8_decode", "topk_decode",
        "sparse_attention_fp8_decode", "absorb_decode", "quantize_fp8_block", "matmul_fp8_block", "all_reduce",
    }  # fmt: skip
    assert found["topk_decode"].sizes == {
        "queries": 4, "selecting": 4, "excess": 4 * (10000 - 2048), "topk": 2048, "sparse": 1.0
    }  # fmt: skip
    assert found["sparse_attention_fp8_decode"].sizes["rows"] == 4 * 2048
    assert found["mlapo_fp8_block_decode"].sizes["outputs"] == 8 * 256
    assert found["mlapo_fp8_block_decode"].sizes["elements"] == 6144 * (2048 + 576) + 2048 * 8 * 256


def test_several_queries_of_a_request_count_each() -> None:
    found = kernels(uniform(4, 9996, 4), "decode")
    assert found["sparse_attention_bf16_decode"].sizes["queries"] == 16
    assert found["topk_decode"].sizes["selecting"] == 16
    assert found["indexer_logits_bf16_decode"].sizes["pairs"] == 4 * (4 * 9996 + 10)


@pytest.mark.parametrize(("context", "sparse"), [(0, 0.0), (1023, 0.0), (1024, 0.0), (1025, 1.0)])
def test_a_prefill_of_short_requests_is_dense(context: int, sparse: float) -> None:
    found = kernels(uniform(2, context, 1024), "prefill", quantize_linear_action="DISABLED")
    names = ("indexer_project_bf16_prefill", "indexer_logits_bf16_prefill", "topk_prefill", "absorb_prefill")
    assert {found[name].sizes["sparse"] for name in names} == {sparse}
    only_keys = 6144 * 128
    assert (found["indexer_project_bf16_prefill"].sizes["elements"] == only_keys) == (sparse == 0)


def test_classes_of_a_ragged_batch_add_up() -> None:
    ragged = Lengths((RequestClass(1, 0, 512), RequestClass(1, 5000, 512)))
    short, long = (kernels(uniform(1, context, 512), "prefill") for context in (0, 5000))
    both = kernels(ragged, "prefill")
    for name, size in (
        ("indexer_logits_bf16_prefill", "pairs"), ("topk_prefill", "selecting"), ("topk_prefill", "excess"),
        ("sparse_attention_bf16_prefill", "rows"), ("sparse_attention_bf16_prefill", "queries"),
    ):  # fmt: skip
        assert both[name].sizes[size] == short[name].sizes[size] + long[name].sizes[size]
    assert both["absorb_prefill"].sizes["sparse"] == 1


def test_numbers_that_no_table_has_are_not_named_as_if_they_were() -> None:
    found = kernels(uniform(4, 9999, 1), "decode", quantize_attention_action="INT8")
    assert "sparse_attention_int8_decode" in found
    assert "sparse_attention_bf16_decode" not in found
