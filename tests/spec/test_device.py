"""Device files: the shipped figures in SI units, and every fault a sentence."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.errors import CastoffError
from castoff.spec.device import MATRIX_DTYPES, Device, load_device, shipped_devices

GIB = 2**30
TIB = 2**40

GOOD = """\
name = "toy"
vendor = "nvidia"
description = "a toy"
default_backend = "nvidia"

[matrix_flops_per_s]
bf16 = 1e15
source = "us"

[vector_flops_per_s]
fp32 = 1e13
bf16 = 2e13
source = "us"

[memory]
size_bytes = 1_000
bandwidth_bytes_per_s = 2000
source = "us"

[[tiers]]
name = "node"
num_devices = 8
bandwidth_bytes_per_s = 4e11
latency_s = 1e-6
topology = "switch"
source = "us"

[[tiers]]
name = "cluster"
num_devices = 64
bandwidth_bytes_per_s = 5e10
latency_s = 5e-6
topology = "full_mesh"
source = "us"

[host_link]
to_device_bytes_per_s = 5e10
to_host_bytes_per_s = 4e10
latency_s = 0
row_efficiency = 0.5
devices_per_link = 2
host_memory_bytes = 1_000_000
devices_per_host = 8
origin = "assumed"
source = "us"
"""


def load_text(folder: Path, text: str) -> Device:
    path = folder / "toy.toml"
    path.write_text(text)
    return load_device(str(path))


def test_what_is_shipped() -> None:
    assert shipped_devices() == (
        "ATLAS_350_425T_112G",
        "ATLAS_350_425T_84G",
        "ATLAS_800_A2_280T_64G",
        "ATLAS_800_A2_313T_64G",
        "ATLAS_800_A2_376T_64G",
        "ATLAS_800_A3_560T_128G_DIE",
        "ATLAS_800_A3_752T_128G_DIE",
        "b200_sxm",
        "h100_sxm",
        "h200_sxm",
    )


@pytest.mark.parametrize("name", shipped_devices())
def test_shipped_device_is_complete_and_plausible(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert set(device.sources) == {
        "matrix_flops_per_s",
        "vector_flops_per_s",
        "memory",
        *(f"tiers.{tier.name}" for tier in device.tiers),
        "host_link",
    }
    assert all(device.sources.values())
    assert device.host_link.source
    assert device.host_link.origin == "assumed"
    assert set(device.matrix_flops_per_s) <= set(MATRIX_DTYPES)
    # A figure entered in TFLOP/s, GB/s, GiB or µs would fall far outside these.
    assert all(1e13 < peak < 1e17 for peak in device.matrix_flops_per_s.values())
    assert all(1e12 < peak < 1e15 for peak in device.vector_flops_per_s.values())
    assert 32 * GIB < device.memory.size_bytes < 1024 * GIB
    assert 1e12 < device.memory.bandwidth_bytes_per_s < 2e13
    assert all(1e10 < tier.bandwidth_bytes_per_s < 2e12 for tier in device.tiers)
    assert all(1e-8 < tier.latency_s < 1e-4 for tier in device.tiers)
    assert 1e10 < device.host_link.to_device_bytes_per_s < 1e12
    assert device.host_link.host_memory_bytes > 1e11
    assert device.max_devices == device.tiers[-1].num_devices


@pytest.mark.parametrize("name", shipped_devices())
def test_fewer_bits_are_never_slower(name: str) -> None:
    peaks = load_device(name).matrix_flops_per_s
    order = [peaks[dtype] for dtype in ("fp32", "bf16", "fp16", "int8") if dtype in peaks]
    assert order == sorted(order)
    assert peaks.get("fp4", peaks["int8"]) >= peaks["int8"]


def test_a3_die() -> None:
    device = load_device("ATLAS_800_A3_752T_128G_DIE")
    assert device.vendor == "ascend"
    assert device.default_backend == "ascend"
    assert device.matrix_flops_per_s == {"fp32": 99.5e12, "bf16": 353.9e12, "fp16": 376e12, "int8": 752e12}
    assert device.vector_flops_per_s == {"fp32": 11e12, "bf16": 22e12}
    assert device.memory.size_bytes == 64 * GIB
    assert device.memory.bandwidth_bytes_per_s == 1.6 * TIB
    assert [(tier.num_devices, tier.bandwidth_bytes_per_s, tier.latency_s) for tier in device.tiers] == [
        (2, 224e9, 0.2e-6),
        (16, 196e9, 0.5e-6),
        (768, 196e9, 5.5e-6),
    ]
    assert not device.supports("fp8")
    assert device.supports("int8")
    assert device.max_devices == 768


@pytest.mark.parametrize(
    ("name", "bf16", "int8", "vector_bf16"),
    [
        ("ATLAS_800_A3_560T_128G_DIE", 245.8e12, 560e12, 16e12),
        ("ATLAS_800_A2_376T_64G", 353.9e12, 752e12, 22e12),
        ("ATLAS_800_A2_313T_64G", 294.9e12, 626e12, 18e12),
        ("ATLAS_800_A2_280T_64G", 245.8e12, 560e12, 16e12),
    ],
)
def test_other_atlas_800(name: str, bf16: float, int8: float, vector_bf16: float) -> None:
    device = load_device(name)
    assert device.matrix_flops_per_s["bf16"] == bf16
    assert device.matrix_flops_per_s["int8"] == int8
    assert device.vector_flops_per_s["bf16"] == vector_bf16
    assert device.memory.size_bytes == 64 * GIB
    assert device.memory.bandwidth_bytes_per_s == 1.6 * TIB


@pytest.mark.parametrize("gib", [112, 84])
def test_atlas_350(gib: int) -> None:
    device = load_device(f"ATLAS_350_425T_{gib}G")
    assert device.matrix_flops_per_s["fp4"] == 1512e12
    assert device.memory.size_bytes == gib * GIB
    assert device.memory.bandwidth_bytes_per_s == 1.4 * TIB
    assert device.tiers[0].topology == "full_mesh"
    assert device.tiers[0].num_devices == 4
    assert device.host_link.devices_per_link == 2


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "gib", "bandwidth", "nvlink"),
    [
        ("h100_sxm", 989e12, 1979e12, 80, 3.35e12, 450e9),
        ("h200_sxm", 989e12, 1979e12, 141, 4.8e12, 450e9),
        ("b200_sxm", 2250e12, 4500e12, 180, 8e12, 900e9),
    ],
)
def test_nvidia(name: str, bf16: float, fp8: float, gib: int, bandwidth: float, nvlink: float) -> None:
    device = load_device(name)
    assert device.matrix_flops_per_s["bf16"] == device.matrix_flops_per_s["fp16"] == bf16
    assert device.matrix_flops_per_s["fp8"] == device.matrix_flops_per_s["int8"] == fp8
    assert device.supports("fp4") == (name == "b200_sxm")
    assert device.memory.size_bytes == gib * GIB
    assert device.memory.bandwidth_bytes_per_s == bandwidth
    assert [tier.bandwidth_bytes_per_s for tier in device.tiers] == [nvlink, 50e9]
    assert device.host_link.to_device_bytes_per_s == 55e9


def test_own_file(tmp_path: Path) -> None:
    device = load_text(tmp_path, GOOD)
    assert device.memory.bandwidth_bytes_per_s == 2000.0
    assert isinstance(device.memory.bandwidth_bytes_per_s, float)
    assert device.host_link.latency_s == 0
    assert device.max_devices == 64
    assert hash(device) == hash(load_text(tmp_path, GOOD))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("size_bytes = 1_000", "size_bites = 1_000", r"'size_bites' in \[memory\] \(did you mean 'size_bytes'\?"),
        ('vendor = "nvidia"', 'vender = "nvidia"', r"'vender' in the top level \(did you mean 'vendor'\?"),
        ("bf16 = 1e15", "bf61 = 1e15", r"'bf61' in \[matrix_flops_per_s\] \(did you mean 'bf16'"),
        ("bf16 = 1e15\n", "", "matrix_flops_per_s must give at least one of fp32, bf16"),
        ("bf16 = 2e13\n", "", "vector_flops_per_s.bf16 is missing"),
        ("size_bytes = 1_000\n", "", "memory.size_bytes is missing"),
        ('source = "us"', 'source = " "', "source must be a non-empty string"),
        ('name = "toy"', "name = 3", "name must be a non-empty string, got 3"),
        (
            'vendor = "nvidia"',
            'vendor = "nvidea"',
            r"one of ascend, nvidia, cpu, got 'nvidea' \(did you mean 'nvidia'\?",
        ),
        ('topology = "full_mesh"', "topology = true", r"tiers\[1\].topology must be one of .*, got true"),
        ('origin = "assumed"', 'origin = "guess"', "host_link.origin must be one of"),
        ("size_bytes = 1_000", 'size_bytes = "64 GiB"', "memory.size_bytes must be a whole number of at least 1"),
        ("size_bytes = 1_000", "size_bytes = 1e3", "memory.size_bytes must be a whole number .*, got 1000"),
        ("size_bytes = 1_000", "size_bytes = true", "memory.size_bytes must be a whole number .*, got true"),
        ("size_bytes = 1_000", "size_bytes = 0", "memory.size_bytes must be a whole number of at least 1.*, got 0"),
        ("size_bytes = 1_000", f"size_bytes = {2**63}", "fits in 64 bits"),
        ("bf16 = 1e15", "bf16 = -1e15", r"matrix_flops_per_s.bf16 must be a number greater than 0, got -1e\+15"),
        ("bf16 = 1e15", "bf16 = 0", "greater than 0, got 0"),
        ("bf16 = 1e15", "bf16 = nan", "greater than 0, got nan"),
        ("bf16 = 1e15", "bf16 = inf", "greater than 0, got inf"),
        ("bf16 = 1e15", "bf16 = 1" + "0" * 400, "greater than 0, got inf"),
        ("bf16 = 1e15", "bf16 = false", "greater than 0, got false"),
        ("bf16 = 1e15", "bf16 = 2026-08-01", "greater than 0, got 2026-08-01"),
        ("latency_s = 0", "latency_s = -1e-6", "host_link.latency_s must be a number of at least 0, got -1e-06"),
        ("row_efficiency = 0.5", "row_efficiency = 1.01", "host_link.row_efficiency must be a fraction .* at most 1"),
        ("row_efficiency = 0.5", "row_efficiency = 0", "host_link.row_efficiency must be a fraction greater than 0"),
        ("num_devices = 64", "num_devices = 8", r"tiers\[1\].num_devices must be a multiple of the 8 .* got 8"),
        ("num_devices = 64", "num_devices = 4", r"tiers\[1\].num_devices must be a multiple of the 8 .* got 4"),
        ("num_devices = 64", "num_devices = 20", r"tiers\[1\].num_devices must be a multiple of the 8 .* got 20"),
        ("num_devices = 8", "num_devices = 1", r"tiers\[0\].num_devices must be a whole number of at least 2"),
        ('name = "cluster"', 'name = "node"', r"tiers\[1\].name must differ .* 'node' twice"),
        ("[[tiers]]", "[[tears]]", r"unknown key 'tears' in the top level \(did you mean 'tiers'"),
        ("[memory]", "[[memory]]", "memory must be a table, got a list"),
        ('name = "toy"', 'name = "toy"\ntiers = []', "not valid TOML: .*at line 21"),
        ('name = "toy"', 'name = "toy', r"not valid TOML: .*at line 1"),
    ],
)
def test_faults_name_file_key_and_allowed(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(CastoffError, match=says) as caught:
        load_text(tmp_path, GOOD.replace(old, new))
    assert str(tmp_path / "toy.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_tiers(tmp_path: Path) -> None:
    head, _, rest = GOOD.partition("[[tiers]]")
    text = "tiers = []\n" + head + "[host_link]" + rest.partition("[host_link]")[2]
    with pytest.raises(CastoffError, match=r"tiers must be one or more tables, .* got an empty list"):
        load_text(tmp_path, text)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"a = " + b"[" * 20_000, "not valid TOML"),
        (b"a = " + b"9" * 5_000, "not valid TOML"),
        (b"a = 2026-13-45", "not valid TOML"),
        (b"a = 1\na = 2\n", "not valid TOML: .*at line 2"),
        (b"", "is missing"),
    ],
)
def test_unreadable_content(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "toy.toml"
    path.write_bytes(content)
    with pytest.raises(CastoffError, match=says):
        load_device(str(path))


@pytest.mark.property
@given(start=st.integers(0, len(GOOD)), length=st.integers(0, 40), patch=st.binary(max_size=20))
def test_a_damaged_file_raises_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, start: int, length: int, patch: bytes
) -> None:
    content = GOOD.encode()
    path = tmp_path_factory.getbasetemp() / "damaged.toml"
    path.write_bytes(content[:start] + patch + content[start + length :])
    with suppress(CastoffError):
        load_device(str(path))


@pytest.mark.parametrize("name", ["missing.toml", "no/such/device", "bad\0name.toml"])
def test_unreadable_path(name: str) -> None:
    with pytest.raises(CastoffError, match=r"cannot read|not valid"):
        load_device(name)


def test_a_folder_is_not_a_device(tmp_path: Path) -> None:
    with pytest.raises(CastoffError, match="cannot read this file: Is a directory"):
        load_device(f"{tmp_path}/")


@pytest.mark.parametrize(
    ("asked", "near"),
    [("h20_sxm", "h200_sxm"), ("H200_SXM", "h200_sxm"), ("ATLAS_800_A3_752T_128G", "ATLAS_800_A3_752T_128G_DIE")],
)
def test_unknown_name_gives_the_nearest(asked: str, near: str) -> None:
    with pytest.raises(CastoffError, match=rf"unknown device '{asked}' \(did you mean .*'{near}'") as caught:
        load_device(asked)
    assert "castoff devices" in str(caught.value)


def test_unknown_name_with_nothing_near() -> None:
    with pytest.raises(CastoffError, match="unknown device 'zzz'; known: ATLAS_350"):
        load_device("zzz")
