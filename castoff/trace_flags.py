"""The flags of commands on traces, and how their text becomes what is asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter, Token

from castoff.errors import CastoffError
from castoff.lab.policies import POLICIES
from castoff.lab.replay import Replay
from castoff.spec.model import ModelSpec, load_model, shipped_models
from castoff.spec.offload import POOL_TOKENS, WAYS
from castoff.spec.quant import AttentionAction
from castoff.trace.reader import Trace
from castoff.trace.synthetic import SelectionModel

TraceFile = Annotated[Path, Parameter(help="A top-k trace.")]
TraceTarget = Annotated[Path, Parameter(alias="-o", metavar="FILE", help="The trace to write.")]
SelectionGroup = Annotated[SelectionModel, Parameter(name="*", group=Group("What is selected", sort_key=1))]

MOST_SIZES = 10_000
_RANGE = re.compile(r"([0-9]{1,12}):([0-9]{1,12}):([0-9]{1,12})")


def parse_steps(text: str) -> tuple[int, int | None]:
    """`A:B` as the first step and the one behind the last; without A from the first, without B to the last.

    Raises CastoffError.
    """
    first, colon, end = (part.strip() for part in text.partition(":"))
    if not colon or not all(re.fullmatch(r"[0-9]{0,18}", part) for part in (first, end)):
        raise CastoffError(f"--steps must be A:B, the first step and the one behind the last, got {text!r}")
    steps = int(first or 0), int(end) if end else None
    if steps[1] is not None and steps[0] >= steps[1]:
        raise CastoffError(f"--steps {text}: the first step must come before the one behind the last")
    return steps


def parse_sizes(text: str) -> tuple[int, ...]:
    """Whole numbers and FIRST:LAST:STEP, the last included, separated by commas. Raises ValueError."""
    sizes: list[int] = []
    for part in (part.strip() for part in text.split(",")):
        if match := _RANGE.fullmatch(part):
            first, last, step = map(int, match.groups())
            if step < 1 or last < first or (last - first) // step >= MOST_SIZES:
                raise ValueError(
                    f"FIRST:LAST:STEP needs LAST at least FIRST, STEP at least 1, and no more than {MOST_SIZES:,} "
                    f"sizes, got {part}"
                )
            sizes += range(first, last + 1, step)
        elif re.fullmatch(r"[+-]?[0-9]{1,12}", part):
            sizes.append(int(part))
        else:
            raise ValueError(f"whole numbers or FIRST:LAST:STEP, separated by commas, are needed, got {part!r}")
    return tuple(dict.fromkeys(sizes))


def _names(_: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    return tuple(part.strip() for part in tokens[0].value.split(","))


def _sizes(_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    return parse_sizes(tokens[0].value)


def _with_commas(values: Sequence[object]) -> str:
    return ",".join(map(str, values))


_NAMES = Parameter(converter=_names, n_tokens=1, metavar="NAME[,NAME...]", negative=(), show_default=_with_commas)
_SIZES = Parameter(converter=_sizes, n_tokens=1, metavar="SIZES", negative=(), show_default=_with_commas)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFlags:
    """`Replay` as text, and the model."""

    policy: Annotated[
        tuple[str, ...], _NAMES, Parameter(help=f"How rows give way: {', '.join(POLICIES)}; several with commas.")
    ] = ("fifo",)
    pool: Annotated[
        tuple[int, ...],
        _SIZES,
        Parameter(help="Rows of a request's pool in every layer: numbers and FIRST:LAST:STEP, with commas."),
    ] = (POOL_TOKENS,)
    ways: Annotated[
        tuple[int, ...], _SIZES, Parameter(help="Rows of a set, from 1 to 32, for the policies that have sets.")
    ] = (WAYS,)
    mtp: Annotated[
        int | None, Parameter(help="Replay only the first 1 + MTP query tokens of every step; unset for all.")
    ] = None
    quantize_attention_action: Annotated[
        AttentionAction, Parameter(help="Format of the cache, which says what a row takes on the link.")
    ] = "DISABLED"
    skip_steps: Annotated[
        int, Parameter(help="Steps at the start of each request that fill its pool and are not counted.")
    ] = 0
    model: Annotated[str | None, Parameter(help="The trace's model, where its name for it is not known here.")] = None
    num_hidden_layers_override: Annotated[
        int | None, Parameter(help="The first layers that a run kept, where it did not keep all.")
    ] = None

    @property
    def replay(self) -> Replay:
        """What is replayed. Raises CastoffError."""
        return Replay(
            policies=self.policy,  # type: ignore[arg-type] # Replay checks the names
            pools=self.pool,
            ways=self.ways,
            num_mtp_tokens=self.mtp,
            cache=self.quantize_attention_action,
            skip_steps=self.skip_steps,
        )

    def model_of(self, trace: Trace) -> ModelSpec:
        """The model that a trace is of. Raises CastoffError where it is not known."""
        named = trace.header.model
        try:
            given = load_model(self.model or named, num_hidden_layers=self.num_hidden_layers_override)
        except CastoffError as error:
            if self.model is not None:
                raise
            raise CastoffError(f"{trace.path} is of the model {named!r}: {error}; or name it with --model") from None
        # What another model's layers hold is another number of bytes, though its trace may look the same.
        own = (
            load_model(named, num_hidden_layers=self.num_hidden_layers_override) if named in shipped_models() else given
        )
        if given.index_groups != own.index_groups:
            raise CastoffError(
                f"{trace.path} is of {own.name}, whose index groups are not those of --model {self.model}; "
                "leave --model out"
            )
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFiles:
    """What is written beside JSON."""

    csv: Annotated[Path | None, Parameter(metavar="FILE", help="Write all figures as CSV, by index group too.")] = None
    svg: Annotated[Path | None, Parameter(metavar="FILE", help="Draw hit rates over the size of the pool.")] = None
    html: Annotated[
        Path | None, Parameter(metavar="FILE", help="Write a page of curves and figures that needs no other file.")
    ] = None
    hit_profile: Annotated[
        Path | None, Parameter(metavar="FILE", help="Write what `castoff cast --hit-profile FILE` reads.")
    ] = None

    @property
    def by_flag(self) -> dict[str, Path | None]:
        """The files by the flags that name them."""
        return {"--csv": self.csv, "--svg": self.svg, "--html": self.html, "--hit-profile": self.hit_profile}


ReplayGroup = Annotated[ReplayFlags, Parameter(name="*", group=Group("Replay", sort_key=1))]
ReplayFilesGroup = Annotated[ReplayFiles, Parameter(name="*", group=Group("Output", sort_key=2))]
