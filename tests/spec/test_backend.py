"""Backend files: inheritance of curves, the shipped constants, and every fault a sentence."""

from pathlib import Path

import pytest

from castoff.errors import CastoffError
from castoff.spec.backend import (
    FAMILIES,
    FUSIONS,
    MODES,
    ORIGINS,
    Backend,
    Origin,
    load_backend,
    shipped_backends,
    weakest,
)
from castoff.spec.device import load_device, shipped_devices

GOOD = """\
name = "toy"
description = "a toy"

[stack]
fusions = ["norm_quant"]
mtp_window = "first"
quantized_dispatch = false
unquantized = ["q_a_proj"]
communication_buffer_bytes = 0
source = "us"

[host_s_per_step]
prefill = 1e-3
decode = 0
origin = "measured"
source = "us"

[collectives]
launch_s = 1e-5
link_efficiency = 0.7
origin = "analytic"
source = "us"

[curves.default]
kind = "roofline"
launch_s = 5e-6
compute_efficiency = 0.7
vector_efficiency = 0.6
memory_efficiency = 0.5
gather_efficiency = 0.4
origin = "assumed"
source = "us"

[curves.norm]
launch_s = 2e-6
origin = "calibrated"
source = "a fit"
"""


def load_text(folder: Path, text: str) -> Backend:
    path = folder / "toy.toml"
    path.write_text(text)
    return load_backend(str(path))


def test_what_is_shipped() -> None:
    assert shipped_backends() == ("ascend", "cann-ge", "cann-npugraph_ex", "castoff", "nvidia", "sglang", "vllm")


@pytest.mark.parametrize("name", shipped_backends())
def test_shipped_backend_is_complete(name: str) -> None:
    backend = load_backend(name)
    assert backend.name == name
    assert backend.fusions <= FUSIONS
    assert set(backend.host_s_per_step) == set(MODES)
    assert {"stack", "host_s_per_step", "collectives", "curves.default"} <= set(backend.sources)
    assert all(backend.sources.values())
    # Nothing is measured, and only CANN's graphs are fitted.
    fitted = {"calibrated"} if name.startswith("cann-") else set()
    assert {curve.origin for curve in backend.curves.values()} == {"assumed"} | fitted
    assert backend.collectives.origin == ("calibrated" if fitted else "assumed")
    assert set(backend.host_origins.values()) == {"assumed"}
    # Microseconds, not seconds.
    assert all(1e-7 < backend.curve(family).launch_s < 1e-4 for family in FAMILIES)
    assert 1e-7 < backend.collectives.launch_s < 1e-4


@pytest.mark.parametrize("name", shipped_devices())
def test_every_device_has_its_backend(name: str) -> None:
    assert load_device(name).default_backend in shipped_backends()


VECTOR_FAMILIES = {"norm", "elementwise", "moe_routing", "embedding", "sampling"}


@pytest.mark.parametrize(("name", "matrix_s"), [("ascend", 5e-6), ("nvidia", 3e-6)])
def test_vector_families_launch_faster(name: str, matrix_s: float) -> None:
    backend = load_backend(name)
    for family in FAMILIES:
        assert backend.curve(family).launch_s == (2e-6 if family in VECTOR_FAMILIES else matrix_s)


def test_ascend() -> None:
    backend = load_backend("ascend")
    default = backend.curves["default"]
    assert (default.compute_efficiency, default.memory_efficiency) == (0.7, 0.6)
    assert (backend.collectives.launch_s, backend.collectives.link_efficiency) == (10e-6, 0.7)
    assert backend.curve("sparse_attention_decode").gather_efficiency == 0.08
    assert backend.curve("sparse_attention_prefill").gather_efficiency == 0.92
    assert backend.fusions == FUSIONS
    assert backend.mtp_window == "every"
    assert backend.unquantized == ()


def test_nvidia() -> None:
    backend = load_backend("nvidia")
    assert backend.curves["default"].memory_efficiency == 0.8
    assert backend.curve("sparse_attention_decode").gather_efficiency == 0.6
    assert backend.fusions == FUSIONS - {"matmul_all_reduce", "dispatch_ffn_combine"}
    assert backend.mtp_window == "first"


def test_a_family_inherits_what_it_does_not_give(tmp_path: Path) -> None:
    backend = load_text(tmp_path, GOOD)
    norm = backend.curve("norm")
    default = backend.curves["default"]
    assert (norm.launch_s, norm.origin, norm.source) == (2e-6, "calibrated", "a fit")
    assert norm.kind == "roofline"
    assert norm.memory_efficiency == default.memory_efficiency == 0.5
    assert backend.curve("matmul") is default
    assert backend.host_s_per_step == {"prefill": 1e-3, "decode": 0.0}
    assert backend.sources["curves.norm"] == "a fit"
    assert hash(backend) == hash(load_text(tmp_path, GOOD))


def test_curve_of_no_family(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="'matmull' is not an op family"):
        load_text(tmp_path, GOOD).curve("matmull")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            'kind = "roofline"',
            'kind = "rooflin"',
            r"curves.default.kind must be one of roofline, got 'rooflin' \(did you",
        ),
        ("launch_s = 2e-6", 'kind = "table"\nrows = 3', "curves.norm.kind must be one of roofline, got 'table'"),
        ('kind = "roofline"\n', "", "curves.default.kind is missing"),
        ("[curves.norm]", "[curves.norms]", r"unknown key 'norms' in \[curves\] \(did you mean 'norm'\?"),
        ("[curves.default]", "[curves.matmul]", "curves.default is missing"),
        ("launch_s = 2e-6", "lanch_s = 2e-6", r"unknown key 'lanch_s' in \[curves.norm\] \(did you mean 'launch_s'"),
        ("launch_s = 2e-6", "launch_s = nan", "curves.norm.launch_s must be a number of at least 0, got nan"),
        ("launch_s = 5e-6", "launch_s = -5e-6", "curves.default.launch_s must be a number of at least 0, got -5e-06"),
        ('source = "a fit"\n', "", "curves.norm.source is missing"),
        ('origin = "calibrated"\n', "", "curves.norm.origin is missing"),
        ('"calibrated"', '"fitted"', "curves.norm.origin must be one of measured, calibrated, analytic, assumed"),
        ("memory_efficiency = 0.5\n", "", "curves.default.memory_efficiency is missing"),
        ("memory_efficiency = 0.5", "memory_efficiency = 1.5", "memory_efficiency must be a fraction .*, got 1.5"),
        ("link_efficiency = 0.7", "link_efficiency = 0.0", "collectives.link_efficiency must be a fraction"),
        (
            '["norm_quant"]',
            '["norm_quant", "norm_qant"]',
            r"stack.fusions must be one of .* \(did you mean 'norm_quant'",
        ),
        ('["norm_quant"]', '"norm_quant"', "stack.fusions must be a list of strings, got 'norm_quant'"),
        ('["q_a_proj"]', "[1]", "stack.unquantized must be a list of non-empty strings, but holds 1"),
        ('mtp_window = "first"', 'mtp_window = "last"', "stack.mtp_window must be one of first, every, got 'last'"),
        ("communication_buffer_bytes = 0", "communication_buffer_bytes = -1", "whole number of at least 0"),
        ("decode = 0", "decode = inf", "host_s_per_step.decode must be a number of at least 0, got inf"),
        ("decode = 0\n", "", "host_s_per_step.decode is missing"),
        ("[stack]", "[stak]", r"unknown key 'stak' in the top level \(did you mean 'stack'"),
        ("[collectives]", "[collectives", "not valid TOML: .*at line 18"),
    ],
)
def test_faults_name_file_key_and_allowed(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(CastoffError, match=says) as caught:
        load_text(tmp_path, GOOD.replace(old, new))
    assert str(tmp_path / "toy.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(
        CastoffError,
        match=r"unknown backend 'ascent' \(did you mean 'ascend'.*known: ascend, cann-ge, cann-npugraph_ex, castoff",
    ):
        load_backend("ascent")


@pytest.mark.parametrize(
    ("origins", "expected"),
    [
        ([], "measured"),
        (["measured"], "measured"),
        (["calibrated", "measured"], "calibrated"),
        (["analytic", "measured", "calibrated"], "analytic"),
        (["measured", "assumed", "analytic"], "assumed"),
    ],
)
def test_weakest(origins: list[Origin], expected: Origin) -> None:
    assert weakest(origins) == expected
    assert weakest(iter(reversed(origins))) == expected


def test_weakest_of_all_is_last() -> None:
    assert weakest(ORIGINS) == ORIGINS[-1] == "assumed"
