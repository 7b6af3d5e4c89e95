"""Commands on top-k traces: what is in one, a part of it, one made of arrays or drawn, and replays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from castoff.errors import CastoffError
from castoff.flags import Choice, JsonTarget
from castoff.lab import replay as replaying
from castoff.lab.profile import hit_profile
from castoff.report.output import check_outputs, print_text, render, write_file, write_json
from castoff.report.progress import progress_bar, progress_line
from castoff.report.replay_csv import replay_csv
from castoff.report.replay_curves import replay_html, replay_svg
from castoff.report.replay_text import replay_tables
from castoff.report.trace_text import trace_table, trace_text
from castoff.spec.model import load_model
from castoff.spec.scenario import ASSUMED_DRAFT_ACCEPTANCE
from castoff.trace.convert import convert_arrays, read_trace_arrays
from castoff.trace.cut import cut_trace
from castoff.trace.reader import open_trace
from castoff.trace.summary import summarize
from castoff.trace.synthetic import Decoding, SelectionModel, generate_trace
from castoff.trace.writer import refuse_sources
from castoff.trace_flags import (
    ReplayFiles,
    ReplayFilesGroup,
    ReplayFlags,
    ReplayGroup,
    SelectionGroup,
    TraceFile,
    TraceTarget,
    parse_steps,
)


def replay(
    trace: TraceFile,
    /,
    *,
    what: ReplayGroup | None = None,
    files: ReplayFilesGroup | None = None,
    json: JsonTarget = None,
) -> None:
    """Replay a top-k trace with cache policies and sizes of pools: hit rates, misses, and bytes over the link."""
    what, files = what or ReplayFlags(), files or ReplayFiles()
    check_outputs({"--json": None if json in (None, "-") else Path(str(json)), **files.by_flag})
    for target in (Path(json) if json not in (None, "-") else None, *files.by_flag.values()):
        if target is not None:
            refuse_sources(target, trace)
    asked, opened = what.replay, open_trace(trace)
    model = what.model_of(opened)
    with progress_bar(f"{trace}: passes over index groups") as progress:
        result = replaying.replay(opened, model, asked, progress=progress)
    profile = hit_profile(result, model, opened).as_json() if files.hit_profile else None
    for written, text_of in ((files.csv, replay_csv), (files.svg, replay_svg), (files.html, replay_html)):
        if written is not None:
            write_file(written, text_of(result))
    if files.hit_profile:
        write_json(str(files.hit_profile), profile)
    if json:
        write_json(json, result)
    if json != "-":
        print_text(render(*replay_tables(result)))


def trace_info(file: TraceFile, /, *, json: JsonTarget = None) -> None:
    """Check a top-k trace, and show what is in it."""
    check_outputs({"--json": None if json in (None, "-") else Path(str(json))})
    with progress_line() as progress:
        summary = summarize(open_trace(file), progress=progress)
    if json:
        write_json(json, summary)
    if json != "-":
        print_text(render(trace_table(summary)))


def trace_cut(
    file: TraceFile,
    /,
    *,
    steps: Annotated[
        str | None, Parameter(metavar="A:B", help="From step A up to but without B; either may be missing.")
    ] = None,
    groups: Annotated[Choice, Parameter(help="Index groups, by their place in the trace.")] = None,
    requests: Annotated[Choice, Parameter(help="Requests, by their ids.")] = None,
    output: TraceTarget,
) -> None:
    """Write some steps, index groups or requests of a top-k trace as a trace of their own."""
    if steps is None and groups is None and requests is None:
        raise CastoffError("nothing to cut: give --steps A:B, --groups or --requests")
    check_outputs({"--output": output})
    chosen = (0, None) if steps is None else parse_steps(steps)
    with progress_line() as progress:
        made = cut_trace(open_trace(file), output, steps=chosen, groups=groups, requests=requests, progress=progress)
    print_text(trace_text(made))


def trace_convert(
    ids: Annotated[
        Path, Parameter(help="Integers [steps, index groups, requests, query tokens, ids]: .npy or .safetensors.")
    ],
    /,
    *,
    model: Annotated[str, Parameter(help="The model that selected: a known id, a directory or a .json file.")],
    lengths: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="Integers [steps, requests]: tokens of each request, the step's included."),
    ] = None,
    note: Annotated[str | None, Parameter(help="Where the ids come from, in words.")] = None,
    output: TraceTarget,
) -> None:
    """Make a top-k trace of arrays that another engine wrote."""
    check_outputs({"--output": output})
    spec = load_model(model)
    with progress_line() as progress:
        made = convert_arrays(read_trace_arrays(ids, lengths), spec, output, note=note, progress=progress)
    print_text(trace_text(made))


def trace_generate(
    *,
    model: Annotated[str, Parameter(help="The model whose index groups select: a known id or a config.")],
    context_length: Annotated[int, Parameter(help="Tokens of each request before the first step.")] = 65536,
    steps: Annotated[int, Parameter(help="Decode steps.")] = 300,
    requests: Annotated[int, Parameter(help="Requests, all of them in every step.")] = 1,
    num_mtp_tokens: Annotated[int, Parameter(alias="--mtp", help="Draft tokens per step, 0 for none.")] = 0,
    draft_acceptance: Annotated[
        float, Parameter(help="Chance that a draft token is kept where those before it are.")
    ] = ASSUMED_DRAFT_ACCEPTANCE,
    seed: Annotated[int, Parameter(help="Of all that is drawn.")] = 0,
    selection: SelectionGroup | None = None,
    output: TraceTarget,
) -> None:
    """Draw a top-k trace whose reuse is like the published one, for want of a recorded one."""
    check_outputs({"--output": output})
    decoding = Decoding(
        context_length=context_length,
        steps=steps,
        requests=requests,
        num_mtp_tokens=num_mtp_tokens,
        draft_acceptance=draft_acceptance,
        seed=seed,
    )
    spec = load_model(model)
    with progress_bar(f"{output}: steps") as progress:
        made = generate_trace(
            output, spec, selection or SelectionModel(), decoding, progress=lambda done: progress(done, steps)
        )
    print_text(trace_text(made))


trace = App(
    name="trace", help="Look at top-k traces, cut them, make them of arrays, and draw them.", help_format="plaintext"
)
trace.command(trace_info, name="info")
trace.command(trace_cut, name="cut")
trace.command(trace_convert, name="convert")
trace.command(trace_generate, name="generate")
