"""Kernels run compiled where torch finds a GPU, and in Triton's interpreter on CPU tensors where it finds none.

Triton decides when its modules and the kernels are imported, so both are imported here, with the variable set for as
long as that takes. Other tests of this process do not see it.
"""

import importlib
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import reason_without_gpu

INTERPRETED = reason_without_gpu() is not None
_VARIABLE = "TRITON_INTERPRET"
_KERNELS = ("attention", "plan_direct", "plan_gather", "plan_serve", "rows")
# Integers that look like no id, row or count, and are no address of any tensor.
_POISON = 0x5A5A5A5A


def _interprets() -> bool:
    """Whether the Triton that is imported interprets: its own functions are kernels of one kind or the other."""
    return type(sys.modules["triton"].language.standard.sum).__name__ == "InterpretedFunction"


def _import_kernels() -> str | None:
    """Import them as they are to run; returns why they cannot, None if they can."""
    if INTERPRETED and "triton" in sys.modules and not _interprets():
        return "triton was imported to compile before it could be imported to interpret: run this folder by itself"
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setenv(_VARIABLE, "1")
        for name in _KERNELS:
            importlib.import_module(f"castoff.ops.triton.{name}")
    return None


_FAULT = _import_kernels()


def _multiply(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """tl.dot; the interpreter's own takes the bits of bf16 for integers."""
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    def numbers(handle: Any) -> Any:
        bits = handle.data
        return (bits.astype(np.uint32) << 16).view(np.float32) if str(handle.dtype) == "bf16" else bits

    return TensorHandle(np.matmul(numbers(a), numbers(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)


class _PatchedOnce:
    """The interpreter's patch of triton.language, made for a kernel and not again for each function that it calls."""

    def __init__(self, patch: Any) -> None:
        self._patch, self._scope = patch, None

    def __call__(self, function: Any) -> "_PatchedOnce":
        if self._scope is None:
            self._scope = self._patch(function)
        return self

    def restore(self) -> None:
        self._scope.restore()
        self._scope = None


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret in this test, three times as fast as by default: without checks that integers overflow, too."""
    if _FAULT is not None:
        pytest.fail(_FAULT)
    if INTERPRETED:
        from triton.runtime import interpreter

        monkeypatch.setenv(_VARIABLE, "1")
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _multiply)
        monkeypatch.setattr(interpreter, "_patch_lang", _PatchedOnce(interpreter._patch_lang))
        options = interpreter.interpreter_builder.options
        monkeypatch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote holds nothing that a result could hold."""

    def poisoned(allocate: Any) -> Any:
        def allocated(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = allocate(*args, **kwargs)
            value = float("nan") if tensor.is_floating_point() else _POISON & torch.iinfo(tensor.dtype).max
            return tensor.fill_(value)

        return allocated

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture
def device() -> str:
    """Where the tensors of a kernel are."""
    return "cpu" if INTERPRETED else str(torch.accelerator.current_accelerator())
