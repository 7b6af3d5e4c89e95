"""Casting many scenarios: structures one by one, the batch and lengths of each as arrays."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from castoff.casting.deployment import Deployment, resolve
from castoff.casting.hits import Pool, check_hit_rate, check_pool_tokens
from castoff.casting.price import BOUNDS, any_extrapolated
from castoff.casting.rank import Cast, cast_batch, stall_s
from castoff.dims import Array
from castoff.errors import CastoffError
from castoff.spec.backend import Origin, weakest
from castoff.spec.checks import check_whole
from castoff.spec.device import Device
from castoff.spec.model import ModelSpec
from castoff.spec.offload import check_pool_multiple
from castoff.spec.scenario import RequestClass, Scenario, request_classes
from castoff.spec.toml_file import did_you_mean

LENGTHS = ("num_queries", "query_length", "context_length")
POOLS = ("pool_tokens", "hit_rate")
CONTINUOUS = (*LENGTHS, *POOLS)
# Scenarios of one numpy pass: a few dozen live arrays of this size stay in a core's L2 cache.
CHUNK = 4096

_GROUPS = ("workload", "parallel", "quant", "mtp", "compilation", "offload", "hits")
# Fields of a scenario that are in no group.
_OWN = ("backend", "reserved_memory_gb", "prefill_tokens", "disable_repetition")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """One row per structure; the further axes are those of the arrays swept.

    structures: what each row was set to. reasons: why a row cannot run, else None. Figures of such a row are NaN,
    fits is False, and bound is −1. latency_s in seconds. device_bytes: everything on the fullest device; kv_bytes: the
    latent and the indexer cache on the device; host_bytes: of the latent cache in host memory, per device. stall_s: how
    much of the latency is due to the link to it. bound indexes `bound_names`. origins: of a row's latency.
    extrapolated: whether a kernel lies beyond the sizes that its fit was made from.
    """

    structures: tuple[Mapping[str, Any], ...]
    continuous: Mapping[str, Array]
    reasons: tuple[str | None, ...]
    origins: tuple[Origin | None, ...]
    latency_s: Array = field(repr=False)
    tokens_per_s: Array = field(repr=False)
    tokens_per_s_per_device: Array = field(repr=False)
    device_bytes: Array = field(repr=False)
    weights_bytes: Array = field(repr=False)
    kv_bytes: Array = field(repr=False)
    activation_bytes: Array = field(repr=False)
    host_bytes: Array = field(repr=False)
    stall_s: Array = field(repr=False)
    fits: Array = field(repr=False)
    bound: Array = field(repr=False)
    extrapolated: Array = field(repr=False)
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
                    "weights_bytes": float(self.weights_bytes[at]),
                    "kv_bytes": float(self.kv_bytes[at]),
                    "activation_bytes": float(self.activation_bytes[at]),
                    "host_bytes": float(self.host_bytes[at]),
                    "stall_s": float(self.stall_s[at]),
                    "fits": bool(self.fits[at]),
                    "bound": self.bound_names[int(self.bound[at])],
                    "origin": self.origins[row],
                    "extrapolated": bool(self.extrapolated[at]),
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
    (of CONTINUOUS: broadcast against each other).
    Raises CastoffError for an unknown field or an array where only a list may stand.
    """
    arrays, lists = _sort_axes(axes)
    _check_lengths(base, arrays, lists)
    for name, values in arrays.items():
        if name == "hit_rate":
            check_hit_rate(values)
        else:
            check_whole(f"--{name.replace('_', '-')}", values, least=0 if name == "context_length" else 1)
    points: tuple[int, ...]
    try:
        points = np.broadcast_shapes(*(values.shape for values in arrays.values()), ())
    except ValueError:
        shapes = ", ".join(f"{name} {values.shape}" for name, values in arrays.items())
        raise CastoffError(f"the arrays swept do not broadcast: {shapes}") from None
    flat = {name: np.broadcast_to(values, points).reshape(-1).astype(np.float64) for name, values in arrays.items()}
    size = int(np.prod(points, dtype=np.int64))
    combinations = list(itertools.product(*lists.values()))
    figures = {name: np.full((len(combinations), size), fill) for name, fill in FIGURES.items()}
    structures: list[Mapping[str, Any]] = []
    reasons: list[str | None] = []
    origins: list[Origin | None] = []
    for index, combination in enumerate(combinations):
        structures.append(dict(zip(lists, combination, strict=True)))
        row = {name: values[index] for name, values in figures.items()}
        try:
            origins.append(_cast_row(model, device, _with(base, structures[-1]), flat, row))
            reasons.append(None)
        except CastoffError as error:
            origins.append(None)
            reasons.append(str(error))
    return SweepResult(
        structures=tuple(structures),
        continuous=arrays,
        reasons=tuple(reasons),
        origins=tuple(origins),
        **_shaped(figures, (len(combinations), *points)),
    )


def _shaped(figures: Mapping[str, Array], shape: tuple[int, ...]) -> dict[str, Any]:
    return {name: values.reshape(shape) for name, values in figures.items()}


def _check_lengths(base: Scenario, arrays: Mapping[str, Array], lists: Mapping[str, list[object]]) -> None:
    """Refuse lengths that some structures could run and others not, or that no array can stand for."""
    own = {**{name: getattr(base.workload, name) for name in LENGTHS}, **dict.fromkeys(arrays)}
    if arrays and any(isinstance(value, Sequence) for value in own.values()):
        raise CastoffError("one length per request cannot be swept with arrays; give one length for all, or cast")
    decodes = base.workload.decode or any(lists.get("decode", []))
    swept = [count for count in lists.get("num_mtp_tokens", []) if isinstance(count, int)]
    drafts = max([base.mtp.num_mtp_tokens, *swept])
    if decodes and "query_length" in arrays and np.any(arrays["query_length"] < 1 + drafts):
        raise CastoffError(
            f"a decode step with num_mtp_tokens {drafts} verifies {1 + drafts} tokens per request; leave query_length "
            f"out, or give at least {1 + drafts} everywhere"
        )


def _figures(result: Cast) -> dict[str, Any]:
    """The figures of one chunk, by the names of `SweepResult`."""
    memory = result.footprint
    return {
        "latency_s": result.latency_s,
        "tokens_per_s": result.tokens_per_s,
        "tokens_per_s_per_device": result.tokens_per_s / result.setup.mesh.num_devices,
        "device_bytes": memory.used_bytes,
        "weights_bytes": memory.weights_bytes,
        "kv_bytes": memory.kv_bytes + memory.indexer_cache_bytes,
        "activation_bytes": memory.activation_bytes,
        "host_bytes": memory.host_kv_bytes,
        "fits": memory.fits,
        "bound": result.bound,
        "extrapolated": any_extrapolated(result.prices),
    }


FIGURES: Mapping[str, Any] = dict.fromkeys(
    (
        "latency_s",
        "tokens_per_s",
        "tokens_per_s_per_device",
        "device_bytes",
        "weights_bytes",
        "kv_bytes",
        "activation_bytes",
        "host_bytes",
        "stall_s",
    ),
    np.nan,
) | {"fits": False, "bound": -1, "extrapolated": False}
"""Figures of a sweep, and what a structure that cannot run has for them."""


def _cast_row(
    model: ModelSpec, device: Device, scenario: Scenario, flat: Mapping[str, Array], row: Mapping[str, Array]
) -> Origin:
    """Cast one structure at every point and write its figures to `row`; returns the origin of its latency."""
    lengths: dict[str, Any] = {name: values for name, values in flat.items() if name in LENGTHS}
    scenario = replace(scenario, workload=replace(scenario.workload, **lengths))
    classes = request_classes(scenario.workload, scenario.mtp)
    deployment = _at_every_point(model, device, scenario, flat)
    size = len(next(iter(row.values())))
    origins: list[Origin] = []
    for start in range(0, size, CHUNK):
        part = slice(start, start + CHUNK)
        own = replace(deployment, pool=_pool_chunk(deployment.pool, part))
        result = cast_batch(own, _chunk(classes, part))
        for name, figure in _figures(result).items():
            row[name][part] = figure
        row["stall_s"][part] = stall_s(result, own.pricing) if scenario.offload.offloads else 0.0
        origins.append(result.origin)
    return weakest(origins)


def _at_every_point(model: ModelSpec, device: Device, scenario: Scenario, flat: Mapping[str, Array]) -> Deployment:
    """A structure with the pools of every point. Raises CastoffError for arrays that it has no use for."""
    swept = {name: flat[name] for name in POOLS if name in flat}
    # An array says what its flag would, once.
    stand_ins = {"hit_rate": 0.0} if "hit_rate" in swept else {}
    deployment = resolve(model, device, _with(scenario, stand_ins))
    pool, offload = deployment.pool, scenario.offload
    if not swept:
        return deployment
    if pool is None or ("pool_tokens" in swept and offload.offload == "gather"):
        raise CastoffError(
            f"{' and '.join(swept)} {'are' if len(swept) > 1 else 'is'} for decode steps with offload"
            f"{' serve_install or direct' if 'pool_tokens' in swept else ''}, got offload {offload.offload}"
        )
    if "pool_tokens" in swept:
        check_pool_multiple(swept["pool_tokens"], offload.pool[1])
        check_pool_tokens(pool, swept["pool_tokens"])
    tokens, hit_rate = swept.get("pool_tokens", pool.tokens), swept.get("hit_rate", pool.hit_rate)
    return replace(deployment, pool=replace(pool, tokens=tokens, hit_rate=hit_rate))


def _pool_chunk(pool: Pool | None, part: slice) -> Pool | None:
    if pool is None:
        return None
    return replace(pool, tokens=_cut(pool.tokens, part), hit_rate=_cut(pool.hit_rate, part))


def _chunk(classes: Sequence[RequestClass], part: slice) -> tuple[RequestClass, ...]:
    return tuple(
        RequestClass(_cut(entry.count, part), _cut(entry.context, part), _cut(entry.query, part)) for entry in classes
    )


def _cut(dim: Any, part: slice) -> Any:
    return dim[part] if isinstance(dim, np.ndarray) else dim


def _sort_axes(axes: Mapping[str, object]) -> tuple[dict[str, Array], dict[str, list[object]]]:
    known = {item.name: group for group in _GROUPS for item in fields(_group_type(group))} | dict.fromkeys(_OWN, "")
    arrays: dict[str, Array] = {}
    lists: dict[str, list[object]] = {}
    for name, value in axes.items():
        if name not in known:
            raise CastoffError(f"sweep has no axis {name!r}{did_you_mean(name, known)}")
        if isinstance(value, np.ndarray):
            if isinstance(value, np.ma.MaskedArray):
                raise CastoffError(f"{name}: masked arrays are not swept; leave out the masked points")
            if value.dtype.kind not in "iuf":
                raise CastoffError(f"{name}: an array of numbers is needed, got one of {value.dtype}")
            if name not in CONTINUOUS:
                raise CastoffError(
                    f"{name} is structure: give a list, not an array; arrays are for {', '.join(CONTINUOUS)}"
                )
            arrays[name] = value
        else:
            values = list(value) if isinstance(value, list | range) else [value]
            lists[name] = [entry.item() if isinstance(entry, np.generic) else entry for entry in values]
            if not lists[name]:
                raise CastoffError(f"the list for {name} is empty")
    return arrays, lists


def _group_type(group: str) -> type:
    return type(getattr(Scenario(), group))


def _with(base: Scenario, values: Mapping[str, Any]) -> Scenario:
    """A scenario with some fields, of whichever group, set."""
    top = {name: value for name, value in values.items() if name in _OWN}
    for group in _GROUPS:
        part = getattr(base, group)
        own = {item.name: values[item.name] for item in fields(part) if item.name in values}
        if own:
            top[group] = replace(part, **own)
    return replace(base, **top)
