"""How often selected rows are on the device already: what a cast needs of a replay, as a small JSON file.

A profile has curves, one per mode, policy, ways and query length; a curve has counts of rows at several sizes of the
pool. Counts are means per request, index group and decode step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from castoff.dims import Dim
from castoff.errors import CastoffError
from castoff.spec.backend import ORIGINS, Origin
from castoff.spec.offload import OffloadMode, PoolPolicy
from castoff.spec.toml_file import Table

SHIPPED_DIRECTORY = Path(__file__).resolve().parent.parent / "data" / "hit_profiles"
VERSION = 1
Policy = PoolPolicy | Literal["previous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """How often selected rows are on the device already, in a cast.

    hit_rate: share of the selected rows that are in the pool, from 0 to 1; what the profile says where None. It still
        says how often the queries of a request select the same row.
    hit_profile: file of `castoff replay --hit-profile`; None takes the one that castoff has for the model.
    """

    hit_rate: float | None = None
    hit_profile: str | None = None


@dataclass(frozen=True, slots=True)
class HitPoint:
    """Rows of a request, index group and step with a pool of so many tokens; in a sweep, arrays.

    hits: in the pool, or copied there from the ring of the last tokens; unique_hits: their tokens. unique_misses_low,
    unique_misses_high: the range that unique_misses may have on average over the groups of a step; the profile's source
    says over what.
    """

    pool_tokens: Dim
    hits: Dim
    unique_hits: Dim
    unique_misses: Dim
    repeated_misses: Dim
    window_reads: Dim
    unique_misses_low: Dim
    unique_misses_high: Dim

    @property
    def missed(self) -> Dim:
        """Rows of settled tokens that are not in the pool."""
        return self.unique_misses + self.repeated_misses

    @property
    def rows(self) -> Dim:
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

    @property
    def least_tokens(self) -> float:
        """The smallest pool that the curve has."""
        return float(self.points[0].pool_tokens)

    @property
    def most_tokens(self) -> float:
        """The largest pool that the curve has."""
        return float(self.points[-1].pool_tokens)

    def at(self, pool_tokens: Dim) -> HitPoint:
        """The point at a size of the pool: on the line between its neighbours, beyond them the last."""
        known = [astuple(point) for point in self.points]
        sizes, *figures = zip(*known, strict=True)
        return HitPoint(pool_tokens, *(np.interp(pool_tokens, sizes, figure) for figure in figures))

    def unique_share(self, missed: Dim) -> Dim:
        """Distinct tokens among missed rows, both as shares of all rows, where such a share is missed.

        A pool of the curve misses that share, or one smaller than all of them, in which at last every token is missed.
        Of gather, whose queries have buffers of their own, a token may be both hit and missed: this is an upper bound.
        """
        falling = [point for point in self.points if point.missed > 0]
        least = self.points[0]
        every = (1 - least.window_reads / least.rows, (least.unique_hits + least.unique_misses) / least.rows)
        pairs = [
            (0.0, 0.0),
            *((point.missed / point.rows, point.unique_misses / point.rows) for point in falling[::-1]),
        ]
        rows, tokens = zip(*pairs, every, strict=True)
        share: Dim = np.interp(missed, rows, tokens)
        return share


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
        there = ", ".join(dict.fromkeys(f"{curve.mode} {curve.policy}" for curve in self.curves))
        sizes = ", ".join(dict.fromkeys(str(curve.ways) for curve in self.curves if curve.ways)) or "none"
        lengths = ", ".join(str(length) for length in sorted({curve.query_length for curve in self.curves}))
        raise CastoffError(
            f"the hit profile of {self.model} has nothing for --offload {mode} --policy {policy}"
            f"{f' --ways {ways}' if ways else ''} at {query_length} query tokens a request; it has {there}; ways "
            f"{sizes}; query tokens {lengths}; give --hit-rate, or a --hit-profile of `castoff replay`"
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
    index_topk = table.count("index_topk")
    curves = tuple(_read_curve(item, index_topk) for item in table.tables("curves"))
    kinds = [(curve.mode, curve.policy, curve.ways, curve.query_length) for curve in curves]
    if len(set(kinds)) < len(kinds):
        raise table.fault("curves", "must have one curve for each mode, policy, ways and query_length")
    return HitProfile(
        model=table.text("model"),
        owner_layers=_counts(table, "owner_layers"),
        index_topk=index_topk,
        context_length=table.count("context_length"),
        origin=table.choice("origin", ORIGINS),
        source=table.text("source"),
        curves=curves,
    )


def _counts(table: Table, key: str) -> tuple[int, ...]:
    values = table.values.get(key)
    if not isinstance(values, list) or not values or not all(type(value) is int and value >= 0 for value in values):
        raise table.fault(key, "must be a list of whole numbers")
    return tuple(values)


def _read_curve(table: Table, index_topk: int) -> HitCurve:
    table.only(item.name for item in fields(HitCurve))
    points = tuple(_read_point(item) for item in table.tables("points"))
    if any(before.pool_tokens >= point.pool_tokens for before, point in pairwise(points)):
        raise table.fault("points", "must be in ascending order of pool_tokens")
    query_length = table.count("query_length")
    for index, point in enumerate(points):
        if not 0 < point.rows <= query_length * index_topk + 1:
            raise table.fault(
                f"points[{index}]", f"must have some rows, and at most query_length x index_topk = "
                f"{query_length * index_topk}, got {point.rows:g}"
            )  # fmt: skip
        if point.window_reads > query_length * (query_length + 1) / 2 + 1:
            raise table.fault(f"points[{index}].window_reads", "are more than the queries' own tokens")
    return HitCurve(
        mode=table.choice("mode", ("gather", "serve_install", "direct")),
        policy=table.choice("policy", ("previous", *get_args(PoolPolicy))),
        ways=table.count("ways", at_least=0),
        query_length=query_length,
        points=points,
    )


def _read_point(table: Table) -> HitPoint:
    table.only(item.name for item in fields(HitPoint))
    names = [item.name for item in fields(HitPoint) if item.name != "pool_tokens"]
    point = HitPoint(table.count("pool_tokens"), *(table.at_least_zero(name) for name in names))
    if not point.unique_misses_low <= point.unique_misses <= point.unique_misses_high:
        raise table.fault("unique_misses", "must lie between unique_misses_low and unique_misses_high")
    if point.unique_hits > point.hits:
        raise table.fault("unique_hits", "must be at most hits")
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
