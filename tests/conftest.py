"""What every test shares: the Hypothesis profile, the public data folder, and when a gpu test runs."""

import importlib.util
import os
import signal
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).parent.parent
SHARED_DATA_VARIABLE = "CASTOFF_SHARED_DATA"

# Of tests in the background, shells ignore interrupts, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run side by side, on matrices that gain nothing from several threads. torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on every machine, and nothing that depends on how fast that machine is.
settings.register_profile(
    "castoff",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("castoff")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public data (configs, device figures, traces) that is not part of the repository.

    $CASTOFF_SHARED_DATA, else `../shared/data` beside the repository. A test that asks for it is skipped without it.
    """
    folder = Path(os.environ.get(SHARED_DATA_VARIABLE) or REPOSITORY.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no public data at {folder}: set {SHARED_DATA_VARIABLE} to its folder")
    return folder


@cache
def reason_without_gpu() -> str | None:
    """Why gpu tests cannot run here, or None if they can. Imports torch, so it is asked only for a gpu test."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.accelerator.is_available() else "torch finds no accelerator"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Triton decides when it is imported whether it compiles or interprets. Where its kernels are to be interpreted, no
    other test's import may decide first."""
    kernels = Path(__file__).parent / "ops" / "triton"
    asked = [Path(str(argument).split("::")[0]).resolve() for argument in session.config.args]
    if not any(kernels.is_relative_to(path) or path.is_relative_to(kernels) for path in asked):
        return
    if importlib.util.find_spec("triton") is None or reason_without_gpu() is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := reason_without_gpu()):
        pytest.skip(reason)
