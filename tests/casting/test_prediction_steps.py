"""Steps of the model by kind: what they are made of, and how they are summed up."""

import pytest
from hypothesis import given, settings

from castoff import cast
from castoff.casting.price import BOUNDS
from castoff.casting.summary import kind_summaries, op_spans, op_summaries
from castoff.spec.device import shipped_devices
from castoff.spec.model import shipped_models
from tests.casting.predictions import FEW, H200, calls_of, count
from tests.casting.strategies import Case, cases, cast_step, scenario
from tests.generators import ASCEND, DEEPSEEK_V3, DEEPSEEK_V32, GLM_5, GLM_52, MODELS, device, model


@pytest.mark.property
class TestRepetition:
    @settings(max_examples=15)
    @given(cases())
    def test_changes_nothing(self, case: Case) -> None:
        spec, where, step = case
        repeated, unrolled = (
            cast_step(spec, where, scenario(step, disable_repetition=disabled)) for disabled in (False, True)
        )
        assert len(unrolled.program.blocks) == len(unrolled.program.schedule)
        assert len(repeated.program.blocks) <= 16
        assert repeated.latency_s == pytest.approx(unrolled.latency_s, rel=1e-12)
        assert repeated.footprint == unrolled.footprint
        assert repeated.bound == unrolled.bound
        assert repeated.origin == unrolled.origin
        assert repeated.timeline.stage_s == pytest.approx(unrolled.timeline.stage_s, rel=1e-9)
        assert repeated.timeline.busy_s == pytest.approx(unrolled.timeline.busy_s, rel=1e-9)
        named, written_out = calls_of(repeated), calls_of(unrolled)
        assert [call.op.name for call, _ in named] == [call.op.name for call, _ in written_out]
        assert [price.seconds for _, price in named] == [price.seconds for _, price in written_out]

    @pytest.mark.parametrize("spec_name", MODELS)
    def test_cut_models(self, spec_name: str) -> None:
        # Every number of layers: the first group of shared layers is cut at each place.
        for layers in range(1, 12):
            spec = model(spec_name).with_num_hidden_layers(layers)
            step = scenario(num_devices=8, tp_size=8, ep_size=8, num_mtp_tokens=1, compile=True)
            repeated, unrolled = (
                cast_step(spec, device(H200), scenario(step, disable_repetition=disabled)) for disabled in (False, True)
            )
            assert repeated.latency_s == pytest.approx(unrolled.latency_s, rel=1e-12)
            assert repeated.footprint == unrolled.footprint
            assert count(repeated, "multihead_latent_attention") == layers + 1


class TestStepsOfTheModel:
    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("query", [None, 4096])
    @pytest.mark.parametrize(
        ("spec_name", "layers", "full"),
        [(GLM_52, 78, 21), (GLM_5, 78, 78), (DEEPSEEK_V32, 61, 61), (DEEPSEEK_V3, 61, 0)],
    )
    def test_indexers_and_attentions(
        self, spec_name: str, layers: int, full: int, query: int | None, compiled: bool
    ) -> None:
        step = scenario(
            num_devices=16, tp_size=16, ep_size=16, query_length=query, context_length=9000, compile=compiled
        )
        plain = cast_step(model(spec_name), device(ASCEND), step)
        assert (count(plain, "multihead_latent_attention"), count(plain, "dsa_indexer")) == (layers, full)
        draft = cast_step(model(spec_name), device(ASCEND), scenario(step, num_mtp_tokens=1))
        owns = 1 if full else 0
        assert (count(draft, "multihead_latent_attention"), count(draft, "dsa_indexer")) == (layers + 1, full + owns)

    def test_drafts_of_one_step_share_the_first_ones_choice(self) -> None:
        step = scenario(num_devices=16, tp_size=16, ep_size=16, num_mtp_tokens=3, context_length=9000)
        result = cast_step(model(GLM_52), device(ASCEND), step)
        assert (count(result, "dsa_indexer"), count(result, "indexer_key_write")) == (22, 2)
        prefill = cast_step(model(GLM_52), device(ASCEND), scenario(step, query_length=4096))
        assert (count(prefill, "dsa_indexer"), count(prefill, "indexer_key_write")) == (24, 0)
        # V3.2 says nothing of sharing.
        other = cast_step(model(DEEPSEEK_V32), device(ASCEND), step)
        assert (count(other, "dsa_indexer"), count(other, "indexer_key_write")) == (64, 0)

    @pytest.mark.parametrize("name", shipped_models())
    @pytest.mark.parametrize("where", shipped_devices())
    def test_every_shipped_pair(self, name: str, where: str) -> None:
        prediction = cast(
            name, where, scenario(num_devices=16, tp_size=8, ep_size=16, num_queries=8, context_length=4096)
        )
        assert 0 < prediction.latency_s < 1
        assert prediction.bound in BOUNDS


class TestSummaries:
    def test_kinds_are_the_same_when_unrolled(self) -> None:
        step = scenario(num_devices=16, tp_size=16, ep_size=16, num_mtp_tokens=3, context_length=9000)
        repeated, unrolled = (
            kind_summaries(cast(GLM_52, ASCEND, scenario(step, disable_repetition=disabled)))
            for disabled in (False, True)
        )
        assert [(kind.name, kind.calls) for kind in repeated] == [(kind.name, kind.calls) for kind in unrolled]
        assert [kind.total_s for kind in repeated] == pytest.approx([kind.total_s for kind in unrolled])
        assert [kind.mean_s for kind in repeated] == pytest.approx([kind.mean_s for kind in unrolled])

    @pytest.mark.property
    @FEW
    @given(cases(max_stages=1, keep=lambda case: scenario(case, enable_multistream=False)))
    def test_ops_and_kinds_add_up_to_the_step(self, case: Case) -> None:
        prediction = cast(*case)
        device_s = prediction.latency_s - prediction.cast.host_s
        ops, kinds = op_summaries(prediction), kind_summaries(prediction)
        by_shapes = op_summaries(prediction, by_shapes=True)
        for groups in (ops, by_shapes, kinds):
            assert sum(group.total_s for group in groups) == pytest.approx(device_s, rel=1e-9)
        assert sum(op.calls for op in ops) == sum(op.calls for op in by_shapes) == len(op_spans(prediction))
        assert sum(op.flops for op in ops) == pytest.approx(sum(op.flops for op in by_shapes))
        assert len({op.name for op in ops}) == len(ops)
        assert [op.total_s for op in ops] == sorted((op.total_s for op in ops), reverse=True)
        assert all(sum(op.shapes.values()) == op.calls for op in ops)
        for op in ops:
            assert sum(op.bound_s.values()) == pytest.approx(op.total_s)
            assert op.mean_s * op.calls == pytest.approx(op.total_s)
            assert sum(bucket.bytes for bucket in op.buckets.values()) == pytest.approx(op.bytes)
            assert sum(bucket.flops for bucket in op.buckets.values()) == pytest.approx(op.flops)
