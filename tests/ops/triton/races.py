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
        """All of them, one per column."""
        return np.concatenate(self._rows, axis=1)


def races(table: np.ndarray) -> np.ndarray:
    """Addresses that are accessed without a barrier between, at least one access being a write or atomic."""
    table = table[:, np.argsort(table[0], kind="stable")]
    address, program, interval, _, _, _ = table
    starts = _starts(address)
    shared = np.minimum.reduceat(program, starts) != np.maximum.reduceat(program, starts)
    # No barrier helps where programs share an address.
    interval = np.where(np.repeat(shared, np.diff(starts, append=address.size)), 0, interval)
    order = np.lexsort((interval, address))
    starts = np.union1d(_starts(address[order]), _starts(interval[order]))
    _, _, _, _, kind, value = table[:, order]
    reads, writes, atomics = (np.logical_or.reduceat(kind == each, starts) for each in (_READ, _WRITE, _ATOMIC))
    least = np.minimum.reduceat(np.where(kind == _WRITE, value, np.iinfo(np.int64).max), starts)
    most = np.maximum.reduceat(np.where(kind == _WRITE, value, np.iinfo(np.int64).min), starts)
    racing = (writes & (reads | atomics | (least != most))) | (reads & atomics)
    return np.unique(address[order][starts[racing]])


def _starts(keys: np.ndarray) -> np.ndarray:
    """Where runs of equal keys begin."""
    return np.concatenate([[0], np.flatnonzero(np.diff(keys)) + 1])


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
        watch(
            "create_masked_store", lambda ptrs, value, mask, *_: accesses.add(_WRITE, ptrs.data, mask.data, value.data)
        )
        watch("create_atomic_rmw", lambda _, ptr, value, mask, *__: accesses.add(_ATOMIC, ptr.data, mask.data, 0))
        watch("create_barrier", lambda: accesses.barrier())
        watch("set_grid_idx", lambda *_: accesses.next_program())
        yield accesses
