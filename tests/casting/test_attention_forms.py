"""Forms of the kernels of sparse attention: closed cases, growth with every size, arrays as scalars one by one."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.casting.forms.form import Form, eager_s
from castoff.casting.forms.table import FORMS
from castoff.spec.device import load_device

H200 = load_device("h200_sxm")
BASE: Mapping[str, Mapping[str, float]] = {
    "projection": {"tokens": 64, "elements": 2e7, "element_bytes": 2.0, "outputs": 2048},
    "indexer_projection": {"tokens": 64, "elements": 9e6, "element_bytes": 1.0, "outputs": 4224, "sparse": 1.0},
    "ragged_logits": {"queries": 512, "requests": 1, "pairs": 2e6, "width": 4096, "sparse": 1.0},
    "paged_logits": {"queries": 16, "pairs": 5e5, "width": 4096},
    "topk": {"queries": 512, "selecting": 512, "excess": 1e6, "topk": 2048, "sparse": 1.0},
    "prefill_attention": {
        "queries": 512, "rows": 512 * 2048, "topk": 2048, "heads": 64, "row_bytes": 1152, "cached": 8192,
        "longest": 8192, "sparse": 1.0,
    },
    "decode_attention": {"queries": 32, "rows": 65536, "topk": 2048, "heads": 64},
    "absorbed_or_dense": {
        "tokens": 512, "elements": 1e7, "element_bytes": 2.0, "outputs": 3584, "cached": 2048, "pairs": 1e6,
        "dense_width": 4096, "sparse": 1.0,
    },
}  # fmt: skip
GROWS: Mapping[str, tuple[str, ...]] = {
    "projection": ("tokens", "elements", "outputs"),
    "indexer_projection": ("tokens", "elements", "outputs"),
    "ragged_logits": ("pairs",),
    "paged_logits": ("pairs", "width"),
    "topk": ("queries", "excess"),
    "prefill_attention": ("heads", "row_bytes", "longest"),
    "decode_attention": ("rows", "heads"),
    "absorbed_or_dense": ("tokens", "elements", "outputs"),
}


def seconds(name: str, **changed: object) -> float:
    form = FORMS[name]
    return float(form.times({**BASE[name], **changed}, form.start, H200).seconds)  # type: ignore[dict-item]


@pytest.mark.parametrize("name", BASE)
def test_sizes_are_those_that_the_form_asks_for(name: str) -> None:
    assert set(BASE[name]) == set(FORMS[name].sizes)


@pytest.mark.property
@given(data=st.data(), name=st.sampled_from(sorted(BASE)), factor=st.floats(1.0, 50.0))
def test_more_of_a_size_never_takes_less_time(data: st.DataObject, name: str, factor: float) -> None:
    size = data.draw(st.sampled_from(GROWS[name]))
    start = BASE[name][size] * data.draw(st.floats(0.05, 10.0))
    assert seconds(name, **{size: start * factor}) >= seconds(name, **{size: start}) * (1 - 1e-12)


@pytest.mark.property
@given(queries=st.integers(1, 4000), more=st.integers(1, 4000), visible=st.floats(1, 2048))
def test_more_queries_never_take_less_time(queries: int, more: int, visible: float) -> None:
    def each(name: str, count: int) -> float:
        match name:
            case "prefill_attention" | "decode_attention":
                return seconds(name, queries=count, rows=count * visible)
            case "ragged_logits":
                return seconds(name, queries=count, requests=count, pairs=count * visible)
            case "paged_logits":
                return seconds(name, queries=count, pairs=count * visible)
            case _:
                return seconds(name, queries=count, selecting=count, excess=count * visible)

    for name in ("prefill_attention", "decode_attention", "paged_logits", "topk"):
        assert each(name, queries + more) >= each(name, queries) * (1 - 1e-12), name


@pytest.mark.parametrize("name", BASE)
def test_arrays_are_scalars_one_by_one(name: str) -> None:
    form: Form = FORMS[name]
    scales = np.array([0.1, 0.5, 1.0, 3.0, 40.0])
    fixed = ("topk", "sparse", "element_bytes", "width")
    arrays = {size: value if size in fixed else value * scales for size, value in BASE[name].items()}
    together = form.times(arrays, form.start, H200)
    for place in range(len(scales)):
        own = {size: value if size in fixed else value[place] for size, value in arrays.items()}  # type: ignore[index]
        alone = form.times(own, form.start, H200)
        assert np.broadcast_to(together.seconds, 5)[place] == pytest.approx(alone.seconds)
        assert np.broadcast_to(together.host_s, 5)[place] == pytest.approx(alone.host_s)


def test_a_product_of_few_tokens_streams_its_weights() -> None:
    free = dict.fromkeys(FORMS["projection"].start, 0.0)
    exact = {**free, "compute_efficiency": 1.0, "memory_efficiency": 1.0, "overlap": 60.0}
    sizes = {**BASE["projection"], "tokens": 1}
    times = FORMS["projection"].times(sizes, exact, H200)
    assert times.seconds == pytest.approx(4e7 / H200.memory.bandwidth_bytes_per_s)
    sizes = {**sizes, "tokens": 8192}
    times = FORMS["projection"].times(sizes, exact, H200)
    assert times.seconds == pytest.approx(2 * 8192 * 2e7 / H200.matrix_flops_per_s["bf16"])


def test_short_contexts_attend_densely_without_scores() -> None:
    for name in ("ragged_logits", "topk", "prefill_attention"):
        assert seconds(name, sparse=0.0) == 0
    assert seconds("absorbed_or_dense", sparse=0.0, pairs=2e6) > seconds("absorbed_or_dense", sparse=0.0)


def test_selection_of_no_query_is_no_launch() -> None:
    assert seconds("topk", queries=0, selecting=0, excess=0) == 0


def test_host_or_device_whichever_takes_longer() -> None:
    assert eager_s(1e-3, 1e-5) == pytest.approx(1e-3)
    assert eager_s(1e-5, 1e-3) == pytest.approx(1e-3)
    assert 1e-3 < eager_s(1e-3, 1e-3) < 1.2e-3
