"""Calibrating on this machine: files that load and price what was measured, and what the grid refuses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import castoff
from castoff import Quant, Scenario, Workload
from castoff.accuracy.decode_steps import MeasuredPoint, Point, filled_engine, recorded_calls, timed_steps, tpot_s
from castoff.accuracy.machine_files import backend_toml, device_toml
from castoff.accuracy.peaks import Peaks, measure_peaks
from castoff.accuracy.this_machine import (
    MachineCalibration,
    MachineGrid,
    MachineOptions,
    fitted,
    in_rounds,
    machine_setup,
)
from castoff.casting.forms.amounts import AMOUNTS
from castoff.casting.whole_op import as_kernel
from castoff.errors import CastoffError
from castoff.model.setup import Setup
from castoff.spec.device import load_device
from tests.cli.commands import CONFIG

pytest.importorskip("torch")

PEAKS = Peaks(
    description="a processor", vendor="cpu", num_cores=2, memory_bytes=1 << 34, host_memory_bytes=1 << 34,
    matrix_flops_per_s=dict.fromkeys(("fp32", "bf16", "fp16", "int8", "fp8"), 1e11),
    vector_flops_per_s={"fp32": 1e10, "bf16": 1e10}, copy_bytes_per_s=1e10, to_device_bytes_per_s=5e9,
    to_host_bytes_per_s=5e9, row_efficiency=0.5,
)  # fmt: skip
GRID = MachineGrid(batches=(1, 2, 6), contexts=(20, 60, 200))


@pytest.fixture
def options(tmp_path: Path) -> MachineOptions:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return MachineOptions(model=str(tmp_path), dtype="float32")


def imagined(setup: Setup, point: Point, seconds_per_flop: float = 1e-9) -> MeasuredPoint:
    """A point of a machine whose ops take a launch and some time per amount."""
    c = {**AMOUNTS.start, "launch_s": 2e-5, "s_per_matrix_flop": seconds_per_flop, "s_per_byte": 1e-9}
    calls = [
        (call, float(AMOUNTS.times(as_kernel(call).sizes, c, load_device("h200_sxm")).seconds))
        for call in recorded_calls(setup, point)
    ]
    return MeasuredPoint(point, calls, sum(seconds for _, seconds in calls) + 1e-3)


def predicted(result: MachineCalibration, options: MachineOptions, folder: Path, point: Point) -> castoff.Prediction:
    (folder / "device.toml").write_text(device_toml(result))
    (folder / "backend.toml").write_text(backend_toml(result))
    scenario = Scenario(
        workload=Workload(num_queries=point.batch, context_length=point.context),
        quant=Quant(quantize_linear_action="DISABLED"),
        backend=str(folder / "backend.toml"),
    )
    return castoff.cast(options.model, str(folder / "device.toml"), scenario)


def test_fits_find_a_machine_of_their_form(options: MachineOptions, tmp_path: Path) -> None:
    setup = machine_setup(options)
    result = fitted(options, setup.model, [imagined(setup, point) for point in GRID.points], PEAKS)
    assert result.host_s == pytest.approx(1e-3)
    assert sum(op.share for op in result.ops) == pytest.approx(1)
    assert max(op.median_abs_error for op in result.ops) < 0.05
    for point in (Point(1, 20), Point(4, 100), Point(6, 200)):
        prediction = predicted(result, options, tmp_path, point)
        assert prediction.latency_s == pytest.approx(imagined(setup, point).seconds, rel=0.05)
        assert prediction.cast.origin == "calibrated"


def test_beyond_the_grid_the_form_extrapolates(options: MachineOptions, tmp_path: Path) -> None:
    setup = machine_setup(options)
    result = fitted(options, setup.model, [imagined(setup, point) for point in GRID.points], PEAKS)
    far = Point(24, 3000)
    prediction = predicted(result, options, tmp_path, far)
    assert prediction.latency_s == pytest.approx(imagined(setup, far).seconds, rel=0.2)
    assert prediction.cast.origin == "analytic"


def test_a_sweep_equals_its_casts(options: MachineOptions, tmp_path: Path) -> None:
    setup = machine_setup(options)
    result = fitted(options, setup.model, [imagined(setup, point) for point in GRID.points], PEAKS)
    single = predicted(result, options, tmp_path, Point(3, 50)).latency_s
    files = {name: str(tmp_path / f"{name}.toml") for name in ("device", "backend")}
    scenario = Scenario(quant=Quant(quantize_linear_action="DISABLED"), backend=files["backend"])
    swept = castoff.sweep(options.model, files["device"], scenario, num_queries=np.array([1, 3]), context_length=50)
    assert swept.latency_s[0, 1] == pytest.approx(single)
    assert swept.latency_s[0, 0] < swept.latency_s[0, 1]


def test_more_is_never_faster() -> None:
    device = load_device("h200_sxm")
    sizes = dict.fromkeys(AMOUNTS.sizes, 1e6)
    base = AMOUNTS.times(sizes, AMOUNTS.start, device).seconds
    for name in sizes:
        assert AMOUNTS.times({**sizes, name: 2e6}, AMOUNTS.start, device).seconds >= base


def test_steps_are_those_of_a_cast(options: MachineOptions) -> None:
    setup = machine_setup(options)
    points = (Point(1, 20), Point(3, 60))
    engine = filled_engine(setup, points, dtype="float32", device="cpu", progress=lambda _: None)
    for point in points:
        times = timed_steps(engine, point, steps=2)
        names = [call.op.name for call in recorded_calls(setup, point)]
        assert len(times) == 2
        for step in times:
            own = [name for name, _ in step.calls]
            assert own[: len(names)] == names
            # Sampling chooses a token for each request.
            assert own[len(names) :] == ["sample"] * point.batch
            assert 0 < sum(seconds for _, seconds in step.calls) <= step.seconds
        assert tpot_s(engine, point, steps=1) > 0
    assert engine.pool.free_blocks == engine.pool.num_blocks


def test_peaks_are_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("castoff.accuracy.peaks.COPY_BYTES", 1 << 20)
    peaks = measure_peaks("cpu")
    assert min(*peaks.matrix_flops_per_s.values(), *peaks.vector_flops_per_s.values(), peaks.copy_bytes_per_s) > 0
    assert 0 < peaks.row_efficiency <= 1


def test_rounds_visit_every_point_as_often() -> None:
    visited: list[Point] = []
    told: list[tuple[int, int]] = []
    in_rounds(GRID.points, 3, visited.append, lambda done, whole: told.append((done, whole)))
    assert all(visited.count(point) == 3 for point in GRID.points)
    assert told[-1] == (27, 27)
    assert visited[:9] != visited[9:18]


def test_experts_that_leave_no_room_are_left_out(options: MachineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_setup(options).model.moe.n_routed_experts == CONFIG["n_routed_experts"]
    assert machine_setup(replace(options, num_experts=2)).model.moe.n_routed_experts == 2
    (Path(options.model) / "config.json").write_text(json.dumps({**CONFIG, "n_routed_experts": 32}))
    monkeypatch.setattr("castoff.accuracy.this_machine.free_bytes", lambda _: 1)
    assert machine_setup(options).model.moe.n_routed_experts == 4


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"batches": (0, 1)}, "--batch must be from 1"),
        ({"contexts": ()}, "--length must be from 1"),
        ({"rounds": 0}, "--rounds must be from 1"),
        ({"batches": (2,), "contexts": (64, 64)}, "no grid"),
    ],
)
def test_what_is_no_grid(grid: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(CastoffError, match=message):
        MachineGrid(**grid)  # type: ignore[arg-type]
