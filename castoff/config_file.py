"""Flags from a file: `--config run.yaml` gives the flags of its command that the command line does not.

A key is a flag's name with underscores. What may be set, and to which type, is what the command's flags say, so a new
flag is a new key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cyclopts import App, ArgumentCollection, Token
from cyclopts.argument import Argument

from castoff.errors import CastoffError
from castoff.spec.checks import check_value, plain_types
from castoff.spec.offload import flags_without_use
from castoff.spec.toml_file import Table, shown
from castoff.spec.yaml_file import read_yaml

CONFIG_FLAG = "--config"
_RUNS = Path(__file__).resolve().parent / "data" / "runs"


def add_from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give the arguments that the command line leaves out their values from the file of `--config`, if one is named.

    A cyclopts `config` function: it sees the arguments before they are converted. Raises CastoffError.
    """
    config = next((argument for argument in arguments if argument.name == CONFIG_FLAG), None)
    if config is None or not config.tokens:
        return
    table = read_yaml(_file_of(config.tokens[0].value))
    # An argument that is a whole group of flags is not given by itself.
    single = [argument for argument in arguments if argument is not config and plain_types(argument.hint)]
    by_key = {argument.field_info.name: argument for argument in single}
    table.only(by_key)
    given = {key: argument.tokens[0].value for key, argument in by_key.items() if argument.tokens}
    displaced = _displaced(given)
    for key, argument in by_key.items():
        if key in table.values:
            _check(table, key, table.values[key], plain_types(argument.hint))
            if key not in displaced:
                _add(table, key, argument)


def _displaced(given: Mapping[str, str]) -> set[str]:
    """Keys that mean nothing beside what the command line gives: other prompts, and flags of another mode."""
    prompts = {"prompt", "prompt_file", "random_prompts"}
    others = prompts if prompts & given.keys() else set()
    return others | (flags_without_use(given["offload"]) if "offload" in given else set())


def shipped_runs() -> tuple[str, ...]:
    """Names of the settings that come with castoff."""
    return tuple(sorted(path.stem for path in _RUNS.glob("*.yaml")))


def _file_of(name_or_path: str) -> Path:
    """The shipped file of a name, else the path itself. Raises CastoffError for what looks like a name and is none."""
    if name_or_path in shipped_runs():
        return _RUNS / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml") and path.name == name_or_path and not path.exists():
        raise CastoffError(
            f"{CONFIG_FLAG} {name_or_path}: there is no such file, and castoff has no settings of this name; it has "
            + ", ".join(shipped_runs())
        )
    return path


def _add(table: Table, key: str, argument: Argument) -> None:
    """Give one value of the file to its argument, unless the command line does."""
    value = table.values[key]
    if value is not None and not argument.tokens:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        # Later checks name an argument by its keyword.
        argument.append(Token(keyword=f"{table.file}: {key}", value=text, source=table.file))


def _check(table: Table, key: str, value: object, allowed: tuple[object, ...]) -> None:
    if isinstance(value, list | dict):
        raise table.fault(key, f"must be a single value, got {shown(value)}")
    is_choice = any(isinstance(entry, str) for entry in allowed)
    if isinstance(value, str) and is_choice:
        # The command line's own check knows which choice was meant.
        return
    types = tuple(str if entry is Path else entry for entry in allowed)
    try:
        check_value(f"{table.file}: {key}", value, types)
    except CastoffError as error:
        raise CastoffError(f"{error}{_hint(value)}") from None


def _hint(value: object) -> str:
    """What YAML may have made of what was written."""
    match value:
        case bool():
            return "; YAML reads no, off, yes and on without quotes as false and true"
        case str():
            return "; a number stands without quotes, and with a dot before its exponent: 1.0e-3"
        case _:
            return ""
