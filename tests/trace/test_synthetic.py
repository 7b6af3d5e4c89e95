"""Drawn traces: the same for a seed everywhere, and only what an indexer could have selected."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from castoff.errors import CastoffError
from castoff.spec.model import load_model
from castoff.trace.draws import bits_of, exponential, normal, uniform
from castoff.trace.reader import open_trace
from castoff.trace.steps import Int32Array
from castoff.trace.summary import summarize
from castoff.trace.synthetic import Decoding, Drawn, SelectionModel, generate_trace, select

SMALL = SelectionModel(sinks=1, window=3, topic_tokens=8)
DRAFTS = Decoding(context_length=200, steps=6, num_mtp_tokens=2, seed=5)


def drawn(
    selection: SelectionModel, decoding: Decoding, index_topk: int = 16, *, request: int = 0, group: int = 0
) -> list[Drawn]:
    return list(select(selection, decoding, index_topk, request=request, group=group))


def ids_of(*steps: Drawn) -> list[list[list[int]]]:
    return [step.ids_SK.tolist() for step in steps]


@pytest.mark.golden
def test_a_seed_gives_the_same_ids_everywhere() -> None:
    first, *_, last = drawn(SMALL, DRAFTS)
    assert [(each.committed, each.accepted) for each in (first, last)] == snapshot([(200, 1), (212, 3)])
    assert last.ids_SK.tolist() == snapshot(
        [
            [0, 210, 211, 212, 102, 184, 180, 107, 188, 30, 67, 181, 136, 10, 29, 7],
            [0, 211, 212, 213, 102, 184, 136, 180, 199, 107, 40, 181, 192, 182, 120, 13],
            [0, 212, 213, 214, 184, 180, 102, 192, 140, 50, 107, 29, 156, 190, 199, 195],
        ]
    )


@pytest.mark.golden
def test_numbers_are_the_same_everywhere() -> None:
    assert uniform(bits_of(1, 2), 2).tolist() == snapshot([0.44841514333227195, 0.4308819875443376])
    assert exponential(bits_of(1, 2), 2).tolist() == snapshot([0.8020358164269333, 0.841921037173412])
    assert normal(bits_of(1, 2), 2).tolist() == snapshot([0.27702873945236206, 0.4288369119167328])


@pytest.mark.numerics
def test_distributions() -> None:
    count = 200_000
    uniform_X, exponential_X, normal_X = (
        draw(bits_of(3), count).astype(np.float64) for draw in (uniform, exponential, normal)
    )
    np.testing.assert_allclose(exponential_X, -np.log(uniform_X), rtol=1e-14, atol=1e-15)
    assert 0 < uniform_X.min() < 1e-4 < 1 - 1e-4 < uniform_X.max() < 1
    for mean, deviation, values_X in ((0.5, 12**-0.5, uniform_X), (1, 1, exponential_X), (0, 1, normal_X)):
        assert values_X.mean() == pytest.approx(mean, abs=0.01)
        assert values_X.std() == pytest.approx(deviation, abs=0.01)
    # A normal distribution has 4.55 % beyond two deviations.
    assert (np.abs(normal_X) > 2).mean() == pytest.approx(0.0455, abs=0.004)


models = st.builds(
    SelectionModel,
    sinks=st.integers(0, 6),
    window=st.integers(0, 9),
    tail=st.floats(0.1, 4),
    noise=st.floats(0, 1000),
    noise_coefficient=st.floats(0, 1),
    query_coefficient=st.floats(0, 1),
    topic_scale=st.one_of(st.just(0.0), st.floats(0, 1000)),
    topic_tokens=st.integers(1, 50),
    topic_turnover=st.floats(0, 1),
    group_spread=st.floats(0, 1),
)
decodings = st.builds(
    Decoding,
    context_length=st.integers(0, 90),
    steps=st.integers(1, 5),
    num_mtp_tokens=st.integers(0, 4),
    draft_acceptance=st.floats(0, 1),
    seed=st.integers(0, 2**31 - 1),
)


@pytest.mark.property
@settings(max_examples=60, deadline=None)
@given(models, decodings, st.integers(15, 40), st.integers(0, 30))
def test_what_every_query_selects(selection: SelectionModel, decoding: Decoding, index_topk: int, group: int) -> None:
    committed = decoding.context_length
    for step in drawn(selection, decoding, index_topk, group=group):
        assert step.committed == committed
        assert 1 <= step.accepted <= decoding.query_length
        committed += step.accepted
        assert step.ids_SK.shape == (decoding.query_length, index_topk)
        for query, ids_K in enumerate(step.ids_SK):
            visible = step.committed + query + 1
            ids, nothing = np.split(ids_K, [min(index_topk, visible)])
            assert (nothing == -1).all()
            assert len(set(ids.tolist())) == len(ids)
            assert ((ids >= 0) & (ids < visible)).all()
            always = {*range(min(selection.sinks, visible)), *range(max(visible - selection.window, 0), visible)}
            assert set(ids[: len(always)].tolist()) == always


def test_the_best_come_first() -> None:
    """What stays alone: the order of tokens is the same for all queries."""
    steps = drawn(replace(SMALL, noise=0.0, topic_scale=0.0), replace(DRAFTS, draft_acceptance=1.0))
    ranked = [ids_K[4:].tolist() for step in steps for ids_K in step.ids_SK]
    # Of the tokens before the first step no window takes any away in later ones.
    old = [[token for token in ids if token < DRAFTS.context_length - 3] for ids in ranked]
    for earlier, later in pairwise(old):
        assert later == earlier[: len(later)]
    assert len(old[0]) == 12


def test_what_correlations_mean() -> None:
    still = replace(SMALL, noise_coefficient=1.0, topic_scale=0.0, window=0)
    alike = replace(SMALL, query_coefficient=1.0, window=0)
    decoding = replace(DRAFTS, context_length=2000)
    first, *_, last = drawn(still, decoding, 100)
    assert overlap(first.ids_SK, last.ids_SK) > 0.95
    assert all(overlap(step.ids_SK[:1], step.ids_SK[2:]) > 0.95 for step in drawn(alike, decoding, 100))
    shares = [
        np.mean([overlap(step.ids_SK[:1], step.ids_SK[1:2]) for step in drawn(each, decoding, 100)])
        for each in (replace(SMALL, query_coefficient=chance) for chance in (0.0, 0.5, 0.9))
    ]
    assert shares == sorted(shares)


def overlap(some_SK: Int32Array, others_SK: Int32Array) -> float:
    pairs = zip(some_SK, others_SK, strict=True)
    return float(np.mean([len(np.intersect1d(some_K, others_K)) / len(some_K) for some_K, others_K in pairs]))


def test_topics_are_selected_together() -> None:
    topical = SelectionModel(sinks=0, window=0, noise=0.1, topic_scale=20.0, topic_tokens=50)
    (step,) = drawn(topical, Decoding(context_length=1999, steps=1), 100)
    topics, counts = np.unique(step.ids_SK // 50, return_counts=True)
    assert len(topics) <= 4
    assert counts.max() == 50


def test_fewer_steps_and_other_requests() -> None:
    whole = drawn(SMALL, DRAFTS)
    assert ids_of(*drawn(SMALL, replace(DRAFTS, steps=2))) == ids_of(*whole[:2])
    others = (drawn(SMALL, DRAFTS, request=1), drawn(SMALL, DRAFTS, group=1), drawn(SMALL, replace(DRAFTS, seed=6)))
    assert all(ids_of(*other) != ids_of(*whole) for other in others)


def test_drafts_are_kept_as_often_as_assumed() -> None:
    steps = drawn(SMALL, Decoding(context_length=0, steps=900, num_mtp_tokens=3))
    assert np.mean([step.accepted for step in steps]) == pytest.approx(2.7, abs=0.1)
    for chance, kept in ((0.0, 1), (1.0, 4)):
        decoding = Decoding(context_length=20, steps=9, num_mtp_tokens=3, draft_acceptance=chance)
        assert {step.accepted for step in drawn(SMALL, decoding)} == {kept}


def test_groups_lie_evenly_around_the_noise() -> None:
    deviations = np.array([SelectionModel(noise=2.0, group_spread=0.25).deviation(group) for group in range(21)])
    assert deviations.mean() == pytest.approx(2.0, abs=0.05)
    assert 1.5 <= deviations.min() < 1.6 < 2.4 < deviations.max() <= 2.5
    assert np.diff(np.sort(deviations)).max() < 0.1


def test_a_trace(tmp_path: Path) -> None:
    told: list[int] = []
    decoding = Decoding(context_length=3000, steps=3, requests=2, num_mtp_tokens=1)
    model = load_model("zai-org/GLM-5.2")
    trace = generate_trace(tmp_path / "x.topk", model, SelectionModel(), decoding, progress=told.append)
    assert told == [1, 2, 3]
    assert trace.header.ids_shape == (21, 2, 2, 2048)
    summary = summarize(trace)
    assert (summary.steps, summary.requests, summary.min_length) == (3, 2, 3002)
    provenance = summary.provenance
    assert (provenance["seed"], provenance["window"], provenance["topic_scale"]) == (0, 64, 0.39)
    for request, group in ((0, 0), (1, 20)):
        expected = drawn(SelectionModel(), decoding, 2048, request=request, group=group)
        steps = trace.steps()
        assert steps.ids_NGBSK[:, group, request].tolist() == ids_of(*expected)
        assert steps.committed[:, request].tolist() == [step.committed for step in expected]
        assert steps.accepted_NB[:, request].tolist() == [step.accepted for step in expected]
    generate_trace(tmp_path / "less.topk", model, SelectionModel(), replace(decoding, requests=1, steps=2))
    less = open_trace(tmp_path / "less.topk").steps()
    assert (less.ids_NGBSK == trace.steps(0, 2).ids_NGBSK[:, :, :1]).all()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"sinks": -1}, "--sinks must be from 0 to 2,147,483,647, got -1"),
        ({"window": 2.5}, "window must be int, got 2.5"),
        ({"topic_tokens": 0}, "--topic-tokens must be from 1"),
        ({"noise": float("nan")}, "--noise must be from 0 to 1,000, got nan"),
        ({"noise_coefficient": 1.01}, "--noise-coefficient must be from 0 to 1, got 1.01"),
        ({"query_coefficient": -0.1}, "--query-coefficient must be from 0 to 1"),
        ({"topic_turnover": 2}, "--topic-turnover must be from 0 to 1"),
        ({"group_spread": True}, "group_spread must be float, got True"),
        ({"tail": 0}, "--tail must be from 0.1 to 4, got 0"),
        ({"topic_scale": float("inf")}, "--topic-scale must be from 0 to 1,000"),
    ],
)
def test_models_that_cannot_be(values: dict[str, float], says: str) -> None:
    with pytest.raises(CastoffError, match=says.replace(".", r"\.")):
        SelectionModel(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"steps": 0}, "--steps must be from 1 to"),
        ({"requests": 0}, "--requests must be from 1 to"),
        ({"context_length": -1}, "--context-length must be from 0 to"),
        ({"num_mtp_tokens": -1}, "--num-mtp-tokens must be from 0 to"),
        ({"draft_acceptance": 1.5}, "--draft-acceptance must be from 0 to 1, got 1.5"),
        ({"seed": -1}, "--seed must be from 0 to"),
        ({"seed": "x"}, "seed must be int, got 'x'"),
        ({"context_length": 2**31 - 1}, "a request could come to 2,147,483,947 tokens, more than a trace can number"),
    ],
)
def test_decodings_that_cannot_be(values: dict[str, int], says: str) -> None:
    with pytest.raises(CastoffError, match=says.replace(".", r"\.")):
        Decoding(**values)


def test_a_query_that_selects_less_than_it_must() -> None:
    with pytest.raises(CastoffError, match="--sinks 9 and --window 8 together are more than the 16 tokens"):
        select(SelectionModel(sinks=9, window=8), DRAFTS, 16)


def test_what_is_refused_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("zai-org/GLM-5.2")
    target = tmp_path / "x.topk"
    with pytest.raises(CastoffError, match="has positions for 1,048,576; give a smaller --context-length"):
        generate_trace(target, model, SelectionModel(), Decoding(context_length=1_048_576))
    with pytest.raises(CastoffError, match="are more than the 2048 tokens"):
        generate_trace(target, model, SelectionModel(window=2048), Decoding(steps=1))
    with pytest.raises(CastoffError, match=r"the trace would take .* bytes, and there are .* free"):
        generate_trace(target, model, SelectionModel(), Decoding(context_length=9, steps=200_000, requests=200_000))
    with pytest.raises(CastoffError, match="cannot write"):
        generate_trace(tmp_path / "none" / "x.topk", model, SelectionModel(), Decoding(context_length=9, steps=1))
    assert list(tmp_path.iterdir()) == []
