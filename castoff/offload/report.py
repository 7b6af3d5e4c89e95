"""What offload did in a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from castoff.spec.offload import Offload


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One index group over all decode steps. Counts as in `policy.arrays.STATS`.

    is_mtp: the MTP block's. link_bytes: read from the host by all of its layers. occupancy: share of the pools that is
    filled; of requests that left, when they did.
    """

    group: int
    layers: tuple[int, ...]
    is_mtp: bool
    hits: int
    unique_hits: int
    unique_misses: int
    repeated_misses: int
    window_reads: int
    promoted_rows: int
    staged_rows: int
    link_bytes: int
    occupancy: float

    @property
    def selected_rows(self) -> int:
        """Rows that one layer attended to."""
        return self.hits + self.unique_misses + self.repeated_misses + self.window_reads + self.promoted_rows

    @property
    def hit_rate(self) -> float:
        """Share of the selected rows that were in the pool already; 0 where none was selected."""
        return self.hits / self.selected_rows if self.selected_rows else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """Figures of one rank.

    pool_tokens: rows of a request's pool in a layer; of gather, those of its queries' last selections.
    written_bytes: new rows of decode steps, to the host. prefill_bytes: of prompts, in both directions. stall_s: how
    long computing waited for the other streams. most_behind: most pieces of work of those streams that were to be done
    when it came to wait. Both are None where steps are captured graphs.
    """

    options: Offload
    pool_tokens: int
    ways: int
    groups: tuple[GroupReport, ...]
    written_bytes: int
    prefill_bytes: int
    stall_s: float | None
    most_behind: int | None
    host_bytes: int
    device_bytes: int

    @property
    def link_bytes(self) -> int:
        """Bytes read from the host in decode steps."""
        return sum(group.link_bytes for group in self.groups)

    @property
    def hit_rate(self) -> float:
        """Of all groups' selected rows."""
        selected = sum(group.selected_rows for group in self.groups)
        return sum(group.hits for group in self.groups) / selected if selected else 0.0

    def as_json(self) -> dict[str, Any]:
        """The object under `offload` of a run. Its keys are a contract."""
        return {
            "mode": self.options.offload,
            "policy": self.options.pool_policy if self.options.offload != "gather" else "previous",
            "prefetch": self.options.prefetches,
            "install_stream": self.options.has_install_stream,
            "mtp_gather_reuse": self.options.reuses_rows_in_drafts,
            "pool_tokens": self.pool_tokens,
            "ways": self.ways,
            "hit_rate": self.hit_rate,
            "link_bytes": self.link_bytes,
            "written_bytes": self.written_bytes,
            "prefill_bytes": self.prefill_bytes,
            "stall_s": self.stall_s,
            "most_behind": self.most_behind,
            "host_bytes": self.host_bytes,
            "device_bytes": self.device_bytes,
            "groups": [{**asdict(group), "hit_rate": group.hit_rate} for group in self.groups],
        }
