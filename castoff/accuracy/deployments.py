"""What a measured point ran: the model, the device and the scenario that its columns describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from castoff.accuracy.points import GRAPHS, LoadPoint, StepPoint, parallel_sizes
from castoff.errors import CastoffError
from castoff.serving.serve import as_served
from castoff.spec.backend import shipped_backends
from castoff.spec.device import Device, load_device, shipped_devices
from castoff.spec.hit_profile import Hits
from castoff.spec.model import ModelSpec, load_model, shipped_models
from castoff.spec.offload import Offload, OffloadMode
from castoff.spec.quant import AttentionAction, LinearAction
from castoff.spec.scenario import Compilation, Mtp, Parallel, Quant, Scenario, Workload


@dataclass(frozen=True, slots=True)
class Deployed:
    """What a point ran."""

    model: ModelSpec
    device: Device
    scenario: Scenario


# Models with the architecture of one that castoff ships.
SAME_ARCHITECTURE = {
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-v3-0324": "deepseek-v3",
    "deepseek-r1-0528": "deepseek-r1",
}
LINEAR_ACTIONS: Mapping[str, LinearAction] = {"fp8": "FP8", "bf16": "DISABLED"}
KV_ACTIONS: Mapping[str, AttentionAction] = {"bf16": "DISABLED", "fp8": "FP8", "int8": "INT8"}
# Sizes that a published run has in its recipe's files, not in the words of its table: source → fields of `Parallel`.
# deepseek_v3.2_exp_rank_128_128ep_w8a8c8_decode_benchmark.yaml of cann-recipes-infer.
RECIPES: Mapping[str, Mapping[str, int]] = {
    "deepseek_v3.2_exp": {
        "o_proj_tp_size": 4,
        "mlp_tp_size": 4,
        "lmhead_tp_size": 16,
        "word_embedding_tp_size": 16,
    }
}
# Of the published offload, by size of the pool; docs/published_evaluation.md says how that of 16K was found.
PUBLISHED_HIT_RATES = {8192: 0.85, 16384: 0.94}


def load_deployment(point: LoadPoint, backend: str | None) -> Deployed:
    """The deployment of a point under load. backend: None takes the point's own.

    Raises CastoffError with the reason where castoff cannot price it.
    """
    name = point.backend if backend is None else backend
    if backend is None and name not in shipped_backends():
        raise CastoffError(f"castoff has no backend {name}; --backend takes another")
    if point.precision not in LINEAR_ACTIONS:
        raise CastoffError(f"castoff serves no {point.precision}, only {' and '.join(LINEAR_ACTIONS)}")
    model, device = _model(point.model, point.precision), _device(point.system)
    parallel = Parallel(
        num_devices=point.tp_size * point.attention_dp_size,
        tp_size=point.tp_size,
        dp_size=point.attention_dp_size,
        ep_size=point.moe_ep_size,
        moe_tp_size=point.moe_tp_size,
    )
    mtp = Mtp(num_mtp_tokens=point.mtp, mtp_acceptance_length=point.mtp_accepted_length)
    scenario = as_served(name, device, model, parallel, mtp=mtp)
    quant = replace(scenario.quant, quantize_linear_action=LINEAR_ACTIONS[point.precision])
    if point.kv_dtype is not None:
        quant = replace(quant, quantize_attention_action=KV_ACTIONS[point.kv_dtype])
    return Deployed(model, device, replace(scenario, quant=quant))


def step_deployment(point: StepPoint, backend: str | None) -> Deployed:
    """The deployment of a measured step. backend: None takes that of its graph mode.

    Raises CastoffError with the reason where castoff cannot price it.
    """
    model, device = _model(point.model, None), _device(point.device)
    rate = PUBLISHED_HIT_RATES.get(point.pool_tokens or 0) if "offload_guide" in point.source else None
    latent = KV_ACTIONS[point.kv_dtype]
    # W8A8C16 of the recipes: INT8 index keys beside bf16 rows.
    keys: AttentionAction | None = "INT8" if model.indexer is not None and latent == "DISABLED" else None
    scenario = Scenario(
        workload=Workload(
            num_queries=point.global_batch,
            query_length=point.query_tokens,
            context_length=point.context_tokens,
            decode=True,
        ),
        parallel=step_parallel(point),
        quant=Quant(
            quantize_linear_action=cast(LinearAction, point.linear_quant),
            quantize_attention_action=latent,
            quantize_indexer_action=keys,
        ),
        mtp=Mtp(num_mtp_tokens=point.mtp),
        compilation=Compilation(compile=True),
        offload=Offload(offload=cast(OffloadMode, point.offload), pool_tokens=point.pool_tokens),
        hits=Hits(hit_rate=rate if point.offload != "none" else None),
        # The graphs are those of Ascend.
        backend=backend or (GRAPHS[point.graph] if device.vendor == "ascend" else device.default_backend),
    )
    return Deployed(model, device, scenario)


def step_parallel(point: StepPoint) -> Parallel:
    """The sizes that a step's words name, and those of its recipe."""
    sizes: dict[str, Any] = parallel_sizes(point.parallel)
    for recipe, own in RECIPES.items():
        if recipe in point.source:
            sizes = {**own, **sizes}
    if "word_embedding_tp_size" in sizes:
        sizes["word_embedding_tp"] = "row"
    return Parallel(num_devices=point.num_devices, **sizes)


def _model(name: str, precision: str | None) -> ModelSpec:
    """The shipped model of a name, whoever published it; with a precision of fp8, that checkpoint if there is one."""
    shipped = {entry.rpartition("/")[2].lower(): entry for entry in shipped_models()}
    tail = name.rpartition("/")[2].lower()
    tail = SAME_ARCHITECTURE.get(tail, tail)
    known = shipped.get(f"{tail}-fp8" if precision == "fp8" and f"{tail}-fp8" in shipped else tail)
    if known is None:
        raise CastoffError(f"castoff has no model {name}")
    return load_model(known)


def _device(name: str) -> Device:
    if name not in shipped_devices():
        raise CastoffError(f"castoff has no device {name}")
    return load_device(name)
