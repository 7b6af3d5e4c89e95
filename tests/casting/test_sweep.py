"""A sweep is many casts: every figure equals the scalar one, and an invalid structure has the cast's reason."""

import csv
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castoff import sweep
from castoff.casting.price import BOUNDS
from castoff.casting.rank import Cast
from castoff.casting.sweep import CHUNK, CONTINUOUS, SweepResult
from castoff.dims import Array
from castoff.errors import CastoffError
from castoff.spec.device import Device
from castoff.spec.model import ModelSpec
from castoff.spec.scenario import Scenario
from tests.casting.strategies import Case, cases, cast_step, flat, scenario
from tests.generators import ASCEND, DEEPSEEK_V32, GLM_52, MODELS, device, model

H200 = "h200_sxm"
BASE = scenario(num_devices=16, tp_size=16, ep_size=16, compile=True)


def agree(result: SweepResult, at: tuple[int, ...], step: Cast) -> None:
    """The figures of one scenario of a sweep are those of its cast."""
    assert result.latency_s[at] == pytest.approx(step.latency_s, rel=1e-9)
    assert result.device_bytes[at] == pytest.approx(step.footprint.used_bytes, rel=1e-9)
    assert result.tokens_per_s[at] == pytest.approx(step.tokens_per_s, rel=1e-9)
    per_device = step.tokens_per_s / step.setup.mesh.num_devices
    assert result.tokens_per_s_per_device[at] == pytest.approx(per_device, rel=1e-9)
    assert bool(result.fits[at]) is bool(step.footprint.fits)
    assert result.bound[at] == step.bound
    assert result.origins[at[0]] == step.origin


def reason(spec: ModelSpec, where: Device, step: Scenario) -> str:
    with pytest.raises(CastoffError) as caught:
        cast_step(spec, where, step)
    return str(caught.value)


batches = st.lists(st.integers(1, 600), min_size=1, max_size=4).map(np.array)
contexts = st.lists(st.integers(0, 400_000), min_size=1, max_size=4).map(np.array)
queries = st.lists(st.integers(4, 8192), min_size=1, max_size=3).map(np.array)


@pytest.mark.property
@settings(max_examples=80)
@given(cases(), batches, contexts, queries | st.none())
def test_equals_scalar_cast(case: Case, num: Array, context: Array, query: Array | None) -> None:
    spec, where, step = case
    if query is None:
        step = scenario(step, query_length=None, decode=True, prefix_cache_hit_rate=0.0)
    axes: dict[str, Array] = {"num_queries": num[:, None, None], "context_length": context[None, :, None]}
    if query is not None:
        axes["query_length"] = query
    result = sweep(spec, where, step, **axes)
    assert result.reasons == (None,)
    shape = (len(num), len(context), 1 if query is None else len(query))
    assert result.latency_s.shape == (1, *shape)
    for index in np.ndindex(shape):
        values: dict[str, int] = {"num_queries": int(num[index[0]]), "context_length": int(context[index[1]])}
        if query is not None:
            values["query_length"] = int(query[index[2]])
        agree(result, (0, *index), cast_step(spec, where, scenario(step, **values)))


@pytest.mark.property
@settings(max_examples=30)
@given(
    spec_name=st.sampled_from(MODELS),
    tp=st.lists(st.sampled_from([1, 2, 3, 5, 8, 16, 32]), min_size=1, max_size=3, unique=True),
    ep=st.lists(st.sampled_from([1, 4, 7, 16, 32]), min_size=1, max_size=2, unique=True),
    pp=st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=2, unique=True),
    mtp=st.lists(st.sampled_from([0, 1, 3, 20]), min_size=1, max_size=2, unique=True),
    action=st.lists(st.sampled_from(["W8A8_DYNAMIC", "FP8", "MXFP4", "DISABLED"]), min_size=1, max_size=2, unique=True),
    num=batches,
)
def test_structures_equal_scalar_cast(
    spec_name: str, tp: list[int], ep: list[int], pp: list[int], mtp: list[int], action: list[str], num: Array
) -> None:
    spec, where = model(spec_name), device(H200)
    lists = {"tp_size": tp, "ep_size": ep, "pp_size": pp, "num_mtp_tokens": mtp, "quantize_linear_action": action}
    result = sweep(spec, where, scenario(compile=True), num_devices=32, context_length=20_000, num_queries=num, **lists)
    expected = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
    assert [{name: row[name] for name in lists} for row in result.structures] == expected
    for row, structure in enumerate(expected):
        step = scenario(num_devices=32, context_length=20_000, compile=True, **structure)
        if result.reasons[row] is not None:
            assert result.reasons[row] == reason(spec, where, scenario(step, num_queries=int(num[0])))
            assert result.origins[row] is None
            assert np.isnan(result.latency_s[row]).all()
            assert np.isnan(result.device_bytes[row]).all()
            assert not result.fits[row].any()
            assert (result.bound[row] == -1).all()
            continue
        for index, queries_ in enumerate(num):
            agree(result, (row, index), cast_step(spec, where, scenario(step, num_queries=int(queries_))))


@pytest.mark.property
@settings(max_examples=40)
@given(cases())
def test_a_sweep_without_arrays_is_one_cast(case: Case) -> None:
    spec, where, step = case
    result = sweep(spec, where, step)
    assert result.latency_s.shape == (1,)
    agree(result, (0,), cast_step(*case))
    # Every field of a scenario is an axis, and naming it changes nothing.
    named = sweep(spec, where, **flat(step))
    assert named.latency_s[0] == result.latency_s[0]
    assert named.device_bytes[0] == result.device_bytes[0]
    assert set(named.structures[0]) == set(flat(step))


class TestShapes:
    @pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 17])
    def test_chunks(self, size: int) -> None:
        context = np.arange(size) * 7
        result = sweep(GLM_52, ASCEND, BASE, context_length=context, num_queries=3)
        assert result.latency_s.shape == (1, size)
        assert np.isfinite(result.latency_s).all()
        assert (np.diff(result.latency_s[0]) >= -1e-15).all()
        for index in {0, 1, CHUNK - 2, min(CHUNK, size - 1), size - 1}:
            step = scenario(BASE, num_queries=3, context_length=int(context[index]))
            agree(result, (0, index), cast_step(model(GLM_52), device(ASCEND), step))

    def test_a_chunk_may_be_cut_anywhere(self) -> None:
        context = np.linspace(0, 300_000, CHUNK + 500).astype(int)
        whole = sweep(GLM_52, ASCEND, BASE, context_length=context, pp_size=[1, 2], tp_size=8, ep_size=8)
        for part in (slice(0, 700), slice(700, None)):
            alone = sweep(GLM_52, ASCEND, BASE, context_length=context[part], pp_size=[1, 2], tp_size=8, ep_size=8)
            np.testing.assert_allclose(alone.latency_s, whole.latency_s[:, part], rtol=1e-12)
            np.testing.assert_allclose(alone.device_bytes, whole.device_bytes[:, part], rtol=1e-12)
            np.testing.assert_array_equal(alone.bound, whole.bound[:, part])
            np.testing.assert_array_equal(alone.fits, whole.fits[:, part])

    def test_zero_dimensional(self) -> None:
        result = sweep(GLM_52, ASCEND, BASE, context_length=np.array(5000), num_queries=np.array(4))
        assert result.latency_s.shape == (1,)
        agree(
            result,
            (0,),
            cast_step(model(GLM_52), device(ASCEND), scenario(BASE, context_length=5000, num_queries=4)),
        )
        (row,) = result.rows()
        assert (row["context_length"], row["num_queries"]) == (5000, 4)

    @pytest.mark.parametrize("transposed", [False, True])
    def test_two_dimensional(self, transposed: bool) -> None:
        num, context = np.arange(1, 4)[:, None], np.array([0, 1000, 2048, 90_000])
        if transposed:
            num, context = num.T, context[:, None]
        result = sweep(GLM_52, ASCEND, BASE, num_queries=num, context_length=context, num_mtp_tokens=[0, 3])
        assert result.latency_s.shape == (2, 4, 3) if transposed else (2, 3, 4)
        for row, *index in np.ndindex(result.latency_s.shape):
            at = tuple(index)
            step = scenario(
                BASE,
                num_mtp_tokens=[0, 3][row],
                num_queries=int(np.broadcast_to(num, result.latency_s.shape[1:])[at]),
                context_length=int(np.broadcast_to(context, result.latency_s.shape[1:])[at]),
            )
            agree(result, (row, *at), cast_step(model(GLM_52), device(ASCEND), step))

    def test_arrays_of_whole_floats(self) -> None:
        whole = sweep(GLM_52, ASCEND, BASE, context_length=np.array([0, 5000]))
        floats = sweep(GLM_52, ASCEND, BASE, context_length=np.array([0.0, 5000.0]))
        np.testing.assert_array_equal(whole.latency_s, floats.latency_s)

    def test_lists_of_lengths_are_structures(self) -> None:
        result = sweep(GLM_52, ASCEND, BASE, context_length=[0, 5000], num_queries=range(1, 3))
        assert result.latency_s.shape == (4,)
        assert result.structures[3] == {"context_length": 5000, "num_queries": 2}

    def test_unrolled_pricing(self) -> None:
        context = np.array([0, 9000])
        result = sweep(GLM_52, ASCEND, BASE, context_length=context, disable_repetition=[False, True])
        np.testing.assert_allclose(result.latency_s[0], result.latency_s[1], rtol=1e-12)
        np.testing.assert_array_equal(result.device_bytes[0], result.device_bytes[1])

    def test_other_axes_of_a_scenario(self) -> None:
        result = sweep(
            DEEPSEEK_V32, H200, num_devices=8, tp_size=8, backend=["nvidia", "ascend"], reserved_memory_gb=[0.0, 8.0]
        )
        assert result.reasons == (None,) * 4
        assert result.latency_s[0] != result.latency_s[2]
        np.testing.assert_allclose(np.diff(result.device_bytes)[[0, 2]], 8 * 2**30)

    def test_prefix_cache(self) -> None:
        query = np.array([100, 1001, 4096])
        result = sweep(GLM_52, ASCEND, BASE, query_length=query, prefix_cache_hit_rate=[0.0, 0.1, 0.37])
        for (row, rate), (index, length) in product(enumerate([0.0, 0.1, 0.37]), enumerate(query)):
            step = scenario(BASE, query_length=int(length), prefix_cache_hit_rate=rate)
            agree(result, (row, index), cast_step(model(GLM_52), device(ASCEND), step))


class TestReasons:
    def test_one_invalid_structure_among_valid_ones(self) -> None:
        result = sweep(GLM_52, ASCEND, num_devices=16, tp_size=[4, 5, 16], num_queries=np.arange(1, 5))
        assert [entry is None for entry in result.reasons] == [True, False, True]
        assert "--tp-size 5 does not divide the 16 devices" in str(result.reasons[1])
        assert np.isfinite(result.latency_s[[0, 2]]).all()

    def test_all_invalid(self) -> None:
        result = sweep(GLM_52, ASCEND, num_devices=16, tp_size=[3, 5], num_queries=np.arange(1, 5))
        assert None not in result.reasons
        assert result.latency_s.shape == (2, 4)
        assert np.isnan(result.latency_s).all()
        assert result.bound.tolist() == [[-1] * 4] * 2

    @pytest.mark.parametrize(
        "values",
        [
            {"num_devices": 16, "tp_size": 16, "ep_size": 3},
            {"num_devices": 16, "tp_size": 16, "num_mtp_tokens": 17},
            {"num_devices": 16, "tp_size": 16, "quantize_linear_action": "FP8"},
            {"num_devices": 16, "tp_size": 16, "quantize_attention_action": "FP8"},
            {"num_devices": 16, "tp_size": 16, "backend": "nvidia", "enable_dispatch_ffn_combine": True},
            {"num_devices": 16, "tp_size": 16, "reserved_memory_gb": -1.0},
            {"num_devices": 16, "tp_size": 16, "backend": "ascent"},
            {"num_devices": 1024, "tp_size": 16, "ep_size": 256},
            {"num_devices": 16, "tp_size": 16, "prefix_cache_hit_rate": 0.5},
        ],
    )
    def test_reason_is_the_casts_message(self, values: dict[str, Any]) -> None:
        result = sweep(GLM_52, ASCEND, num_queries=np.array([1, 2]), **values)
        assert result.reasons == (reason(model(GLM_52), device(ASCEND), scenario(**values)),)

    def test_a_ragged_batch_and_arrays(self) -> None:
        step = scenario(BASE, context_length=[100, 200], num_queries=2)
        agree(sweep(GLM_52, ASCEND, step), (0,), cast_step(model(GLM_52), device(ASCEND), step))
        with pytest.raises(CastoffError, match="one length per request cannot be swept with arrays"):
            sweep(GLM_52, ASCEND, step, query_length=np.array([5, 6]))


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "near"),
        [
            ("num_querys", "num_queries"),
            ("context_len", "context_length"),
            ("tp", None),
            ("ep_sizes", "ep_size"),
            ("quantize_linear", "quantize_linear_action"),
        ],
    )
    def test_unknown_axis(self, name: str, near: str | None) -> None:
        with pytest.raises(CastoffError, match=f"sweep has no axis '{name}'") as caught:
            sweep(GLM_52, ASCEND, BASE, **{name: [1, 2]})
        assert near is None or f"'{near}'" in str(caught.value)

    @pytest.mark.parametrize("name", ["tp_size", "num_mtp_tokens", "prefix_cache_hit_rate", "reserved_memory_gb"])
    def test_array_on_a_structural_axis(self, name: str) -> None:
        with pytest.raises(CastoffError, match=f"{name} is structure: give a list, not an array") as caught:
            sweep(GLM_52, ASCEND, BASE, **{name: np.array([1, 2])})
        assert all(axis in str(caught.value) for axis in CONTINUOUS)

    def test_empty_list(self) -> None:
        with pytest.raises(CastoffError, match="the list for tp_size is empty"):
            sweep(GLM_52, ASCEND, BASE, tp_size=[])

    @pytest.mark.parametrize("values", [[1, 0], [], [1.5], [np.nan]])
    def test_bad_lengths(self, values: list[float]) -> None:
        with pytest.raises(CastoffError, match="--num-queries"):
            sweep(GLM_52, ASCEND, BASE, num_queries=np.array(values))

    @pytest.mark.parametrize(
        "arrays",
        [
            {"num_queries": np.arange(1, 3), "context_length": np.arange(3)},
            {"num_queries": np.array(["many"])},
        ],
    )
    def test_arrays_that_do_not_fit_together(self, arrays: dict[str, Array]) -> None:
        with pytest.raises(CastoffError):
            sweep(GLM_52, ASCEND, BASE, **arrays)


class TestRows:
    result = sweep(
        GLM_52,
        ASCEND,
        BASE,
        tp_size=[8, 5],
        num_mtp_tokens=3,
        num_queries=np.array([1, 40])[:, None],
        context_length=np.array([0, 65_536, 131_072]),
    )

    def test_one_per_scenario_and_one_per_invalid_structure(self) -> None:
        rows = list(self.result.rows())
        assert len(rows) == 2 * 3 + 1
        assert [(row["num_queries"], row["context_length"]) for row in rows[:6]] == [
            (1, 0), (1, 65_536), (1, 131_072), (40, 0), (40, 65_536), (40, 131_072),
        ]  # fmt: skip
        assert rows[6] == {"tp_size": 5, "num_mtp_tokens": 3, "reason": self.result.reasons[1]}

    def test_figures_are_plain_values(self) -> None:
        rows = list(self.result.rows())
        for position, row in enumerate(rows[:6]):
            at = (0, *divmod(position, 3))
            assert row["latency_s"] == self.result.latency_s[at]
            assert row["device_bytes"] == self.result.device_bytes[at]
            assert row["fits"] is bool(self.result.fits[at])
            assert row["bound"] == BOUNDS[self.result.bound[at]]
            assert row["origin"] == "assumed"
            assert row["reason"] is None
            assert {type(value) for value in row.values()} <= {int, float, str, bool, type(None)}
        assert [row["fits"] for row in rows[:6]] == [True, True, True, True, False, False]

    def test_csv(self, tmp_path: Path) -> None:
        path = tmp_path / "sweep.csv"
        self.result.to_csv(path)
        with path.open(newline="") as file:
            read = list(csv.DictReader(file))
        rows = list(self.result.rows())
        assert len(read) == len(rows)
        assert list(read[0]) == list(rows[0])
        for got, row in zip(read, rows, strict=True):
            assert all(got[name] == ("" if row.get(name) is None else str(row[name])) for name in got)
            if row["reason"] is None:
                assert float(got["latency_s"]) == row["latency_s"]

    def test_csv_of_a_single_cast(self, tmp_path: Path) -> None:
        path = tmp_path / "one.csv"
        sweep(GLM_52, ASCEND, BASE).to_csv(path)
        assert len(path.read_text().splitlines()) == 2
