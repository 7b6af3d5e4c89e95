"""`quantization_config`, read and written: how a checkpoint's own weights are quantised.

Two forms are known: FP8 as DeepSeek and GLM publish it, and compressed-tensors' INT8 W8A8 with a scale per output
channel and per token.
"""

from collections.abc import Mapping, Sequence

from castoff.spec.architecture import CheckpointQuant
from castoff.spec.hf_config import HfConfig, shown

_COMPRESSED_TENSORS = "compressed-tensors"
_INT_QUANTIZED = "int-quantized"

_KNOWN_FP8 = frozenset(
    """
    activation_scheme dequantize fmt modules_to_not_convert quant_method scale_fmt weight_block_size
    """.split()
)
_KNOWN_COMPRESSED = frozenset(
    """
    config_groups format global_compression_ratio ignore kv_cache_scheme quant_method quantization_status
    sparsity_config transform_config version
    """.split()
)
# What changes no number: how scales were found, and settings of schemes that the checked keys exclude.
_KNOWN_SCHEME = frozenset(
    """
    actorder block_structure dynamic group_size num_bits observer observer_kwargs scale_dtype strategy symmetric type
    zp_dtype
    """.split()
)
_INT8_WEIGHTS: Mapping[str, object] = {
    "num_bits": 8,
    "type": "int",
    "strategy": "channel",
    "symmetric": True,
    "dynamic": False,
}
_INT8_ACTIVATIONS: Mapping[str, object] = {**_INT8_WEIGHTS, "strategy": "token", "dynamic": True}
_ONLY = "only W8A8 with INT8 weights per channel and dynamic INT8 activations per token is read"


def read_checkpoint_quant(raw: HfConfig) -> CheckpointQuant:
    """The `quantization_config` of a config; CastoffError for any that is not one of the two forms."""
    quant = raw.section("quantization_config")
    match quant.text("quant_method"):
        case "fp8":
            return _read_fp8(raw, quant)
        case "compressed-tensors":
            return _read_compressed_tensors(raw, quant)
        case method:
            raise quant.error(
                "quant_method",
                f"is {shown(method)}; only fp8 and compressed-tensors checkpoints are read. To predict another "
                "quantisation, take the unquantised model's config and choose it with --quantize-linear-action",
            )


def _read_fp8(raw: HfConfig, quant: HfConfig) -> CheckpointQuant:
    quant.warn_about_unknown(_KNOWN_FP8)
    block = quant.integers("weight_block_size")
    if len(block) != 2:
        raise quant.error("weight_block_size", f"must be two integers, not {shown(block)}")
    return raw.build(
        CheckpointQuant,
        quant_method="fp8",
        # The only FP8 weight format of the published checkpoints; transformers does not write the key.
        fmt=quant.text("fmt", allowed=("e4m3",), default="e4m3"),
        activation_scheme=quant.text("activation_scheme", allowed=("dynamic", "static")),
        weight_block_size=block,
        scale_fmt=quant.text("scale_fmt") if quant.has("scale_fmt") else None,
        modules_to_not_convert=(quant.strings("modules_to_not_convert") if quant.has("modules_to_not_convert") else ()),
    )


def _read_compressed_tensors(raw: HfConfig, quant: HfConfig) -> CheckpointQuant:
    quant.warn_about_unknown(_KNOWN_COMPRESSED)
    _check_scheme(quant, {"format": _INT_QUANTIZED})
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        # Older exports describe what is not sparse, too.
        is_dense = key == "sparsity_config" and quant.has(key) and quant.section(key).values.get("format") == "dense"
        if quant.values.get(key) and not is_dense:
            raise quant.error(key, f"is {shown(quant.values[key])}; {_ONLY}, nothing beside it")
    groups = quant.section("config_groups")
    if len(groups.values) != 1:
        raise quant.error("config_groups", f"has {len(groups.values)} groups; {_ONLY}, in one group")
    group = groups.section(next(iter(groups.values)))
    group.warn_about_unknown(("format", "input_activations", "output_activations", "targets", "weights"))
    _check_scheme(group, {"targets": ["Linear"], "format": group.values.get("format") and _INT_QUANTIZED})
    if group.has("output_activations"):
        raise group.error("output_activations", f"is {shown(group.values['output_activations'])}; {_ONLY}")
    for key, scheme in (("weights", _INT8_WEIGHTS), ("input_activations", _INT8_ACTIVATIONS)):
        section = group.section(key)
        section.warn_about_unknown(_KNOWN_SCHEME)
        _check_scheme(section, {**scheme, "group_size": None, "block_structure": None})
    return raw.build(
        CheckpointQuant,
        quant_method=_COMPRESSED_TENSORS,
        fmt=_INT_QUANTIZED,
        activation_scheme="dynamic",
        weight_block_size=None,
        scale_fmt=None,
        modules_to_not_convert=quant.strings("ignore") if quant.has("ignore") else (),
    )


def _check_scheme(section: HfConfig, wanted: Mapping[str, object]) -> None:
    """Every key has the one value that is read; None stands for absent."""
    for key, value in wanted.items():
        found = section.values.get(key)
        # True is no 1, and "8" no 8.
        if type(found) is not type(value) or found != value:
            raise section.error(key, f"is {shown(found)}, not {shown(value)}; {_ONLY}")


def quantization_config(action: str, kept: Sequence[str]) -> dict[str, object]:
    """The `quantization_config` of a checkpoint for `action`, FP8 or W8A8_DYNAMIC.

    kept: modules whose matrices stay plain.
    """
    assert action in ("FP8", "W8A8_DYNAMIC")
    if action == "FP8":
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": list(kept),
        }
    group = {
        "targets": ["Linear"],
        "weights": dict(_INT8_WEIGHTS),
        "input_activations": dict(_INT8_ACTIVATIONS),
        "output_activations": None,
    }
    return {
        "quant_method": _COMPRESSED_TENSORS,
        "format": _INT_QUANTIZED,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }
