"""Strict reading of a YAML file of settings, in the manner of `toml_file`: every fault is one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.spec.toml_file import Table, shown


def read_yaml(path: Path) -> Table:
    """The top-level mapping of a YAML file; an empty file has no keys.

    Raises CastoffError for a file that cannot be read or is no YAML, for anything but a mapping at the top, for a key
    given twice, and where PyYAML is not installed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CastoffError(f"{path}: not valid YAML: the file is not UTF-8 text ({error.reason})") from None
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else None
        raise CastoffError(f"{path}: cannot read this file: {problem or error}") from None
    values = _parsed(path, text)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise CastoffError(f"{path}: must hold settings, one `key: value` a line, got a {_kind(values)}")
    strange = [key for key in values if not isinstance(key, str)]
    if strange:
        raise CastoffError(f"{path}: a key must be a word, got {shown(strange[0])}")
    return Table(file=str(path), values=values)


def _parsed(path: Path, text: str) -> Any:
    yaml = lazy.load("yaml")
    try:
        loader = yaml.SafeLoader
    except ModuleNotFoundError:
        raise CastoffError("a YAML file needs PyYAML: pip install 'castoff[run]'") from None
    try:
        node = yaml.compose(text, Loader=loader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        place = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise CastoffError(f"{path}: not valid YAML: {error.problem}{place}") from None
    # PyYAML lets a plain ValueError through for an impossible date or an integer of thousands of digits, and others for
    # a tag that does not go with its value.
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CastoffError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise CastoffError(f"{path}: not valid YAML: lists or mappings are nested too deeply") from None
    if isinstance(node, yaml.MappingNode):
        _refuse_twice(path, [key for key, _ in node.value])
    return values


def _refuse_twice(path: Path, keys: list[Any]) -> None:
    """YAML asks that keys differ, and PyYAML takes the last without a word."""
    first: dict[str, int] = {}
    for key in keys:
        line = key.start_mark.line + 1
        if key.value in first:
            raise CastoffError(f"{path}: {key.value!r} is given twice, in lines {first[key.value]} and {line}")
        first[key.value] = line


def _kind(value: object) -> str:
    return "list" if isinstance(value, list) else "single value"
