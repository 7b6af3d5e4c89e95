"""Several processes over gloo: the logits of one rank in every layout, from weights of which each reads its part."""

import json
import re
from collections.abc import Callable
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from castoff.cli import main
from castoff.errors import CastoffError
from castoff.model.setup import resolve_setup
from castoff.model.sharding import peers, piece_index
from castoff.model.weights import RankWeights
from castoff.ops.program import Recorder
from castoff.runtime.distributed import RunParallel, World, for_rank, joined
from castoff.spec.backend import load_backend
from castoff.spec.device import load_device
from castoff.spec.mesh import Group, Process
from castoff.spec.model import ModelSpec
from castoff.spec.scenario import Compilation, Mtp, Parallel, Quant, Scenario
from tests.cli.commands import CONFIG
from tests.runtime.processes import REPOSITORY, torchrun
from tests.runtime.ranks import logits_of, prompts_of, rows_between
from tests.runtime.tiny import Tiny, engine, torch

# Sums in another order differ by rounding; what float64 shows to be right needs no closer look in float32.
TOLERANCE = {"float64": 1e-10, "float32": 5e-5}

TWO_RANKS: dict[str, dict[str, Any]] = {
    "tp 2": {"tp_size": 2},
    "tp 2, ep 2": {"tp_size": 2, "ep_size": 2},
    "tp 2, ep 2, shared expert over tp": {"tp_size": 2, "ep_size": 2, "enable_shared_expert_tp": True},
    "dp 2, ep 2": {"ep_size": 2},
    "dp 2, experts split": {},
    "dp 2, experts twice": {"moe_dp_size": 2},
    "embedding row": {"tp_size": 2, "word_embedding_tp": "row"},
    "embedding col": {"tp_size": 2, "word_embedding_tp": "col"},
    "ends over both dp ranks, row": {"word_embedding_tp": "row", "word_embedding_tp_size": 2, "lmhead_tp_size": 2},
    "ends over both dp ranks, col": {"word_embedding_tp": "col", "word_embedding_tp_size": 2, "ep_size": 2},
    "o_proj and mlp over both dp ranks": {"o_proj_tp_size": 2, "mlp_tp_size": 2, "ep_size": 2},
    "tp 2, o_proj and mlp whole": {"tp_size": 2, "o_proj_tp_size": 1, "mlp_tp_size": 1},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "tp 2, dp 2, ep 2": {"tp_size": 2, "ep_size": 2},
    "tp 2, dp 2, ep 4": {"tp_size": 2, "ep_size": 4},
    "tp 2, dp 2, experts split, all else over four": {
        "tp_size": 2, "o_proj_tp_size": 4, "mlp_tp_size": 4, "lmhead_tp_size": 4,
        "word_embedding_tp": "col", "word_embedding_tp_size": 4,
    },
    "tp 4, ep 2, o_proj and mlp over two": {"tp_size": 4, "ep_size": 2, "o_proj_tp_size": 2, "mlp_tp_size": 2},
    "tp 2, dp 2, experts twice, row": {
        "tp_size": 2, "moe_dp_size": 2, "word_embedding_tp": "row", "word_embedding_tp_size": 4, "lmhead_tp_size": 4,
    },
    "dp 4, ep 4, one rank without requests": {"ep_size": 4},
    "tp 4, experts whole": {"tp_size": 4, "moe_dp_size": 4, "mlp_tp_size": 1},
}  # fmt: skip


def test_the_sizes_of_a_run_are_those_of_a_cast() -> None:
    """Under the same names and with the same defaults."""
    sizes = {item.name: item.default for item in fields(Parallel)}
    assert {item.name: item.default for item in fields(RunParallel)}.items() <= sizes.items()


def ranks_of(directory: Path, ranks: int, cases: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank found out."""
    (directory / "cases.json").write_text(json.dumps(cases))
    torchrun(ranks, str(REPOSITORY / "tests" / "runtime" / "ranks.py"), str(directory))
    return [torch.load(directory / f"rank-{rank}.pt") for rank in range(ranks)]


def case_of(tiny: Tiny, parallel: dict[str, Any], *, drafts: int = 1, dtype: str = "float64") -> dict[str, Any]:
    return {"directory": str(tiny.directory), "parallel": parallel, "drafts": drafts, "dtype": dtype}


def check_logits(tiny: Tiny, found: list[dict[str, Any]], name: str, case: dict[str, Any]) -> None:
    """Every rank's logits against those of an engine alone."""
    alone = engine(tiny, mtp_tokens=case["drafts"], dtype=getattr(torch, case["dtype"]))
    prompts = prompts_of(tiny.spec.vocab_size)
    with torch.inference_mode():
        expected = logits_of(alone, [0, 1, 2], prompts, drafts=case["drafts"] > 0)
    seen: set[str] = set()
    for rank, results in enumerate(found):
        logits = results[name]["logits"]
        for key, values in logits.items():
            difference = (values - expected[key]).abs().max().item()
            assert difference <= TOLERANCE[case["dtype"]], f"{name}: {key} on rank {rank} is off by {difference}"
        seen |= logits.keys()
    assert seen == expected.keys()


def check_weights(tiny: Tiny, found: list[dict[str, Any]], name: str, case: dict[str, Any]) -> None:
    """What each rank holds is what a cast says that it holds, and it has read that and no more."""
    cast = RankWeights(setup_of(tiny.spec, RunParallel(**case["parallel"]).over(len(found))), Recorder())
    layers = [cast.layer(layer) for layer in range(tiny.spec.num_hidden_layers + (case["drafts"] > 0))]
    expected = [{key: weight.values.shape for key, weight in held.items()} for held in (*layers, cast.outer())]
    experts = tiny.spec.moe.n_routed_experts // len(found)
    for rank, results in enumerate(found):
        assert results[name]["shapes"] == expected, name
        names, shapes = zip(*results[name]["read"], strict=True)
        assert len(set(names)) == len(names), "no tensor twice"
        assert sum(map(prod, shapes)) == sum(prod(shape) for held in expected for shape in held.values())
        if case["parallel"].get("ep_size") == len(found):
            of_experts = {
                int(match[1]) for match in (re.search(r"[.]experts[.](\d+)[.]", name) for name in names) if match
            }
            assert of_experts == set(range(rank * experts, (rank + 1) * experts)), "no other rank's experts"


def check_ops(found: list[dict[str, Any]]) -> None:
    """Every collective against its definition, from what all ranks put in."""
    ranks = len(found)
    ops = [results["ops"] for results in found]
    x, wide, rows = ([own[name] for own in ops] for name in ("x", "wide", "rows"))
    # Two stretches over two ranks are a piece each, as they are.
    pad, pad_half = torch.zeros(-5 % ranks, 3), torch.zeros(-5 % (ranks // 2), 3)
    total = sum(x)
    for rank, own in enumerate(ops):
        taken = []
        for sender, theirs in enumerate(rows):
            before = sum(rows_between(sender, peer) for peer in range(rank))
            taken.append(theirs[before : before + rows_between(sender, rank)])
        expected = {
            "all_reduce": total,
            "all_gather": torch.cat(x),
            "all_gather columns": torch.cat(x, dim=1),
            "reduce_scatter": torch.cat([total, pad]).chunk(ranks)[rank],
            "reduce_scatter stretches": torch.cat([total, pad_half, -total, pad_half]).chunk(ranks)[rank],
            "all_to_all columns": torch.cat([theirs[:, 2 * rank : 2 * rank + 2] for theirs in wide]),
            "all_to_all rows": torch.cat([torch.cat([theirs, pad]).chunk(ranks)[rank] for theirs in x], dim=1),
            "all_to_all uneven": torch.cat([*taken, torch.zeros(2, 1)]),
            "split_tokens": torch.cat([x[rank], pad]).chunk(ranks)[rank],
            "embedding": torch.arange(4.0 * ranks).where(torch.arange(4 * ranks) // 4 == rank, 0)[:, None],
        }
        for name, values in expected.items():
            assert torch.equal(own[name], values), f"{name} on rank {rank}"


def setup_of(
    spec: ModelSpec, parallel: Parallel, compilation: Compilation | None = None, backend: str = "nvidia"
) -> Any:
    scenario = Scenario(
        parallel=parallel, quant=Quant(quantize_linear_action="DISABLED"), mtp=Mtp(num_mtp_tokens=0),
        compilation=compilation or Compilation(),
    )  # fmt: skip
    return resolve_setup(spec, load_device("h200_sxm"), load_backend(backend), scenario, "decode")


@pytest.mark.numerics
@pytest.mark.slow
def test_two_ranks(tiny_checkpoint: Callable[..., Tiny], tmp_path: Path) -> None:
    glm, deepseek = tiny_checkpoint("glm52"), tiny_checkpoint("deepseek_v32")
    cases = {f"glm52, {name}": case_of(glm, parallel) for name, parallel in TWO_RANKS.items()}
    few = ("tp 2", "dp 2, ep 2", "tp 2, ep 2")
    cases |= {f"deepseek_v32, {name}": case_of(deepseek, TWO_RANKS[name], dtype="float32", drafts=0) for name in few}
    found = ranks_of(tmp_path, 2, cases)
    for name, case in cases.items():
        tiny = glm if name.startswith("glm52") else deepseek
        check_logits(tiny, found, name, case)
        check_weights(tiny, found, name, case)
    check_ops(found)


@pytest.mark.numerics
@pytest.mark.slow
def test_four_ranks(tiny_checkpoint: Callable[..., Tiny], tmp_path: Path) -> None:
    tiny = tiny_checkpoint("glm52")
    cases = {name: case_of(tiny, parallel) for name, parallel in FOUR_RANKS.items()}
    found = ranks_of(tmp_path, 4, cases)
    for name, case in cases.items():
        check_logits(tiny, found, name, case)
        check_weights(tiny, found, name, case)
    check_ops(found)


@pytest.mark.slow
def test_a_rank_that_fails_ends_all(tiny_checkpoint: Callable[..., Tiny], tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 in its first call, and not for ever."""
    cases = {"broken": {**case_of(tiny_checkpoint("glm5"), {"ep_size": 2}), "fails_on_rank": 1}}
    with pytest.raises(AssertionError, match="this rank fails"):
        ranks_of(tmp_path, 2, cases)


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"pp_size": 2, "num_devices": 2}, "--pp-size 2 can be cast"),
        ({"dcp_size": 2, "tp_size": 2, "num_devices": 2}, "--dcp-size 2 can be cast"),
        ({"ep_size": 2, "num_devices": 2, "enable_redundant_experts": True}, "--enable-redundant-experts can be cast"),
        (
            {"ep_size": 4, "num_devices": 4, "enable_external_shared_experts": True},
            "--enable-external-shared-experts can be cast",
        ),
        ({"tp_size": 2, "num_devices": 2, "lmhead_tp_size": 1}, "--lmhead-tp-size 1 leaves no rank"),
    ],
)
def test_what_cannot_be_run(tiny_checkpoint: Callable[..., Tiny], parallel: dict[str, Any], says: str) -> None:
    setup = setup_of(tiny_checkpoint("glm5").spec, Parallel(**parallel))
    with pytest.raises(CastoffError, match=says):
        for_rank(setup, World(0, parallel["num_devices"]))


@pytest.mark.parametrize(
    ("option", "flag", "backend"),
    [
        ("enable_sequence_parallel", "--enable-sequence-parallel", "nvidia"),
        ("enable_matmul_allreduce", "--enable-matmul-allreduce", "ascend"),
        ("enable_dispatch_ffn_combine", "--enable-dispatch-ffn-combine", "ascend"),
    ],
)
def test_fusions_that_cannot_be_run(tiny_checkpoint: Callable[..., Tiny], option: str, flag: str, backend: str) -> None:
    parallel, compilation = Parallel(num_devices=2, tp_size=2), Compilation(compile=True, **{option: True})
    setup = setup_of(tiny_checkpoint("glm5").spec, parallel, compilation, backend)
    with pytest.raises(CastoffError, match=f"{flag} can be cast"):
        for_rank(setup, World(0, 2))


def test_a_process_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined("cpu") as world:
        assert world == World(0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CastoffError, match=r"WORLD_SIZE is 2.*torchrun"), joined("cpu"):
        pass


def test_sizes_that_the_processes_do_not_fit() -> None:
    with pytest.raises(CastoffError, match=r"--ep-size 4 does not divide the 2 process.*nproc-per-node 4"):
        RunParallel(ep_size=4).over(2)


@pytest.mark.parametrize(("larger", "smaller"), [(12, 1), (12, 4), (6, 2), (4, 4), (3, 1), (1, 1)])
def test_pieces_regroup(larger: int, smaller: int) -> None:
    """Each rank of a group holds another piece; those of peers in the larger group make one of the smaller group."""
    ranks, ratio = 12, larger // smaller

    def indices(own: int, other: int) -> list[int]:
        processes = [Process(rank, {}) for rank in range(ranks)]
        return [piece_index(Group("own", own, process=at), Group("other", other, process=at)) for at in processes]

    fine, coarse = indices(larger, smaller), indices(smaller, larger)
    assert coarse == [rank % smaller for rank in range(ranks)]
    between = peers(Group("own", larger), Group("tp", smaller))
    assert (between.size, between.stride) == (ratio, smaller)
    for first in range(0, ranks, larger):
        for place in range(smaller):
            together = [fine[first + place + smaller * peer] for peer in range(ratio)]
            assert together == [place * ratio + piece for piece in range(ratio)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        ["--tp-size", "2", "--ep-size", "2", "--word-embedding-tp", "col"],
        ["--dp-size", "2", "--ep-size", "2", "--lmhead-tp-size", "2", "--batch", "3"],
    ],
    ids=["tp", "dp"],
)
def test_the_command(sizes: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """More requests than slots, of different lengths, with drafts and drawn tokens: the same as in one process."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 60, "tie_word_embeddings": True}))
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[1 + (7 * at + row) % 59 for at in range(3 + 11 * row)] for row in range(5)]))
    command = ["run", str(tmp_path), "--random-weights", "0", "--prompt-file", str(prompts), "--dtype", "float64"]
    command += ["--max-new-tokens", "6", "--num-mtp-tokens", "2", "--chunk-tokens", "20", "--temperature", "0.8"]
    assert main([*command, "--json", "-"]) == 0
    alone = json.loads(capsys.readouterr().out)
    together = json.loads(torchrun(2, "-m", "castoff", *command, *sizes, "--json", "-"))
    assert together["tokens"] == alone["tokens"]
    assert together["acceptance_length"] == alone["acceptance_length"]
    assert together["memory"]["weights_bytes"] < alone["memory"]["weights_bytes"]
    assert len({tuple(tokens) for tokens in together["tokens"]}) == 5
