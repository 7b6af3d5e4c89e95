"""Values as JSON: dataclasses become objects, nothing is NaN."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from castoff.dims import Dim, largest


def plain(value: Any) -> Any:
    """`value` out of what JSON has: dataclasses and mappings as objects, sets sorted, numpy scalars as numbers."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.generic() | np.ndarray():
            return plain(value.tolist())
        case Mapping():
            return {str(key): plain(entry) for key, entry in value.items()}
        case frozenset() | set():
            return sorted(plain(entry) for entry in value)
        case list() | tuple():
            return [plain(entry) for entry in value]
        case _ if is_dataclass(value) and not isinstance(value, type):
            return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form")


def number(value: Dim) -> float | int:
    """An amount of bytes or FLOPs as a plain number, an int if it is whole."""
    value = largest(value)
    return int(value) if value.is_integer() else value


def json_text(value: Any, *, indent: int | None = 2) -> str:
    """Strict JSON with a newline at its end; indent None puts it on one line."""
    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
