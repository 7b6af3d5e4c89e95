"""Whether values are of the types that the fields of a class declare, and numbers whole."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from castoff.dims import Dim
from castoff.errors import CastoffError

MOST = 2**40
"""Largest number of requests or tokens: everything counted with them stays exact in a float64."""


def check_whole(flag: str, value: Dim, *, least: int) -> None:
    """Refuse a number, or an array with one, that is not whole or is too small."""
    entries = np.asarray(value)
    if isinstance(value, int) and value > MOST:
        raise CastoffError(f"{flag} must be at most {MOST}, got {value}")
    whole = entries.dtype.kind == "f" and np.all(np.isfinite(entries)) and np.all(entries == np.floor(entries))
    if entries.dtype.kind not in "iu" and not whole:
        raise CastoffError(f"{flag} must be whole numbers, got {value}")
    if np.any(entries > MOST):
        raise CastoffError(f"{flag} must be at most {MOST}, got {entries.max():g}")
    if entries.size == 0 or np.any(entries < least):
        smallest = "no value" if entries.size == 0 else f"{entries.min():g}"
        raise CastoffError(f"{flag} must be at least {least}, got {smallest}")


def check_value(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuse a value that is neither of one of the allowed types nor one of the allowed words."""
    words = [entry for entry in allowed if not isinstance(entry, type)]
    types = tuple(entry for entry in allowed if isinstance(entry, type))
    # A bool is an int to Python, and no number to a user.
    matches = isinstance(value, types) and (not isinstance(value, bool) or bool in types)
    if isinstance(value, int) and not isinstance(value, bool) and float in types:
        matches = True
    if not matches and value not in words:
        names = [getattr(entry, "__name__", str(entry)).replace("NoneType", "None") for entry in (*types, *words)]
        raise CastoffError(f"{name} must be {' or '.join(names)}, got {value!r}")


def plain_types(hint: object) -> tuple[object, ...]:
    """The types and words that a hint allows; nothing where it allows more than plain values and paths."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    flat = [word for option in options for word in (get_args(option) if get_origin(option) is Literal else (option,))]
    plain = all(entry in (int, float, bool, str, Path, NoneType) or isinstance(entry, str) for entry in flat)
    return tuple(flat) if plain else ()


@cache
def declared(cls: type) -> dict[str, tuple[object, ...]]:
    """Types and words that each plain field of a class may hold."""
    hints = get_type_hints(cls)
    allowed = {item.name: plain_types(hints[item.name]) for item in fields(cls)}
    return {name: types for name, types in allowed.items() if types}
