"""What castoff knows: lists of models and devices, and one of them in full."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from rich.table import Table
from rich.text import Text

from castoff.errors import CastoffError
from castoff.model.weights import model_parameters
from castoff.report.grid import facts_table, table
from castoff.report.serving_details import serving_rows
from castoff.report.units import bandwidth, count, flops_rate, gib_text, microseconds, percent
from castoff.spec.backend import Backend, shipped_backends
from castoff.spec.device import Device, LinkTier, shipped_devices
from castoff.spec.fits import Fit
from castoff.spec.model import ALIASES, ModelSpec, shipped_models
from castoff.spec.model_files import find_config
from castoff.spec.quant import AttentionAction, cache_format


def model_row(model: ModelSpec) -> dict[str, Any]:
    """The facts of a model that a list shows."""
    checkpoint = model.checkpoint_quant
    return {
        "id": model.name,
        "aliases": [alias for alias, name in ALIASES.items() if name == model.name],
        "family": model.family,
        "num_hidden_layers": model.num_hidden_layers,
        "num_full_layers": model.num_full_layers,
        "num_shared_layers": model.num_hidden_layers - model.num_full_layers if model.indexer else 0,
        "n_routed_experts": model.moe.n_routed_experts,
        "num_experts_per_tok": model.moe.num_experts_per_tok,
        "max_position_embeddings": model.max_position_embeddings,
        "parameters": sum(parameter.elements for parameter in model_parameters(model)),
        "checkpoint": checkpoint.quant_method if checkpoint else model.dtype,
    }


def models_table(rows: Iterable[dict[str, Any]]) -> Table:
    """The list of `castoff models`."""
    columns = ["id", "family", "layers", "indexer full/shared", "experts", "context", "parameters", "checkpoint"]
    made = table("Models", columns, left=2)
    for row in rows:
        has_indexer = row["num_full_layers"] > 0
        made.add_row(
            " = ".join([row["id"], *row["aliases"]]),
            row["family"],
            count(row["num_hidden_layers"]),
            f"{row['num_full_layers']}/{row['num_shared_layers']}" if has_indexer else "none",
            f"{row['num_experts_per_tok']} of {row['n_routed_experts']}",
            count(row["max_position_embeddings"]),
            f"{row['parameters'] / 1e9:,.1f}e9",
            row["checkpoint"],
        )
    return made


def device_row(device: Device) -> dict[str, Any]:
    """The facts of a device that a list shows."""
    return {
        "name": device.name,
        "matrix_flops_per_s": dict(device.matrix_flops_per_s),
        "memory_bytes": device.memory.size_bytes,
        "memory_bytes_per_s": device.memory.bandwidth_bytes_per_s,
        "links": [
            {"name": tier.name, "num_devices": tier.num_devices, "bytes_per_s": tier.bandwidth_bytes_per_s}
            for tier in device.tiers
        ],
        "default_backend": device.default_backend,
    }


def devices_table(devices: Sequence[Device]) -> Table:
    """The list of `castoff devices`."""
    columns = ["name", "matrix TFLOP/s", "memory GiB", "memory GB/s", "links GB/s (devices joined)", "backend"]
    made = table("Devices", columns)
    for index in (1, 4, 5):
        made.columns[index].justify = "left"
    made.columns[1].no_wrap = made.columns[4].no_wrap = False
    for device in devices:
        peaks = device.matrix_flops_per_s.items()
        made.add_row(
            device.name,
            ", ".join(f"{dtype} {peak / 1e12:,.0f}" for dtype, peak in peaks),
            f"{device.memory.size_bytes / 2**30:,.0f}",
            f"{device.memory.bandwidth_bytes_per_s / 1e9:,.0f}",
            ", ".join(f"{tier.bandwidth_bytes_per_s / 1e9:,.0f} ({tier.num_devices})" for tier in device.tiers),
            device.default_backend,
        )
    return made


def cache_bytes_per_token(model: ModelSpec) -> dict[str, dict[str, int]]:
    """Bytes that one token of context takes in all main layers, by --quantize-attention-action."""
    sizes = {}
    for action in get_args(AttentionAction):
        try:
            form = cache_format(model, action)
        except CastoffError:
            continue
        latent, index = form.latent_row_bytes * model.num_hidden_layers, form.index_row_bytes * model.num_full_layers
        sizes[action] = {"kv_bytes": latent, "indexer_cache_bytes": index, "bytes": latent + index}
    return sizes


def model_details(model: ModelSpec) -> list[Table | Text]:
    """One model in full, for `castoff show`."""
    row = model_row(model)
    facts = facts_table(f"{model.name}: {model.family}")
    moe, rope, indexer = model.moe, model.rope, model.indexer
    heads = f"{model.num_attention_heads} heads of {model.qk_nope_head_dim} + {model.qk_rope_head_dim} (rope)"
    facts.add_row("parameters", f"{row['parameters']:,} with the router's biases, without MTP")
    facts.add_row("checkpoint", row["checkpoint"])
    facts.add_row("layers", f"{model.num_hidden_layers}, and {model.num_nextn_predict_layers} MTP")
    facts.add_row("MLP", f"{model.mlp_layer_types.count('dense')} layers dense, {model.intermediate_size} wide")
    facts.add_row("experts", f"{moe.num_experts_per_tok} of {moe.n_routed_experts}, {moe.moe_intermediate_size} wide")
    facts.add_row("shared experts", str(moe.n_shared_experts))
    facts.add_row("hidden size, vocabulary", f"{model.hidden_size}, {model.vocab_size:,}")
    facts.add_row("attention", f"{heads}, values of {model.v_head_dim}")
    facts.add_row("latents", f"q {model.q_lora_rank}, kv {model.kv_lora_rank}")
    facts.add_row("context", f"{model.max_position_embeddings:,} tokens; rope theta {rope.theta:g}, {rope.type}")
    if indexer is None:
        facts.add_row("indexer", "none: attention is dense")
    else:
        facts.add_row("indexer", f"top {indexer.index_topk}, {indexer.index_n_heads} heads of {indexer.index_head_dim}")
        facts.add_row("indexer layers", f"{row['num_full_layers']} full, {row['num_shared_layers']} shared")
        facts.add_row("index groups", _groups(model))
    sizes = table("Cache bytes per token, main layers", ["--quantize-attention-action", "KV", "indexer", "together"])
    for action, size in cache_bytes_per_token(model).items():
        sizes.add_row(action, count(size["kv_bytes"]), count(size["indexer_cache_bytes"]), count(size["bytes"]))
    return [facts, sizes]


def _groups(model: ModelSpec) -> str:
    groups = [(group.owner, group.layers[-1]) for group in model.index_groups]
    names = [str(first) if first == last else f"{first}-{last}" for first, last in groups]
    return f"{len(names)}: " + ", ".join(names)


def device_details(device: Device) -> list[Table | Text]:
    """One device with the source of each figure, for `castoff show`."""
    made = _sourced(f"{device.name}: {device.description}")
    for dtype, peak in device.matrix_flops_per_s.items():
        made.add_row(f"matrix {dtype}", flops_rate(peak), device.sources["matrix_flops_per_s"])
    for dtype, peak in device.vector_flops_per_s.items():
        made.add_row(f"vector {dtype}", flops_rate(peak), device.sources["vector_flops_per_s"])
    memory, link = device.memory, device.host_link
    made.add_row("memory", gib_text(memory.size_bytes), memory.source)
    made.add_row("memory bandwidth", bandwidth(memory.bandwidth_bytes_per_s), memory.source)
    for tier in device.tiers:
        made.add_row(f"link {tier.name}", _tier(tier), tier.source)
    source = f"{link.origin}: {link.source}"
    made.add_row("host to device", bandwidth(link.to_device_bytes_per_s), source)
    made.add_row("device to host", bandwidth(link.to_host_bytes_per_s), source)
    made.add_row("host link latency", f"{microseconds(link.latency_s)} µs", source)
    made.add_row("host rows, efficiency", f"{link.row_efficiency:g}", source)
    made.add_row("devices per host link", str(link.devices_per_link), source)
    made.add_row("host memory", f"{gib_text(link.host_memory_bytes)} for {link.devices_per_host} devices", source)
    return [made, Text(f"driven by the backend {device.default_backend} unless --backend says otherwise")]


def _tier(tier: LinkTier) -> str:
    return (
        f"{bandwidth(tier.bandwidth_bytes_per_s)}, {microseconds(tier.latency_s)} µs, {tier.num_devices} devices, "
        f"{tier.topology}"
    )


def backend_details(backend: Backend, fits: Mapping[str, Mapping[str, Fit]]) -> list[Table | Text]:
    """One backend with the source of each figure, for `castoff show`. fits: by device."""
    made = _sourced(f"{backend.name}: {backend.description}")
    stack = backend.sources["stack"]
    made.add_row("devices", "of all vendors" if backend.vendor is None else f"of {backend.vendor}", stack)
    made.add_row("fusions", ", ".join(sorted(backend.fusions)) or "none", stack)
    made.add_row("MTP window", f"whole on {backend.mtp_window} draft call", stack)
    made.add_row("dispatch", "in the experts' format" if backend.quantized_dispatch else "in bf16", stack)
    made.add_row("kept in bf16", ", ".join(backend.unquantized) or "nothing", stack)
    made.add_row("communication buffers", gib_text(backend.communication_buffer_bytes), stack)
    held = f"{backend.prompt_hidden_states:g} of the whole prompt" if backend.prompt_hidden_states else "none"
    made.add_row("hidden states in prefill", held, stack)
    for mode, seconds in backend.host_s_per_step.items():
        # Its systems say what decode steps take.
        if mode == "decode" and backend.serving is not None:
            continue
        host = f"{backend.host_origins[mode]}: {backend.sources['host_s_per_step']}"
        made.add_row(f"host time, {mode}", f"{microseconds(seconds)} µs per step", host)
    links = backend.collectives
    figures = f"launch {microseconds(links.launch_s)} µs, links {links.link_efficiency:g}"
    made.add_row("collectives", figures, f"{links.origin}: {links.source}")
    if backend.host_rows is not None:
        rows = backend.host_rows
        made.add_row("rows of the host", f"{rows.row_efficiency:g} of its link", f"{rows.origin}: {rows.source}")
    for family, curve in backend.curves.items():
        figures = (
            f"launch {microseconds(curve.launch_s)} µs, compute {curve.compute_efficiency:g}, vector "
            f"{curve.vector_efficiency:g}, memory {curve.memory_efficiency:g}, gather {curve.gather_efficiency:g}"
        )
        made.add_row(f"curve {family}", figures, f"{curve.origin}: {curve.source}")
    for row in serving_rows(backend.serving) if backend.serving else ():
        made.add_row(*row)
    return [made, *(_fits_table(device, own) for device, own in fits.items())]


def _fits_table(device: str, fits: Mapping[str, Fit]) -> Table:
    """Kernels that are fitted on a device, and how far off were sites left out of the fits."""
    made = table(f"Fitted on {device}: errors on sites left out", ["kernel", "form", "rows", "median", "p90"], left=2)
    made.add_column("numbers", justify="right")
    for kernel, fit in fits.items():
        grid = sum(own.values.size for own in (fit.correction, fit.measured) if own is not None)
        numbers = len(fit.coefficients) + len(fit.features) + grid
        if fit.measured is None:
            made.add_row(
                kernel,
                fit.form,
                count(fit.rows),
                percent(fit.median_abs_error),
                percent(fit.p90_abs_error),
                count(numbers),
            )
        else:
            made.add_row(kernel, f"{fit.form} beyond measured times", count(fit.rows), "–", "–", count(numbers))
    return made


def _sourced(title: str) -> Table:
    made = table(title, ["figure", "value", "source"], left=3)
    made.columns[1].no_wrap = made.columns[2].no_wrap = False
    return made


def require_known(name: str) -> None:
    """Refuse a name that is no model, with the nearest of models, devices and backends."""
    try:
        find_config(name)
    except CastoffError:
        known = {"models": shipped_models(), "devices": shipped_devices(), "backends": shipped_backends()}
        names = {alias.lower(): alias for alias in ALIASES}
        for entry in (entry for entries in known.values() for entry in entries):
            names[entry.lower()] = names[entry.rpartition("/")[2].lower()] = entry
        near = dict.fromkeys(names[match] for match in difflib.get_close_matches(name.lower(), names, n=6))
        hint = f" (did you mean {' or '.join(list(near)[:3])}?)" if near else ""
        listing = "; ".join(f"{kind}: {', '.join(entries)}" for kind, entries in known.items())
        raise CastoffError(f"{name!r} is no model, device or backend{hint}; {listing}") from None
