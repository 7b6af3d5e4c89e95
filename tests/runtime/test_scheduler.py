"""Continuous batching and speculative decoding: the tokens of a request depend on nothing but the request."""

import random
from collections.abc import Callable

import pytest

from castoff.errors import CastoffError
from castoff.model.decoder import PassOutput
from castoff.runtime.checkpoint import LoadedWeights, RandomTensors
from castoff.runtime.engine import Engine, Rows
from castoff.runtime.sampling import Sampling
from castoff.runtime.scheduler import Request, Result, Scheduler, Statistics
from castoff.runtime.stored import WHOLE, Part, Piece
from castoff.runtime.structure import run_setup
from castoff.spec.model import ModelSpec, read_model
from castoff.spec.scenario import Mtp, Quant, Scenario

torch = pytest.importorskip("torch")

GREEDY = Sampling()
# Logits closer than this are one and the same to float32, whose sums depend on the shape of a call.
NEAR_TIE = 1e-4


def spec_of(vocabulary: int) -> ModelSpec:
    config = {
        "model_type": "glm_moe_dsa", "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 48,
        "moe_intermediate_size": 16, "num_attention_heads": 2, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "index_topk": 16,
        "index_n_heads": 16, "index_head_dim": 16, "max_position_embeddings": 512, "num_hidden_layers": 4,
        "index_topk_freq": 4, "index_skip_topk_offset": 2, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1, "norm_topk_prob": True, "dtype": "bfloat16",
        "tie_word_embeddings": False, "index_share_for_mtp_iteration": True,
    }  # fmt: skip
    return read_model(config, name="tiny", source="tiny")


class Wide(RandomTensors):
    """Random tensors so wide that small models tell tokens apart."""

    def read(self, piece: Piece, part: Part = WHOLE) -> torch.Tensor:
        tensor = super().read(piece, part)
        return tensor * 10 if tensor.dim() > 1 else tensor


def engine_of(
    seed: int, drafts: int, *, vocabulary: int = 53, blocks: int = 64, dtype: torch.dtype = torch.float64,
    kind: type[Engine] = Engine,
) -> Engine:  # fmt: skip
    scenario = Scenario(quant=Quant(quantize_linear_action="DISABLED"), mtp=Mtp(num_mtp_tokens=drafts))
    setup = run_setup(spec_of(vocabulary), scenario)
    cpu = torch.device("cpu")
    weights = LoadedWeights(setup, Wide(seed), dtype=dtype, device=cpu)
    return kind(setup, weights, num_blocks=blocks, block_tokens=16, dtype=dtype, device=cpu)


class GapEngine(Engine):
    """Keeps how far the two most likely next tokens are apart, by request and its length; for runs without drafts."""

    gaps: dict[tuple[int | None, int], float]

    def forward(self, ids_BS: torch.Tensor, rows: Rows, *, prefill: bool, last: bool) -> PassOutput:
        output = super().forward(ids_BS, rows, prefill=prefill, last=last)
        assert output.logits_TV is not None
        best = output.logits_TV.topk(2).values
        keys = zip(rows.requests, rows.lengths, strict=True)
        self.gaps |= dict(zip(keys, (best[:, 0] - best[:, 1]).tolist(), strict=True))
        return output


def run(
    engine: Engine, requests: list[Request], *, slots: int = 4, sampling: Sampling = GREEDY, stop: tuple[int, ...] = ()
) -> tuple[list[Result], Statistics]:
    scheduler = Scheduler(engine, slots=slots, chunk_tokens=20, sampling=sampling, stop_ids=frozenset(stop))
    with torch.inference_mode():
        return scheduler.run(requests), scheduler.statistics


def requests_of(seed: int, count: int, vocabulary: int = 53) -> list[Request]:
    draw = random.Random(seed)
    return [
        Request(tuple(draw.randrange(vocabulary) for _ in range(draw.randint(1, 50))), draw.randint(1, 16))
        for _ in range(count)
    ]


def tokens(results: list[Result]) -> list[list[int]]:
    return [result.tokens for result in results]


def first_differences(plain: list[list[int]], other: list[list[int]]) -> dict[int, int]:
    """By request, the first step at which two runs chose different tokens."""
    found = {}
    for index, (ours, theirs) in enumerate(zip(plain, other, strict=True)):
        assert len(ours) == len(theirs)
        step = next((step for step, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if step is not None:
            found[index] = step
    return found


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestBatching:
    def test_fifty_requests_through_four_slots(self) -> None:
        engine, requests = engine_of(0, 0), requests_of(0, 50)
        together, _ = run(engine, requests)
        assert engine.pool.free_blocks == engine.pool.num_blocks
        # Alone, with the index that its draws depend on.
        for index, request in enumerate(requests[:12]):
            alone, _ = run(engine, [request], slots=1)
            assert alone[0].tokens == together[index].tokens
        assert tokens(run(engine, requests, slots=1)[0]) == tokens(together)

    def test_the_pool_is_full(self) -> None:
        # Each request needs two of the five blocks: two run, the others wait.
        engine = engine_of(0, 0, blocks=5)
        requests = [Request((1,) * 20, 8)] * 6
        results, statistics = run(engine, requests)
        assert {tuple(result.tokens) for result in results} == {tuple(results[0].tokens)}
        assert statistics.request_steps == 6 * 7
        assert statistics.decode_steps == 3 * 7
        assert engine.pool.free_blocks == 5

    def test_sparse_steps_are_counted(self) -> None:
        _, statistics = run(engine_of(0, 0), [Request((3,) * 12, 9)])
        # Steps reach lengths 13 to 20; those beyond 16 select.
        assert (statistics.decode_steps, statistics.sparse_steps) == (8, 4)

    def test_a_stop_token_ends_a_request(self) -> None:
        engine, request = engine_of(0, 0), Request((1, 2, 3), 16)
        free, _ = run(engine, [request])
        stop = free[0].tokens[3]
        stopped, _ = run(engine, [request], stop=(stop,))
        assert stopped[0].tokens == free[0].tokens[: free[0].tokens.index(stop) + 1]

    @pytest.mark.parametrize(
        ("request_", "says"),
        [
            (Request((), 1), "empty prompt"),
            (Request((1,), 0), "max-new-tokens"),
            (Request((53,), 1), "vocabulary has ids 0 to 52"),
            (Request((1,) * 1020, 8), "the KV cache holds 1024"),
        ],
    )
    def test_requests_that_cannot_run(self, request_: Request, says: str) -> None:
        with pytest.raises(CastoffError, match=says):
            run(engine_of(0, 0), [Request((1,), 1), request_])


class TestSpeculation:
    @pytest.mark.parametrize("seed", range(20))
    def test_drafts_change_no_token(self, seed: int) -> None:
        # Three words: drafts are accepted by chance.
        requests = requests_of(seed, 4, vocabulary=3)
        plain, _ = run(engine_of(seed, 0, vocabulary=3), requests)
        for drafts in (1, 2, 3):
            speculative, statistics = run(engine_of(seed, drafts, vocabulary=3), requests)
            assert tokens(speculative) == tokens(plain)
            assert 1 <= statistics.acceptance_length <= 1 + drafts

    def test_in_float32_drafts_change_tokens_at_near_ties_alone(self) -> None:
        seeds, ties, parted = range(8), 0, set()
        for seed in seeds:
            requests = requests_of(seed, 6, vocabulary=3)
            engine = engine_of(seed, 0, vocabulary=3, dtype=torch.float32, kind=GapEngine)
            assert isinstance(engine, GapEngine)
            engine.gaps = {}
            plain = tokens(run(engine, requests)[0])
            ties += sum(gap < NEAR_TIE for gap in engine.gaps.values())
            for drafts in (1, 2, 3):
                drafted = tokens(run(engine_of(seed, drafts, vocabulary=3, dtype=torch.float32), requests)[0])
                for index, step in first_differences(plain, drafted).items():
                    gap = engine.gaps[index, len(requests[index].prompt) + step]
                    assert gap < NEAR_TIE, f"seed {seed}, {drafts} drafts, request {index}, step {step}: gap {gap}"
                    parted.add(seed)
        assert 2 * len(parted) < len(seeds), f"seeds {parted} of {len(seeds)} part at near ties; {ties} steps are ones"

    def test_acceptance_by_position(self) -> None:
        _, statistics = run(engine_of(0, 3, vocabulary=3), requests_of(0, 6, vocabulary=3))
        rates = statistics.acceptance_rates
        assert len(rates) == 3
        assert 1 >= rates[0] >= rates[1] >= rates[2] >= 0
        assert statistics.acceptance_length == pytest.approx(1 + sum(rates))
        assert run(engine_of(0, 0), [Request((1,), 3)])[1].acceptance_rates == []

    def test_some_drafts_are_accepted(self) -> None:
        _, statistics = run(engine_of(0, 3, vocabulary=3), requests_of(0, 6, vocabulary=3))
        assert statistics.acceptance_length > 1.05

    def test_drawn_tokens_are_the_same_with_drafts(self) -> None:
        sampling = Sampling(temperature=0.8, top_p=0.9, seed=7)
        requests = requests_of(1, 8)
        plain, drafted = (run(engine_of(1, drafts), requests, sampling=sampling)[0] for drafts in (0, 2))
        assert tokens(plain) == tokens(drafted)
        other, _ = run(engine_of(1, 0), requests, sampling=Sampling(temperature=0.8, top_p=0.9, seed=8))
        assert tokens(plain) != tokens(other)

    @pytest.mark.parametrize("make", [lambda: Sampling(temperature=-1), lambda: Sampling(top_p=0)])
    def test_sampling_that_cannot_be(self, make: Callable[[], Sampling]) -> None:
        with pytest.raises(CastoffError):
            make()
