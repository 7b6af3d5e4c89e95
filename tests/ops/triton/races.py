"""Which accesses of a kernel to memory no barrier keeps apart, found while the interpreter runs it.

The interpreter runs a block's operations one after the other, a device runs them on many threads, and which thread has
which element is the compiler's to decide. So between two barriers of a program, nothing that one operation writes may
be read or written by another, unless both write the same or both are atomic. Between programs there is no barrier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from castoff.ops.triton.launch import Launch

_READ, _WRITE, _ATOMIC = range(3)


class Accesses:
    """Every access of a launch: columns address, program, interval between barriers, operation, kind, value."""

    def __init__(self) -> None:
        self.program, self.interval, self.operation = 0, 0, 0
        self._rows: list[np.ndarray] = []

    def next_program(self) -> None:
        self.program += 1

    def barrier(self) -> None:
        self.interval += 1

    def add(self, kind: int, pointers: np.ndarray, mask: np.ndarray, values: np.ndarray | int) -> None:
        """One operation of a block."""
        chosen = np.broadcast_to(mask, pointers.shape).ravel()
        addresses = pointers.ravel()[chosen].astype(np.int64)
        row = np.zeros((6, addresses.size), dtype=np.int64)
        row[0], row[1], row[2], row[3], row[4] = addresses, self.program, self.interval, self.operation, kind
        row[5] = np.broadcast_to(values, pointers.shape).ravel()[chosen].astype(np.int64) if kind == _WRITE else 0
        self._rows.append(row)
        self.operation += 1

    def table(self) -> np.ndarray:
        """By address, then in the order of access."""
        rows = np.concatenate(self._rows, axis=1)
        return rows[:, np.argsort(rows[0], kind="stable")]


def races(table: np.ndarray) -> np.ndarray:
    """Addresses that are accessed without a barrier between, at least one access being a write or atomic."""
    address, program, interval, _, kind, value = table
    found = []
    for columns in _groups(address):
        for one_program in ([columns] if np.unique(program[columns]).size > 1 else _groups_within(columns, interval)):
            kinds = set(kind[one_program].tolist())
            written = value[one_program][kind[one_program] == _WRITE]
            alike = kinds == {_WRITE} and np.unique(written).size == 1
            if kinds not in ({_READ}, {_ATOMIC}) and not alike and one_program.size > 1:
                found.append(address[one_program[0]])
    return np.array(found, dtype=np.int64)


def _groups(keys: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of equal neighbours."""
    cuts = np.flatnonzero(np.diff(keys)) + 1
    yield from np.split(np.arange(keys.size), cuts)


def _groups_within(columns: np.ndarray, keys: np.ndarray) -> list[np.ndarray]:
    order = columns[np.argsort(keys[columns], kind="stable")]
    return [order[part] for part in _groups(keys[order])]


def check(launch: Launch, *, benign: Iterable[torch.Tensor] = ()) -> None:
    """Run a launch; fails where accesses race, but for those to `benign`, or leave the tensors of the launch."""
    tensors = {name: value for name, value in launch.arguments.items() if isinstance(value, torch.Tensor)}
    with _watched() as accesses:
        launch.run()
    table = accesses.table()
    spans = {
        name: (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        for name, tensor in tensors.items()
    }
    inside = np.zeros(table.shape[1], dtype=bool)
    for first, end in spans.values():
        inside |= (table[0] >= first) & (table[0] < end)
    assert inside.all(), f"{(~inside).sum()} accesses are to no tensor of the launch"
    for tensor in benign:
        first = tensor.data_ptr()
        table = table[:, (table[0] < first) | (table[0] >= first + tensor.numel() * tensor.element_size())]
    racing = races(table)
    places = {
        name: int((racing[(racing >= first) & (racing < end)] - first)[0]) // tensors[name].element_size()
        for name, (first, end) in spans.items()
        if ((racing >= first) & (racing < end)).any()
    }
    assert not places, f"races, first element of each tensor: {places}"


@contextmanager
def _watched() -> Iterator[Accesses]:
    from triton.runtime.interpreter import InterpreterBuilder

    accesses = Accesses()
    with pytest.MonkeyPatch.context() as patch:

        def watch(name: str, note: Any) -> None:
            original = getattr(InterpreterBuilder, name)

            def watched(builder: Any, *args: Any, **kwargs: Any) -> Any:
                note(*args)
                return original(builder, *args, **kwargs)

            patch.setattr(InterpreterBuilder, name, watched)

        watch("create_masked_load", lambda ptrs, mask, *_: accesses.add(_READ, ptrs.data, mask.data, 0))
        watch("create_masked_store", lambda ptrs, value, mask, *_: accesses.add(_WRITE, ptrs.data, mask.data, value.data))
        watch("create_atomic_rmw", lambda _, ptr, value, mask, *__: accesses.add(_ATOMIC, ptr.data, mask.data, 0))
        watch("create_barrier", lambda: accesses.barrier())
        watch("set_grid_idx", lambda *_: accesses.next_program())
        yield accesses
