"""Runs of tiny models with and without offload, and all that their passes gave."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from castoff.model.decoder import PassOutput
from castoff.model.setup import Setup
from castoff.offload.memory import OffloadRun
from castoff.offload.report import OffloadReport
from castoff.runtime import engine as engines
from castoff.runtime.checkpoint import LoadedWeights, RandomTensors
from castoff.runtime.engine import Call, Engine, StaticShapes
from castoff.runtime.graphs import GraphMode
from castoff.runtime.lockstep import LockstepEngine
from castoff.runtime.sampling import Sampling
from castoff.runtime.scheduler import Request, Scheduler
from castoff.runtime.stored import WHOLE, Part, Piece
from castoff.runtime.structure import run_setup
from castoff.spec.model import ModelSpec, read_model
from castoff.spec.offload import Offload, OffloadMode
from castoff.spec.quant import AttentionAction
from castoff.spec.scenario import Mtp, Parallel, Quant, Scenario

torch = pytest.importorskip("torch")

INDEX_TOPK = 16
POOL = 32
VOCABULARY = 54
KINDS = ("glm52", "glm5", "deepseek_v32")
MODES: tuple[OffloadMode, ...] = ("gather", "serve_install", "direct")
BLOCK_TOKENS = 16

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_attention_heads": 2, "kv_lora_rank": 128, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "index_topk": INDEX_TOPK,
    "first_k_dense_replace": 1, "index_n_heads": 16, "index_head_dim": 16, "max_position_embeddings": 512,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "dtype": "bfloat16", "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
_GLM = {"model_type": "glm_moe_dsa", "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}
_OF_KIND: dict[str, dict[str, Any]] = {
    # Groups of one and three; a top-k that drafts share.
    "glm52": {
        **_GLM, "num_hidden_layers": 4, "index_topk_freq": 4, "index_skip_topk_offset": 2,
        "index_share_for_mtp_iteration": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "glm5": {**_GLM, "num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "deepseek_v32": {
        "model_type": "deepseek_v32", "num_hidden_layers": 3, "n_group": 2, "topk_group": 1, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "rope_scaling": None,
    },
}  # fmt: skip


def spec_of(kind: str) -> ModelSpec:
    """A tiny model of one kind."""
    return read_model({**_COMMON, **_OF_KIND[kind]}, name=kind, source=kind)


class Wide(RandomTensors):
    """Random tensors so wide that small models tell tokens apart."""

    def read(self, piece: Piece, part: Part = WHOLE) -> Any:
        tensor = super().read(piece, part)
        return tensor * 10 if tensor.dim() > 1 else tensor


class Keeping:
    """Keeps what every call gave, and whether it was a draft call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[tuple[bool, PassOutput]] = []

    def _run(self, call: Call) -> PassOutput:
        output: PassOutput = super()._run(call)  # type: ignore[misc]
        self.kept.append((call.hidden_TD is not None, output))
        return output


class KeepingEngine(Keeping, Engine):
    """On one attention-DP rank."""


class KeepingLockstepEngine(Keeping, LockstepEngine):
    """On one of several."""


def options_of(mode: OffloadMode, **given: Any) -> Offload:
    """A mode with a pool of POOL tokens, unless told."""
    if mode in ("serve_install", "direct"):
        given = {"pool_tokens": POOL, "ways": 4, **given}
    return Offload(offload=mode, **given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run: lengths of prompts, how many tokens each gets, and how."""

    kind: str = "glm52"
    drafts: int = 0
    prompts: tuple[int, ...] = (INDEX_TOPK, POOL, POOL + 1, 8 * POOL, 5)
    new_tokens: int = 10
    slots: int = 3
    chunk_tokens: int = 48
    graph: GraphMode = "eager"
    dtype: Any = torch.float32
    attention: AttentionAction = "DISABLED"
    check: bool = True
    device: str = "cpu"

    @property
    def requests(self) -> list[Request]:
        """Prompts of drawn tokens; each request a few tokens longer than the one before."""
        generator = torch.Generator().manual_seed(1)
        draws = [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in self.prompts]
        return [Request(tuple(ids), self.new_tokens + index) for index, ids in enumerate(draws)]

    @property
    def longest(self) -> int:
        """Tokens that a request may reach."""
        return max(len(item.prompt) + item.max_new_tokens for item in self.requests) + 2 * self.drafts + 1

    @property
    def blocks(self) -> int:
        """Cache blocks for the longest requests in all slots."""
        return self.slots * -(-self.longest // BLOCK_TOKENS)


def setup_of(case: Case, parallel: Parallel | None = None) -> Setup:
    """The structure of a case; on one rank unless told."""
    quant = Quant(quantize_linear_action="DISABLED", quantize_attention_action=case.attention)
    mtp = Mtp(num_mtp_tokens=case.drafts)
    return run_setup(spec_of(case.kind), Scenario(parallel=parallel or Parallel(), quant=quant, mtp=mtp))


def engine_of(
    case: Case, offload: Offload | None, *, kind: type[Engine] = KeepingEngine, setup: Setup | None = None
) -> Engine:
    """An engine for a case, of one rank unless told."""
    setup = setup or setup_of(case)
    device = torch.device(case.device)
    run = None if offload is None else OffloadRun(
        options=offload, slots=case.slots, num_blocks=case.blocks, block_tokens=BLOCK_TOKENS, longest=case.longest,
        check=case.check,
    )  # fmt: skip
    return kind(
        setup, LoadedWeights(setup, Wide(0), dtype=case.dtype, device=device), num_blocks=case.blocks,
        block_tokens=BLOCK_TOKENS, dtype=case.dtype, device=device, graph=case.graph,
        static=None if case.graph == "eager" else StaticShapes(case.slots, case.longest), offload=run,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens of all requests, what the passes gave, and the figures of offload."""

    tokens: list[list[int]]
    passes: list[tuple[bool, PassOutput]]
    report: OffloadReport | None


@contextmanager
def opened(case: Case, offload: Offload | None, **given: Any) -> Iterator[tuple[Engine, Scheduler]]:
    """An engine and its scheduler, closed at the end."""
    engine = engine_of(case, offload, **given)
    try:
        with torch.inference_mode():
            yield engine, Scheduler(engine, slots=case.slots, chunk_tokens=case.chunk_tokens, sampling=Sampling())
    finally:
        engine.close()


def outcome(case: Case, offload: Offload | None = None, **given: Any) -> Outcome:
    """Run a case to its end."""
    with opened(case, offload, **given) as (engine, scheduler):
        results = scheduler.run(case.requests)
        report = engine.offload.report() if engine.offload else None
    return Outcome([result.tokens for result in results], engine.kept, report)  # type: ignore[attr-defined]


def assert_equal(own: Outcome, other: Outcome, *, drafts: bool = True) -> None:
    """All passes gave the same bits; drafts: those of the MTP block too."""
    assert own.tokens == other.tokens
    if drafts:
        assert len(own.passes) == len(other.passes)
    for index, ((is_draft, mine), (is_draft_too, theirs)) in enumerate(zip(own.passes, other.passes, strict=False)):
        assert is_draft == is_draft_too
        if is_draft and not drafts:
            continue
        assert torch.equal(mine.hidden_TD, theirs.hidden_TD), f"hidden states of pass {index}"
        assert torch.equal(mine.topk_TK, theirs.topk_TK), f"selection of pass {index}"
        if mine.logits_TV is not None and theirs.logits_TV is not None:
            assert torch.equal(mine.logits_TV, theirs.logits_TV), f"logits of pass {index}"


def with_streams(monkeypatch: pytest.MonkeyPatch, streams: Sequence[Any]) -> None:
    """Have the next engines use these streams."""
    left = iter(streams)
    monkeypatch.setattr(engines, "open_streams", lambda device, *, inline: next(left))
