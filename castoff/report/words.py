"""A prediction in sentences: what was asked, what bounds the step, whether it fits."""

from __future__ import annotations

from collections.abc import Sequence

from castoff.casting.measured import Coverage
from castoff.casting.prediction import Prediction
from castoff.casting.price import Bound
from castoff.casting.summary import origin_seconds
from castoff.dims import largest
from castoff.report.step import StepReport
from castoff.report.units import count, gib_text, percent
from castoff.spec.quant import AttentionAction
from castoff.spec.scenario import RequestClass

# Of the step, beyond which the host is what it waits for.
HOST_BOUND = 0.5
_WAITS_FOR: dict[Bound, str] = {
    "compute": "the matrix units",
    "vector": "the vector units",
    "memory": "memory bandwidth",
    "communication": "the links between devices",
    "host_link": "the link to host memory",
    "launch": "launches of ops",
}
MOST_CLASSES_NAMED = 3


def misfit(prediction: Prediction) -> str | None:
    """Why a step does not fit, with the largest batch and context that do; None where it fits."""
    if prediction.fits:
        return None
    memory = prediction.footprint
    if not memory.fits_device:
        where = "on a device of"
        needed, capacity = largest(memory.used_bytes), float(memory.device_bytes_capacity)
    else:
        where = "of a device's share of host memory,"
        needed, capacity = largest(memory.host_kv_bytes), memory.host_bytes_capacity
    return f"DOES NOT FIT: {gib_text(needed)} are needed {where} {gib_text(capacity)}. {what_fits(prediction)}"


def what_fits(prediction: Prediction) -> str:
    """The largest batch and the longest context that fit, each with everything else as it is."""
    batch, context = prediction.largest.max_batch_per_device, prediction.largest.max_context_length
    ragged = " at the lengths of the longest" if len(prediction.cast.batch.classes) > 1 else " at these lengths"
    ranks = prediction.cast.setup.mesh.dp.size
    per_rank = f" per attention-DP rank ({count(batch * ranks)} in all)" if ranks > 1 else ""
    if not batch:
        memory = prediction.footprint
        weights = f"; the weights alone take {gib_text(memory.weights_bytes)}"
        return f"Not even one request{' per attention-DP rank' if ranks > 1 else ''} fits{ragged}{weights}."
    longest = (
        f"the longest context at this batch is {count(context)} tokens"
        if context is not None
        else "no context does at this batch"
    )
    return f"The largest batch that fits{ragged} is {_number(batch, 'request')}{per_rank}; {longest}."


def verdict(report: StepReport) -> str:
    """The last line of a report: what the step waits for, and whether it fits."""
    prediction, bound_s = report.prediction, report.bound_s
    bound = prediction.bound
    top = max(report.ops, key=lambda op: op.bound_s[bound])
    share = bound_s[bound] / report.op_s
    memory = prediction.footprint
    if prediction.fits:
        fits = (
            f"it fits, with {gib_text(largest(memory.free_bytes))} of {gib_text(memory.device_bytes_capacity)} free "
            "on a device"
        )
    else:
        over = -largest(memory.free_bytes)
        where = "on a device"
        if memory.fits_device:
            over, where = largest(memory.host_kv_bytes) - memory.host_bytes_capacity, "of host memory per device"
        fits = f"it does not fit: {gib_text(over)} too much {where}"
    waits = f"for {_WAITS_FOR[bound]} in {percent(share)} of its op time, most of it in {top.name}"
    host = float(prediction.cast.host_s) / prediction.latency_s
    if host > HOST_BOUND:
        whose = (
            f"Bound by the host, which takes {percent(host)} of the step beside the device's work; that waits {waits}"
        )
    else:
        whose = f"Bound by {bound}: the step waits {waits}"
    return f"{whose}; {fits}.{_origins(prediction)}"


def _origins(prediction: Prediction) -> str:
    """How much of the op time is fitted to measurements, and what the rest is; nothing where nothing is."""
    seconds = origin_seconds(prediction)
    if not seconds.keys() & {"measured", "calibrated"}:
        return ""
    whole = sum(seconds.values())
    shares = ", ".join(f"{percent(own / whole)} {origin}" for origin, own in seconds.items())
    return f" Its op time is {shares}."


def what_is_cast(prediction: Prediction) -> list[str]:
    """Model, requests, devices and formats, in three lines."""
    scenario, setup = prediction.scenario, prediction.cast.setup
    mesh, mtp = setup.mesh, setup.mtp
    sizes = [f"TP {mesh.tp.size}", f"DP {mesh.dp.size}", f"EP {mesh.ep.size}"]
    others = (("PP", mesh.pp), ("DCP", mesh.dcp), ("MoE TP", mesh.moe_tp))
    sizes += [f"{name} {group.size}" for name, group in others if group.size > 1]
    parts = (("o_proj", mesh.o_proj_tp), ("MLP", mesh.mlp_tp), ("lm_head", mesh.lmhead_tp))
    sizes += [f"{name} TP {group.size}" for name, group in parts if group.size != mesh.tp.size]
    formats = [f"experts {setup.expert.action}"]
    if setup.linear.action != setup.expert.action:
        formats.append(f"other linear layers {setup.linear.action}")
    formats.append(f"KV cache {_stored(setup.cache.action)}")
    if setup.cache.index_action != setup.cache.action and setup.model.indexer:
        formats.append(f"indexer cache {_stored(setup.cache.index_action)}")
    if mtp.num_mtp_tokens:
        assumed = ", assumed" if mtp.acceptance_is_assumed else ""
        formats.append(
            f"{_number(mtp.num_mtp_tokens, 'MTP token')} ({mtp.tokens_per_step:.2f} gained per decode step{assumed})"
        )
    offload = scenario.offload
    if offload.offloads:
        pool = f", pools of {count(offload.pool[0] * offload.pool[1])} tokens in sets of {offload.pool[1]}"
        formats.append(f"offload {offload.offload}{pool if offload.offload != 'gather' else ''}")
    formats.append("compiled" if scenario.compilation.compile else "not compiled")
    return [
        f"{prediction.model.name}, {prediction.mode}: {_requests(prediction.cast.batch.classes)}",
        f"{mesh.num_devices} x {prediction.device.name}, backend {prediction.backend.name}: {', '.join(sizes)}",
        ", ".join(formats),
    ]


def coverage_text(found: Coverage) -> str:
    """How much of a step rests on measured times."""
    return (
        f"measured: {found.measured_shapes} of {found.shapes} shapes, {count(found.measured_calls)} of "
        f"{count(found.calls)} calls, {percent(found.measured_s / found.op_s)} of the op time"
    )


def _stored(action: AttentionAction) -> str:
    return "bf16" if action == "DISABLED" else action


def _requests(classes: Sequence[RequestClass]) -> str:
    """The requests of a step: each class of equal ones if they are few, else the range of their lengths."""
    if len(classes) <= MOST_CLASSES_NAMED:
        return "; ".join(
            f"{_number(largest(entry.count), 'request')} of {_number(largest(entry.query), 'new token')} after "
            f"{count(largest(entry.context))} cached"
            for entry in classes
        )
    requests = sum(largest(entry.count) for entry in classes)
    queries = _range([largest(entry.query) for entry in classes])
    contexts = _range([largest(entry.context) for entry in classes])
    return (
        f"{_number(requests, 'request')} of {queries} new token{'' if queries == '1' else 's'} after {contexts} cached"
    )


def _range(numbers: list[float]) -> str:
    low, high = min(numbers), max(numbers)
    return count(low) if low == high else f"{count(low)} to {count(high)}"


def _number(number: float, noun: str) -> str:
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"
