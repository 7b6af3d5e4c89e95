"""The stages of a calibration, in order: what each fits, to which rows, and which rows are left out together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from castoff.accuracy.fit import Recipe, Robustness


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One fit of some curves at once.

    tables, series: by the names of the files and of `castoff accuracy ops`. sites: columns whose equal rows are left
    out together when errors are found.
    """

    name: str
    tables: tuple[str, ...]
    series: tuple[str, ...]
    sites: tuple[str, ...]
    recipes: Mapping[str, Recipe]
    how: Robustness = field(default_factory=Robustness)


STAGES: tuple[Stage, ...] = (
    Stage(
        name="matrix products in bf16",
        tables=("gemm",),
        series=("gemm_bf16",),
        sites=("n", "k"),
        recipes={
            "matmul_bf16": Recipe(
                form="matmul",
                knots={"m": (1, 8, 64, 128, 256, 1024, 8192), "n": (128, 1024, 8192), "k": (128, 1024, 8192)},
            )
        },
    ),
)
