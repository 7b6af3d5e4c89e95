"""Casts with offload: closed forms of bytes and memory, streams and events, what must not get worse."""

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import castoff
from castoff.casting.deployment import resolve
from castoff.casting.offload import break_even_context_tokens
from castoff.casting.price import Measured, Pricing, call_key
from castoff.casting.rank import stall_s
from castoff.casting.timeline import place, spans
from castoff.errors import CastoffError
from castoff.spec.backend import load_backend
from castoff.spec.offload import OffloadMode
from castoff.spec.scenario import Scenario
from tests.casting.offloading import MODES, cast_offload, host_bytes, step, with_link
from tests.casting.strategies import scenario
from tests.generators import ASCEND, DEEPSEEK_V3, DEEPSEEK_V32, GLM_52, device, model

ROW = 1152  # bytes of a latent row in bf16
LAYERS, GROUPS, K, S, REQUESTS = 78, 21, 2048, 4, 2
FEW = settings(max_examples=20, deadline=None)


class TestBytes:
    @pytest.mark.parametrize("hit_rate", [0.0, 0.5, 0.9])
    def test_the_published_route_reads_every_missed_place(self, hit_rate: float) -> None:
        step_ = cast_offload(step("serve_install", hit_rate=hit_rate))
        reads, writes = host_bytes(step_)
        # What is neither hit nor window is missed, and both are read.
        assert reads == pytest.approx(REQUESTS * S * K * (1 - hit_rate) * LAYERS * ROW)
        assert writes == REQUESTS * S * LAYERS * ROW

    def test_all_misses_of_the_published_case(self) -> None:
        """offload of four requests a rank with four queries: 2.94 GB."""
        base = scenario(step("serve_install"), num_queries=128)
        reads, _ = host_bytes(cast_offload(step("serve_install", hit_rate=0.0, base=base)))
        assert reads == pytest.approx(2.94e9, rel=2e-3)

    def test_direct_reads_every_missed_token_once(self) -> None:
        found = cast_offload(step("direct"))
        pool = resolve(model(GLM_52), device(ASCEND), step("direct")).pool
        assert pool is not None
        point = pool.curve.at(8192)
        misses, rows = point.unique_misses, point.rows
        reads, writes = host_bytes(found)
        assert reads == pytest.approx(REQUESTS * misses / rows * S * K * LAYERS * ROW)
        assert writes == REQUESTS * S * LAYERS * ROW

    def test_gather_offloads_the_drafts_too(self) -> None:
        case = step("gather", hit_rate=0.5)
        reads, _ = host_bytes(cast_offload(case))
        # Of three draft calls the first one gathers, and the others reuse its rows.
        tokens_of_drafts = S
        assert reads == pytest.approx(REQUESTS * K * 0.5 * ROW * (S * LAYERS + tokens_of_drafts))
        anew, _ = host_bytes(cast_offload(step("gather", hit_rate=0.5, mtp_gather_reuse=False)))
        assert anew > reads

    def test_a_pool_that_holds_the_context_reads_nothing(self) -> None:
        base = scenario(step("direct"), context_length=8192 - S)
        reads, _ = host_bytes(cast_offload(step("direct", base=base)))
        assert reads == 0

    @FEW
    @given(st.floats(0, 1), st.sampled_from([1024, 8192, 32_768, 131_072]))
    def test_direct_never_reads_more_than_the_published_route(self, hit_rate: float, context: int) -> None:
        base = scenario(step("direct"), context_length=context)
        direct, served = (
            host_bytes(cast_offload(step(mode, hit_rate=hit_rate, base=base)))[0]
            for mode in ("direct", "serve_install")
        )
        assert direct <= served * (1 + 1e-9)

    def test_every_rank_of_a_tp_group_reads_for_itself(self) -> None:
        """They hold the same rows, and split the heads that attend to them."""
        base = scenario(step("direct"), tp_size=4, dp_size=8, num_queries=16)
        assert host_bytes(cast_offload(step("direct", base=base))) == host_bytes(cast_offload(step("direct")))

    def test_prefill_stores_the_new_rows_and_loads_the_old_ones(self) -> None:
        base = scenario(step("direct"), query_length=1000, decode=False, num_mtp_tokens=0, num_queries=32)
        reads, writes = host_bytes(cast_offload(step("direct", base=base)))
        assert writes == 1000 * LAYERS * ROW
        assert reads == 65_536 * LAYERS * ROW


class TestMemory:
    def test_the_published_figures(self) -> None:
        """Bytes of one more request, beside its index keys and the MTP block's rows: as derived for the recipe."""
        one, two = (
            cast_offload(step("serve_install", base=scenario(step("direct"), num_queries=count))).footprint
            for count in (32, 64)
        )
        assert (two.pool_bytes - one.pool_bytes) / 2**20 == pytest.approx(702, rel=1e-3)
        assert (two.selection_bytes - one.selection_bytes) / 2**20 == pytest.approx(702, rel=1e-9)
        assert (two.host_kv_bytes - one.host_kv_bytes) == LAYERS * ROW * (65_536 + S)

    def test_offload_leaves_the_draft_block_on_the_device(self) -> None:
        found = cast_offload(step("direct")).footprint
        assert found.kv_bytes == REQUESTS * (65_536 + S) * ROW
        assert cast_offload(step("gather")).footprint.kv_bytes == 0

    def test_break_even_context(self) -> None:
        """A pool and a selection buffer, rings, and 21 groups' metadata of two words a row and a set."""
        case = step("serve_install")
        deployment = resolve(model(GLM_52), device(ASCEND), case)
        setup, pool = deployment.setup, deployment.pool
        assert pool is not None
        metadata = GROUPS * 4 * (2 * 8192 + 2 * 512) / (LAYERS * ROW)
        assert break_even_context_tokens(setup, case.offload, pool) == pytest.approx(8192 + S * K + S + metadata)

    def test_the_host_decides_too(self) -> None:
        where = device(ASCEND)
        small = replace(where, host_link=replace(where.host_link, host_memory_bytes=16 * 2**33))
        found = cast_offload(step("direct"), on=small)
        assert found.footprint.fits_device
        assert not found.footprint.fits
        prediction = castoff.cast(GLM_52, small, step("direct"))
        assert prediction.largest.max_batch_per_device == 1

    def test_stages_hold_their_own_layers(self) -> None:
        base = scenario(
            step("direct"), num_devices=64, dp_size=32, pp_size=2, ep_size=32, num_queries=64, context_length=65_536
        )
        whole, half = cast_offload(step("direct")).footprint, cast_offload(step("direct", base=base)).footprint
        assert 0.4 < half.host_kv_bytes / whole.host_kv_bytes < 0.6


class TestStreams:
    def test_rows_of_later_layers_come_while_earlier_ones_compute(self) -> None:
        found = cast_offload(step("direct"))
        assert set(found.timeline.busy_s) == {"main", "copy"}
        ahead = cast_offload(step("direct")).latency_s
        behind = cast_offload(step("direct", prefetch=False)).latency_s
        assert ahead < behind

    @pytest.mark.parametrize("rate", [1e9, 40e9])
    def test_attention_waits_for_its_rows(self, rate: float) -> None:
        found = cast_offload(step("direct"), on=with_link(rate))
        fetched: dict[int, float] = {}
        for span in spans(found.program, found.prices):
            for name, layer in span.call.signals:
                if name == "fetched":
                    fetched[span.entry.layer + layer] = float(span.end_s)
            if span.call.op.name.startswith("multihead_latent") and span.entry.layer in fetched:
                assert span.start_s >= fetched[span.entry.layer] * (1 - 1e-12)
        assert len(fetched) == LAYERS - GROUPS

    def test_installs_follow_their_serve_and_end_the_step(self) -> None:
        found = cast_offload(step("serve_install"))
        served: dict[int, float] = {}
        installs = 0
        for span in spans(found.program, found.prices):
            for name, layer in span.call.signals:
                if name == "served":
                    served[span.entry.layer + layer] = float(span.end_s)
            if span.call.op.name == "offload_install":
                (name, layer), *_ = span.call.waits
                assert name == "served"
                assert span.start_s >= served[span.entry.layer + layer]
                installs += 1
        assert installs == LAYERS
        last = max(float(placed.end_s) for placed in place(found.program, found.prices))
        assert found.timeline.end_s == pytest.approx(last)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("phase", ["decode", "prefill"])
    def test_repeated_blocks_change_nothing(self, mode: OffloadMode, phase: str) -> None:
        base = step(mode).workload
        if phase == "prefill":
            base = replace(base, query_length=512, decode=False, num_queries=32)
        case = replace(step(mode), workload=base)
        once = cast_offload(case)
        every = cast_offload(replace(case, disable_repetition=True))
        assert float(once.latency_s) == pytest.approx(float(every.latency_s), rel=1e-9)
        assert once.footprint == every.footprint
        assert host_bytes(once) == pytest.approx(host_bytes(every))


class TestWhatMustNotGetWorse:
    @FEW
    @given(st.sampled_from(MODES), st.floats(0, 1), st.floats(0, 1))
    def test_more_hits_are_never_slower(self, mode: OffloadMode, one: float, other: float) -> None:
        few, many = sorted((one, other))
        slow, fast = (cast_offload(step(mode, hit_rate=rate)).latency_s for rate in (few, many))
        assert fast <= slow * (1 + 1e-12)

    @pytest.mark.parametrize("mode", MODES)
    def test_a_link_without_end_takes_the_stall_away(self, mode: OffloadMode) -> None:
        case = step(mode)
        backend = load_backend("ascend")
        found = cast_offload(case)
        stall = stall_s(found, Pricing(device(ASCEND), backend, num_devices=32))
        free = cast_offload(case, on=with_link(inf))
        assert stall >= 0
        assert float(found.latency_s) - float(stall) == pytest.approx(float(free.latency_s), rel=1e-12)
        assert stall_s(free, Pricing(with_link(inf), backend, num_devices=32)) == 0

    @FEW
    @given(st.sampled_from(MODES), st.floats(1e9, 1e12), st.floats(1, 10))
    def test_a_faster_link_is_never_slower(self, mode: OffloadMode, rate: float, factor: float) -> None:
        slow, fast = (cast_offload(step(mode), on=with_link(each)).latency_s for each in (rate, rate * factor))
        assert fast <= slow * (1 + 1e-12)

    def test_ranks_share_the_link_of_their_host(self) -> None:
        alone = with_link(40e9)
        shared = replace(alone, host_link=replace(alone.host_link, devices_per_link=4))
        quarter = with_link(10e9)
        case = step("gather")
        assert cast_offload(case, on=shared).latency_s == pytest.approx(cast_offload(case, on=quarter).latency_s)


class TestSweep:
    def test_pools_and_hit_rates_are_axes(self) -> None:
        pools, rates = np.array([4096, 8192, 16_384]), np.array([0.5, 0.9])
        found = castoff.sweep(
            GLM_52,
            ASCEND,
            step("direct"),
            pool_tokens=pools[:, None],
            hit_rate=rates,
            offload=["direct", "serve_install"],
        )
        assert found.latency_s.shape == (2, 3, 2)
        for row, mode in enumerate(("direct", "serve_install")):
            for i, pool in enumerate(pools):
                for j, rate in enumerate(rates):
                    case = step(mode, hit_rate=float(rate), pool_tokens=int(pool))  # type: ignore[arg-type]
                    one = castoff.cast(GLM_52, ASCEND, case)
                    assert found.latency_s[row, i, j] == pytest.approx(one.latency_s, rel=1e-9)
                    assert found.stall_s[row, i, j] == pytest.approx(one.stall_s, rel=1e-6, abs=1e-12)
                    assert found.device_bytes[row, i, j] == pytest.approx(float(one.footprint.used_bytes))
                    assert found.host_bytes[row, i, j] == pytest.approx(float(one.footprint.host_kv_bytes))

    def test_pools_take_their_hits_from_the_profile(self) -> None:
        found = castoff.sweep(GLM_52, ASCEND, step("direct"), pool_tokens=np.array([4096, 8192, 16_384, 32_768]))
        assert (np.diff(found.latency_s[0]) < 0).all()
        assert (np.diff(found.device_bytes[0]) > 0).all()

    @pytest.mark.parametrize(
        ("axes", "complaint"),
        [
            ({"pool_tokens": np.array([8192, 8200])}, "multiple of --ways 16, got 8200"),
            ({"pool_tokens": np.array([1024])}, "covers pools of 2048 to 32768 tokens, got --pool-tokens 1024"),
            ({"hit_rate": np.array([0.5, 1.5])}, "--hit-rate must be from 0 to 1"),
            ({"hit_rate": np.array([0.5]), "offload": ["none"]}, "--hit-rate is for --offload"),
            ({"pool_tokens": np.array([8192]), "offload": ["none"]}, "pool_tokens is for decode steps with offload"),
            ({"pool_tokens": np.array([8192]), "offload": ["gather"]}, "got offload gather"),
        ],
    )
    def test_refusals(self, axes: dict[str, Any], complaint: str) -> None:
        with pytest.raises(CastoffError, match=complaint):
            raise CastoffError(str(castoff.sweep(GLM_52, ASCEND, step("direct"), **axes).reasons[0]))


class TestFigures:
    def test_a_ragged_batch_has_them_too(self) -> None:
        """Requests that bring more tokens, and others that have longer contexts: either may be dealt first."""
        lengths = replace(step("direct").workload, num_queries=None, context_length=(65_536,) * 8 + (30_000,) * 9)
        case = replace(step("direct"), workload=replace(lengths, query_length=(4,) * 8 + (8,) * 9))
        found = castoff.cast(GLM_52, ASCEND, case)
        assert found.offload is not None
        assert found.offload.latency_low_s <= found.latency_s <= found.offload.latency_high_s

    def test_a_device_reads_for_its_own_stage(self) -> None:
        base = scenario(step("direct"), num_devices=64, num_queries=32)
        whole, halves = (
            castoff.cast(
                GLM_52, ASCEND, step("direct", base=scenario(base, dp_size=dp, pp_size=pp, ep_size=32))
            ).offload
            for dp, pp in ((64, 1), (32, 2))
        )
        assert whole is not None
        assert halves is not None
        assert 0.45 < halves.link_bytes / whole.link_bytes < 0.55

    @pytest.mark.parametrize("mode", ["serve_install", "direct"])
    def test_no_more_tokens_are_missed_than_a_step_has(self, mode: OffloadMode) -> None:
        """Four queries select some 3,500 distinct tokens together, whatever the rate that is given."""
        missed = []
        for rate in (0.0, 0.3, 0.6, 0.9):
            found = castoff.cast(GLM_52, ASCEND, step(mode, hit_rate=rate)).offload
            assert found is not None
            missed.append(found.unique_misses)
        assert missed == sorted(missed, reverse=True)
        assert 3400 < missed[0] < 3700

    def test_measured_times_of_ops_leave_offload_alone(self) -> None:
        """How many rows a copy moves is not in its shapes."""
        slow = castoff.cast(GLM_52, ASCEND, step("serve_install", hit_rate=0.1))
        calls = [call for _, call in slow.cast.program.calls()]
        measured = Measured({call_key(call): 1e-9 for call in calls if call.family.startswith("offload_")})
        found = castoff.cast(GLM_52, ASCEND, step("serve_install", hit_rate=0.1), measured=measured)
        assert (found.latency_s, found.stall_s) == (slow.latency_s, slow.stall_s)

    def test_another_context_is_noted(self) -> None:
        base = scenario(step("direct"), context_length=500_000)
        notes = castoff.cast(GLM_52, ASCEND, step("direct", base=base)).notes
        assert any("hit rates are those of a context of 65,536 tokens" in note for note in notes)
        assert not any("hit rates" in note for note in castoff.cast(GLM_52, ASCEND, step("direct")).notes)

    def test_a_prefill_has_a_stall_and_no_pools(self) -> None:
        base = scenario(step("direct"), query_length=1000, decode=False, num_mtp_tokens=0, num_queries=32)
        found = castoff.cast(GLM_52, with_link(1e9), step("direct", base=base))
        assert found.offload is None
        assert found.stall_s > 1

    def test_where_offload_pays(self) -> None:
        found = castoff.cast(GLM_52, ASCEND, step("serve_install", hit_rate=0.3)).offload
        assert found is not None
        rate = found.break_even_hit_rate
        assert rate is not None
        assert 0.3 < rate < 1
        assert found.batch_without < found.batch_with
        # At that rate both give as much.
        batch = step("serve_install", hit_rate=rate, base=scenario(step("direct"), num_queries=32 * found.batch_with))
        assert castoff.cast(GLM_52, ASCEND, batch).tokens_per_s == pytest.approx(found.tokens_per_s_without, rel=2e-2)

    def test_the_spread_of_the_profile(self) -> None:
        prediction = castoff.cast(GLM_52, ASCEND, step("direct"))
        found = prediction.offload
        assert found is not None
        assert found.latency_low_s <= prediction.latency_s <= found.latency_high_s
        assert found.latency_low_s < found.latency_high_s
        assert prediction.cast.origin == "assumed"


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "case", "complaint"),
        [
            (DEEPSEEK_V3, step("direct"), "has no sparse attention"),
            (DEEPSEEK_V32, step("direct"), "castoff knows no hit rates of deepseek-ai/DeepSeek-V3.2: give --hit-rate"),
            (GLM_52, step("direct", hit_rate=1.01), "--hit-rate must be from 0 to 1, got 1.01"),
            (GLM_52, step("none", hit_rate=0.5), "--hit-rate is for --offload gather, serve_install or direct"),
            (GLM_52, step("direct", pool_tokens=8200), "multiple of --ways 16"),
            (
                GLM_52,
                step("direct", ways=5, pool_tokens=8000),
                "has nothing for --offload direct --policy fifo --ways 5",
            ),
            (GLM_52, step("direct", base=scenario(tp_size=2, dcp_size=2, num_devices=2)), "leave --dcp-size out"),
        ],
    )
    def test_sentences(self, name: str, case: Scenario, complaint: str) -> None:
        with pytest.raises(CastoffError, match=complaint):
            castoff.cast(name, ASCEND, case)

    def test_a_rate_serves_any_sparse_model(self) -> None:
        found = castoff.cast(DEEPSEEK_V32, ASCEND, step("gather", hit_rate=0.5885))
        assert found.offload is not None
        assert model(DEEPSEEK_V32).num_hidden_layers == 61
