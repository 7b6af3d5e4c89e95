"""What each process of a distributed test does; torchrun starts it.

`ranks.py DIRECTORY` reads DIRECTORY/cases.json and writes DIRECTORY/rank-N.pt. It does without transformers, which
would take longest to import.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from castoff.model.inputs import NOTHING
from castoff.ops import collectives
from castoff.ops.linear import Weight
from castoff.ops.tokens import embedding
from castoff.runtime.checkpoint import Checkpoint, LoadedWeights
from castoff.runtime.distributed import RunParallel, World, for_rank, joined
from castoff.runtime.engine import Engine, Rows
from castoff.runtime.lockstep import LockstepEngine
from castoff.runtime.stored import WHOLE, Part, Piece
from castoff.runtime.structure import run_setup
from castoff.spec.mesh import Group, Process
from castoff.spec.model import load_model
from castoff.spec.scenario import Mtp, Quant, Scenario

CHUNK = 16
STEPS = 4
# Over two attention-DP ranks: a short chunk is padded to a long one's length, and two short ones come to an odd length.
PROMPTS = (23, 39, 9)


@dataclass(slots=True)
class Watched:
    """A checkpoint that remembers what was read."""

    checkpoint: Checkpoint
    pieces: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def scales(self, piece: Piece) -> Piece | None:
        return self.checkpoint.scales(piece)

    def read(self, piece: Piece, part: Part = WHOLE) -> Any:
        values = self.checkpoint.read(piece, part)
        self.pieces.append((piece.name, tuple(values.shape)))
        return values


def prompts_of(vocabulary: int) -> list[Any]:
    """Three prompts and the tokens that follow them."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(1, vocabulary, (length + STEPS,), generator=draw) for length in PROMPTS]


def logits_of(engine: Engine, requests: list[int], prompts: list[Any], *, drafts: bool) -> dict[str, Any]:
    """Logits of every token of these requests: prefilled in chunks one after the other, then decoded together."""
    found: dict[str, Any] = {}
    for request in requests:
        engine.pool.grow(request, PROMPTS[request] + STEPS)
        chunks = [(at, min(at + CHUNK, PROMPTS[request])) for at in range(0, PROMPTS[request], CHUNK)]
        found[f"prefill {request}"] = torch.cat(
            [
                _call(engine, prompts, [request], [end], end - start, prefill=True, drafts=drafts)
                for start, end in chunks
            ]
        )
    for step in range(1, STEPS if requests else 0):
        lengths = [PROMPTS[request] + step for request in requests]
        logits = _call(engine, prompts, requests, lengths, 1, prefill=False, drafts=drafts)
        for row, request in enumerate(requests):
            found[f"step {step} of {request}"] = logits[row :: len(requests)]
    engine.finish()
    return found


def _call(
    engine: Engine, prompts: list[Any], requests: list[int], lengths: list[int], count: int, *, prefill: bool,
    drafts: bool,
) -> Any:  # fmt: skip
    """Logits after the last `count` tokens of every request, of the model and then of its MTP block."""

    def ids(ahead: int) -> Any:
        ends = [(request, length + ahead) for request, length in zip(requests, lengths, strict=True)]
        return torch.stack([prompts[request][end - count : end] for request, end in ends])

    rows = Rows(requests, lengths)
    out = engine.forward(ids(0), rows, prefill=prefill, last=False)
    if not drafts:
        return out.logits_TV
    return torch.cat(
        [out.logits_TV, engine.draft(ids(1), out.hidden_TD, NOTHING, rows, prefill=prefill, last=False).logits_TV]
    )


def engine_of(case: dict[str, Any], world: World) -> tuple[Engine, LoadedWeights, Watched]:
    """This rank's engine of a case."""
    spec = load_model(case["directory"])
    scenario = Scenario(
        parallel=RunParallel(**case["parallel"]).over(world.size),
        quant=Quant(quantize_linear_action="DISABLED"),
        mtp=Mtp(num_mtp_tokens=case["drafts"]),
    )
    setup = run_setup(spec, scenario)
    setup = for_rank(setup, world)
    source = Watched(Checkpoint(Path(case["directory"]), spec, mtp=case["drafts"] > 0))
    dtype, cpu = getattr(torch, case["dtype"]), torch.device("cpu")
    weights = LoadedWeights(setup, source, dtype=dtype, device=cpu)
    engine_class = Engine if setup.mesh.dp.size == 1 else LockstepEngine
    return engine_class(setup, weights, num_blocks=32, block_tokens=16, dtype=dtype, device=cpu), weights, source


def run_case(case: dict[str, Any], world: World) -> dict[str, Any]:
    """Logits of this rank's requests, the shapes of its weights, and what it read."""
    engine, weights, source = engine_of(case, world)
    dp = engine.setup.mesh.dp
    own = list(range(dp.position, len(PROMPTS), dp.size))
    if case.get("fails_on_rank") == world.rank:
        raise RuntimeError("this rank fails")
    with torch.inference_mode():
        logits = logits_of(engine, own, prompts_of(engine.setup.model.vocab_size), drafts=case["drafts"] > 0)
    layers = range(engine.setup.model.num_hidden_layers + (case["drafts"] > 0))
    shapes = [{name: tuple(weight.values.shape) for name, weight in weights.layer(layer).items()} for layer in layers]
    outer = {name: tuple(weight.values.shape) for name, weight in weights.outer().items()}
    return {"logits": logits, "shapes": [*shapes, outer], "read": source.pieces}


def rows_between(sender: int, receiver: int) -> int:
    """Rows of the uneven all_to_all: different ones, and for some pairs none."""
    return (3 * sender + 2 * receiver) % 4


def run_ops(world: World) -> dict[str, Any]:
    """Every collective on numbers that tell rank and place, and the numbers."""
    n, rank = world.size, world.rank
    group = Group("all", n, process=Process(rank, {(n, 1): torch.distributed.group.WORLD.group_name}))
    x, wide = torch.arange(15.0).view(5, 3) + 100 * rank, torch.arange(10.0 * n).view(5, 2 * n) + 100 * rank
    sent, received = (
        tuple(rows_between(*pair) for pair in pairs)
        for pairs in ([(rank, peer) for peer in range(n)], [(peer, rank) for peer in range(n)])
    )
    rows = torch.arange(float(sum(sent)))[:, None] + 100 * rank
    counts = collectives.RowCounts(sent, received, held=sum(received) + 2)
    table = Weight(torch.arange(4.0)[:, None] + 4 * rank)
    return {
        "x": x,
        "wide": wide,
        "rows": rows,
        "all_reduce": collectives.all_reduce(x, group),
        "all_gather": collectives.all_gather(x, group),
        "all_gather columns": collectives.all_gather(x, group, axis=1),
        "reduce_scatter": collectives.reduce_scatter(x, group),
        "reduce_scatter stretches": collectives.reduce_scatter(torch.cat([x, -x]), group, stretches=2),
        "all_to_all columns": collectives.all_to_all(wide, group, shape=(5 * n, 2)),
        "all_to_all rows": collectives.all_to_all(x, group, shape=(-(-5 // n), 3 * n)),
        "all_to_all uneven": collectives.all_to_all(rows, group, shape=(0.5, 1), rows=counts),
        "split_tokens": collectives.split_tokens(x, group),
        "embedding": embedding(torch.arange(4 * n), table, first=4 * rank),
    }


def main() -> None:
    """All cases of the directory."""
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    cases = json.loads((directory / "cases.json").read_text())
    with joined("cpu") as world:
        found = {name: run_case(case, world) for name, case in cases.items()}
        found["ops"] = run_ops(world)
        torch.save(found, directory / f"rank-{world.rank}.pt")


if __name__ == "__main__":
    main()
