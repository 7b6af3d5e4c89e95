"""Every kernel compiles for the devices that it is meant for, though none of them is here."""

import os
import subprocess
import sys

import pytest

# In a process of its own: this one may have imported Triton to interpret.
PROGRAM = """
import sys
from castoff.ops.triton.aot import TARGETS, compile_launch, launches, table
target = next(target for target in TARGETS if target.name == sys.argv[1])
chosen = dict(launches(target.backend))
compiled = [compile_launch(name, chosen[name], target) for name in sys.argv[2:] or chosen]
print(table(compiled))
for kernel in compiled:
    assert kernel.shared_bytes <= target.shared_bytes, f"{kernel.kernel} wants {kernel.shared_bytes} bytes"
"""


# Of variants that differ in little, one.
CHOSEN = (
    "plan_direct lru",
    "plan_direct clock",
    "plan_serve",
    "install_metadata",
    "plan_gather",
    "offload_fetch bf16",
    "offload_serve quantised",
    "offload_install bf16",
    "host_row_write quantised",
    "sparse_attention plain 64 heads",
    "sparse_attention fp8 64 heads",
    "sparse_attention int8 16 heads",
)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_kernels_compile_and_fit(target: str) -> None:
    """No more shared memory than the device has; `python -m castoff.ops.triton.aot` shows the whole table."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, target, *CHOSEN]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert [line.split("  ")[0] for line in run.stdout.splitlines()[1:]] == list(CHOSEN)
