"""Tiny checkpoints, each saved once per run of the tests."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
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


@pytest.fixture(scope="session")
def converted(
    tiny_checkpoint: Callable[..., "Tiny"], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], "Tiny"]:
    """`converted(kind, action)`: a tiny checkpoint, quantised the first time it is asked for."""
    from castoff.runtime.convert import convert
    from castoff.spec.model import load_model

    made: dict[tuple[str, str], Tiny] = {}

    def get(kind: str, action: str) -> "Tiny":
        if (kind, action) not in made:
            tiny, target = tiny_checkpoint(kind), tmp_path_factory.mktemp("converted") / action
            convert(str(tiny.directory), action, target)  # type: ignore[arg-type]
            made[kind, action] = replace(tiny, directory=target, spec=load_model(str(target)))
        return made[kind, action]

    return get


@pytest.fixture(params=("W8A8_DYNAMIC", "FP8"))
def action(request: pytest.FixtureRequest) -> str:
    """Formats in which a checkpoint can be stored."""
    return str(request.param)


@pytest.fixture
def copied(converted: Callable[[str, str], "Tiny"], action: str, tmp_path: Path) -> "Tiny":
    """A quantised checkpoint at a place where it may be spoilt."""
    tiny = converted("glm5", action)
    shutil.copytree(tiny.directory, tmp_path / "model")
    return replace(tiny, directory=tmp_path / "model")
