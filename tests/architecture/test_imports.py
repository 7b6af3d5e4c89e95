"""Predicting starts fast because it imports nothing heavy. Each check runs in a fresh interpreter."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.architecture

HEAVY_PACKAGES = ("torch", "transformers", "pyarrow", "numba", "triton")

# A lazy proxy stands in sys.modules under the package's own name before its first use: only submodules prove an import.
REPORT_HEAVY = f"""
import sys
loaded = {{name.partition(".")[0] for name in sys.modules if "." in name}}
heavy = sorted(loaded.intersection({HEAVY_PACKAGES!r}))
if heavy:
    sys.exit("imported: " + ", ".join(heavy))
"""


def assert_imports_nothing_heavy(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code) + REPORT_HEAVY],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"


def test_the_check_sees_a_heavy_import() -> None:
    pytest.importorskip("torch")
    with pytest.raises(AssertionError, match="imported: torch"):
        assert_imports_nothing_heavy("import torch")


@pytest.mark.parametrize("module", ["castoff", "castoff.cli"])
def test_import(module: str) -> None:
    assert_imports_nothing_heavy(f"import {module}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["accuracy", "ops", "--help"],
        ["cast", "zai-org/GLM-5.2", "--device", "ATLAS_800_A3_752T_128G_DIE", "--decode"],
    ],
    ids=["help", "accuracy", "cast"],
)
def test_command(arguments: list[str]) -> None:
    assert_imports_nothing_heavy(
        f"""
        from castoff.cli import main
        assert main({arguments!r}) == 0
        """
    )
