"""What every op keeps to: its results have the shapes and dtypes that a cast records, as torch.library ops too."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from castoff.ops import (  # noqa: E402
    library,
    table,
)
from castoff.ops.program import call_registered, dtype_name  # noqa: E402
from tests.ops.cases import (  # noqa: E402
    CASES,
    abstract_results,
    as_dtype,
    name_of,
    real_results,
)


def test_every_reference_has_a_case() -> None:
    """Collectives aside, which take several processes: see tests/runtime/test_distributed.py."""
    covered = {id(build().op) for build in CASES.values()}
    own = [op for op in table.OPS if op.reference is not None and op.family != "collective"]
    assert [op.name for op in own if id(op) not in covered] == []


@pytest.mark.parametrize("name", CASES)
def test_real_shapes_are_the_abstract_ones(name: str) -> None:
    case = CASES[name]()
    assert [tuple(value.shape) for value in real_results(case)] == [shape for shape, _ in abstract_results(case)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_registered_ops_compute_the_same_and_their_fakes_have_the_same_shapes(name: str, dtype: Any) -> None:
    """As `torch.ops.castoff.…`, on real tensors and on torch's fake ones; what a call writes is written."""
    library.register()
    case = CASES[name]()
    inputs = as_dtype(case.inputs, dtype)
    attributes = {**case.attributes, **({"dtype": name_of(dtype)} if "dtype" in case.attributes else {})}
    # Only casts are given these.
    attributes |= {key: None for key in ("lengths", "touched") if key in attributes}
    case = replace(case, inputs=inputs, attributes=attributes)
    copies = tuple(None if value is None else value.clone() for value in inputs)
    real = real_results(case)
    registered = call_registered(case.op, copies, attributes)
    assert len(real) == len(registered)
    for own, other in zip(real, registered, strict=True):
        assert torch.equal(own, other)
    for own, copy in zip(inputs, copies, strict=True):
        if own is not None:
            assert torch.equal(own, copy)
    with FakeTensorMode() as mode:
        fakes = tuple(None if value is None else mode.from_tensor(value) for value in inputs)
        fake = call_registered(case.op, fakes, attributes)
    assert [(tuple(value.shape), value.dtype) for value in fake] == [
        (tuple(value.shape), value.dtype) for value in real
    ]


@pytest.mark.parametrize("name", CASES)
def test_narrow_values_are_where_the_abstract_results_say(name: str) -> None:
    case = CASES[name]()
    narrow = {"int32", "int8", "fp8"}
    real = [dtype_name(value) if dtype_name(value) in narrow else "float" for value in real_results(case)]
    assert real == [dtype if dtype in narrow else "float" for _, dtype in abstract_results(case)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_have_the_dtype_of_the_inputs(name: str, dtype: Any) -> None:
    """Whatever the width, save router weights and scales, which are never narrower than fp32."""
    case = CASES[name]()
    inputs = as_dtype(case.inputs, dtype)
    attributes = {**case.attributes, **({"dtype": name_of(dtype)} if "dtype" in case.attributes else {})}
    for value, (_, abstract) in zip(
        real_results(replace(case, inputs=inputs, attributes=attributes)), abstract_results(case), strict=True
    ):
        if value.dtype.is_floating_point and value.itemsize > 1:
            assert value.dtype == (torch.promote_types(dtype, torch.float32) if abstract == "fp32" else dtype)
            assert torch.isfinite(value).all()


@pytest.mark.parametrize("name", CASES)
def test_inputs_are_left_as_they_are(name: str) -> None:
    """Caches aside, which mlapo and the indexer write."""
    case = CASES[name]()
    before = [None if value is None else value.clone() for value in case.inputs]
    real_results(case)
    pairs = list(zip(case.inputs, before, strict=True))
    changed = {index for index, (value, copy) in enumerate(pairs) if value is not None and not torch.equal(value, copy)}
    assert changed <= set(case.op.mutates)
    assert changed or not case.op.mutates
