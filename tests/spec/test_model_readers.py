"""Which keys the readers need, check, ignore, warn of and refuse."""

import json
import re
import warnings
from dataclasses import replace

import pytest

from castoff.errors import CastoffError, CastoffWarning
from castoff.spec.checkpoint_quant import quantization_config
from castoff.spec.model import load_model, raw_config
from tests.spec.configs import Config, read, refused


@pytest.fixture
def glm() -> Config:
    return raw_config("zai-org/GLM-5.2")


@pytest.fixture
def deepseek() -> Config:
    return raw_config("deepseek-ai/DeepSeek-V3.2")


class TestKeys:
    """Which keys are needed, checked, ignored, unknown."""

    NEEDED_BY_ALL = (
        "model_type hidden_size vocab_size num_hidden_layers num_attention_heads q_lora_rank "
        "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size n_routed_experts "
        "num_experts_per_tok n_shared_experts moe_intermediate_size n_group topk_group routed_scaling_factor "
        "norm_topk_prob rms_norm_eps max_position_embeddings tie_word_embeddings"
    ).split()

    @pytest.mark.parametrize("key", [*NEEDED_BY_ALL, "index_n_heads", "index_head_dim"])
    @pytest.mark.parametrize("model", ["zai-org/GLM-5.2", "deepseek-ai/DeepSeek-V3.2"])
    def test_a_missing_key_is_named(self, model: str, key: str) -> None:
        config = raw_config(model)
        del config[key]
        assert refused(config) == f"dir/config.json: {key} is missing"
        config[key] = None
        assert refused(config) == f"dir/config.json: {key} is null, but a value is needed"

    @pytest.mark.parametrize("model", ["zai-org/GLM-5.2", "deepseek-ai/DeepSeek-V3.2"])
    def test_without_mtp_blocks(self, model: str) -> None:
        """transformers does not write the key, and what it saves has none."""
        config = raw_config(model)
        del config["num_nextn_predict_layers"]
        assert read(config).num_nextn_predict_layers == 0

    @pytest.mark.parametrize(
        ("model", "key", "said"),
        [
            ("zai-org/GLM-5.2", "dtype", "dtype is missing"),
            ("deepseek-ai/DeepSeek-V3.2", "torch_dtype", "dtype is missing"),
            ("zai-org/GLM-5.2", "rope_parameters", "config.json: rope_theta is missing"),
            ("deepseek-ai/DeepSeek-V3.2", "rope_theta", "rope_theta is missing"),
            ("deepseek-ai/DeepSeek-V3.2", "first_k_dense_replace", "first_k_dense_replace is missing"),
        ],
    )
    def test_a_missing_key_with_two_spellings(self, model: str, key: str, said: str) -> None:
        config = raw_config(model)
        del config[key]
        assert said in refused(config)

    @pytest.mark.parametrize(
        "key",
        "hidden_size num_hidden_layers num_attention_heads index_topk n_routed_experts topk_group".split(),
    )
    @pytest.mark.parametrize("value", ["6144", True, 61.0, -1, 0, 2**31, [1], {"a": 1}])
    def test_a_size_must_be_a_positive_integer(self, glm: Config, key: str, value: object) -> None:
        message = refused(glm | {key: value})
        assert re.match(rf"dir/config.json: {key} must be (an integer|between 1 and \d+), not ", message)
        assert json.dumps(value) in message

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, -1e-5, "1e-5", True, 10**400])
    def test_a_number_must_be_finite_and_positive(self, glm: Config, value: object) -> None:
        assert "rms_norm_eps must be a " in refused(glm | {"rms_norm_eps": value})

    @pytest.mark.parametrize("value", [0, 1, "true", [True]])
    def test_a_flag_must_be_true_or_false(self, glm: Config, value: object) -> None:
        assert "norm_topk_prob must be true or false" in refused(glm | {"norm_topk_prob": value})

    def test_a_long_value_is_cut_in_the_message(self, glm: Config) -> None:
        assert len(refused(glm | {"hidden_size": ["x"] * 1000})) < 150

    @pytest.mark.parametrize(
        ("key", "value", "supported"),
        [
            ("scoring_func", "softmax", '"sigmoid"'),
            ("topk_method", "greedy", '"noaux_tc"'),
            ("moe_layer_freq", 2, "1"),
            ("moe_layer_freq", True, "1"),
            ("hidden_act", "gelu", '"silu"'),
            ("attention_bias", True, "false"),
            ("attention_bias", 0, "false"),
            ("mlp_bias", True, "false"),
            ("rope_interleave", False, "true"),
        ],
    )
    @pytest.mark.parametrize("model", ["zai-org/GLM-5.2", "deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3"])
    def test_a_key_with_one_supported_value(self, model: str, key: str, value: object, supported: str) -> None:
        message = refused(raw_config(model) | {key: value})
        assert message == f"dir/config.json: {key} is {json.dumps(value)}; only {supported} is supported"

    def test_a_fixed_key_may_be_absent(self, glm: Config) -> None:
        spec = read(glm)
        for key in ("scoring_func", "topk_method", "moe_layer_freq", "hidden_act", "attention_bias", "rope_interleave"):
            del glm[key]
        assert read(glm) == spec

    def test_an_unknown_key_warns_once_by_name(self, glm: Config) -> None:
        spec = read(glm)
        glm |= {"sliding_window": 4096, "new_trick": None}
        glm["rope_parameters"]["attention_factor"] = 1.0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert read(glm) == spec
        assert {warning.category for warning in caught} == {CastoffWarning}
        said = sorted(str(warning.message).split(" is unknown")[0] for warning in caught)
        assert said == [
            "dir/config.json: new_trick",
            "dir/config.json: rope_parameters.attention_factor",
            "dir/config.json: sliding_window",
        ]

    @pytest.mark.parametrize("model", ["deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3"])
    def test_deepseek_ignores_keys_of_glm(self, model: str) -> None:
        config = raw_config(model)
        glm_only = {
            "index_topk_freq": 4,
            "index_skip_topk_offset": 3,
            "index_topk_pattern": "FS",
            "indexer_types": ["full", "shared"],
            "index_share_for_mtp_iteration": True,
            "indexer_rope_interleave": True,
            "moe_router_dtype": "float32",
            "head_dim": 192,
        }
        assert read(config | glm_only) == read(config)

    def test_deepseek_v3_ignores_keys_of_an_indexer(self) -> None:
        config = raw_config("deepseek-ai/DeepSeek-V3")
        assert read(config | {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}) == read(config)

    def test_glm_ignores_keys_of_deepseek(self, glm: Config) -> None:
        assert read(glm | {"auto_map": {"AutoConfig": "x"}, "aux_loss_alpha": 0.001, "seq_aux": True}) == read(glm)

    def test_head_dim_is_a_trap(self, glm: Config) -> None:
        assert glm["head_dim"] == 192
        assert read(glm | {"head_dim": 7}) == read(glm)

    def test_indexer_rope_of_glm(self, glm: Config) -> None:
        del glm["indexer_rope_interleave"]
        indexer = read(glm).indexer
        assert indexer is not None
        assert indexer.rope_interleave

    def test_q_lora_rank_may_be_null_without_indexer(self, deepseek: Config) -> None:
        config = raw_config("deepseek-ai/DeepSeek-V3")
        assert read(config | {"q_lora_rank": None}).q_lora_rank is None
        del config["q_lora_rank"]
        assert "q_lora_rank is missing" in refused(config)
        assert "q_lora_rank is null" in refused(deepseek | {"q_lora_rank": None})

    @pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7, 8], (7, 8)), (0, (0,)), (None, ()), ([], ())])
    def test_eos(self, glm: Config, value: object, ids: tuple[int, ...]) -> None:
        assert read(glm | {"eos_token_id": value}).eos_token_ids == ids

    @pytest.mark.parametrize("value", ["7", [7, "8"], -1, [True]])
    def test_eos_errors(self, glm: Config, value: object) -> None:
        assert "eos_token_id must be" in refused(glm | {"eos_token_id": value})


class TestModelType:
    @pytest.mark.parametrize("model_type", ["llama", "deepseek_v2", "GLM_MOE_DSA"])
    def test_another_is_refused_with_the_list(self, glm: Config, model_type: str) -> None:
        message = refused(glm | {"model_type": model_type})
        assert message.endswith(f'model_type is "{model_type}"; supported: glm_moe_dsa, deepseek_v32, deepseek_v3')

    def test_deepseek_v4_is_refused_by_name(self, deepseek: Config) -> None:
        assert "model_type is deepseek_v4, whose attention" in refused(deepseek | {"model_type": "deepseek_v4"})

    @pytest.mark.parametrize("model_type", [3, ["llama"]])
    def test_must_be_a_string(self, glm: Config, model_type: object) -> None:
        assert "model_type must be a string" in refused(glm | {"model_type": model_type})


class TestValuesThatDoNotFit:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"topk_group": 9}, "topk_group (9) must not exceed n_group (8)"),
            ({"n_routed_experts": 250}, "n_routed_experts (250) must be a multiple of n_group (8)"),
            ({"num_experts_per_tok": 300}, "num_experts_per_tok (300) must not exceed the 128 experts"),
            ({"n_routed_experts": 8, "num_experts_per_tok": 1}, "leaves fewer than 2 of n_routed_experts (8)"),
            ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
            ({"index_head_dim": 32}, "index_head_dim (32) must hold qk_rope_head_dim (64)"),
        ],
    )
    def test_errors(self, deepseek: Config, change: Config, said: str) -> None:
        assert said in refused(deepseek | change)

    @pytest.mark.parametrize(
        "change",
        [
            {"hidden_size": 0},
            {"rms_norm_eps": float("nan")},
            {"num_nextn_predict_layers": -1},
            {"q_lora_rank": 0},
            {"q_lora_rank": None},
            {"indexer": None},
            {"num_hidden_layers": 77},
            {"indexer_types": ("shared",) + ("full",) * 77},
            {"mlp_layer_types": ("moe",) * 78},
        ],
    )
    def test_a_spec_checks_itself(self, change: Config) -> None:
        with pytest.raises(CastoffError):
            replace(load_model("glm52"), **change)

    def test_equal_specs_hash_equal(self) -> None:
        assert hash(load_model("glm52")) == hash(load_model("zai-org/GLM-5.2"))


class TestRopeAndDtype:
    def test_spelling_of_transformers_5(self, deepseek: Config) -> None:
        spec = read(deepseek)
        rope = deepseek.pop("rope_scaling")
        deepseek["rope_parameters"] = rope | {"rope_type": rope["type"], "rope_theta": deepseek.pop("rope_theta")}
        deepseek["dtype"] = deepseek.pop("torch_dtype")
        assert read(deepseek) == spec

    def test_spelling_of_transformers_4(self, glm: Config) -> None:
        spec = read(glm)
        del glm["rope_parameters"]
        glm["torch_dtype"] = glm.pop("dtype")
        assert read(glm | {"rope_theta": 8_000_000, "rope_scaling": None}) == spec
        assert read(glm | {"rope_theta": 8_000_000, "rope_scaling": {"type": "default"}}) == spec

    def test_yarn_defaults(self, deepseek: Config) -> None:
        deepseek["rope_scaling"] = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
        spec = read(deepseek)
        assert (spec.rope.beta_fast, spec.rope.beta_slow, spec.rope.mscale, spec.rope.mscale_all_dim) == (32, 1, 1, 0)
        assert spec.softmax_scale == pytest.approx(192**-0.5, rel=1e-15)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"type": "linear"}, 'rope_scaling.type is "linear"; supported: default, yarn'),
            ({"type": None}, "rope_scaling.rope_type is missing"),
            ({"rope_type": "default"}, 'rope_scaling.type is "yarn", but rope_scaling.rope_type says "default"'),
            ({"factor": None}, "rope_scaling.factor is null"),
            ({"factor": 0.5}, "factor must be at least 1"),
            ({"original_max_position_embeddings": None}, "rope_scaling.original_max_position_embeddings is null"),
            ({"beta_fast": "32"}, "rope_scaling.beta_fast must be a number"),
            ({"rope_theta": 5}, "rope_scaling.rope_theta is 5, but rope_theta outside says 10000"),
        ],
    )
    def test_errors(self, deepseek: Config, change: Config, said: str) -> None:
        deepseek["rope_scaling"] |= change
        assert said in refused(deepseek)

    def test_two_spellings_must_agree(self, glm: Config) -> None:
        assert 'torch_dtype is "float16", but dtype says "bfloat16"' in refused(glm | {"torch_dtype": "float16"})
        assert "rope_scaling is" in refused(glm | {"rope_scaling": {"type": "yarn"}})
        assert read(glm | {"torch_dtype": "bfloat16"}) == read(glm)

    def test_sections_must_be_objects(self, glm: Config) -> None:
        assert "rope_parameters must be an object, not 8000000" in refused(glm | {"rope_parameters": 8_000_000})
        assert 'dtype is "int8"; supported: bfloat16' in refused(glm | {"dtype": "int8"})


class TestCheckpointQuant:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"quant_method": "awq"}, 'quant_method is "awq"; only fp8 and compressed-tensors'),
            ({"quant_method": None}, "quantization_config.quant_method is null"),
            ({"fmt": "e5m2"}, 'quantization_config.fmt is "e5m2"; supported: e4m3'),
            ({"activation_scheme": "none"}, "quantization_config.activation_scheme is"),
            ({"weight_block_size": None}, "quantization_config.weight_block_size is null"),
            ({"weight_block_size": [128]}, "weight_block_size must be two integers, not [128]"),
            ({"weight_block_size": [128, 0]}, "weight_block_size must be a list of integers of at least 1"),
            ({"weight_block_size": 128}, "weight_block_size must be a list, not 128"),
            ({"modules_to_not_convert": ["lm_head", 3]}, "modules_to_not_convert must be a list of strings"),
            ({"scale_fmt": 8}, "scale_fmt must be a string"),
        ],
    )
    def test_errors(self, deepseek: Config, change: Config, said: str) -> None:
        deepseek["quantization_config"] |= change
        assert said in refused(deepseek)

    def test_optional_keys(self, deepseek: Config) -> None:
        assert read(deepseek | {"quantization_config": None}).checkpoint_quant is None
        del deepseek["quantization_config"]["fmt"], deepseek["quantization_config"]["scale_fmt"]
        deepseek["quantization_config"] |= {"dequantize": False, "modules_to_not_convert": None}
        quant = read(deepseek).checkpoint_quant
        assert quant is not None
        assert (quant.fmt, quant.scale_fmt, quant.modules_to_not_convert) == ("e4m3", None, ())

    def test_action(self, deepseek: Config) -> None:
        quant = read(deepseek).checkpoint_quant
        assert quant is not None
        assert quant.action == "FP8"

    def test_must_be_an_object(self, deepseek: Config) -> None:
        assert "quantization_config must be an object" in refused(deepseek | {"quantization_config": "fp8"})


class TestCompressedTensors:
    """INT8 W8A8 as llm-compressor exports it, and nothing else."""

    @pytest.fixture
    def quant(self) -> Config:
        common = {
            "actorder": None, "block_structure": None, "group_size": None, "num_bits": 8, "observer_kwargs": {},
            "symmetric": True, "type": "int",
        }  # fmt: skip
        group = {
            "input_activations": {**common, "dynamic": True, "observer": None, "strategy": "token"},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {**common, "dynamic": False, "observer": "minmax", "strategy": "channel"},
        }
        return {
            "config_groups": {"group_0": group},
            "format": "int-quantized",
            "global_compression_ratio": 1.5,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "version": "0.12.2",
        }

    def test_read(self, glm: Config, quant: Config) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = read(glm | {"quantization_config": quant}).checkpoint_quant
        assert found is not None
        assert (found.action, found.quant_method, found.fmt) == ("W8A8_DYNAMIC", "compressed-tensors", "int-quantized")
        assert (found.weight_block_size, found.modules_to_not_convert) == (None, ("lm_head",))

    def test_other_spellings(self, glm: Config, quant: Config) -> None:
        expected = read(glm | {"quantization_config": quant})
        quant["sparsity_config"] = {"format": "dense", "global_sparsity": 0.1, "ignore": []}
        quant["transform_config"] = {}
        quant["config_groups"]["group_0"]["format"] = "int-quantized"
        del quant["global_compression_ratio"], quant["version"], quant["kv_cache_scheme"]
        assert read(glm | {"quantization_config": quant}) == expected

    @pytest.mark.parametrize("action", ["FP8", "W8A8_DYNAMIC"])
    def test_what_is_written_is_read(self, glm: Config, action: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = read(glm | {"quantization_config": quantization_config(action, ["lm_head"])}).checkpoint_quant
        assert found is not None
        assert (found.action, found.modules_to_not_convert) == (action, ("lm_head",))

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            ("format", "pack-quantized"),
            ("format", None),
            ("kv_cache_scheme", {"num_bits": 8}),
            ("sparsity_config", {"format": "sparse-24-bitmask"}),
            ("transform_config", {"config_groups": {"R1": {}}}),
            ("config_groups", {}),
            ("config_groups", {"group_0": {}, "group_1": {}}),
            ("config_groups", {"group_0": {}}),
            ("config_groups.group_0.targets", ["re:.*experts.*"]),
            ("config_groups.group_0.targets", None),
            ("config_groups.group_0.format", "float-quantized"),
            ("config_groups.group_0.weights", None),
            ("config_groups.group_0.weights.num_bits", 4),
            ("config_groups.group_0.weights.num_bits", "8"),
            ("config_groups.group_0.weights.type", "float"),
            ("config_groups.group_0.weights.strategy", "group"),
            ("config_groups.group_0.weights.group_size", 128),
            ("config_groups.group_0.weights.block_structure", [128, 128]),
            ("config_groups.group_0.weights.symmetric", False),
            ("config_groups.group_0.weights.dynamic", True),
            ("config_groups.group_0.input_activations", None),
            ("config_groups.group_0.input_activations.num_bits", 16),
            ("config_groups.group_0.input_activations.strategy", "tensor"),
            ("config_groups.group_0.input_activations.symmetric", 1),
            ("config_groups.group_0.input_activations.dynamic", False),
            ("config_groups.group_0.input_activations.dynamic", "local"),
            ("config_groups.group_0.output_activations", {"num_bits": 8}),
            ("ignore", [3]),
            ("ignore", "lm_head"),
        ],
    )
    def test_anything_else_is_refused(self, glm: Config, quant: Config, path: str, value: object) -> None:
        *sections, key = path.split(".")
        section = quant
        for name in sections:
            section = section[name]
        section[key] = value
        message = refused(glm | {"quantization_config": quant})
        assert f"quantization_config.{path}" in message
        assert "\n" not in message


@pytest.mark.filterwarnings("ignore::castoff.errors.CastoffWarning")
@pytest.mark.parametrize("value", ["x", [], -1, float("inf"), {"x": 1}], ids=repr)
@pytest.mark.parametrize("model", ["zai-org/GLM-5.2", "zai-org/GLM-5-FP8", "deepseek-ai/DeepSeek-V3.2"])
def test_any_spoilt_key_is_ignored_or_refused_by_name(model: str, value: object) -> None:
    config = raw_config(model)
    spec = read(config)
    refused_keys = 0
    for key in config:
        try:
            same = read(config | {key: value}) == spec
        except CastoffError as error:
            message = str(error)
        else:
            # An empty list of stop tokens is a list of stop tokens.
            assert same or (key, value) == ("eos_token_id", [])
            continue
        refused_keys += 1
        assert key in message
    assert refused_keys > 25
