"""Fits of whole ops: what they are asked, and that they go before everything but a measured time."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import castoff
from castoff.casting.forms.amounts import AMOUNTS
from castoff.casting.price import Measured, Pricing, call_key, price_call
from castoff.casting.whole_op import as_kernel, curve_of
from castoff.ops.linear import Weight, linear
from castoff.ops.program import OpCall, Recorder
from castoff.spec.backend import load_backend
from castoff.spec.fits import Fit
from castoff.spec.scenario import Scenario, Workload
from tests.generators import NVIDIA, device

COEFFICIENTS = {**AMOUNTS.start, "launch_s": 1e-3, "s_per_matrix_flop": 1e-9, "s_per_byte": 0.0}
FIT = Fit(
    form="amounts", coefficients=COEFFICIENTS, features={}, correction=None, ranges={"tokens": (1, 64)}, rows=2,
    median_abs_error=0, p90_abs_error=0, origin="calibrated", source="a test",
)  # fmt: skip


def product(tokens: float | np.ndarray = 4) -> OpCall:
    recorder = Recorder()

    def body() -> tuple[()]:
        linear(recorder.tensor(tokens, 32), Weight(recorder.tensor(16, 32, kind="weight")))
        return ()

    recorder.block("one", "one", body)
    (call,) = recorder.program.blocks[0].calls
    return call


def pricing(**fits: Fit) -> Pricing:
    return Pricing(device(NVIDIA), replace(load_backend("castoff"), fits=fits))


def test_sizes() -> None:
    kernel = as_kernel(product())
    assert kernel.sizes.keys() == set(AMOUNTS.sizes)
    assert (kernel.curve, kernel.parts) == ("op_linear", ("matmul",))
    assert kernel.sizes["matrix_flops"] == 2 * 4 * 16 * 32
    assert kernel.sizes["bytes"] == 2 * (4 * 32 + 16 * 32 + 4 * 16)
    assert kernel.sizes["flops_per_token"] == 2 * 16 * 32


def test_goes_before_fits_of_kernels() -> None:
    seconds = 1e-3 + 2 * 4 * 16 * 32 * 1e-9
    price = price_call(product(), pricing(op_linear=FIT, matmul_bf16=replace(FIT, form="matmul")))
    assert price.seconds == pytest.approx(seconds)
    assert (price.origin, price.units, price.extrapolated) == ("calibrated", ("cores",), False)


def test_leaves_other_ops_alone() -> None:
    assert price_call(product(), pricing(op_swiglu=FIT)) == price_call(product(), pricing())


def test_beyond_its_ranges_it_is_marked() -> None:
    price = price_call(product(np.array([4.0, 128.0])), pricing(op_linear=FIT))
    assert np.array_equal(price.extrapolated, [False, True])
    assert price.origin == "analytic"


def test_a_measured_time_goes_before_it() -> None:
    call = product()
    measured = Measured({call_key(call): 7.0})
    assert price_call(call, replace(pricing(op_linear=FIT), measured=measured)).seconds == 7.0


def test_names() -> None:
    assert curve_of("linear") == "op_linear"


def test_a_whole_op_beyond_its_range_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    sizes = ("matrix_flops", "vector_flops", "bytes", "gather_bytes", "tokens", "flops_per_token")
    ranges = ", ".join(f"{name} = [0, {2 if name == 'tokens' else 1e30}]" for name in sizes)
    coefficients = ", ".join(f"{name} = 1e-12" for name in AMOUNTS.start)
    path.write_text(
        'name = "mine"\ndescription = "x"\nextends = "castoff"\ndevice = "h200_sxm"\n'
        '[fits.op_linear]\nform = "amounts"\n'
        f"coefficients = {{ {coefficients} }}\nranges = {{ {ranges} }}\nrows = 1\nmedian_abs_error = 0\n"
        'p90_abs_error = 0\norigin = "calibrated"\nsource = "x"\n'
    )
    step = Scenario(workload=Workload(num_queries=64, context_length=100, decode=True), backend=str(path))
    notes = castoff.cast("zai-org/GLM-5.2", "h200_sxm", step).notes
    assert any("of op_linear tokens=64" in note for note in notes)
