"""Forms of fitted kernels: closed cases, more work is never faster, arrays of scenarios are scalars side by side."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.casting.forms.form import Form, interpolate
from castoff.casting.forms.matmul import chosen_tile
from castoff.casting.forms.table import FORMS
from castoff.spec.device import load_device

H200, B200 = load_device("h200_sxm"), load_device("b200_sxm")
LARGEST = {
    "m": 65536, "n": 65536, "k": 65536, "rows": 131072, "touched": 256, "bytes": 2**30, "ranks": 8, "skew": 2,
    "row_bytes": 16384, "experts": 512, "experts_per_token": 16,
}  # fmt: skip
# A tile is chosen for its waves, so a wider product may take a better one.
MONOTONE = {name: form.sizes for name, form in FORMS.items() if "tiles" not in name} | {
    "matmul_tiles_fp8": ("k",), "expert_copies": ("bytes",), "expert_tokens": ("bytes",),
}  # fmt: skip
OWN_SIZES = tuple(LARGEST)


def sizes_of(form: Form, draw: st.DataObject) -> dict[str, float]:
    return {name: float(draw.draw(st.integers(2, LARGEST[name]), name)) for name in form.sizes}


def mine() -> list[str]:
    return [name for name, form in FORMS.items() if set(form.sizes) <= set(OWN_SIZES)]


@pytest.mark.parametrize("name", [name for name in mine() if name in MONOTONE])
@given(draw=st.data())
def test_more_work_is_never_faster(name: str, draw: st.DataObject) -> None:
    form = FORMS[name]
    sizes = sizes_of(form, draw)
    grown = draw.draw(st.sampled_from([size for size in MONOTONE[name] if size in OWN_SIZES and size != "ranks"]))
    if grown == "touched" and sizes["touched"] > sizes["rows"]:
        return
    more = sizes | {grown: sizes[grown] + draw.draw(st.integers(1, 4096))}
    first, second = (form.times(each, form.start, B200).seconds for each in (sizes, more))
    assert second >= first * (1 - 1e-9)


@pytest.mark.parametrize("name", mine())
@given(draw=st.data())
def test_an_array_is_scalars_side_by_side(name: str, draw: st.DataObject) -> None:
    form = FORMS[name]
    several = [sizes_of(form, draw) for _ in range(3)]
    together = form.times({key: np.array([each[key] for each in several]) for key in form.sizes}, form.start, B200)
    features = form.features({key: np.array([each[key] for each in several]) for key in form.sizes}, B200)
    for place, sizes in enumerate(several):
        alone = form.times(sizes, form.start, B200)
        assert np.asarray(together.seconds)[place] == pytest.approx(float(alone.seconds))
        for key, value in form.features(sizes, B200).items():
            assert np.broadcast_to(features[key], 3)[place] == pytest.approx(float(value))


def test_a_large_product_takes_its_multiplications() -> None:
    c = {"launch_s": 0.0, "compute_efficiency": 0.5, "memory_efficiency": 1.0, "overlap": 30.0}
    found = FORMS["matmul"].times({"m": 8192, "n": 8192, "k": 8192}, c, H200).seconds
    assert found == pytest.approx(2 * 8192**3 / (0.5 * 989e12), rel=1e-6)


def test_a_token_goes_once_to_each_rank_that_has_an_expert_of_it() -> None:
    drawn = np.random.default_rng(0).permuted(np.tile(np.arange(64), (4000, 1)), axis=1)[:, :6]
    reached = np.mean([len(set(ranks)) for ranks in (drawn // 8).tolist()])
    c = {
        "launch_s": 0.0, "row_byte_launch_s": 0.0, "row_s": 1.0, "link_efficiency": 1e12, "token_byte_s": 1e-30,
        "ramp_s": 0.0,
    }  # fmt: skip
    sizes = {"bytes": 100 * 6 * 512.0, "ranks": 8.0, "row_bytes": 512.0, "experts": 64.0, "experts_per_token": 6.0}
    assert FORMS["expert_tokens"].times(sizes, c, H200).seconds == pytest.approx(100 * reached, rel=0.01)


def test_a_stream_takes_its_bytes() -> None:
    c = {"launch_s": 2e-6, "memory_efficiency": 0.5}
    assert FORMS["stream"].times({"bytes": 4.8e9}, c, H200).seconds == pytest.approx(2e-6 + 2e-3)


@pytest.mark.parametrize(
    ("m", "n", "tile"),
    [
        # One wave of 128 tiles that are as small as can be: 64 rows by 48 columns.
        (64, 6144, (64, 48)),
        # 4096 by 4096 in tiles of 128 by 128 are 1,024: eight waves, as with 256 by 64, which fills no better.
        (1, 128, (64, 16)),
    ],
)
def test_tiles(m: int, n: int, tile: tuple[int, int]) -> None:
    tile_m, tile_n, waves, fill = chosen_tile(m, n, 132)
    assert (tile_m, tile_n) == tile
    assert waves == 1
    assert fill == pytest.approx(-(-m // tile[0]) * -(-n // tile[1]) / 132)


def test_between_two_ranks_one_shot_and_among_eight_two() -> None:
    form = FORMS["all_reduce"]
    small, large = ({"bytes": moved, "ranks": 8.0} for moved in (1024.0, 2.0**23))
    rate = 450e9 * form.start["link_efficiency"]
    one = 7 * 2.0**23 / rate
    assert form.times(large, form.start, H200).seconds < one
    assert form.times(small, form.start, H200).seconds == pytest.approx(
        3e-6 + 8e-7 + 7 * 1024 / rate + 3e-7 * np.log1p(7 * 1024 / 3e4)
    )


@given(
    place=st.tuples(*[st.floats(0.5, 3000.0)] * 3),
    seed=st.integers(0, 100),
)
def test_interpolation_of_numbers_is_that_of_arrays(place: tuple[float, ...], seed: int) -> None:
    knots = [np.log(values) for values in ((1.0, 8.0, 64.0), (2.0, 2000.0), (1.0, 10.0, 100.0, 1000.0))]
    values = np.random.default_rng(seed).normal(size=(3, 2, 4))
    alone = interpolate(values, knots, place)
    for arrays in range(1, 8):
        sizes = [np.array([size, size]) if arrays >> axis & 1 else size for axis, size in enumerate(place)]
        assert interpolate(values, knots, sizes) == pytest.approx(np.array([alone, alone]))
