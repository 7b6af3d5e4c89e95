"""Files that appear whole: a reader, or a crash, sees the old one or the new one."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path


class NewFile:
    """A file under a temporary name beside `path`, which takes its place on `commit`; `discard` removes it.

    A link stays one, and a file that is replaced keeps its permissions. Everything raises OSError. file: to be written,
    in bytes.
    """

    def __init__(self, path: Path) -> None:
        self._target = path.resolve()
        # Named before it is made, so that wherever an interrupt strikes it is known what to remove.
        self._temporary = self._target.with_name(f".castoff-{secrets.token_hex(8)}")
        self._mode = stat.S_IMODE(self._target.stat().st_mode) if self._target.exists() else None
        try:
            mode = 0o666 if self._mode is None else self._mode
            self.file = os.fdopen(os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")
        except BaseException:
            self._temporary.unlink(missing_ok=True)
            raise

    def commit(self) -> None:
        """Put it in its place, complete and on disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        if self._mode is not None:
            # The process' umask may have taken bits away.
            self._temporary.chmod(self._mode)
        self._temporary.replace(self._target)

    def discard(self) -> None:
        """Remove it; nothing after `commit`."""
        # What is still to be written does not matter any more, nor that it cannot be.
        with suppress(OSError):
            self.file.close()
        self._temporary.unlink(missing_ok=True)
