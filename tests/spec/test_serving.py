"""`[serving]` of backend files: what is read, what is inherited, and every fault a sentence."""

from pathlib import Path

import pytest

from castoff.errors import CastoffError
from castoff.spec.backend import Backend, load_backend, shipped_backends
from castoff.spec.serving import ServingCost

SERVING = """\
name = "toy"
description = "a toy"
extends = "nvidia"

[serving]
memory_fraction = 0.9
graph_batches = [1, 2, 4]
page_tokens = 64
max_running_requests = 16
mixes_prefill = false
chunk_per_rank = false
host_prefill_stall_share = 0.5
prefill_factor = 1.2
expert_load_alpha = 0
origin = "assumed"
source = "us"

[serving.admission]
reserve_start = 0.7
reserve_least = 0.1
reserve_decay_steps = 600
reserve_ranks_factor = 1
clip_tokens = 4096
retraction_steps = 20
retracted_first = false
source = "us"

[serving.systems.default]
host_s_per_decode_step = 1e-3
host_s_per_prefill = 0.1
prefill_floor_s_per_layer = 1e-3
prefill_chunk_tokens = 8192
kv_action = "DISABLED"
origin = "measured"
source = "us"
"""


def load_text(folder: Path, text: str) -> Backend:
    path = folder / "toy.toml"
    path.write_text(text)
    return load_backend(str(path))


def serving(backend: Backend) -> ServingCost:
    assert backend.serving is not None
    return backend.serving


def test_what_is_shipped() -> None:
    known = {name for name in shipped_backends() if load_backend(name).serving is not None}
    assert known == {"cann-ge", "cann-npugraph_ex", "sglang", "vllm"}


@pytest.mark.parametrize("name", ["vllm", "cann-ge"])
def test_hosts_that_nobody_measured_are_sglangs(name: str) -> None:
    theirs, ours = (serving(load_backend(backend)).system("default") for backend in ("sglang", name))
    assert ours.host_s_per_prefill == theirs.host_s_per_prefill
    assert ours.host_s_per_decode_step in (0.0, theirs.host_s_per_decode_step)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_shipped_figures_are_plausible(name: str) -> None:
    own = serving(load_backend(name))
    assert 0.5 < own.memory_fraction < 1
    assert own.graph_batches[-1] == 512
    for system in own.systems.values():
        # Milliseconds, not seconds.
        assert 1e-4 <= system.host_s_per_decode_step <= 20e-3
        assert 10e-3 <= system.host_s_per_prefill <= 0.5
        assert 1e-4 <= system.prefill_floor_s_per_layer <= 2e-3


def test_systems_and_sources(tmp_path: Path) -> None:
    backend = load_text(tmp_path, SERVING)
    own = serving(backend)
    assert own.system("h200_sxm") == own.systems["default"]
    assert own.indexer_action is None
    assert {"serving", "serving.admission", "serving.systems.default"} <= set(backend.sources)
    sglang = serving(load_backend("sglang"))
    assert sglang.system("b200_sxm").kv_action == "FP8"
    assert sglang.system("h200_sxm").kv_action == "DISABLED"


def test_a_file_without_has_none() -> None:
    assert load_backend("nvidia").serving is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("page_tokens = 64", "page_token = 64", "unknown key 'page_token'"),
        ("memory_fraction = 0.9", "memory_fraction = 1.5", "serving.memory_fraction must be a fraction"),
        ("[1, 2, 4]", "[1, 4, 2]", "serving.graph_batches must be whole numbers"),
        ("[1, 2, 4]", "[]", "serving.graph_batches must be a list"),
        ("[1, 2, 4]", "[1, true]", "serving.graph_batches must be whole numbers"),
        ("reserve_least = 0.1", "reserve_least = 0.9", "must be at most reserve_start"),
        ("reserve_start = 0.7", "reserve_start = 1.7", "reserve_start must be from 0 to 1"),
        ("[serving.systems.default]", "[serving.systems.h200_sxm]", "serving.systems.default is missing"),
        ('kv_action = "DISABLED"', 'kv_action = "bf16"', "serving.systems.default.kv_action"),
        ('origin = "measured"\n', "", "serving.systems.default.origin is missing"),
        ('origin = "measured"\nsource = "us"\n', 'origin = "measured"\n', "serving.systems.default.source is missing"),
        ("mixes_prefill = false", "mixes_prefill = 0", "serving.mixes_prefill must be true or false"),
    ],
)
def test_faults(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SERVING
    with pytest.raises(CastoffError) as caught:
        load_text(tmp_path, SERVING.replace(old, new))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
