"""The command line's flags: which there are, what they mean, and how text becomes a scenario.

The scenario's own classes are the flag groups: a field's name is its flag, its docstring entry the flag's help.
What stands here is what a command line has beside them: lengths as text, older spellings, flags of the whole command.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from cyclopts import App, ArgumentCollection, CycloptsError, Group, Parameter, Token
from cyclopts.exceptions import MissingArgumentError, UnknownOptionError, UnusedCliTokensError
from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel, InlineText

from castoff.errors import CastoffError
from castoff.runtime.distributed import RunParallel
from castoff.runtime.options import RunOptions
from castoff.spec.device import shipped_devices
from castoff.spec.hit_profile import Hits
from castoff.spec.model import shipped_models
from castoff.spec.offload import Offload
from castoff.spec.scenario import Compilation, Mtp, Parallel, Quant, Scenario, Workload
from castoff.spec.toml_file import did_you_mean
from castoff.trace.synthetic import SelectionModel

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

OLDER_SPELLINGS = {
    "--chrome-trace": "--chrome-trace-file",
    "--quantize-backbone-linear-action": "--quantize-non-expert-linear-action",
}
_NO_GRAPH = "castoff draws no graph; --json and --chrome-trace-file show the step op by op"
_NO_VISION = "castoff casts language models only"
NOT_BUILT = {
    "--graph-log-url": _NO_GRAPH,
    "--graph-log-path": _NO_GRAPH,
    "--fusion-plugin": "fusions are those of the backend file; see castoff show BACKEND",
    "--remote-source": "configs come from castoff itself, a path or the local Hugging Face cache",
    "--image-batch-size": _NO_VISION,
    "--image-height": _NO_VISION,
    "--image-width": _NO_VISION,
    "--vision-tp-size": _NO_VISION,
}
COMPILATION_NAMES = tuple(item.name for item in fields(Compilation) if item.name != "compile")
LengthList = tuple[int, ...]


def normalize(argv: Sequence[str]) -> list[str]:
    """Arguments in today's spelling: older names replaced, `--compilation-config a b` as one value, `--json` alone
    as `--json=-`. Raises CastoffError for a flag of TensorCast that castoff does not have."""
    normal: list[str] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "--":
            return [*normal, token, *rest]
        name, equals, value = token.partition("=")
        flag = name.replace("_", "-")
        if flag in NOT_BUILT:
            raise CastoffError(f"{flag} is not built: {NOT_BUILT[flag]}")
        token = OLDER_SPELLINGS.get(flag, name) + equals + value
        if token == "--json" and (not rest or rest[0] == "-" or rest[0].startswith("--")):
            token = "--json=-"
            if rest[:1] == ["-"]:
                rest.pop(0)
        elif flag == "--compilation-config":
            names = [value] if equals else rest[:1]
            rest = rest if equals else rest[1:]
            while rest and set(_split_names(rest[0])) <= set(COMPILATION_NAMES):
                names.append(rest.pop(0))
            token = f"{flag}={' '.join(names)}" if names else flag
        normal.append(token)
    return normal


def _split_names(text: str) -> list[str]:
    return [name.replace("-", "_") for name in re.split(r"[,\s]+", text.strip()) if name]


def parse_integers(text: str) -> LengthList:
    """Whole numbers separated by commas; raises ValueError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[+-]?[0-9]+", part) for part in parts):
        raise ValueError(f"whole numbers separated by commas are needed, got {text!r}")
    return tuple(int(part) for part in parts)


def _one_or_many(_: object, tokens: Sequence[Token]) -> int | LengthList:
    numbers = parse_integers(tokens[0].value)
    return numbers[0] if len(numbers) == 1 else numbers


def _many(_: object, tokens: Sequence[Token]) -> LengthList:
    return parse_integers(tokens[0].value)


def _with_commas(numbers: LengthList) -> str:
    return ",".join(str(number) for number in numbers)


_ONE_OR_MANY = Parameter(converter=_one_or_many, n_tokens=1, metavar="INT[,INT...]", negative=())
_MANY = Parameter(converter=_many, n_tokens=1, metavar="INT[,INT...]", negative=(), show_default=_with_commas)
_SOME = Parameter(converter=_many, n_tokens=1, metavar="INT[,INT...]", negative=(), show_default=False)
Grid = Annotated[LengthList, _MANY]
Choice = Annotated[LengthList | None, _SOME]
Model = Annotated[
    str, Parameter(help="A known id (`castoff models`), a directory with a config.json, or a .json file.")
]
DeviceName = Annotated[str, Parameter(help="A known device (`castoff devices`) or a device's .toml file.")]
JsonTarget = Annotated[str | None, Parameter(metavar="FILE", help="Write JSON to a file; `-`: only JSON, to stdout.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFlags:
    """`Workload` as text: a command line has no arrays, and lists are separated by commas."""

    num_queries: int | None = None
    query_length: Annotated[int | LengthList | None, _ONE_OR_MANY] = None
    context_length: Annotated[int | LengthList, _ONE_OR_MANY] = 0
    decode: bool = False
    prefix_cache_hit_rate: float = 0.0

    @property
    def workload(self) -> Workload:
        """The requests as a `Workload`."""
        return Workload(
            num_queries=self.num_queries,
            query_length=self.query_length,
            context_length=self.context_length,
            decode=self.decode,
            prefix_cache_hit_rate=self.prefix_cache_hit_rate,
        )


def _group(name: str, position: int) -> Parameter:
    return Parameter(name="*", group=Group(name, sort_key=position))


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What is cast, beside the requests.

    num_hidden_layers_override: keep only the first layers of the model.
    compilation_config: options of the compiler by name, separated by commas or spaces, or as a JSON object; each has a
        flag of its own too.
    """

    backend: str | None = None
    num_hidden_layers_override: int | None = None
    compilation_config: str | None = None
    parallel: Annotated[Parallel, _group("Parallelism", 2)] = field(default_factory=Parallel)
    quant: Annotated[Quant, _group("Number formats", 3)] = field(default_factory=Quant)
    mtp: Annotated[Mtp, _group("Speculation", 4)] = field(default_factory=Mtp)
    compilation: Annotated[Compilation, _group("Compilation", 5)] = field(default_factory=Compilation)
    offload: Annotated[Offload, _group("KV offload", 6)] = field(default_factory=Offload)
    hits: Annotated[Hits, _group("KV offload", 6)] = field(default_factory=Hits)

    def scenario(self, workload: Workload) -> Scenario:
        """The scenario of these flags; raises CastoffError for compiler options without --compile."""
        compilation = with_compilation_config(self.compilation, self.compilation_config)
        asked = [name for name in COMPILATION_NAMES if getattr(compilation, name)]
        if asked and not compilation.compile:
            flags = " and ".join(f"--{_dashed(name)}" for name in asked)
            raise CastoffError(f"{flags} {'needs' if len(asked) == 1 else 'need'} --compile")
        return Scenario(
            workload=workload,
            parallel=self.parallel,
            quant=self.quant,
            mtp=self.mtp,
            compilation=compilation,
            offload=self.offload,
            hits=self.hits,
            backend=self.backend,
        )


def with_compilation_config(compilation: Compilation, config: str | None) -> Compilation:
    """The options of --compilation-config added to those that have flags of their own."""
    settings = _compilation_settings(config) if config is not None else {}
    for name, value in settings.items():
        # Only enable_multistream tells a flag that was not given from one that says no.
        if name == "enable_multistream" and compilation.enable_multistream not in (None, value):
            raise CastoffError("--compilation-config and --[no-]enable-multistream contradict each other")
    # What a flag of its own turns on, the config does not turn off.
    kept = {name: value or getattr(compilation, name) for name, value in settings.items()}
    if "enable_multistream" in settings:
        kept["enable_multistream"] = settings["enable_multistream"]
    return replace(compilation, **kept)


def _compilation_settings(config: str) -> dict[str, bool]:
    if config.lstrip().startswith("{"):
        try:
            values: dict[str, object] = json.loads(config)
        except ValueError as error:
            raise CastoffError(f"--compilation-config: not a JSON object: {error}") from None
    else:
        values = dict.fromkeys(_split_names(config), True)
    if not values:
        raise CastoffError(f"--compilation-config is empty; allowed: {', '.join(COMPILATION_NAMES)}")
    settings = {}
    for name, value in values.items():
        if name not in COMPILATION_NAMES:
            raise CastoffError(
                f"--compilation-config: {name!r} is unknown{did_you_mean(name, COMPILATION_NAMES)}; "
                f"allowed: {', '.join(COMPILATION_NAMES)}"
            )
        if not isinstance(value, bool):
            raise CastoffError(f"--compilation-config: {name} must be true or false, got {value!r}")
        settings[name] = value
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlags:
    """How a step is priced.

    performance_model: analytic: from the work of an op and the backend's curves; profiling: measured times of
        --profiling-database where op and input shapes match, the rest analytic.
    profiling_database: CSV file with the columns name, shapes, dtypes, seconds, the first three as `castoff shapes`
        writes them.
    """

    reserved_memory_gb: float = 0.0
    prefill_tokens: int | None = None
    disable_repetition: bool = False
    performance_model: Literal["analytic", "profiling"] = "analytic"
    profiling_database: Path | None = None

    def priced(self, scenario: Scenario) -> Scenario:
        """The scenario with what these flags say about it; raises CastoffError where they do not agree."""
        if (self.performance_model == "profiling") != (self.profiling_database is not None):
            given, missing = ("--performance-model profiling", "--profiling-database FILE.csv")
            if self.profiling_database is not None:
                given, missing = "--profiling-database", "--performance-model profiling"
            raise CastoffError(f"{given} needs {missing}")
        return replace(
            scenario,
            reserved_memory_gb=self.reserved_memory_gb,
            prefill_tokens=self.prefill_tokens,
            disable_repetition=self.disable_repetition,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    """What is written, and where.

    json: write the prediction as JSON to a file, or with - to standard output instead of the tables.
    chrome_trace_file: write a trace for Perfetto or chrome://tracing, one row per stream.
    dump_input_shapes: one row of the op table per set of input shapes.
    dump_op_bound_results: show for every op what each bound alone would take, as a share of the op's time.
    log_level: what castoff says about its own work, on standard error.
    """

    json: Annotated[str | None, Parameter(metavar="FILE")] = None
    chrome_trace_file: Path | None = None
    dump_input_shapes: bool = False
    dump_op_bound_results: bool = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "error"


WorkloadGroup = Annotated[WorkloadFlags, _group("Workload", 1)]
StructureGroup = Annotated[Structure, _group("Deployment", 2)]
StepGroup = Annotated[StepFlags, _group("Pricing", 7)]
RunGroup = Annotated[RunOptions, _group("Run", 1)]
RunParallelGroup = Annotated[RunParallel, _group("Parallelism", 2)]
OffloadGroup = Annotated[Offload, _group("KV offload", 3)]
OutputGroup = Annotated[OutputFlags, _group("Output", 8)]
DOCUMENTED = (
    RunOptions,
    Offload,
    Hits,
    Scenario,
    Workload,
    Parallel,
    Quant,
    Mtp,
    Compilation,
    Structure,
    StepFlags,
    OutputFlags,
    SelectionModel,
)


def check_tokens(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse what conversion would bend or explain badly: fractions for whole numbers, nan, unknown words.

    A cyclopts `config` function: it sees the arguments before they are converted.
    """
    for argument in arguments:
        hints = [hint for hint in get_args(argument.hint) if hint is not type(None)] or [argument.hint]
        if get_origin(argument.hint) is Literal:
            hints = [argument.hint]
        for token in argument.tokens:
            if token.keyword is not None and len(hints) == 1 and isinstance(token.value, str):
                _check_value(token.keyword, token.value, hints[0])


def _check_value(flag: str, value: str, hint: Any) -> None:
    if get_origin(hint) is Literal:
        allowed = get_args(hint)
        if value not in allowed:
            raise CastoffError(
                f"{flag} must be one of {', '.join(allowed)}, got {value!r}{did_you_mean(value, allowed)}"
            )
    elif hint is int and not re.fullmatch(r"[+-]?[0-9]+", value):
        raise CastoffError(f"{flag} must be a whole number, got {value!r}")
    elif hint is float:
        try:
            finite = math.isfinite(float(value))
        except ValueError:
            finite = False
        if not finite:
            raise CastoffError(f"{flag} must be a number, got {value!r}")


class DocumentedFormatter(DefaultFormatter):
    """Help pages in which flags that are fields are explained by the docstrings of their classes."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Render one group of flags."""
        texts = flag_help()
        super().__call__(console, options, panel.copy(entries=[_documented(entry, texts) for entry in panel.entries]))


def _documented(entry: HelpEntry, texts: dict[str, str]) -> HelpEntry:
    text = next((texts[name] for name in entry.positive_names if name in texts), None)
    if text and isinstance(entry.description, InlineText) and not entry.description.primary_renderable:
        entry = entry.copy(description=text)
    # A switch that is off needs no word about it.
    return entry.copy(default=None, negative_names=()) if entry.default == "False" else entry


def sentence(error: CycloptsError) -> str:
    """What is wrong with the arguments, in one sentence."""
    command = " ".join(["castoff", *(error.command_chain or ())])
    message = " ".join(str(error).split())
    match error:
        case MissingArgumentError(argument=argument) if argument is not None:
            if argument.tokens or not argument.required:
                return f"{argument.name} needs a value; see {command} --help"
            known = {"MODEL": ("castoff models", shipped_models()), "--device": ("castoff devices", shipped_devices())}
            if argument.name in known:
                listing, names = known[argument.name]
                return f"{command} needs {argument.name}: a file, or one of {', '.join(names)}; see {listing}"
            return f"{command} needs {argument.name}; see {command} --help"
        case UnusedCliTokensError() if error.unused_tokens:
            return f"unexpected argument {error.unused_tokens[0]!r}; see {command} --help"
        case UnknownOptionError() if "Did you mean" not in message:
            message = f"{message} See {command} --help."
    return message[:1].lower() + message[1:]


@cache
def flag_help() -> dict[str, str]:
    """The help of every flag that is a field, from the docstrings: `field: text`, continued on indented lines."""
    names = {item.name for cls in DOCUMENTED for item in fields(cls)}
    texts: dict[str, str] = {}
    for cls in DOCUMENTED:
        texts |= _docstring_entries(cls.__doc__ or "", {item.name for item in fields(cls)})
    return {f"--{_dashed(name)}": _as_flags(text, names) for name, text in texts.items()}


def _docstring_entries(docstring: str, names: set[str]) -> dict[str, str]:
    entries: dict[str, str] = {}
    current: str | None = None
    for line in docstring.splitlines():
        head, colon, text = line.strip().partition(": ")
        if colon and head in names:
            current = head
        elif not line.strip():
            current = None
        else:
            text = line.strip()
        if current:
            entries[current] = f"{entries.get(current, '')} {text}".strip()
    return entries


def _as_flags(text: str, names: set[str]) -> str:
    """Field names in a text as the flags that they are, and None as what it means on a command line."""
    text = re.sub(r"\bNone\b", "unset", text)
    text = re.sub(r"\b[a-z]+(?:_[a-z0-9]+)+\b", lambda m: f"--{_dashed(m[0])}" if m[0] in names else m[0], text)
    return re.sub(r"(^|\. )([a-z])", lambda m: m[1] + m[2].upper(), text)


def _dashed(name: str) -> str:
    return name.replace("_", "-")
