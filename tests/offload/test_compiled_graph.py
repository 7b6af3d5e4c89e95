"""A compiled decode step writes pools, metadata and host rows where they are: it makes no second one of any of them."""

import re
from typing import Any

import pytest

from castoff.runtime import graphs
from castoff.spec.offload import OffloadMode

torch = pytest.importorskip("torch")

from tests.offload.runs import INDEX_TOPK, MODES, POOL, Case, assert_equal, opened, options_of, outcome  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.numerics
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "drafts"), [("gather", 2), ("serve_install", 0), ("direct", 2)])
def test_traced_steps_give_the_bits_of_a_resident_cache(
    mode: OffloadMode, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a code generator. Whatever lengths and batch, there is one graph for the model; for its MTP block three,
    of a step's tokens, of one token, and of one that reuses a top-k."""
    traced: list[object] = []

    def compiled(function: Any) -> Any:
        graphs.register()
        return torch.compile(function, fullgraph=True, dynamic=False, backend=keep)

    def keep(graph: Any, example_inputs: Any) -> Any:
        traced.append(graph)
        return graph

    monkeypatch.setattr(graphs, "_compiled", compiled)
    case = Case(drafts=drafts, prompts=(INDEX_TOPK, 3 * POOL, 20), slots=2, graph="compile", check=False)
    own = outcome(case, options_of(mode))
    assert len(traced) == (4 if drafts else 1)
    torch.compiler.reset()
    # Draft calls of gather reuse rows as they were.
    assert_equal(own, outcome(case), drafts=mode != "gather")


# torch's own, of a module that a compiler backend imports.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_nothing_that_is_mutated_is_copied(mode: OffloadMode) -> None:
    from torch._inductor.utils import run_and_get_code

    case = Case(prompts=(40, 70), slots=2, graph="compile", check=False)
    with opened(case, options_of(mode)) as (engine, _):
        _, programs = run_and_get_code(engine.warm_up)
    assert len(programs) == 1
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
