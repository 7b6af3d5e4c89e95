"""What one stage of a calibration is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from castoff.accuracy.recipe import Recipe, Robustness


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One fit of some curves at once.

    tables, series: by the names of the files and of `castoff accuracy ops`. sites: columns whose equal rows are left
    out together when errors are found. untrusted: series that are not fitted on some devices.
    """

    name: str
    tables: tuple[str, ...]
    series: tuple[str, ...]
    sites: tuple[str, ...]
    recipes: Mapping[str, Recipe]
    untrusted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    how: Robustness = field(default_factory=Robustness)
