"""Where reports go: text on standard output, files that are complete or not there at all."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from castoff.errors import CastoffError
from castoff.files import NewFile
from castoff.report.plain import json_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PLAIN_WIDTH = 160


def console(*, plain_width: int = PLAIN_WIDTH, file: TextIO | None = None) -> Console:
    """A console like standard output: on a terminal in colour and as wide as it is, else plain, `plain_width` wide."""
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else plain_width
    # Shapes such as [6144] are no markup, numbers need no colour.
    return Console(
        file=file, force_terminal=is_terminal or None, width=width, markup=False, emoji=False, highlight=False
    )


def render(*parts: RenderableType) -> str:
    """Renderables as the text that a console for standard output would write, in its encoding."""
    encoding = sys.stdout.encoding or "utf-8"
    written = io.BytesIO()
    shown = console(file=io.TextIOWrapper(written, encoding=encoding, errors="replace", write_through=True))
    for part in parts:
        shown.print(part)
    return "\n".join(line.rstrip() for line in written.getvalue().decode(encoding).splitlines()) + "\n"


def print_text(text: str) -> None:
    """Write to standard output; raises BrokenPipeError for a reader that is gone, CastoffError for a full disk."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CastoffError(f"cannot write to standard output: {error.strerror or error}") from None


def print_note(text: str) -> None:
    """One line on standard error."""
    print(f"note: {text}", file=sys.stderr)


def check_outputs(outputs: Mapping[str, Path | None]) -> None:
    """Refuse files that cannot be written, before any work is done; by the flag that names them.

    Raises CastoffError where the directory is missing or not writable, the path is a directory or a file that may not
    be written, or two flags name one file.
    """
    seen: dict[Path, str] = {}
    for flag, path in outputs.items():
        if path is None:
            continue
        problem = _problem(path)
        if problem:
            raise CastoffError(f"{flag} {path}: {problem}")
        target = path.resolve()
        if target in seen and not _is_special(path):
            raise CastoffError(f"{seen[target]} and {flag} name the same file, {path}")
        seen[target] = flag


def _problem(path: Path) -> str | None:
    try:
        if path.is_dir():
            return "is a directory; name a file"
        if path.exists() and not os.access(path, os.W_OK):
            return "permission denied"
        if _is_special(path):
            return None
        directory = path.resolve().parent
        if not directory.is_dir():
            return f"there is no directory {directory}"
        if not os.access(directory, os.W_OK | os.X_OK):
            return f"permission denied in the directory {directory}"
    except (OSError, RuntimeError, ValueError) as error:
        return f"not a usable path ({error})"
    return None


def _is_special(path: Path) -> bool:
    """Whether the path is a pipe, a terminal or another device, which is written to and never replaced."""
    return path.exists() and not path.is_file()


def write_file(path: Path, text: str) -> None:
    """Write a file whole: a reader, or a crash, sees the old one or the new one. Raises CastoffError."""
    try:
        if _is_special(path):
            path.write_text(text, encoding="utf-8")
            return
        new = NewFile(path)
        try:
            new.file.write(text.encode("utf-8"))
            new.commit()
        finally:
            new.discard()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CastoffError(f"cannot write {path}: {error.strerror or error}") from None


def make_directory(path: Path) -> None:
    """Make a directory where there is none. Raises CastoffError."""
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise CastoffError(f"cannot make the directory {path}: {error.strerror or error}") from None


def write_json(target: str, value: object) -> None:
    """Write JSON to a file, or with `-` to standard output."""
    text = json_text(value)
    if target == "-":
        print_text(text)
    else:
        write_file(Path(target), text)
