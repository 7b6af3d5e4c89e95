"""The recorded program over several ranks: messages, rows of experts, stages, split tokens and keys."""

from collections import Counter
from typing import Any

import pytest

from castoff.model.record import record_step
from castoff.model.setup import stage_starts
from castoff.ops.program import OpCall
from castoff.spec.scenario import (
    Compilation,
    Mode,
    Mtp,
    Parallel,
    Quant,
    Scenario,
)
from tests.generators import (
    GLM_5,
    MODELS,
    NVIDIA,
    model,
    setup_of,
    uniform,
)
from tests.model.programs import MODES, draft_entries, layer_entries, names, program_of


class TestMessages:
    """Every message of a decode step of GLM-5.2 with 32 tokens on 16 ranks, with TP 16 and EP 16."""

    T, D, V = 32, 6144, 154_880

    def messages(
        self, compilation: Compilation | None = None, backend: str = "nvidia", **quant: Any
    ) -> Counter[tuple[str, str, float]]:
        scenario = Scenario(
            backend=backend,
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

    def test_unequal_experts_load_the_busiest_rank_more(self) -> None:
        # What it receives is more than the two tokens' copies that it sends.
        ((_, _, busiest),) = (
            key for key in self.messages(backend="sglang", quantize_linear_action="DISABLED") if key[0] == "all_to_all"
        )
        assert 1.2 < busiest / (2 * 2 * 8 * self.D) < 3

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
