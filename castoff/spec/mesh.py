"""From parallel sizes to groups of ranks, with the reason where the sizes cannot work.

Ranks are numbered with TP innermost, then attention DP, then PP outermost. Every group is `size` ranks, `stride`
apart. The routed experts cut the same ranks of one pipeline stage into moe_tp (innermost), ep and moe_dp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from castoff.errors import CastoffError
from castoff.spec.model import ModelSpec
from castoff.spec.scenario import Parallel


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a run. names: what torch calls the groups that this rank is in, by their size and stride."""

    rank: int
    names: Mapping[tuple[int, int], str]


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that talk to each other: `size` ranks, `stride` apart in the device order of a deployment.

    first: for a pipeline hop, the first rank of the stage that sends. process: which rank computes; None in a cast.
    """

    name: str
    size: int
    stride: int = 1
    first: int = 0
    process: Process | None = field(default=None, compare=False, repr=False)

    @property
    def position(self) -> int:
        """This rank's place in the group; that of the first rank in a cast."""
        return 0 if self.process is None else self.process.rank // self.stride % self.size

    @property
    def process_group(self) -> str:
        """What torch calls the group; it must be one of a run."""
        assert self.process is not None, f"the group {self.name} has no processes: it can be cast, and not run"
        return self.process.names[self.size, self.stride]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The groups of one rank of a deployment, all checked against the model.

    stage_ranks: ranks of one pipeline stage. experts_per_rank: routed experts that the predicted rank holds,
    redundant ones included. shared_expert_ranks: ranks that hold external shared experts, 0 when they are not external.
    """

    parallel: Parallel
    num_devices: int
    stage_ranks: int
    tp: Group
    dp: Group
    pp: Group
    dcp: Group
    ep: Group
    moe_tp: Group
    o_proj_tp: Group
    mlp_tp: Group
    lmhead_tp: Group
    embed_tp: Group
    experts_per_rank: int
    shared_expert_ranks: int


def resolve_mesh(model: ModelSpec, parallel: Parallel) -> Mesh:
    """Check parallel sizes against each other and the model, and give the groups.

    Raises CastoffError with the sizes given, what they must satisfy and which option to change.
    """
    _check_positive(parallel)
    world, tp, pp = parallel.num_devices, parallel.tp_size, parallel.pp_size
    if world % pp:
        raise CastoffError(f"--pp-size {pp} does not divide --num-devices {world}; choose among {_divisors(world)}")
    if world % (tp * pp):
        raise CastoffError(
            f"--tp-size {tp} does not divide the {world // pp} devices of a pipeline stage; choose among "
            f"{_divisors(world // pp)}"
        )
    stage = world // pp
    dp = parallel.dp_size if parallel.dp_size is not None else stage // tp
    if tp * dp * pp != world:
        raise CastoffError(
            f"--tp-size {tp} x --dp-size {dp} x --pp-size {pp} = {tp * dp * pp} is not --num-devices {world}; "
            f"leave out --dp-size or use {stage // tp}"
        )
    if tp % parallel.dcp_size:
        raise CastoffError(f"--dcp-size {parallel.dcp_size} must divide --tp-size {tp}")
    parts = {
        part: _part_tp(stage, part, own_tp, own_dp, tp)
        for part, own_tp, own_dp in (
            ("o-proj", parallel.o_proj_tp_size, parallel.o_proj_dp_size),
            ("mlp", parallel.mlp_tp_size, parallel.mlp_dp_size),
            ("lmhead", parallel.lmhead_tp_size, parallel.lmhead_dp_size),
        )
    }
    embed = _embedding_tp(model, parallel, stage)
    ep, moe_tp = _expert_sizes(parallel, stage)
    _check_divides(model, parallel, {"--tp-size": tp, "--o-proj-tp-size": parts["o-proj"]}, model.num_attention_heads)
    _check_width(model.intermediate_size, "intermediate_size", "--mlp-tp-size", parts["mlp"])
    _check_width(model.vocab_size, "vocab_size", "--lmhead-tp-size", parts["lmhead"])
    _check_width(model.moe.moe_intermediate_size, "moe_intermediate_size", "--moe-tp-size", moe_tp)
    experts, shared_ranks = _experts_per_rank(model, parallel, ep, stage)
    if parallel.enable_shared_expert_tp:
        _check_shared_expert_tp(model, parallel, tp)
    if pp > len(model.index_groups or range(model.num_hidden_layers)):
        raise CastoffError(
            f"--pp-size {pp} needs as many groups of layers that share one top-k; {model.name} has "
            f"{len(model.index_groups or range(model.num_hidden_layers))}"
        )
    return Mesh(
        parallel=parallel,
        num_devices=world,
        stage_ranks=stage,
        tp=Group("tp", tp),
        dp=Group("dp", dp, tp),
        pp=Group("pp", pp, stage),
        dcp=Group("dcp", parallel.dcp_size),
        ep=Group("ep", ep, moe_tp),
        moe_tp=Group("moe_tp", moe_tp),
        o_proj_tp=Group("o_proj_tp", parts["o-proj"]),
        mlp_tp=Group("mlp_tp", parts["mlp"]),
        lmhead_tp=Group("lmhead_tp", parts["lmhead"]),
        embed_tp=Group("embed_tp", embed),
        experts_per_rank=experts,
        shared_expert_ranks=shared_ranks,
    )


def _check_positive(parallel: Parallel) -> None:
    for name in (
        "num_devices",
        "tp_size",
        "dp_size",
        "pp_size",
        "dcp_size",
        "ep_size",
        "moe_tp_size",
        "moe_dp_size",
        "o_proj_tp_size",
        "o_proj_dp_size",
        "mlp_tp_size",
        "mlp_dp_size",
        "lmhead_tp_size",
        "lmhead_dp_size",
        "word_embedding_tp_size",
    ):
        value = getattr(parallel, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise CastoffError(f"--{name.replace('_', '-')} must be a whole number of at least 1, got {value!r}")
    if not 1 <= parallel.expert_load_imbalance < math.inf:
        raise CastoffError(
            f"--expert-load-imbalance is the busiest rank's load over the mean, so at least 1; got "
            f"{parallel.expert_load_imbalance}"
        )


def _part_tp(stage: int, part: str, tp: int | None, dp: int | None, default: int) -> int:
    size = tp if tp is not None else stage // dp if dp is not None and stage % dp == 0 else default
    if stage % size or (dp is not None and size * dp != stage):
        given = f"--{part}-tp-size {size}" if dp is None else f"--{part}-tp-size {size} x --{part}-dp-size {dp}"
        raise CastoffError(f"{given} does not fit the {stage} devices of a pipeline stage; they must multiply to it")
    smaller, larger = sorted((size, default))
    if larger % smaller:
        raise CastoffError(
            f"--{part}-tp-size {size} and --tp-size {default}: one must divide the other, to regroup tokens"
        )
    return size


def _embedding_tp(model: ModelSpec, parallel: Parallel, stage: int) -> int:
    size, tp = parallel.word_embedding_tp_size, parallel.tp_size
    if parallel.word_embedding_tp is None:
        if size not in (None, 1):
            raise CastoffError(
                f"--word-embedding-tp-size {size} splits the embedding; say how with --word-embedding-tp row or col"
            )
        return 1
    size = tp if size is None else size
    if size < tp or size % tp or stage % size:
        raise CastoffError(
            f"--word-embedding-tp-size {size} must be a multiple of --tp-size {tp} that divides the {stage} devices of "
            "a pipeline stage"
        )
    row = parallel.word_embedding_tp == "row"
    width, key = (model.vocab_size, "vocab_size") if row else (model.hidden_size, "hidden_size")
    _check_width(width, key, "--word-embedding-tp-size", size)
    return size


def _expert_sizes(parallel: Parallel, stage: int) -> tuple[int, int]:
    ep, moe_dp = parallel.ep_size, parallel.moe_dp_size
    if stage % moe_dp:
        raise CastoffError(
            f"--moe-dp-size {moe_dp} does not divide the {stage} devices of a pipeline stage; choose among "
            f"{_divisors(stage)}"
        )
    if stage % (ep * moe_dp):
        raise CastoffError(
            f"--ep-size {ep} x --moe-dp-size {moe_dp} does not divide the {stage} devices of a pipeline stage; "
            f"choose an --ep-size among {_divisors(stage // moe_dp)}"
        )
    moe_tp = parallel.moe_tp_size if parallel.moe_tp_size is not None else stage // (ep * moe_dp)
    if ep * moe_tp * moe_dp != stage:
        raise CastoffError(
            f"--ep-size {ep} x --moe-tp-size {moe_tp} x --moe-dp-size {moe_dp} = {ep * moe_tp * moe_dp} is not the "
            f"{stage} devices of a pipeline stage; leave out --moe-tp-size or use {stage // (ep * moe_dp)}"
        )
    if ep == 1:
        smaller, larger = sorted((moe_tp, parallel.tp_size))
        if larger % smaller:
            raise CastoffError(
                f"--moe-tp-size {moe_tp} and --tp-size {parallel.tp_size}: one must divide the other, so that tokens "
                "can be regrouped"
            )
    return ep, moe_tp


def _check_divides(model: ModelSpec, parallel: Parallel, sizes: dict[str, int], heads: int) -> None:
    for flag, size in sizes.items():
        if heads % size:
            stage = parallel.num_devices // parallel.pp_size
            raise CastoffError(
                f"{flag} {size} does not divide the {heads} attention heads of {model.name}; choose among "
                f"{[divisor for divisor in _divisors(heads) if stage % divisor == 0]}"
            )


def _check_width(width: int, key: str, flag: str, size: int) -> None:
    if width % size:
        raise CastoffError(f"{flag} {size} does not divide {key} {width}")


def _experts_per_rank(model: ModelSpec, parallel: Parallel, ep: int, stage: int) -> tuple[int, int]:
    """Routed experts on the predicted rank and the number of ranks with external shared experts."""
    experts = model.moe.n_routed_experts
    external = parallel.enable_external_shared_experts
    if parallel.host_external_shared_experts and not external:
        raise CastoffError("--host-external-shared-experts needs --enable-external-shared-experts")
    if external:
        if model.moe.n_shared_experts == 0:
            raise CastoffError(f"--enable-external-shared-experts: {model.name} has no shared expert")
        if parallel.enable_shared_expert_tp:
            raise CastoffError("--enable-shared-expert-tp and --enable-external-shared-experts exclude each other")
        if ep != stage or ep < 2:
            raise CastoffError(
                "--enable-external-shared-experts needs expert parallelism over a whole pipeline stage of at least 2 "
                f"devices: --ep-size {stage}, got {ep}"
            )
        shared_ranks = max(1, ep // model.moe.num_experts_per_tok)
        routed_ranks = ep - shared_ranks
        redundant = parallel.enable_redundant_experts and experts % routed_ranks == 0
        return -(-experts // routed_ranks) + redundant, shared_ranks
    if parallel.enable_redundant_experts and ep == 1:
        raise CastoffError("--enable-redundant-experts balances load over expert ranks; it needs --ep-size above 1")
    if experts % ep:
        raise CastoffError(
            f"--ep-size {ep} does not divide the {experts} routed experts of {model.name}; choose among "
            f"{[size for size in _divisors(experts) if stage % size == 0]}"
        )
    return experts // ep + parallel.enable_redundant_experts, 0


def _check_shared_expert_tp(model: ModelSpec, parallel: Parallel, tp: int) -> None:
    if parallel.ep_size == 1:
        raise CastoffError(
            "--enable-shared-expert-tp needs --ep-size above 1; without it the shared expert is split already"
        )
    width = model.moe.moe_intermediate_size * model.moe.n_shared_experts
    _check_width(width, "the shared expert's width", "--enable-shared-expert-tp with --tp-size", tp)


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
