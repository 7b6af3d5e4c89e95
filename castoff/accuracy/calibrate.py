"""Calibrating a backend on a device: which of its kernels are fitted to which measured tables, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from castoff.accuracy.fit import fit
from castoff.accuracy.ops import recorded_site
from castoff.accuracy.recipe import Samples, Slot
from castoff.accuracy.series import KINDS, Series
from castoff.accuracy.stage import Stage
from castoff.accuracy.stages import STAGES
from castoff.accuracy.tables import TableFile, find_tables
from castoff.accuracy.validate import as_fit, validate
from castoff.casting.price import Pricing, price_call
from castoff.dims import Array
from castoff.errors import CastoffError
from castoff.ops.program import OpCall
from castoff.ops.work import Kernel, without_kernels
from castoff.spec.backend import load_backend
from castoff.spec.device import load_device
from castoff.spec.fits import Fit

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """What a stage fitted. Errors are of the rows of sites that were left out, |predicted / measured − 1|."""

    name: str
    tables: tuple[str, ...]
    curves: tuple[str, ...]
    rows: int
    sites: int
    median_abs_error: float
    p90_abs_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Fits of a backend's kernels on one device."""

    backend: str
    device: str
    stages: tuple[StageResult, ...]
    fits: Mapping[str, Fit] = field(hash=False)


def calibrate(
    directory: Path, *, device: str, backend: str, progress: Progress = lambda done, whole: None
) -> Calibration:
    """Fit a backend to the tables of its stack on a device. Raises CastoffError where there are none to fit it to."""
    files = [file for file in find_tables(directory) if file.system == device and file.backend in (backend, "nccl")]
    pricing = Pricing(load_device(device), load_backend(backend))
    stages = [stage for stage in STAGES if any(file.name in stage.tables for file in files)]
    if not stages:
        raise CastoffError(
            f"--tables {directory} has nothing of backend {backend} on device {device} that castoff fits; it fits "
            f"{', '.join(sorted({name for stage in STAGES for name in stage.tables}))}"
        )
    fits: dict[str, Fit] = {}
    results = []
    for done, stage in enumerate(stages):
        progress(done, len(stages))
        known = replace(pricing, backend=replace(pricing.backend, fits=fits))
        own = [file for file in files if file.name in stage.tables]
        # A stage is for stacks that no earlier one has given its kernels.
        groups = [] if fits.keys() >= stage.recipes.keys() else list(samples(stage, own, known))
        if not groups:
            continue
        measured = {slot.curve for group in groups for slot in group.slots}
        recipes = {
            curve: recipe.after(fits.get(recipe.of or curve))
            for curve, recipe in stage.recipes.items()
            if curve in measured
        }
        result, found = _run(replace(stage, recipes=recipes), own, groups, pricing)
        results.append(result)
        fits = {**fits, **found}
    progress(len(stages), len(stages))
    if not fits:
        raise CastoffError(
            f"--tables {directory} has no row of backend {backend} on device {device} that a fit could be made from; "
            "`castoff accuracy ops` says why rows are left out"
        )
    return Calibration(backend=backend, device=device, stages=tuple(results), fits=fits)


def _run(
    stage: Stage, files: Sequence[TableFile], groups: Sequence[Samples], pricing: Pricing
) -> tuple[StageResult, dict[str, Fit]]:
    device = pricing.device
    checked = validate(groups, stage.recipes, device, stage.how)
    model = fit(groups, stage.recipes, device, stage.how)
    tables = tuple(f"{file.name} of {file.backend} {file.version}" for file in files)
    source = f"{', '.join(tables)}, ai-dynamo/aiconfigurator (Apache-2.0)"
    result = StageResult(
        name=stage.name,
        tables=tables,
        curves=tuple(stage.recipes),
        rows=sum(map(len, groups)),
        sites=len(np.unique(np.concatenate([group.sites for group in groups]))),
        median_abs_error=checked.median_abs_error,
        p90_abs_error=checked.p90_abs_error,
    )
    return result, {
        curve: as_fit(curve, groups, model, recipe, checked, source) for curve, recipe in stage.recipes.items()
    }


def samples(stage: Stage, files: Sequence[TableFile], pricing: Pricing) -> Iterator[Samples]:
    """The rows of a stage's series, those made of the same kernels together."""
    parts: dict[tuple[object, ...], list[Samples]] = {}
    codes: dict[tuple[object, ...], int] = {}
    for file in files:
        kind = KINDS[file.name]
        for series in kind.series(file):
            trusted = not series.by_time and series.name not in stage.untrusted.get(file.system, ())
            if series.name not in stage.series or not trusted:
                continue
            for part in _site_samples(series, stage, pricing, codes):
                parts.setdefault((part.eager, *(slot.curve for slot in part.slots)), []).append(part)
    for own in parts.values():
        yield _joined(own)


def _site_samples(
    series: Series, stage: Stage, pricing: Pricing, codes: dict[tuple[object, ...], int]
) -> Iterator[Samples]:
    kept = series.kept
    left_out_together = [tuple(row) for row in zip(*(kept.columns[name].tolist() for name in stage.sites), strict=True)]
    site_N = np.array([codes.setdefault(key, len(codes)) for key in left_out_together], dtype=np.int64)
    for site in kept.sites(series.sites):
        rows = kept.where(site)
        recorded, problem = recorded_site(series, rows, pricing)
        if problem is not None:
            continue
        slots: list[Slot] = []
        fixed_s = np.zeros(len(rows))
        for call in recorded:
            kernels = [kernel for kernel in call.work.kernels if kernel.known_curve(stage.recipes) is not None]
            slots += [_slot(kernel, stage, len(rows)) for kernel in kernels]
            fixed_s = fixed_s + _rest_s(call, kernels, pricing)
        if slots:
            yield Samples(tuple(slots), fixed_s, rows.latency_s, site_N[site], series.eager)


def _slot(kernel: Kernel, stage: Stage, rows: int) -> Slot:
    curve = kernel.known_curve(stage.recipes)
    assert curve is not None
    sizes = {name: np.array(np.broadcast_to(size, rows), dtype=np.float64) for name, size in kernel.sizes.items()}
    return Slot(curve, sizes)


def _rest_s(call: OpCall, kernels: Sequence[Kernel], pricing: Pricing) -> Array | float:
    """Seconds of what a call does beside some kernels."""
    work = without_kernels(call.work, kernels)
    if kernels and not work.parts and not work.collectives:
        return 0.0
    seconds = price_call(call.with_work(work), pricing).seconds
    return seconds if isinstance(seconds, np.ndarray) else float(seconds)


def _joined(parts: Sequence[Samples]) -> Samples:
    def slot(place: int) -> Slot:
        own = [part.slots[place] for part in parts]
        return Slot(own[0].curve, {name: np.concatenate([each.sizes[name] for each in own]) for name in own[0].sizes})

    return Samples(
        tuple(slot(place) for place in range(len(parts[0].slots))),
        np.concatenate([part.fixed_s for part in parts]),
        np.concatenate([part.measured_s for part in parts]),
        np.concatenate([part.sites for part in parts]),
        parts[0].eager,
    )
