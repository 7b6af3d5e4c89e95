"""Traces that nobody recorded: drawn selections whose reuse is like the published one.

A token's score for a query is a liking that stays, what its topic counts for at the time, and noise that lasts from
step to step; a query selects the best. docs/synthetic_traces.md says where the figures come from.

Each request and index group has streams of numbers of its own, drawn step by step, so fewer requests, groups or steps
give a part of the same trace.

Axes: N steps, G index groups, B requests, S query tokens, K ranks, T topics; L tokens of a request, this step's
included, V those that a query sees.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from castoff.errors import CastoffError
from castoff.free_memory import available_bytes
from castoff.spec.architecture import ModelSpec
from castoff.spec.checks import check_value, declared
from castoff.spec.scenario import ASSUMED_DRAFT_ACCEPTANCE
from castoff.trace.draws import Doubles, Floats, bits_of, exponential, normal, uniform
from castoff.trace.header import MAX_INT32, ProvenanceValue, TraceHeader
from castoff.trace.reader import Trace, open_trace
from castoff.trace.steps import NONE, Int32Array, Integers
from castoff.trace.writer import TraceWriter

GOLDEN_RATIO = 0.6180339887498949
"""Its multiples, modulo 1, lie evenly however many there are."""
# Which stream of a request and group, or of a request.
_ACCEPTED, _LIKING, _NOISE, _TOPICS = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionModel:
    """How a token's score for a query comes about; scores count for nothing but their order.

    sinks: the first tokens of a request that every query selects.
    window: the last tokens that every query selects, its own included.
    tail: what stays of a token's score is an exponential number of mean 1, to this power: above 1 it has a longer tail.
    noise: standard deviation of the noise of a token's score.
    noise_coefficient: correlation of that noise in one step and in the next, the coefficient of an AR(1) process.
    query_coefficient: correlation of that noise for one query token of a step and for the next of the same step.
    topic_scale: mean of what a topic adds to the scores of its tokens, exponential too; 0 for no topics.
    topic_tokens: tokens in a row that are one topic.
    topic_turnover: chance that a topic adds something else in the next step.
    group_spread: noise differs between index groups by up to this share; the groups lie evenly between.
    """

    sinks: int = 4
    window: int = 64
    tail: float = 1.0
    noise: float = 0.96
    noise_coefficient: float = 0.3
    query_coefficient: float = 0.65
    topic_scale: float = 0.39
    topic_tokens: int = 256
    topic_turnover: float = 0.1
    group_spread: float = 0.3

    def __post_init__(self) -> None:
        for name, allowed in declared(SelectionModel).items():
            check_value(name, getattr(self, name), allowed)
        for name in ("sinks", "window", "topic_tokens"):
            _within(self, name, 1 if name == "topic_tokens" else 0, MAX_INT32)
        for name in ("noise_coefficient", "query_coefficient", "topic_turnover", "group_spread"):
            _within(self, name, 0, 1)
        # Beyond that scores are too large to be told apart.
        _within(self, "tail", 0.1, 4)
        for name in ("noise", "topic_scale"):
            _within(self, name, 0, 1000)

    def deviation(self, group: int) -> float:
        """Standard deviation of the noise of one index group."""
        return self.noise * (1 + self.group_spread * (2 * ((0.5 + group * GOLDEN_RATIO) % 1) - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """What is decoded.

    context_length: tokens of each request before the first step.
    steps: decode steps.
    requests: requests, all of which take part in every step.
    num_mtp_tokens: draft tokens per step; a step has one query token more.
    draft_acceptance: chance that a draft is kept where those before it are.
    seed: of all draws, from 0 on.
    """

    context_length: int = 65536
    steps: int = 300
    requests: int = 1
    num_mtp_tokens: int = 0
    draft_acceptance: float = ASSUMED_DRAFT_ACCEPTANCE
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in declared(Decoding).items():
            check_value(name, getattr(self, name), allowed)
        for name in ("context_length", "num_mtp_tokens", "seed"):
            _within(self, name, 0, MAX_INT32)
        for name in ("steps", "requests"):
            _within(self, name, 1, MAX_INT32)
        _within(self, "draft_acceptance", 0, 1)
        if self.most_tokens > MAX_INT32:
            raise CastoffError(
                f"a request could come to {self.most_tokens:,} tokens, more than a trace can number; give a smaller "
                "--context-length or fewer --steps"
            )

    @property
    def query_length(self) -> int:
        """Query tokens of a request in a step (S)."""
        return 1 + self.num_mtp_tokens

    @property
    def most_tokens(self) -> int:
        """Tokens of a request if all drafts are kept."""
        return self.context_length + self.steps * self.query_length


class Drawn(NamedTuple):
    """What one request selects in one index group in one step."""

    committed: int
    """Tokens before those of the step."""
    accepted: int
    """How many of the step's own are kept."""
    ids_SK: Int32Array
    """The best first, sinks and window before all others; −1 where there are fewer tokens than ranks."""


def generate_trace(
    target: Path,
    model: ModelSpec,
    selection: SelectionModel,
    decoding: Decoding,
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> Trace:
    """Write a trace of all index groups of a model to `target`, and open that.

    progress: is told how many steps are written.
    Raises CastoffError where the model has no such requests, and where the file cannot be written.
    """
    header = TraceHeader.of_model(
        model,
        batch=decoding.requests,
        query_length=decoding.query_length,
        provenance=_provenance(selection, decoding),
    )
    if decoding.most_tokens > model.max_position_embeddings:
        raise CastoffError(
            f"a request could come to {decoding.most_tokens:,} tokens, and {model.name} has positions for "
            f"{model.max_position_embeddings:,}; give a smaller --context-length or fewer --steps"
        )
    request_ids_B = np.arange(decoding.requests)
    _check_disk(target, decoding.steps * header.record_bytes)
    _check_memory(header, decoding)
    streams = [
        [
            select(selection, decoding, header.index_topk, request=request, group=group)
            for request in request_ids_B.tolist()
        ]
        for group in range(header.num_groups)
    ]
    with TraceWriter(target, header) as writer:
        for step in range(decoding.steps):
            drawn = [[next(stream) for stream in row] for row in streams]
            writer.append(
                request_ids_B,
                np.array([each.committed + decoding.query_length for each in drawn[0]]),
                np.array([each.accepted for each in drawn[0]]),
                np.stack([[each.ids_SK for each in row] for row in drawn]),
            )
            progress(step + 1)
    return open_trace(target)


def select(
    selection: SelectionModel, decoding: Decoding, index_topk: int, *, request: int = 0, group: int = 0
) -> Iterator[Drawn]:
    """What one request selects in one index group, step by step.

    Raises CastoffError where sinks and window are more than a query selects.
    """
    if selection.sinks + selection.window > index_topk:
        raise CastoffError(
            f"--sinks {selection.sinks} and --window {selection.window} together are more than the {index_topk} tokens "
            "that a query selects; give less"
        )
    return _select(selection, decoding, index_topk, request, group)


def _select(
    selection: SelectionModel, decoding: Decoding, index_topk: int, request: int, group: int
) -> Iterator[Drawn]:
    accepted_N = _accepted(decoding, request)
    queries, committed, known = decoding.query_length, decoding.context_length, 0
    most = committed + int(accepted_N[:-1].sum()) + queries
    liking_L = _liking(selection, bits_of(decoding.seed, request, _LIKING, group), most)
    noise_bits, topic_bits = (bits_of(decoding.seed, request, kind, group) for kind in (_NOISE, _TOPICS))
    noise_SL, topics_T = np.zeros((queries, most), np.float32), np.zeros(0)
    deviation = np.float32(selection.deviation(group))
    for accepted in accepted_N.tolist():
        length = committed + queries
        _renew_noise(selection, noise_bits, noise_SL[:, :length], known)
        scores_SL = liking_L[:length] + deviation * noise_SL[:, :length]
        if selection.topic_scale:
            topics_T = _renewed_topics(selection, topic_bits, topics_T, length)
            added_T = (selection.topic_scale * topics_T).astype(np.float32)
            scores_SL += np.repeat(added_T, selection.topic_tokens)[:length]
        ids_SK = np.full((queries, index_topk), NONE, np.int32)
        for query in range(queries):
            best = _best(selection, scores_SL[query, : committed + query + 1], index_topk)
            ids_SK[query, : len(best)] = best
        yield Drawn(committed, accepted, ids_SK)
        known = length
        committed += accepted


def _accepted(decoding: Decoding, request: int) -> Integers:
    """How many tokens of a request each step keeps (N)."""
    drafts = decoding.num_mtp_tokens
    chances_ND = uniform(bits_of(decoding.seed, request, _ACCEPTED, 0), decoding.steps * drafts)
    kept_ND = chances_ND.reshape(decoding.steps, drafts) < decoding.draft_acceptance
    counts_N: Integers = 1 + np.cumprod(kept_ND, axis=1).sum(axis=1)
    return counts_N


def _liking(selection: SelectionModel, bits: np.random.PCG64, tokens: int) -> Floats:
    """What stays of the scores of so many tokens."""
    found_L = exponential(bits, tokens)
    # The one operation that may round otherwise elsewhere.
    found_L = found_L if selection.tail == 1 else found_L**selection.tail
    return found_L.astype(np.float32)


def _renew_noise(selection: SelectionModel, bits: np.random.PCG64, noise_SL: Floats, known: int) -> None:
    """Take the noise of `known` tokens one step on, and give the others their first; deviation 1. Mutates noise."""
    change_L = None
    for noise_L in noise_SL:
        drawn_L = normal(bits, len(noise_L))
        change_L = drawn_L if change_L is None else _mixed(change_L, drawn_L, selection.query_coefficient)
        noise_L[:known] = _mixed(noise_L[:known], change_L[:known], selection.noise_coefficient)
        noise_L[known:] = change_L[known:]


def _mixed(before_L: Floats, drawn_L: Floats, coefficient: float) -> Floats:
    """Numbers whose correlation with those before is the coefficient, and whose deviation is still 1."""
    return np.float32(coefficient) * before_L + np.float32(math.sqrt(1 - coefficient**2)) * drawn_L


def _renewed_topics(selection: SelectionModel, bits: np.random.PCG64, topics_T: Doubles, length: int) -> Doubles:
    """What the topics of so many tokens count for one step later; mean 1."""
    count = -(-length // selection.topic_tokens)
    renewed_T = uniform(bits, count) < selection.topic_turnover
    drawn_T = exponential(bits, count)
    drawn_T[: len(topics_T)] = np.where(renewed_T[: len(topics_T)], drawn_T[: len(topics_T)], topics_T)
    return drawn_T


def _best(selection: SelectionModel, scores_V: Floats, index_topk: int) -> Integers:
    """The ids with the highest scores, the best first, the lowest of equals. Mutates scores."""
    visible = len(scores_V)
    scores_V[: selection.sinks] = scores_V[max(visible - selection.window, 0) :] = np.inf
    ids = np.arange(visible)
    if visible > index_topk:
        last = np.partition(scores_V, visible - index_topk)[visible - index_topk]
        better, equal = np.flatnonzero(scores_V > last), np.flatnonzero(scores_V == last)
        ids = np.sort(np.concatenate((better, equal[: index_topk - len(better)])))
    return ids[np.argsort(-scores_V[ids], kind="stable")]


def _check_disk(target: Path, size_bytes: int) -> None:
    try:
        free_bytes = shutil.disk_usage(target.resolve().parent).free
    except OSError:  # The writer says what is wrong with the place.
        return
    if size_bytes > free_bytes:
        raise CastoffError(
            f"the trace would take {size_bytes:,} bytes, and there are {free_bytes:,} free for {target}; give fewer "
            "--steps or --requests"
        )


def _check_memory(header: TraceHeader, decoding: Decoding) -> None:
    """All groups of all requests are drawn step by step, so what is known of their tokens is held at once."""
    needed = 4 * (decoding.query_length + 1) * decoding.most_tokens * header.num_groups * decoding.requests
    free_bytes = available_bytes()
    if free_bytes is not None and needed > free_bytes:
        raise CastoffError(
            f"drawing takes {needed:,} bytes of memory, and there are {free_bytes:,}; give fewer --requests or a "
            "smaller --context-length"
        )


def _provenance(selection: SelectionModel, decoding: Decoding) -> dict[str, ProvenanceValue]:
    return {"generator": "castoff trace generate", **asdict(decoding), **asdict(selection)}


def _within(group: SelectionModel | Decoding, name: str, least: float, most: float) -> None:
    value = getattr(group, name)
    if not least <= value <= most:
        flag = f"--{name.replace('_', '-')}"
        raise CastoffError(f"{flag} must be from {least:,} to {most:,}, got {value:,}")
