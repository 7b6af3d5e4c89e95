"""What a model is, whichever file says so: frozen dataclasses with Hugging Face's names, checked when they are built.

`castoff.spec.model` reads them from a config.json; nothing here knows about files.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from castoff.errors import CastoffError

IndexerType = Literal["full", "shared"]
MlpType = Literal["dense", "sparse"]
RopeType = Literal["default", "yarn"]
Family = Literal["glm_moe_dsa", "deepseek_v32", "deepseek_v3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of the model; the yarn fields mean nothing when `type` is "default".

    The defaults are those of the rotary embedding in DeepSeek's published modelling code.
    """

    theta: float
    type: RopeType
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        _require_positive(self, "theta", "beta_fast", "beta_slow")
        if self.type == "yarn":
            _require(self.theta > 1, f"rope_theta must be above 1 for yarn, not {self.theta:g}")
            _require(self.factor >= 1, f"the yarn factor must be at least 1, not {self.factor}")
            _require(self.original_max_position_embeddings is not None, "yarn needs original_max_position_embeddings")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """The lightning indexer, which chooses `index_topk` tokens per query.

    `rope_interleave` is the layout of the indexer's own RoPE (the main attention's is always interleaved);
    `share_for_mtp_iteration` says that the first draft iteration's top-k serves the later ones of a step.
    """

    index_topk: int
    index_n_heads: int
    index_head_dim: int
    rope_interleave: bool
    share_for_mtp_iteration: bool

    def __post_init__(self) -> None:
        _require_positive(self, "index_topk", "index_n_heads", "index_head_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """The experts of a sparse layer; scores are sigmoid, selection is by score + bias inside the best groups."""

    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool

    def __post_init__(self) -> None:
        _require_positive(
            self, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"
        )
        _require_positive(self, "routed_scaling_factor")
        _require(self.n_shared_experts >= 0, f"n_shared_experts must not be negative, not {self.n_shared_experts}")
        _require(
            self.n_routed_experts % self.n_group == 0,
            f"n_routed_experts ({self.n_routed_experts}) must be a multiple of n_group ({self.n_group})",
        )
        _require(
            self.topk_group <= self.n_group, f"topk_group ({self.topk_group}) must not exceed n_group ({self.n_group})"
        )
        group_size = self.n_routed_experts // self.n_group
        # A group's score is the sum of its two best experts.
        _require(
            self.n_group == 1 or group_size >= 2,
            f"n_group ({self.n_group}) leaves fewer than 2 of n_routed_experts ({self.n_routed_experts}) in a group",
        )
        _require(
            self.num_experts_per_tok <= self.topk_group * group_size,
            f"num_experts_per_tok ({self.num_experts_per_tok}) must not exceed the {self.topk_group * group_size} "
            f"experts of topk_group ({self.topk_group}) groups, of n_routed_experts ({self.n_routed_experts}) in all",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuant:
    """How the checkpoint's own weights are quantised (`quantization_config`).

    weight_block_size: outputs and inputs that share a scale; None for a scale per output.
    """

    quant_method: str
    fmt: str
    activation_scheme: str
    weight_block_size: tuple[int, int] | None
    scale_fmt: str | None
    modules_to_not_convert: tuple[str, ...]

    def __post_init__(self) -> None:
        block = self.weight_block_size
        _require(block is None or min(block) > 0, f"weight_block_size must be positive, not {block}")

    @property
    def action(self) -> Literal["FP8", "W8A8_DYNAMIC"]:
        """The `--quantize-linear-action` that the checkpoint is stored for."""
        return "FP8" if self.quant_method == "fp8" else "W8A8_DYNAMIC"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexGroup:
    """A full layer and the shared layers that reuse its top-k; `layers` includes the owner, ascending."""

    owner: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only model with latent attention, as its publisher's config describes it.

    `indexer_types` and `mlp_layer_types` have one entry per main layer and none for the MTP blocks;
    `indexer_types` is empty when the model has no indexer.
    """

    name: str
    family: Family
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: IndexerSpec | None
    indexer_types: tuple[IndexerType, ...]
    mlp_layer_types: tuple[MlpType, ...]
    # What an MTP block has; a cut of the main layers does not change it.
    mtp_mlp_layer_type: MlpType
    intermediate_size: int
    moe: MoeSpec
    rms_norm_eps: float
    # The norms of the two latents (q_a, kv_a) are built with their class's default in the published code of all
    # families, not with rms_norm_eps.
    latent_norm_eps: float = 1e-6
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    checkpoint_quant: CheckpointQuant | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        _require_positive(self, "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank")
        _require_positive(self, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size")
        _require_positive(self, "rms_norm_eps", "latent_norm_eps", "max_position_embeddings")
        _require(
            self.num_nextn_predict_layers >= 0,
            f"num_nextn_predict_layers must not be negative, not {self.num_nextn_predict_layers}",
        )
        _require(self.q_lora_rank is None or self.q_lora_rank > 0, f"q_lora_rank must be positive: {self.q_lora_rank}")
        # RoPE turns pairs.
        _require(self.qk_rope_head_dim % 2 == 0, f"qk_rope_head_dim must be even, not {self.qk_rope_head_dim}")
        self._check_layer_list("mlp_layer_types", self.mlp_layer_types, ("dense", "sparse"))
        if self.indexer is None:
            _require(not self.indexer_types, "indexer_types must be empty for a model without an indexer")
            return
        _require(self.q_lora_rank is not None, "the indexer's queries come from the q latent: q_lora_rank is needed")
        _require(
            self.indexer.index_head_dim >= self.qk_rope_head_dim,
            f"index_head_dim ({self.indexer.index_head_dim}) must hold qk_rope_head_dim ({self.qk_rope_head_dim})",
        )
        self._check_layer_list("indexer_types", self.indexer_types, ("full", "shared"))
        _require(self.indexer_types[0] == "full", "indexer_types: layer 0 is 'shared', but no earlier layer is 'full'")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def index_groups(self) -> tuple[IndexGroup, ...]:
        """The main layers by the full layer whose top-k they use, in layer order; empty without an indexer."""
        owners = [layer for layer, kind in enumerate(self.indexer_types) if kind == "full"]
        ends = [*owners[1:], len(self.indexer_types)]
        return tuple(
            IndexGroup(owner=owner, layers=tuple(range(owner, end))) for owner, end in zip(owners, ends, strict=False)
        )

    @property
    def num_full_layers(self) -> int:
        """Main layers that run the indexer and own an indexer cache (MTP blocks not counted)."""
        return self.indexer_types.count("full")

    @property
    def softmax_scale(self) -> float:
        """Factor on the attention logits; yarn corrects it by (0.1 · mscale_all_dim · ln factor + 1)², as DeepSeek's
        published modelling code does."""
        scale = 1.0 / math.sqrt(self.qk_head_dim)
        if self.rope.type == "yarn":
            scale *= (0.1 * self.rope.mscale_all_dim * math.log(self.rope.factor) + 1.0) ** 2
        return scale

    def index_group_of(self, layer: int) -> IndexGroup:
        """The index group of a main layer; an error if there is no such layer or no indexer."""
        for group in self.index_groups:
            if group.owner <= layer <= group.layers[-1]:
                return group
        known = f"0 to {len(self.indexer_types) - 1}" if self.indexer_types else "none, as the model has no indexer"
        raise CastoffError(f"{self.name} has no index group for layer {layer}; layers with one: {known}")

    def with_num_hidden_layers(self, num_hidden_layers: int) -> "ModelSpec":
        """The same model cut to its first layers, per-layer lists included; an error beyond the model's own count."""
        if not 1 <= num_hidden_layers <= self.num_hidden_layers:
            raise CastoffError(
                f"--num-hidden-layers-override must be between 1 and {self.num_hidden_layers}, the layers of "
                f"{self.name}, not {num_hidden_layers}"
            )
        return replace(
            self,
            num_hidden_layers=num_hidden_layers,
            indexer_types=self.indexer_types[:num_hidden_layers],
            mlp_layer_types=self.mlp_layer_types[:num_hidden_layers],
        )

    def mtp_indexer_types(self, num_blocks: int) -> tuple[IndexerType, ...]:
        """`indexer_types` with a "full" appended per MTP block, which always runs its own indexer; unchanged for no
        blocks or no indexer."""
        if not self.indexer_types:
            return ()
        own_indexer: tuple[IndexerType, ...] = ("full",)
        return self.indexer_types + own_indexer * num_blocks

    def mtp_mlp_layer_types(self, num_blocks: int) -> tuple[MlpType, ...]:
        """`mlp_layer_types` with an entry appended per MTP block."""
        own_mlp: tuple[MlpType, ...] = (self.mtp_mlp_layer_type,)
        return self.mlp_layer_types + own_mlp * num_blocks

    def _check_layer_list(self, key: str, entries: tuple[str, ...], allowed: tuple[str, ...]) -> None:
        _require(
            len(entries) == self.num_hidden_layers,
            f"{key} has {len(entries)} entries for {self.num_hidden_layers} layers",
        )
        for layer, entry in enumerate(entries):
            _require(entry in allowed, f"{key}: layer {layer} is {entry!r}; allowed: {', '.join(allowed)}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CastoffError(message)


def _require_positive(spec: RopeSpec | IndexerSpec | MoeSpec | ModelSpec, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        _require(value > 0, f"{name} must be positive, not {value}")
