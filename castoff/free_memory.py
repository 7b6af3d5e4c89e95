"""How much host memory there is to have."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> int | None:
    """Host memory that this process may still have; None where the system does not tell."""
    told = [value for value in (_machine_bytes(), _group_bytes()) if value is not None]
    return min(told, default=None)


def _machine_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
    except (OSError, ValueError, IndexError, StopIteration):
        pages = os.sysconf_names.get("SC_AVPHYS_PAGES")
        return None if pages is None else os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _group_bytes() -> int | None:
    """What the limit of this control group (of a container, say) leaves."""
    try:
        most = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii")
        return max(int(most) - int(used), 0)
    # No such groups, or `max`: no limit.
    except (OSError, ValueError):
        return None
