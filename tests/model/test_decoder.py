"""The recorded forward pass: which ops, in which order, on which values, with what work; for every structure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castoff.casting.footprint import Footprint
from castoff.casting.prediction import cast_structure
from castoff.casting.price import Pricing
from castoff.model.decoder import record_step
from castoff.model.setup import stage_starts
from castoff.ops.lengths import Lengths
from castoff.ops.linear import Weight
from castoff.ops.program import MAIN, BlockCall, OpCall, Program
from castoff.spec.backend import load_backend
from castoff.spec.model import ModelSpec
from castoff.spec.quant import AttentionAction, LinearAction
from castoff.spec.scenario import (
    Compilation,
    Mode,
    Mtp,
    Parallel,
    Quant,
    RequestClass,
    Scenario,
    Workload,
    deal_to_rank,
    request_classes,
)
from tests.generators import (
    ASCEND,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_5,
    GLM_52,
    MODELS,
    NVIDIA,
    device,
    model,
    scenarios,
    setup_of,
    uniform,
)

INDEXER_CALLS = {GLM_52: 21, GLM_5: 78, DEEPSEEK_V32: 61, DEEPSEEK_V3: 0}
LAYERS = {GLM_52: 78, GLM_5: 78, DEEPSEEK_V32: 61, DEEPSEEK_V3: 61}
MODES: tuple[Mode, ...] = ("decode", "prefill")
ATTENTION = ("multihead_latent_attention", "multihead_latent_attention_quant")


def program_of(
    spec: ModelSpec, scenario: Scenario | None = None, *, mode: Mode = "decode", on: str = ASCEND, repeat: bool = True,
    lengths: Lengths | None = None,
) -> Program:  # fmt: skip
    """One step of 8 requests, each with 4000 tokens in the cache."""
    scenario = scenario or Scenario()
    query = 1 + scenario.mtp.num_mtp_tokens if mode == "decode" else 512
    setup = setup_of(spec, scenario, on=on, mode=mode)
    return record_step(setup, lengths or uniform(8, 4000, query), repeat=repeat)


def names(program: Program) -> Counter[str]:
    return Counter(call.op.name for _, call in program.calls())


def layer_entries(program: Program) -> list[BlockCall]:
    """The blocks of the main stack's layers, in order."""
    return [entry for entry in program.schedule if entry.label.startswith("layer ")]


def draft_entries(program: Program) -> list[BlockCall]:
    return [entry for entry in program.schedule if entry.label.startswith("mtp ")]


def semantic_ops(entry: BlockCall) -> list[str]:
    """The ops of attention, in order, without `_quant`."""
    wanted = ("mlapo", "dsa_indexer", "indexer_key_write", "multihead_latent_attention")
    found = (call.op.name.removesuffix("_quant") for call in entry.block.calls)
    return [name for name in found if name in wanted]


def tokens_of(entry: BlockCall) -> Any:
    (call,) = (call for call in entry.block.calls if call.op.name in ATTENTION)
    return call.tensor(0).shape[0]


class TestCounts:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("repeat", [True, False])
    @pytest.mark.parametrize("name", MODELS)
    def test_indexers_and_attentions_of_a_step(self, name: str, repeat: bool, mode: Mode) -> None:
        found = names(program_of(model(name), mode=mode, repeat=repeat))
        assert found["dsa_indexer"] == INDEXER_CALLS[name]
        assert found["multihead_latent_attention"] == LAYERS[name]
        assert found["mlapo"] + found["mlapo_quant"] == LAYERS[name]
        assert found["indexer_key_write"] == 0

    @pytest.mark.parametrize(
        ("name", "mode", "indexers", "key_writes"),
        [
            # index_share_for_mtp_iteration: the first draft call's top-k serves the later two, which still write keys.
            (GLM_52, "decode", 21 + 1, 2),
            # Sharing among draft calls is for decode only.
            (GLM_52, "prefill", 21 + 3, 0),
            (GLM_5, "decode", 78 + 3, 0),
            (DEEPSEEK_V32, "decode", 61 + 3, 0),
            (DEEPSEEK_V3, "decode", 0, 0),
        ],
    )
    def test_with_three_draft_tokens(self, name: str, mode: Mode, indexers: int, key_writes: int) -> None:
        found = names(program_of(model(name), Scenario(mtp=Mtp(num_mtp_tokens=3)), mode=mode))
        assert found["dsa_indexer"] == indexers
        assert found["indexer_key_write"] == key_writes
        assert found["multihead_latent_attention"] == LAYERS[name] + 3

    @pytest.mark.parametrize("name", MODELS)
    def test_layer_kinds_are_recorded_once(self, name: str) -> None:
        spec = model(name)
        program = program_of(spec)
        kinds = {
            (spec.indexer_types[layer] if spec.indexer else "none", spec.mlp_layer_types[layer], layer == 0)
            for layer in range(spec.num_hidden_layers)
        }
        assert len(program.blocks) == len(kinds) + 2
        unrolled = program_of(spec, repeat=False)
        assert len(unrolled.blocks) == spec.num_hidden_layers + 2
        assert names(unrolled) == names(program)

    def test_layers_run_in_order(self) -> None:
        labels = [entry.label for entry in program_of(model(), Scenario(mtp=Mtp(num_mtp_tokens=2))).schedule]
        assert labels == ["embedding", *(f"layer {layer}" for layer in range(78)), "head", "mtp 0", "mtp 1"]


QUANTS: list[tuple[str, LinearAction, AttentionAction]] = [
    (ASCEND, "DISABLED", "DISABLED"),
    (ASCEND, "W8A8_DYNAMIC", "INT8"),
    (NVIDIA, "FP8", "FP8"),
    (NVIDIA, "MXFP4", "DISABLED"),
]


class TestOrder:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compile"])
    @pytest.mark.parametrize(("on", "linear", "cache"), QUANTS)
    @pytest.mark.parametrize("name", MODELS)
    def test_by_layer_kind(
        self, name: str, on: str, linear: LinearAction, cache: AttentionAction, compiled: bool, mode: Mode
    ) -> None:
        spec = model(name)
        scenario = Scenario(
            quant=Quant(quantize_linear_action=linear, quantize_attention_action=cache),
            compilation=Compilation(compile=compiled),
            mtp=Mtp(num_mtp_tokens=1),
        )
        program = program_of(spec, scenario, mode=mode, on=on)
        entries = layer_entries(program)
        assert len(entries) == spec.num_hidden_layers
        with_indexer = ["mlapo", "dsa_indexer", "multihead_latent_attention"]
        without = ["mlapo", "multihead_latent_attention"]
        for layer, entry in enumerate(entries):
            full = spec.indexer is not None and spec.indexer_types[layer] == "full"
            assert semantic_ops(entry) == (with_indexer if full else without), entry.label
        assert [semantic_ops(entry) for entry in draft_entries(program)] == [with_indexer if spec.indexer else without]
        found = names(program)
        assert found["mlapo_quant" if linear != "DISABLED" else "mlapo"] == spec.num_hidden_layers + 1
        quantised = "_quant" if cache != "DISABLED" else ""
        assert found[f"multihead_latent_attention{quantised}"] == spec.num_hidden_layers + 1

    def test_the_indexer_reads_what_mlapo_made(self) -> None:
        for entry in layer_entries(program_of(model())):
            calls = {call.op.name: call for call in entry.block.calls}
            if "dsa_indexer" in calls:
                mlapo, indexer = calls["mlapo_quant"], calls["dsa_indexer"]
                assert indexer.tensor(0).value == mlapo.tensor(0).value
                assert indexer.tensor(1).value == mlapo.outputs[3].value

    @pytest.mark.parametrize(("name", "eps"), [(GLM_52, 1e-5), (GLM_5, 1e-5), (DEEPSEEK_V32, 1e-6)])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_eps(self, name: str, eps: float, compiled: bool) -> None:
        scenario = Scenario(compilation=Compilation(compile=compiled), mtp=Mtp(num_mtp_tokens=1))
        calls = [call for _, call in program_of(model(name), scenario).calls()]
        assert {call.attributes["eps"] for call in calls if "rms_norm" in call.op.name} == {eps}
        # The two latent norms.
        assert {call.attributes["eps"] for call in calls if call.op.name == "mlapo_quant"} == {1e-6}


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("mode", MODES)
class TestSharedTopk:
    def test_every_layer_of_a_group_reads_the_ids_of_its_owner(self, mode: Mode, repeat: bool) -> None:
        spec = model()
        entries = layer_entries(program_of(spec, mode=mode, repeat=repeat))
        owners = set()
        for group in spec.index_groups:
            owner = entries[group.owner]
            ids = owner.outputs[2]
            assert ids is not None
            owners.add(ids)
            assert owner.inputs[2] is None
            for layer in group.layers[1:]:
                assert entries[layer].inputs[2] == ids
                assert entries[layer].outputs[2] == ids
        assert len(owners) == 21

    def test_inside_a_block_attention_reads_the_blocks_own_ids(self, mode: Mode, repeat: bool) -> None:
        for entry in layer_entries(program_of(model(), mode=mode, repeat=repeat)):
            calls = {call.op.name: call for call in entry.block.calls}
            used = calls["multihead_latent_attention"].tensor(2)
            given, left = entry.block.inputs[2], entry.block.outputs[2]
            assert left is not None
            assert used.value == left.value
            made = calls["dsa_indexer"].outputs[0] if "dsa_indexer" in calls else given
            assert made is not None
            assert made.value == used.value

    def test_ids_end_with_their_group(self, mode: Mode, repeat: bool) -> None:
        spec = model()
        program = program_of(spec, Scenario(mtp=Mtp(num_mtp_tokens=2)), mode=mode, repeat=repeat)
        position = {entry.label: index for index, entry in enumerate(program.schedule)}
        for group in spec.index_groups:
            ids = program.schedule[position[f"layer {group.owner}"]].outputs[2]
            readers = [index for index, entry in enumerate(program.schedule) if ids in entry.inputs]
            assert readers == [position[f"layer {layer}"] for layer in group.layers[1:]]

    def test_the_chain_is_kept_in_a_model_of_other_groups(self, mode: Mode, repeat: bool) -> None:
        """full → shared → shared passes the same top-k along."""
        spec = replace(
            model(),
            num_hidden_layers=5,
            indexer_types=("full", "shared", "shared", "full", "shared"),
            mlp_layer_types=("dense", "dense", "sparse", "sparse", "sparse"),
        )
        entries = layer_entries(program_of(spec, mode=mode, repeat=repeat))
        first, second = entries[0].outputs[2], entries[3].outputs[2]
        assert first != second
        assert [entry.outputs[2] for entry in entries] == [first, first, first, second, second]
        assert [entry.inputs[2] for entry in entries] == [None, first, first, None, second]


class TestDrafts:
    K = 3

    def drafts(self, *, on: str = ASCEND, mode: Mode = "decode", name: str = GLM_52) -> list[BlockCall]:
        scenario = Scenario(mtp=Mtp(num_mtp_tokens=self.K), quant=Quant(quantize_linear_action="DISABLED"))
        return draft_entries(program_of(model(name), scenario, mode=mode, on=on))

    def test_later_calls_use_the_first_calls_ids(self) -> None:
        first, *later = self.drafts()
        ids = first.outputs[3]
        assert ids is not None
        assert first.inputs[1] is None
        assert [(entry.inputs[1], entry.outputs[3]) for entry in later] == [(ids, ids)] * 2
        for entry in later:
            assert semantic_ops(entry) == ["mlapo", "indexer_key_write", "multihead_latent_attention"]

    def test_without_sharing_every_call_makes_its_own(self) -> None:
        entries = self.drafts(name=GLM_5)
        assert [entry.inputs[1] for entry in entries] == [None] * 3
        ids = {entry.outputs[3] for entry in entries}
        assert None not in ids
        assert len(ids) == 3

    def test_each_call_feeds_on_the_hidden_state_before(self) -> None:
        scenario = Scenario(mtp=Mtp(num_mtp_tokens=self.K))
        program = program_of(model(), scenario)
        head = next(entry for entry in program.schedule if entry.label == "head")
        states = [head.outputs[0], *(entry.outputs[0] for entry in draft_entries(program))]
        assert [entry.inputs[0] for entry in draft_entries(program)] == states[:-1]
        assert len(set(states)) == 4

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(
        ("on", "later"),
        [
            # CANN computes the window of k + 1 tokens in every call, others only in the first.
            (ASCEND, 8 * 4),
            (NVIDIA, 8),
        ],
    )
    def test_tokens_of_each_call(self, on: str, later: int, mode: Mode) -> None:
        first = 8 * 4 if mode == "decode" else 8 * 512
        assert [tokens_of(entry) for entry in self.drafts(on=on, mode=mode)] == [first, later, later]

    def test_the_requests_grow_by_one_token_a_call(self) -> None:
        lengths = [
            call.attributes["lengths"]
            for entry in self.drafts()
            for call in entry.block.calls
            if call.op.name == "multihead_latent_attention"
        ]
        assert [own.total_tokens for own in lengths] == [8 * (4004 + draft) for draft in range(3)]

    def test_one_token_per_request_is_sampled(self) -> None:
        for entry in self.drafts(mode="prefill"):
            (call,) = (call for call in entry.block.calls if call.op.name == "sample")
            assert call.outputs[0].shape == (8,)

    def test_a_prompt_shorter_than_the_window(self) -> None:
        scenario = Scenario(workload=Workload(query_length=1), mtp=Mtp(num_mtp_tokens=16))
        program = record_step(setup_of(model(), scenario), uniform(1, 0, 1))
        for _, call in program.calls():
            check_work(call)


class TestHead:
    @pytest.mark.parametrize(
        ("mode", "rows"),
        [
            # One new token per request; every token of a decode step is verified.
            ("prefill", 8),
            ("decode", 32),
        ],
    )
    def test_sampled_tokens(self, mode: Mode, rows: int) -> None:
        program = program_of(model(), Scenario(mtp=Mtp(num_mtp_tokens=3)), mode=mode)
        head = next(entry for entry in program.schedule if entry.label == "head")
        (call,) = (call for call in head.block.calls if call.op.name == "sample")
        assert call.outputs[0].shape == (rows,)
        assert call.tensor(0).shape == (rows, 154_880)


class TestFusions:
    FUSED = frozenset({"add_rms_norm", "add_rms_norm2", "add_rms_norm2_dynamic_quant", "grouped_matmul_quant_swiglu"})

    def test_eager_has_none(self) -> None:
        found = set(names(program_of(model())))
        assert not found & self.FUSED
        assert {"add", "rms_norm", "grouped_matmul_quant", "swiglu"} <= found

    def test_compiled_has_all_that_the_backend_knows(self) -> None:
        found = names(program_of(model(), Scenario(compilation=Compilation(compile=True))))
        assert found["grouped_matmul_quant_swiglu"] == 75
        # One norm after the last layer; 155 between, of which the 3 before a dense MLP are quantised; layer 0 has none.
        assert found["add_rms_norm"] == 1
        assert found["add_rms_norm2"] == 77 + 75
        assert found["add_rms_norm2_dynamic_quant"] == 3
        assert found["rms_norm"] == 1

    def test_static_quantisation_does_not_fuse_with_a_norm(self) -> None:
        scenario = Scenario(compilation=Compilation(compile=True), quant=Quant(quantize_linear_action="W8A8_STATIC"))
        found = names(program_of(model(), scenario))
        assert found["add_rms_norm2_dynamic_quant"] == 0
        assert found["add_rms_norm2"] == 77 + 78

    @pytest.mark.parametrize("compiled", [False, True])
    def test_matmul_all_reduce(self, compiled: bool) -> None:
        options = Compilation(compile=compiled, enable_matmul_allreduce=True)
        parallel = Parallel(num_devices=16, tp_size=16, ep_size=16)
        fused = names(program_of(model(), Scenario(parallel=parallel, compilation=options)))
        # o_proj of 78 layers and down_proj of 3 dense ones.
        assert fused["matmul_all_reduce"] == 81
        assert fused["all_reduce"] == 0
        plain = names(program_of(model(), Scenario(parallel=parallel, compilation=Compilation(compile=compiled))))
        assert (plain["matmul_all_reduce"], plain["all_reduce"]) == (0, 81)

    def test_dispatch_ffn_combine(self) -> None:
        parallel = Parallel(num_devices=16, tp_size=16, ep_size=16)
        options = Compilation(enable_dispatch_ffn_combine=True)
        found = names(program_of(model(), Scenario(parallel=parallel, compilation=options)))
        assert found["dispatch_ffn_combine"] == 75
        assert found["all_to_all"] == found["grouped_matmul_quant"] == 0
        plain = names(program_of(model(), Scenario(parallel=parallel)))
        assert plain["all_to_all"] == plain["grouped_matmul_quant"] == 150

    def test_the_shared_expert_has_a_stream_of_its_own(self) -> None:
        program = program_of(model(), Scenario(compilation=Compilation(enable_multistream=True)))
        assert program.streams == (MAIN, "shared_expert")
        beside = Counter(call.op.name for _, call in program.calls() if call.stream == "shared_expert")
        assert beside == {"linear_quant": 150, "swiglu": 75, "dynamic_quantize": 150}
        assert program_of(model()).streams == (MAIN,)


def check_work(call: OpCall) -> None:
    """Nothing of an op's work is negative or not a number, and no collective has a group of one."""
    work = call.op.work(call)
    for part in work.parts:
        amounts = (part.matrix_flops, part.vector_flops, part.bytes, part.gather_bytes, part.gather_rows)
        assert all(np.all(np.isfinite(a)) and np.all(np.asarray(a) >= 0) for a in amounts), (call.op.name, part)
    for collective in work.collectives:
        assert collective.group.size > 1, (call.op.name, collective)
        assert np.all(np.asarray(collective.bytes) > 0)


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
        setup = setup_of(spec, scenario, on=on)
        pricing = Pricing(where, load_backend(where.default_backend))
        classes = request_classes(scenario.workload, scenario.mtp)
        once = cast_structure(setup, pricing, classes, scenario)
        every = cast_structure(setup, pricing, classes, replace(scenario, disable_repetition=True))
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


def works_of(program: Program) -> Iterator[tuple[Any, ...]]:
    """FLOPs, bytes and message of every recorded call."""
    for block in program.blocks:
        for call in block.calls:
            work = call.op.work(call)
            yield work.flops, work.bytes, sum(collective.bytes for collective in work.collectives)


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


class TestMessages:
    """Every message of a decode step of GLM-5.2 with 32 tokens on 16 ranks, with TP 16 and EP 16."""

    T, D, V = 32, 6144, 154_880

    def messages(self, compilation: Compilation | None = None, **quant: Any) -> Counter[tuple[str, str, float]]:
        scenario = Scenario(
            parallel=Parallel(num_devices=16, tp_size=16, ep_size=16),
            quant=Quant(**quant),
            compilation=compilation or Compilation(),
        )
        program = record_step(setup_of(model(), scenario, on=NVIDIA), uniform(32, 4000, 1))
        return Counter(
            (message.kind, message.group.name, float(message.bytes))
            for _, call in program.calls()
            for message in call.op.work(call).collectives
        )

    def test_bf16(self) -> None:
        # Two tokens a rank are routed, each to 8 experts.
        rows = 2 * 8 * self.D
        assert self.messages(quantize_linear_action="DISABLED") == {
            # o_proj of 78 layers, down_proj of 3 dense ones
            ("all_reduce", "tp", 2 * self.T * self.D): 81,
            # dispatch and combine
            ("all_to_all", "ep", 2 * rows): 150,
            # the tokens of all TP ranks together again
            ("all_gather", "tp", 2 * self.T * self.D): 75,
            # logits
            ("all_gather", "lmhead_tp", 2 * self.T * self.V): 1,
        }

    def test_dispatch_in_the_experts_format(self) -> None:
        found = self.messages(quantize_linear_action="FP8")
        assert found["all_to_all", "ep", 2 * 8 * self.D] == 75
        assert found["all_to_all", "ep", 2 * 2 * 8 * self.D] == 75

    def test_sequence_parallelism(self) -> None:
        found = self.messages(Compilation(enable_sequence_parallel=True), quantize_linear_action="DISABLED")
        whole = 2 * self.T * self.D
        # Before mlapo of 78 layers, before a dense MLP of 3, after the last norm.
        assert found["all_gather", "tp", whole] == 78 + 3 + 1
        assert found["reduce_scatter", "tp", whole] == 78 + 3
        assert found["all_to_all", "ep", 2 * 2 * 8 * self.D] == 150


class TestExpertRows:
    """Rows of token copies that a rank's experts get: 32 tokens on 16 ranks with TP 16, EP 16, 8 experts a token."""

    def rows(self, tokens: int = 32, **options: Any) -> float:
        """First dim of the product that a rank's (routed, or external shared) experts begin with."""
        parallel = Parallel(num_devices=16, tp_size=16, ep_size=16, **options)
        program = record_step(setup_of(model(), Scenario(parallel=parallel)), uniform(tokens, 4000, 1))
        hosts = options.get("host_external_shared_experts", False)
        name = "linear_quant" if hosts else "grouped_matmul_quant"
        found = {
            float(call.tensor(0).shape[0])
            for _, call in program.calls()
            if call.op.name == name and call.tensor(1).shape[-2:] == (4096, 6144)
        }
        (rows,) = found
        return rows

    def test_balanced(self) -> None:
        assert self.rows() == 32 * 8 / 16

    def test_the_busiest_rank(self) -> None:
        assert self.rows(expert_load_imbalance=1.25) == 1.25 * 32 * 8 / 16

    def test_no_rank_gets_more_than_every_copy(self) -> None:
        # 32 tokens, each with at most 8 copies for the 16 experts of a rank.
        assert self.rows(expert_load_imbalance=1000.0) == 32 * 8

    def test_beside_external_shared_experts(self) -> None:
        # The routed copies of all 16 ranks meet 14 ranks.
        assert self.rows(enable_external_shared_experts=True) == pytest.approx(32 * 8 / 14)

    def test_on_external_shared_experts(self) -> None:
        # Every token, on one of the two.
        assert self.rows(enable_external_shared_experts=True, host_external_shared_experts=True) == 32 / 2


class TestDcp:
    """The cache of a TP group is split by token over its DCP ranks."""

    PARALLEL = Parallel(num_devices=8, tp_size=8, ep_size=8, dcp_size=4)

    def layer(self, index: int) -> list[OpCall]:
        program = program_of(model(), Scenario(parallel=self.PARALLEL))
        return layer_entries(program)[index].block.calls

    def test_attention_reads_the_best_of_what_all_ranks_selected(self) -> None:
        calls = {call.op.name: call for call in self.layer(2)}
        merge, attention = calls["merge_topk"], calls["multihead_latent_attention"]
        ids, scores = merge.tensor(1), merge.tensor(0)
        # Each of 4 ranks has 1,001 of the 4,004 tokens of a request, fewer than the top-k.
        assert ids.shape == scores.shape == (8, 4 * 1001)
        assert merge.outputs[0].shape == (8, 2048)
        assert attention.tensor(2).value == merge.outputs[0].value

    def test_ids_and_scores_are_gathered_on_full_layers_only(self) -> None:
        def gathered(index: int) -> list[str]:
            return [call.tensor(0).dtype for call in self.layer(index) if group_name(call) == "dcp"]

        # Ids, their scores, queries; then softmax sums and partial outputs.
        assert gathered(2) == ["int32", "fp32", "bf16", "fp32", "bf16"]
        assert gathered(3) == ["bf16", "fp32", "bf16"]

    def test_a_shared_layer_takes_the_merged_ids(self) -> None:
        entries = layer_entries(program_of(model(), Scenario(parallel=self.PARALLEL)))
        assert entries[3].inputs[2] == entries[2].outputs[2]

    def test_the_output_has_the_heads_of_the_rank(self) -> None:
        for index in (2, 3):
            expand = next(call for call in self.layer(index) if call.op.name == "expand_value")
            assert expand.outputs[0].shape == (8, 64 // 8, 256)

    def test_a_rank_scores_the_heads_of_its_group_against_its_own_rows(self) -> None:
        calls = {call.op.name: call for call in self.layer(3)}
        attention = calls["multihead_latent_attention"]
        # 4 ranks of 8 heads, in the latent space: 512 + 64.
        assert attention.tensor(0).shape == (8, 32, 576)
        assert attention.outputs[0].shape == (8, 32, 512)
        (gather,) = (part for part in attention.op.work(attention).parts if part.name == "kv_gather")
        assert gather.gather_rows == 8 * 2048 / 4


def group_name(call: OpCall) -> str | None:
    group = call.attributes.get("group")
    return None if group is None else str(group.name)


class TestStages:
    @pytest.mark.parametrize("name", MODELS)
    def test_cuts_fall_on_group_starts(self, name: str) -> None:
        spec = model(name)
        allowed = [group.owner for group in spec.index_groups] or list(range(spec.num_hidden_layers))
        for stages in range(1, len(allowed) + 1):
            starts = stage_starts(spec, stages)
            assert len(starts) == stages
            assert starts[0] == 0
            assert list(starts) == sorted(set(starts))
            assert set(starts) <= set(allowed)

    def test_even_cuts_where_every_layer_is_a_group(self) -> None:
        assert stage_starts(model(GLM_5), 6) == (0, 13, 26, 39, 52, 65)

    @pytest.mark.golden
    def test_glm_52_in_four_stages(self) -> None:
        # Ideal cuts at 19.5, 39 and 58.5; groups start at 18, 22, 38, 42, 58, 62.
        assert stage_starts(model(), 4) == (0, 18, 38, 58)

    @pytest.mark.parametrize("pp", [1, 2, 3, 7, 21])
    def test_the_residual_stream_travels_and_the_ids_do_not(self, pp: int) -> None:
        program = program_of(model(), Scenario(parallel=Parallel(num_devices=pp, pp_size=pp)))
        starts = stage_starts(model(), pp)
        found = names(program)
        # x and the residual.
        assert found["send_recv"] == 2 * (pp - 1)
        for layer, entry in enumerate(layer_entries(program)):
            assert entry.stage == sum(start <= layer for start in starts) - 1
        moves = [entry for entry in program.schedule if entry.block.key.startswith("next_stage")]
        assert [len(entry.inputs) for entry in moves] == [2] * (pp - 1)

    def test_drafts_are_in_the_last_stage(self) -> None:
        scenario = Scenario(parallel=Parallel(num_devices=4, pp_size=4), mtp=Mtp(num_mtp_tokens=2))
        assert [entry.stage for entry in draft_entries(program_of(model(), scenario))] == [3, 3]


class TestSequenceParallel:
    @pytest.mark.parametrize("mode", MODES)
    def test_it_replaces_all_reduces_by_halves_of_them(self, mode: Mode) -> None:
        parallel = Parallel(num_devices=16, tp_size=16, ep_size=16)
        options = Compilation(enable_sequence_parallel=True)
        found = names(program_of(model(), Scenario(parallel=parallel, compilation=options), mode=mode))
        assert found["all_reduce"] == 0
        # After o_proj of every layer and after a dense MLP.
        assert found["reduce_scatter"] == 78 + 3

    def test_it_means_nothing_for_one_rank(self) -> None:
        options = Compilation(enable_sequence_parallel=True)
        assert names(program_of(model(), Scenario(compilation=options))) == names(program_of(model()))


def test_requests_of_a_ragged_batch_share_one_step() -> None:
    """Work is that of the requests together, whatever their order."""
    setup = setup_of(model(), Scenario())
    ragged = Lengths((RequestClass(1, 100_000, 1), RequestClass(3, 10, 1), RequestClass(2, 2048, 1)))
    turned = Lengths(tuple(reversed(ragged.classes)))
    first, second = (sorted(works_of(record_step(setup, lengths))) for lengths in (ragged, turned))
    assert first == second
