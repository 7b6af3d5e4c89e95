"""Points of whole deployments: files and their faults, what a row runs, errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

import castoff
from castoff.accuracy.deployments import load_deployment, step_deployment
from castoff.accuracy.e2e import LoadAccuracy, StepAccuracy, e2e_accuracy
from castoff.accuracy.points import LoadPoint, StepPoint, read_points
from castoff.errors import CastoffError
from tests.accuracy.e2e_files import LOAD, PROMPT, STEP, write_csv


def load_point(folder: Path, row: Mapping[str, str]) -> LoadPoint:
    return cast(LoadPoint, read_points(write_csv(folder / "points.csv", row))[0])


def step_point(folder: Path, row: Mapping[str, str]) -> StepPoint:
    return cast(StepPoint, read_points(write_csv(folder / "points.csv", row))[0])


def loads(path: Path, backend: str | None = None) -> LoadAccuracy:
    result = e2e_accuracy(path, backend=backend)
    assert isinstance(result, LoadAccuracy)
    return result


def steps(path: Path, backend: str | None = None) -> StepAccuracy:
    result = e2e_accuracy(path, backend=backend)
    assert isinstance(result, StepAccuracy)
    return result


def test_load_point(tmp_path: Path) -> None:
    deployed = load_deployment(load_point(tmp_path, LOAD), None)
    assert (deployed.model.name, deployed.device.name) == ("zai-org/GLM-5-FP8", "h200_sxm")
    parallel, quant = deployed.scenario.parallel, deployed.scenario.quant
    assert (parallel.num_devices, parallel.tp_size, parallel.dp_size, parallel.moe_tp_size) == (8, 8, 1, 8)
    assert (quant.quantize_linear_action, quant.quantize_attention_action) == ("FP8", "DISABLED")
    assert (quant.quantize_indexer_action, deployed.scenario.backend) == ("FP8", "sglang")
    b200 = load_deployment(load_point(tmp_path, {**LOAD, "system": "b200_sxm"}), "vllm")
    assert (b200.scenario.quant.quantize_attention_action, b200.scenario.backend) == ("FP8", "vllm")
    spread = {**LOAD, "tp_size": "1", "attention_dp_size": "8", "moe_tp_size": "1", "moe_ep_size": "8"}
    ranks = load_deployment(load_point(tmp_path, spread), None).scenario.parallel
    assert (ranks.num_devices, ranks.tp_size, ranks.dp_size, ranks.ep_size) == (8, 1, 8, 8)
    drafts = load_deployment(load_point(tmp_path, PROMPT), None).scenario.mtp
    assert (drafts.num_mtp_tokens, drafts.mtp_acceptance_length) == (5, 3.5)


def test_step_point(tmp_path: Path) -> None:
    scenario = step_deployment(step_point(tmp_path, STEP), None).scenario
    parallel = scenario.parallel
    assert (parallel.num_devices, parallel.dp_size, parallel.ep_size) == (32, 32, 32)
    assert (parallel.word_embedding_tp, parallel.word_embedding_tp_size, parallel.lmhead_tp_size) == ("row", 32, 32)
    assert scenario.quant.quantize_indexer_action == "INT8"
    assert (scenario.backend, scenario.workload.num_queries) == ("cann-ge", 64)
    offloaded = {**STEP, "offload": "serve_install", "pool_tokens": "8192", "graph": "npugraph_ex"}
    served = step_deployment(step_point(tmp_path, offloaded), None).scenario
    assert (served.offload.pool_tokens, served.hits.hit_rate, served.backend) == (8192, 0.85, "cann-npugraph_ex")
    recipe = {**STEP, "model": "DeepSeek-V3.2", "source": "cann-recipes-infer deepseek_v3.2_exp guide"}
    recipe |= {"parallel": "attention DP128, EP128, perfect expert balance", "num_devices": "128", "kv_dtype": "int8"}
    v32 = step_deployment(step_point(tmp_path, recipe), None).scenario
    assert (v32.parallel.o_proj_tp_size, v32.parallel.lmhead_tp_size, v32.parallel.dp_size) == (4, 16, 128)
    assert (v32.quant.quantize_attention_action, v32.quant.quantize_indexer_action) == ("INT8", None)
    mixed = step_deployment(step_point(tmp_path, {**STEP, "parallel": "TP4 DP4 EP16", "num_devices": "16"}), None)
    assert (mixed.scenario.parallel.tp_size, mixed.scenario.parallel.dp_size) == (4, 4)


def test_errors_of_loads(tmp_path: Path) -> None:
    other = {**LOAD, "concurrency": "4", "tpot_ms": "10"}
    result = loads(write_csv(tmp_path / "points.csv", LOAD, other))
    first, second = result.points
    assert first.tpot_error == pytest.approx(first.tpot_s / 0.02 - 1)
    assert result.tpot_mean_abs_error == pytest.approx((abs(first.tpot_error) + abs(second.tpot_error)) / 2)
    assert (result.rows, result.excluded, result.systems[0].points) == (2, {}, 2)
    assert not first.queueing
    served = castoff.serve(
        "zai-org/GLM-5-FP8",
        "h200_sxm",
        load_deployment(load_point(tmp_path, LOAD), None).scenario,
        workload=castoff.ClosedLoop(concurrency=2, prompt_tokens=1024, output_tokens=64),
    )
    assert (first.ttft_s, first.tpot_s) == (served.summary.ttft_mean_s, served.summary.tpot_mean_s)


def test_published_steps(tmp_path: Path) -> None:
    offloaded = {**STEP, "global_batch": "128", "offload": "serve_install", "pool_tokens": "8192", "step_ms": "100.55"}
    result = steps(write_csv(tmp_path / "points.csv", STEP, offloaded))
    assert result.step_mean_abs_error is not None
    assert result.step_mean_abs_error < 0.01
    assert [point.origin for point in result.points] == ["calibrated", "assumed"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model_path": "x/Kimi-K2.5"}, "castoff has no model x/Kimi-K2.5"),
        ({"system": "gb200"}, "castoff has no device gb200"),
        ({"backend": "trtllm"}, "castoff has no backend trtllm; --backend takes another"),
        ({"precision": "nvfp4"}, "castoff serves no nvfp4, only fp8 and bf16"),
        ({"osl": "1"}, "requests of one token have no time per output token"),
        ({"precision": "bf16"}, "no cache fits"),
    ],
)
def test_what_castoff_cannot_price_is_counted(tmp_path: Path, changed: Mapping[str, str], reason: str) -> None:
    result = loads(write_csv(tmp_path / "points.csv", {**LOAD, **changed}))
    ((why, rows),) = result.excluded.items()
    assert why.startswith(reason)
    assert (rows, result.points, result.tpot_mean_abs_error, result.ttft_mean_abs_error) == (1, (), None, None)


def test_no_step_of_an_unknown_model(tmp_path: Path) -> None:
    result = steps(write_csv(tmp_path / "points.csv", STEP, {**STEP, "model": "Kimi-K2.5"}))
    assert result.excluded == {"castoff has no model Kimi-K2.5": 1}
    assert len(result.points) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**LOAD, "speed": "1"}, "unknown column 'speed'"),
        ({key: value for key, value in LOAD.items() if key != "isl"}, "lacks the column isl"),
        ({key: value for key, value in LOAD.items() if key != "model_path"}, "neither a column model_path nor model"),
        ({**LOAD, "isl": "1024.5"}, "row 2: isl must be a whole number of at least 1, got '1024.5'"),
        ({**LOAD, "concurrency": "0"}, "row 2: concurrency must be a whole number"),
        ({**LOAD, "ttft_ms": "nan"}, "row 2: ttft_ms must be a number greater than 0, got 'nan'"),
        ({**LOAD, "tpot_ms": ""}, "row 2: tpot_ms must be a number"),
        ({**LOAD, "precision": "fp9"}, "row 2: precision must be one of fp8, bf16"),
        ({**PROMPT, "kv_dtype": "fp16"}, "row 2: kv_dtype must be one of bf16, fp8, int8, got 'fp16'"),
        ({**LOAD, "system": ""}, "row 2: system must be given"),
        ({**STEP, "graph": "none"}, "row 2: graph must be one of ge, npugraph_ex, graph"),
        ({**STEP, "linear_quant": "W2"}, "row 2: linear_quant must be one of"),
        ({**STEP, "offload": "all"}, "row 2: offload must be one of none"),
        ({**STEP, "parallel": "attention DP32, rows 7"}, "row 2: parallel must be parts like TP, DP"),
        ({**STEP, "ttft_ms": "1"}, "unknown column 'ttft_ms'"),
    ],
)
def test_faults_of_files(tmp_path: Path, row: Mapping[str, str], message: str) -> None:
    path = write_csv(tmp_path / "points.csv", row)
    with pytest.raises(CastoffError) as caught:
        e2e_accuracy(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("system,isl\n", "has no rows"),
        ("system,isl\na\n", "row 2 has 1 values for 2 columns"),
        ("isl,isl,system,precision,backend,osl,concurrency,tp_size,ttft_ms,tpot_ms\n" + "1," * 9 + "1\n", "twice"),
        ('system,"isl\n1,2', "is no CSV file"),
    ],
)
def test_faults_of_text(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "points.csv"
    path.write_text(text)
    with pytest.raises(CastoffError, match=message):
        e2e_accuracy(path)


def test_backend_faults_are_the_commands(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "points.csv", LOAD)
    with pytest.raises(CastoffError, match="nvidia does not say how it serves"):
        e2e_accuracy(path, backend="nvidia")
    with pytest.raises(CastoffError, match="unknown backend 'slang'"):
        e2e_accuracy(path, backend="slang")
    assert loads(path, "vllm").points[0].backend == "vllm"
    assert steps(write_csv(path, STEP), "ascend").points[0].backend == "ascend"
