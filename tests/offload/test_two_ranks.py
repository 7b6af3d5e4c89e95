"""Offload on two gloo ranks: tensor parallel, and attention-DP ranks with requests of their own over shared experts."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.runtime.processes import REPOSITORY, torchrun


@pytest.mark.numerics
@pytest.mark.slow
def test_every_mode_gives_the_bits_of_a_resident_cache(tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    torchrun(2, str(REPOSITORY / "tests" / "offload" / "ranks.py"), str(target))
    assert json.loads(target.read_text()) == [[], []]
