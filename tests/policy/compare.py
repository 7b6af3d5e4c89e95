"""Plans and states compared bit for bit, and arrays that refuse what numba would not notice."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from castoff.policy import arrays


def assert_equal(actual: Any, expected: Any) -> None:
    """Two plans or states, field by field; both must be of the same dtypes."""
    for name, left, right in zip(actual._fields, actual, expected, strict=True):
        assert left.dtype == right.dtype, name
        np.testing.assert_array_equal(left, right, err_msg=name)


class Strict(np.ndarray):
    """An array without negative indices, so that one that is out of bounds raises on both sides."""

    def __getitem__(self, index: Any) -> Any:
        refuse_negative(index)
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        refuse_negative(index)
        super().__setitem__(index, value)


def refuse_negative(index: Any) -> None:
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, int | np.integer) and part < 0:
            raise IndexError(f"index {part}")


def strict(arrays: Any) -> Any:
    """Strict copies of the arrays of a NamedTuple."""
    return type(arrays)(*(array.copy().view(Strict) for array in arrays))


@contextmanager
def plain_python(module: ModuleType) -> Iterator[None]:
    """Plans of a module as plain Python makes them, in strict arrays."""

    def strict_plan(*shape: int) -> Any:
        return strict(arrays.new_fetch_plan(*shape))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compiled", lambda function: function)
        if module.__dict__.get("new_fetch_plan"):
            patch.setattr(module, "new_fetch_plan", strict_plan)
        yield
