"""What a step reads of its pools: hit rates as a user gives them, or a hit profile, to shares of the selected rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from castoff.dims import Dim, maximum, minimum
from castoff.errors import CastoffError
from castoff.model.offload_sizes import offloaded_groups
from castoff.model.setup import Setup
from castoff.ops.lengths import Lengths
from castoff.spec.backend import Origin
from castoff.spec.hit_profile import (
    HitCurve,
    HitProfile,
    Policy,
    check_profile,
    load_hit_profile,
    shipped_profile,
)
from castoff.spec.model import ModelSpec
from castoff.spec.offload import Offload, check_offload
from castoff.spec.scenario import Scenario

# Whose overlap among the queries of a request is taken where only a hit rate is given.
_OVERLAP_MODEL = "zai-org/GLM-5.2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What of the pools may differ from scenario to scenario of one structure.

    tokens: of a request in every layer. hit_rate: None takes the curve. curve: counts over the size of the pool; with a
    hit rate, only how many distinct tokens are among the missed rows. miss_scale: factor of the curve's misses.
    context_length: of the counts. index_topk: rows of a query.
    """

    tokens: Dim
    hit_rate: Dim | None
    curve: HitCurve
    context_length: int
    index_topk: int
    miss_scale: Dim = 1.0
    origin: Origin = "assumed"


@dataclass(frozen=True, slots=True)
class Reads:
    """Shares of a step's selected rows. hits: in the pool. missed: distinct tokens that are not, this step's own aside.
    listed: rows that the lists of a plan name. hosted: rows that come from the host, each time that one is read."""

    hits: Dim
    missed: Dim
    listed: Dim
    hosted: Dim


def check_hits(setup: Setup, scenario: Scenario) -> None:
    """Raise CastoffError for offload that cannot be, and for hit rates that nothing asks for."""
    options, hits = scenario.offload, scenario.hits
    check_offload(options)
    for flag, value in (("--hit-rate", hits.hit_rate), ("--hit-profile", hits.hit_profile)):
        if value is not None and not options.offloads:
            raise CastoffError(f"{flag} is for --offload gather, serve_install or direct")
        if value is not None and setup.mode == "prefill":
            raise CastoffError(f"{flag} is for decode steps; a prefill reads no pool")
    if not options.offloads:
        return
    offloaded_groups(setup, options)
    if setup.mesh.dcp.size > 1:
        raise CastoffError(
            f"--offload {options.offload} with --dcp-size {setup.mesh.dcp.size}: offload keeps whole caches; leave "
            "--dcp-size out"
        )


def pool_of(setup: Setup, scenario: Scenario) -> tuple[Pool, tuple[str, ...]]:
    """The pools of a scenario, and notes to the user.

    Raises CastoffError for a hit rate that cannot be, a profile that does not fit the model or has no such curve, and
    where castoff has no profile of the model and neither is given.
    """
    options, hits, model = scenario.offload, scenario.hits, setup.model
    query_length = 1 + setup.mtp.num_mtp_tokens
    policy, ways = _kept_by(options)
    tokens = (setup.topk_limit or 0) if options.offload == "gather" else options.pool[0] * options.pool[1]
    if hits.hit_rate is not None:
        check_hit_rate(hits.hit_rate)
    path = Path(hits.hit_profile) if hits.hit_profile is not None else shipped_profile(model.name)
    if path is None:
        if hits.hit_rate is None:
            raise CastoffError(
                f"castoff knows no hit rates of {model.name}: give --hit-rate, or --hit-profile FILE, which "
                "`castoff replay` makes of a top-k trace"
            )
        path = shipped_profile(_OVERLAP_MODEL)
        assert path is not None, "castoff ships a profile"
        return _from_rate(load_hit_profile(path), options, hits.hit_rate, tokens, query_length), ()
    profile = load_hit_profile(path)
    note = _check(profile, model)
    if hits.hit_rate is not None:
        return _from_rate(profile, options, hits.hit_rate, tokens, query_length), ()
    curve = profile.curve(options.offload, policy, ways, query_length)
    pool = Pool(
        tokens=tokens, hit_rate=None, curve=curve, context_length=profile.context_length,
        index_topk=profile.index_topk, origin=profile.origin,
    )  # fmt: skip
    check_pool_tokens(pool, tokens)
    return pool, () if note is None else (note,)


def check_hit_rate(hit_rate: Dim) -> None:
    """Raise CastoffError for a rate that is not from 0 to 1."""
    rates = np.asarray(hit_rate, np.float64)
    if rates.size == 0 or not np.all((rates >= 0) & (rates <= 1)):
        raise CastoffError(f"--hit-rate must be from 0 to 1, got {hit_rate}")


def check_pool_tokens(pool: Pool, tokens: Dim) -> None:
    """Raise CastoffError for pools smaller than any that the curve has: below it, nothing is known."""
    curve = pool.curve
    if pool.hit_rate is None and curve.mode != "gather" and np.any(np.asarray(tokens) < curve.least_tokens):
        raise CastoffError(
            f"the hit profile covers pools of {curve.least_tokens:.0f} to {curve.most_tokens:.0f} tokens, got "
            f"--pool-tokens {np.min(tokens):g}; give --hit-rate, or a --hit-profile with smaller pools"
        )


def expected_reads(pool: Pool, lengths: Lengths) -> Reads:
    """What one request of a step reads, as shares of its selected rows.

    Misses of a profile, which is of one context, are at most those of a pool whose rows are drawn at random. That has
    a share P / L of a context of L tokens, so a pool that holds it all misses nothing.
    """
    point = pool.curve.at(pool.tokens)
    # A short context has fewer rows to select, and as many of them are this step's own.
    window = minimum(point.window_reads / (lengths.selected(pool.index_topk) / lengths.requests), 1.0)
    if pool.hit_rate is None:
        context = lengths.total_tokens / lengths.requests
        unseen = maximum(1 - pool.tokens / context, 0.0)
        missed = minimum(minimum(point.missed / point.rows * pool.miss_scale, unseen), 1 - window)
        unique = missed * point.unique_misses / maximum(point.missed, 1e-9)
    else:
        missed = maximum(1 - pool.hit_rate - window, 0.0)
        unique = pool.curve.unique_share(missed)
    hosted = missed + window
    listed = hosted if pool.curve.mode == "gather" else unique
    return Reads(hits=1 - hosted, missed=unique, listed=listed, hosted=hosted)


def _kept_by(options: Offload) -> tuple[Policy, int]:
    """Policy and ways as profiles name them."""
    if options.offload == "gather":
        return "previous", 0
    return options.pool_policy, options.pool[1]


def _from_rate(
    profile: HitProfile, options: Offload, hit_rate: Dim, tokens: Dim, query_length: int
) -> Pool:  # fmt: skip
    """Pools with a given hit rate: how queries overlap is that of the nearest curve of the mode."""
    curves = [curve for curve in profile.curves if curve.mode == options.offload]
    if not curves:
        raise CastoffError(f"the hit profile of {profile.model} has no curve for --offload {options.offload}")
    policy, ways = _kept_by(options)
    curve = min(
        curves, key=lambda each: (abs(each.query_length - query_length), each.policy != policy, abs(each.ways - ways))
    )
    return Pool(
        tokens=tokens, hit_rate=hit_rate, curve=curve, context_length=profile.context_length,
        index_topk=profile.index_topk,
    )  # fmt: skip


def _check(profile: HitProfile, model: ModelSpec) -> str | None:
    owners: Sequence[int] = [group.owner for group in model.index_groups]
    assert model.indexer is not None, "offload is for sparse attention"
    return check_profile(profile, model.name, owners, model.indexer.index_topk)
