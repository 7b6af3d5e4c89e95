"""Predicted against measured op times, table by table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np

from castoff.accuracy.series import KINDS, NOT_MAPPED, Exclusions, Series
from castoff.accuracy.tables import Rows, TableFile, count_rows, find_tables
from castoff.casting.curves import check_fits
from castoff.casting.forms.form import eager_s
from castoff.casting.price import Pricing, price_call
from castoff.dims import Array, Dim, some
from castoff.errors import CastoffError
from castoff.ops.program import OpCall
from castoff.spec.backend import CollectiveCost, Curve, fitted_device, load_backend, shipped_backends
from castoff.spec.device import load_device, shipped_devices

WORST_ROWS = 3
# Measured times are gathered between these.
BUCKET_EDGES_S = (0.0, 10e-6, 100e-6, 1e-3, inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstRow:
    """A row far off. row: the sizes that tell it from others."""

    row: Mapping[str, str | int]
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Rows whose measured time is at least from_s and below to_s; None: without end."""

    from_s: float
    to_s: float | None
    rows_scored: int
    median_abs_error: float
    p90_abs_error: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TableAccuracy:
    """How far one table's rows are from their predictions. An error is predicted / measured − 1.

    backend: the stack that was measured. priced_by: castoff's backend; None where nothing is priced. bias: mean error.
    roofline_median_abs_error: of the same calls at the device's peaks, without launches and latencies.
    Errors are None where no row is scored. excluded: why rows are not, and how many.
    """

    name: str
    system: str
    backend: str
    version: str
    priced_by: str | None
    rows: int
    rows_scored: int
    median_abs_error: float | None
    p90_abs_error: float | None
    bias: float | None
    roofline_median_abs_error: float | None
    excluded: Mapping[str, int]
    buckets: tuple[Bucket, ...]
    worst: tuple[WorstRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsAccuracy:
    """All tables of a directory, in the order of their paths."""

    tables: tuple[TableAccuracy, ...]


Progress = Callable[[int, int], None]


def ops_accuracy(
    directory: Path, *, backend: str | None = None, progress: Progress = lambda done, whole: None
) -> OpsAccuracy:
    """Score the tables of a directory. Raises CastoffError.

    backend: None takes for each table the one that is called like the stack that was measured, else the device's own.
    """
    files = find_tables(directory)
    if backend is not None:
        load_backend(backend)
    scored: list[TableAccuracy] = []
    for done, file in enumerate(files):
        progress(done, len(files))
        scored += score_file(file, backend)
    progress(len(files), len(files))
    return OpsAccuracy(tables=tuple(scored))


def score_file(file: TableFile, backend: str | None) -> Iterator[TableAccuracy]:
    """Score one file: a result for each of its series."""
    kind = KINDS.get(file.name)
    missing = NOT_MAPPED if kind is None else None
    if file.system not in shipped_devices():
        missing = f"castoff has no device {file.system}"
    fitted_on = None if backend is None else fitted_device(backend)
    if missing is None and fitted_on not in (None, file.system):
        missing = f"{backend} is fitted on {fitted_on}"
    if kind is None or missing is not None:
        rows = count_rows(file)
        yield _unscored(file, file.name, rows, {missing or NOT_MAPPED: rows})
        return
    device = load_device(file.system)
    name = backend or (file.backend if file.backend in shipped_backends() else device.default_backend)
    pricing = Pricing(device, load_backend(name, device.name))
    check_fits(pricing.backend, device)
    for series in kind.series(file):
        yield score_series(file, series, pricing)


def score_series(file: TableFile, series: Series, pricing: Pricing) -> TableAccuracy:
    """Price the kept rows of a series and compare."""
    kept, excluded = series.kept, dict(series.excluded)
    predicted_s, roofline_s = np.full(len(kept), np.nan), np.full(len(kept), np.nan)
    peak = roofline(pricing)
    for site in kept.sites(series.sites):
        recorded, problem = recorded_site(series, kept.where(site), pricing)
        if problem is not None:
            excluded[problem] = excluded.get(problem, 0) + len(site)
            continue
        predicted_s[site] = _seconds(recorded, pricing, eager=series.eager)
        roofline_s[site] = _seconds(recorded, peak, eager=False)
    priced = np.isfinite(predicted_s)
    if not priced.any():
        return _unscored(file, series.name, series.rows, excluded)
    kept, predicted_s, roofline_s = kept.where(priced), predicted_s[priced], roofline_s[priced]
    error = predicted_s / kept.latency_s - 1
    return TableAccuracy(
        name=series.name,
        system=file.system,
        backend=file.backend,
        version=file.version,
        priced_by=pricing.backend.name,
        rows=series.rows,
        rows_scored=len(kept),
        median_abs_error=float(np.median(abs(error))),
        p90_abs_error=float(np.quantile(abs(error), 0.9)),
        bias=float(error.mean()),
        roofline_median_abs_error=float(np.median(abs(roofline_s / kept.latency_s - 1))),
        excluded=excluded,
        buckets=tuple(_buckets(kept.latency_s, error)),
        worst=_worst(kept, predicted_s),
    )


def roofline(pricing: Pricing) -> Pricing:
    """The same device at its peaks: every efficiency 1, no launch, no latency of links."""
    one = Curve(
        kind="roofline", launch_s=0.0, compute_efficiency=1.0, vector_efficiency=1.0, memory_efficiency=1.0,
        gather_efficiency=1.0, origin="analytic", source="peaks",
    )  # fmt: skip
    links = CollectiveCost(launch_s=0.0, link_efficiency=1.0, origin="analytic", source="peaks")
    tiers = tuple(replace(tier, latency_s=0.0) for tier in pricing.device.tiers)
    return replace(
        pricing,
        device=replace(pricing.device, tiers=tiers),
        backend=replace(pricing.backend, curves={"default": one}, collectives=links, fits={}),
    )


def _seconds(recorded: Sequence[OpCall], pricing: Pricing, *, eager: bool) -> Dim:
    total: Dim = 0.0
    host: Dim = 0.0
    for call in recorded:
        price = price_call(call, pricing)
        total, host = total + price.seconds, host + price.host_s
    return eager_s(host, total) if eager else total


def recorded_site(series: Series, site: Rows, pricing: Pricing) -> tuple[Sequence[OpCall], str | None]:
    """The calls of a site, and why they cannot be priced."""
    try:
        recorded = series.formula(site, pricing)
    # What a model or a device cannot do: a number of ranks that does not divide the heads, say.
    except CastoffError as error:
        return (), str(error)
    device = pricing.device
    dtypes = [part.matrix_dtype for call in recorded for part in call.work.parts if some(part.matrix_flops)]
    lacking = next((dtype for dtype in dtypes if not device.supports(dtype)), None)
    if lacking is not None:
        return (), f"{device.name} does not compute in {lacking}"
    return recorded, None if recorded else "nothing to do"


def _buckets(measured_s: Array, error: Array) -> Iterator[Bucket]:
    for from_s, to_s in pairwise(BUCKET_EDGES_S):
        own = error[(measured_s >= from_s) & (measured_s < to_s)]
        if len(own):
            yield Bucket(
                from_s=from_s,
                to_s=None if to_s == inf else to_s,
                rows_scored=len(own),
                median_abs_error=float(np.median(abs(own))),
                p90_abs_error=float(np.quantile(abs(own), 0.9)),
                bias=float(own.mean()),
            )


def _worst(rows: Rows, predicted_s: Array) -> tuple[WorstRow, ...]:
    """The rows that are off by the largest factor, the worst first."""
    factor = abs(np.log(predicted_s / rows.latency_s))
    places = np.argsort(-factor, kind="stable")[:WORST_ROWS]
    return tuple(
        WorstRow(
            row={name: _plain(values[place]) for name, values in rows.columns.items()},
            predicted_s=float(predicted_s[place]),
            measured_s=float(rows.latency_s[place]),
        )
        for place in places
    )


def _plain(value: object) -> str | int:
    return int(value) if isinstance(value, np.integer) else str(value)


def _unscored(file: TableFile, name: str, rows: int, excluded: Exclusions) -> TableAccuracy:
    return TableAccuracy(
        name=name, system=file.system, backend=file.backend, version=file.version, priced_by=None, rows=rows,
        rows_scored=0, median_abs_error=None, p90_abs_error=None, bias=None, roofline_median_abs_error=None,
        excluded=excluded, buckets=(), worst=(),
    )  # fmt: skip
