"""Command-line tests see a standard output that is no terminal, whatever runs them."""

import pytest


@pytest.fixture(autouse=True)
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest-xdist, for one, sets COLUMNS in its workers.
    for variable in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
