"""`castoff run`: prompts in, tokens out, through the same forward pass that casts."""

from __future__ import annotations

import json
import random
import re
import resource
import statistics as stats
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.model.setup import Setup, resolve_setup
from castoff.ops.table import OPS
from castoff.runtime.checkpoint import Checkpoint, LoadedWeights, RandomTensors
from castoff.runtime.engine import Engine
from castoff.runtime.sampling import Sampling
from castoff.runtime.scheduler import Request, Result, Scheduler, Statistics
from castoff.spec.backend import load_backend
from castoff.spec.device import load_device
from castoff.spec.model import ModelSpec, load_model
from castoff.spec.quant import LinearAction
from castoff.spec.scenario import Mtp, Quant, Scenario

torch = lazy.load("torch")

# The structure is checked against a device that multiplies in every unquantised format; no figure of it is used.
_CHECKED_AGAINST = "h200_sxm"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What to run.

    prompt: text; needs a tokenizer.json beside the model.
    prompt_file: JSON list of lists of token ids, or lines of text.
    random_prompts: NxLEN: N prompts of LEN random token ids.
    random_weights: seed of random weights; unset reads the model's checkpoint.
    max_new_tokens: tokens that a request gets at most.
    ignore_eos: go on after a stop token.
    num_mtp_tokens: draft tokens per step, verified by the model: the tokens stay the same.
    batch: requests that run at once.
    dtype: of weights, caches and activations.
    device: where tensors live.
    kv_block_tokens: tokens of a cache block, from 16 to 256.
    chunk_tokens: tokens of a prefill chunk.
    temperature: 0 takes the most likely token.
    top_p: share of probability that is drawn from.
    seed: of random prompts and of drawn tokens.
    profile: write a Chrome trace with castoff's op names to this file, and report the time of every op.
    """

    prompt: str | None = None
    prompt_file: Path | None = None
    random_prompts: str | None = None
    random_weights: int | None = None
    max_new_tokens: int = 32
    ignore_eos: bool = False
    num_mtp_tokens: int = 0
    batch: int = 8
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "bfloat16"
    device: Literal["cpu", "cuda"] = "cpu"
    kv_block_tokens: int = 128
    chunk_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    profile: Path | None = None


@dataclass(frozen=True, slots=True)
class OpTime:
    """Calls of one op over a run, and their seconds."""

    name: str
    calls: int
    total_s: float

    @property
    def mean_s(self) -> float:
        """Seconds per call."""
        return self.total_s / self.calls


@dataclass(frozen=True, slots=True)
class RunReport:
    """What came out. Seconds; bytes. ops: the longest in total first; empty without a profile."""

    results: list[Result]
    texts: list[str] | None
    statistics: Statistics
    total_s: float
    weights_bytes: int
    cache_bytes: int
    peak_bytes: int
    ops: tuple[OpTime, ...] = ()

    @property
    def ttft_s(self) -> float:
        """Mean time from the start of the run to a request's first token, waiting included."""
        return stats.fmean(result.first_token_s for result in self.results)

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None where no request got more than one."""
        spans = [
            (result.last_token_s - result.first_token_s) / (len(result.tokens) - 1)
            for result in self.results
            if len(result.tokens) > 1
        ]
        return stats.fmean(spans) if spans else None

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all requests over the time of the run."""
        return sum(len(result.tokens) for result in self.results) / self.total_s

    def as_json(self) -> dict[str, Any]:
        """The object that `castoff run --json` writes."""
        return {
            "tokens": [result.tokens for result in self.results],
            "texts": self.texts,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "tokens_per_s": self.tokens_per_s,
            "acceptance_length": self.statistics.acceptance_length,
            "decode_steps": self.statistics.decode_steps,
            "sparse_steps": self.statistics.sparse_steps,
            "ops": [
                {"name": op.name, "calls": op.calls, "total_s": op.total_s, "mean_s": op.mean_s} for op in self.ops
            ],
            "memory": {
                "weights_bytes": self.weights_bytes,
                "cache_bytes": self.cache_bytes,
                "peak_bytes": self.peak_bytes,
            },
        }


def run(
    model: str, options: RunOptions, *, num_hidden_layers: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> RunReport:  # fmt: skip
    """Load a model and generate.

    Raises CastoffError for options that do not fit together, prompts that cannot be read, a checkpoint that is not
    whole, and where torch is not installed.
    """
    _check(options)
    spec = load_model(model, num_hidden_layers=num_hidden_layers)
    setup = resolve_setup(
        spec,
        load_device(_CHECKED_AGAINST),
        load_backend("nvidia"),
        Scenario(
            quant=Quant(quantize_linear_action=default_action(spec)), mtp=Mtp(num_mtp_tokens=options.num_mtp_tokens)
        ),
        "decode",
    )
    tokenizer = _tokenizer(model)
    prompts = read_prompts(options, spec, tokenizer)
    requests = [Request(prompt, options.max_new_tokens) for prompt in prompts]
    engine, weights = _engine(model, setup, options, requests, progress)
    scheduler = Scheduler(
        engine,
        slots=options.batch,
        chunk_tokens=options.chunk_tokens,
        sampling=Sampling(temperature=options.temperature, top_p=options.top_p, seed=options.seed),
        stop_ids=frozenset() if options.ignore_eos else frozenset(spec.eos_token_ids),
        progress=lambda done, total: progress(f"{done} of {total} requests done"),
    )
    ops: tuple[OpTime, ...] = ()
    started = time.perf_counter()
    with torch.inference_mode():
        if options.profile is None:
            results = scheduler.run(requests)
        else:
            results, ops = _profiled(scheduler, requests, options)
    total_s = time.perf_counter() - started
    texts = [tokenizer.decode(result.tokens) for result in results] if tokenizer is not None else None
    return RunReport(
        results=results,
        texts=texts,
        statistics=scheduler.statistics,
        total_s=total_s,
        weights_bytes=weights.bytes,
        cache_bytes=engine.caches.bytes,
        peak_bytes=_peak_bytes(options.device),
        ops=ops,
    )


def default_action(spec: ModelSpec) -> LinearAction:
    """The format in which a checkpoint's linear layers run: the one in which they are stored."""
    return spec.checkpoint_quant.action if spec.checkpoint_quant is not None else "DISABLED"


def _profiled(
    scheduler: Scheduler, requests: list[Request], options: RunOptions
) -> tuple[list[Result], tuple[OpTime, ...]]:
    """Run under torch's profiler; writes the trace."""
    on_device = options.device == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_device:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        results = scheduler.run(requests)
    profile.export_chrome_trace(str(options.profile))
    names = {op.name for op in OPS}
    times = [
        OpTime(event.key, event.count, 1e-6 * (event.device_time_total if on_device else event.cpu_time_total))
        for event in profile.key_averages()
        if event.key in names
    ]
    return results, tuple(sorted(times, key=lambda op: -op.total_s))


def _check(options: RunOptions) -> None:
    try:
        accelerator: bool = torch.cuda.is_available()
    except ModuleNotFoundError:
        raise CastoffError("running needs torch: pip install 'castoff[run]'") from None
    if options.device == "cuda" and not accelerator:
        raise CastoffError("--device cuda: torch sees no CUDA device here; use --device cpu")
    given = [options.prompt is not None, options.prompt_file is not None, options.random_prompts is not None]
    if sum(given) != 1:
        raise CastoffError("give one of --prompt TEXT, --prompt-file FILE, --random-prompts NxLEN")
    if not 16 <= options.kv_block_tokens <= 256:
        raise CastoffError(f"--kv-block-tokens must be from 16 to 256, got {options.kv_block_tokens}")
    for name in ("batch", "chunk_tokens", "max_new_tokens"):
        value = getattr(options, name)
        if value < 1:
            raise CastoffError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def _engine(
    model: str, setup: Setup, options: RunOptions, requests: list[Request], progress: Callable[[str], None]
) -> tuple[Engine, LoadedWeights]:
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    mtp = options.num_mtp_tokens > 0
    if options.random_weights is not None:
        source: Checkpoint | RandomTensors = RandomTensors(options.random_weights)
    else:
        directory = Path(model)
        if not directory.is_dir():
            raise CastoffError(
                f"{model} is a config without weights; give a directory with a checkpoint, or --random-weights SEED"
            )
        source = Checkpoint(directory, setup.model, mtp=mtp)
    weights = LoadedWeights(setup, source, dtype=dtype, device=device, progress=progress)
    # Room for the largest requests that may run at once.
    most = sorted(len(item.prompt) + item.max_new_tokens + 2 * options.num_mtp_tokens + 1 for item in requests)
    blocks = sum(-(-tokens // options.kv_block_tokens) for tokens in most[-options.batch :])
    engine = Engine(setup, weights, num_blocks=blocks, block_tokens=options.kv_block_tokens, dtype=dtype, device=device)
    return engine, weights


def read_prompts(options: RunOptions, model: ModelSpec, tokenizer: Any) -> list[tuple[int, ...]]:
    """Prompts as token ids."""
    if options.random_prompts is not None:
        match = re.fullmatch(r"([1-9][0-9]*)[x×*]([1-9][0-9]*)", options.random_prompts.strip())
        if match is None:
            raise CastoffError(
                f"--random-prompts is a number of prompts and their length, 4x1000 say, got {options.random_prompts!r}"
            )
        generator = random.Random(options.seed)
        return [
            tuple(generator.randrange(model.vocab_size) for _ in range(int(match[2]))) for _ in range(int(match[1]))
        ]
    if options.prompt is not None:
        return [_encode(options.prompt, tokenizer)]
    assert options.prompt_file is not None
    try:
        text = options.prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CastoffError(f"cannot read --prompt-file {options.prompt_file}: {error}") from None
    if text.lstrip().startswith("["):
        return _id_lists(text, options.prompt_file)
    return [_encode(line, tokenizer) for line in text.splitlines() if line.strip()]


def _id_lists(text: str, path: Path) -> list[tuple[int, ...]]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise CastoffError(f"--prompt-file {path} is not JSON: {error}") from None
    if not all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in values):
        raise CastoffError(f"--prompt-file {path} must hold a JSON list of lists of token ids")
    if not values:
        raise CastoffError(f"--prompt-file {path} holds no prompt")
    return [tuple(ids) for ids in values]


def _tokenizer(model: str) -> Any:
    """The tokenizer beside a checkpoint, or None."""
    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizers = lazy.load("tokenizers")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except ModuleNotFoundError:
        return None


def _encode(text: str, tokenizer: Any) -> tuple[int, ...]:
    if tokenizer is None:
        raise CastoffError(
            "text prompts need a tokenizer.json beside the model and the tokenizers package; give token ids as JSON "
            "lists in --prompt-file, or --random-prompts NxLEN"
        )
    return tuple(tokenizer.encode(text).ids)


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kibibytes, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024
