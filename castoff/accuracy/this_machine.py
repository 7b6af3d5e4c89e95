"""Calibrating for this machine: the ops of `castoff run`, measured inside decode steps and fitted one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from random import Random
from statistics import median
from typing import Literal

import lazy_loader as lazy
import numpy as np

from castoff.accuracy.decode_steps import (
    MeasuredPoint,
    Point,
    StepTimes,
    filled_engine,
    summarized,
    timed_steps,
)
from castoff.accuracy.fit import fit
from castoff.accuracy.peaks import Peaks, measure_peaks
from castoff.accuracy.recipe import Recipe, Robustness, Samples, Slot
from castoff.accuracy.validate import as_fit, validate
from castoff.casting.whole_op import as_kernel, curve_of
from castoff.dims import Array
from castoff.errors import CastoffError
from castoff.model.setup import Setup
from castoff.runtime.memory import free_bytes, weights_bytes
from castoff.runtime.options import RunOptions, check_options
from castoff.runtime.structure import run_setup
from castoff.spec.checks import MOST
from castoff.spec.device import load_device
from castoff.spec.fits import Fit
from castoff.spec.model import ModelSpec, load_model
from castoff.spec.offload import Offload
from castoff.spec.quant import LinearAction
from castoff.spec.scenario import Mtp, Quant, Scenario

torch = lazy.load("torch")

Progress = Callable[[int, int], None]
DeviceKind = Literal["cpu", "cuda"]
DType = Literal["float32", "bfloat16", "float16"]

DEVICE_NAME = "this_machine"
# Of the shipped models these have every op.
FEW_LAYERS = 4
# Experts are left out until weights take no more than this share of the memory that is free.
MEMORY_SHARE = 0.6
# The form of ops asks nothing of a device.
NO_DEVICE = "h200_sxm"
# Sizes this close are one knot of a correction.
SAME = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineGrid:
    """What is measured.

    batches, contexts: all pairs. rounds: over all pairs, in an order of their own each, so that no pair has a busy
    moment of the machine to itself. steps: timed ones of each pair and round.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8)
    contexts: tuple[int, ...] = (512, 2048, 4096, 12288)
    rounds: int = 3
    steps: int = 2

    def __post_init__(self) -> None:
        for flag, values in (("--batch", self.batches), ("--length", self.contexts), ("--rounds", (self.rounds,))):
            if not values or not all(1 <= value <= MOST for value in values):
                raise CastoffError(f"{flag} must be from 1 to {MOST}, got {', '.join(map(str, values))}")
        if len(set(self.points)) < 2:
            raise CastoffError("one batch and one length are no grid; give --batch or --length two numbers or more")

    @property
    def points(self) -> tuple[Point, ...]:
        """All pairs."""
        return tuple(Point(batch, context) for batch in sorted({*self.batches}) for context in sorted({*self.contexts}))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """Which machine and which model.

    num_hidden_layers: the first of the model; None keeps up to `FEW_LAYERS`.
    num_experts: routed experts per layer; None keeps as many as leave room.
    """

    model: str = "zai-org/GLM-5.2"
    num_hidden_layers: int | None = None
    num_experts: int | None = None
    quantize_linear_action: LinearAction = "DISABLED"
    device: DeviceKind = "cpu"
    dtype: DType = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFit:
    """What was fitted for one op. Errors are of grid points that were left out, |predicted / measured − 1|.

    share: of the time of the steps measured.
    """

    name: str
    calls: int
    share: float
    median_abs_error: float
    p90_abs_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCalibration:
    """Figures of a device, fits of the ops, and the host's time per decode step."""

    model: str
    options: MachineOptions
    peaks: Peaks
    fits: Mapping[str, Fit] = field(hash=False)
    ops: tuple[OpFit, ...]
    host_s: float
    source: str


def calibrate_machine(
    options: MachineOptions, grid: MachineGrid, *,
    progress: Progress = lambda done, whole: None, note: Callable[[str], None] = lambda _: None,
) -> MachineCalibration:  # fmt: skip
    """Measure this machine and fit its ops.

    progress: of the measuring. note: told what else goes on. Raises CastoffError where there is no torch, no such
    device or no room.
    """
    setup = machine_setup(options)
    engine = filled_engine(setup, grid.points, dtype=options.dtype, device=options.device, progress=note)
    times: dict[Point, list[StepTimes]] = {point: [] for point in grid.points}

    def visit(point: Point) -> None:
        times[point] += timed_steps(engine, point, steps=grid.steps)

    in_rounds(grid.points, grid.rounds, visit, progress)
    measured = [summarized(setup, point, own) for point, own in times.items()]
    note("peaks of the machine")
    return fitted(options, setup.model, measured, measure_peaks(options.device))


def in_rounds(points: Sequence[Point], rounds: int, visit: Callable[[Point], None], progress: Progress) -> None:
    """Visit all points in every round, in an order of its own."""
    order, done = Random(0), 0
    for _ in range(rounds):
        for point in order.sample(points, len(points)):
            visit(point)
            done += 1
            progress(done, rounds * len(points))


def machine_setup(options: MachineOptions) -> Setup:
    """The structure that is measured: a model with fewer layers and, where they leave no room, fewer experts."""
    action = options.quantize_linear_action
    check_options(RunOptions(random_prompts="1x1", device=options.device, quantize_linear_action=action), Offload())
    spec = load_model(options.model, num_hidden_layers=options.num_hidden_layers)
    if options.num_hidden_layers is None and spec.num_hidden_layers > FEW_LAYERS:
        spec = spec.with_num_hidden_layers(FEW_LAYERS)
    if "sparse" not in spec.mlp_layer_types:
        return _setup(spec, action)
    if options.num_experts is not None:
        return _setup(_with_experts(spec, options.num_experts), action)
    room = free_bytes(torch.device(options.device))
    experts = spec.moe.n_routed_experts
    while True:
        setup = _setup(_with_experts(spec, experts), action)
        needed = weights_bytes(setup, getattr(torch, options.dtype).itemsize)
        fewest = 2 * max(spec.moe.num_experts_per_tok, spec.moe.n_group)
        if room is None or needed <= MEMORY_SHARE * room or experts // 2 < fewest or experts % 2:
            return setup
        experts //= 2


def _setup(spec: ModelSpec, action: LinearAction) -> Setup:
    return run_setup(spec, Scenario(quant=Quant(quantize_linear_action=action), mtp=Mtp()))


def _with_experts(spec: ModelSpec, experts: int) -> ModelSpec:
    return replace(spec, moe=replace(spec.moe, n_routed_experts=experts))


def fitted(
    options: MachineOptions, model: ModelSpec, measured: Sequence[MeasuredPoint], peaks: Peaks
) -> MachineCalibration:
    """Fit every op of the steps measured."""
    cut = f"{model.num_hidden_layers} layers of {model.name}"
    if "sparse" in model.mlp_layer_types:
        cut += f" with {model.moe.n_routed_experts} experts each"
    formats: str = options.dtype
    if options.quantize_linear_action != "DISABLED":
        formats += f" with linear layers in {options.quantize_linear_action}"
    today = datetime.now(UTC).date().isoformat()
    source = (
        f"castoff calibrate --this-machine on {today}: {cut}, {formats}, torch {torch.__version__} on "
        f"{options.device} with {torch.get_num_threads()} threads"
    )
    total_s = sum(seconds for entry in measured for _, seconds in entry.calls)
    fits, ops = {}, []
    for name in dict.fromkeys(call.op.name for entry in measured for call, _ in entry.calls):
        samples = _samples(name, measured)
        fits[curve_of(name)] = own = _fit(samples, source)
        ops.append(
            OpFit(
                name=name,
                calls=len(samples),
                share=float(samples.measured_s.sum()) / total_s,
                median_abs_error=own.median_abs_error,
                p90_abs_error=own.p90_abs_error,
            )
        )
    return MachineCalibration(
        model=cut,
        options=options,
        peaks=peaks,
        fits=fits,
        ops=tuple(sorted(ops, key=lambda op: -op.share)),
        host_s=median(entry.host_s for entry in measured),
        source=source,
    )


def _samples(name: str, measured: Sequence[MeasuredPoint]) -> Samples:
    """All calls of an op. What is left out together when errors are found is a point."""
    rows = [
        (as_kernel(call).sizes, seconds, site)
        for site, entry in enumerate(measured)
        for call, seconds in entry.calls
        if call.op.name == name
    ]
    sizes = {size: np.array([float(row[0][size]) for row in rows]) for size in rows[0][0]}
    measured_s, sites = np.array([row[1] for row in rows]), np.array([row[2] for row in rows])
    return Samples((Slot(curve_of(name), sizes),), np.zeros(len(rows)), measured_s, sites)


def _fit(samples: Samples, source: str) -> Fit:
    (slot,) = samples.slots
    knots = {axis: _knots(slot.sizes[axis]) for axis in ("tokens", "flops_per_token")}
    recipe = Recipe(form="amounts", knots={axis: places for axis, places in knots.items() if len(places) > 1})
    recipes, how, device = {slot.curve: recipe}, Robustness(), load_device(NO_DEVICE)
    checked = validate([samples], recipes, device, how)
    model = fit([samples], recipes, device, how)
    return as_fit(slot.curve, [samples], model, recipe, checked, source)


def _knots(sizes: Array) -> tuple[float, ...]:
    """The values of a size, those that are nearly equal once."""
    knots: list[float] = []
    for value in np.unique(sizes).tolist():
        if value > 0 and (not knots or value > SAME * knots[-1]):
            knots.append(value)
    return tuple(knots)
