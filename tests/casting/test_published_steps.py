"""The published decode steps of Atlas A3 without offload, with the backends that are fitted on them."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import castoff
from castoff.casting.prediction import cast
from castoff.spec.backend import load_backend
from castoff.spec.device import load_device
from castoff.spec.model import load_model
from castoff.spec.scenario import Compilation, Mtp, Parallel, Quant, Scenario, Workload

FIT = Path(__file__).resolve().parents[2] / "examples" / "published_evaluation" / "fit.py"


def example() -> ModuleType:
    """The example as a module; it is no part of the package."""
    spec = importlib.util.spec_from_file_location("published_evaluation_fit", FIT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fit = example()
POINTS = fit.read_points()
GE = [point for point in POINTS if point.graph == "cann-ge"]
SHIPPED = {"launch": 3.2, "memory": 0.58, "gather": 0.143, "indexer": 0.181}


@pytest.mark.golden
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_shipped_backends_meet_the_points(point: object) -> None:
    assert fit.step_s(point, point.graph) == pytest.approx(point.step_s, rel=0.02)  # type: ignore[attr-defined]


def test_the_glm_point_is_met_closely() -> None:
    (point,) = [point for point in GE if point.name == "glm_ge"]
    assert fit.step_s(point, "cann-ge") == pytest.approx(71.21e-3, rel=0.003)


def test_what_is_shipped_is_what_fits() -> None:
    constants, spread = fit.fit(GE, SHIPPED, rounds=3)
    assert constants == pytest.approx(SHIPPED, rel=0.01)
    # How well the points know each: docs/published_evaluation.md gives these.
    assert spread == pytest.approx([0.08, 0.05, 0.21, 0.12], abs=0.01)


def test_figures_are_changed_in_their_section_alone() -> None:
    text = "[a]\nx = 1\ny = 2  # two\n\n[b]\nx = 3\n"
    assert fit.with_figure(text, "b", "x", 4.0) == "[a]\nx = 1\ny = 2  # two\n\n[b]\nx = 4.0\n"
    with pytest.raises(AssertionError, match=r"\[b\] has one y"):
        fit.with_figure(text, "b", "y", 4.0)


def test_a_held_out_model_on_another_die() -> None:
    """DeepSeek-V3.1, which has no sparse attention, on the 560T die: 172 requests of 4.2K, step 70.849 ms."""
    scenario = Scenario(
        workload=Workload(num_queries=172, context_length=4200, decode=True),
        parallel=Parallel(num_devices=32, dp_size=32, ep_size=32),
        quant=Quant(quantize_attention_action="INT8"),
        mtp=Mtp(num_mtp_tokens=3),
        compilation=Compilation(compile=True),
        backend="cann-ge",
    )
    swept = castoff.sweep("deepseek-ai/DeepSeek-V3", "ATLAS_800_A3_560T_128G_DIE", scenario)
    assert float(swept.latency_s[0]) == pytest.approx(70.849e-3, rel=0.04)


def test_origin_is_calibrated() -> None:
    (point,) = [point for point in GE if point.name == "glm_ge"]
    device = load_device(fit.DEVICE)
    prediction = cast(load_model(point.model), device, fit.scenario(point, "cann-ge"))
    assert prediction.cast.origin == "calibrated"


def test_the_two_graphs_differ_in_launches_alone() -> None:
    ge, ex = load_backend("cann-ge"), load_backend("cann-npugraph_ex")
    assert ge.curves.keys() == ex.curves.keys()
    for family, one in ge.curves.items():
        other = ex.curves[family]
        assert other.launch_s / one.launch_s == pytest.approx(1.022, abs=0.001)
        assert replace(one, launch_s=0.0, source="") == replace(other, launch_s=0.0, source="")
    assert (ge.unquantized, ge.prompt_hidden_states) == (ex.unquantized, ex.prompt_hidden_states)
