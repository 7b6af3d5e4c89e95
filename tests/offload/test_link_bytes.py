"""What crosses the link, counted in the lists that copies are given, against what a run reports."""

from typing import Any

import pytest

from castoff.model import offload as programs
from castoff.spec.offload import OffloadMode

torch = pytest.importorskip("torch")

from tests.offload.runs import POOL, Case, options_of, outcome  # noqa: E402


@pytest.mark.numerics
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("mode", ["direct", "gather", "serve_install"])
def test_rows_are_read_as_often_as_reported(mode: OffloadMode, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    written: list[int] = []
    fetch, serve, write = programs.fetch, programs.serve, programs.write_to_host

    def counting_fetch(host: Any, tables: Any, slots: Any, plan: Any, *rest: Any) -> None:
        live_BX = torch.arange(plan.ids_BX.shape[1]) < plan.counts_B[:, None]
        read.append(int((live_BX & (plan.ids_BX >= 0)).sum()))
        fetch(host, tables, slots, plan, *rest)

    def counting_serve(host: Any, tables: Any, plan: Any, *rest: Any, hosted: None) -> None:
        read.append(int((plan.sources_TK < -1).sum()))
        serve(host, tables, plan, *rest, hosted=hosted)

    def counting_write(region: Any, own_rows: Any, host: Any, slots: Any) -> None:
        written.append(int((slots >= 0).sum()))
        write(region, own_rows, host, slots)

    monkeypatch.setattr(programs, "write_to_host", counting_write)
    monkeypatch.setattr(programs, "fetch", counting_fetch)
    monkeypatch.setattr(programs, "serve", counting_serve)
    case = Case(drafts=drafts, prompts=(POOL + 1, 3 * POOL), slots=2)
    report = outcome(case, options_of(mode)).report
    assert report is not None
    # Rows of kv_lora_rank 128 and a rope part of 8, in fp32.
    row_bytes = 136 * 4
    assert report.link_bytes == sum(read) * row_bytes
    assert report.written_bytes == sum(written) * row_bytes
    if mode == "direct":
        assert report.link_bytes == sum(len(group.layers) * group.unique_misses for group in report.groups) * row_bytes
        assert sum(group.promoted_rows for group in report.groups) > 0


@pytest.mark.numerics
def test_direct_reads_less_than_the_published_route() -> None:
    """At three drafts, from pools that hold the whole context, so that both miss the same tokens, each once."""
    case = Case(drafts=3, prompts=(POOL + 1, 3 * POOL), slots=2)
    whole = {"pool_tokens": 256, "ways": 8}
    direct, served = (outcome(case, options_of(mode, **whole)).report for mode in ("direct", "serve_install"))
    assert direct is not None
    assert served is not None
    for own, theirs in zip(direct.groups, served.groups, strict=True):
        assert own.unique_misses + own.promoted_rows == theirs.unique_misses
        assert own.link_bytes < theirs.link_bytes
