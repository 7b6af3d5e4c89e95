"""Hit profiles: the shipped one, reading and writing, and faults in files."""

import json
from pathlib import Path
from typing import Any

import pytest

from castoff.errors import CastoffError
from castoff.spec.hit_profile import HitProfile, check_profile, load_hit_profile, shipped_profile
from tests.generators import DEEPSEEK_V32, GLM_52, model

SHIPPED = shipped_profile(GLM_52)


def shipped() -> HitProfile:
    assert SHIPPED is not None
    return load_hit_profile(SHIPPED)


def owners(name: str) -> list[int]:
    return [group.owner for group in model(name).index_groups]


def test_the_shipped_profile_is_of_its_model() -> None:
    profile = shipped()
    assert check_profile(profile, GLM_52, owners(GLM_52), 2048) is None
    assert check_profile(profile, f"{GLM_52}-FP8", owners(GLM_52), 2048) is None
    # A model that is cut to its first layers has the first of the groups.
    assert check_profile(profile, GLM_52, owners(GLM_52)[:3], 2048) is None
    assert profile.origin == "assumed"
    assert shipped_profile(f"{GLM_52}-FP8") == SHIPPED
    assert shipped_profile(DEEPSEEK_V32) is None


def test_counts_of_a_point_are_those_of_a_step() -> None:
    for curve in shipped().curves:
        for point in curve.points:
            assert point.rows == pytest.approx(2048 * curve.query_length, abs=0.5)
            # Each query sees this step's tokens up to its own.
            assert point.window_reads == curve.query_length * (curve.query_length + 1) / 2
        misses = [point.unique_misses for point in curve.points]
        assert misses == sorted(misses, reverse=True)


def test_a_curve_is_a_line_between_its_points_and_ends_with_the_last() -> None:
    curve = shipped().curve("direct", "fifo", 16, 1)
    sizes = [point.pool_tokens for point in curve.points]
    low, high = curve.points[0], curve.points[1]
    middle = (sizes[0] + sizes[1]) / 2
    assert curve.at(middle).unique_misses == pytest.approx((low.unique_misses + high.unique_misses) / 2)
    assert curve.at(2**30).unique_misses == curve.points[-1].unique_misses


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(shipped().as_json()))
    assert load_hit_profile(file) == shipped()


def test_another_model_is_refused() -> None:
    with pytest.raises(
        CastoffError, match=r"is of zai-org/GLM-5\.2, which selects 2048 tokens in 21 index groups; deep"
    ):
        check_profile(shipped(), DEEPSEEK_V32, owners(DEEPSEEK_V32), 2048)
    with pytest.raises(CastoffError, match="take a profile of this model"):
        check_profile(shipped(), GLM_52, owners(GLM_52), 1024)
    assert check_profile(shipped(), "my/copy", owners(GLM_52), 2048) == f"hit rates are those of {GLM_52}"


def test_a_curve_that_is_not_there_is_named() -> None:
    with pytest.raises(
        CastoffError,
        match=r"--policy fifo --ways 4 at 1 query tokens.*direct fifo, .*; ways 16; query tokens 1, 2, 3, 4",
    ):
        shipped().curve("direct", "fifo", 4, 1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hit_profile_version": 2}, "hit_profile_version must be 1, got 2"),
        ({"colour": 1}, "unknown key 'colour'"),
        ({"model": 3}, "model must be"),
        ({"origin": "guessed"}, "origin must be one of"),
        ({"owner_layers": [0, -1]}, "owner_layers must be a list of whole numbers"),
        ({"index_topk": 0}, "index_topk must be"),
        ({"curves": []}, "curves must be"),
        ({"curves": [{"mode": "none"}]}, r"curves\[0\]\.points is missing"),
    ],
)
def test_faults_name_file_and_key(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**shipped().as_json(), **change}))
    with pytest.raises(CastoffError, match=complaint) as caught:
        load_hit_profile(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "\x00", '{"hit_profile_version": NaN}'])
def test_what_is_no_profile(text: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(CastoffError, match=r"profile\.json"):
        load_hit_profile(file)
    with pytest.raises(CastoffError, match="cannot read"):
        load_hit_profile(tmp_path / "none.json")


def test_points_must_rise_and_misses_lie_in_their_spread(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    values = shipped().as_json()
    point = values["curves"][0]["points"][0]
    values["curves"] = [{**values["curves"][0], "points": [point, point]}]
    file.write_text(json.dumps(values))
    with pytest.raises(CastoffError, match="ascending order of pool_tokens"):
        load_hit_profile(file)
    values["curves"][0]["points"] = [{**point, "unique_misses_low": point["unique_misses"] + 1}]
    file.write_text(json.dumps(values))
    with pytest.raises(CastoffError, match="must lie between"):
        load_hit_profile(file)
