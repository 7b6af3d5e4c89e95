"""How often selected rows are on the device already: what a cast needs of a replay, as a small JSON file.

A profile has curves, one per mode, policy, ways and query length; a curve has counts of rows at several sizes of the
pool. Counts are means per request, index group and decode step, as `policy/arrays.py` counts them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np

from castoff.dims import Dim
from castoff.errors import CastoffError
from castoff.spec.backend import ORIGINS, Origin
from castoff.spec.offload import OffloadMode, PoolPolicy
from castoff.spec.toml_file import Table

SHIPPED_DIRECTORY = Path(__file__).resolve().parent.parent / "data" / "hit_profiles"
VERSION = 1
Policy = PoolPolicy | str
PREVIOUS = "previous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """How often selected rows are on the device already, in a cast.

    hit_rate: share of the selected rows that are in the pool, from 0 to 1; what the profile says where None. It still
        says how often the queries of a request select the same row.
    hit_profile: file of `castoff replay --hit-profile`; None takes the one that castoff has for the model.
    """

    hit_rate: float | None = None
    hit_profile: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HitPoint:
    """Rows of a request, index group and step with a pool of so many tokens. unique_misses_low, unique_misses_high: how
    far that mean is uncertain."""

    pool_tokens: int
    hits: float
    unique_misses: float
    repeated_misses: float
    window_reads: float
    unique_misses_low: float
    unique_misses_high: float

    @property
    def rows(self) -> float:
        """All selected rows."""
        return self.hits + self.unique_misses + self.repeated_misses + self.window_reads


@dataclass(frozen=True, slots=True, kw_only=True)
class HitCurve:
    """Counts over the size of the pool, for one way of keeping rows. ways: 0 where a set is a query's last choice."""

    mode: OffloadMode
    policy: Policy
    ways: int
    query_length: int
    points: tuple[HitPoint, ...]

    def __str__(self) -> str:
        ways = f" {self.ways} ways" if self.ways else ""
        return f"{self.mode} {self.policy}{ways} at {self.query_length}"

    def at(self, figure: str, pool_tokens: Dim) -> Dim:
        """A figure of `HitPoint` at a size of the pool: on the line between its neighbours, beyond them the last."""
        sizes = [point.pool_tokens for point in self.points]
        values = np.interp(pool_tokens, sizes, [getattr(point, figure) for point in self.points])
        return values if isinstance(pool_tokens, np.ndarray) else float(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class HitProfile:
    """Curves of one model at one length of context.

    owner_layers: of its index groups. origin: how good the counts are. source: where they come from, in words.
    """

    model: str
    owner_layers: tuple[int, ...]
    index_topk: int
    context_length: int
    origin: Origin
    source: str
    curves: tuple[HitCurve, ...]

    def curve(self, mode: OffloadMode, policy: Policy, ways: int, query_length: int) -> HitCurve:
        """The curve of one way of keeping rows. Raises CastoffError, with those that there are."""
        wanted = (mode, policy, ways, query_length)
        for curve in self.curves:
            if (curve.mode, curve.policy, curve.ways, curve.query_length) == wanted:
                return curve
        raise CastoffError(
            f"the hit profile of {self.model} has nothing for --offload {mode} --policy {policy}"
            f"{f' --ways {ways}' if ways else ''} at {query_length} query tokens a request; it has "
            f"{', '.join(str(curve) for curve in self.curves)}; give --hit-rate, or a --hit-profile of `castoff replay`"
        )

    def as_json(self) -> dict[str, Any]:
        """The object that its file holds."""
        return {"hit_profile_version": VERSION, **asdict(self)}


def shipped_profile(model: str) -> Path | None:
    """The file of the profile that castoff has for a model, or None."""
    path = SHIPPED_DIRECTORY / f"{model.removesuffix('-FP8').replace('/', '--')}.json"
    return path if path.is_file() else None


def load_hit_profile(path: Path) -> HitProfile:
    """Read a profile. Raises CastoffError for a file that is none."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise CastoffError(f"{path}: cannot read this file: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CastoffError(f"{path} is not a hit profile: not valid JSON: {error}") from None
    if not isinstance(values, dict) or "hit_profile_version" not in values:
        raise CastoffError(f"{path} is not a hit profile; `castoff replay TRACE --hit-profile FILE` writes one")
    return _read_profile(Table(file=str(path), values=values))


def _read_profile(table: Table) -> HitProfile:
    table.only(("hit_profile_version", *(item.name for item in fields(HitProfile))))
    if table.count("hit_profile_version") != VERSION:
        raise table.fault("hit_profile_version", f"must be {VERSION}, got {table.values['hit_profile_version']}")
    return HitProfile(
        model=table.text("model"),
        owner_layers=_counts(table, "owner_layers"),
        index_topk=table.count("index_topk"),
        context_length=table.count("context_length"),
        origin=table.choice("origin", ORIGINS),
        source=table.text("source"),
        curves=tuple(_read_curve(item) for item in table.tables("curves")),
    )


def _counts(table: Table, key: str) -> tuple[int, ...]:
    values = table.values.get(key)
    if not isinstance(values, list) or not values or not all(type(value) is int and value >= 0 for value in values):
        raise table.fault(key, "must be a list of whole numbers")
    return tuple(values)


def _read_curve(table: Table) -> HitCurve:
    table.only(item.name for item in fields(HitCurve))
    points = tuple(_read_point(item) for item in table.tables("points"))
    if any(before.pool_tokens >= point.pool_tokens for before, point in pairwise(points)):
        raise table.fault("points", "must be in ascending order of pool_tokens")
    return HitCurve(
        mode=table.choice("mode", ("gather", "serve_install", "direct")),
        policy=table.choice("policy", (PREVIOUS, *get_args(PoolPolicy))),
        ways=table.count("ways", at_least=0),
        query_length=table.count("query_length"),
        points=points,
    )


def _read_point(table: Table) -> HitPoint:
    table.only(item.name for item in fields(HitPoint))
    counts: Mapping[str, float] = {
        item.name: table.at_least_zero(item.name) for item in fields(HitPoint) if item.name != "pool_tokens"
    }
    point = HitPoint(pool_tokens=table.count("pool_tokens"), **counts)
    if not point.unique_misses_low <= point.unique_misses <= point.unique_misses_high:
        raise table.fault("unique_misses", "must lie between unique_misses_low and unique_misses_high")
    return point


def check_profile(profile: HitProfile, model: str, owner_layers: Sequence[int], index_topk: int) -> str | None:
    """Refuse the profile of a model that selects otherwise; a note where only its name differs.

    owner_layers: of the model, which may be cut to its first layers.
    """
    if profile.index_topk != index_topk or tuple(owner_layers) != profile.owner_layers[: len(owner_layers)]:
        raise CastoffError(
            f"the hit profile is of {profile.model}, which selects {profile.index_topk} tokens in "
            f"{len(profile.owner_layers)} index groups; {model} selects {index_topk} in {len(owner_layers)}"
            f"{' others' if len(owner_layers) == len(profile.owner_layers) else ''}: take a profile of this model "
            "(castoff replay), or give --hit-rate"
        )
    if profile.model.removesuffix("-FP8") != model.removesuffix("-FP8"):
        return f"hit rates are those of {profile.model}"
    return None
