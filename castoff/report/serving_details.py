"""How a backend serves, for `castoff show`."""

from __future__ import annotations

from collections.abc import Iterator

from castoff.report.units import count, microseconds, milliseconds, percent
from castoff.spec.serving import ServingCost, ServingSystem


def serving_rows(serving: ServingCost) -> Iterator[tuple[str, str, str]]:
    """Figure, value and source of everything in a `[serving]` section."""
    source = f"{serving.origin}: {serving.source}"
    admission, graphs = serving.admission, serving.graph_batches
    yield "serving, memory", f"{percent(serving.memory_fraction)} for weights and caches", source
    yield "serving, pages", f"{serving.page_tokens} tokens", source
    yield "serving, graphs", f"{len(graphs)} batches of {graphs[0]} to {graphs[-1]}", source
    yield "serving, requests", f"at most {count(serving.max_running_requests)} at a time", source
    yield "serving, prompts", f"{'beside' if serving.mixes_prefill else 'before'} decodes", source
    yield (
        "serving, chunks",
        "per attention-DP rank" if serving.chunk_per_rank else "over all attention-DP ranks",
        source,
    )
    yield "serving, prefill factor", f"{serving.prefill_factor:g}", source
    yield "serving, stall", f"{percent(serving.host_prefill_stall_share)} of a prefill's host time", source
    yield "serving, expert load", f"power law of exponent {serving.expert_load_alpha:g}", source
    reserve = f"{admission.reserve_start:g} to {admission.reserve_least:g} in {admission.reserve_decay_steps} steps"
    yield "admission, reserve", f"{reserve}, of at most {count(admission.clip_tokens)} tokens", admission.source
    factor = f"times {admission.reserve_ranks_factor:g} with several attention-DP ranks"
    yield "admission, ranks", factor, admission.source
    queue = "head" if admission.retracted_first else "end"
    steps = f"until {admission.retraction_steps} steps have room"
    yield "admission, retraction", f"{steps}, to the {queue} of the queue", admission.source
    for name, system in serving.systems.items():
        yield f"serving on {name}", _figures(system), f"{system.origin}: {system.source}"


def _figures(system: ServingSystem) -> str:
    cache = "bf16" if system.kv_action == "DISABLED" else system.kv_action
    return (
        f"host {milliseconds(system.host_s_per_decode_step)} ms a decode step, "
        f"{milliseconds(system.host_s_per_prefill)} ms a prefill, at least "
        f"{microseconds(system.prefill_floor_s_per_layer)} µs a layer of it, chunks of "
        f"{count(system.prefill_chunk_tokens)} tokens, KV cache {cache}"
    )
