"""The weights of a model against the publisher's own numbers and transformers' own models, and what a rank holds."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castoff.casting.footprint import stage_shares
from castoff.model.setup import Setup
from castoff.model.weights import (
    Parameter,
    RankWeights,
    layer_parameters,
    model_parameters,
    outer_parameters,
)
from castoff.ops.linear import Weight
from castoff.ops.program import Recorder
from castoff.spec.mesh import Mesh
from castoff.spec.model import ModelSpec, raw_config, read_model
from castoff.spec.quant import LinearAction
from castoff.spec.scenario import Mtp, Parallel, Quant, Scenario
from tests.generators import (
    ASCEND,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_5,
    GLM_52,
    LINEAR_ACTIONS,
    MODELS,
    NVIDIA,
    device,
    model,
    parallels,
    scenarios,
    setup_of,
    stored_bytes,
)

# Counted on the models that transformers 5.24 builds, without the MTP block.
STATE_DICT_ELEMENTS = {GLM_5: 743_911_218_432, GLM_52: 743_377_019_904, DEEPSEEK_V32: 671_877_944_064}
PARAMETERS = {GLM_5: 743_911_199_232, GLM_52: 743_377_000_704, DEEPSEEK_V32: 671_877_929_216}


def elements(parameters: Iterator[Parameter] | tuple[Parameter, ...]) -> int:
    return sum(parameter.elements for parameter in parameters)


class TestCounts:
    @pytest.mark.golden
    @pytest.mark.parametrize("name", STATE_DICT_ELEMENTS)
    def test_published(self, name: str) -> None:
        parameters = list(model_parameters(model(name)))
        assert sum(p.elements for p in parameters) == STATE_DICT_ELEMENTS[name]
        # The correction bias is a buffer, not a parameter.
        bias = [p.elements for p in parameters if p.name.endswith("e_score_correction_bias")]
        assert STATE_DICT_ELEMENTS[name] - sum(bias) == PARAMETERS[name]

    @pytest.mark.golden
    @pytest.mark.parametrize("name", [GLM_5, GLM_52])
    def test_an_mtp_block_is_a_full_sparse_layer_and_what_joins_it(self, name: str) -> None:
        spec = model(name)
        hidden = 6144
        attention = 2048 * hidden + 2048 + 16_384 * 2048 + 576 * hidden + 512 + 28_672 * 512 + hidden * 16_384
        indexer = 4096 * 2048 + 128 * hidden + 32 * hidden + 2 * 128
        moe = 256 * hidden + 256 + 257 * 3 * 2048 * hidden
        joins = 2 * hidden + hidden * 2 * hidden + hidden
        block = 2 * hidden + attention + indexer + moe + joins
        assert elements(layer_parameters(spec, 78)) == block
        assert elements(model_parameters(spec, mtp=True)) - elements(model_parameters(spec)) == block

    @pytest.mark.parametrize("name", MODELS)
    def test_names_are_unique(self, name: str) -> None:
        names = [parameter.name for parameter in model_parameters(model(name), mtp=True)]
        assert len(set(names)) == len(names)

    @pytest.mark.parametrize("name", MODELS)
    def test_only_full_layers_own_an_indexer(self, name: str) -> None:
        spec = model(name)
        owners = {p.name.split(".")[2] for p in model_parameters(spec) if ".indexer." in p.name}
        full = {str(layer) for layer, kind in enumerate(spec.indexer_types) if kind == "full"}
        assert owners == full
        assert any(".indexer." in p.name for p in layer_parameters(spec, spec.num_hidden_layers)) == bool(spec.indexer)

    def test_a_tied_lm_head_is_counted_once(self) -> None:
        spec = replace(model(), tie_word_embeddings=True)
        assert elements(model_parameters(model())) - elements(model_parameters(spec)) == 154_880 * 6144


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def transformers(torch: ModuleType) -> Any:
    return pytest.importorskip("transformers", minversion="5.24")


def hugging_face_shapes(
    torch: ModuleType, transformers: ModuleType, config: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Shapes of the state dict of transformers' own model, built without data."""
    own = transformers.AutoConfig.for_model(**{key: value for key, value in config.items() if key[0] != "_"})
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(own)
    return {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}


def fused(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """With gate_proj and up_proj of a dense MLP as one tensor, and without `.weight`, as castoff names them."""
    joined: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        short = name.removesuffix(".weight")
        if short.endswith(".gate_proj"):
            up = shapes[name.replace("gate_proj", "up_proj")]
            joined[short.replace("gate_proj", "gate_up_proj")] = (shape[0] + up[0], *shape[1:])
        elif not short.endswith(".up_proj"):
            joined[short] = shape
    return joined


def elements_in(shapes: dict[str, tuple[int, ...]]) -> int:
    total = 0
    for shape in shapes.values():
        size = 1
        for dim in shape:
            size *= dim
        total += size
    return total


class TestHuggingFace:
    @pytest.mark.parametrize("name", [*MODELS, "zai-org/GLM-5.1", "deepseek-ai/DeepSeek-R1"])
    def test_shipped_models(self, name: str, torch: ModuleType, transformers: ModuleType) -> None:
        config = raw_config(name)
        # The FP8 of DeepSeek's checkpoints is about storage; its scales are no elements of the model.
        config.pop("quantization_config", None)
        shapes = hugging_face_shapes(torch, transformers, config)
        assert elements(model_parameters(model(name))) == elements_in(shapes)
        assert {p.name: p.shape for p in model_parameters(model(name))} == fused(shapes)

    @pytest.mark.property
    @pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32", "deepseek_v3"])
    @settings(max_examples=12)
    @given(data=st.data())
    def test_tiny_models(self, family: str, data: st.DataObject, torch: ModuleType, transformers: ModuleType) -> None:
        config = data.draw(tiny_configs(family))
        spec = read_model(config, name="tiny", source="tiny")
        shapes = hugging_face_shapes(torch, transformers, config)
        assert elements(model_parameters(spec)) == elements_in(shapes)
        assert {p.name: p.shape for p in model_parameters(spec)} == fused(shapes)


@st.composite
def tiny_configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """A config.json of a family with sizes small enough to see each of them in the count."""
    layers = draw(st.integers(1, 6))
    groups, group_size = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    rope = 2 * draw(st.integers(1, 6))
    heads = draw(st.integers(1, 5))
    config: dict[str, Any] = {
        "model_type": family,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "hidden_size": draw(st.integers(8, 60)),
        "vocab_size": draw(st.integers(20, 90)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draw(st.integers(3, 20)),
        "kv_lora_rank": draw(st.integers(3, 20)),
        "qk_nope_head_dim": draw(st.integers(1, 12)),
        "qk_rope_head_dim": rope,
        "v_head_dim": draw(st.integers(1, 12)),
        "intermediate_size": draw(st.integers(3, 40)),
        "moe_intermediate_size": draw(st.integers(3, 30)),
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "n_routed_experts": groups * group_size,
        "n_group": groups,
        "topk_group": 1,
        "num_experts_per_tok": draw(st.integers(1, group_size)),
        "n_shared_experts": draw(st.integers(1, 3)),
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if family == "deepseek_v3":
        return config | {"q_lora_rank": draw(st.none() | st.integers(3, 20))}
    config |= {
        "index_topk": draw(st.integers(1, 16)),
        "index_n_heads": draw(st.integers(1, 4)),
        "index_head_dim": rope + draw(st.integers(0, 8)),
    }
    if family == "glm_moe_dsa":
        rest = draw(st.lists(st.sampled_from(["full", "shared"]), min_size=layers - 1, max_size=layers - 1))
        config["indexer_types"] = ["full", *rest]
    return config


def weights_of(setup: Setup, layer: int) -> dict[str, Weight]:
    return RankWeights(setup, Recorder()).layer(layer)


def split_size(mesh: Mesh, group: str) -> int:
    if group == "shared":
        # The routed experts' TP without EP; with it, TP if asked for.
        if mesh.ep.size == 1:
            return mesh.moe_tp.size
        return mesh.tp.size if mesh.parallel.enable_shared_expert_tp else 1
    size = getattr(mesh, group).size
    assert isinstance(size, int)
    return size


# Every kind of layer of GLM-5.2: dense and full, sparse and full, sparse and shared, MTP.
KINDS_OF_GLM_52 = (0, 3, 6, 78)


@pytest.mark.property
class TestShards:
    @given(parallel=parallels(model(), balanced=True))
    def test_the_ranks_of_a_split_hold_the_whole(self, parallel: Parallel) -> None:
        setup = setup_of(model(), Scenario(parallel=parallel))
        rank = RankWeights(setup, Recorder())
        whole = [parameter for layer in KINDS_OF_GLM_52 for parameter in layer_parameters(model(), layer)]
        whole += [parameter for name, parameter in outer_parameters(model()).items() if name != "embed_tokens"]
        for parameter in whole:
            weight = rank.on_rank(parameter)
            assert weight is not None
            ranks = 1
            for axis, group in parameter.split:
                size = split_size(setup.mesh, group)
                assert weight.values.shape[axis] * size == parameter.shape[axis], parameter.name
                ranks *= size
            assert weight.values.elements * ranks == parameter.elements, parameter.name

    @given(parallel=parallels(model(), balanced=True))
    def test_the_embedding(self, parallel: Parallel) -> None:
        setup = setup_of(model(), Scenario(parallel=parallel))
        rows, columns = RankWeights(setup, Recorder()).outer()["embed_tokens"].values.shape
        size = setup.mesh.embed_tp.size
        expected = {None: (154_880, 6144), "row": (154_880 // size, 6144), "col": (154_880, 6144 // size)}
        assert (rows, columns) == expected[parallel.word_embedding_tp]

    @settings(max_examples=40)
    @given(scenario=scenarios(model(), device(NVIDIA)))
    def test_bytes_of_a_rank(self, scenario: Scenario) -> None:
        # The scales of a group of 32, as `stored_bytes` has them.
        scenario = replace(scenario, quant=replace(scenario.quant, mxfp4_group_size=32))
        setup = setup_of(model(), scenario, on=NVIDIA)
        for layer in KINDS_OF_GLM_52:
            held = sum(weight.bytes for weight in weights_of(setup, layer).values())
            assert held == pytest.approx(layer_bytes(setup, scenario, layer), rel=1e-12), layer


def layer_bytes(setup: Setup, scenario: Scenario, layer: int) -> float:
    """Bytes of one layer of GLM-5.2 on a rank, from the model's sizes."""
    mesh, quant, parallel = setup.mesh, scenario.quant, scenario.parallel
    expert = quant.quantize_linear_action
    linear = quant.quantize_non_expert_linear_action or expert
    hidden, tp = 6144, mesh.tp.size
    norms = 2 * (2 * hidden + 2048 + 512)
    attention = (
        stored_bytes(linear, 2048, hidden)
        + stored_bytes(linear, 16_384 // tp, 2048)
        + stored_bytes(linear, 576, hidden)
        # kv_b stays in bf16: attention absorbs it.
        + 2 * (28_672 // tp) * 512
        + stored_bytes(linear, hidden, 16_384 // mesh.o_proj_tp.size)
    )
    total = norms + attention
    if layer == 78 or model().indexer_types[layer] == "full":
        total += stored_bytes(linear, 4096, 2048) + stored_bytes(linear, 128, hidden) + 2 * (32 * hidden + 2 * 128)
    if layer == 78:
        total += 2 * (3 * hidden + 2 * hidden * hidden)
    if layer < 3:
        width = 12_288 // mesh.mlp_tp.size
        return total + stored_bytes(linear, 2 * width, hidden) + stored_bytes(linear, hidden, width)
    # The router is kept in fp32.
    total += 4 * (256 * hidden + 256)
    if not parallel.host_external_shared_experts:
        width = 2048 // mesh.moe_tp.size
        one = stored_bytes(expert, 2 * width, hidden) + stored_bytes(expert, hidden, width)
        total += one * mesh.experts_per_rank
    if not parallel.enable_external_shared_experts or parallel.host_external_shared_experts:
        width = 2048 // (mesh.moe_tp.size if mesh.ep.size == 1 else tp if parallel.enable_shared_expert_tp else 1)
        total += stored_bytes(linear, 2 * width, hidden) + stored_bytes(linear, hidden, width)
    return total


@pytest.mark.property
class TestBits:
    # From more bits to fewer; formats of equal bits and other scales are not compared.
    CHAINS: tuple[tuple[LinearAction, ...], ...] = (
        ("DISABLED", "W8A8_DYNAMIC", "W4A8_DYNAMIC"),
        ("DISABLED", "W8A16_STATIC", "W4A8_STATIC"),
        ("DISABLED", "FP8", "MXFP4"),
        ("DISABLED", "FP8", "W4A8_STATIC"),
    )

    @pytest.mark.parametrize("chain", CHAINS, ids=" ".join)
    @settings(max_examples=25)
    @given(parallel=parallels(model()))
    def test_fewer_bits_never_need_more_bytes(self, chain: tuple[LinearAction, ...], parallel: Parallel) -> None:
        totals = []
        for action in chain:
            scenario = Scenario(parallel=parallel, quant=Quant(quantize_linear_action=action, quantize_lmhead=True))
            totals.append([share.weights_bytes for share in stage_shares(setup_of(model(), scenario, on=NVIDIA))])
        for more, fewer in pairwise(totals):
            assert all(a > b for a, b in zip(more, fewer, strict=True))

    @pytest.mark.parametrize("action", LINEAR_ACTIONS)
    def test_weights_that_are_never_quantised(self, action: LinearAction) -> None:
        scenario = Scenario(quant=Quant(quantize_linear_action=action, quantize_lmhead=False))
        setup = setup_of(model(), scenario, on=NVIDIA)
        held = weights_of(setup, 78) | RankWeights(setup, Recorder()).outer()
        high = {
            "embed_tokens", "norm", "lm_head", "enorm", "hnorm", "eh_proj", "shared_head.norm", "input_layernorm",
            "post_attention_layernorm", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm", "self_attn.kv_b_proj",
            "self_attn.indexer.weights_proj", "self_attn.indexer.k_norm", "self_attn.indexer.k_norm.bias",
        }  # fmt: skip
        router = {"mlp.gate", "mlp.gate.e_score_correction_bias"}
        assert {name for name, weight in held.items() if weight.values.dtype == "fp32"} == router
        if action != "DISABLED":
            assert {name for name, weight in held.items() if weight.values.dtype == "bf16"} == high
        assert all(held[name].scales is None for name in high | router)

    def test_lm_head_is_quantised_on_request(self) -> None:
        quant = Quant(quantize_linear_action="W8A8_DYNAMIC", quantize_lmhead=True)
        outer = RankWeights(setup_of(model(), Scenario(quant=quant)), Recorder()).outer()
        assert outer["lm_head"].bytes == stored_bytes("W8A8_DYNAMIC", 154_880, 6144)
        assert outer["embed_tokens"].bytes == 2 * 154_880 * 6144

    def test_experts_may_have_a_format_of_their_own(self) -> None:
        quant = Quant(quantize_linear_action="W4A8_DYNAMIC", quantize_non_expert_linear_action="W8A8_DYNAMIC")
        held = weights_of(setup_of(model(), Scenario(quant=quant)), 3)
        int4 = {name for name, weight in held.items() if weight.values.dtype == "int4"}
        assert int4 == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
        assert held["mlp.shared_experts.gate_up_proj"].values.dtype == "int8"

    @pytest.mark.parametrize(("action", "kept"), [("W8A8_DYNAMIC", True), ("W4A8_STATIC", True), ("FP8", False)])
    def test_layers_that_a_backend_keeps_in_bf16_when_others_are_integers(
        self, action: LinearAction, kept: bool
    ) -> None:
        setup = setup_of(model(), Scenario(quant=Quant(quantize_linear_action=action)), on=NVIDIA)
        held = weights_of(replace(setup, unquantized=frozenset({"indexer.wk"})), 0)
        assert (held["self_attn.indexer.wk"].values.dtype == "bf16") == kept
        assert held["self_attn.indexer.wq_b"].values.dtype != "bf16"


class TestExperts:
    SIXTEEN = Parallel(num_devices=16, tp_size=16, ep_size=16)

    def held(self, **options: bool) -> dict[str, Weight]:
        parallel = replace(self.SIXTEEN, **options)  # type: ignore[arg-type]
        return weights_of(setup_of(model(), Scenario(parallel=parallel)), 3)

    def test_equal_shares(self) -> None:
        assert self.held()["mlp.experts.gate_up_proj"].values.shape == (16, 4096, 6144)

    def test_a_redundant_expert(self) -> None:
        assert self.held(enable_redundant_experts=True)["mlp.experts.down_proj"].values.shape == (17, 6144, 2048)

    def test_a_rank_beside_external_shared_experts(self) -> None:
        held = self.held(enable_external_shared_experts=True)
        # 2 of 16 ranks hold the shared expert, so 14 share 256 routed ones.
        assert held["mlp.experts.gate_up_proj"].values.shape[0] == 19
        assert not any(name.startswith("mlp.shared_experts") for name in held)

    def test_a_rank_with_external_shared_experts(self) -> None:
        held = self.held(enable_external_shared_experts=True, host_external_shared_experts=True)
        assert not any(name.startswith("mlp.experts") for name in held)
        assert held["mlp.shared_experts.gate_up_proj"].values.shape == (4096, 6144)

    def test_a_shared_expert_over_the_tp_group(self) -> None:
        held = self.held(enable_shared_expert_tp=True)
        assert held["mlp.shared_experts.gate_up_proj"].values.shape == (256, 6144)
        assert held["mlp.shared_experts.down_proj"].values.shape == (6144, 128)


class TestStages:
    def test_one_device_in_bf16_holds_the_state_dict(self) -> None:
        scenario = Scenario(quant=Quant(quantize_linear_action="DISABLED"))
        (share,) = stage_shares(setup_of(model(), scenario))
        # Two bytes an element, and two more for the router of 75 layers, in fp32.
        assert share.weights_bytes == 2 * 743_377_019_904 + 2 * 75 * (256 * 6144 + 256)
        assert (share.latent_layers, share.indexer_layers) == (78, 21)

    @pytest.mark.parametrize("pp", [2, 3, 7, 21])
    @pytest.mark.parametrize("drafts", [0, 1, 3])
    def test_stages_hold_the_model_once(self, pp: int, drafts: int) -> None:
        mtp = Mtp(num_mtp_tokens=drafts)
        parallel = Parallel(num_devices=pp, pp_size=pp)
        shares = stage_shares(setup_of(model(), Scenario(parallel=parallel, mtp=mtp), on=ASCEND))
        (whole,) = stage_shares(setup_of(model(), Scenario(mtp=mtp), on=ASCEND))
        # Drafts embed tokens too, in the last stage.
        again = 2 * 154_880 * 6144 if drafts else 0
        assert sum(share.weights_bytes for share in shares) == pytest.approx(whole.weights_bytes + again, rel=1e-12)
        assert sum(share.latent_layers for share in shares) == 78 + (drafts > 0)
        assert sum(share.indexer_layers for share in shares) == 21 + (drafts > 0)

    @pytest.mark.parametrize("drafts", [1, 3, 8])
    def test_drafts_share_the_weights_of_one_block(self, drafts: int) -> None:
        quant = Quant(quantize_linear_action="DISABLED")
        (plain,) = stage_shares(setup_of(model(), Scenario(quant=quant)))
        (with_mtp,) = stage_shares(setup_of(model(), Scenario(quant=quant, mtp=Mtp(num_mtp_tokens=drafts))))
        block = elements(layer_parameters(model(), 78))
        assert with_mtp.weights_bytes - plain.weights_bytes == 2 * block + 2 * (256 * 6144 + 256)


def test_a_model_cut_short_keeps_its_first_layers() -> None:
    spec: ModelSpec = model().with_num_hidden_layers(4)
    own = elements(model_parameters(spec))
    outer = sum(parameter.elements for parameter in outer_parameters(spec).values())
    assert own == outer + sum(elements(layer_parameters(model(), layer)) for layer in range(4))
    assert elements(model_parameters(model(DEEPSEEK_V3))) > own
