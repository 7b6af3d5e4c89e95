"""What castoff must know of a model of transformers: its structure, and that its attention can be taken over."""

from __future__ import annotations

from typing import Any

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.model.setup import Setup
from castoff.ops.program import Tensor
from castoff.runtime.structure import run_setup
from castoff.spec.model import ModelSpec, read_model
from castoff.spec.scenario import Mtp, Quant, Scenario

torch = lazy.load("torch")


def setup_of(config: Any, name: str) -> Setup:
    """The structure that a configuration of transformers describes. Raises CastoffError for one of another kind.

    Rows and weights have the dtype of the model, and are read unquantised, whatever the checkpoint's file says.
    """
    values = {**config.to_diff_dict(), "dtype": "bfloat16"}
    values.pop("quantization_config", None)
    spec = read_model(values, name=name, source=f"the configuration of {name}")
    if spec.indexer is None:
        raise CastoffError(f"{name} has no indexer, so every step would read its whole KV cache over the link")
    return run_setup(spec, Scenario(quant=Quant(quantize_linear_action="DISABLED"), mtp=Mtp(num_mtp_tokens=0)))


def check_layers(model: Any, spec: ModelSpec) -> Tensor:
    """Weights of the first layer's kv_b_proj. Raises CastoffError where attention cannot multiply by them itself."""
    whole = spec.num_attention_heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    weights = []
    for layer, block in enumerate(model.base_model.layers):
        projection = block.self_attn.kv_b_proj
        if type(projection) is not torch.nn.Linear:
            raise CastoffError(
                f"layer {layer}: castoff multiplies by the weights of kv_b_proj itself, and this one is a "
                f"{type(projection).__name__}; load the model unquantised, and merge adapters"
            )
        if projection.weight.shape[0] != whole:
            raise CastoffError(f"layer {layer} has some of its heads, and castoff offloads whole models: no tp_plan")
        weights.append(projection.weight)
    devices = {weight.device for weight in weights}
    if len(devices) > 1 or "meta" in {device.type for device in devices}:
        raise CastoffError(
            f"castoff offloads a model that is on one device, and this one's layers are on "
            f"{', '.join(sorted(map(str, devices)))}"
        )
    return weights[0]
