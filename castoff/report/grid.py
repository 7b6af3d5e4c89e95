"""Empty tables in the one look that all reports have."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table


def table(title: str, columns: Iterable[str], *, left: int = 1) -> Table:
    """An empty table whose first `left` columns are words and the others numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    return made


def facts_table(title: str) -> Table:
    """An empty table of facts and their values."""
    made = table(title, ["fact", "value"], left=2)
    made.columns[1].no_wrap = False
    return made
