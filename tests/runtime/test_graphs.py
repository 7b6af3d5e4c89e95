"""Decode steps as compiled graphs: the tokens of a run op by op, one graph whatever the lengths."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from castoff.ops import dsa_indexer
from castoff.ops.dsa_indexer import IndexerSizes, IndexerWeights
from castoff.ops.linear import Weight
from castoff.runtime import graphs
from castoff.runtime.checkpoint import Checkpoint, LoadedWeights
from castoff.runtime.engine import Engine, StaticShapes
from castoff.runtime.sampling import Sampling
from castoff.runtime.scheduler import Request, Scheduler
from castoff.spec.quant import CacheFormat, LinearAction
from tests.runtime.tiny import Tiny, setup_of, token_ids, torch

pytestmark = [pytest.mark.numerics, pytest.mark.slow]

CPU = torch.device("cpu")
PROMPTS = (9, 23, 15)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def generate(
    tiny: Tiny, *, graph: graphs.GraphMode, mtp_tokens: int, action: LinearAction = "DISABLED"
) -> list[list[int]]:
    """Tokens of three requests of unequal length through two slots, float64."""
    setup = setup_of(tiny.spec, mtp_tokens=mtp_tokens, action=action)
    weights = LoadedWeights(
        setup, Checkpoint(tiny.directory, tiny.spec, mtp=mtp_tokens > 0), dtype=torch.float64, device=CPU
    )
    static = None if graph == "eager" else StaticShapes(rows=2, tokens=64)
    engine = Engine(
        setup, weights, num_blocks=12, block_tokens=16, dtype=torch.float64, device=CPU, graph=graph, static=static
    )
    scheduler = Scheduler(engine, slots=2, chunk_tokens=16, sampling=Sampling())
    requests = [Request(tuple(token_ids(1, length, seed=length)[0].tolist()), 12) for length in PROMPTS]
    with torch.inference_mode():
        engine.warm_up()
        return [result.tokens for result in scheduler.run(requests)]


@pytest.mark.parametrize(
    ("kind", "mtp_tokens", "action"),
    [
        ("glm52", 0, "DISABLED"), ("glm52", 2, "DISABLED"), ("deepseek_v32", 2, "DISABLED"), ("glm5", 2, "FP8"),
        ("deepseek_v32", 0, "W8A8_DYNAMIC"),
    ],
)  # fmt: skip
def test_the_traced_decode_gives_the_same_tokens_in_one_graph(
    tiny_checkpoint: Callable[..., Tiny], monkeypatch: pytest.MonkeyPatch, kind: str, mtp_tokens: int,
    action: LinearAction,
) -> None:  # fmt: skip
    """Without a code generator, so that what is tested is the tracing: no break, no second graph as lengths grow."""
    traced: list[int] = []

    def keep(graph: Any, example_inputs: Any) -> Any:
        traced.append(len(graph.graph.nodes))
        return graph

    def compiled(function: Any) -> Any:
        graphs.register()
        return torch.compile(function, fullgraph=True, dynamic=False, backend=keep)

    monkeypatch.setattr(graphs, "_compiled", compiled)
    tiny = tiny_checkpoint(kind)
    eager, graph = (generate(tiny, graph=mode, mtp_tokens=mtp_tokens, action=action) for mode in ("eager", "compile"))
    assert graph == eager
    # The main pass; with drafts, the first draft call over all tokens of the step, and the one after it over one token.
    assert len(traced) == (1 if mtp_tokens == 0 else 3)


# torch's own code generator calls what torch has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_gives_the_same_tokens(tiny_checkpoint: Callable[..., Tiny]) -> None:
    tiny = tiny_checkpoint("glm5")
    assert generate(tiny, graph="compile", mtp_tokens=0) == generate(tiny, graph="eager", mtp_tokens=0)


def test_any_number_of_engines_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with shapes of its own; the compiler gives up a function that it has compiled too often."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for size in range(1, 12):
        compiled = graphs._compiled(lambda x, *, longest, last: (x + longest,))
        assert compiled(torch.zeros(size), longest=size, last=True)[0].tolist() == [size] * size


@pytest.mark.parametrize("traced", [True, False], ids=["its reference", "the op"])
def test_the_indexer_is_one_graph_while_lengths_grow(traced: bool) -> None:
    """The op stays one node; its reference can be traced through as well."""
    graphs.register()
    heads, width, rope, hidden, low_rank, block_tokens = 16, 12, 8, 10, 6, 4
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    shapes = ((heads * width, low_rank), (width, hidden), (heads, hidden), (width,), (width,))
    weights = IndexerWeights(*(Weight(rand(*shape)) for shape in shapes))
    sizes = IndexerSizes(heads, width, rope, 5, True, CacheFormat("DISABLED", 0, 2 * width, 0, "bf16"))
    graphs_made: list[Any] = []

    def count(graph: Any, example_inputs: Any) -> Any:
        graphs_made.append(graph)
        return graph

    def select(*inputs: Any) -> Any:
        if not traced:
            return dsa_indexer.dsa_indexer(*inputs, weights, sizes, sizes.topk_limit, None)[0]
        assert dsa_indexer.DSA_INDEXER.reference is not None
        return dsa_indexer.DSA_INDEXER.reference(
            *inputs, *weights.tensors, formats=weights.formats, sizes=sizes, topk=sizes.topk_limit, lengths=None
        )[0]

    compiled = torch.compile(select, fullgraph=True, dynamic=False, backend=count)
    tables = torch.tensor([[0, 2, 4, 6], [1, 3, 5, 7]])
    own, other = rand(9, block_tokens, width), None
    for length in range(3, 16):
        other = own.clone()
        lengths = torch.tensor([length, length - 2])
        position = lengths - 1
        slots = tables.gather(1, position[:, None] // block_tokens)[:, 0] * block_tokens + position % block_tokens
        angles = rand(2, rope // 2).repeat(1, 2)
        inputs = (rand(2, hidden), rand(2, low_rank), angles.cos(), angles.sin())
        expected = select(*inputs, own, slots, tables, lengths)
        assert torch.equal(compiled(*inputs, other, slots, tables, lengths), expected)
        assert torch.equal(own, other)
        assert expected.shape == (2, 5)
    assert len(graphs_made) == 1
