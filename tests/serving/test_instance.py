"""The simulation of an instance against single steps, and what must hold for every load."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castoff.serving.instance import Instance, Rules, fits_alone
from castoff.serving.result import Served
from castoff.serving.workload import Arrivals, ClosedLoop, Requests
from castoff.spec.serving import Admission
from tests.serving.stepper import Affine, simulate

OPTIMISTIC = Admission(
    reserve_start=0.75, reserve_least=0.125, reserve_decay_steps=64, reserve_ranks_factor=1.0, clip_tokens=20,
    retraction_steps=4, retracted_first=False, source="a test",
)  # fmt: skip
# Sets everything aside, so nothing is ever sent back.
CAUTIOUS = replace(OPTIMISTIC, reserve_start=1.0, reserve_least=1.0, clip_tokens=10**6)
GREEDY = replace(
    OPTIMISTIC, reserve_start=0.0, reserve_least=0.0, clip_tokens=0, retraction_steps=1, retracted_first=True
)
RULES = Rules(capacity_tokens=1000, chunk_tokens=64, max_running=8, delay_s=0.003, admission=OPTIMISTIC)


@st.composite
def loads(draw: st.DrawFn) -> Requests:
    count = draw(st.integers(1, 12))
    prompts = tuple(draw(st.lists(st.integers(1, 90), min_size=count, max_size=count)))
    outputs = tuple(draw(st.lists(st.integers(1, 60), min_size=count, max_size=count)))
    if draw(st.booleans()):
        return Requests(prompts, outputs, None, draw(st.integers(1, count)))
    # Irregular, so that no two events fall on one moment but for the burst.
    times = draw(st.lists(st.sampled_from([0.0, 0.0171, 0.333, 0.7179, 2.1007]), min_size=count, max_size=count))
    return Requests(prompts, outputs, tuple(times))


@st.composite
def rules(draw: st.DrawFn, requests: Requests) -> Rules:
    own = Rules(
        capacity_tokens=requests.longest_tokens + draw(st.integers(5, 120)),
        # Powers of two: sums of fractions are exact, so that single steps and jumps may be compared.
        request_tokens=draw(st.sampled_from([0.0, 1.5])),
        host_tokens=requests.longest_tokens + draw(st.sampled_from([4, 50, 1000])),
        chunk_tokens=draw(st.sampled_from([7, 32, 200])),
        max_running=draw(st.sampled_from([1, 3, 64])),
        tokens_per_step=draw(st.sampled_from([1.0, 1.75, 2.5])),
        delay_s=draw(st.sampled_from([0.0, 0.0037])),
        mixes_prefill=draw(st.booleans()),
        admission=draw(st.sampled_from([OPTIMISTIC, CAUTIOUS, GREEDY])),
    )
    assert fits_alone(requests, own)
    return own


def serve(requests: Requests, own: Rules, times: Affine | None = None) -> Served:
    return Instance(requests, times or Affine(), own).run()


@pytest.mark.property
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_jumps_are_single_steps(data: st.DataObject) -> None:
    requests = data.draw(loads())
    own = data.draw(rules(requests))
    served, stepped = serve(requests, own), simulate(requests, Affine(), own)
    assert (served.decode_steps, served.prefill_passes) == (stepped.steps, stepped.passes)
    assert served.retractions.tolist() == [asked.retractions for asked in stepped.asked]
    for found, wanted in (
        (served.arrival_s, [asked.arrival for asked in stepped.asked]),
        (served.queued_s, [asked.queued for asked in stepped.asked]),
        (served.first_token_s, [asked.first for asked in stepped.asked]),
        (served.finish_s, [asked.finish for asked in stepped.asked]),
    ):
        np.testing.assert_allclose(found, np.array(wanted, float), rtol=1e-9, atol=1e-9)
    assert max(stepped.rows) <= served.kv_peak_tokens <= min(own.capacity_tokens, own.host_tokens)


@pytest.mark.property
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_request_is_served_once(data: st.DataObject) -> None:
    requests = data.draw(loads())
    own = data.draw(rules(requests))
    served = serve(requests, own)
    assert np.isfinite(served.finish_s).all()
    assert (served.arrival_s + own.delay_s <= served.first_token_s).all()
    assert (served.first_token_s <= served.finish_s).all()
    assert (served.queued_s >= 0).all()
    assert served.kv_peak_tokens <= own.capacity_tokens
    # Every token comes from a decode step or a pass, and a request takes part in one of them at a time.
    steps = -(-(np.array(requests.output_tokens) - 1) // own.tokens_per_step)
    assert served.decode_steps >= (steps - served.retractions).max()
    assert served.decode_steps <= steps.sum()
    again = serve(requests, own)
    assert again.finish_s.tolist() == served.finish_s.tolist()


@pytest.mark.property
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_cautious_instance_sends_nothing_back(data: st.DataObject) -> None:
    requests = data.draw(loads())
    own = replace(data.draw(rules(requests)), admission=CAUTIOUS, tokens_per_step=1.0, mixes_prefill=False)
    served = serve(requests, own)
    assert served.retractions.sum() == 0


@pytest.mark.property
@settings(max_examples=100, deadline=None)
@given(requests=loads(), chunk=st.sampled_from([7, 200]))
def test_memory_for_all_means_no_wait_for_memory(requests: Requests, chunk: int) -> None:
    enough = sum(requests.prompt_tokens) + 2 * sum(requests.output_tokens) + 100
    served = serve(requests, replace(RULES, capacity_tokens=enough, chunk_tokens=chunk, admission=OPTIMISTIC))
    assert not served.capacity_bound
    assert served.retractions.sum() == 0


def test_one_request() -> None:
    times = Affine()
    served = serve(Requests((100,), (11,), None, 1), replace(RULES, chunk_tokens=64), times)
    passes = times.prefill_s([(64, 0)]) + times.prefill_s([(36, 64)])
    assert served.ttft_s[0] == pytest.approx(0.003 + passes)
    assert served.tpot_s[0] == pytest.approx(times.decode_s(1, 100, 1.0, 10) / 10)
    assert served.kv_peak_tokens == 110
    assert (served.decode_steps, served.prefill_passes) == (10, 2)


def test_one_token_needs_no_decode_step() -> None:
    served = serve(Requests((5, 5), (1, 1), None, 1), RULES)
    assert served.decode_steps == 0
    assert np.isnan(served.tpot_s).all()


def test_a_prompt_makes_decodes_wait() -> None:
    times = Affine()
    alone = serve(Requests((10,), (200,), (0.0,)), RULES, times)
    both = serve(Requests((10, 60), (200, 2), (0.0, 0.5)), RULES, times)
    stall = both.finish_s[0] - alone.finish_s[0]
    assert stall > times.prefill_s([(60, 0)])
    mixed = serve(Requests((10, 60), (200, 2), (0.0, 0.5)), replace(RULES, mixes_prefill=True), times)
    assert mixed.decode_steps <= both.decode_steps


def test_more_accepted_tokens_mean_fewer_steps() -> None:
    requests = Requests((10,), (28,), None, 1)
    assert serve(requests, RULES).decode_steps == 27
    assert serve(requests, replace(RULES, tokens_per_step=2.7)).decode_steps == 10


def test_queueing_for_memory() -> None:
    requests = ClosedLoop(concurrency=6, prompt_tokens=50, output_tokens=50).drawn()
    wide = serve(requests, replace(RULES, capacity_tokens=2000))
    tight = serve(requests, replace(RULES, capacity_tokens=250, admission=CAUTIOUS))
    assert not wide.capacity_bound
    assert tight.capacity_bound
    assert tight.queued_s.mean() > 10 * wide.queued_s.mean()
    bold = serve(requests, replace(RULES, capacity_tokens=250))
    assert bold.retractions.sum() > 0


def test_closed_loop_keeps_its_clients() -> None:
    requests = ClosedLoop(concurrency=3, prompt_tokens=20, output_tokens=30, seed=1).drawn()
    served = serve(requests, RULES)
    assert len(served.arrival_s) == 30
    assert (served.arrival_s[:3] == 0).all()
    # Every later request comes the moment another one ends.
    assert set(served.arrival_s[3:]) <= set(served.finish_s)
    at = served.arrival_s[-1]
    assert ((served.arrival_s <= at) & (served.finish_s > at)).sum() == 3


def test_lengths_and_seed() -> None:
    load = ClosedLoop(concurrency=40, prompt_tokens=1000, output_tokens=10, least_share=0.8)
    requests = load.drawn()
    assert requests == load.drawn()
    assert requests != replace(load, seed=1).drawn()
    assert min(requests.prompt_tokens) >= 800
    assert max(requests.prompt_tokens) <= 1000
    assert set(requests.output_tokens) == {8, 9, 10}
    assert np.mean(requests.prompt_tokens) == pytest.approx(900, rel=0.02)


def test_arrivals_as_given() -> None:
    load = Arrivals(arrival_s=[3.0, 0.5], prompt_tokens=[5, 6], output_tokens=[2, 3])
    served = serve(load.drawn(), RULES)
    assert served.arrival_s.tolist() == [3.0, 0.5]
    assert served.finish_s[1] < 3.0 < served.first_token_s[0]
    assert math.isfinite(served.finish_s[0])


def test_an_idle_instance_sets_aside_as_at_first() -> None:
    own = replace(RULES, admission=OPTIMISTIC)
    instance = Instance(Requests((5, 5), (60, 2), (0.0, 50.0)), Affine(), own)
    instance.run()
    # 59 steps of the first request do not count, the one of the second does.
    assert instance.reserve == pytest.approx(0.75 - (0.75 - 0.125) / 64)
