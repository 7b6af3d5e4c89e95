"""Requests of a step: their lengths, the prefix cache, how they are dealt to ranks; and accepted drafts."""

from collections import Counter
from fractions import Fraction
from math import ceil, floor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.errors import CastoffError
from castoff.spec.scenario import (
    Compilation,
    Mtp,
    Parallel,
    Quant,
    RequestClass,
    Scenario,
    Workload,
    check_types,
    deal_to_rank,
    request_classes,
)

NO_MTP = Mtp()


def classes_of(mtp: Mtp = NO_MTP, **workload: Any) -> tuple[RequestClass, ...]:
    return request_classes(Workload(**workload), mtp)


def refusal(mtp: Mtp = NO_MTP, **workload: Any) -> str:
    with pytest.raises(CastoffError) as caught:
        request_classes(Workload(**workload), mtp)
    return str(caught.value)


def expanded(classes: tuple[RequestClass, ...]) -> list[tuple[int, int]]:
    """(context, query) of every single request, in order."""
    return [(int(entry.context), int(entry.query)) for entry in classes for _ in range(int(entry.count))]


lengths = st.tuples(st.integers(0, 300), st.integers(1, 60))
ragged = st.lists(lengths, min_size=1, max_size=40)


class TestMode:
    @pytest.mark.parametrize(
        ("workload", "mode"),
        [
            (Workload(), "decode"),
            (Workload(context_length=100), "decode"),
            (Workload(query_length=1), "prefill"),
            (Workload(query_length=100, decode=True), "decode"),
        ],
    )
    def test_a_step_without_a_query_length_is_decode(self, workload: Workload, mode: str) -> None:
        assert workload.mode == mode

    @pytest.mark.parametrize("drafts", [0, 1, 3])
    def test_decode_verifies_its_drafts(self, drafts: int) -> None:
        mtp = Mtp(num_mtp_tokens=drafts)
        assert classes_of(mtp, num_queries=5, context_length=70) == (RequestClass(5, 70, 1 + drafts),)
        assert classes_of(mtp, decode=True, query_length=6) == (RequestClass(1, 0, 6),)


class TestRagged:
    @pytest.mark.property
    @given(ragged)
    def test_classes_hold_the_requests_heaviest_first(self, requests: list[tuple[int, int]]) -> None:
        contexts, queries = [context for context, _ in requests], [query for _, query in requests]
        classes = classes_of(num_queries=len(requests), context_length=contexts, query_length=queries)
        assert Counter(expanded(classes)) == Counter(requests)
        # Most new tokens first, then the longest.
        weights = [(int(entry.query), int(entry.context)) for entry in classes]
        assert weights == sorted(weights, reverse=True)
        assert len({(entry.context, entry.query) for entry in classes}) == len(classes)

    @pytest.mark.property
    @given(ragged)
    def test_the_order_of_requests_means_nothing(self, requests: list[tuple[int, int]]) -> None:
        def classes(order: list[tuple[int, int]]) -> tuple[RequestClass, ...]:
            return classes_of(
                context_length=tuple(context for context, _ in order), query_length=tuple(query for _, query in order)
            )

        assert classes(requests) == classes(requests[::-1])

    def test_one_of_the_two_lengths_may_be_common(self) -> None:
        assert classes_of(context_length=[5, 9, 5], query_length=2) == (RequestClass(1, 9, 2), RequestClass(2, 5, 2))
        assert classes_of(context_length=3, query_length=[1, 8]) == (RequestClass(1, 3, 8), RequestClass(1, 3, 1))
        assert classes_of(context_length=[5, 9]) == (RequestClass(1, 9, 1), RequestClass(1, 5, 1))

    def test_equal_requests_are_one_class(self) -> None:
        assert classes_of(context_length=[7] * 10, query_length=3) == classes_of(
            num_queries=10, context_length=7, query_length=3
        )


class TestErrors:
    @pytest.mark.parametrize(
        ("workload", "named"),
        [
            ({"context_length": -1}, ["--context-length", "at least 0", "-1"]),
            ({"query_length": 0}, ["--query-length", "at least 1", "0"]),
            ({"query_length": -4}, ["--query-length", "at least 1", "-4"]),
            ({"num_queries": 0}, ["--num-queries", "at least 1", "0"]),
            ({"num_queries": 2**41}, ["--num-queries", f"at most {2**40}"]),
            ({"context_length": 10**400, "query_length": 1}, ["--context-length", "at most"]),
            ({"context_length": np.array([0, 2**50])}, ["--context-length", f"at most {2**40}"]),
            ({"num_queries": 1.5}, ["--num-queries", "whole", "1.5"]),
            ({"context_length": 0.5}, ["--context-length", "whole", "0.5"]),
            ({"context_length": float("nan")}, ["--context-length", "whole", "nan"]),
            ({"query_length": "many"}, ["--query-length"]),
            ({"context_length": [4, -1]}, ["--context-length", "at least 0", "-1"]),
            ({"context_length": 4, "query_length": [1, 0]}, ["--query-length", "at least 1", "0"]),
            ({"context_length": np.array([4, -1])}, ["--context-length", "at least 0", "-1"]),
            ({"context_length": np.array([])}, ["--context-length", "no value"]),
            (
                {"context_length": [1, 2], "query_length": [1, 2, 3]},
                ["--context-length", "2 values", "--query-length", "3 values"],
            ),
            ({"num_queries": 3, "context_length": [1, 2]}, ["--num-queries 3", "2 values"]),
            ({"context_length": [1, 2], "query_length": np.array([1, 2])}, ["one length per request", "arrays"]),
            ({"query_length": 8, "prefix_cache_hit_rate": 1.0}, ["--prefix-cache-hit-rate", "[0, 1)", "1.0"]),
            ({"query_length": 8, "prefix_cache_hit_rate": -0.1}, ["--prefix-cache-hit-rate", "[0, 1)", "-0.1"]),
            ({"query_length": 8, "prefix_cache_hit_rate": float("nan")}, ["--prefix-cache-hit-rate", "nan"]),
            ({"prefix_cache_hit_rate": 0.5}, ["--prefix-cache-hit-rate", "prefill"]),
        ],
    )
    def test_message_names_the_flag_and_what_it_takes(self, workload: dict[str, Any], named: list[str]) -> None:
        message = refusal(**workload)
        for text in named:
            assert text in message, message

    def test_decode_needs_a_token_per_draft(self) -> None:
        message = refusal(Mtp(num_mtp_tokens=3), decode=True, query_length=3)
        assert "--num-mtp-tokens 3" in message
        assert "at least 4" in message

    def test_an_infinite_length_is_refused(self) -> None:
        assert "--context-length" in refusal(context_length=float("inf"), query_length=1)

    def test_a_batch_of_no_requests_is_refused(self) -> None:
        assert "--context-length" in refusal(context_length=[], query_length=1)


class TestArrays:
    def test_lengths_may_be_arrays_of_scenarios(self) -> None:
        contexts = np.array([0, 10, 99])
        (entry,) = classes_of(num_queries=np.array([1, 2, 3]), context_length=contexts, query_length=4)
        assert entry.context is contexts
        assert entry.query == 4

    def test_decode_checks_every_entry(self) -> None:
        assert "at least 3" in refusal(Mtp(num_mtp_tokens=2), decode=True, query_length=np.array([3, 2]))


thousandths = st.integers(0, 999) | st.integers(0, 99).map(lambda n: 10 * n)


class TestPrefixCache:
    @pytest.mark.property
    # Multiples of 100 make whole tokens out of rates that floating point does not hold exactly: 0.29 of 100 is 29.
    @given(
        query=st.integers(1, 5000) | st.integers(1, 50).map(lambda n: 100 * n),
        context=st.integers(0, 5000),
        thousandths=thousandths,
    )
    def test_against_exact_arithmetic(self, query: int, context: int, thousandths: int) -> None:
        (entry,) = classes_of(context_length=context, query_length=query, prefix_cache_hit_rate=thousandths / 1000)
        # Whole tokens only, and at least one is computed.
        cached = min(floor(Fraction(thousandths, 1000) * query), query - 1)
        assert entry == RequestClass(1, context + cached, query - cached)

    def test_arrays(self) -> None:
        queries = np.array([1, 10, 4096])
        (entry,) = classes_of(query_length=queries, context_length=5, prefix_cache_hit_rate=0.9)
        assert np.asarray(entry.query).tolist() == [1, 1, 410]
        assert np.asarray(entry.context).tolist() == [5, 14, 3691]

    @pytest.mark.parametrize(("query", "rate", "cached"), [(100, 0.29, 29), (10, 0.7, 7), (10, 0.69, 6), (1, 0.99, 0)])
    def test_whole_tokens(self, query: int, rate: float, cached: int) -> None:
        (entry,) = classes_of(query_length=query, prefix_cache_hit_rate=rate)
        assert entry == RequestClass(1, cached, query - cached)

    @pytest.mark.property
    @given(ragged, st.sampled_from([0.25, 0.5, 0.9]))
    def test_every_request_of_a_ragged_batch_keeps_its_length(
        self, requests: list[tuple[int, int]], rate: float
    ) -> None:
        shape: dict[str, Any] = {
            "context_length": [context for context, _ in requests],
            "query_length": [query for _, query in requests],
        }
        cold, warm = classes_of(**shape), classes_of(**shape, prefix_cache_hit_rate=rate)
        assert [sum(pair) for pair in expanded(warm)] == [sum(pair) for pair in expanded(cold)]
        assert all(entry.query >= 1 for entry in warm)


def new_tokens(requests: list[tuple[int, int]]) -> list[int]:
    """Query lengths, the longest first."""
    return sorted((query for _, query in requests), reverse=True)


class TestDealing:
    @pytest.mark.property
    @given(ragged, st.integers(1, 9))
    def test_rank_0_gets_its_turn_of_a_round_robin(self, requests: list[tuple[int, int]], ranks: int) -> None:
        classes = classes_of(
            context_length=[context for context, _ in requests], query_length=[query for _, query in requests]
        )
        assert Counter(expanded(deal_to_rank(classes, ranks))) == Counter(expanded(classes)[::ranks])

    @pytest.mark.property
    @given(ragged, st.integers(1, 9))
    def test_no_rank_has_more_or_heavier_requests(self, requests: list[tuple[int, int]], ranks: int) -> None:
        classes = classes_of(
            context_length=[context for context, _ in requests], query_length=[query for _, query in requests]
        )
        order = expanded(classes)
        dealt = [order[rank::ranks] for rank in range(ranks)]
        # Dealing loses and invents nothing.
        assert Counter(request for hand in dealt for request in hand) == Counter(requests)
        first = new_tokens(expanded(deal_to_rank(classes, ranks)))
        for hand in map(new_tokens, dealt):
            assert len(first) >= len(hand)
            assert all(mine >= theirs for mine, theirs in zip(first, hand, strict=False))
            assert sum(first) >= sum(hand)

    @pytest.mark.property
    @given(ragged, st.integers(1, 9))
    def test_dealt_longest_first_no_rank_caches_more(self, requests: list[tuple[int, int]], ranks: int) -> None:
        """The order is the caller's: the rank with the fullest cache is the first of another deal."""
        classes = classes_of(
            context_length=[context for context, _ in requests], query_length=[query for _, query in requests]
        )
        classes = tuple(sorted(classes, key=lambda entry: -int(entry.context + entry.query)))
        order = expanded(classes)
        cached = sum(map(sum, expanded(deal_to_rank(classes, ranks))))
        assert cached == max(sum(map(sum, order[rank::ranks])) for rank in range(ranks))

    def test_a_long_context_does_not_outweigh_new_tokens(self) -> None:
        classes = classes_of(context_length=[60_000, 0], query_length=[1, 4096])
        assert deal_to_rank(classes, 2) == (RequestClass(1, 0, 4096),)

    @pytest.mark.property
    @given(count=st.integers(1, 10_000), ranks=st.integers(1, 64))
    def test_equal_requests(self, count: int, ranks: int) -> None:
        classes = classes_of(num_queries=count, context_length=5, query_length=2)
        assert deal_to_rank(classes, ranks) == (RequestClass(ceil(count / ranks), 5, 2),)

    def test_arrays(self) -> None:
        (entry,) = deal_to_rank([RequestClass(np.array([1, 16, 17]), 5, 2)], 16)
        assert np.asarray(entry.count).tolist() == [1, 1, 2]

    @pytest.mark.property
    @given(ragged)
    def test_one_rank_gets_everything(self, requests: list[tuple[int, int]]) -> None:
        classes = classes_of(
            context_length=[context for context, _ in requests], query_length=[query for _, query in requests]
        )
        assert deal_to_rank(classes, 1) == classes

    @pytest.mark.property
    @given(ragged, st.integers(1, 5), st.integers(1, 5))
    def test_dealing_to_ranks_and_then_to_stages_is_dealing_to_both(
        self, requests: list[tuple[int, int]], ranks: int, stages: int
    ) -> None:
        classes = classes_of(
            context_length=[context for context, _ in requests], query_length=[query for _, query in requests]
        )
        assert deal_to_rank(deal_to_rank(classes, ranks), stages) == deal_to_rank(classes, ranks * stages)


class TestMtp:
    def test_no_drafts_gain_one_token(self) -> None:
        assert Mtp().tokens_per_step == 1
        assert not Mtp().acceptance_is_assumed

    def test_three_drafts_are_assumed_to_gain_2_7(self) -> None:
        mtp = Mtp(num_mtp_tokens=3)
        # The assumed chance has four digits.
        assert mtp.tokens_per_step == pytest.approx(2.7, abs=2e-3)
        assert mtp.acceptance_is_assumed

    def test_a_given_length_is_taken(self) -> None:
        mtp = Mtp(num_mtp_tokens=3, mtp_acceptance_length=3.1)
        assert mtp.tokens_per_step == 3.1
        assert not mtp.acceptance_is_assumed

    @pytest.mark.property
    @given(st.integers(0, 16))
    def test_more_drafts_gain_more_but_less_each(self, drafts: int) -> None:
        gains = [Mtp(num_mtp_tokens=n).tokens_per_step for n in (drafts, drafts + 1, drafts + 2)]
        assert gains[0] < gains[1] < gains[2]
        assert gains[2] - gains[1] < gains[1] - gains[0] <= 1
        assert 1 <= gains[0] <= 1 + drafts


class TestCompilation:
    @pytest.mark.parametrize(
        ("compiled", "asked", "streams"),
        [(False, None, False), (True, None, True), (True, False, False), (False, True, True)],
    )
    def test_streams_come_with_compilation_unless_said_otherwise(
        self, compiled: bool, asked: bool | None, streams: bool
    ) -> None:
        assert Compilation(compile=compiled, enable_multistream=asked).multistream == streams


class TestTypes:
    @pytest.mark.parametrize(
        ("scenario", "name"),
        [
            (Scenario(quant=Quant(quantize_linear_action="W8A8")), "quantize_linear_action"),  # type: ignore[arg-type]
            (Scenario(quant=Quant(quantize_attention_action="fp8")), "quantize_attention_action"),  # type: ignore[arg-type]
            (Scenario(parallel=Parallel(tp_size=None)), "tp_size"),  # type: ignore[arg-type]
            (Scenario(parallel=Parallel(tp_size=True)), "tp_size"),
            (Scenario(parallel=Parallel(word_embedding_tp="diag")), "word_embedding_tp"),  # type: ignore[arg-type]
            (Scenario(mtp=Mtp(num_mtp_tokens="3")), "num_mtp_tokens"),  # type: ignore[arg-type]
            (Scenario(mtp=Mtp(mtp_acceptance_length="2")), "mtp_acceptance_length"),  # type: ignore[arg-type]
            (Scenario(compilation=Compilation(compile="no")), "compile"),  # type: ignore[arg-type]
            (Scenario(reserved_memory_gb="1"), "reserved_memory_gb"),  # type: ignore[arg-type]
            (Scenario(backend=3), "backend"),  # type: ignore[arg-type]
            (Workload(), "Scenario"),
        ],
    )
    def test_wrong_types_are_refused_by_name(self, scenario: Scenario, name: str) -> None:
        with pytest.raises(CastoffError, match=name):
            check_types(scenario)

    def test_defaults_pass(self) -> None:
        check_types(Scenario())
