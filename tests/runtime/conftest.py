"""Tiny checkpoints, each saved once per run of the tests."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.runtime.tiny import Tiny


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., "Tiny"]:
    """`tiny_checkpoint(kind, index_topk=…)`: saved the first time it is asked for."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.runtime.tiny import INDEX_TOPK, build

    saved: dict[tuple[str, int], Tiny] = {}

    def get(kind: str, index_topk: int = INDEX_TOPK) -> "Tiny":
        if (kind, index_topk) not in saved:
            saved[kind, index_topk] = build(kind, tmp_path_factory.mktemp(kind), index_topk=index_topk)
        return saved[kind, index_topk]

    return get
