"""Strict access to a Hugging Face config: every error names the file, the key and what was found there."""

import json
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from castoff.errors import CastoffError, CastoffWarning

P = ParamSpec("P")
T = TypeVar("T")

# Far above any model, and small enough that a product of two sizes fits into 64 bits.
_MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class HfConfig:
    """A JSON object with typed getters; `source` is the file, `prefix` the path of a nested object ("rope_scaling.").

    A key whose value is null counts as absent, because publishers write null for "not set".
    """

    values: Mapping[str, object]
    source: str
    prefix: str = ""

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, key: str, problem: str) -> CastoffError:
        return CastoffError(f"{self.source}: {self.prefix}{key} {problem}")

    def integer(self, key: str, *, minimum: int = 1, maximum: int = _MAX_INTEGER, default: int | None = None) -> int:
        if default is not None and not self.has(key):
            return default
        value = self._required(key)
        # bool is an int to isinstance; `true` is not a size.
        if type(value) is not int:
            raise self.error(key, f"must be an integer, not {shown(value)}")
        if not minimum <= value <= maximum:
            raise self.error(key, f"must be between {minimum} and {maximum}, not {shown(value)}")
        return value

    def number(self, key: str, *, default: float | None = None, zero_is_allowed: bool = False) -> float:
        if default is not None and not self.has(key):
            return default
        value = self._required(key)
        if type(value) is not int and type(value) is not float:
            raise self.error(key, f"must be a number, not {shown(value)}")
        in_range = 0 <= value <= _MAX_NUMBER and (zero_is_allowed or value != 0)
        if not in_range:
            wanted = "a finite number of at least 0" if zero_is_allowed else "a finite number above 0"
            raise self.error(key, f"must be {wanted}, not {shown(value)}")
        return float(value)

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        if default is not None and not self.has(key):
            return default
        value = self._required(key)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {shown(value)}")
        return value

    def text(self, key: str, *, allowed: Collection[str] = (), default: str | None = None) -> str:
        """A string; with `allowed`, one of those."""
        if default is not None and not self.has(key):
            return default
        value = self._required(key)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {shown(value)}")
        if allowed and value not in allowed:
            raise self.error(key, f"is {shown(value)}; supported: {', '.join(allowed)}")
        return value

    def items(self, key: str) -> list[object]:
        value = self._required(key)
        if not isinstance(value, list):
            raise self.error(key, f"must be a list, not {shown(value)}")
        return value

    def integers(self, key: str, *, minimum: int = 1) -> tuple[int, ...]:
        found: list[int] = []
        for value in self.items(key):
            if type(value) is not int or not minimum <= value <= _MAX_INTEGER:
                raise self.error(key, f"must be a list of integers of at least {minimum}; it holds {shown(value)}")
            found.append(value)
        return tuple(found)

    def strings(self, key: str) -> tuple[str, ...]:
        found: list[str] = []
        for value in self.items(key):
            if not isinstance(value, str):
                raise self.error(key, f"must be a list of strings; it holds {shown(value)}")
            found.append(value)
        return tuple(found)

    def section(self, key: str) -> "HfConfig":
        value = self._required(key)
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, not {shown(value)}")
        return HfConfig(values=value, source=self.source, prefix=f"{self.prefix}{key}.")

    def one_spelling(self, *keys: str) -> str:
        """The one of several spellings of the same setting that the config uses; an error if two are used and differ,
        and the first, for the error about a missing key, if none is."""
        used = [key for key in keys if self.has(key)]
        for key in used[1:]:
            if self.values[key] != self.values[used[0]]:
                raise self.error(
                    key,
                    f"is {shown(self.values[key])}, but {self.prefix}{used[0]} says {shown(self.values[used[0]])}; "
                    "they are spellings of the same setting",
                )
        return used[0] if used else keys[0]

    def check_fixed(self, supported: Mapping[str, object]) -> None:
        """An error if a key is there with another value than the only one supported."""
        for key, only in supported.items():
            if self.has(key) and (type(self.values[key]) is not type(only) or self.values[key] != only):
                raise self.error(key, f"is {shown(self.values[key])}; only {shown(only)} is supported")

    def warn_about_unknown(self, known: Collection[str]) -> None:
        for key in self.values:
            if key not in known:
                warnings.warn(
                    f"{self.source}: {self.prefix}{key} is unknown to castoff and ignored; "
                    "if it changes the computation, the prediction does not show it",
                    CastoffWarning,
                    stacklevel=2,
                )

    def build(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`make(...)`, its complaint about values that do not fit together preceded by the file's name."""
        try:
            return make(*args, **kwargs)
        except CastoffError as error:
            raise CastoffError(f"{self.source}: {error}") from None

    def _required(self, key: str) -> object:
        if key not in self.values:
            raise self.error(key, "is missing")
        value = self.values[key]
        if value is None:
            raise self.error(key, "is null, but a value is needed")
        return value


def shown(value: object) -> str:
    """A JSON value for an error message, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
