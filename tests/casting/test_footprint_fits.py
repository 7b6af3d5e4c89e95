"""What fits: the largest batch and context, reasons, published figures."""

import csv
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from castoff import cast
from castoff.casting.footprint import Footprint
from castoff.casting.rank import GIB
from tests.casting.footprints import H200, with_memory
from tests.casting.strategies import Case, cases, cast_step, scenario
from tests.generators import ASCEND, DEEPSEEK_V32, GLM_52, setup_of


class TestWhatDoesNotFit:
    """32 requests of 64K on 16 dies with TP 16: every die holds the whole cache."""

    step = scenario(
        num_devices=16,
        tp_size=16,
        dp_size=1,
        ep_size=16,
        num_queries=32,
        context_length=65_536,
        compile=True,
        quantize_linear_action="W4A8_STATIC",
    )

    def test_says_so(self) -> None:
        prediction = cast(GLM_52, ASCEND, self.step)
        assert not prediction.fits
        assert prediction.footprint.kv_bytes == 32 * 65_537 * 89_856
        assert prediction.footprint.kv_bytes > 2 * prediction.footprint.device_bytes_capacity
        assert prediction.footprint.free_bytes < 0
        # It is priced all the same.
        assert prediction.latency_s > 0

    def test_largest_batch_and_context_are_exact(self) -> None:
        largest = cast(GLM_52, ASCEND, self.step).largest
        assert (largest.max_batch_per_device, largest.max_context_length) == (6, 13_089)

        def fits(**values: object) -> bool:
            return cast(GLM_52, ASCEND, scenario(self.step, **values)).fits

        assert fits(num_queries=6)
        assert not fits(num_queries=7)
        assert fits(context_length=13_089)
        assert not fits(context_length=13_134)

    def test_dcp_or_attention_dp_makes_it_fit(self) -> None:
        assert cast(GLM_52, ASCEND, scenario(self.step, dcp_size=16)).fits
        assert cast(GLM_52, ASCEND, scenario(self.step, tp_size=1, dp_size=16)).fits

    def test_weights_that_do_not_fit_leave_nothing(self) -> None:
        prediction = cast(GLM_52, ASCEND, scenario())
        assert not prediction.fits
        assert (prediction.largest.max_batch_per_device, prediction.largest.max_context_length) == (0, None)

    @pytest.mark.parametrize("beyond", [0, 1])
    def test_a_prompt_of_the_longest_length_leaves_no_context(self, beyond: int) -> None:
        step = scenario(num_devices=8, tp_size=8, query_length=163_840 + beyond)
        assert cast(DEEPSEEK_V32, H200, step).largest.max_context_length == 0

    def test_context_is_searched_up_to_what_the_model_can(self) -> None:
        step = scenario(num_devices=8, tp_size=8, query_length=163_839)
        prediction = cast(DEEPSEEK_V32, H200, step)
        assert prediction.fits
        assert prediction.largest.max_context_length == 1

    def test_the_reserve_counts(self) -> None:
        step = scenario(self.step, num_queries=6)
        free = float(cast(GLM_52, ASCEND, step).footprint.free_bytes)
        assert cast(GLM_52, ASCEND, scenario(step, reserved_memory_gb=free / 2**30)).fits
        reserved = cast(GLM_52, ASCEND, scenario(step, reserved_memory_gb=free / 2**30 + 1e-6))
        assert not reserved.fits
        assert reserved.largest.max_batch_per_device == 5


@pytest.mark.property
@settings(max_examples=25)
@given(cases(max_stages=2), st.integers(-40, 200))
def test_largest_is_maximal(case: Case, spare: int) -> None:
    spec, where, step = case
    setup = setup_of(spec, step, on=where.name)
    # Memory that is just enough, or not, so that both limits are within reach.
    needed = float(cast_step(spec, where, step).footprint.used_bytes)
    where = with_memory(where, int(needed * (1 + spare / 1000)))
    prediction = cast(spec, where, step)
    context, batch = prediction.largest.max_context_length, prediction.largest.max_batch_per_device
    # A prefix cache moves tokens from the query to the context.
    longest = prediction.cast.batch.classes[0]
    plain = scenario(
        step, query_length=int(longest.query), context_length=int(longest.context), prefix_cache_hit_rate=0.0,
        decode=prediction.mode == "decode",
    )  # fmt: skip
    most = spec.max_position_embeddings - int(longest.query)
    assume(most >= 0)

    def fits(**values: object) -> bool:
        return bool(cast_step(spec, where, scenario(plain, **values)).footprint.fits)

    ranks = setup.mesh.dp.size
    assert batch == 0 or fits(num_queries=batch * ranks)
    assert not fits(num_queries=(batch + 1) * ranks)
    if context is None:
        assert not fits(context_length=0)
        return
    assert fits(context_length=context)
    assert context == most or (context < most and not fits(context_length=context + 1))
    if prediction.fits and longest.context <= most:
        assert context >= longest.context
        # The largest batch is one of equally full ranks.
        assert step.workload.num_queries % ranks or batch * ranks >= step.workload.num_queries


@pytest.mark.property
@settings(max_examples=40)
@given(cases())
def test_every_part_is_counted_once(case: Case) -> None:
    memory = cast_step(*case).footprint
    for name in Footprint.__dataclass_fields__:
        assert getattr(memory, name) >= 0, name
    assert memory.activation_bytes > 0
    assert memory.weights_bytes > 0


class TestAgainstPublishedFigures:
    """Figures of a public simulator's run; it counts three MTP layers and whole blocks."""

    peer_tokens = 509 * 128

    def prediction(self, **values: object) -> Footprint:
        return cast(
            GLM_52,
            ASCEND,
            scenario(
                num_devices=16,
                tp_size=16,
                dp_size=1,
                ep_size=16,
                query_length=4096,
                context_length=61_000,
                quantize_linear_action="W4A8_STATIC",
                compile=True,
                **values,
            ),
        ).footprint

    def test_weights_per_die(self) -> None:
        assert self.prediction().weights_bytes / GIB == pytest.approx(25.8, rel=0.01)

    def test_caches(self, shared_data: Path) -> None:
        path = shared_data / "peers" / "tensorcast_glm52_a3.csv"
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["case"].startswith("prefill")]
        calls = {row["op"].split(".")[1]: int(row["calls"]) for row in rows if "mla" in row["op"] or "dsa" in row["op"]}
        assert (calls["mla_sparse_attention"], calls["dsa_indexer"]) == (81, 24)
        shapes = next(row["input_shapes_per_device"] for row in rows if "mla_sparse" in row["op"])
        assert "[509, 128, 576]" in shapes
        memory = self.prediction(num_mtp_tokens=3)
        assert memory.kv_bytes == 65_096 * 79 * 1152
        assert memory.kv_bytes * 81 / 79 * self.peer_tokens / 65_096 / GIB == pytest.approx(5.66, abs=0.005)
        assert memory.indexer_cache_bytes == 65_096 * 22 * 256
        assert memory.indexer_cache_bytes * 24 / 22 * self.peer_tokens / 65_096 / GIB == pytest.approx(0.37, abs=0.005)

    def test_the_case_that_the_peer_prints_a_latency_for(self, shared_data: Path) -> None:
        # 186 GiB of caches on a 64 GiB die: 16,385 blocks of 128 tokens, 78 and 21 layers.
        with (shared_data / "peers" / "tensorcast_glm52_a3.csv").open(newline="") as file:
            shapes = [
                row["input_shapes_per_device"] for row in csv.DictReader(file) if row["case"].startswith("decode 32")
            ]
        assert "[16385, 128, 576]" in shapes[0]
        memory = cast(GLM_52, ASCEND, TestWhatDoesNotFit.step).footprint
        ours = (memory.kv_bytes + memory.indexer_cache_bytes) / (32 * 65_537) * 16_385 * 128 / GIB
        assert ours == pytest.approx(186, abs=0.5)
