"""Tiny random checkpoints, saved by transformers, and castoff's engine over them.

Every weight is redrawn so that nothing is trivially zero or one: transformers starts norms at one, biases at zero.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from castoff.model.decoder import Decoder, Direct
from castoff.model.setup import Setup
from castoff.runtime.checkpoint import Checkpoint, LoadedWeights
from castoff.runtime.engine import Call, Engine, Rows
from castoff.runtime.structure import run_setup
from castoff.spec.model import ModelSpec, load_model
from castoff.spec.quant import LinearAction
from castoff.spec.scenario import Mtp, Quant, Scenario

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    modeling_glm = pytest.importorskip("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")
    modeling_deepseek = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
safetensors_torch = pytest.importorskip("safetensors.torch")

# Matrices this small gain nothing from more.
torch.set_num_threads(1)

KINDS = ("glm5", "glm52", "deepseek_v32")
INDEX_TOPK = 16
VOCABULARY = 96
HEADS = 16

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 2,
    "index_n_heads": HEADS,
    "index_head_dim": 32,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GLM = {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}


def config_of(kind: str, index_topk: int = INDEX_TOPK) -> Any:
    """The configuration of a tiny model."""
    common = {**_COMMON, "index_topk": index_topk}
    if kind == "glm5":
        rope = {"rope_type": "default", "rope_theta": 1e6}
        return transformers.GlmMoeDsaConfig(**common, **_GLM, num_hidden_layers=4, rope_parameters=rope)
    if kind == "glm52":
        rope = {"rope_type": "default", "rope_theta": 8e6}
        return transformers.GlmMoeDsaConfig(
            **common, **_GLM, num_hidden_layers=8, index_topk_freq=4, index_skip_topk_offset=3, rope_parameters=rope
        )
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,
    }
    return transformers.DeepseekV32Config(
        **common, num_hidden_layers=4, n_group=4, topk_group=2, rms_norm_eps=1e-6, rope_parameters=yarn
    )


def redraw(module: Any, seed: int) -> None:
    """Draw every parameter and buffer of the module anew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in [*module.named_parameters(), *module.named_buffers()]:
            if "inv_freq" in name:
                continue
            if values.dim() > 1:
                values.normal_(std=0.15, generator=generator)
            elif "norm" in name and name.endswith("weight"):
                values.uniform_(0.5, 1.5, generator=generator)
            else:
                values.normal_(std=0.2, generator=generator)


@dataclass(frozen=True, slots=True)
class Tiny:
    """A model of transformers, where it is saved, and what castoff reads from there. mtp: transformers' own decoder
    layer as the MTP block's, and the block's other tensors by name."""

    kind: str
    hf: Any
    directory: Path
    spec: ModelSpec
    mtp_layer: Any
    mtp: dict[str, Any]

    @property
    def prefix(self) -> str:
        """Of the MTP block's names."""
        return f"model.layers.{self.spec.num_hidden_layers}."


def build(kind: str, directory: Path, *, index_topk: int = INDEX_TOPK, seed: int = 0) -> Tiny:
    """Save a checkpoint of one kind, MTP block and its duplicates included."""
    classes = {"deepseek_v32": transformers.DeepseekV32ForCausalLM}
    config = config_of(kind, index_topk)
    hf = classes.get(kind, transformers.GlmMoeDsaForCausalLM)(config).eval()
    redraw(hf, seed)
    hf.save_pretrained(directory)
    spec = load_model(str(directory))
    layer = mtp_layer(kind, index_topk, indexer="full")
    redraw(layer, seed + 1)
    generator = torch.Generator().manual_seed(seed + 2)
    mtp = {name: torch.rand(64, generator=generator) + 0.5 for name in ("enorm", "hnorm", "shared_head.norm")}
    mtp["eh_proj"] = torch.randn(64, 128, generator=generator) * 0.15
    tiny = Tiny(kind, hf, directory, spec, layer, mtp)
    _add_mtp(tiny)
    return tiny


def mtp_layer(kind: str, index_topk: int, *, indexer: str) -> Any:
    """One decoder layer of transformers, with the place and kind of the MTP block's."""
    config = config_of(kind, index_topk)
    number = config.num_hidden_layers
    config.num_hidden_layers = number + 1
    config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
    if kind == "deepseek_v32":
        cls = modeling_deepseek.DeepseekV32DecoderLayer
    else:
        config.indexer_types = [*config.indexer_types, indexer]
        cls = modeling_glm.GlmMoeDsaDecoderLayer
    # What PreTrainedModel would have set, and a bare layer lacks.
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return cls(config, number).eval()


def _add_mtp(tiny: Tiny) -> None:
    tensors = tensors_of(tiny.directory)
    for name, values in tiny.mtp.items():
        tensors[f"{tiny.prefix}{name}.weight"] = values
    for name, values in tiny.mtp_layer.state_dict().items():
        if name == "mlp.experts.gate_up_proj":
            for expert, (gate, up) in enumerate(zip(*values.chunk(2, dim=1), strict=True)):
                tensors[f"{tiny.prefix}mlp.experts.{expert}.gate_proj.weight"] = gate
                tensors[f"{tiny.prefix}mlp.experts.{expert}.up_proj.weight"] = up
        elif name == "mlp.experts.down_proj":
            for expert, down in enumerate(values):
                tensors[f"{tiny.prefix}mlp.experts.{expert}.down_proj.weight"] = down
        else:
            tensors[f"{tiny.prefix}{name}"] = values
    # Published MTP checkpoints repeat these two.
    tensors[f"{tiny.prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors[f"{tiny.prefix}shared_head.head.weight"] = tensors["lm_head.weight"]
    write_tensors(tiny.directory, tensors)


def tensors_of(directory: Path) -> dict[str, Any]:
    """All tensors of a single-file checkpoint."""
    return safetensors_torch.load_file(directory / "model.safetensors")


def write_tensors(directory: Path, tensors: dict[str, Any], *, file: str = "model.safetensors") -> None:
    """One file of a checkpoint."""
    copies = {name: values.detach().clone().contiguous() for name, values in tensors.items()}
    safetensors_torch.save_file(copies, directory / file, metadata={"format": "pt"})


def deal(directory: Path, files: int = 3) -> dict[str, str]:
    """Deal a single file's tensors to several, with an index; returns the file of each tensor."""
    tensors = tensors_of(directory)
    names = sorted(tensors)
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        own = {name: tensors[name] for name in names[number::files]}
        weight_map.update(dict.fromkeys(own, file))
        write_tensors(directory, own, file=file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "model.safetensors").unlink()
    return weight_map


def engine(
    tiny: Tiny, *, mtp_tokens: int = 0, num_blocks: int = 32, block_tokens: int = 16, dtype: Any = None
) -> Engine:  # fmt: skip
    """Castoff's engine over a tiny checkpoint, float32 unless told."""
    dtype = torch.float32 if dtype is None else dtype
    cpu = torch.device("cpu")
    setup = setup_of(tiny.spec, mtp_tokens=mtp_tokens)
    weights = LoadedWeights(setup, Checkpoint(tiny.directory, tiny.spec, mtp=mtp_tokens > 0), dtype=dtype, device=cpu)
    return Engine(setup, weights, num_blocks=num_blocks, block_tokens=block_tokens, dtype=dtype, device=cpu)


def setup_of(spec: ModelSpec, *, mtp_tokens: int = 0, action: LinearAction = "DISABLED") -> Setup:
    """The structure of a run on one rank, unquantised unless told."""
    scenario = Scenario(quant=Quant(quantize_linear_action=action), mtp=Mtp(num_mtp_tokens=mtp_tokens))
    return run_setup(spec, scenario)


class Recording(Direct):
    """Runs blocks as they come and keeps the inputs and outputs of each by label; `given` replaces inputs."""

    def __init__(self, given: dict[str, tuple[Any, ...]] | None = None) -> None:
        self.inputs: dict[str, tuple[Any, ...]] = {}
        self.outputs: dict[str, tuple[Any, ...]] = {}
        self._given = given or {}

    def block(self, key: str, label: str, body: Any, *inputs: Any, layer: int = 0) -> Any:
        inputs = self._given.get(label, inputs)
        self.inputs[label] = inputs
        self.outputs[label] = body(*inputs)
        return self.outputs[label]


def record(
    own: Engine,
    weights: Any,
    ids_BS: Any,
    rows: Rows,
    *,
    prefill: bool,
    given: dict[str, tuple[Any, ...]] | None = None,
) -> tuple[Any, Recording]:
    """The engine's main pass, and all that went in and out of its layers."""
    runner = Recording(given)
    setup = replace(own.setup, mode="prefill" if prefill else "decode")
    decoder = Decoder(setup, weights, own.caches, runner)
    with torch.no_grad():
        return decoder.main_pass(
            own._inputs(Call(ids_BS, rows, prefill, last=False), max(rows.lengths)), last=False
        ), runner


def weights_of(own: Engine) -> Any:
    """The weights that an engine's decoder holds."""
    return own.weights


def token_ids(count: int, length: int, seed: int = 0) -> Any:
    """Random ids, (count, length); 0 is the padding."""
    return torch.randint(1, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))


def prefill(own: Engine, ids_BS: Any, requests: Sequence[int], *, chunk: int | None = None) -> Any:
    """Prefill equally long requests in chunks; logits of every token, (B, S, V)."""
    count, length = ids_BS.shape
    chunk = length if chunk is None else chunk
    pieces = []
    with torch.no_grad():
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            for request in requests:
                own.pool.grow(request, end)
            out = own.forward(ids_BS[:, start:end], Rows(requests, [end] * count), prefill=True, last=False)
            pieces.append(out.logits_TV.view(count, end - start, -1))
    return torch.cat(pieces, dim=1)


def decode(own: Engine, ids_BS: Any, requests: Sequence[int], start: int) -> Any:
    """Feed the tokens from `start` on one by one; logits of each, (B, S - start, V)."""
    count, length = ids_BS.shape
    steps = []
    with torch.no_grad():
        for position in range(start, length):
            for request in requests:
                own.pool.grow(request, position + 1)
            rows = Rows(requests, [position + 1] * count)
            steps.append(own.forward(ids_BS[:, position : position + 1], rows, prefill=False, last=True).logits_TV)
    return torch.stack(steps, dim=1)
