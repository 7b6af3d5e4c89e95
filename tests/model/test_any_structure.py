"""What must hold of the recorded program of any structure, and of its work over all ranks."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castoff.casting.deployment import resolve
from castoff.casting.footprint import Footprint
from castoff.casting.rank import cast_batch
from castoff.model.record import record_step
from castoff.ops.lengths import Lengths
from castoff.ops.linear import Weight
from castoff.ops.program import OpCall, Program
from castoff.spec.model import ModelSpec
from castoff.spec.scenario import (
    Mtp,
    Parallel,
    RequestClass,
    Scenario,
    deal_to_rank,
    request_classes,
)
from tests.generators import (
    ASCEND,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_5,
    NVIDIA,
    device,
    model,
    scenarios,
    setup_of,
    uniform,
)
from tests.model.programs import ATTENTION, check_work, layer_entries, names, tokens_of, works_of


def check_shapes(call: OpCall) -> None:
    """A product's input is as wide as its weight, and every dim is positive."""
    weight = call.attributes.get("weight")
    if weight is not None:
        assert isinstance(weight, Weight)
        assert call.tensor(0).shape[-1] == weight.values.shape[-1], (call.op.name, call.input_shapes)
        if weight.format is not None:
            assert call.tensor(0).dtype == weight.format.activation_dtype, call.op.name
    for tensor in (*call.inputs, *call.outputs):
        if tensor is not None:
            assert all(dim > 0 for dim in tensor.shape), (call.op.name, tensor.shape)


def check_residual_stream(program: Program, scenario: Scenario, spec: ModelSpec) -> None:
    """Between layers a rank holds its requests' tokens, or its share of them under sequence parallelism."""
    entries = layer_entries(program)
    tokens = int(tokens_of(entries[0]))
    tp = scenario.parallel.tp_size
    split = scenario.compilation.enable_sequence_parallel and tp > 1
    held = -(-tokens // tp) if split else tokens
    for entry in entries:
        x, residual, _ = entry.block.outputs
        assert x is not None
        assert residual is not None
        assert x.shape == residual.shape == (held, spec.hidden_size), entry.label
    head = next(entry for entry in program.schedule if entry.label == "head")
    hidden, logits, sampled = head.block.outputs
    assert hidden is not None
    assert sampled is not None
    assert hidden.shape == (tokens, spec.hidden_size)
    lengths = next(call.attributes["lengths"] for _, call in program.calls() if call.op.name in ATTENTION)
    rows = tokens if scenario.workload.mode == "decode" else lengths.requests
    assert sampled.shape == (rows,)
    # Where the ranks of a TP group head their own tokens, none has the logits of all.
    if lmhead_ranks(scenario.parallel) < tp:
        assert logits is None
    else:
        assert logits is not None
        assert logits.shape == (rows, spec.vocab_size)


def lmhead_ranks(parallel: Parallel) -> int:
    """Ranks that share one lm_head: as said, or what its copies leave of a stage's ranks, or a TP group."""
    if parallel.lmhead_dp_size is not None:
        return parallel.num_devices // parallel.pp_size // parallel.lmhead_dp_size
    return parallel.lmhead_tp_size or parallel.tp_size


def rank_lengths(scenario: Scenario) -> Lengths:
    ranks = scenario.parallel.num_devices // (scenario.parallel.tp_size * scenario.parallel.pp_size)
    dealt = deal_to_rank(request_classes(scenario.workload, scenario.mtp), ranks)
    return Lengths(tuple(RequestClass(entry.count, entry.context, entry.query) for entry in dealt))


@pytest.mark.property
class TestAnyStructure:
    @pytest.mark.parametrize("on", [ASCEND, NVIDIA])
    @settings(max_examples=60)
    @given(data=st.data())
    def test_records_a_sound_step(self, on: str, data: st.DataObject) -> None:
        spec = model()
        scenario = data.draw(scenarios(spec, device(on)))
        program = record_step(setup_of(spec, scenario, on=on), rank_lengths(scenario))
        for block in program.blocks:
            for call in block.calls:
                check_work(call)
                check_shapes(call)
        check_residual_stream(program, scenario, spec)
        found = names(program)
        drafts = scenario.mtp.num_mtp_tokens
        shares = scenario.workload.mode == "decode" and drafts > 0
        assert found["dsa_indexer"] == 21 + (1 if shares else drafts)
        assert found["indexer_key_write"] == (drafts - 1 if shares else 0)
        assert found["multihead_latent_attention"] + found["multihead_latent_attention_quant"] == 78 + drafts

    @pytest.mark.parametrize("name", [GLM_5, DEEPSEEK_V32, DEEPSEEK_V3])
    @settings(max_examples=15)
    @given(data=st.data())
    def test_records_a_sound_step_of_the_other_models(self, name: str, data: st.DataObject) -> None:
        spec = model(name)
        scenario = data.draw(scenarios(spec, device(NVIDIA)))
        program = record_step(setup_of(spec, scenario, on=NVIDIA), rank_lengths(scenario))
        for block in program.blocks:
            for call in block.calls:
                check_work(call)
                check_shapes(call)
        check_residual_stream(program, scenario, spec)

    @pytest.mark.parametrize("on", [ASCEND, NVIDIA])
    @settings(max_examples=25)
    @given(data=st.data())
    def test_a_kind_priced_once_is_every_layer_priced(self, on: str, data: st.DataObject) -> None:
        spec, where = model(), device(on)
        scenario = data.draw(scenarios(spec, where))
        classes = request_classes(scenario.workload, scenario.mtp)
        once = cast_batch(resolve(spec, where, scenario), classes)
        every = cast_batch(resolve(spec, where, replace(scenario, disable_repetition=True)), classes)
        assert len(every.program.blocks) > len(once.program.blocks)
        assert once.latency_s == pytest.approx(every.latency_s, rel=1e-9)
        assert once.tokens_per_s == pytest.approx(every.tokens_per_s, rel=1e-9)
        assert once.bound == every.bound
        assert once.origin == every.origin
        for name in (item.name for item in fields(Footprint)):
            assert getattr(once.footprint, name) == pytest.approx(getattr(every.footprint, name), rel=1e-9), name
        assert once.timeline.busy_s.keys() == every.timeline.busy_s.keys()
        for stream, busy in once.timeline.busy_s.items():
            assert busy == pytest.approx(every.timeline.busy_s[stream], rel=1e-9)

    @settings(max_examples=25)
    @given(data=st.data())
    def test_arrays_of_batches_are_the_batches_one_by_one(self, data: st.DataObject) -> None:
        spec = model()
        scenario = data.draw(scenarios(spec, device(ASCEND)))
        setup = setup_of(spec, scenario)
        query = 1 + scenario.mtp.num_mtp_tokens
        counts, contexts = np.array([1, 7, 64]), np.array([0, 2047, 100_000])
        together = record_step(setup, Lengths((RequestClass(counts, contexts, query),)))
        singles = [
            record_step(setup, uniform(count, context, query))
            for count, context in zip(counts.tolist(), contexts.tolist(), strict=True)
        ]
        works = [list(works_of(program)) for program in (together, *singles)]
        for ours, *alone in zip(*works, strict=True):
            for index in range(3):
                mine = [float(np.broadcast_to(amount, 3)[index]) for amount in ours]
                assert mine == pytest.approx([float(amount) for amount in alone[index]], rel=1e-9)


@pytest.mark.property
class TestSumOverRanks:
    """What the ranks of a deployment compute adds up to the model, however it is split.

    Closed form of a step of GLM-5.2 on one rank, T tokens of its attention-DP rank, in multiply-adds: projections that
    are not split (q_a, kv_a, the indexer's) count fully, everything else 1/tp of its whole.
    """

    D, Q, R, P, N, V, H = 6144, 2048, 512, 64, 192, 256, 64
    INDEX_H, INDEX_E = 32, 128
    E, K, WIDTH, DENSE_WIDTH, VOCABULARY = 256, 8, 2048, 12_288, 154_880
    # Divisible by every group that tokens are split or gathered over.
    COUNT = 960

    def expected(self, parallel: Parallel, context: int) -> float:
        T, tp, seen = self.COUNT, parallel.tp_size, context + 1
        rows = T * min(2048, seen)
        mlapo = T * self.D * (self.Q + self.R + self.P) + T * self.Q * self.H * (self.N + self.P) / tp
        per_row = self.H * (self.R + self.P + self.R)
        attention = (T * self.H * self.R * (self.N + self.V) + rows * per_row) / tp + T * self.H * self.V * self.D / tp
        projections = self.Q * self.INDEX_H * self.INDEX_E + self.D * (self.INDEX_E + self.INDEX_H)
        indexer = T * projections + T * seen * self.INDEX_H * self.INDEX_E / parallel.dcp_size
        dense = T * 3 * self.D * self.DENSE_WIDTH / tp
        experts = T * 3 * self.D * self.WIDTH * (self.K + 1) / tp
        moe_tp = parallel.num_devices // parallel.pp_size // (parallel.ep_size * parallel.moe_dp_size)
        # Without EP each rank of the experts' TP group routes all its tokens.
        routed = T / tp * (moe_tp if parallel.ep_size == 1 else 1)
        router = routed * self.D * self.E
        head = T * self.D * self.VOCABULARY / tp
        return 2 * (78 * (mlapo + attention) + 21 * indexer + 3 * dense + 75 * (experts + router) + head)

    @staticmethod
    def matrix_flops(program: Program) -> float:
        return sum(float(p.matrix_flops) for _, call in program.calls() for p in call.op.work(call).parts)

    @settings(max_examples=60)
    @given(data=st.data())
    def test_matrix_flops_of_a_rank(self, data: st.DataObject) -> None:
        scenario = data.draw(scenarios(model(), device(ASCEND), balanced=True))
        scenario = replace(scenario, mtp=Mtp())
        context = data.draw(st.sampled_from([0, 100, 2047, 2048, 60_000]))
        program = record_step(setup_of(model(), scenario, mode="decode"), uniform(self.COUNT, context, 1))
        assert self.matrix_flops(program) == pytest.approx(self.expected(scenario.parallel, context), rel=1e-9)
