"""A deployment under load: tables of its steps, the cache rows that fit, and the simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from castoff.casting.deployment import Deployment, resolve
from castoff.casting.footprint import Footprint
from castoff.casting.rank import batch_of_rank, footprint_of, record_batch
from castoff.dims import Dim, largest
from castoff.errors import CastoffError
from castoff.serving.instance import Instance, Rules, fits_alone
from castoff.serving.result import ServeResult, summary
from castoff.serving.steps import Extent, StackSteps, decode_table, prefill_table
from castoff.serving.workload import Load, Requests
from castoff.spec.backend import Backend, load_backend, shipped_backends, weakest
from castoff.spec.device import Device
from castoff.spec.hit_profile import Hits
from castoff.spec.model import ModelSpec
from castoff.spec.quant import LinearAction
from castoff.spec.scenario import Compilation, Mtp, Parallel, Quant, RequestClass, Scenario, Workload
from castoff.spec.serving import ServingCost, ServingSystem

DEFAULT_BACKEND = "sglang"
_PROBE_TOKENS = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Cache rows that fit over all attention-DP ranks: on the devices, and in host memory where offload keeps them.

    request_tokens: rows' worth of device memory that each request takes besides.
    """

    tokens: int
    request_tokens: float
    host_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A deployment ready to serve some requests."""

    steps: StackSteps
    rules: Rules
    decode: Deployment
    notes: tuple[str, ...]


def as_served(
    backend: str, device: Device, model: ModelSpec, parallel: Parallel, *, mtp: Mtp | None = None
) -> Scenario:
    """The scenario of a backend's own defaults: the checkpoint's weights, its formats of caches, compiled.

    Raises CastoffError for a backend that does not say how it serves.
    """
    serving = serving_of(load_backend(backend))
    published = model.checkpoint_quant
    linear: LinearAction = "DISABLED" if published is None else published.action
    system = serving.system(device.name)
    quant = Quant(
        quantize_linear_action=linear,
        quantize_attention_action=system.kv_action,
        quantize_indexer_action=serving.indexer_action,
    )
    return Scenario(
        parallel=parallel, quant=quant, mtp=mtp or Mtp(), compilation=Compilation(compile=True), backend=backend
    )


def serving_of(backend: Backend) -> ServingCost:
    """How a backend serves. Raises CastoffError where its file does not say."""
    if backend.serving is None:
        shipped = [load_backend(name) for name in shipped_backends()]
        known = [other.name for other in shipped if other.serving is not None and other.vendor == backend.vendor]
        known = known or [other.name for other in shipped if other.serving is not None]
        raise CastoffError(
            f"the backend {backend.name} does not say how it serves: its file has no [serving]; take "
            f"{' or '.join(known)} as the scenario's backend, or a file with that section"
        )
    return backend.serving


def serve(model: ModelSpec, device: Device, scenario: Scenario, load: Load) -> ServeResult:
    """Simulate one instance. Raises CastoffError where the deployment cannot run or a request can never fit."""
    requests = load.drawn()
    prepared = prepare(model, device, scenario, requests)
    served = Instance(requests, prepared.steps, prepared.rules).run()
    return ServeResult(
        model=model.name,
        device=device.name,
        backend=prepared.decode.pricing.backend.name,
        num_devices=prepared.decode.setup.mesh.num_devices,
        kv_capacity_tokens=int(min(prepared.rules.capacity_tokens, prepared.rules.host_tokens)),
        prefill_chunk_tokens=prepared.rules.chunk_tokens,
        origin=prepared.steps.origin,
        summary=summary(served),
        served=served,
        notes=prepared.notes,
    )


def prepare(model: ModelSpec, device: Device, scenario: Scenario, requests: Requests) -> Prepared:
    """Cast the tables of a deployment that some requests need, and find what it holds. Raises CastoffError."""
    decode = resolve(model, device, replace(scenario, workload=Workload(decode=True)))
    prompts = replace(scenario, workload=Workload(query_length=1), hits=Hits(), prefill_tokens=None)
    prefill = resolve(model, device, prompts)
    backend = decode.pricing.backend
    serving = serving_of(backend)
    system = serving.system(device.name)
    ranks = decode.setup.mesh.dp.size
    chunk = system.prefill_chunk_tokens * (ranks if serving.chunk_per_rank else 1)
    admission = serving.admission
    factor = admission.reserve_ranks_factor if ranks > 1 else 1.0
    capacity = kv_capacity(decode, prefill, serving, chunk)
    per_step = decode.setup.mtp.tokens_per_step
    rules = Rules(
        capacity_tokens=capacity.tokens,
        request_tokens=capacity.request_tokens,
        host_tokens=capacity.host_tokens,
        chunk_tokens=chunk,
        max_running=serving.max_running_requests * ranks,
        tokens_per_step=per_step,
        mixes_prefill=serving.mixes_prefill,
        admission=replace(
            admission,
            reserve_start=factor * admission.reserve_start,
            reserve_least=factor * admission.reserve_least,
        ),
    )
    if not fits_alone(requests, rules):
        fitting = min(capacity.tokens, capacity.host_tokens)
        raise CastoffError(
            f"a request of {requests.longest_tokens:,} tokens can never run: {fitting:,.0f} cache rows fit on "
            f"{decode.setup.mesh.num_devices} x {device.name} beside weights and activations; shorten it, spread the "
            "model over more devices, or quantise the cache"
        )
    extent = Extent(
        longest_tokens=requests.longest_tokens,
        requests=min(len(requests.prompt_tokens), rules.max_running, requests.clients or rules.max_running),
        chunk_tokens=chunk,
    )
    decoded, decode_origin, decode_beyond = decode_table(decode, extent, serving.graph_batches)
    computed, prefill_origin, prefill_beyond = prefill_table(prefill, extent)
    assumed = ["assumed" if decode.setup.mtp.acceptance_is_assumed else "measured"]
    steps = StackSteps(
        decode=decoded,
        prefill=computed,
        setup=decode.setup,
        serving=serving,
        system=system,
        origin=weakest([decode_origin, prefill_origin, serving.origin, system.origin, *assumed]),  # type: ignore[list-item]
    )
    beyond = [name for name, is_so in (("decode", decode_beyond), ("prefill", prefill_beyond)) if is_so]
    marks = [f"the largest {name} passes that may come up lie beyond the sizes that were fitted" for name in beyond]
    notes = (*decode.notes, *_cache_notes(decode, system), *marks)
    return Prepared(steps=steps, rules=replace(rules, delay_s=steps.delay_s), decode=decode, notes=notes)


def _cache_notes(deployment: Deployment, system: ServingSystem) -> list[str]:
    """What differs from the stack's own cache, which decides how many requests there is memory for."""
    cache, backend = deployment.setup.cache.action, deployment.pricing.backend
    if cache == system.kv_action:
        return []
    own, asked = ("bf16" if action == "DISABLED" else action for action in (system.kv_action, cache))
    return [f"{backend.name} serves from a {own} KV cache on {deployment.pricing.device.name}; this one is in {asked}"]


def kv_capacity(decode: Deployment, prefill: Deployment, serving: ServingCost, chunk_tokens: int) -> Capacity:
    """Cache rows that fit beside weights, buffers, and the activations of a whole chunk."""
    ranks = decode.setup.mesh.dp.size
    longest_pass = _footprint(prefill, RequestClass(1, 0, chunk_tokens))
    start = _probe(decode, 0.0)
    activations = max(largest(longest_pass.activation_bytes), start.activation_bytes)
    room = min(serving.memory_fraction * start.capacity_bytes, start.capacity_bytes - activations)
    if start.held_bytes >= room:
        raise CastoffError(
            f"no cache fits: weights and buffers take {start.held_bytes / 2**30:.1f} of "
            f"{start.capacity_bytes / 2**30:.1f} GiB a device, of which {serving.memory_fraction:.0%} at most are for "
            f"them and caches, and activations of a pass take {activations / 2**30:.1f} GiB; spread the model over "
            "more devices, or quantise its weights"
        )
    # Of several pipeline stages the fullest counts, which may be another one once there are rows: Newton's steps.
    rows = (room - start.held_bytes) / start.row_bytes
    probe = start
    for _ in range(decode.setup.mesh.pp.size - 1):
        probe = _probe(decode, rows)
        rows += (room - probe.held_bytes) / probe.row_bytes
    per_row_host = probe.host_row_bytes
    return Capacity(
        tokens=int(rows) * ranks,
        request_tokens=probe.request_bytes / probe.row_bytes + (serving.page_tokens - 1) / 2,
        host_tokens=int(probe.host_bytes / per_row_host) * ranks if per_row_host > 0 else math.inf,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """The fullest device with one request of some rows: what it holds beside activations, and what more would take."""

    capacity_bytes: float
    activation_bytes: float
    held_bytes: float
    row_bytes: float
    request_bytes: float
    host_bytes: float
    host_row_bytes: float


def _probe(deployment: Deployment, rows: float) -> _Probe:
    ranks, query = deployment.setup.mesh.dp.size, 1 + deployment.setup.mtp.num_mtp_tokens
    # As it is, with many rows more, and with one request more, on every attention-DP rank.
    count, context = np.array([1.0, 1.0, 2.0]) * ranks, np.array([rows, rows + _PROBE_TOKENS, rows / 2])
    memory = _footprint(deployment, RequestClass(count, context, query))
    held = _at(memory.used_bytes - memory.activation_bytes, 3)
    host = _at(memory.host_kv_bytes, 3)
    per_row = (held[1] - held[0]) / _PROBE_TOKENS
    return _Probe(
        capacity_bytes=_at(memory.device_bytes_capacity, 3)[0],
        activation_bytes=_at(memory.activation_bytes, 3)[0],
        held_bytes=held[0] - per_row * query,
        row_bytes=per_row,
        request_bytes=max(held[2] - held[0] - per_row * query, 0.0),
        host_bytes=_at(memory.host_bytes_capacity, 3)[0],
        host_row_bytes=(host[1] - host[0]) / _PROBE_TOKENS,
    )


def _footprint(deployment: Deployment, requests: RequestClass) -> Footprint:
    batch = batch_of_rank(deployment.setup, [requests])
    return footprint_of(deployment, record_batch(deployment, batch), batch)


def _at(amount: Dim, count: int) -> list[float]:
    values: list[float] = np.broadcast_to(np.asarray(amount, np.float64), (count,)).tolist()
    return values
