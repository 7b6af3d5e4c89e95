"""Casting many scenarios: structures one by one, the batch and lengths of each as arrays."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from castoff.casting.prediction import Cast, cast_structure
from castoff.casting.price import BOUNDS, Pricing
from castoff.dims import Array
from castoff.errors import CastoffError
from castoff.model.setup import resolve_setup
from castoff.spec.backend import Origin, load_backend
from castoff.spec.device import Device
from castoff.spec.model import ModelSpec
from castoff.spec.scenario import RequestClass, Scenario, check_whole, request_classes
from castoff.spec.toml_file import did_you_mean

CONTINUOUS = ("num_queries", "query_length", "context_length")
# Scenarios of one numpy pass: a few dozen live arrays of this size stay in a core's L2 cache.
CHUNK = 4096

_GROUPS = ("workload", "parallel", "quant", "mtp", "compilation")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """One row per structure; the further axes are those of the arrays swept.

    structures: what each row was set to. reasons: why a row cannot run, else None. Figures of such a row are NaN,
    fits is False, and bound is −1. latency_s in seconds, device_bytes of the fullest device; bound indexes
    `bound_names`. origins: of a row's latency.
    """

    structures: tuple[Mapping[str, Any], ...]
    continuous: Mapping[str, Array]
    reasons: tuple[str | None, ...]
    origins: tuple[Origin | None, ...]
    latency_s: Array
    tokens_per_s: Array
    tokens_per_s_per_device: Array
    device_bytes: Array
    fits: Array
    bound: Array
    bound_names: tuple[str, ...] = BOUNDS

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict per scenario, invalid structures as one row with their reason."""
        points = np.broadcast_shapes(*(values.shape for values in self.continuous.values()), ())
        swept = {name: np.broadcast_to(values, points) for name, values in self.continuous.items()}
        for row, structure in enumerate(self.structures):
            if self.reasons[row] is not None:
                yield {**structure, "reason": self.reasons[row]}
                continue
            for index in np.ndindex(points):
                at = (row, *index)
                yield {
                    **structure,
                    **{name: values[index].item() for name, values in swept.items()},
                    "latency_s": float(self.latency_s[at]),
                    "tokens_per_s": float(self.tokens_per_s[at]),
                    "tokens_per_s_per_device": float(self.tokens_per_s_per_device[at]),
                    "device_bytes": float(self.device_bytes[at]),
                    "fits": bool(self.fits[at]),
                    "bound": self.bound_names[int(self.bound[at])],
                    "origin": self.origins[row],
                    "reason": None,
                }

    def to_csv(self, path: str | Path) -> None:
        """Write `rows` as a CSV file."""
        rows = list(self.rows())
        columns = list(dict.fromkeys(key for row in rows for key in row))
        with Path(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)


def sweep(model: ModelSpec, device: Device, base: Scenario, axes: Mapping[str, object]) -> SweepResult:
    """Cast every combination.

    axes: field of a scenario → one value, a list of values (structure: all lists are crossed), or a numpy array
    (num_queries, query_length, context_length: broadcast against each other).
    Raises CastoffError for an unknown field or an array where only a list may stand.
    """
    arrays, lists = _sort_axes(axes)
    for name, values in arrays.items():
        check_whole(f"--{name.replace('_', '-')}", values, least=0 if name == "context_length" else 1)
    points: tuple[int, ...]
    try:
        points = np.broadcast_shapes(*(values.shape for values in arrays.values()), ())
    except ValueError:
        shapes = ", ".join(f"{name} {values.shape}" for name, values in arrays.items())
        raise CastoffError(f"the arrays swept do not broadcast: {shapes}") from None
    flat = {name: np.broadcast_to(values, points).reshape(-1).astype(np.float64) for name, values in arrays.items()}
    size = int(np.prod(points, dtype=np.int64))
    columns = _Columns(size)
    structures: list[Mapping[str, Any]] = []
    reasons: list[str | None] = []
    origins: list[Origin | None] = []
    for combination in itertools.product(*lists.values()):
        structure = dict(zip(lists, combination, strict=True))
        structures.append(structure)
        try:
            origins.append(_cast_row(model, device, _with(base, structure), flat, columns))
            reasons.append(None)
        except CastoffError as error:
            columns.add_invalid()
            origins.append(None)
            reasons.append(str(error))
    shape = (len(structures), *points)
    return SweepResult(
        structures=tuple(structures),
        continuous=arrays,
        reasons=tuple(reasons),
        origins=tuple(origins),
        latency_s=columns.stacked("latency_s", shape),
        tokens_per_s=columns.stacked("tokens_per_s", shape),
        tokens_per_s_per_device=columns.stacked("tokens_per_s_per_device", shape),
        device_bytes=columns.stacked("device_bytes", shape),
        fits=columns.stacked("fits", shape),
        bound=columns.stacked("bound", shape),
    )


class _Columns:
    """The figures of a sweep, row by row."""

    def __init__(self, size: int) -> None:
        self._size = size
        names = ("latency_s", "tokens_per_s", "tokens_per_s_per_device", "device_bytes", "fits", "bound")
        self.rows: dict[str, list[Array]] = {name: [] for name in names}

    def add_invalid(self) -> None:
        for name, rows in self.rows.items():
            fill: Any = {"fits": False, "bound": -1}.get(name, np.nan)
            rows.append(np.full(self._size, fill))

    def add(self, chunks: Sequence[tuple[int, Cast]]) -> None:
        row: dict[str, Array] = {name: np.empty(self._size, dtype) for name, dtype in self._dtypes().items()}
        for start, result in chunks:
            stop = min(start + CHUNK, self._size)
            row["latency_s"][start:stop] = result.latency_s
            row["tokens_per_s"][start:stop] = result.tokens_per_s
            row["tokens_per_s_per_device"][start:stop] = result.tokens_per_s / result.setup.mesh.num_devices
            row["device_bytes"][start:stop] = result.footprint.used_bytes
            row["fits"][start:stop] = result.footprint.fits
            row["bound"][start:stop] = result.bound
        for name, rows in self.rows.items():
            rows.append(row[name])

    def stacked(self, name: str, shape: tuple[int, ...]) -> Array:
        return np.stack(self.rows[name]).reshape(shape)

    def _dtypes(self) -> dict[str, type]:
        return {name: {"fits": np.bool_, "bound": np.int64}.get(name, np.float64) for name in self.rows}


def _cast_row(
    model: ModelSpec, device: Device, scenario: Scenario, flat: Mapping[str, Array], columns: _Columns
) -> Origin:
    backend = load_backend(scenario.backend or device.default_backend)
    lengths: dict[str, Any] = dict(flat)
    workload = replace(scenario.workload, **lengths)
    setup = resolve_setup(model, device, backend, scenario, workload.mode)
    classes = request_classes(workload, scenario.mtp)
    size = len(next(iter(flat.values()))) if flat else 1
    chunks = [
        (start, cast_structure(setup, Pricing(device, backend), _chunk(classes, start), scenario))
        for start in range(0, size, CHUNK)
    ]
    columns.add(chunks)
    return chunks[0][1].origin


def _chunk(classes: Sequence[RequestClass], start: int) -> tuple[RequestClass, ...]:
    def cut(dim: Any) -> Any:
        return dim[start : start + CHUNK] if isinstance(dim, np.ndarray) else dim

    return tuple(RequestClass(cut(entry.count), cut(entry.context), cut(entry.query)) for entry in classes)


def _sort_axes(axes: Mapping[str, object]) -> tuple[dict[str, Array], dict[str, list[object]]]:
    known = {field.name: group for group in _GROUPS for field in fields(_group_type(group))} | dict.fromkeys(
        ("backend", "reserved_memory_gb", "disable_repetition"), ""
    )
    arrays: dict[str, Array] = {}
    lists: dict[str, list[object]] = {}
    for name, value in axes.items():
        if name not in known:
            raise CastoffError(f"sweep has no axis {name!r}{did_you_mean(name, known)}")
        if isinstance(value, np.ndarray):
            if name not in CONTINUOUS:
                raise CastoffError(
                    f"{name} is structure: give a list, not an array; arrays are for {', '.join(CONTINUOUS)}"
                )
            arrays[name] = value
        else:
            lists[name] = list(value) if isinstance(value, list | range) else [value]
            if not lists[name]:
                raise CastoffError(f"the list for {name} is empty")
    return arrays, lists


def _group_type(group: str) -> type:
    return type(getattr(Scenario(), group))


def _with(base: Scenario, values: Mapping[str, Any]) -> Scenario:
    """A scenario with some fields, of whichever group, set."""
    top = {
        name: value for name, value in values.items() if name in ("backend", "reserved_memory_gb", "disable_repetition")
    }
    for group in _GROUPS:
        part = getattr(base, group)
        own = {field.name: values[field.name] for field in fields(part) if field.name in values}
        if own:
            top[group] = replace(part, **own)
    return replace(base, **top)
