"""Seconds of a call: the roofline by hand, the bound, measured overrides, and the rate of each number format."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff import cast
from castoff.casting.collective import collective_s
from castoff.casting.curves import parts_terms
from castoff.casting.price import (
    BOUNDS,
    CORES,
    LINKS,
    Measured,
    Price,
    Pricing,
    call_key,
    longest_term,
    price_block,
    price_call,
    price_program,
    shapes_text,
)
from castoff.dims import Dim
from castoff.errors import CastoffError
from castoff.ops.program import Op, OpCall, Program, Recorder
from castoff.ops.work import Collective, Part, Work
from castoff.spec.backend import Backend, CollectiveCost, Curve
from castoff.spec.device import Device, DeviceMemory, LinkTier
from castoff.spec.mesh import Group
from tests.casting.strategies import scenario
from tests.generators import ASCEND, device

TOY = replace(
    device(ASCEND),
    name="toy",
    matrix_flops_per_s={"fp32": 1e12, "bf16": 4e12, "fp16": 5e12, "int8": 8e12},
    vector_flops_per_s={"fp32": 1e11, "bf16": 2e11},
    memory=DeviceMemory(size_bytes=10**9, bandwidth_bytes_per_s=1e10, source="test"),
    tiers=(
        LinkTier(
            name="node",
            num_devices=8,
            bandwidth_bytes_per_s=1e9,
            latency_s=1e-6,
            topology="switch",
            source="test",
        ),
    ),
)

MATMUL = Curve(
    kind="roofline",
    launch_s=5e-6,
    compute_efficiency=0.5,
    vector_efficiency=0.4,
    memory_efficiency=0.8,
    gather_efficiency=0.1,
    origin="calibrated",
    source="test",
)
STACK = Backend(
    name="toy",
    description="toy",
    fusions=frozenset(),
    curves={"default": replace(MATMUL, origin="assumed", launch_s=7e-6), "matmul": MATMUL},
    collectives=CollectiveCost(launch_s=1e-5, link_efficiency=0.5, origin="analytic", source="test"),
    host_s_per_step={"prefill": 0.0, "decode": 0.0},
    host_origins={"prefill": "assumed", "decode": "assumed"},
    mtp_window="first",
    quantized_dispatch=False,
    unquantized=(),
    communication_buffer_bytes=0,
    sources={},
)
PRICING = Pricing(TOY, STACK)
GROUP = Group("tp", 4)


def call_of(work: Work, *, family: str = "matmul", shape: tuple[Dim, ...] = (4, 6), name: str = "toy") -> OpCall:
    """One call that has this work to do."""
    return program_of([work], family=family, shape=shape, name=name).blocks[0].calls[0]


def program_of(
    works: Sequence[Work], *, family: str = "matmul", shape: tuple[Dim, ...] = (4, 6), name: str = "toy"
) -> Program:
    recorder = Recorder()

    def body(*_: object) -> tuple[None, ...]:
        for work in works:
            op = Op(name, family, lambda x: (), lambda call, work=work: work)
            op(recorder.tensor(*shape))
        return ()

    recorder.block("block", "block", body)
    return recorder.program


def priced(work: Work, *, family: str = "matmul", pricing: Pricing = PRICING) -> Price:
    return price_call(call_of(work, family=family), pricing)


class TestRoofline:
    def test_terms_of_a_part(self) -> None:
        part = Part("all", 8e6, "bf16", vector_flops=2e6, bytes=3e3, gather_bytes=1e3, gather_rows=2)
        compute, vector, memory = parts_terms((part,), MATMUL, TOY)
        assert compute == pytest.approx(8e6 / (4e12 * 0.5), rel=1e-12)
        assert vector == pytest.approx(2e6 / (1e11 * 0.4), rel=1e-12)
        assert memory == pytest.approx(3e3 / (1e10 * 0.8) + 1e3 / (1e10 * 0.1), rel=1e-12)

    @pytest.mark.parametrize(
        ("part", "longest", "bound"),
        [
            (Part("p", 2e9, "bf16", vector_flops=1e6, bytes=1e3), 2e9 / 2e12, "compute"),
            (Part("p", 2e6, "bf16", vector_flops=4e9, bytes=1e3), 4e9 / 4e10, "vector"),
            (Part("p", 2e6, "bf16", vector_flops=1e6, bytes=8e9), 8e9 / 8e9, "memory"),
            (Part("p", 2e6, "bf16", bytes=8e3, gather_bytes=1e9), 8e3 / 8e9 + 1e9 / 1e9, "memory"),
            (Part("p", 2e6, "bf16", vector_flops=1e4, bytes=8e3), 1e-6, "launch"),
            (Part("p"), 0, "launch"),
        ],
    )
    def test_launch_and_the_longest_term(self, part: Part, longest: float, bound: str) -> None:
        price = priced(Work((part,)))
        assert price.seconds == pytest.approx(5e-6 + longest, rel=1e-12)
        assert BOUNDS[int(price.bound)] == bound
        assert price.terms[BOUNDS.index("launch")] == 5e-6
        assert price.units == (CORES,)
        assert price.origin == "calibrated"

    def test_parts_add_up_term_by_term(self) -> None:
        # One part is bound by compute, one by memory: they overlap inside the kernel, so the sums compete.
        a, b = Part("a", 2e9, "bf16", bytes=8e6), Part("b", 2e8, "bf16", bytes=8e5)
        assert parts_terms((a, b), MATMUL, TOY) == pytest.approx((2.2e9 / 2e12, 0, 8.8e6 / 8e9))
        price = priced(Work((a, b)))
        assert price.terms[:3] == pytest.approx((2.2e9 / 2e12, 0, 8.8e6 / 8e9))
        assert price.seconds == pytest.approx(5e-6 + 1.1e-3)

    def test_family_without_a_curve_of_its_own_takes_the_default(self) -> None:
        price = priced(Work((Part("p", bytes=8e9),)), family="norm")
        assert price.seconds == pytest.approx(7e-6 + 1)
        assert price.origin == "assumed"

    def test_phase_chooses_the_curve(self) -> None:
        slow = replace(MATMUL, gather_efficiency=0.01)
        stack = replace(STACK, curves={**STACK.curves, "sparse_attention_decode": slow})
        recorder = Recorder()
        op = Op("mla", "sparse_attention", lambda x, **_: (), lambda call: Work((Part("kv", gather_bytes=1e8),)))
        for phase in ("prefill", "decode"):
            recorder.block(phase, phase, lambda phase=phase: (*op(recorder.tensor(1), phase=phase),))
        prefill, decode = (price_block(block, Pricing(TOY, stack))[0] for block in recorder.program.blocks)
        assert prefill.seconds == pytest.approx(7e-6 + 0.1)
        assert decode.seconds == pytest.approx(5e-6 + 1)

    def test_one_value_per_scenario(self) -> None:
        flops, moved = np.array([2e9, 2e6, 0.0]), np.array([8.0, 8e9, 0.0])
        price = priced(Work((Part("p", flops, "bf16", bytes=moved),)))
        np.testing.assert_allclose(price.seconds, [5e-6 + 1e-3, 5e-6 + 1, 5e-6])
        assert [BOUNDS[index] for index in np.asarray(price.bound)] == ["compute", "memory", "launch"]


class TestNumberFormats:
    @pytest.mark.parametrize(("dtype", "rate"), [("fp32", 1e12), ("bf16", 4e12), ("fp16", 5e12), ("int8", 8e12)])
    def test_each_at_its_own_rate(self, dtype: str, rate: float) -> None:
        compute, _, _ = parts_terms((Part("p", 1e9, dtype),), MATMUL, TOY)
        assert compute == pytest.approx(1e9 / (rate * 0.5))

    def test_bf16_is_not_priced_at_the_fp16_rate(self) -> None:
        where = device(ASCEND)
        assert where.matrix_flops_per_s["bf16"] == 353.9e12
        bf16, fp16 = (parts_terms((Part("p", 1e12, dtype),), MATMUL, where)[0] for dtype in ("bf16", "fp16"))
        assert bf16 / fp16 == pytest.approx(376 / 353.9)

    def test_vector_work_runs_at_the_fp32_rate(self) -> None:
        _, vector, _ = parts_terms((Part("p", vector_flops=1e9),), MATMUL, TOY)
        assert vector == pytest.approx(1e9 / (1e11 * 0.4))

    def test_no_matrix_work_needs_no_rate(self) -> None:
        assert parts_terms((Part("p", 0, "fp4", bytes=8e9),), MATMUL, TOY) == (0, 0, 1)


class TestCollectives:
    def test_pure_collective_uses_the_links_alone(self) -> None:
        collective = Collective("all_reduce", 8e6, GROUP)
        price = priced(Work(collectives=(collective,)))
        # Three quarters of 8 MB, twice, at half of 1 GB/s.
        assert price.seconds == pytest.approx(1e-5 + 2 * (6e6 / 5e8 + 1e-6))
        assert price.units == (LINKS,)
        assert price.origin == "analytic"
        assert BOUNDS[int(price.bound)] == "communication"

    def test_small_collective_is_bound_by_its_launch(self) -> None:
        assert BOUNDS[int(priced(Work(collectives=(Collective("all_gather", 8, GROUP),))).bound)] == "launch"

    def test_fused_collective_overlaps_the_product(self) -> None:
        collective = Collective("all_reduce", 8e6, GROUP)
        alone = collective_s(collective, TOY, 0.5)
        small, large = Part("matmul", 2e6, "bf16"), Part("matmul", 2e12, "bf16")
        assert priced(Work((small,), (collective,))).seconds == pytest.approx(5e-6 + alone)
        both = priced(Work((large,), (collective,)))
        assert both.seconds == pytest.approx(5e-6 + 1)
        assert both.units == (CORES, LINKS)
        # The weaker of the curve's and the collectives' origin.
        assert both.origin == "analytic"

    def test_two_collectives_follow_each_other(self) -> None:
        one = Collective("all_to_all", 8e6, GROUP)
        assert priced(Work(collectives=(one, one))).seconds == pytest.approx(1e-5 + 2 * (6e6 / 5e8 + 1e-6))


class TestMeasured:
    work = Work((Part("p", 2e9, "bf16", bytes=8e3),))

    def test_replaces_the_curve_where_name_and_shapes_match(self) -> None:
        call = call_of(self.work)
        measured = Measured({call_key(call): 1.5e-3})
        price = price_call(call, replace(PRICING, measured=measured))
        assert price.seconds == 1.5e-3
        assert price.origin == "measured"
        # The terms are still those of the roofline, so that a report can say what bounds the op.
        assert price.terms == price_call(call, PRICING).terms

    @pytest.mark.parametrize("key", [("toy", "[4, 7]", "bf16"), ("other", "[4, 6]", "bf16"), ("toy", "[4, 6]", "int8")])
    def test_leaves_others_alone(self, key: tuple[str, str, str]) -> None:
        call = call_of(self.work)
        assert price_call(call, replace(PRICING, measured=Measured({key: 1.0}))) == price_call(call, PRICING)

    def test_no_measurement_for_an_array_of_scenarios(self) -> None:
        call = call_of(self.work, shape=(np.array([4.0]), 6))
        price = price_call(call, replace(PRICING, measured=Measured({("toy", "[4, 6]", "bf16"): 1.0})))
        assert price.origin == "calibrated"

    def test_shapes(self) -> None:
        assert shapes_text(call_of(self.work, shape=(4096, 6144))) == "[4096, 6144]"
        assert shapes_text(call_of(self.work, shape=(2.0, 1 / 3))) == "[2, 0.3333333333]"


def test_program_is_priced_once_per_block() -> None:
    works = [Work((Part("p", 2e9, "bf16"),)), Work(collectives=(Collective("all_gather", 8e6, GROUP),))]
    program = program_of(works)
    prices = price_program(program, PRICING)
    assert list(prices) == program.blocks
    assert [price.seconds for price in prices[program.blocks[0]]] == [priced(work).seconds for work in works]


terms = st.lists(st.sampled_from([0.0, 1e-6, 2e-6, 3.0]), min_size=5, max_size=5)


@pytest.mark.property
@given(terms)
def test_longest_term_is_argmax(values: list[float]) -> None:
    assert longest_term(values) == np.argmax(values)


@pytest.mark.property
@given(st.lists(terms, min_size=1, max_size=6), st.lists(st.booleans(), min_size=5, max_size=5))
def test_longest_term_is_argmax_per_scenario(rows: list[list[float]], constant: list[bool]) -> None:
    # Any term may be one number for all scenarios.
    table = np.array(rows).T
    values: list[Dim] = [row[0].item() if same else row for row, same in zip(table, constant, strict=True)]
    expected = np.argmax(np.broadcast_arrays(*values), axis=0)
    np.testing.assert_array_equal(np.broadcast_to(longest_term(values), expected.shape), expected)


@pytest.mark.property
@given(
    part=st.builds(
        Part,
        st.just("p"),
        st.floats(0, 1e15),
        st.sampled_from(["fp32", "bf16", "fp16", "int8"]),
        vector_flops=st.floats(0, 1e14),
        bytes=st.floats(0, 1e12),
        gather_bytes=st.floats(0, 1e12),
    ),
    message=st.floats(0, 1e12) | st.none(),
)
def test_never_shorter_than_any_of_its_parts(part: Part, message: float | None) -> None:
    collectives = () if message is None else (Collective("all_to_all", message, GROUP),)
    price = priced(Work((part,), collectives))
    assert price.seconds == pytest.approx(price.terms[-1] + max(price.terms[:-1]), rel=1e-12)
    assert price.bound == np.argmax(price.terms)


@pytest.mark.parametrize("missing", ["fp32", "bf16"])
def test_a_device_without_a_rate_that_the_model_needs_is_refused(missing: str) -> None:
    rates = {dtype: rate for dtype, rate in device(ASCEND).matrix_flops_per_s.items() if dtype != missing}
    where: Device = replace(device(ASCEND), matrix_flops_per_s=rates)
    with pytest.raises(CastoffError, match=missing):
        cast("zai-org/GLM-5.2", where, scenario(num_devices=16, tp_size=16))
