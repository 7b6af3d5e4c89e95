"""The recorded forward pass: which ops, in which order, on which values, with what work; for every structure."""

from collections import Counter
from dataclasses import replace

import pytest

from castoff.model.record import record_step
from castoff.ops.lengths import Lengths
from castoff.ops.program import MAIN, BlockCall
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
)
from tests.generators import (
    ASCEND,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_5,
    GLM_52,
    MODELS,
    NVIDIA,
    model,
    setup_of,
    uniform,
)
from tests.model.programs import MODES, check_work, draft_entries, layer_entries, names, program_of, tokens_of, works_of

INDEXER_CALLS = {GLM_52: 21, GLM_5: 78, DEEPSEEK_V32: 61, DEEPSEEK_V3: 0}


LAYERS = {GLM_52: 78, GLM_5: 78, DEEPSEEK_V32: 61, DEEPSEEK_V3: 61}


def semantic_ops(entry: BlockCall) -> list[str]:
    """The ops of attention, in order, without `_quant`."""
    wanted = ("mlapo", "dsa_indexer", "indexer_key_write", "multihead_latent_attention")
    found = (call.op.name.removesuffix("_quant") for call in entry.block.calls)
    return [name for name in found if name in wanted]


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


def test_requests_of_a_ragged_batch_share_one_step() -> None:
    """Work is that of the requests together, whatever their order."""
    setup = setup_of(model(), Scenario())
    ragged = Lengths((RequestClass(1, 100_000, 1), RequestClass(3, 10, 1), RequestClass(2, 2048, 1)))
    turned = Lengths(tuple(reversed(ragged.classes)))
    first, second = (sorted(works_of(record_step(setup, lengths))) for lengths in (ragged, turned))
    assert first == second
