"""Plain Python functions as machine code where numba is installed, and as they are where it is not.

What is compiled is ordinary code: a function calls others by their names, or through its closure. numba calls a plain
function once it was told of it, so `compiled` tells it of all that are called. Arguments are arrays, numbers and
NamedTuples of them; numba checks no index.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import lazy_loader as lazy

from castoff.errors import CastoffWarning

numba = lazy.load("numba")

P = ParamSpec("P")
T = TypeVar("T")


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function` as numba compiles it, on the first call with each set of argument types; without numba, itself.

    Machine code runs without the GIL. It is kept on disk, by numba's rules: beside the source, else in the user's cache
    folder, or where $NUMBA_CACHE_DIR says; nowhere if none can be written.
    """
    machine_code: Callable[P, T] = _compiled(function)
    return machine_code


@cache
def _compiled(function: FunctionType) -> Any:
    if not has_numba():
        return function
    callees = list(dict.fromkeys(_callees(function)))
    for callee in callees:
        _make_callable(callee)
    named = _named_by_sources(function, callees)
    try:
        return _Kept(named, numba.njit(named, nogil=True, cache=True))
    except RuntimeError:  # numba found no folder that can be written
        return numba.njit(named, nogil=True)


class _Kept:
    """Machine code on disk, or made anew where the disk does not give or take it. kept: numba's function."""

    def __init__(self, function: FunctionType, kept: Any) -> None:
        self.kept = kept
        self._function = function
        self._unkept: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Call it; what a full or broken disk raises comes before anything has run."""
        if self._unkept is not None:
            return self._unkept(*arguments)
        try:
            return self.kept(*arguments)
        except (OSError, EOFError, UnpicklingError):
            self._unkept = numba.njit(self._function, nogil=True)
            return self._unkept(*arguments)


@cache
def has_numba() -> bool:
    """Whether functions can be compiled. A numba that is there and cannot be imported is told of, once."""
    try:
        # The lazy stand-in is imported when it is asked for its spec.
        if find_spec("numba") is None:
            return False
        _ = numba.njit
    # What an installation that does not fit its numpy raises, among others.
    except (ImportError, AttributeError, OSError) as error:
        warnings.warn(
            f"numba is installed and cannot be imported, so plans run as plain Python, which is slow: {error}",
            CastoffWarning,
            stacklevel=2,
        )
        return False
    return True


def _callees(function: FunctionType) -> Iterator[FunctionType]:
    """The Python functions that `function` calls, and those that they call; some more than once."""
    variables = inspect.getclosurevars(function)
    for value in (*variables.nonlocals.values(), *variables.globals.values()):
        if isinstance(value, FunctionType):
            yield from _callees(value)
            yield value


@cache
def _make_callable(function: FunctionType) -> None:
    """Tell numba, once, that compiled code may call a function."""
    numba.extending.register_jitable(function)


def _named_by_sources(function: FunctionType, callees: list[FunctionType]) -> FunctionType:
    """A copy of `function` whose name says what code it was compiled from.

    numba looks at the file of `function` alone to see whether machine code on disk is stale, but callees and constants
    come from other files. So the name, by which numba finds machine code, has a digest of all files in their folders.
    It has one of the callees' names too: functions that differ in what they close over have one name otherwise, hence
    one index on disk, in which processes that compile at once may take each other's code for their own.
    """
    folders = {Path(inspect.getfile(each)).parent for each in (function, *callees)}
    sources = b"".join(file.read_bytes() for folder in sorted(folders) for file in sorted(folder.glob("*.py")))
    names = "".join(f"{callee.__module__}.{callee.__qualname__} " for callee in callees)
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__qualname__ = f"{function.__name__}_{sha256(sources + names.encode()).hexdigest()[:16]}"
    return copy
