"""What a run or a conversion produced, in words."""

from __future__ import annotations

from castoff.offload.report import GroupReport, OffloadReport
from castoff.report.units import count, gib_text, microseconds, milliseconds, percent, size_text
from castoff.runtime.convert import ConvertReport
from castoff.runtime.report import RunReport


def run_text(report: RunReport) -> str:
    """Tokens (or text, where there is a tokenizer) of every request, then the figures of the run."""
    lines = []
    for index, result in enumerate(report.results):
        text = report.texts[index] if report.texts is not None else " ".join(map(str, result.tokens))
        lines.append(f"[{index}] {text}")
    statistics = report.statistics
    tpot = "" if report.tpot_s is None else f", TPOT {1e3 * report.tpot_s:,.2f} ms"
    lines += [
        "",
        f"TTFT {1e3 * report.ttft_s:,.1f} ms{tpot}, {report.tokens_per_s:,.1f} tokens/s",
        f"{count(statistics.decode_steps)} decode steps, {count(statistics.sparse_steps)} of them sparse; "
        f"{statistics.acceptance_length:.2f} tokens gained per request and step",
        *_drafts_text(statistics.acceptance_rates),
        f"weights {size_text(report.memory.weights_bytes)}, resident caches {size_text(report.memory.cache_bytes)}, "
        f"peak {size_text(report.memory.peak_bytes)}",
        *(_offload_text(report.offload) if report.offload else []),
        *(
            f"{op.phase} {op.name}: {count(op.calls)} calls, {microseconds(op.mean_s)} µs each, "
            f"{milliseconds(op.total_s)} ms"
            for op in report.ops
        ),
    ]
    return "\n".join(lines) + "\n"


def _offload_text(offload: OffloadReport) -> list[str]:
    """What the pools did in decode steps, and a line for each index group."""
    stall = "not measured"
    if offload.stall_s is not None and offload.most_behind is not None:
        copies = "copy" if offload.most_behind == 1 else "copies"
        stall = f"{milliseconds(offload.stall_s)} ms, at most {count(offload.most_behind)} {copies} behind"
    return [
        f"offload {offload.options.offload}: {percent(offload.hit_rate)} of the selected rows were in pools of "
        f"{count(offload.pool_tokens)} tokens; host {size_text(offload.host_bytes)}, device "
        f"{size_text(offload.device_bytes)}",
        f"over the link: {size_text(offload.link_bytes)} read, {size_text(offload.written_bytes)} written, "
        f"{size_text(offload.prefill_bytes)} for prompts; stall {stall}",
        *(_group_text(group) for group in offload.groups),
    ]


def _group_text(group: GroupReport) -> str:
    layers = f"layers {group.layers[0]}–{group.layers[-1]}" if len(group.layers) > 1 else f"layer {group.layers[0]}"
    layers = f"{layers} (MTP)" if group.is_mtp else layers
    if not group.selected_rows:
        return f"  {layers}: no decode step has selected anything"
    return (
        f"  {layers}: {percent(group.hit_rate)} hits, {count(group.unique_misses)} misses, "
        f"{count(group.repeated_misses)} repeated, {count(group.window_reads)} of this step's own, "
        f"{count(group.promoted_rows)} promoted, {count(group.staged_rows)} staged; "
        f"{size_text(group.link_bytes)} read, pools {percent(group.occupancy)} full"
    )


def _drafts_text(rates: list[float]) -> list[str]:
    shares = ", ".join(f"{percent(rate)} of draft {position}" for position, rate in enumerate(rates, start=1))
    return [f"accepted: {shares}"] if shares else []


def convert_text(report: ConvertReport) -> str:
    """What lies in the new directory."""
    kept = f", {count(report.kept_shards)} of them from an earlier attempt" if report.kept_shards else ""
    files = "file" if report.shards == 1 else "files"
    return (
        f"{report.directory}: {count(report.quantized)} matrices in {report.action}, "
        f"{gib_text(report.size_bytes)} in {count(report.shards)} {files}{kept}\n"
    )
