"""Ctrl-C during `castoff run`: status 130, and nothing half-written stays behind."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.commands import CONFIG

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300


def read_until(terminal: int, word: bytes) -> bytes:
    """What a process writes to a terminal up to and with a word."""
    seen = b""
    started = time.monotonic()
    while word not in seen:
        assert time.monotonic() - started < PATIENCE_S, seen
        seen += os.read(terminal, 4096)
    return seen


@pytest.mark.parametrize("word", [b"embedding and head", b"0 of 2 requests done"], ids=["loading", "decoding"])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, word: bytes) -> None:
    model, out, scratch = tmp_path / "model", tmp_path / "out", tmp_path / "scratch"
    for folder in (model, out, scratch):
        folder.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    arguments = [
        *("run", str(model), "--random-weights", "0", "--dtype", "float32", "--ignore-eos"),
        *("--random-prompts", "2x20", "--max-new-tokens", "100000"),
        *("--json", str(out / "run.json"), "--profile", str(out / "trace.json")),
    ]
    # Progress is shown on a terminal alone, and tells how far the run is.
    terminal, its_end = pty.openpty()
    # torch makes its folder for compiled code when its profiler is imported, and keeps that.
    own = {"TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **own}
    with subprocess.Popen(
        [sys.executable, "-m", "castoff", *arguments], stdout=subprocess.PIPE, stderr=its_end, env=environment
    ) as process:
        os.close(its_end)
        try:
            seen = read_until(terminal, word)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=PATIENCE_S)
            seen += os.read(terminal, 65536)
        finally:
            process.kill()
            os.close(terminal)
    assert process.returncode == 130, seen
    assert output == b""
    assert b"Traceback" not in seen
    assert list(out.iterdir()) == []
    assert list(scratch.iterdir()) == []
