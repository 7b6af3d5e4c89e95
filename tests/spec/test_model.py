"""Shipped models against the published facts; the indexer schedule and what follows from it."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from castoff.errors import CastoffError
from castoff.spec.model import (
    IndexGroup,
    config_text,
    load_model,
    raw_config,
    resolve_topk_limit,
    shipped_models,
)
from tests.spec.configs import Config, read, refused

FULL_LAYERS_OF_GLM_52 = (0, 1, *range(2, 75, 4))
GLM = ("zai-org/GLM-5", "zai-org/GLM-5.1", "zai-org/GLM-5.2")
GLM_FP8 = tuple(f"{model}-FP8" for model in GLM)
DEEPSEEK = ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3.2")


@pytest.fixture
def glm() -> Config:
    return raw_config("zai-org/GLM-5.2")


@pytest.fixture
def deepseek() -> Config:
    return raw_config("deepseek-ai/DeepSeek-V3.2")


class TestShippedModels:
    def test_ids(self) -> None:
        assert set(shipped_models()) == {*GLM, *GLM_FP8, *DEEPSEEK}
        assert list(shipped_models()) == sorted(shipped_models())

    @pytest.mark.parametrize("model", [*GLM, *GLM_FP8, *DEEPSEEK])
    def test_loads_without_a_warning_under_its_id(self, model: str) -> None:
        assert load_model(model).name == model
        assert json.loads(config_text(model)) == raw_config(model)

    @pytest.mark.parametrize("model", [*GLM, *GLM_FP8])
    def test_glm_facts(self, model: str) -> None:
        spec = load_model(model)
        newest = "5.2" in model
        assert spec.family == "glm_moe_dsa"
        assert (spec.num_hidden_layers, spec.num_nextn_predict_layers) == (78, 1)
        assert (spec.hidden_size, spec.vocab_size, spec.num_attention_heads) == (6144, 154_880, 64)
        assert (spec.kv_lora_rank, spec.q_lora_rank) == (512, 2048)
        assert (spec.qk_rope_head_dim, spec.qk_nope_head_dim, spec.v_head_dim, spec.qk_head_dim) == (64, 192, 256, 256)
        assert spec.indexer is not None
        assert (spec.indexer.index_topk, spec.indexer.index_n_heads, spec.indexer.index_head_dim) == (2048, 32, 128)
        assert spec.indexer.rope_interleave
        assert spec.indexer.share_for_mtp_iteration == newest
        assert (spec.moe.n_routed_experts, spec.moe.num_experts_per_tok, spec.moe.n_shared_experts) == (256, 8, 1)
        assert (spec.moe.moe_intermediate_size, spec.intermediate_size) == (2048, 12_288)
        assert (spec.moe.n_group, spec.moe.topk_group, spec.moe.routed_scaling_factor) == (1, 1, 2.5)
        assert spec.moe.norm_topk_prob
        assert spec.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 75
        assert (spec.rope.theta, spec.rope.type) == (8e6 if newest else 1e6, "default")
        assert (spec.rms_norm_eps, spec.latent_norm_eps) == (1e-5, 1e-6)
        assert spec.max_position_embeddings == (1_048_576 if newest else 202_752)
        assert (spec.tie_word_embeddings, spec.dtype) == (False, "bfloat16")
        assert spec.eos_token_ids == (154820, 154827, 154829)
        assert spec.softmax_scale == 256**-0.5
        assert spec.num_full_layers == (21 if newest else 78)

    @pytest.mark.parametrize("model", DEEPSEEK)
    def test_deepseek_facts(self, model: str) -> None:
        spec = load_model(model)
        assert (spec.num_hidden_layers, spec.num_nextn_predict_layers) == (61, 1)
        assert (spec.hidden_size, spec.vocab_size, spec.num_attention_heads) == (7168, 129_280, 128)
        assert (spec.kv_lora_rank, spec.q_lora_rank) == (512, 1536)
        assert (spec.qk_rope_head_dim, spec.qk_nope_head_dim, spec.v_head_dim, spec.qk_head_dim) == (64, 128, 128, 192)
        assert (spec.moe.n_routed_experts, spec.moe.num_experts_per_tok, spec.moe.n_shared_experts) == (256, 8, 1)
        assert (spec.moe.moe_intermediate_size, spec.intermediate_size) == (2048, 18_432)
        assert (spec.moe.n_group, spec.moe.topk_group, spec.moe.routed_scaling_factor) == (8, 4, 2.5)
        assert spec.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 58
        assert (spec.rope.theta, spec.rope.type, spec.rope.factor) == (1e4, "yarn", 40)
        assert spec.rope.original_max_position_embeddings == 4096
        assert (spec.rms_norm_eps, spec.max_position_embeddings, spec.dtype) == (1e-6, 163_840, "bfloat16")
        assert spec.eos_token_ids == (1,)
        assert spec.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2, rel=1e-15)
        assert spec.softmax_scale / 192**-0.5 == pytest.approx(1.874, abs=5e-4)

    def test_deepseek_v32_has_an_indexer_on_every_layer(self) -> None:
        spec = load_model("deepseek-ai/DeepSeek-V3.2")
        assert spec.family == "deepseek_v32"
        assert spec.indexer is not None
        assert (spec.indexer.index_topk, spec.indexer.index_n_heads, spec.indexer.index_head_dim) == (2048, 64, 128)
        assert not spec.indexer.rope_interleave
        assert not spec.indexer.share_for_mtp_iteration
        assert spec.num_full_layers == len(spec.index_groups) == 61

    @pytest.mark.parametrize("model", DEEPSEEK[:2])
    def test_deepseek_v3_has_no_indexer(self, model: str) -> None:
        spec = load_model(model)
        assert spec.family == "deepseek_v3"
        assert spec.indexer is None
        assert (spec.indexer_types, spec.index_groups, spec.num_full_layers) == ((), (), 0)

    @pytest.mark.parametrize("model", [*GLM_FP8, *DEEPSEEK])
    def test_fp8_checkpoints(self, model: str) -> None:
        quant = load_model(model).checkpoint_quant
        assert quant is not None
        assert (quant.quant_method, quant.fmt, quant.activation_scheme) == ("fp8", "e4m3", "dynamic")
        assert quant.weight_block_size == (128, 128)
        assert quant.scale_fmt == ("ue8m0" if model.endswith("V3.2") else None)
        kept = quant.modules_to_not_convert
        if model in GLM_FP8:
            assert {"lm_head", "model.embed_tokens", "model.layers.3.mlp.gate"} <= set(kept)
            assert not any(re.search(r"kv_b_proj|wq_b|indexer\.wk", module) for module in kept)
        else:
            assert kept == ()

    @pytest.mark.parametrize("model", GLM)
    def test_fp8_form_differs_only_in_its_quantisation(self, model: str) -> None:
        plain = load_model(model)
        assert plain.checkpoint_quant is None
        assert replace(load_model(f"{model}-FP8"), name=model, checkpoint_quant=None) == plain

    def test_derived_config_says_so(self) -> None:
        derived = [model for model in shipped_models() if "_castoff_source" in raw_config(model)]
        assert derived == ["zai-org/GLM-5.1-FP8"]

    def test_configs_are_the_published_ones(self, shared_data: Any) -> None:
        for path in (shared_data / "models").glob("*.json"):
            assert config_text(path.stem.replace("--", "/", 1)) == path.read_text()


class TestSchedule:
    def test_of_glm_52(self) -> None:
        spec = load_model("zai-org/GLM-5.2")
        full = tuple(layer for layer, kind in enumerate(spec.indexer_types) if kind == "full")
        assert full == FULL_LAYERS_OF_GLM_52
        assert (spec.num_full_layers, spec.indexer_types.count("shared")) == (21, 57)
        groups = spec.index_groups
        assert len(groups) == 21
        assert groups[:4] == (
            IndexGroup(owner=0, layers=(0,)),
            IndexGroup(owner=1, layers=(1,)),
            IndexGroup(owner=2, layers=(2, 3, 4, 5)),
            IndexGroup(owner=6, layers=(6, 7, 8, 9)),
        )
        assert groups[-1] == IndexGroup(owner=74, layers=(74, 75, 76, 77))

    @pytest.mark.parametrize(
        "spelling",
        [
            {"indexer_types": None},
            {"indexer_types": None, "index_topk_pattern": "FFF" + "SSSF" * 18 + "SSS"},
            {"indexer_types": None, "index_topk_pattern": ["F"] * 3 + ["S", "S", "S", "F"] * 18 + ["S"] * 3},
            {
                "indexer_types": None,
                "index_topk_pattern": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3,
            },
            # One entry more is the MTP block's.
            {"indexer_types": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 19},
            {"indexer_types": None, "index_topk_pattern": "FFF" + "SSSF" * 19},
        ],
        ids=["freq", "letters", "letter list", "word list", "words and MTP", "letters and MTP"],
    )
    def test_spellings_agree(self, glm: Config, spelling: Config) -> None:
        assert read(glm | spelling) == read(glm)

    def test_precedence(self, glm: Config) -> None:
        every_second = ["full", "shared"] * 39
        glm |= {"index_topk_pattern": "FSS" * 26, "index_topk_freq": 4, "indexer_types": every_second}
        assert read(glm).num_full_layers == 39
        glm["indexer_types"] = None
        assert read(glm).num_full_layers == 26
        glm["index_topk_pattern"] = None
        assert read(glm).num_full_layers == 21
        glm["index_topk_freq"] = None
        assert read(glm).num_full_layers == 78
        del glm["index_skip_topk_offset"], glm["index_topk_pattern"], glm["indexer_types"], glm["index_topk_freq"]
        assert read(glm).num_full_layers == 78

    def test_missing_offset_is_two(self, glm: Config) -> None:
        del glm["indexer_types"], glm["index_skip_topk_offset"]
        spec = read(glm)
        assert spec.indexer_types[:7] == ("full", "full", "shared", "shared", "shared", "full", "shared")
        assert spec == read(glm | {"index_skip_topk_offset": 2})

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"indexer_types": ["full"] * 77}, "indexer_types has 77 entries for 78 layers: nothing for layer 77"),
            ({"indexer_types": []}, "indexer_types has 0 entries for 78 layers: nothing for layer 0"),
            ({"indexer_types": ["full"] * 80}, "indexer_types has 80 entries.*78 layers and 1 MTP.*no layer 79"),
            ({"indexer_types": ["full"] * 5 + ["half"] + ["full"] * 72}, 'says "half" for layer 5; allowed: full, sh'),
            ({"indexer_types": ["full"] * 5 + [["full"]] + ["full"] * 72}, r'says \["full"\] for layer 5'),
            ({"indexer_types": ["full"] * 5 + [None] + ["full"] * 72}, "says null for layer 5"),
            ({"indexer_types": ["F"] * 78}, 'says "F" for layer 0'),
            ({"indexer_types": ["shared"] + ["full"] * 77}, "makes layer 0 shared"),
            ({"indexer_types": ["full"] * 78 + ["shared"]}, "makes layer 78 shared; it is an MTP block"),
            ({"indexer_types": "full"}, 'must be a list, not "full"'),
            ({"indexer_types": None, "index_topk_pattern": "F" * 77}, "index_topk_pattern has 77 entries"),
            ({"indexer_types": None, "index_topk_pattern": "F" * 80}, "index_topk_pattern has 80 entries"),
            ({"indexer_types": None, "index_topk_pattern": "FX" * 39}, 'says "X" for layer 1; allowed: F, S'),
            ({"indexer_types": None, "index_topk_pattern": "f" * 78}, 'says "f" for layer 0'),
            ({"indexer_types": None, "index_topk_pattern": "SF" * 39}, "index_topk_pattern makes layer 0 shared"),
            ({"indexer_types": None, "index_topk_pattern": 4}, "index_topk_pattern must be a list, not 4"),
            ({"indexer_types": None, "index_topk_freq": 0}, "index_topk_freq must be between 1 and"),
            ({"indexer_types": None, "index_skip_topk_offset": -1}, "index_skip_topk_offset must be between 0"),
            ({"indexer_types": None, "index_skip_topk_offset": 0}, "index_topk_freq makes layer 0 shared"),
        ],
    )
    def test_errors(self, glm: Config, change: Config, said: str) -> None:
        assert re.search(said, refused(glm | change))

    def test_group_of_a_layer(self) -> None:
        spec = load_model("zai-org/GLM-5.2")
        assert spec.index_group_of(5).owner == 2
        assert spec.index_group_of(77).owner == 74
        for layer in (-1, 78):
            with pytest.raises(CastoffError, match=f"no index group for layer {layer}; layers with one: 0 to 77"):
                spec.index_group_of(layer)
        with pytest.raises(CastoffError, match="no indexer"):
            load_model("deepseek-ai/DeepSeek-V3").index_group_of(0)

    def test_mtp_blocks_run_their_own_indexer(self) -> None:
        spec = load_model("zai-org/GLM-5.2")
        assert spec.mtp_indexer_types(0) == spec.indexer_types
        assert spec.mtp_indexer_types(2) == (*spec.indexer_types, "full", "full")
        assert load_model("deepseek-ai/DeepSeek-V3").mtp_indexer_types(1) == ()

    def test_mtp_blocks_repeat_the_last_mlp(self) -> None:
        spec = load_model("zai-org/GLM-5.2")
        assert spec.mtp_mlp_layer_types(0) == spec.mlp_layer_types
        assert spec.mtp_mlp_layer_types(2) == (*spec.mlp_layer_types, "sparse", "sparse")


class TestMlpLayerTypes:
    def test_derived_or_written_they_agree(self, glm: Config) -> None:
        spec = read(glm)
        del glm["mlp_layer_types"]
        assert read(glm) == spec
        del glm["first_k_dense_replace"]
        assert "first_k_dense_replace is missing" in refused(glm)
        glm["mlp_layer_types"] = ["dense"] * 3 + ["sparse"] * 76
        assert read(glm) == spec

    def test_more_dense_layers_than_layers(self, deepseek: Config) -> None:
        assert read(deepseek | {"first_k_dense_replace": 99}).mlp_layer_types == ("dense",) * 61

    @pytest.mark.parametrize(
        ("types", "said"),
        [
            (["dense"] * 4 + ["sparse"] * 74, "layer 3 is dense, but first_k_dense_replace is 3"),
            (["dense"] * 2 + ["sparse"] * 76, "layer 2 is sparse, but first_k_dense_replace is 3"),
            (["dense"] * 3 + ["sparse"] * 74, "mlp_layer_types has 77 entries"),
            (["dense"] * 3 + ["sparse"] * 77, "mlp_layer_types has 80 entries"),
            (["dense"] * 3 + ["moe"] * 75, 'says "moe" for layer 3; allowed: dense, sparse'),
        ],
    )
    def test_errors(self, glm: Config, types: list[str], said: str) -> None:
        assert said in refused(glm | {"mlp_layer_types": types})


class TestCut:
    def test_cuts_the_lists_too(self) -> None:
        spec = load_model("glm52", num_hidden_layers=5)
        assert spec.num_hidden_layers == 5
        assert spec.indexer_types == ("full", "full", "full", "shared", "shared")
        assert spec.mlp_layer_types == ("dense", "dense", "dense", "sparse", "sparse")
        assert spec.index_groups[-1] == IndexGroup(owner=2, layers=(2, 3, 4))
        assert spec.num_nextn_predict_layers == 1

    def test_of_a_model_without_indexer(self) -> None:
        assert load_model("deepseek-ai/DeepSeek-V3", num_hidden_layers=4).indexer_types == ()

    def test_all_layers_is_the_model_itself(self) -> None:
        assert load_model("glm52", num_hidden_layers=78) == load_model("glm52")

    @pytest.mark.parametrize("layers", [0, -1, 79])
    def test_errors(self, layers: int) -> None:
        with pytest.raises(CastoffError, match=f"--num-hidden-layers-override must be between 1 and 78.*not {layers}"):
            load_model("glm52", num_hidden_layers=layers)


class TestTopkLimit:
    def test_explicit_first(self, glm: Config) -> None:
        assert resolve_topk_limit(glm | {"topk_limit": 1024}, 512) == 512
        assert resolve_topk_limit(read(glm), 512) == 512
        assert resolve_topk_limit(load_model("deepseek-ai/DeepSeek-V3"), 512) == 512

    def test_topk_limit_before_index_topk(self, glm: Config, deepseek: Config) -> None:
        for config in (glm, deepseek):
            assert resolve_topk_limit(config, None) == resolve_topk_limit(read(config), None) == 2048
            config["topk_limit"] = 1024
            assert resolve_topk_limit(config, None) == resolve_topk_limit(read(config), None) == 1024
            del config["index_topk"]
            assert resolve_topk_limit(config) == resolve_topk_limit(read(config)) == 1024
            config["topk_limit"] = None
            assert "topk_limit is missing" in refused(config)
            with pytest.raises(CastoffError, match="topk_limit is missing, and so is index_topk"):
                resolve_topk_limit(config)

    def test_errors(self, glm: Config) -> None:
        with pytest.raises(CastoffError, match=r"DeepSeek-V3 has no indexer.*give topk_limit"):
            resolve_topk_limit(load_model("deepseek-ai/DeepSeek-V3"))
        for wrong in (0, -1, True):
            with pytest.raises(CastoffError, match="topk_limit must be an integer of at least 1"):
                resolve_topk_limit(glm, wrong)


def test_a_cut_of_the_main_layers_leaves_the_mtp_block_alone() -> None:
    cut = load_model("zai-org/GLM-5.2", num_hidden_layers=2)
    assert cut.mlp_layer_types == ("dense", "dense")
    assert cut.mtp_mlp_layer_types(1) == ("dense", "dense", "sparse")
