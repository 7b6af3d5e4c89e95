"""Seconds of passes: tables that one vectorised cast fills, read between their knots, and the host's time on top.

A decode step has the time of the graph that holds it: of more requests, padding included, with the same cache rows in
all. A prompt's pass has the time of equal prompts with the same new tokens and the same mean context.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from castoff.casting.deployment import Deployment
from castoff.casting.price import any_extrapolated
from castoff.casting.rank import Cast, cast_batch, launch_s, micro_batches
from castoff.dims import Array
from castoff.model.setup import Setup
from castoff.spec.backend import Origin
from castoff.spec.scenario import RequestClass
from castoff.spec.serving import ServingCost, ServingSystem

# A pass is longer than its share of a knot to the next by more than a straight line says, so knots are close.
KNOT_RATIO = 2**0.5
CONTEXT_KNOTS = 9
# Of a whole chunk: no pass within one lies next to combinations of knots beyond, since knots double at most.
MOST_BEYOND = 4


@dataclass(frozen=True, slots=True)
class DecodeTable:
    """Device seconds of a decode step, by requests and mean context. graphs: the largest number of requests with a
    graph; numbers above it are knots between which times are read."""

    requests: tuple[int, ...]
    contexts: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]
    graphs: int

    def sum_s(self, requests: int, context: float, growth: float, steps: int) -> float:
        """Seconds of that many steps."""
        at = min(bisect_left(self.requests, requests), len(self.requests) - 1)
        padded = self.requests[at]
        if requests >= padded or padded <= self.graphs:
            share = requests / padded
            return self._row_s(at, context * share, growth * share, steps)
        below = self.requests[at - 1]
        weight = (requests - below) / (padded - below)
        low, high = (self._row_s(row, context, growth, steps) for row in (at - 1, at))
        return (1 - weight) * low + weight * high

    def _row_s(self, row: int, context: float, growth: float, steps: int) -> float:
        """The sum over steps whose context grows evenly, piece by piece between knots, on each of which it is a sum of
        an arithmetic series."""
        knots, seconds = self.contexts, self.seconds[row]
        last = len(knots) - 2
        total, done = 0.0, 0
        while done < steps:
            here = context + growth * done
            piece = min(max(bisect_right(knots, here) - 1, 0), last)
            count = steps - done
            if piece < last and growth > 0:
                count = min(count, max(1, math.ceil((knots[piece + 1] - here) / growth)))
            slope = (seconds[piece + 1] - seconds[piece]) / (knots[piece + 1] - knots[piece])
            first = seconds[piece] + slope * (here - knots[piece])
            total += count * (first + slope * growth * (count - 1) / 2)
            done += count
        return total


@dataclass(frozen=True, slots=True)
class PassGrid:
    """Device seconds of passes over equal prompts, by each one's new tokens and context and their number (N, C, R)."""

    tokens: tuple[float, ...]
    contexts: tuple[float, ...]
    requests: tuple[float, ...]
    seconds_NCR: tuple[tuple[tuple[float, ...], ...], ...] = field(repr=False)

    def pass_s(self, tokens: float, context: float, requests: float) -> float:
        """Seconds of one pass."""
        total = 0.0
        along_requests = _ends(self.requests, requests)
        along_contexts = _ends(self.contexts, context)
        for at_token, token_share in _ends(self.tokens, tokens):
            for at_context, context_share in along_contexts:
                row = self.seconds_NCR[at_token][at_context]
                for at_request, request_share in along_requests:
                    total += token_share * context_share * request_share * row[at_request]
        return total


@dataclass(frozen=True, slots=True)
class PrefillTable:
    """Passes of prompts: those in which a request is longer than `topk` tokens afterwards, and those in which none is,
    which stacks compute densely. short: None where there is no such difference."""

    long: PassGrid
    short: PassGrid | None
    topk: int

    def pass_s(self, prompts: Sequence[tuple[int, int]], ranks: int = 1) -> float:
        """Seconds of one pass over prompts, each of so many new tokens after so many rows, dealt to attention-DP ranks.

        It is priced as equal prompts of which the busiest rank has as many tokens and requests, and all ranks together
        as many tokens, as of these.
        """
        busiest = _busiest(prompts, ranks)
        tokens, longest = sum(new for new, _ in prompts), max(new + rows for new, rows in prompts)
        own = sum(new for new, _ in busiest)
        context = sum(new * rows for new, rows in busiest) / own
        grid = self.long if self.short is None or longest > self.topk else self.short
        return grid.pass_s(own / len(busiest), context, len(busiest) * tokens / own)


def _busiest(prompts: Sequence[tuple[int, int]], ranks: int) -> Sequence[tuple[int, int]]:
    """What the rank with most tokens gets, if the longest prompts go to the least busy ranks first."""
    if ranks == 1:
        return prompts
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(min(ranks, len(prompts)))]
    by_tokens = [(0, rank) for rank in range(len(dealt))]
    for prompt in sorted(prompts, reverse=True):
        tokens, rank = by_tokens[0]
        dealt[rank].append(prompt)
        heapq.heapreplace(by_tokens, (tokens + prompt[0], rank))
    return dealt[max(by_tokens)[1]]


def _ends(knots: Sequence[float], value: float) -> tuple[tuple[int, float], ...]:
    """The two knots beside a value, or nearest to it, and their shares in a straight line."""
    if len(knots) == 1:
        return ((0, 1.0),)
    at = min(max(bisect_right(knots, value) - 1, 0), len(knots) - 2)
    weight = (value - knots[at]) / (knots[at + 1] - knots[at])
    return (at, 1 - weight), (at + 1, weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSteps:
    """Passes of a stack: the device's time and the host's."""

    decode: DecodeTable
    prefill: PrefillTable
    setup: Setup
    serving: ServingCost
    system: ServingSystem
    origin: Origin

    def decode_s(self, requests: int, context: float, growth: float, steps: int) -> float:
        """Seconds of that many decode steps. Op by op, the host may take longer than the device."""
        device_s = self.decode.sum_s(requests, context, growth, steps)
        if requests > self.decode.graphs:
            device_s = max(device_s, steps * self.floor_s(requests))
        return device_s + steps * self.system.host_s_per_decode_step

    def prefill_s(self, prompts: Sequence[tuple[int, int]]) -> float:
        """Seconds of a prompt's pass, with the part of the host's time in which decodes wait."""
        device_s = self.serving.prefill_factor * self.prefill.pass_s(prompts, self.setup.mesh.dp.size)
        stall_s = self.serving.host_prefill_stall_share * self.system.host_s_per_prefill
        return max(device_s, self.floor_s(len(prompts))) + stall_s

    def floor_s(self, requests: int) -> float:
        """What the host needs to launch a pass over so many requests op by op."""
        return float(launch_s(self.setup, self.system.prefill_floor_s_per_layer, micro_batches(self.setup, requests)))

    @property
    def delay_s(self) -> float:
        """The part of the host's time that passes before a request is in the queue."""
        return (1 - self.serving.host_prefill_stall_share) * self.system.host_s_per_prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How far tables reach: tokens of the longest request and of the longest prompt's rows, requests at a time."""

    longest_tokens: int
    requests: int
    chunk_tokens: int


def without_host(deployment: Deployment) -> Deployment:
    """The same with a host that takes no time: serving has a figure of its own for it."""
    no_time = {"prefill": 0.0, "decode": 0.0}
    backend = replace(deployment.pricing.backend, host_s_per_step=no_time, prefill_floor_s_per_layer=0.0)
    return replace(deployment, pricing=replace(deployment.pricing, backend=backend))


def decode_table(
    deployment: Deployment, extent: Extent, graph_batches: Sequence[int]
) -> tuple[DecodeTable, Origin, bool]:
    """Cast decode steps of every batch that has a graph, up to those at hand, and of larger ones.

    With the table come its origin and whether its largest step is beyond the sizes that kernels were fitted on.
    """
    ranks = deployment.setup.mesh.dp.size
    most = -(-extent.requests // ranks)
    sizes = [batch for batch in graph_batches if batch <= most]
    if len(sizes) < len(graph_batches) and (not sizes or sizes[-1] < most):
        sizes.append(graph_batches[len(sizes)])
    graphs = sizes[-1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    contexts = _knots(extent.longest_tokens, CONTEXT_KNOTS, deployment.setup.topk_limit)
    query = 1 + deployment.setup.mtp.num_mtp_tokens
    count_RC, context_RC = (grid.ravel() for grid in np.meshgrid(np.array(sizes) * ranks, contexts, indexing="ij"))
    result = cast_batch(without_host(deployment), [RequestClass(count_RC, context_RC, query)])
    seconds_RC = np.broadcast_to(result.latency_s, count_RC.shape).reshape(len(sizes), len(contexts))
    rows = tuple(tuple(row) for row in seconds_RC.tolist())
    table = DecodeTable(tuple(size * ranks for size in sizes), tuple(contexts.tolist()), rows, graphs * ranks)
    return table, result.origin, _is_beyond(result, -1)


def prefill_table(deployment: Deployment, extent: Extent) -> tuple[PrefillTable, Origin, bool]:
    """Cast passes of up to a whole chunk over prompts that are all alike; returns what `decode_table` does, of a whole
    chunk after the longest context."""
    chunk, topk = extent.chunk_tokens, deployment.setup.topk_limit
    tokens, requests = _spaced(chunk), _spaced(min(extent.requests, chunk))
    contexts = _knots(extent.longest_tokens, CONTEXT_KNOTS, topk)
    if topk is None:
        parts = [_Passes(chunk, tokens, contexts, requests)]
    else:
        # Each grid is filled beyond its side of topk with the times at the edge of that side.
        dense_tokens = np.union1d(tokens[tokens < topk], min(topk, chunk))
        parts = [
            _Passes(chunk, dense_tokens, np.linspace(0, topk, CONTEXT_KNOTS), requests, most_end=topk),
            _Passes(chunk, tokens, contexts, requests, least_end=topk + 1),
        ]
    lengths = [np.concatenate([part.classes_3X[axis] for part in parts]) for axis in range(3)]
    result = cast_batch(without_host(deployment), [RequestClass(*lengths)])
    ends = np.cumsum([part.classes_3X.shape[1] for part in parts])
    seconds = np.split(np.broadcast_to(result.latency_s, ends[-1]), ends[:-1])
    *short, long = (part.grid(own_X) for part, own_X in zip(parts, seconds, strict=True))
    table = PrefillTable(long=long, short=short[0] if short else None, topk=topk or 0)
    return table, result.origin, _is_beyond(result, -1)


class _Passes:
    """Passes to cast for a grid, whose requests end with at least and at most so many tokens: of these, arrays of
    requests, context and new tokens. The last one is a whole chunk of one request after the longest context."""

    def __init__(
        self, chunk: int, tokens: Array, contexts: Array, requests: Array, *,
        least_end: float = 0, most_end: float = math.inf,
    ) -> None:  # fmt: skip
        self._knots = tokens, contexts, requests
        axes = np.meshgrid(requests[::-1], tokens, contexts, indexing="ij")
        requests_X, tokens_X, context_X = (axis.ravel() for axis in axes)
        context_X = np.clip(context_X, least_end - tokens_X, most_end - tokens_X)
        self._near_X = tokens_X * requests_X <= MOST_BEYOND * chunk
        self.classes_3X = np.stack([requests_X, context_X, tokens_X])[:, self._near_X]

    def grid(self, seconds: Array) -> PassGrid:
        """The grid, from the seconds of these passes."""
        tokens, contexts, requests = self._knots
        seconds_X = np.full(len(self._near_X), np.nan)
        seconds_X[self._near_X] = seconds
        seconds_NCR = np.moveaxis(seconds_X.reshape(len(requests), len(tokens), len(contexts))[::-1], 0, 2).tolist()
        return PassGrid(
            tokens=tuple(tokens.tolist()),
            contexts=tuple(contexts.tolist()),
            requests=tuple(requests.tolist()),
            seconds_NCR=tuple(tuple(tuple(row) for row in plane) for plane in seconds_NCR),
        )


def _is_beyond(result: Cast, place: int) -> bool:
    """Whether one of the passes cast is beyond the sizes that kernels were fitted on."""
    beyond = any_extrapolated(result.prices)
    return bool(beyond[place]) if isinstance(beyond, np.ndarray) else beyond


def _spaced(most: float) -> Array:
    """Whole numbers from 1, each about KNOT_RATIO times the one before."""
    count = 1 + math.ceil(math.log(most) / math.log(KNOT_RATIO))
    return np.unique(np.round(np.geomspace(1, most, count)))


def _knots(most: int, count: int, bend: int | None) -> Array:
    """0 and lengths up to `most`, closer where they are short, with the one from which attention costs no more."""
    knots = np.concatenate([[0.0], np.geomspace(min(256, most), most, count - 1)])
    if bend is not None and bend < most:
        knots = np.append(knots, float(bend))
    return np.unique(np.round(knots))
