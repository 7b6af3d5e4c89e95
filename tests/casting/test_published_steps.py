"""The published decode steps of Atlas A3 without offload, with the backends that are fitted on them."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import castoff
from castoff.casting.prediction import cast
from castoff.spec.backend import load_backend
from castoff.spec.device import load_device
from castoff.spec.hit_profile import Hits
from castoff.spec.model import load_model
from castoff.spec.offload import OffloadMode
from castoff.spec.scenario import Compilation, Mtp, Parallel, Quant, Scenario, Workload

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "published_evaluation"


def example(name: str) -> ModuleType:
    """A file of the example as a module; it is no part of the package."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name, and one file of the example the other.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fit, offload = example("fit"), example("offload")
POINTS = fit.read_points()
RESIDENT = [point for point in POINTS if point.offload == "none"]
GE = [point for point in RESIDENT if point.graph == "cann-ge"]
GLM = {point.name: point for point in POINTS if point.name.startswith("glm")}
SHIPPED = {"launch": 3.2, "memory": 0.58, "gather": 0.143, "indexer": 0.181}


@pytest.mark.golden
@pytest.mark.parametrize("point", RESIDENT, ids=lambda point: point.name)
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


def test_the_two_graphs_differ_in_launches_of_offload_alone() -> None:
    ge, ex = load_backend("cann-ge"), load_backend("cann-npugraph_ex")
    own = {"offload_plan", "offload_serve", "offload_copy"}
    assert ex.curves == ge.curves | {family: ex.curves[family] for family in own}
    same = replace(ex, name=ge.name, description=ge.description, curves=ge.curves, sources=ge.sources)
    assert same == ge


@cache
def fit_of_offload() -> Any:
    """The two constants of offload in the first reading of the data; it takes seconds."""
    return offload.fit_offload(GLM, offload.CASES[0])


class TestOffload:
    """Hit rates are published at 8K, and the generator's at 16K; two rows are fitted, the others predicted."""

    @pytest.mark.parametrize(
        ("name", "hit_rate", "within"),
        [
            ("glm_ge_8k", 0.85, 0.003),
            ("glm_npugraph_ex_8k", 0.85, 0.003),
            ("glm_ge_16k", 0.94, 0.04),
            ("glm_npugraph_ex_16k", 0.94, 0.04),
            ("glm_npugraph_ex", None, 0.04),
        ],
    )
    def test_steps(self, name: str, hit_rate: float | None, within: float) -> None:
        (point,) = [point for point in POINTS if point.name == name]
        case = replace(fit.scenario(point, point.graph), hits=Hits(hit_rate=hit_rate))
        assert castoff.sweep(point.model, fit.DEVICE, case).latency_s[0] == pytest.approx(point.step_s, rel=within)

    def test_what_is_shipped_is_what_fits(self) -> None:
        found = fit_of_offload()
        assert found.row_efficiency == pytest.approx(load_backend("cann-ge").host_rows.row_efficiency, rel=1e-3)  # type: ignore[union-attr]
        assert found.launch_s == pytest.approx(
            load_backend("cann-npugraph_ex").curve("offload_serve").launch_s, rel=0.01
        )

    @pytest.mark.parametrize("name", ["glm_ge_8k", "glm_ge_16k", "glm_npugraph_ex_8k", "glm_npugraph_ex_16k"])
    def test_gains_at_equal_acceptance(self, name: str) -> None:
        """Within 6 points of the published gain over the largest batch without offload."""
        point, base = GLM[name], GLM["glm_ge" if "_ge_" in name else "glm_npugraph_ex"]
        found = fit_of_offload()
        published = point.global_batch / point.step_s / (base.global_batch / base.step_s) - 1
        assert offload.gain(point, found.texts[point.graph], base, found.case) == pytest.approx(published, abs=0.06)

    @pytest.mark.parametrize(("batch", "step_ms"), [(128, 83.9), (256, 102.9)])
    def test_what_direct_would_give(self, batch: int, step_ms: float) -> None:
        point = replace(GLM["glm_ge_8k"], global_batch=batch, offload="direct")
        found = fit_of_offload()
        assert offload.step_s(point, found.texts["cann-ge"], found.case) * 1e3 == pytest.approx(step_ms, abs=0.2)

    @pytest.mark.parametrize(
        ("mode", "batch", "pool", "fits"),
        [
            ("none", 64, None, True),
            ("none", 128, None, False),
            ("serve_install", 128, 8192, True),
            ("serve_install", 128, 16_384, True),
            ("direct", 256, 8192, True),
        ],
    )
    def test_what_fits(self, mode: OffloadMode, batch: int, pool: int | None, fits: bool) -> None:
        (point,) = [point for point in GE if point.name == "glm_ge"]
        case = fit.scenario(replace(point, global_batch=batch, offload=mode, pool_tokens=pool), "cann-ge")
        case = replace(case, prefill_tokens=2048, reserved_memory_gb=3.0)
        assert castoff.sweep(point.model, fit.DEVICE, case).fits[0] == fits

    @pytest.mark.parametrize(
        ("batch", "context", "resident_gb", "offloaded_gb"),
        [
            (128, 65_536, 25.3, 23.0),
            (256, 65_536, 28.6, 24.1),
            (512, 65_536, 35.2, 26.1),
            (1024, 65_536, 48.3, 30.1),
            (2048, 65_536, None, 38.2),
            (128, 131_072, 33.0, 28.2),
            (128, 262_144, 48.5, 38.7),
            (128, 393_216, None, 49.0),
        ],
    )
    def test_memory_of_deepseek(self, batch: int, context: int, resident_gb: float | None, offloaded_gb: float) -> None:
        """The plots of the recipe's guide, which seem to leave communication buffers out."""
        (point,) = [point for point in GE if point.name == "v32_128_b2_64k"]
        point = replace(point, global_batch=batch, context_tokens=context)
        for mode, published in (("none", resident_gb), ("gather", offloaded_gb)):
            case = replace(
                fit.scenario(replace(point, offload=mode), "cann-ge"),
                hits=Hits(hit_rate=None if mode == "none" else 0.5885),
                prefill_tokens=512 * context // 65_536,
                reserved_memory_gb=3.0,
            )
            found = castoff.sweep(point.model, fit.DEVICE, case)
            assert found.fits[0] == (published is not None)
            if published is not None:
                used = found.device_bytes[0] - 3 * 2**30 - load_backend("cann-ge").communication_buffer_bytes
                assert used / 1e9 == pytest.approx(published, rel=0.05)
