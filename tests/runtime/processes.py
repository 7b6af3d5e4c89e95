"""Processes that torchrun starts for a test."""

import os
import signal
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
TIMEOUT_S = 240


def torchrun(ranks: int, *arguments: str) -> str:
    """Standard output of processes started by torchrun; none outlives the call."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-20000:]
    return out
