"""What must hold for every indexer schedule."""

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.spec.model import IndexerType, ModelSpec, load_model, raw_config, read_model

pytestmark = pytest.mark.property

BASE = load_model("zai-org/GLM-5.2")


def with_schedule(types: tuple[IndexerType, ...]) -> ModelSpec:
    return replace(
        BASE, num_hidden_layers=len(types), indexer_types=types, mlp_layer_types=tuple("sparse" for _ in types)
    )


words = st.sampled_from(("full", "shared"))
schedules = st.lists(words, max_size=100).map(lambda rest: ("full", *rest))


@given(schedules)
def test_groups_cover_every_layer_once(types: tuple[IndexerType, ...]) -> None:
    spec = with_schedule(types)
    assert list(chain.from_iterable(group.layers for group in spec.index_groups)) == list(range(len(types)))
    assert len(spec.index_groups) == spec.num_full_layers


@given(schedules)
def test_a_layer_uses_the_nearest_full_layer_before_it(types: tuple[IndexerType, ...]) -> None:
    spec = with_schedule(types)
    for layer in range(len(types)):
        nearest = max(other for other in range(layer + 1) if types[other] == "full")
        group = spec.index_group_of(layer)
        assert group.owner == group.layers[0] == nearest
        assert layer in group.layers


@given(schedules, st.data())
def test_a_cut_keeps_the_groups_of_the_layers_that_stay(types: tuple[IndexerType, ...], data: st.DataObject) -> None:
    spec = with_schedule(types)
    cut = spec.with_num_hidden_layers(data.draw(st.integers(1, len(types))))
    for layer in range(cut.num_hidden_layers):
        assert cut.index_group_of(layer).owner == spec.index_group_of(layer).owner


@given(schedules, st.integers(0, 4))
def test_mtp_blocks_are_full(types: tuple[IndexerType, ...], num_blocks: int) -> None:
    extended = with_schedule(types).mtp_indexer_types(num_blocks)
    assert extended[: len(types)] == types
    assert extended[len(types) :] == ("full",) * num_blocks


@given(num_layers=st.integers(1, 120), freq=st.integers(1, 9), offset=st.integers(1, 130))
def test_freq_and_offset(num_layers: int, freq: int, offset: int) -> None:
    config = raw_config("zai-org/GLM-5")
    config |= {"num_hidden_layers": num_layers, "index_topk_freq": freq, "index_skip_topk_offset": offset}
    types = read_model(config, name="test", source="test").indexer_types
    assert [layer for layer, kind in enumerate(types) if kind == "full"] == [
        # The layers before the offset, then every freq-th.
        layer
        for layer in range(num_layers)
        if layer < offset - 1 or (layer - offset + 1) % freq == 0
    ]


@given(schedules)
def test_words_letters_and_lists_read_alike(types: tuple[IndexerType, ...]) -> None:
    config = raw_config("zai-org/GLM-5") | {"num_hidden_layers": len(types)}
    letters = "".join(kind[0].upper() for kind in types)
    for spelling in (
        {"indexer_types": list(types)},
        {"index_topk_pattern": letters},
        {"index_topk_pattern": list(letters)},
        {"index_topk_pattern": list(types)},
    ):
        assert read_model(config | spelling, name="test", source="test").indexer_types == types
