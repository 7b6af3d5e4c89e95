"""Offload changes nothing: the same tokens and the same bits as with all rows on the device."""

from functools import cache

import pytest

from castoff.spec.offload import OffloadMode, PoolPolicy

torch = pytest.importorskip("torch")

from tests.offload.runs import INDEX_TOPK, KINDS, MODES, POOL, Case, Outcome, assert_equal, options_of, outcome  # noqa: E402


@cache
def resident(case: Case) -> Outcome:
    return outcome(case)


@pytest.mark.numerics
@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_mode_gives_the_bits_of_a_resident_cache(kind: str, drafts: int) -> None:
    """Prompts of index_topk, the pool, one more, and 8 pools; five requests in three slots, which end one by one."""
    case = Case(kind=kind, drafts=drafts)
    for mode in MODES:
        given = {"mtp_gather_reuse": False} if mode == "gather" else {}
        own = outcome(case, options_of(mode, **given))
        assert_equal(own, resident(case))
        assert own.report is not None
        assert own.report.link_bytes > 0, "something must have come over the link"
        if mode != "gather":
            assert own.report.hit_rate > 0, "something must have been in a pool"


@pytest.mark.numerics
@pytest.mark.parametrize("kind", KINDS)
def test_reusing_rows_in_drafts_changes_no_token(kind: str) -> None:
    case = Case(kind=kind, drafts=3)
    own = outcome(case, options_of("gather"))
    assert own.tokens == resident(case).tokens


@pytest.mark.numerics
@pytest.mark.parametrize("policy", ["fifo", "lru", "clock"])
@pytest.mark.parametrize(("pool_tokens", "ways"), [(4, 4), (7, 1), (16, 16), (512, 32)])
def test_every_pool_gives_them_too(policy: PoolPolicy, pool_tokens: int, ways: int) -> None:
    """Pools smaller than a step's needs, of one set, of one way, of more than the context."""
    case = Case(drafts=3, prompts=(POOL + 1, 3 * POOL), slots=2)
    own = outcome(case, options_of("direct", policy=policy, pool_tokens=pool_tokens, ways=ways))
    assert_equal(own, resident(case))
    assert own.report is not None
    staged = sum(group.staged_rows for group in own.report.groups)
    assert (staged > 0) == (pool_tokens < 512)
    if pool_tokens == 512:
        # Only first touches miss.
        tokens = sum(len(request.prompt) + request.max_new_tokens for request in case.requests)
        assert own.report.groups[0].unique_misses <= tokens


@pytest.mark.numerics
@pytest.mark.parametrize("pool_tokens", [4, 16])
def test_the_published_route_holds_with_small_pools(pool_tokens: int) -> None:
    case = Case(drafts=3, prompts=(POOL + 1, 3 * POOL), slots=2)
    assert_equal(outcome(case, options_of("serve_install", pool_tokens=pool_tokens)), resident(case))


@pytest.mark.numerics
@pytest.mark.parametrize(
    "options",
    [options_of("direct", prefetch=False), options_of("serve_install", install_stream=False)],
    ids=["no prefetch", "no install stream"],
)
def test_without_other_streams(options: object) -> None:
    case = Case(drafts=1, prompts=(INDEX_TOPK, 3 * POOL))
    assert_equal(outcome(case, options), resident(case))  # type: ignore[arg-type]


@pytest.mark.numerics
@pytest.mark.parametrize("attention", ["FP8", "INT8"])
@pytest.mark.parametrize("mode", MODES)
def test_quantised_rows(mode: OffloadMode, attention: str) -> None:
    case = Case(prompts=(INDEX_TOPK, 3 * POOL), attention=attention)  # type: ignore[arg-type]
    assert_equal(outcome(case, options_of(mode)), resident(case))
