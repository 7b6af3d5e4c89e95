"""`castoff run`: prompts in, tokens out, through the same forward pass that casts."""

from __future__ import annotations

import resource
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import lazy_loader as lazy

from castoff.errors import CastoffError, CastoffWarning
from castoff.model.setup import Setup, resolve_setup
from castoff.runtime.checkpoint import Checkpoint, LoadedWeights, RandomTensors
from castoff.runtime.distributed import RunParallel, World, for_rank, joined
from castoff.runtime.engine import Engine, StaticShapes
from castoff.runtime.lockstep import LockstepEngine
from castoff.runtime.op_times import OpClock
from castoff.runtime.options import RunOptions, check_options
from castoff.runtime.prompts import load_tokenizer, read_prompts
from castoff.runtime.report import Memory, RunReport
from castoff.runtime.scheduler import Request, Scheduler
from castoff.runtime.stored import TensorSource
from castoff.spec.backend import load_backend
from castoff.spec.device import load_device
from castoff.spec.model import ModelSpec, load_model
from castoff.spec.quant import LinearAction
from castoff.spec.scenario import Mtp, Parallel, Quant, Scenario

torch = lazy.load("torch")

# The structure is checked against a device that multiplies in every format that runs; no figure of it is used.
_CHECKED_AGAINST = "h200_sxm"


def run(
    model: str, options: RunOptions, parallel: RunParallel | None = None, *, num_hidden_layers: int | None = None,
    op_times: bool = False, progress: Callable[[str], None] = lambda _: None,
) -> RunReport:  # fmt: skip
    """Load a model and generate; under torchrun, together with the other processes.

    op_times: time every op, which takes a few percent of small models' steps. With options.profile they are timed too.
    Raises CastoffError for options that do not fit together, prompts that cannot be read, a checkpoint that is not
    whole, and where torch is not installed.
    """
    check_options(options)
    with joined(options.device) as world:
        sizes = (parallel or RunParallel()).over(world.size)
        if world.size > 1 and options.graph != "eager":
            raise CastoffError(f"--graph {options.graph} runs on one process, and this run has {world.size}")
        timed = op_times or options.profile is not None
        clock = OpClock(options.device, traced=options.profile is not None) if timed and not world.rank else None
        if world.rank == 0:
            return _run(model, options, sizes, world, num_hidden_layers, clock, progress)
        # One process speaks for all.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CastoffWarning)
            return _run(model, options, sizes, world, num_hidden_layers, clock, lambda _: None)


def _run(
    model: str, options: RunOptions, parallel: Parallel, world: World, num_hidden_layers: int | None,
    clock: OpClock | None, progress: Callable[[str], None],
) -> RunReport:  # fmt: skip
    spec = load_model(model, num_hidden_layers=num_hidden_layers)
    setup = for_rank(_setup(spec, options, parallel), world)
    tokenizer = load_tokenizer(model)
    requests = [Request(prompt, options.max_new_tokens) for prompt in read_prompts(options, spec, tokenizer)]
    weights = _weights(model, setup, options, progress)
    engine = _engine(setup, weights, options, requests)
    scheduler = _scheduler(engine, options, progress)
    with torch.inference_mode(), clock.running() if clock else nullcontext():
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
        rank=world.rank,
    )


def _setup(spec: ModelSpec, options: RunOptions, parallel: Parallel) -> Setup:
    quant = Quant(
        quantize_linear_action=options.quantize_linear_action or default_action(spec),
        quantize_attention_action=options.quantize_attention_action,
    )
    scenario = Scenario(parallel=parallel, quant=quant, mtp=Mtp(num_mtp_tokens=options.num_mtp_tokens))
    setup = resolve_setup(spec, load_device(_CHECKED_AGAINST), load_backend("nvidia"), scenario, "decode")
    # Rows travel between ranks as the router leaves them.
    return replace(setup, quantized_dispatch=False)


def default_action(spec: ModelSpec) -> LinearAction:
    """The format in which a checkpoint's linear layers run: the one in which they are stored."""
    return spec.checkpoint_quant.action if spec.checkpoint_quant is not None else "DISABLED"


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


def _engine(setup: Setup, weights: LoadedWeights, options: RunOptions, requests: list[Request]) -> Engine:
    slots = _slots(setup, options)
    # Room for the largest requests that may run at once.
    most = sorted(len(item.prompt) + item.max_new_tokens + 2 * options.num_mtp_tokens + 1 for item in requests)
    blocks = sum(-(-tokens // options.kv_block_tokens) for tokens in most[-slots:])
    engine_class = Engine if setup.mesh.dp.size == 1 else LockstepEngine
    return engine_class(
        setup,
        weights,
        num_blocks=blocks,
        block_tokens=options.kv_block_tokens,
        dtype=getattr(torch, options.dtype),
        device=torch.device(options.device),
        graph=options.graph,
        static=None if options.graph == "eager" else StaticShapes(min(slots, len(requests)), most[-1]),
    )


def _slots(setup: Setup, options: RunOptions) -> int:
    """Requests that run at once on one attention-DP rank."""
    return -(-options.batch // setup.mesh.dp.size)


def _scheduler(engine: Engine, options: RunOptions, progress: Callable[[str], None]) -> Scheduler:
    return Scheduler(
        engine,
        slots=_slots(engine.setup, options),
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
