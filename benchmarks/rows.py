"""What benchmarks share: their flags, the machine, one core of it, and rows of a CSV file."""

from __future__ import annotations

import argparse
import csv
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import castoff


def flags(argv: Sequence[str] | None, *, description: str | None, runs: int, file: str) -> argparse.Namespace:
    """`runs`, timed runs of each row, and `output`, a file beside the benchmarks; the defaults are given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=runs, help="timed runs of each row (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name(file), help="CSV file to append to")
    arguments = parser.parse_args(argv)
    if arguments.runs < 1:
        parser.error("--runs must be at least 1")
    return arguments


def made_on_one_core(*packages: str) -> dict[str, object]:
    """Date, machine and versions of a row."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{machine()}, one used",
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "castoff": castoff.__version__,
    }


@contextmanager
def one_core() -> Iterator[None]:
    """Pin this process and its children to one core where the system can."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def machine() -> str:
    """Processor and number of cores."""
    model = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text(errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores"


def append_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Add rows to a CSV file, which gets its header when it is new."""
    is_new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
