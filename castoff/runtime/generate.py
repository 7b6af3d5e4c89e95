"""`castoff run`: prompts in, tokens out, through the same forward pass that casts."""

from __future__ import annotations

import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import lazy_loader as lazy
import numpy as np

from castoff.errors import CastoffError, CastoffWarning
from castoff.model.setup import Setup
from castoff.offload.memory import OffloadRun
from castoff.ops.program import op_observer
from castoff.policy.compiled import has_numba
from castoff.runtime.checkpoint import Checkpoint, LoadedWeights, RandomTensors
from castoff.runtime.distributed import RunParallel, World, for_rank, joined
from castoff.runtime.engine import Engine, StaticShapes
from castoff.runtime.lockstep import LockstepEngine
from castoff.runtime.memory import check_fits
from castoff.runtime.op_times import OpClock
from castoff.runtime.options import RunOptions, check_options
from castoff.runtime.prompts import load_tokenizer, read_prompts
from castoff.runtime.report import Memory, RunReport
from castoff.runtime.scheduler import Request, Scheduler, StepRecord
from castoff.runtime.stored import TensorSource
from castoff.runtime.structure import default_action, run_setup
from castoff.spec.model import ModelSpec, load_model
from castoff.spec.offload import Offload
from castoff.spec.scenario import Mtp, Parallel, Quant, Scenario
from castoff.trace.header import TraceHeader
from castoff.trace.writer import TraceWriter

torch = lazy.load("torch")


def run(
    model: str, options: RunOptions, parallel: RunParallel | None = None, offload: Offload | None = None, *,
    num_hidden_layers: int | None = None,
    op_times: bool = False, progress: Callable[[str], None] = lambda _: None,
) -> RunReport:  # fmt: skip
    """Load a model and generate; under torchrun, together with the other processes.

    op_times: time every op, which takes a few percent of small models' steps. With options.profile they are timed too.
    Raises CastoffError for options that do not fit together, prompts that cannot be read, a checkpoint that is not
    whole, and where torch is not installed.
    """
    offload = offload or Offload()
    check_options(options, offload)
    with joined(options.device) as world:
        sizes = (parallel or RunParallel()).over(world.size)
        timed = op_times or options.profile is not None
        clock = OpClock(options.device, traced=options.profile is not None) if timed and not world.rank else None
        if world.rank == 0:
            return _run(model, options, sizes, offload, world, num_hidden_layers, clock, progress)
        # One process speaks for all.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CastoffWarning)
            return _run(model, options, sizes, offload, world, num_hidden_layers, clock, lambda _: None)


def _run(
    model: str, options: RunOptions, parallel: Parallel, offload: Offload, world: World,
    num_hidden_layers: int | None, clock: OpClock | None,
    progress: Callable[[str], None],
) -> RunReport:  # fmt: skip
    spec = load_model(model, num_hidden_layers=num_hidden_layers)
    setup = for_rank(_setup(spec, options, parallel), world)
    _check_graph(setup, options)
    tokenizer = load_tokenizer(model)
    requests = [Request(prompt, options.max_new_tokens) for prompt in read_prompts(options, spec, tokenizer)]
    blocks, dtype, device = (
        _blocks(setup, options, requests),
        getattr(torch, options.dtype),
        torch.device(options.device),
    )
    if offload.offloads and options.device == "cpu" and not has_numba():
        warnings.warn(
            "plans and copies of --offload run as plain Python, which is slow: pip install 'castoff[lab]' brings numba",
            CastoffWarning,
            stacklevel=2,
        )
    source = _source(model, setup, options)
    offloaded = _offload_run(setup, options, offload, requests, blocks) if offload.offloads else None
    check_fits(setup, (blocks + 1) * options.kv_block_tokens, offloaded, dtype=dtype, device=device)
    _note_long_requests(spec, requests)
    weights = LoadedWeights(setup, source, dtype=dtype, device=device, progress=progress)
    engine = _engine(setup, weights, options, requests, blocks, offloaded)
    recording = _recording(engine, options, requests) if options.record and not world.rank else nullcontext()
    with closing(engine), recording as record:
        scheduler = _scheduler(engine, options, progress, record)
        if options.graph != "eager":
            progress("making the graphs of a decode step")
        _warm_up(engine, options)
        with torch.inference_mode(), clock.running(lambda: engine.phase) if clock else nullcontext():
            started = time.perf_counter()
            results = scheduler.run(requests)
            total_s = time.perf_counter() - started
        offload_report = engine.offload.report() if engine.offload else None
    return RunReport(
        results=results,
        texts=[tokenizer.decode(result.tokens) for result in results] if tokenizer is not None else None,
        statistics=scheduler.statistics,
        total_s=total_s,
        memory=Memory(weights.bytes, engine.caches.bytes, _peak_bytes(options.device)),
        offload=offload_report,
        ops=clock.times if clock else (),
        trace=clock.trace if clock else None,
        rank=world.rank,
    )


def _setup(spec: ModelSpec, options: RunOptions, parallel: Parallel) -> Setup:
    quant = Quant(
        quantize_linear_action=options.quantize_linear_action or default_action(spec),
        quantize_attention_action=options.quantize_attention_action,
        quantize_indexer_action=options.quantize_indexer_action,
    )
    return run_setup(spec, Scenario(parallel=parallel, quant=quant, mtp=Mtp(num_mtp_tokens=options.num_mtp_tokens)))


def _warm_up(engine: Engine, options: RunOptions) -> None:
    """Make graphs and kernels before the first request. Raises CastoffError, with the op that could not be made."""
    at = ["the graph"]

    @contextmanager
    def noting(name: str) -> Iterator[None]:
        at[0] = name
        yield

    token = op_observer.set(noting)
    try:
        with torch.inference_mode():
            engine.warm_up()
    except CastoffError:
        raise
    # Compilers have errors of their own: torch's, Triton's, and those of the programs that they call.
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        remedy = "use --offload none" if options.graph == "eager" else "--graph eager needs no compiler"
        raise CastoffError(
            f"--graph {options.graph} on {options.device} failed before the first step, at {at[0]}: {reason}; {remedy}"
        ) from error
    finally:
        op_observer.reset(token)


def _check_graph(setup: Setup, options: RunOptions) -> None:
    if options.graph != "eager" and setup.mesh.num_devices > 1:
        raise CastoffError(f"--graph {options.graph} runs on one process, and this run has {setup.mesh.num_devices}")
    if options.graph == "cudagraph" and setup.expert.action != "DISABLED":
        raise CastoffError(
            f"--graph cudagraph cannot capture products of {setup.expert.action} experts, whose sizes must be known "
            "beforehand; use --graph compile, or --quantize-linear-action DISABLED"
        )


def _source(model: str, setup: Setup, options: RunOptions) -> TensorSource:
    """Where the weights come from, a checkpoint checked as far as its headers tell."""
    if options.random_weights is not None:
        return RandomTensors(options.random_weights)
    directory = Path(model)
    if not directory.is_dir():
        raise CastoffError(
            f"{model} is a config without weights; give a directory with a checkpoint, or --random-weights SEED"
        )
    return Checkpoint(directory, setup.model, mtp=options.num_mtp_tokens > 0)


def _most_tokens(options: RunOptions, requests: list[Request]) -> list[int]:
    """Tokens that each request may reach, drafts included, the fewest first."""
    return sorted(len(item.prompt) + item.max_new_tokens + 2 * options.num_mtp_tokens + 1 for item in requests)


def _blocks(setup: Setup, options: RunOptions, requests: list[Request]) -> int:
    """Cache blocks for the largest requests that may run at once."""
    largest = _most_tokens(options, requests)[-_slots(setup, options) :]
    return sum(-(-tokens // options.kv_block_tokens) for tokens in largest)


def _offload_run(
    setup: Setup, options: RunOptions, offload: Offload, requests: list[Request], blocks: int
) -> OffloadRun:
    return OffloadRun(
        options=offload,
        slots=min(_slots(setup, options), len(requests)),
        num_blocks=blocks,
        block_tokens=options.kv_block_tokens,
        longest=_most_tokens(options, requests)[-1],
        host_bytes=None if options.host_gib is None else int(options.host_gib * 2**30),
        check=options.check,
    )


def _engine(
    setup: Setup, weights: LoadedWeights, options: RunOptions, requests: list[Request], blocks: int,
    offload: OffloadRun | None,
) -> Engine:  # fmt: skip
    engine_class = Engine if setup.mesh.dp.size == 1 else LockstepEngine
    static = StaticShapes(min(_slots(setup, options), len(requests)), _most_tokens(options, requests)[-1])
    return engine_class(
        setup,
        weights,
        num_blocks=blocks,
        block_tokens=options.kv_block_tokens,
        dtype=getattr(torch, options.dtype),
        device=torch.device(options.device),
        graph=options.graph,
        static=None if options.graph == "eager" else static,
        offload=offload,
    )


def _note_long_requests(spec: ModelSpec, requests: list[Request]) -> None:
    longest = max(len(item.prompt) + item.max_new_tokens for item in requests)
    if longest > spec.max_position_embeddings:
        warnings.warn(
            f"a request may reach {longest} tokens, and {spec.name} is made for {spec.max_position_embeddings} "
            "(max_position_embeddings)",
            CastoffWarning,
            stacklevel=2,
        )


def _slots(setup: Setup, options: RunOptions) -> int:
    """Requests that run at once on one attention-DP rank."""
    return max(options.batch // setup.mesh.dp.size, 1)


@contextmanager
def _recording(engine: Engine, options: RunOptions, requests: list[Request]) -> Iterator[Callable[[StepRecord], None]]:
    """A trace file of the selections of decode steps, whole once the run has ended well."""
    model, queries = engine.setup.model, 1 + engine.setup.mtp.num_mtp_tokens
    if model.indexer is None or options.record is None:
        raise CastoffError(f"--record: {model.name} has no indexer, so there is nothing to record")
    provenance = {
        "source": "castoff run",
        "weights": "random" if options.random_weights is not None else "checkpoint",
        "dtype": options.dtype,
    }
    batch = min(_slots(engine.setup, options), len(requests))
    header = TraceHeader.of_model(model, batch=batch, query_length=queries, provenance=provenance)
    with TraceWriter(options.record, header) as writer:

        def record(step: StepRecord) -> None:
            ids_GTK = torch.stack(list(step.chosen)).cpu().numpy()
            ids_GBSK = ids_GTK.reshape(len(step.chosen), len(step.lengths), queries, -1)
            writer.append(np.array(step.requests), np.array(step.lengths), np.array(step.kept), ids_GBSK)

        yield record


def _scheduler(
    engine: Engine, options: RunOptions, progress: Callable[[str], None], record: Callable[[StepRecord], None] | None
) -> Scheduler:
    return Scheduler(
        engine,
        slots=_slots(engine.setup, options),
        chunk_tokens=options.chunk_tokens,
        sampling=options.sampling,
        stop_ids=frozenset() if options.ignore_eos else frozenset(engine.setup.model.eos_token_ids),
        progress=lambda done, total: progress(f"{done} of {total} requests done"),
        record=record,
        shares_prefixes=options.share_prefixes,
    )


def _peak_bytes(device: str) -> int:
    if device != "cpu":
        return int(torch.accelerator.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kibibytes, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024
