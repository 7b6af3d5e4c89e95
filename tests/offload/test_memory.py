"""What offload holds for GLM-5.2, in closed form, and where host memory is taken."""

import os

import pytest

from castoff.errors import CastoffError
from castoff.model.offload_sizes import offloaded_groups
from castoff.offload import host_store
from castoff.offload.host_store import processors_of
from castoff.offload.memory import OffloadRun, run_bytes
from castoff.runtime.structure import run_setup
from castoff.spec.model import load_model
from castoff.spec.offload import Offload
from castoff.spec.scenario import Mtp, Quant, Scenario

torch = pytest.importorskip("torch")

GIB = 2**30
TOKENS = 65_536


def setup_of(name: str, drafts: int) -> object:
    quant = Quant(quantize_linear_action="DISABLED")
    return run_setup(load_model(name), Scenario(quant=quant, mtp=Mtp(num_mtp_tokens=drafts)))


def run_of(options: Offload) -> OffloadRun:
    return OffloadRun(options=options, slots=1, num_blocks=TOKENS // 128, block_tokens=128, longest=TOKENS)


@pytest.mark.golden
def test_device_memory_of_a_64k_request_with_three_drafts() -> None:
    setup = setup_of("zai-org/GLM-5.2", 3)
    direct = run_bytes(setup, run_of(Offload(offload="direct")), dtype=torch.bfloat16)  # type: ignore[arg-type]
    beside_prompts = direct.device - direct.prefill
    assert beside_prompts <= 0.75 * GIB
    assert direct.pool == 78 * 8192 * 1152
    served = run_bytes(setup, run_of(Offload(offload="serve_install")), dtype=torch.bfloat16)  # type: ignore[arg-type]
    # The published route has as many selected rows as pool rows, in each layer for itself.
    assert served.pool == served.selection == direct.pool
    assert served.device - served.prefill > 1.37 * GIB
    # All main layers, and a block for what has no place; the MTP block stays on the device.
    assert direct.host == 78 * (TOKENS + 128) * 1152


def test_prefetching_needs_a_staging_buffer_per_layer_of_a_group() -> None:
    setup = setup_of("zai-org/GLM-5.2", 0)
    staging = [
        run_bytes(setup, run_of(Offload(offload="direct", prefetch=ahead)), dtype=torch.bfloat16).staging  # type: ignore[arg-type]
        for ahead in (True, False)
    ]
    assert staging == [4 * 2048 * 1152, 2048 * 1152]


def test_what_is_held_is_what_was_said() -> None:
    from tests.offload.runs import MODES, Case, engine_of, options_of

    case = Case(drafts=1, prompts=(40,), slots=2)
    for mode in MODES:
        engine = engine_of(case, options_of(mode))
        assert engine.offload is not None
        memory = engine.offload.memory
        rows = list(memory.layers.values())
        on_device = [tensor for each in rows for tensor in (each.region, each.staging, each.selection)]
        for group in memory.groups:
            state = group.state
            on_device += [state.tags_RNW, state.used_RNW, state.hands_RN, state.marks_RN, group.figures_C]
        # Layers share staging.
        distinct = {id(tensor): tensor for tensor in (*on_device, *memory.prompts)}.values()
        assert engine.offload.held.device == sum(tensor.nbytes for tensor in distinct)
        assert engine.offload.held.host == sum(each.host.nbytes for each in rows)
        engine.close()


def test_host_memory_is_taken_on_the_processors_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the process has its own back afterwards; processors that it may not have change nothing."""
    own, seen = os.sched_getaffinity(0), []
    monkeypatch.setattr(host_store, "_processors_near", lambda device: {min(own)})
    with host_store.near(torch.device("cuda")):
        seen.append(os.sched_getaffinity(0))
    assert seen == [{min(own)}]
    assert os.sched_getaffinity(0) == own
    monkeypatch.setattr(host_store, "_processors_near", lambda device: {100_000})
    with host_store.near(torch.device("cuda")):
        assert os.sched_getaffinity(0) == own


def test_the_processes_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_store, "available_bytes", lambda: 1_000)
    host_store.check_host_bytes(600, None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(
        CastoffError, match=r"needs 600 bytes of host memory in each of 2 processes, and 1,000 are free"
    ):
        host_store.check_host_bytes(600, None)


def test_a_model_without_an_indexer_is_refused() -> None:
    setup = setup_of("deepseek-ai/DeepSeek-V3", 0)
    with pytest.raises(CastoffError, match="has no sparse attention"):
        offloaded_groups(setup, Offload(offload="direct"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("listed", "expected"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("", set())])
def test_lists_of_processors(listed: str, expected: set[int]) -> None:
    assert processors_of(listed) == expected
