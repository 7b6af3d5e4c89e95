"""The weights of a model: names, whole shapes, how they are split, and what one rank holds.

Names are those of Hugging Face checkpoints, relative to the layer, without `.weight`. The experts of a layer are one
stacked tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from castoff.dims import product
from castoff.model.setup import Setup
from castoff.model.shards import held_shape, rank_cuts
from castoff.ops.linear import Weight
from castoff.ops.program import Recorder
from castoff.spec.model import ModelSpec
from castoff.spec.quant import LinearFormat

Role = Literal["linear", "expert", "lm_head", "plain", "router"]
"""linear, expert and lm_head may be quantised; plain stays in bf16, router in fp32."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor: whole shape, role, and the mesh group over which an axis is split (axis → field of `Mesh`)."""

    name: str
    shape: tuple[int, ...]
    role: Role = "plain"
    split: tuple[tuple[int, str], ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements of the whole tensor."""
        return int(product(self.shape))


def layer_parameters(model: ModelSpec, layer: int) -> tuple[Parameter, ...]:
    """Parameters of one decoder layer; layers past num_hidden_layers are MTP blocks."""
    is_mtp = layer >= model.num_hidden_layers
    owns_indexer = model.indexer is not None and (is_mtp or model.indexer_types[layer] == "full")
    mlp_types = model.mtp_mlp_layer_types(model.num_nextn_predict_layers) if is_mtp else model.mlp_layer_types
    sparse = mlp_types[layer] == "sparse"
    return (
        Parameter("input_layernorm", (model.hidden_size,)),
        Parameter("post_attention_layernorm", (model.hidden_size,)),
        *_attention_parameters(model),
        *(_indexer_parameters(model) if owns_indexer else ()),
        *(_moe_parameters(model) if sparse else _mlp_parameters(model)),
        *(_mtp_parameters(model) if is_mtp else ()),
    )


def _attention_parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    hidden, heads, rank = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
    q_width = heads * model.qk_head_dim
    if model.q_lora_rank is None:
        q: tuple[Parameter, ...] = (Parameter("self_attn.q_proj", (q_width, hidden), "linear", ((0, "tp"),)),)
    else:
        q = (
            Parameter("self_attn.q_a_proj", (model.q_lora_rank, hidden), "linear"),
            Parameter("self_attn.q_a_layernorm", (model.q_lora_rank,)),
            Parameter("self_attn.q_b_proj", (q_width, model.q_lora_rank), "linear", ((0, "tp"),)),
        )
    return (
        *q,
        Parameter("self_attn.kv_a_proj_with_mqa", (rank + model.qk_rope_head_dim, hidden), "linear"),
        Parameter("self_attn.kv_a_layernorm", (rank,)),
        # Held in bf16 whatever the checkpoint's format: attention absorbs its two halves into q and the output.
        Parameter(
            "self_attn.kv_b_proj", (heads * (model.qk_nope_head_dim + model.v_head_dim), rank), split=((0, "tp"),)
        ),
        Parameter("self_attn.o_proj", (hidden, heads * model.v_head_dim), "linear", ((1, "o_proj_tp"),)),
    )


def _indexer_parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    indexer = model.indexer
    assert indexer is not None
    assert model.q_lora_rank is not None
    query_width = indexer.index_n_heads * indexer.index_head_dim
    return (
        Parameter("self_attn.indexer.wq_b", (query_width, model.q_lora_rank), "linear"),
        Parameter("self_attn.indexer.wk", (indexer.index_head_dim, model.hidden_size), "linear"),
        Parameter("self_attn.indexer.weights_proj", (indexer.index_n_heads, model.hidden_size)),
        Parameter("self_attn.indexer.k_norm", (indexer.index_head_dim,)),
        Parameter("self_attn.indexer.k_norm.bias", (indexer.index_head_dim,)),
    )


def _mlp_parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    hidden, width = model.hidden_size, model.intermediate_size
    return (
        Parameter("mlp.gate_up_proj", (2 * width, hidden), "linear", ((0, "mlp_tp"),)),
        Parameter("mlp.down_proj", (hidden, width), "linear", ((1, "mlp_tp"),)),
    )


def _moe_parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    hidden, moe = model.hidden_size, model.moe
    width, shared_width = moe.moe_intermediate_size, moe.moe_intermediate_size * moe.n_shared_experts
    shared: tuple[Parameter, ...] = ()
    if shared_width:
        shared = (
            Parameter("mlp.shared_experts.gate_up_proj", (2 * shared_width, hidden), "linear", ((0, "shared"),)),
            Parameter("mlp.shared_experts.down_proj", (hidden, shared_width), "linear", ((1, "shared"),)),
        )
    experts = moe.n_routed_experts
    return (
        Parameter("mlp.gate", (experts, hidden), "router"),
        Parameter("mlp.gate.e_score_correction_bias", (experts,), "router"),
        Parameter("mlp.experts.gate_up_proj", (experts, 2 * width, hidden), "expert", ((0, "ep"), (1, "moe_tp"))),
        Parameter("mlp.experts.down_proj", (experts, hidden, width), "expert", ((0, "ep"), (2, "moe_tp"))),
        *shared,
    )


def _mtp_parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    hidden = model.hidden_size
    return (
        Parameter("enorm", (hidden,)),
        Parameter("hnorm", (hidden,)),
        Parameter("eh_proj", (hidden, 2 * hidden)),
        Parameter("shared_head.norm", (hidden,)),
    )


def outer_parameters(model: ModelSpec) -> dict[str, Parameter]:
    """Parameters outside the layers: embedding, final norm, lm_head."""
    return {
        "embed_tokens": Parameter("model.embed_tokens", (model.vocab_size, model.hidden_size)),
        "norm": Parameter("model.norm", (model.hidden_size,)),
        "lm_head": Parameter("lm_head", (model.vocab_size, model.hidden_size), "lm_head", ((0, "lmhead_tp"),)),
    }


def model_parameters(model: ModelSpec, *, mtp: bool = False) -> Iterator[Parameter]:
    """Every parameter of the model under its full name, with or without the MTP blocks.

    A tied lm_head is not counted twice.
    """
    outer = outer_parameters(model)
    yield outer["embed_tokens"]
    for layer in range(model.num_hidden_layers + (model.num_nextn_predict_layers if mtp else 0)):
        for parameter in layer_parameters(model, layer):
            yield Parameter(f"model.layers.{layer}.{parameter.name}", parameter.shape, parameter.role, parameter.split)
    yield outer["norm"]
    if not model.tie_word_embeddings:
        yield outer["lm_head"]


def parameter_format(setup: Setup, parameter: Parameter) -> LinearFormat | None:
    """Number format of a parameter; None where it is never quantised."""
    if parameter.role == "linear":
        # The names of the list belong to integer formats; FP8 and MXFP4 checkpoints quantise these layers.
        kept = parameter.name.removeprefix("self_attn.") in setup.unquantized
        return None if kept and setup.linear.action not in ("FP8", "MXFP4") else setup.linear
    return {"expert": setup.expert, "lm_head": setup.lm_head}.get(parameter.role)


class RankWeights:
    """What the predicted rank holds of each parameter, as abstract weights of one recorder."""

    def __init__(self, setup: Setup, recorder: Recorder) -> None:
        self._setup = setup
        self._recorder = recorder

    def layer(self, layer: int) -> dict[str, Weight]:
        """Weights of a layer on this rank, by relative name; those that the rank does not hold are left out."""
        weights = {}
        for parameter in layer_parameters(self._setup.model, layer):
            weight = self.on_rank(parameter)
            if weight is not None:
                weights[parameter.name] = weight
        return weights

    def outer(self) -> dict[str, Weight]:
        """embed_tokens, norm and lm_head on this rank."""
        held = {name: self.on_rank(parameter) for name, parameter in outer_parameters(self._setup.model).items()}
        return {name: weight for name, weight in held.items() if weight is not None}

    def on_rank(self, parameter: Parameter) -> Weight | None:
        """This rank's piece of a parameter; None where it holds nothing of it."""
        shape = self._rank_shape(parameter)
        if shape is None:
            return None
        form = parameter_format(self._setup, parameter)
        dtype = form.weight_dtype if form else "fp32" if parameter.role == "router" else "bf16"
        values = self._recorder.tensor(*shape, dtype=dtype, kind="weight")
        if form is None or not form.has_scales:
            return Weight(values, None, form)
        scales = (*shape[:-2], *form.weight_scales(shape[-2], shape[-1]))
        return Weight(values, self._recorder.tensor(*scales, dtype=form.scale_dtype, kind="weight"), form)

    def _rank_shape(self, parameter: Parameter) -> tuple[int, ...] | None:
        mesh = self._setup.mesh
        hosts_shared = mesh.parallel.host_external_shared_experts
        shape = held_shape(parameter.shape, rank_cuts(parameter, mesh))
        if parameter.name.startswith("mlp.experts."):
            return None if hosts_shared else (mesh.experts_per_rank, *shape[1:])
        if parameter.name.startswith("mlp.shared_experts.") and mesh.shared_expert_ranks and not hosts_shared:
            return None
        return shape
