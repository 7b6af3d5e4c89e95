"""Choosing the next token: greedy, or by temperature and top-p from a seed.

A draw depends on seed, request and position alone, so a request gets the same tokens whatever batch it runs in and
whether drafts are verified or not.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.ops.program import Tensor
from castoff.ops.tokens import sample

torch = lazy.load("torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    temperature: 0 takes the most likely token, ties to the lowest id. top_p: smallest set of tokens with this much
    probability is drawn from, in (0, 1]. seed: of every draw.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise CastoffError(f"--temperature must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise CastoffError(f"--top-p must be in (0, 1], got {self.top_p}")


def choose(logits_SV: Tensor, sampling: Sampling, request: int, position: int) -> list[int]:
    """Tokens after S consecutive tokens of a request, the first of which stands at `position`.

    Raises CastoffError for logits that are not finite.
    """
    # A NaN is the largest of its row, and so is an infinity.
    if not bool(logits_SV.amax(dim=-1).isfinite().all()):
        raise CastoffError(
            f"the logits of request {request} are not finite: the weights hold NaN or infinity, or numbers grew beyond "
            "--dtype; float32 reaches farthest, and bfloat16 farther than float16"
        )
    if sampling.temperature == 0:
        greedy: list[int] = sample(logits_SV).tolist()
        return greedy
    return [_draw(row, sampling, request, position + offset) for offset, row in enumerate(logits_SV)]


def _draw(logits_V: Tensor, sampling: Sampling, request: int, position: int) -> int:
    logits_V = logits_V.double()
    # The largest is 0 at any temperature, however small.
    probabilities = ((logits_V - logits_V.max()) / sampling.temperature).softmax(dim=-1)
    ordered, ids = probabilities.sort(descending=True, stable=True)
    # A token is kept while those before it hold less than top_p: the first always is.
    kept = ordered.cumsum(0) - ordered < sampling.top_p
    key = zlib.crc32(f"{sampling.seed} {request} {position}".encode())
    generator = torch.Generator().manual_seed(key)
    drawn = torch.multinomial((ordered * kept).cpu(), 1, generator=generator)
    return int(ids[drawn])
