"""Predicted against measured times of whole deployments: requests under load, and single decode steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from castoff.accuracy.deployments import load_deployment, step_deployment
from castoff.accuracy.points import LoadPoint, StepPoint, read_points
from castoff.casting.deployment import resolve
from castoff.casting.rank import cast_batch
from castoff.errors import CastoffError
from castoff.serving.serve import serve, serving_of
from castoff.serving.workload import ClosedLoop
from castoff.spec.backend import Origin, load_backend
from castoff.spec.scenario import request_classes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadScore:
    """A point under load, predicted. Times are means over its requests; an error is predicted / measured − 1.

    queueing: whether requests waited for cache memory. queue_mean_s: in the queue, for whatever reason.
    """

    row: int
    model: str
    system: str
    precision: str
    backend: str
    kv_dtype: str
    num_devices: int
    isl: int
    osl: int
    concurrency: int
    mtp: int
    measured_ttft_s: float
    measured_tpot_s: float
    ttft_s: float
    tpot_s: float
    ttft_error: float
    tpot_error: float
    queueing: bool
    queue_mean_s: float
    retractions: int
    kv_capacity_tokens: int
    output_tokens_per_s: float
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScore:
    """A measured step, predicted."""

    row: int
    model: str
    device: str
    num_devices: int
    backend: str
    global_batch: int
    context_tokens: int
    offload: str
    pool_tokens: int | None
    measured_step_s: float
    step_s: float
    step_error: float
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSystem:
    """The points of one system together."""

    system: str
    points: int
    ttft_mean_abs_error: float
    tpot_mean_abs_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSystem:
    """The steps of one device together."""

    system: str
    points: int
    step_mean_abs_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAccuracy:
    """A file of points under load. excluded: why rows are not scored: reason → rows. Errors are None where none is."""

    points: tuple[LoadScore, ...]
    rows: int
    excluded: Mapping[str, int]
    systems: tuple[LoadSystem, ...]
    ttft_mean_abs_error: float | None
    tpot_mean_abs_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAccuracy:
    """A file of measured steps; otherwise as `LoadAccuracy`."""

    points: tuple[StepScore, ...]
    rows: int
    excluded: Mapping[str, int]
    systems: tuple[StepSystem, ...]
    step_mean_abs_error: float | None


Progress = Callable[[int, int], None]


def e2e_accuracy(
    path: Path, *, backend: str | None = None, progress: Progress = lambda done, whole: None
) -> LoadAccuracy | StepAccuracy:
    """Score the points of a CSV file. backend: None takes that which each row names. Raises CastoffError."""
    points = read_points(path)
    if backend is not None:
        # A fault of the whole command, not of a row.
        own = load_backend(backend)
        if isinstance(points[0], LoadPoint):
            serving_of(own)
    loads: list[LoadScore] = []
    steps: list[StepScore] = []
    excluded: Counter[str] = Counter()
    for done, point in enumerate(points):
        progress(done, len(points))
        try:
            if isinstance(point, LoadPoint):
                loads.append(score_load(point, backend))
            else:
                steps.append(score_step(point, backend))
        # What castoff does not have, or what cannot run as the row says.
        except CastoffError as error:
            excluded[str(error)] += 1
    progress(len(points), len(points))
    if isinstance(points[0], LoadPoint):
        return _loads(loads, len(points), excluded)
    return _steps(steps, len(points), excluded)


def score_load(point: LoadPoint, backend: str | None) -> LoadScore:
    """Simulate a point. Raises CastoffError with the reason where castoff cannot."""
    deployed = load_deployment(point, backend)
    load = ClosedLoop(concurrency=point.concurrency, prompt_tokens=point.isl, output_tokens=point.osl)
    result = serve(deployed.model, deployed.device, deployed.scenario, load)
    found = result.summary
    if found.tpot_mean_s is None:
        raise CastoffError("requests of one token have no time per output token")
    action = deployed.scenario.quant.quantize_attention_action
    return LoadScore(
        row=point.row,
        model=result.model,
        system=point.system,
        precision=point.precision,
        backend=result.backend,
        kv_dtype="bf16" if action == "DISABLED" else action.lower(),
        num_devices=result.num_devices,
        isl=point.isl,
        osl=point.osl,
        concurrency=point.concurrency,
        mtp=point.mtp,
        measured_ttft_s=point.ttft_s,
        measured_tpot_s=point.tpot_s,
        ttft_s=found.ttft_mean_s,
        tpot_s=found.tpot_mean_s,
        ttft_error=found.ttft_mean_s / point.ttft_s - 1,
        tpot_error=found.tpot_mean_s / point.tpot_s - 1,
        queueing=found.capacity_bound,
        queue_mean_s=found.queue_mean_s,
        retractions=found.retractions,
        kv_capacity_tokens=result.kv_capacity_tokens,
        output_tokens_per_s=found.output_tokens_per_s,
        origin=result.origin,
    )


def score_step(point: StepPoint, backend: str | None) -> StepScore:
    """Cast a step. Raises CastoffError with the reason where castoff cannot."""
    deployed = step_deployment(point, backend)
    scenario = deployed.scenario
    deployment = resolve(deployed.model, deployed.device, scenario)
    result = cast_batch(deployment, request_classes(scenario.workload, scenario.mtp))
    step_s = float(result.latency_s)
    return StepScore(
        row=point.row,
        model=deployed.model.name,
        device=point.device,
        num_devices=point.num_devices,
        backend=deployment.pricing.backend.name,
        global_batch=point.global_batch,
        context_tokens=point.context_tokens,
        offload=point.offload,
        pool_tokens=point.pool_tokens,
        measured_step_s=point.step_s,
        step_s=step_s,
        step_error=step_s / point.step_s - 1,
        origin=result.origin,
    )


def _loads(points: Sequence[LoadScore], rows: int, excluded: Mapping[str, int]) -> LoadAccuracy:
    systems = []
    for name in dict.fromkeys(point.system for point in points):
        own = [point for point in points if point.system == name]
        systems.append(
            LoadSystem(
                system=name,
                points=len(own),
                ttft_mean_abs_error=_mean([point.ttft_error for point in own]),
                tpot_mean_abs_error=_mean([point.tpot_error for point in own]),
            )
        )
    return LoadAccuracy(
        points=tuple(points),
        rows=rows,
        excluded=dict(excluded),
        systems=tuple(systems),
        ttft_mean_abs_error=_mean([point.ttft_error for point in points]) if points else None,
        tpot_mean_abs_error=_mean([point.tpot_error for point in points]) if points else None,
    )


def _steps(points: Sequence[StepScore], rows: int, excluded: Mapping[str, int]) -> StepAccuracy:
    systems = []
    for name in dict.fromkeys(point.device for point in points):
        own = [point.step_error for point in points if point.device == name]
        systems.append(StepSystem(system=name, points=len(own), step_mean_abs_error=_mean(own)))
    return StepAccuracy(
        points=tuple(points),
        rows=rows,
        excluded=dict(excluded),
        systems=tuple(systems),
        step_mean_abs_error=_mean([point.step_error for point in points]) if points else None,
    )


def _mean(errors: Sequence[float]) -> float:
    return sum(abs(error) for error in errors) / len(errors)
