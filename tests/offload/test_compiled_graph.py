"""A compiled decode step writes pools, metadata and host rows where they are: it makes no second one of any of them."""

import re

import pytest

from castoff.spec.offload import OffloadMode

torch = pytest.importorskip("torch")

from tests.offload.runs import MODES, Case, opened, options_of  # noqa: E402


# torch's own, of a module that a compiler backend imports.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_nothing_that_is_mutated_is_copied(mode: OffloadMode) -> None:
    from torch._inductor.utils import run_and_get_code

    case = Case(drafts=1, prompts=(40, 70), slots=2, graph="compile", check=False)
    with opened(case, options_of(mode)) as (engine, _):
        _, programs = run_and_get_code(engine.warm_up)
    assert len(programs) == 2, "one program for the model, one for its MTP block"
    assert engine.offload is not None
    memory = engine.offload.memory
    rows, state = memory.layers[1], memory.groups[1].state
    held = {
        "host rows": rows.host, "region": rows.region, "staging": rows.staging, "selection": rows.selection,
        "tags": state.tags_RNW, "indexer keys": engine.caches.indexer(0),
    }  # fmt: skip
    for program in programs:
        # Every new buffer is one of these; C++ kernels write to what they are given.
        made = re.findall(r"empty_strided_cpu\((\([\d, ]*\))", program)
        assert made
        for name, tensor in held.items():
            if tensor.numel():
                assert str(tuple(tensor.shape)) not in made, f"{name} are made anew"
        wrapper = program[program.index("def call(") :]
        assert not re.search(r"aten\.(clone|copy_)", wrapper)
        assert "torch.ops.castoff." in wrapper
