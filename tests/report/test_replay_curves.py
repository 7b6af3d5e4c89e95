"""Curves as SVG and as a page: whole by themselves, and safe for any name."""

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from castoff.lab.policies import PolicyName
from castoff.lab.result import Replayed, ReplayResult
from castoff.policy.arrays import HITS, STATS, UNIQUE_HITS, UNIQUE_MISSES
from castoff.report.output import render
from castoff.report.replay_curves import replay_html, replay_svg
from castoff.report.replay_text import replay_tables

SVG = "{http://www.w3.org/2000/svg}"


def result_of(rates: dict[tuple[PolicyName, int | None, int], int], name: str = "x.topk") -> ReplayResult:
    """A replay of one group and one step in which so many of 100 rows hit, by policy, ways and pool."""
    common = Replayed(
        groups=[0],
        layers=[(0, 1)],
        ages_M=np.zeros(1, np.int64),
        counted_M=np.ones(1, bool),
        num_steps=1,
        row_bytes=1152,
    )
    rows = []
    for (policy, ways, pool), hits in rates.items():
        stats_GMC = np.zeros((1, 1, len(STATS)), np.int32)
        stats_GMC[0, 0, [HITS, UNIQUE_HITS, UNIQUE_MISSES]] = hits, hits, 100 - hits
        rows.append(common.row(policy, ways, pool, stats_GMC))
    return ReplayResult(
        trace=name, model="tiny", steps=1, requests=1, request_steps=1, query_length=1, index_topk=100, row_bytes=1152,
        rows=tuple(rows),
    )  # fmt: skip


CURVES = result_of(
    {
        ("fifo", 4, 64): 20,
        ("fifo", 4, 128): 40,
        ("sieve", None, 64): 30,
        ("sieve", None, 128): 55,
        ("gather", None, 16): 25,
    }
)


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_svg() -> None:
    svg = replay_svg(CURVES)
    root = ElementTree.fromstring(svg)
    lines = list(root.iter(f"{SVG}polyline"))
    assert len(lines) == 3
    tips = [title.text for title in root.iter(f"{SVG}title")]
    assert "fifo, 4 ways, pool of 128: 40.0%" in tips
    assert "gather, pool of 16: 25.0%" in tips
    assert {"fifo, 4 ways", "sieve", "gather", "tokens of a pool", "64", "128"} <= set(texts(svg))
    # More hits are further up, a larger pool is further right.
    for line in lines[:2]:
        (x, y), (right, up) = (map(float, point.split(",")) for point in line.get("points", "").split())
        assert x < right
        assert y > up
    (x, y), (right, same) = (map(float, point.split(",")) for point in lines[2].get("points", "").split())
    assert (right - x, y) == (764, same), "a mode without a choice of pools is a level line"


@pytest.mark.parametrize("make", [replay_svg, replay_html])
def test_nothing_else_is_needed(make: object) -> None:
    text = make(CURVES)  # type: ignore[operator]
    assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 0
    for word in ("<script", "<link", "src=", "@import", "url("):
        assert word not in text
    assert "prefers-color-scheme: dark" in text


def test_names_are_text() -> None:
    named = replace(CURVES, trace="<b>&amp;.topk")
    page = replay_html(named)
    assert "<b>" not in page
    assert page.count("&lt;b&gt;&amp;amp;.topk: tiny, 1 step of 1 request, 1 query token each") == 2
    assert page.count("<svg") == 3
    assert page.count("<tr>") == 1 + 5


@pytest.mark.parametrize("hits", [0, 50, 100])
@pytest.mark.parametrize("policy", ["sieve", "gather"])
def test_one_point(hits: int, policy: PolicyName) -> None:
    made = result_of({(policy, None, 64): hits})
    root = ElementTree.fromstring(replay_svg(made))
    (circle,) = root.iter(f"{SVG}circle")
    assert 44 <= float(circle.get("cy", "")) <= 366
    replay_html(made)
    assert "hit rate over" not in render(*replay_tables(made))


def test_many_curves_are_told_apart() -> None:
    made = result_of({("fifo", ways, pool): ways for ways in range(1, 33) for pool in (32, 64)})
    root = ElementTree.fromstring(replay_svg(made))
    looks = {
        (group.get("class"), line.get("stroke-dasharray"))
        for group in root.iter(f"{SVG}g") for line in group.iter(f"{SVG}polyline")
    }  # fmt: skip
    assert len(looks) == 32
    places = [float(element.get("y", "")) for element in root.iter(f"{SVG}text")]
    assert max(places) < float(root.get("viewBox", "").split()[3])


def test_letters() -> None:
    text = render(*replay_tables(CURVES))
    lines = [line.partition("|")[2] for line in text.splitlines() if " |" in line]
    assert lines[0].endswith("B")
    assert lines[-1].startswith("A")
    assert "A  fifo, 4 ways" in text
    assert text.count("gather") == 1, "a curve needs pools to choose"
