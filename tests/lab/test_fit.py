"""Drawn selections against the published hit rates."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from castoff.errors import CastoffError
from castoff.lab.fit import ALTERNATIVES, PUBLISHED, Sample, fit, hit_rates
from castoff.policy.compiled import has_numba
from castoff.trace.synthetic import Decoding, SelectionModel

# Three groups, one of them in the middle and two as far from it as most are.
SAMPLE = Sample(decoding=Decoding(steps=140), warm_up=90, groups=(0, 6, 7))
# An eighth of everything.
SMALL = SelectionModel(sinks=1, window=8, topic_tokens=32)
SMALL_SAMPLE = Sample(decoding=Decoding(context_length=8192, steps=120), warm_up=60, groups=(0, 6, 7), index_topk=256)


@pytest.mark.skipif(not has_numba(), reason="plans as plain Python take minutes")
@pytest.mark.parametrize("name", ["default", *ALTERNATIVES])
def test_hit_rates_are_the_published_ones(name: str) -> None:
    found = hit_rates(ALTERNATIVES.get(name, SelectionModel()), SAMPLE)
    assert found.previous == pytest.approx(PUBLISHED.previous, abs=0.015)
    assert found.lru_4 == pytest.approx(PUBLISHED.lru_4, abs=0.012)
    assert found.fifo_4 == pytest.approx(PUBLISHED.fifo_4, abs=0.02)
    assert PUBLISHED.fifo_8 + 0.015 < found.fifo_8 < 0.96


def test_fit() -> None:
    start = replace(SMALL, noise=1.1, topic_scale=0.3)
    found = fit(start, ("noise", "topic_scale"), replace(SMALL_SAMPLE, groups=(0,)))
    assert found.hit_rates.previous == pytest.approx(PUBLISHED.previous, abs=0.001)
    assert found.hit_rates.lru_4 == pytest.approx(PUBLISHED.lru_4, abs=0.001)
    assert found.selection.noise != start.noise
    fitted = {"noise": found.selection.noise, "topic_scale": found.selection.topic_scale}
    assert found.selection == replace(start, **fitted)
    assert hit_rates(found.selection, replace(SMALL_SAMPLE, groups=(0,))) == found.hit_rates


def test_no_fit() -> None:
    """Without topics and noise selections stay the same, and a little noise that lasts changes nothing."""
    start = replace(SMALL, tail=4.0, noise=0.0, topic_scale=0.0, noise_coefficient=0.9)
    sample = replace(SMALL_SAMPLE, groups=(0,), decoding=Decoding(context_length=8192, steps=20), warm_up=10)
    with pytest.raises(CastoffError, match="no noise and noise_coefficient give the published hit rates; the last"):
        fit(start, ("noise", "noise_coefficient"), sample)


def test_more_queries_find_as_much_of_their_own_last_selection() -> None:
    """Only pools that are filled after the step suffer where queries of one step miss the same."""
    one, four = (
        hit_rates(SMALL, replace(SMALL_SAMPLE, decoding=replace(SMALL_SAMPLE.decoding, num_mtp_tokens=drafts)))
        for drafts in (0, 3)
    )
    assert four.previous == pytest.approx(one.previous, abs=0.02)
    assert four.fifo_4 < one.fifo_4 - 0.01


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"warm_up": 140}, "a warm-up of 140 steps leaves none of 140 to be counted"),
        ({"groups": ()}, "index groups are needed"),
        ({"index_topk": 66}, "multiple of 4, got 66"),
    ],
)
def test_samples_that_cannot_be(values: dict[str, int], says: str) -> None:
    with pytest.raises(CastoffError, match=says):
        replace(SAMPLE, **values)  # type: ignore[arg-type]


def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "synthetic_traces.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(page), "exec"), {})
    assert capsys.readouterr().out.startswith("HitRates(previous=0.")
