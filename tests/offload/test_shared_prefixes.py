"""Requests whose prompts begin alike share cache blocks, on the device and in host memory."""

from dataclasses import replace

import pytest

from castoff.runtime.sampling import Sampling
from castoff.runtime.scheduler import Request, Scheduler
from castoff.spec.offload import OffloadMode

torch = pytest.importorskip("torch")

from tests.offload.runs import BLOCK_TOKENS, MODES, Case, engine_of, options_of  # noqa: E402

CASE = Case(drafts=2, prompts=(3 * BLOCK_TOKENS, 9), slots=3, new_tokens=8, dtype=torch.float64)


def requests() -> list[Request]:
    """Three prompts of one beginning, and one of its own; the first donor leaves before the last taker comes."""
    first, other = CASE.requests
    prompt = first.prompt
    return [
        Request(prompt, 3),
        Request((*prompt[: 2 * BLOCK_TOKENS + 3], *other.prompt), 12),
        other,
        Request((*prompt[: 2 * BLOCK_TOKENS], *other.prompt), 8),
        Request(prompt, 8),
    ]


def tokens(mode: OffloadMode, *, shares: bool) -> tuple[list[list[int]], int]:
    options = None if mode == "none" else options_of(mode)
    engine = engine_of(replace(CASE, prompts=(90,)), options)
    scheduler = Scheduler(engine, slots=3, chunk_tokens=32, sampling=Sampling(), shares_prefixes=shares)
    with torch.inference_mode():
        results = scheduler.run(requests())
    engine.close()
    assert engine.pool.free_blocks == engine.pool.num_blocks
    return [result.tokens for result in results], scheduler.statistics.shared_prompt_tokens


@pytest.mark.numerics
@pytest.mark.parametrize("mode", ["none", *MODES])
def test_the_tokens_stay_the_same_and_blocks_are_taken_over(mode: OffloadMode) -> None:
    own, computed_alone = tokens(mode, shares=False)
    shared, taken_over = tokens(mode, shares=True)
    assert shared == own
    assert computed_alone == 0
    # Whole blocks before the last token that is the same: two of the second request from the first. The fourth, whose
    # own begins to differ at the end of the second block, takes one from the second; the fifth two, from whom is there.
    assert taken_over == 5 * BLOCK_TOKENS
