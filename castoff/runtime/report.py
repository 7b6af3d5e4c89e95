"""What a run produced: tokens, times, counts, bytes."""

from __future__ import annotations

import statistics as stats
from dataclasses import dataclass
from typing import Any

from castoff.offload.report import OffloadReport
from castoff.runtime.op_times import OpTime
from castoff.runtime.scheduler import Result, Statistics


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of weights and resident caches, and the most that the device (on CPU: the process) had in use."""

    weights_bytes: int
    cache_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class RunReport:
    """What came out.

    texts: None without a tokenizer. total_s: of all requests, loading aside. offload: None where all rows are on the
    device. ops: the longest in total first; empty where no op times were asked for. trace: the text of a Chrome trace,
    None where none was asked for. rank: of the process whose report this is; the tokens are the same on all, times and
    memory are its own.
    """

    results: list[Result]
    texts: list[str] | None
    statistics: Statistics
    total_s: float
    memory: Memory
    offload: OffloadReport | None = None
    ops: tuple[OpTime, ...] = ()
    trace: str | None = None
    rank: int = 0

    @property
    def ttft_s(self) -> float:
        """Mean time from the start of the run to a request's first token, waiting included."""
        return stats.fmean(result.first_token_s for result in self.results)

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None where no request got more than one."""
        spans = [
            (result.last_token_s - result.first_token_s) / (len(result.tokens) - 1)
            for result in self.results
            if len(result.tokens) > 1
        ]
        return stats.fmean(spans) if spans else None

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all requests over the time of the run."""
        return sum(len(result.tokens) for result in self.results) / self.total_s

    def _offload_json(self) -> dict[str, Any] | None:
        if self.offload is None:
            return None
        return {"sparse_steps": self.statistics.sparse_steps, **self.offload.as_json()}

    def as_json(self) -> dict[str, Any]:
        """The object that `castoff run --json` writes. Its keys are a contract."""
        return {
            "tokens": [result.tokens for result in self.results],
            "texts": self.texts,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "tokens_per_s": self.tokens_per_s,
            "acceptance_length": self.statistics.acceptance_length,
            "acceptance_rates": self.statistics.acceptance_rates,
            "decode_steps": self.statistics.decode_steps,
            "sparse_steps": self.statistics.sparse_steps,
            "shared_prompt_tokens": self.statistics.shared_prompt_tokens,
            "offload": self._offload_json(),
            "ops": [_op(op) for op in self.ops],
            "memory": {
                "weights_bytes": self.memory.weights_bytes,
                "cache_bytes": self.memory.cache_bytes,
                "peak_bytes": self.memory.peak_bytes,
            },
        }


def _op(op: OpTime) -> dict[str, Any]:
    return {
        "name": op.name,
        "phase": op.phase,
        "calls": op.calls,
        "total_s": op.total_s,
        "mean_s": op.mean_s,
        "origin": "measured",
    }
