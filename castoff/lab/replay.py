"""Replaying a top-k trace: what pools of any size would have held, by any policy.

Axes: G index groups, M steps of all requests, C counters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from castoff.errors import CastoffError, CastoffWarning
from castoff.lab.passes import Replayable, count, passes
from castoff.lab.policies import POLICIES, SET_ASSOCIATIVE, PolicyName
from castoff.lab.requests import MOST_TOKENS, requests_of
from castoff.lab.result import Replayed, ReplayResult, ReplayRow
from castoff.policy.compiled import has_numba
from castoff.spec.model import ModelSpec
from castoff.spec.offload import MOST_WAYS, POOL_TOKENS, WAYS
from castoff.spec.quant import AttentionAction, cache_format
from castoff.spec.toml_file import did_you_mean
from castoff.trace.reader import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What is replayed: every policy with every pool, and those of sets with every number of ways.

    pools: rows of a request's pool in a layer. num_mtp_tokens: replay the first 1 + num_mtp_tokens queries of a step;
    None for all. cache: format of the latent rows. skip_steps: first steps of each request that fill its pool and are
    not counted, save in the warm-up curve.
    """

    policies: tuple[PolicyName, ...] = ("fifo",)
    pools: tuple[int, ...] = (POOL_TOKENS,)
    ways: tuple[int, ...] = (WAYS,)
    num_mtp_tokens: int | None = None
    cache: AttentionAction = "DISABLED"
    skip_steps: int = 0

    def __post_init__(self) -> None:
        for policy in self.policies:
            if policy not in POLICIES:
                hint = did_you_mean(str(policy), POLICIES)
                raise CastoffError(f"--policy {policy!r} is unknown{hint}; allowed: {', '.join(POLICIES)}")
        for ways in self.ways:
            if not 1 <= ways <= MOST_WAYS:
                raise CastoffError(f"--ways must be from 1 to {MOST_WAYS}, got {ways}")
        for name in ("policies", "pools", "ways"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                flag = {"policies": "--policy", "pools": "--pool", "ways": "--ways"}[name]
                said = ",".join(map(str, values))
                raise CastoffError(f"{flag} must name each thing once, got {said}" if values else f"{flag} is empty")
        if self.skip_steps < 0:
            raise CastoffError(f"--skip-steps must be at least 0, got {self.skip_steps}")
        self._check_pools()

    def _check_pools(self) -> None:
        has_sets = any(policy in SET_ASSOCIATIVE for policy in self.policies)
        for pool in self.pools:
            if not 1 <= pool <= MOST_TOKENS:
                raise CastoffError(f"--pool must be from 1 to {MOST_TOKENS} tokens, got {pool}")
            for ways in self.ways if has_sets else ():
                if pool % ways:
                    nearest = max(round(pool / ways), 1) * ways
                    raise CastoffError(
                        f"--pool must be a multiple of --ways {ways}, got {pool}; the nearest is {nearest}"
                    )


def replay(
    trace: Trace,
    model: ModelSpec,
    given: Replay | None = None,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ReplayResult:
    """Replay a trace of a model. progress: is told how many passes over an index group are done, of how many.

    Raises CastoffError where trace, model and what is asked for do not go together.
    """
    given = given or Replay()
    layers = _layers_of_groups(trace, model)
    queries = _queries(trace, given)
    if len(layers) < len(model.index_groups):
        warnings.warn(
            f"{trace.path} has {len(layers)} of {len(model.index_groups)} index groups of {model.name}; bytes are "
            "those of these alone",
            CastoffWarning,
            stacklevel=2,
        )
    steps = trace.steps()
    requests = requests_of(steps, queries)
    if not requests:
        raise CastoffError(
            f"{trace.path} has {trace.num_steps:,} steps and no request in any; there is nothing to replay"
        )
    if not has_numba():
        warnings.warn(
            "replays run as plain Python, which is slow: pip install 'castoff[lab]' brings numba",
            CastoffWarning,
            stacklevel=2,
        )
    replayable = Replayable(steps, requests, queries)
    ages_M = np.concatenate([np.arange(rows.num_steps) for rows in requests])
    counted_M = ages_M >= given.skip_steps
    if not counted_M.any():
        raise CastoffError(
            f"--skip-steps {given.skip_steps} leaves nothing of {trace.path}: no request has more than "
            f"{ages_M.max() + 1:,} steps"
        )
    common = Replayed(
        groups=range(len(layers)),
        layers=layers,
        ages_M=ages_M,
        counted_M=counted_M,
        num_steps=len(np.unique(np.concatenate([rows.steps_M for rows in requests])[counted_M])),
        row_bytes=cache_format(model, given.cache).latent_row_bytes,
    )
    every = list(passes(given.policies, given.pools, given.ways, pools_at_once=replayable.pools_at_once))
    rows: list[ReplayRow] = []
    for index, own in enumerate(every):
        counts_PGMC = count(replayable, own, progress=_after(index * len(layers), len(every) * len(layers), progress))
        sizes = own.pools or (queries * replayable.columns,)
        rows += (
            common.row(own.policy, own.ways, pool, counts_GMC)
            for pool, counts_GMC in zip(sizes, counts_PGMC, strict=True)
        )
    return ReplayResult(
        trace=str(trace.path),
        model=model.name,
        steps=common.num_steps,
        requests=len(requests),
        request_steps=int(counted_M.sum()),
        query_length=queries,
        index_topk=trace.header.index_topk,
        row_bytes=common.row_bytes,
        rows=tuple(rows),
    )


def _after(done: int, total: int, progress: Callable[[int, int], None]) -> Callable[[int], None]:
    return lambda group: progress(done + group + 1, total)


def _layers_of_groups(trace: Trace, model: ModelSpec) -> list[tuple[int, ...]]:
    """Layers of each index group of a trace, owner first. Raises CastoffError for a trace of another model."""
    header = trace.header
    if model.indexer is None:
        raise CastoffError(f"{model.name} has no indexer, so {trace.path} is not its trace; name another with --model")
    if header.index_topk != model.indexer.index_topk:
        raise CastoffError(
            f"{trace.path} has {header.index_topk:,} ids per query, and {model.name} selects "
            f"{model.indexer.index_topk:,}; name the trace's model with --model"
        )
    groups = {group.owner: group.layers for group in model.index_groups}
    strange = [layer for layer in header.owner_layers if layer not in groups]
    if strange:
        raise CastoffError(
            f"{trace.path} has selections of layer {strange[0]}, and in {model.name} the layers that select are "
            f"{', '.join(map(str, groups))}; name the trace's model with --model"
        )
    return [groups[layer] for layer in header.owner_layers]


def _queries(trace: Trace, given: Replay) -> int:
    most = trace.header.query_length
    if given.num_mtp_tokens is None:
        return most
    if not 0 <= given.num_mtp_tokens < most:
        raise CastoffError(
            f"--mtp must be from 0 to {most - 1}, since {trace.path} has {most} query tokens per request and step, got "
            f"{given.num_mtp_tokens}"
        )
    return given.num_mtp_tokens + 1
