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
from castoff.model.setup import Setup
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
from castoff.spec.serving import ServingCost

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
        known = [name for name in shipped_backends() if load_backend(name).serving is not None]
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
    chunk = system.prefill_chunk_tokens * ranks
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
        admission=serving.admission,
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
    decoded, decode_origin = decode_table(decode, extent, serving.graph_batches)
    computed, prefill_origin = prefill_table(prefill, extent)
    assumed = ["assumed" if decode.setup.mtp.acceptance_is_assumed else "measured"]
    steps = StackSteps(
        decode=decoded,
        prefill=computed,
        layers=model.num_hidden_layers + decode.setup.mtp.num_mtp_tokens,
        serving=serving,
        system=system,
        origin=weakest([decode_origin, prefill_origin, serving.origin, system.origin, *assumed]),  # type: ignore[list-item]
    )
    return Prepared(steps=steps, rules=replace(rules, delay_s=steps.delay_s), decode=decode, notes=decode.notes)


def kv_capacity(decode: Deployment, prefill: Deployment, serving: ServingCost, chunk_tokens: int) -> Capacity:
    """Cache rows that fit beside weights, buffers, and the activations of a whole chunk.

    Bytes grow evenly with rows and with requests, so three probes tell.
    """
    ranks = decode.setup.mesh.dp.size
    # One request of no rows, one of many, two of no rows, on every attention-DP rank.
    probes = RequestClass(np.array([1.0, 1.0, 2.0]) * ranks, np.array([0.0, _PROBE_TOKENS, 0.0]), _query(decode.setup))
    probed = _footprint(decode, probes)
    grown = _at(_growing(probed), 3)
    per_row = (grown[1] - grown[0]) / _PROBE_TOKENS
    per_request = max(grown[2] - grown[0] - per_row * _query(decode.setup), 0.0)
    longest_pass = _footprint(prefill, RequestClass(1, 0, chunk_tokens))
    size = probed.device_bytes_capacity
    kept = probed.weights_bytes + probed.communication_bytes + probed.reserved_bytes
    activations = max(largest(longest_pass.activation_bytes), largest(probed.activation_bytes))
    room = min(serving.memory_fraction * size, size - activations) - kept
    if room <= 0:
        raise CastoffError(
            f"no cache fits: weights and buffers take {kept / 2**30:.1f} of {size / 2**30:.1f} GiB a device, of which "
            f"{serving.memory_fraction:.0%} at most are for them and caches, and activations of a pass take "
            f"{activations / 2**30:.1f} GiB; spread the model over more devices, or quantise its weights"
        )
    host = _at(probed.host_kv_bytes, 3)
    per_row_host = (host[1] - host[0]) / _PROBE_TOKENS
    return Capacity(
        tokens=int(room / per_row) * ranks,
        request_tokens=per_request / per_row + (serving.page_tokens - 1) / 2,
        host_tokens=int(probed.host_bytes_capacity / per_row_host) * ranks if per_row_host > 0 else math.inf,
    )


def _query(setup: Setup) -> int:
    return 1 + setup.mtp.num_mtp_tokens


def _footprint(deployment: Deployment, requests: RequestClass) -> Footprint:
    batch = batch_of_rank(deployment.setup, [requests])
    return footprint_of(deployment, record_batch(deployment, batch), batch)


def _growing(memory: Footprint) -> Dim:
    """Bytes on a device that grow with requests and their rows."""
    return (
        memory.kv_bytes
        + memory.indexer_cache_bytes
        + memory.pool_bytes
        + memory.selection_bytes
        + memory.staging_bytes
        + memory.metadata_bytes
    )


def _at(amount: Dim, count: int) -> list[float]:
    values: list[float] = np.broadcast_to(np.asarray(amount, np.float64), (count,)).tolist()
    return values
