"""`castoff run`: prompts in, tokens out, through the same forward pass that casts."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.model.setup import Setup, resolve_setup
from castoff.runtime.checkpoint import Checkpoint, LoadedWeights, RandomTensors, TensorSource
from castoff.runtime.engine import Engine
from castoff.runtime.op_times import OpClock, TimedEngine
from castoff.runtime.options import RunOptions, check_options
from castoff.runtime.prompts import load_tokenizer, read_prompts
from castoff.runtime.report import Memory, RunReport
from castoff.runtime.scheduler import Request, Scheduler
from castoff.spec.backend import load_backend
from castoff.spec.device import load_device
from castoff.spec.model import ModelSpec, load_model
from castoff.spec.scenario import Mtp, Quant, Scenario

torch = lazy.load("torch")

# The structure is checked against a device that multiplies in every unquantised format; no figure of it is used.
_CHECKED_AGAINST = "h200_sxm"


def run(
    model: str, options: RunOptions, *, num_hidden_layers: int | None = None, op_times: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> RunReport:  # fmt: skip
    """Load a model and generate.

    op_times: time every op, which takes a few percent of small models' steps. With options.profile they are timed too.
    Raises CastoffError for options that do not fit together, prompts that cannot be read, a checkpoint that is not
    whole, and where torch is not installed.
    """
    check_options(options)
    spec = load_model(model, num_hidden_layers=num_hidden_layers)
    setup = _setup(spec, options)
    tokenizer = load_tokenizer(model)
    requests = [Request(prompt, options.max_new_tokens) for prompt in read_prompts(options, spec, tokenizer)]
    traced = options.profile is not None
    clock = OpClock(options.device, traced=traced) if op_times or traced else None
    weights = _weights(model, setup, options, progress)
    engine = _engine(setup, weights, options, requests, clock)
    scheduler = _scheduler(engine, options, progress)
    with torch.inference_mode(), clock or nullcontext():
        started = time.perf_counter()
        results = scheduler.run(requests)
        total_s = time.perf_counter() - started
    return RunReport(
        results=results,
        texts=[tokenizer.decode(result.tokens) for result in results] if tokenizer is not None else None,
        statistics=scheduler.statistics,
        total_s=total_s,
        memory=Memory(weights.bytes, engine.caches.bytes, _peak_bytes(options.device)),
        ops=clock.times if clock else (),
        trace=clock.trace if clock else None,
    )


def _setup(spec: ModelSpec, options: RunOptions) -> Setup:
    return resolve_setup(
        spec,
        load_device(_CHECKED_AGAINST),
        load_backend("nvidia"),
        Scenario(quant=Quant(quantize_linear_action="DISABLED"), mtp=Mtp(num_mtp_tokens=options.num_mtp_tokens)),
        "decode",
    )


def _weights(model: str, setup: Setup, options: RunOptions, progress: Callable[[str], None]) -> LoadedWeights:
    source: TensorSource
    if options.random_weights is not None:
        source = RandomTensors(options.random_weights)
    else:
        directory = Path(model)
        if not directory.is_dir():
            raise CastoffError(
                f"{model} is a config without weights; give a directory with a checkpoint, or --random-weights SEED"
            )
        source = Checkpoint(directory, setup.model, mtp=options.num_mtp_tokens > 0)
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    return LoadedWeights(setup, source, dtype=dtype, device=device, progress=progress)


def _engine(
    setup: Setup, weights: LoadedWeights, options: RunOptions, requests: list[Request], clock: OpClock | None
) -> Engine:
    # Room for the largest requests that may run at once.
    most = sorted(len(item.prompt) + item.max_new_tokens + 2 * options.num_mtp_tokens + 1 for item in requests)
    blocks = sum(-(-tokens // options.kv_block_tokens) for tokens in most[-options.batch :])
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    caches = {"num_blocks": blocks, "block_tokens": options.kv_block_tokens, "dtype": dtype, "device": device}
    return TimedEngine(clock, setup, weights, **caches) if clock else Engine(setup, weights, **caches)


def _scheduler(engine: Engine, options: RunOptions, progress: Callable[[str], None]) -> Scheduler:
    return Scheduler(
        engine,
        slots=options.batch,
        chunk_tokens=options.chunk_tokens,
        sampling=options.sampling,
        stop_ids=frozenset() if options.ignore_eos else frozenset(engine.setup.model.eos_token_ids),
        progress=lambda done, total: progress(f"{done} of {total} requests done"),
    )


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kibibytes, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024
