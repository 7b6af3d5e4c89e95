"""Strict reading of castoff's TOML files.

A fault in a file is a `CastoffError` of one sentence that names the file, the key, what was given and what is allowed.
A reader calls `Table.only` with the keys it knows, then takes each value through the accessor of its type; an accessor
refuses a missing key, a wrong type and a figure out of range. Nothing has a default here.
"""

import difflib
import math
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from castoff.errors import CastoffError

_DATA = Path(__file__).resolve().parent.parent / "data"

Choice = TypeVar("Choice", bound=str)

MOST_NUMBER = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of a TOML file: `file` as the user gave it, `name` dotted from the top (empty at the top)."""

    file: str
    name: str = ""
    values: Mapping[str, object]

    def only(self, allowed: Iterable[str]) -> None:
        """Refuse a key that is not in `allowed`, naming the nearest one that is."""
        allowed = tuple(allowed)
        for key in self.values:
            if key not in allowed:
                place = f"[{self.name}]" if self.name else "the top level"
                raise CastoffError(
                    f"{self.file}: unknown key {key!r} in {place}{did_you_mean(key, allowed)}; "
                    f"allowed: {', '.join(allowed)}"
                )

    def positive(self, key: str) -> float:
        value = self._number(key, "a number greater than 0", lambda value: value > 0)
        return self._plausible(key, value, 1e-15)

    def at_least_zero(self, key: str) -> float:
        return self._plausible(key, self._number(key, "a number of at least 0", lambda value: value >= 0), 0)

    def _plausible(self, key: str, value: float, least: float) -> float:
        """Refuse a figure that can only be a slip; quotients of such figures would leave the range of a float."""
        if not least <= value <= 1e30:
            raise self.fault(key, f"must be from {least:g} to 1e+30, got {value:g}")
        return value

    def number(self, key: str) -> float:
        return self._number(key, "a number from −1e+30 to 1e+30", lambda value: abs(value) <= MOST_NUMBER)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._value(key)
        if not isinstance(value, list):
            raise self.fault(key, f"must be a list of numbers, got {shown(value)}")
        wrong = [item for item in value if type(item) not in (int, float) or not abs(item) <= MOST_NUMBER]
        if wrong:
            raise self.fault(key, f"must be a list of numbers from −1e+30 to 1e+30, but holds {shown(wrong[0])}")
        return tuple(map(float, value))

    def fraction(self, key: str) -> float:
        return self._number(key, "a fraction greater than 0 and at most 1", lambda value: 0 < value <= 1)

    def count(self, key: str, *, at_least: int = 1) -> int:
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value < 2**63:
            wanted = f"a whole number of at least {at_least} that fits in 64 bits"
            raise self.fault(key, f"must be {wanted}, got {shown(value)}")
        return value

    def flag(self, key: str) -> bool:
        value = self._value(key)
        if not isinstance(value, bool):
            raise self.fault(key, f"must be true or false, not {shown(value)}")
        return value

    def text(self, key: str) -> str:
        value = self._value(key)
        if not isinstance(value, str) or not value.strip():
            raise self.fault(key, f"must be a non-empty string, got {shown(value)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._value(key)
        if not isinstance(value, list):
            raise self.fault(key, f"must be a list of strings, got {shown(value)}")
        for item in value:
            if not isinstance(item, str) or not item.strip():
                raise self.fault(key, f"must be a list of non-empty strings, but holds {shown(item)}")
        return tuple(value)

    def choice(self, key: str, allowed: Sequence[Choice]) -> Choice:
        return self._one_of(key, self._value(key), allowed)

    def choices(self, key: str, allowed: Sequence[Choice]) -> tuple[Choice, ...]:
        return tuple(self._one_of(key, item, allowed) for item in self.texts(key))

    def table(self, key: str) -> "Table":
        value = self._value(key)
        if not isinstance(value, dict):
            raise self.fault(key, f"must be a table, got {shown(value)}")
        return Table(file=self.file, name=self._dotted(key), values=value)

    def tables(self, key: str) -> tuple["Table", ...]:
        value = self._value(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            raise self.fault(
                key, f"must be one or more tables, each headed [[{self._dotted(key)}]], got {shown(value)}"
            )
        return tuple(
            Table(file=self.file, name=f"{self._dotted(key)}[{i}]", values=item) for i, item in enumerate(value)
        )

    def over(self, base: "Table") -> "Table":
        """This table with the keys it lacks taken from `base`."""
        return Table(file=self.file, name=self.name, values={**base.values, **self.values})

    def fault(self, key: str, complaint: str) -> CastoffError:
        return CastoffError(f"{self.file}: {self._dotted(key)} {complaint}")

    def _dotted(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def _value(self, key: str) -> object:
        if key not in self.values:
            raise self.fault(key, "is missing")
        return self.values[key]

    def _number(self, key: str, wanted: str, accepts: Callable[[float], bool]) -> float:
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(key, f"must be {wanted}, got {shown(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or not accepts(number):
            raise self.fault(key, f"must be {wanted}, got {shown(number)}")
        return number

    def _one_of(self, key: str, value: object, allowed: Sequence[Choice]) -> Choice:
        for option in allowed:
            if value == option:
                return option
        hint = did_you_mean(value, allowed) if isinstance(value, str) else ""
        raise self.fault(key, f"must be one of {', '.join(allowed)}, got {shown(value)}{hint}")


def read_toml(path: Path) -> Table:
    """The top-level table of a TOML file; raises `CastoffError` when it cannot be read or parsed."""
    try:
        with path.open("rb") as file:
            return Table(file=str(path), values=tomllib.load(file))
    except OSError as error:
        raise CastoffError(f"{path}: cannot read this file: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CastoffError(f"{path}: not valid TOML: the file is not UTF-8 text ({error.reason})") from error
    # tomllib also lets a plain ValueError through (an impossible date, an integer of thousands of digits), and so does
    # `open` for a path that no file system allows.
    except ValueError as error:
        raise CastoffError(f"{path}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise CastoffError(f"{path}: not valid TOML: lists or tables are nested too deeply") from error


def shipped_names(kind: Literal["device", "backend"]) -> tuple[str, ...]:
    """Names of the files of this kind that come with castoff, sorted."""
    return tuple(sorted(path.stem for path in (_DATA / f"{kind}s").glob("*.toml")))


def find_toml(kind: Literal["device", "backend"], name_or_path: str) -> Path:
    """The file that a user's `--device` or backend means: a path ends in `.toml` or has a slash, else it is a name."""
    if name_or_path.endswith(".toml") or "/" in name_or_path or os.sep in name_or_path:
        return Path(name_or_path)
    names = shipped_names(kind)
    if name_or_path in names:
        return _DATA / f"{kind}s" / f"{name_or_path}.toml"
    listing = "; `castoff devices` describes them" if kind == "device" else ""
    raise CastoffError(
        f"unknown {kind} {name_or_path!r}{did_you_mean(name_or_path, names)}; known: {', '.join(names)}{listing}; "
        f"a path to a .toml file works too"
    )


def shipped_fits(backend: str, device: str) -> Path | None:
    """The file of fits that comes with castoff for a backend on a device; None where there is none."""
    path = _DATA / "fits" / backend / f"{device}.toml"
    return path if path.is_file() else None


def shipped_fit_devices(backend: str) -> tuple[str, ...]:
    """The devices that castoff comes with fits for, of a backend."""
    return tuple(sorted(path.stem for path in (_DATA / "fits" / backend).glob("*.toml")))


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """` (did you mean 'x'?)` with the entries of `allowed` nearest to `given`, or nothing when none is near."""
    by_lower = {option.lower(): option for option in allowed}
    near = [by_lower[key] for key in difflib.get_close_matches(given.lower(), by_lower, n=3)]
    return f" (did you mean {' or '.join(repr(option) for option in near)}?)" if near else ""


def shown(value: object) -> str:
    """A value as an error message names it."""
    match value:
        case bool():
            return str(value).lower()
        case dict():
            return "a table"
        case list():
            return "a list" if value else "an empty list"
        case float():
            return f"{value:g}"
        case str() | int():
            return repr(value)
        case _:
            return str(value)
