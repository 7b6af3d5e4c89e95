"""Numbers for people: the only place where seconds and bytes become ms and GiB."""

from __future__ import annotations

GIB = 2**30
MIB = 2**20


def gib(size_bytes: float) -> str:
    """`27.93`, in GiB (2**30 bytes)."""
    return f"{size_bytes / GIB:,.2f}"


def gib_text(size_bytes: float) -> str:
    """`27.93 GiB`."""
    return f"{gib(size_bytes)} GiB"


def milliseconds(seconds: float) -> str:
    """`881.810`, in ms."""
    return f"{seconds * 1e3:,.3f}"


def microseconds(seconds: float) -> str:
    """`12.5`, in µs."""
    return f"{seconds * 1e6:,.1f}"


def giga(amount: float) -> str:
    """`1,511.96`, in units of 1e9."""
    return f"{amount / 1e9:,.2f}"


def mib(size_bytes: float) -> str:
    """`448.4`, in MiB (2**20 bytes)."""
    return f"{size_bytes / MIB:,.1f}"


def size_text(size_bytes: float) -> str:
    """`27.93 GiB`, `448.4 MiB` or `12.0 KiB`: in the largest unit of which there is one."""
    if size_bytes >= GIB:
        return gib_text(size_bytes)
    return f"{mib(size_bytes)} MiB" if size_bytes >= MIB else f"{size_bytes / 1024:,.1f} KiB"


def percent(share: float) -> str:
    """`54.0%`."""
    return f"{100 * share:.1f}%"


def count(number: float) -> str:
    """`61,000`."""
    return f"{number:,.0f}"


def rate(per_second: float) -> str:
    """Tokens per second: `4,645` above 100, `29.03` below."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:,.2f}"


def flops_rate(flops_per_s: float) -> str:
    """`353.9 TFLOP/s`; below one, `21.3 GFLOP/s`."""
    return f"{flops_per_s / 1e12:,.1f} TFLOP/s" if flops_per_s >= 1e12 else f"{flops_per_s / 1e9:,.1f} GFLOP/s"


def bandwidth(bytes_per_s: float) -> str:
    """`1,759.2 GB/s`, in units of 1e9."""
    return f"{bytes_per_s / 1e9:,.1f} GB/s"
