"""What an instance did: the times of every request, and what they add up to."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from castoff.dims import Array
from castoff.spec.backend import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Times in seconds from the start, one entry per request in the order of the requests.

    queued_s: from the arrival until memory and a pass were found, the way through the server not counted.
    retractions: how often the request was sent back to the queue. capacity_bound: whether a request ever had to wait,
    or go back, for lack of cache memory. kv_peak_tokens: most cache rows in use.
    """

    prompt_tokens: Array = field(repr=False)
    output_tokens: Array = field(repr=False)
    arrival_s: Array = field(repr=False)
    queued_s: Array = field(repr=False)
    first_token_s: Array = field(repr=False)
    finish_s: Array = field(repr=False)
    retractions: Array = field(repr=False)
    decode_steps: int
    prefill_passes: int
    kv_peak_tokens: float
    capacity_bound: bool

    @property
    def ttft_s(self) -> Array:
        """From the arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Array:
        """From the first token to the last, per token after the first; NaN for requests of one token."""
        after = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.finish_s - self.first_token_s) / after


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures over all requests. tpot_*: None where every request has one token."""

    requests: int
    duration_s: float
    ttft_mean_s: float
    ttft_median_s: float
    ttft_p99_s: float
    tpot_mean_s: float | None
    tpot_median_s: float | None
    tpot_p99_s: float | None
    queue_mean_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    retractions: int
    capacity_bound: bool


def summary(served: Served) -> Summary:
    """The figures of all requests together."""
    duration_s = float(served.finish_s.max() - served.arrival_s.min())
    tpot = served.tpot_s[served.output_tokens > 1]
    return Summary(
        requests=len(served.finish_s),
        duration_s=duration_s,
        ttft_mean_s=float(served.ttft_s.mean()),
        ttft_median_s=float(np.median(served.ttft_s)),
        ttft_p99_s=float(np.quantile(served.ttft_s, 0.99)),
        tpot_mean_s=float(tpot.mean()) if len(tpot) else None,
        tpot_median_s=float(np.median(tpot)) if len(tpot) else None,
        tpot_p99_s=float(np.quantile(tpot, 0.99)) if len(tpot) else None,
        queue_mean_s=float(served.queued_s.mean()),
        requests_per_s=len(served.finish_s) / duration_s,
        prompt_tokens_per_s=float(served.prompt_tokens.sum()) / duration_s,
        output_tokens_per_s=float(served.output_tokens.sum()) / duration_s,
        retractions=int(served.retractions.sum()),
        capacity_bound=served.capacity_bound,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeResult:
    """One instance under load. kv_capacity_tokens: cache rows that fit, over all attention-DP ranks.

    origin: of the times, which are as good as their weakest part.
    """

    model: str
    device: str
    backend: str
    num_devices: int
    kv_capacity_tokens: int
    prefill_chunk_tokens: int
    origin: Origin
    summary: Summary
    served: Served = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def output_tokens_per_s_per_device(self) -> float:
        """Generated tokens per second and device."""
        return self.summary.output_tokens_per_s / self.num_devices
