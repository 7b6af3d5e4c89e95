"""Offload on a GPU: streams, pinned host memory and Triton kernels give the bits of a resident cache there."""

from dataclasses import replace

import pytest

from castoff.runtime.graphs import GraphMode
from castoff.spec.offload import OffloadMode

torch = pytest.importorskip("torch")

from tests.offload.runs import KINDS, MODES, POOL, Case, assert_equal, options_of, outcome  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.numerics]


@pytest.mark.parametrize("graph", ["eager", "cudagraph"])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_bits_of_a_resident_cache(
    mode: OffloadMode, kind: str, drafts: int, graph: GraphMode
) -> None:
    case = Case(kind=kind, drafts=drafts, device="cuda", graph=graph, check=graph == "eager", dtype=torch.bfloat16)
    given = {"mtp_gather_reuse": False} if mode == "gather" else {}
    own = outcome(case, options_of(mode, **given))
    assert_equal(own, outcome(case))
    assert own.report is not None
    assert own.report.link_bytes > 0


@pytest.mark.parametrize("mode", MODES)
def test_counts_are_those_of_a_cpu(mode: OffloadMode) -> None:
    """Save where rounding selects another token."""
    case = Case(drafts=1, prompts=(POOL + 1, 3 * POOL), slots=2, dtype=torch.float32, device="cuda")
    own, other = outcome(case, options_of(mode)).report, outcome(replace(case, device="cpu"), options_of(mode)).report
    assert own is not None
    assert other is not None
    assert [group.hits for group in own.groups] == pytest.approx([group.hits for group in other.groups], rel=0.05)


def test_host_rows_are_pinned() -> None:
    from tests.offload.runs import engine_of

    engine = engine_of(Case(device="cuda", slots=1, prompts=(20,)), options_of("direct"))
    assert engine.offload is not None
    assert all(rows.host.is_pinned() and rows.host.is_cpu for rows in engine.offload.memory.layers.values())
    engine.close()
