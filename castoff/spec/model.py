"""Reading a model: one strict reader per family, from a Hugging Face config.json to a ModelSpec.

A key that is used and missing is an error, one in the lists of ignored keys is ignored, any other warns. To add a model
of a known family, put its config.json into castoff/data/models; to add a family, write its reader and put it into
`_READERS`.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar, get_args

from castoff.errors import CastoffError
from castoff.spec.architecture import (
    CheckpointQuant,
    Family,
    IndexerSpec,
    IndexerType,
    IndexGroup,
    MlpType,
    ModelSpec,
    MoeSpec,
    RopeSpec,
    RopeType,
)
from castoff.spec.checkpoint_quant import read_checkpoint_quant
from castoff.spec.hf_config import HfConfig, shown
from castoff.spec.model_files import ALIASES, find_config, shipped_models

__all__ = [
    "ALIASES",
    "CheckpointQuant",
    "Family",
    "IndexGroup",
    "IndexerSpec",
    "IndexerType",
    "MlpType",
    "ModelSpec",
    "MoeSpec",
    "RopeSpec",
    "config_text",
    "load_model",
    "raw_config",
    "read_model",
    "resolve_topk_limit",
    "shipped_models",
]

Word = TypeVar("Word", bound=str)

_MAX_LAYERS = 10_000
_DTYPES = ("bfloat16", "float16", "float32")
_INDEXER_WORDS: dict[str, IndexerType] = {"full": "full", "shared": "shared"}
_INDEXER_LETTERS: dict[str, IndexerType] = {"F": "full", "S": "shared"}
_MLP_WORDS: dict[str, MlpType] = {"dense": "dense", "sparse": "sparse"}

# Settings of which the families have one value, checked where a config states them.
_FIXED: dict[str, object] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
# `head_dim` is a trap: GLM-5.2's file says 192, while RoPE turns qk_rope_head_dim and attention works on qk_head_dim.
_IRRELEVANT = frozenset(
    """
    _castoff_source _name_or_path architectures attention_dropout auto_map aux_loss_alpha bos_token_id ep_size head_dim
    initializer_range layer_types model_type moe_router_dtype num_key_value_heads output_router_logits pad_token_id
    pretraining_tp qk_head_dim router_aux_loss_coef seq_aux transformers_version use_cache
    """.split()
)
_USED = frozenset(
    """
    dtype eos_token_id first_k_dense_replace hidden_size intermediate_size kv_lora_rank max_position_embeddings
    mlp_layer_types moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob num_attention_heads
    num_experts_per_tok num_hidden_layers num_nextn_predict_layers q_lora_rank qk_nope_head_dim qk_rope_head_dim
    quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta routed_scaling_factor tie_word_embeddings
    topk_group torch_dtype v_head_dim vocab_size
    """.split()
)
_INDEXER_KEYS = frozenset(["index_head_dim", "index_n_heads", "index_topk", "topk_limit"])
_GLM_ONLY = frozenset(
    """
    index_share_for_mtp_iteration index_skip_topk_offset index_topk_freq index_topk_pattern indexer_rope_interleave
    indexer_types
    """.split()
)
# Every family knows the keys of all of them, and its reader uses its own: a converted DeepSeek config may carry GLM's
# index_topk_freq, which means nothing there.
_KNOWN = _USED | _IRRELEVANT | _INDEXER_KEYS | _GLM_ONLY | _FIXED.keys()
_KNOWN_ROPE = frozenset(
    """
    beta_fast beta_slow factor mscale mscale_all_dim original_max_position_embeddings rope_theta rope_type type
    """.split()
)


def load_model(name_or_path: str, *, num_hidden_layers: int | None = None) -> ModelSpec:
    """The model of a shipped id ("zai-org/GLM-5.2", alias "glm52"), of a directory with a config.json or a .json file,
    or of an id in the local Hugging Face cache.

    `num_hidden_layers` keeps only the first layers; None keeps all. Raises CastoffError, warns of unknown keys.
    """
    file = find_config(name_or_path)
    spec = read_model(file.values(), name=file.name, source=str(file.path))
    return spec if num_hidden_layers is None else spec.with_num_hidden_layers(num_hidden_layers)


def config_text(name_or_path: str) -> str:
    """The text of the config.json that `load_model` would read."""
    return find_config(name_or_path).text()


def raw_config(name_or_path: str) -> dict[str, object]:
    """The JSON object of the config.json that `load_model` would read."""
    return find_config(name_or_path).values()


def read_model(config: Mapping[str, object], *, name: str, source: str) -> ModelSpec:
    """The model that a parsed config.json describes; `source` is what errors call the file."""
    raw = HfConfig(values=config, source=source)
    model_type = raw.text("model_type")
    if model_type == "deepseek_v4":
        raise raw.error(
            "model_type", f"is deepseek_v4, whose attention castoff does not have; supported: {', '.join(_READERS)}"
        )
    if model_type not in _READERS:
        raise raw.error("model_type", f"is {shown(model_type)}; supported: {', '.join(_READERS)}")
    raw.check_fixed(_FIXED)
    spec = _READERS[model_type](raw, name)
    raw.warn_about_unknown(_KNOWN)
    return spec


def resolve_topk_limit(spec_or_config: ModelSpec | Mapping[str, object], explicit: int | None = None) -> int:
    """Tokens that sparse attention may read per query: `explicit`, else the config's `topk_limit`, else its
    `index_topk`; an error naming topk_limit if there is none."""
    if explicit is not None:
        if type(explicit) is not int or explicit < 1:
            raise CastoffError(f"topk_limit must be an integer of at least 1, not {explicit!r}")
        return explicit
    if isinstance(spec_or_config, ModelSpec):
        if spec_or_config.indexer is None:
            raise CastoffError(f"{spec_or_config.name} has no indexer, hence no index_topk: give topk_limit")
        return spec_or_config.indexer.index_topk
    return _read_topk_limit(HfConfig(values=spec_or_config, source="config"))


def _read_glm_moe_dsa(raw: HfConfig, name: str) -> ModelSpec:
    indexer = raw.build(
        IndexerSpec,
        index_topk=_read_topk_limit(raw),
        index_n_heads=raw.integer("index_n_heads"),
        index_head_dim=raw.integer("index_head_dim"),
        # The model code of the family always interleaves; the key came with GLM-5's own file.
        rope_interleave=raw.boolean("indexer_rope_interleave", default=True),
        # Absent before GLM-5.2, which introduced it.
        share_for_mtp_iteration=raw.boolean("index_share_for_mtp_iteration", default=False),
    )
    return _read_decoder(raw, name, "glm_moe_dsa", raw.integer("q_lora_rank"), indexer, _read_schedule(raw))


def _read_deepseek_v32(raw: HfConfig, name: str) -> ModelSpec:
    indexer = raw.build(
        IndexerSpec,
        index_topk=_read_topk_limit(raw),
        index_n_heads=raw.integer("index_n_heads"),
        index_head_dim=raw.integer("index_head_dim"),
        # Half-split in DeepSeek's published inference code, unlike the main attention's.
        rope_interleave=False,
        share_for_mtp_iteration=False,
    )
    all_full: tuple[IndexerType, ...] = tuple("full" for _ in range(_num_layers(raw)))
    return _read_decoder(raw, name, "deepseek_v32", raw.integer("q_lora_rank"), indexer, all_full)


def _read_deepseek_v3(raw: HfConfig, name: str) -> ModelSpec:
    # null is the publisher's way to say that queries have no low-rank projection.
    has_latent = raw.has("q_lora_rank") or "q_lora_rank" not in raw.values
    return _read_decoder(raw, name, "deepseek_v3", raw.integer("q_lora_rank") if has_latent else None, None, ())


_READERS: dict[str, Callable[[HfConfig, str], ModelSpec]] = {
    "glm_moe_dsa": _read_glm_moe_dsa,
    "deepseek_v32": _read_deepseek_v32,
    "deepseek_v3": _read_deepseek_v3,
}


def _read_decoder(
    raw: HfConfig,
    name: str,
    family: Family,
    q_lora_rank: int | None,
    indexer: IndexerSpec | None,
    indexer_types: tuple[IndexerType, ...],
) -> ModelSpec:
    """What the families have in common: latent attention, mixture of experts."""
    moe = raw.build(
        MoeSpec,
        n_routed_experts=raw.integer("n_routed_experts"),
        num_experts_per_tok=raw.integer("num_experts_per_tok"),
        n_shared_experts=raw.integer("n_shared_experts", minimum=0),
        moe_intermediate_size=raw.integer("moe_intermediate_size"),
        n_group=raw.integer("n_group"),
        topk_group=raw.integer("topk_group"),
        routed_scaling_factor=raw.number("routed_scaling_factor"),
        norm_topk_prob=raw.boolean("norm_topk_prob"),
    )
    num_layers, mlp_layer_types = _num_layers(raw), _read_mlp_layer_types(raw)
    return raw.build(
        ModelSpec,
        name=name,
        family=family,
        hidden_size=raw.integer("hidden_size"),
        vocab_size=raw.integer("vocab_size"),
        num_hidden_layers=_num_layers(raw),
        num_nextn_predict_layers=_num_mtp_blocks(raw),
        num_attention_heads=raw.integer("num_attention_heads"),
        q_lora_rank=q_lora_rank,
        kv_lora_rank=raw.integer("kv_lora_rank"),
        qk_nope_head_dim=raw.integer("qk_nope_head_dim"),
        qk_rope_head_dim=raw.integer("qk_rope_head_dim"),
        v_head_dim=raw.integer("v_head_dim"),
        indexer=indexer,
        indexer_types=indexer_types,
        mlp_layer_types=mlp_layer_types[:num_layers],
        # A list without an entry for the MTP blocks is continued with its last one.
        mtp_mlp_layer_type=mlp_layer_types[-1],
        intermediate_size=raw.integer("intermediate_size"),
        moe=moe,
        rms_norm_eps=raw.number("rms_norm_eps"),
        rope=_read_rope(raw),
        max_position_embeddings=raw.integer("max_position_embeddings"),
        tie_word_embeddings=raw.boolean("tie_word_embeddings"),
        dtype=raw.text(raw.one_spelling("dtype", "torch_dtype"), allowed=_DTYPES),
        checkpoint_quant=read_checkpoint_quant(raw) if raw.has("quantization_config") else None,
        eos_token_ids=_read_eos_token_ids(raw),
    )


def _num_layers(raw: HfConfig) -> int:
    return raw.integer("num_hidden_layers", maximum=_MAX_LAYERS)


def _num_mtp_blocks(raw: HfConfig) -> int:
    # transformers' own configs do not write it: what it saves has no MTP block.
    return raw.integer("num_nextn_predict_layers", minimum=0, maximum=_MAX_LAYERS, default=0)


def _read_topk_limit(raw: HfConfig) -> int:
    for key in ("topk_limit", "index_topk"):
        if raw.has(key):
            return raw.integer(key)
    raise raw.error("topk_limit", "is missing, and so is index_topk, which would stand for it")


def _read_schedule(raw: HfConfig) -> tuple[IndexerType, ...]:
    """The indexer type of every main layer, by the first of the spellings that the config uses: `indexer_types`,
    `index_topk_pattern`, `index_topk_freq` with `index_skip_topk_offset`, none (all full)."""
    num_layers = _num_layers(raw)
    if raw.has("indexer_types"):
        key = "indexer_types"
        types = _read_layer_list(raw, key, raw.items(key), _INDEXER_WORDS)
    elif raw.has("index_topk_pattern"):
        key = "index_topk_pattern"
        pattern = raw.values[key]
        entries: list[object] = list(pattern) if isinstance(pattern, str) else raw.items(key)
        types = _read_layer_list(raw, key, entries, _INDEXER_LETTERS | _INDEXER_WORDS)
    else:
        key = "index_topk_freq"
        freq = raw.integer("index_topk_freq", default=1)
        # 2 is the default of GLM's published configuration class.
        offset = raw.integer("index_skip_topk_offset", minimum=0, default=2)
        types = tuple("full" if max(layer - offset + 1, 0) % freq == 0 else "shared" for layer in range(num_layers))
    if types[0] != "full":
        raise raw.error(key, "makes layer 0 shared, but no earlier layer is full whose top-k it could reuse")
    for layer, kind in enumerate(types[num_layers:], start=num_layers):
        if kind != "full":
            raise raw.error(key, f"makes layer {layer} shared; it is an MTP block, which always runs its own indexer")
    return types[:num_layers]


def _read_mlp_layer_types(raw: HfConfig) -> tuple[MlpType, ...]:
    """`mlp_layer_types`, MTP blocks too if the file has them; else `first_k_dense_replace` dense layers first."""
    num_layers = _num_layers(raw)
    if not raw.has("mlp_layer_types"):
        num_dense = raw.integer("first_k_dense_replace", minimum=0)
        return tuple("dense" if layer < num_dense else "sparse" for layer in range(num_layers))
    types = _read_layer_list(raw, "mlp_layer_types", raw.items("mlp_layer_types"), _MLP_WORDS)
    if raw.has("first_k_dense_replace"):
        num_dense = raw.integer("first_k_dense_replace", minimum=0)
        for layer, kind in enumerate(types[:num_layers]):
            if (kind == "dense") != (layer < num_dense):
                raise raw.error(
                    "mlp_layer_types", f"says that layer {layer} is {kind}, but first_k_dense_replace is {num_dense}"
                )
    return types


def _read_layer_list(raw: HfConfig, key: str, entries: list[object], words: dict[str, Word]) -> tuple[Word, ...]:
    """A list with one entry per main layer and, perhaps, per MTP block."""
    num_layers = _num_layers(raw)
    num_allowed = num_layers + _num_mtp_blocks(raw)
    if len(entries) < num_layers:
        raise raw.error(
            key, f"has {len(entries)} entries for {num_layers} layers: nothing for layer {len(entries)} and later"
        )
    if len(entries) > num_allowed:
        raise raw.error(
            key,
            f"has {len(entries)} entries, but the model has {num_layers} layers and {num_allowed - num_layers} MTP "
            f"blocks: there is no layer {num_allowed}",
        )
    found: list[Word] = []
    for layer, entry in enumerate(entries):
        if not isinstance(entry, str) or entry not in words:
            raise raw.error(key, f"says {shown(entry)} for layer {layer}; allowed: {', '.join(words)}")
        found.append(words[entry])
    return tuple(found)


def _read_rope(raw: HfConfig) -> RopeSpec:
    """RoPE from `rope_parameters` (transformers from version 5) or `rope_theta` and `rope_scaling` (before)."""
    key = raw.one_spelling("rope_parameters", "rope_scaling")
    if not raw.has(key):
        return raw.build(RopeSpec, theta=raw.number("rope_theta"), type="default")
    rope = raw.section(key)
    rope.warn_about_unknown(_KNOWN_ROPE)
    is_inside = rope.has("rope_theta") or (key == "rope_parameters" and not raw.has("rope_theta"))
    theta = (rope if is_inside else raw).number("rope_theta")
    if raw.has("rope_theta") and raw.number("rope_theta") != theta:
        raise rope.error("rope_theta", f"is {theta:g}, but rope_theta outside says {raw.number('rope_theta'):g}")
    types: dict[str, RopeType] = {word: word for word in get_args(RopeType)}
    kind = types[rope.text(rope.one_spelling("rope_type", "type"), allowed=types)]
    if kind == "default":
        return raw.build(RopeSpec, theta=theta, type=kind)
    return raw.build(
        RopeSpec,
        theta=theta,
        type=kind,
        factor=rope.number("factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        # The defaults of the yarn embedding in DeepSeek's published modelling code.
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        mscale=rope.number("mscale", default=1.0, zero_is_allowed=True),
        mscale_all_dim=rope.number("mscale_all_dim", default=0.0, zero_is_allowed=True),
    )


def _read_eos_token_ids(raw: HfConfig) -> tuple[int, ...]:
    """`eos_token_id`, one or a list; none if the config leaves them to generation_config.json."""
    if not raw.has("eos_token_id"):
        return ()
    if isinstance(raw.values["eos_token_id"], list):
        return raw.integers("eos_token_id", minimum=0)
    return (raw.integer("eos_token_id", minimum=0),)
