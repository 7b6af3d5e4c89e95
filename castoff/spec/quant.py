"""Number formats: what each quantisation action means for weights, activations and caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from castoff.errors import CastoffError
from castoff.spec.model import ModelSpec

LinearAction = Literal[
    "DISABLED",
    "W8A16_STATIC",
    "W8A8_STATIC",
    "W4A8_STATIC",
    "W8A16_DYNAMIC",
    "W8A8_DYNAMIC",
    "W4A8_DYNAMIC",
    "FP8",
    "MXFP4",
]
AttentionAction = Literal["DISABLED", "INT8", "FP8"]

FP8_BLOCK = 128
LATENT_SCALE_TILE = 128


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """How a linear layer stores its weight and multiplies.

    activation_dtype is bf16 where activations stay unquantised. `dynamic` activations are scaled per token (FP8: per
    128 values, MXFP4: per group) at run time, static ones with a stored scale.
    """

    action: LinearAction
    weight_dtype: str
    activation_dtype: str
    dynamic: bool
    group_size: int = 32

    @property
    def quantizes_activations(self) -> bool:
        """Whether the input must be quantised before the product."""
        return self.activation_dtype != "bf16"

    @property
    def name(self) -> str:
        """What kernels that multiply in it are called: one dtype with scales per block, or those of both operands."""
        return "fp8_block" if self.action == "FP8" else f"{self.weight_dtype}_{self.activation_dtype}"

    @property
    def has_scales(self) -> bool:
        """Whether weights have scales beside their values."""
        return self.action != "DISABLED"

    def weight_scales(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a weight of `rows` outputs and `columns` inputs: per block of 128 by 128 (FP8), per
        group of inputs (MXFP4), or per output."""
        match self.action:
            case "FP8":
                return -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
            case "MXFP4":
                return rows, -(-columns // self.group_size)
            case _:
                return rows, 1

    @property
    def quantize_operations(self) -> int:
        """Vector operations to quantise a value: abs, max, scale, round; scale and round where the scale is stored."""
        if not self.quantizes_activations:
            return 0
        return 4 if self.dynamic else 2

    @property
    def scale_dtype(self) -> str:
        """Format of the scales of weights and activations: a shared exponent for MXFP4, fp32 else."""
        return "e8m0" if self.action == "MXFP4" else "fp32"

    def activation_scales(self, columns: int) -> int:
        """Scales per token for an input of `columns` values; 0 where the scale is stored."""
        if not self.dynamic:
            return 0
        match self.action:
            case "FP8":
                return -(-columns // FP8_BLOCK)
            case "MXFP4":
                return -(-columns // self.group_size)
            case _:
                return 1


_FORMATS: dict[str, tuple[str, str, bool]] = {
    "DISABLED": ("bf16", "bf16", False),
    "W8A16_STATIC": ("int8", "bf16", False),
    "W8A8_STATIC": ("int8", "int8", False),
    "W4A8_STATIC": ("int4", "int8", False),
    "W8A16_DYNAMIC": ("int8", "bf16", False),
    "W8A8_DYNAMIC": ("int8", "int8", True),
    "W4A8_DYNAMIC": ("int4", "int8", True),
    "FP8": ("fp8", "fp8", True),
    "MXFP4": ("fp4", "fp4", True),
}


def linear_format(action: LinearAction, *, mxfp4_group_size: int = 32) -> LinearFormat:
    """The format that a `--quantize-linear-action` names; CastoffError for an unknown one."""
    if action not in _FORMATS:
        raise CastoffError(f"quantize_linear_action must be one of {', '.join(_FORMATS)}, got {action!r}")
    weight, activation, dynamic = _FORMATS[action]
    return LinearFormat(action, weight, activation, dynamic, mxfp4_group_size)


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """Bytes of the two caches per token and layer, and the rate at which the indexer scores.

    A quantised latent row holds kv_lora_rank one-byte values, an fp32 scale per 128 of them and the rope part in
    bf16. A quantised indexer key has one scale: fp32 for FP8, fp16 for INT8. `action` is that of the latent rows.
    """

    action: AttentionAction
    latent_row_bytes: int
    index_key_bytes: int
    index_scale_bytes: int
    index_dtype: str

    @property
    def index_action(self) -> AttentionAction:
        """The action of the indexer keys."""
        return _INDEX_ACTIONS[self.index_dtype]

    @property
    def index_row_bytes(self) -> int:
        """Key and scale together."""
        return self.index_key_bytes + self.index_scale_bytes


_INDEX_ACTIONS: dict[str, AttentionAction] = {"bf16": "DISABLED", "int8": "INT8", "fp8": "FP8"}


def cache_format(
    model: ModelSpec, action: AttentionAction, indexer_action: AttentionAction | None = None
) -> CacheFormat:
    """The cache format that a `--quantize-attention-action` and a `--quantize-indexer-action` give a model.

    indexer_action: None means `action`. Raises CastoffError for an unknown one.
    """
    keys = action if indexer_action is None else indexer_action
    for name, given in (("attention", action), ("indexer", keys)):
        if given not in _INDEX_ACTIONS.values():
            raise CastoffError(f"quantize_{name}_action must be one of DISABLED, INT8, FP8, got {given!r}")
    row = _latent_row_bytes(model, action)
    head = model.indexer.index_head_dim if model.indexer else 0
    if keys == "DISABLED":
        return CacheFormat(action, row, 2 * head, 0, "bf16")
    scale = {"FP8": 4, "INT8": 2}[keys] if head else 0
    return CacheFormat(action, row, head, scale, keys.lower())


def _latent_row_bytes(model: ModelSpec, action: AttentionAction) -> int:
    if action == "DISABLED":
        return 2 * (model.kv_lora_rank + model.qk_rope_head_dim)
    if model.kv_lora_rank % LATENT_SCALE_TILE:
        raise CastoffError(
            f"--quantize-attention-action {action} scales tiles of {LATENT_SCALE_TILE} latent values, which does not "
            f"divide kv_lora_rank {model.kv_lora_rank}; use --quantize-attention-action DISABLED"
        )
    return model.kv_lora_rank + 4 * (model.kv_lora_rank // LATENT_SCALE_TILE) + 2 * model.qk_rope_head_dim
