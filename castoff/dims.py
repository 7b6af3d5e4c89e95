"""Arithmetic on dims: numbers, or numpy arrays with one entry per scenario.

Model code and work formulas never branch on a dim. They use plain operators and these functions, so that one line
serves a single scenario and a whole sweep.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Dim = int | float | Array


def minimum(a: Dim, b: Dim) -> Dim:
    """Elementwise smaller of two dims."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.minimum(a, b)
    return min(a, b)


def maximum(a: Dim, b: Dim) -> Dim:
    """Elementwise larger of two dims."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return max(a, b)


def some(amount: Dim) -> bool:
    """Whether there is anything of a dim; an array may hold some."""
    return isinstance(amount, np.ndarray) or amount != 0


def ceil_div(a: Dim, b: Dim) -> Dim:
    """a / b rounded up."""
    return -(-a // b)


def where(condition: bool | Array, a: Dim, b: Dim) -> Dim:
    """a where the condition holds, else b."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, a, b)
    return a if condition else b


def product(dims: Iterable[Dim]) -> Dim:
    """Product of dims; 1 for none."""
    result: Dim = 1
    for dim in dims:
        result = result * dim
    return result


def largest(dim: Dim) -> float:
    """Largest entry of a dim as a number."""
    return float(np.max(dim)) if isinstance(dim, np.ndarray) else float(dim)
