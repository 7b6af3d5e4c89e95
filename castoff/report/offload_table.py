"""What offload does to a step, as a table."""

from __future__ import annotations

from rich.table import Table

from castoff.casting.offload import OffloadFigures
from castoff.casting.prediction import Prediction
from castoff.report.grid import facts_table
from castoff.report.units import count, mib, milliseconds, percent, rate


def offload_table(prediction: Prediction, figures: OffloadFigures) -> Table:
    """Hits, bytes on the link, stall, and where offload begins to pay."""
    options = prediction.scenario.offload
    made = facts_table(f"KV offload, {options.offload}")
    made.add_row("selected rows that are in the pool", percent(figures.hit_rate))
    made.add_row("distinct tokens missed per request and index group", count(round(figures.unique_misses)))
    made.add_row("read from the host per step and device", f"{mib(figures.link_bytes)} MiB")
    made.add_row("written to the host per step and device", f"{mib(figures.written_bytes)} MiB")
    made.add_row("stall of the host link", f"{milliseconds(prediction.stall_s)} ms")
    if figures.latency_low_s < figures.latency_high_s:
        low, high = milliseconds(figures.latency_low_s), milliseconds(figures.latency_high_s)
        made.add_row("latency over the spread of the misses", f"{low} to {high} ms")
    made.add_row("saves device memory from a context of", f"{count(round(figures.break_even_context_tokens))} tokens")
    made.add_row(
        "largest batch per DP rank, without and with", f"{count(figures.batch_without)} and {count(figures.batch_with)}"
    )
    made.add_row(
        "tokens/s at those, without and with",
        f"{rate(figures.tokens_per_s_without)} and {rate(figures.tokens_per_s_with)}",
    )
    made.add_row("gives more tokens/s at those from a hit rate of", _break_even(figures.break_even_hit_rate))
    return made


def _break_even(hit_rate: float | None) -> str:
    if hit_rate is None:
        return "none: not even if every row is in the pool"
    return "any" if hit_rate == 0 else percent(hit_rate)
