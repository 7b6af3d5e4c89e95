"""What offload costs: each op, and a whole decode step, beside all rows on the device and beside plain copies.

    python benchmarks/bench_offload.py ops --batch 8 --context 16384
    python benchmarks/bench_offload.py step --mode direct --batch 2 --layers 4 --context 16384
    python benchmarks/bench_offload.py ops --device cuda --batch 128 --context 65536 --graph
    python benchmarks/bench_offload.py step --device cuda --mode direct --batch 32 --layers 8 --context 65536

GLM-5.2's row sizes and, in `step`, its dimensions with 8 experts a layer. Selections are scripted: a step keeps a share
`--hits` of the last one and draws the others anew, so a pool of twice the selection or more has that hit rate. Rows are
appended to benchmarks/offload.csv, with medians of several calls. `link copy` is one large copy from host memory, on a
CPU one within its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from bench_run import Cheap
from rows import append_rows, machine

from castoff import Mtp, Quant, Scenario
from castoff.model.decoder import Decoder, Direct
from castoff.model.inputs import AttendedRows, CacheSource, LatentCache, Selected, StepInputs
from castoff.offload.host_store import host_rows, release
from castoff.offload.memory import OffloadRun
from castoff.ops.attention import AttentionSizes, multihead_latent_attention
from castoff.ops.linear import Weight
from castoff.ops.offload_plan import PlanInputs, PoolSizes, PoolState, RowPlan, plan_direct, plan_serve
from castoff.ops.offload_rows import fetch, install, serve
from castoff.runtime.checkpoint import LoadedWeights
from castoff.runtime.engine import Engine, Rows
from castoff.runtime.structure import run_setup
from castoff.spec.model import raw_config, read_model
from castoff.spec.offload import Offload
from castoff.spec.quant import CacheFormat

COLUMNS = (
    "date", "machine", "torch", "what", "mode", "batch", "context", "pool", "ways", "queries", "layers", "hits",
    "median_s", "rows", "gb_per_s", "repeats",
)  # fmt: skip
TOPK, ROW_VALUES, BLOCK = 2048, 576, 128
HEADS, EXPERTS = 64, 8


@dataclass(frozen=True)
class Measured:
    """One row: what, in which mode, the median, how many rows were moved, and repeats."""

    what: str
    mode: str
    median_s: float
    rows: int = 0
    layers: int = 1


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of several calls after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def captured(call: Callable[[], object], device: torch.device, *, graph: bool) -> Callable[[], object]:
    """The call as a CUDA graph, where one is asked for."""
    if not graph:
        return call
    call()
    synchronize(device)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        call()
    return recorded.replay


def selections(options: argparse.Namespace, queries: int) -> Iterator[np.ndarray]:
    """Ids (B · S, K) of step after step: of every request, the queries share most of their selection."""
    random = np.random.default_rng(0)
    held = np.stack([random.permutation(options.context)[:TOPK] for _ in range(options.batch)])
    new = round((1 - options.hits) * TOPK)
    while True:
        for row in held:
            left = np.setdiff1d(np.arange(options.context), row, assume_unique=True)
            row[random.permutation(TOPK)[:new]] = random.permutation(left)[:new]
        yield np.repeat(held, queries, axis=0).astype(np.int32)


@dataclass
class Requests:
    """A batch at the end of its contexts: rows in host memory and on the device, a pool, and its clock."""

    sizes: PoolSizes
    queries: int
    host: torch.Tensor
    tables: torch.Tensor
    region: torch.Tensor
    staging: torch.Tensor
    selection: torch.Tensor
    state: PoolState
    lengths_B: torch.Tensor
    slots_B: torch.Tensor
    clock: int = 0

    @classmethod
    def of(cls, options: argparse.Namespace) -> Requests:
        """What the options say, with empty pools."""
        device, batch, queries = torch.device(options.device), options.batch, 1 + options.drafts
        sizes = PoolSizes(batch, options.pool // options.ways, options.ways, 2 * queries, queries * TOPK, "fifo")
        blocks = -(-(options.context + queries) // BLOCK)

        def rows(count: int) -> torch.Tensor:
            return torch.zeros(count, ROW_VALUES, dtype=torch.bfloat16, device=device)

        return cls(
            sizes, queries,
            host=host_rows((batch * blocks, BLOCK, ROW_VALUES), torch.bfloat16, device).zero_(),
            tables=torch.arange(batch * blocks, device=device).view(batch, blocks),
            region=rows(sizes.layer_rows + 1),
            staging=rows(batch * queries * TOPK),
            selection=rows(batch * queries * TOPK),
            state=empty_pools(sizes, device),
            lengths_B=torch.full((batch,), options.context + queries, device=device),
            slots_B=torch.arange(batch, device=device),
        )  # fmt: skip

    def inputs(self) -> PlanInputs:
        """Of the next step. Lengths stand still, which changes no cost; the committed tokens, a plan's clock, go on."""
        self.clock += 1
        tokens = torch.zeros(self.sizes.requests * self.queries, dtype=torch.long, device=self.lengths_B.device)
        return PlanInputs(tokens, self.lengths_B, self.lengths_B + self.clock, self.slots_B, self.lengths_B)

    def plan(self, topk_TK: torch.Tensor) -> RowPlan:
        """The next step's."""
        return plan_direct(topk_TK, self.inputs(), self.state, self.sizes)


def bench_ops(options: argparse.Namespace) -> list[Measured]:
    """Plan and fetch of `direct`; serve and install of `serve_install`, from the pool and from an empty one."""
    device, repeats = torch.device(options.device), options.repeats
    own = Requests.of(options)
    drawn = (torch.from_numpy(ids).to(device) for ids in selections(options, own.queries))
    for _ in range(6):
        own.plan(warm := next(drawn))
    fixed = own.inputs()

    def timed(call: Callable[[], object], *, graph: bool = False) -> float:
        return seconds(captured(call, device, graph=graph), device, repeats)

    found = [
        Measured("plan", "direct", timed(lambda: plan_direct(warm, fixed, own.state, own.sizes), graph=options.graph),
                 warm.numel())
    ]  # fmt: skip
    topk = next(drawn)
    plan = own.plan(topk)

    def fetched() -> None:
        fetch(own.host, own.tables, own.slots_B, plan, own.region, own.staging, own.sizes)

    found.append(Measured("fetch", "direct", timed(fetched, graph=options.graph), int(plan.counts_B.sum())))
    for name, state in (("serve", own.state), ("serve, all missed", empty_pools(own.sizes, device))):
        served = plan_serve(topk, fixed, state, own.sizes)
        serve_s = timed(lambda: serve(own.host, own.tables, served, own.region, own.selection))  # noqa: B023
        found.append(Measured(name, "serve_install", serve_s, topk.numel()))
    install_s = timed(lambda: install(own.selection, served, own.region))
    found.append(Measured("install, all missed", "serve_install", install_s, int(served.counts_B.sum())))
    source = own.host.flatten(0, 1)[: len(own.region) + len(own.staging)]
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    found.append(Measured("link copy", "none", timed(lambda: target.copy_(source, non_blocking=True)), len(source)))
    if options.attention:
        found += bench_attention(options, plan.rows_TK, own.region, own.staging, device)
    release(own.host, device)
    return found


def empty_pools(sizes: PoolSizes, device: torch.device) -> PoolState:
    tags = torch.full((sizes.requests, sizes.sets, sizes.ways), -1, dtype=torch.int32, device=device)
    hands = torch.zeros(sizes.requests, sizes.sets, dtype=torch.int32, device=device)
    return PoolState(tags, tags.clone(), hands, hands.clone())


def bench_attention(
    options: argparse.Namespace,
    rows_TK: torch.Tensor,
    region: torch.Tensor,
    staging: torch.Tensor,
    device: torch.device,
) -> list[Measured]:
    """Sparse attention by row, over the pool, and over a cache that has every row."""
    cache = CacheFormat("DISABLED", 2 * ROW_VALUES, 256, 0, "bf16")
    sizes = AttentionSizes(HEADS, 192, 64, 512, 256, cache, 256**-0.5, TOPK)
    dtype = torch.bfloat16
    q = torch.randn(rows_TK.shape[0], HEADS, 256, device=device).to(dtype)
    kv_b = Weight(torch.randn(HEADS * 448, 512, device=device).to(dtype))

    def attend() -> object:
        return multihead_latent_attention(
            q, region, rows_TK, None, None, kv_b, sizes, None, staging=staging, phase="decode", quantized=False
        )

    return [Measured("attention", "direct", seconds(attend, device, options.repeats), rows_TK.numel())]


class Scripted:
    """Caches whose selections are scripted; indexers compute theirs all the same."""

    def __init__(self, caches: CacheSource, drawn: Iterator[np.ndarray], device: torch.device) -> None:
        self._caches, self._drawn, self._device = caches, drawn, device

    def latent(self, layer: int) -> LatentCache:
        return _ScriptedRows(self._caches.latent(layer), self._drawn, self._device)

    def indexer(self, layer: int) -> torch.Tensor:
        return self._caches.indexer(layer)


@dataclass
class _ScriptedRows:
    rows: LatentCache
    drawn: Iterator[np.ndarray]
    device: torch.device

    def written_to(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows.written_to(inputs)

    def select(self, inputs: StepInputs, selected: Selected, *, chosen_here: bool) -> tuple[AttendedRows, Selected]:
        if chosen_here:
            selected = Selected(torch.from_numpy(next(self.drawn)).to(self.device))
        return self.rows.select(inputs, selected, chosen_here=chosen_here)

    def attended(self, inputs: StepInputs, selected: Selected) -> None:
        self.rows.attended(inputs, selected)


def bench_step(options: argparse.Namespace) -> list[Measured]:
    """Decode steps of GLM-5.2 cut to a few layers, at the end of caches of random rows."""
    values = raw_config("zai-org/GLM-5.2")
    lists = {key: values[key][: options.layers] for key in ("indexer_types", "mlp_layer_types")}  # type: ignore[index]
    config = {**values, "num_hidden_layers": options.layers, "n_routed_experts": EXPERTS, **lists}
    spec = read_model(config, name="GLM-5.2 cut", source="benchmark")
    mtp = Mtp(num_mtp_tokens=0)
    setup = run_setup(spec, Scenario(quant=Quant(quantize_linear_action="DISABLED"), mtp=mtp))
    device, dtype, batch = torch.device(options.device), getattr(torch, options.dtype), options.batch
    weights = LoadedWeights(setup, Cheap(), dtype=dtype, device=device)
    longest = options.context + 64
    blocks = batch * -(-longest // BLOCK)
    offload = None
    if options.mode != "none":
        pool = {} if options.mode == "gather" else {"pool_tokens": options.pool, "ways": options.ways}
        prefetch = {"prefetch": False} if options.no_prefetch else {}
        offload = OffloadRun(
            options=Offload(offload=options.mode, **pool, **prefetch), slots=batch, num_blocks=blocks,
            block_tokens=BLOCK, longest=longest,
        )  # fmt: skip
    engine = Engine(setup, weights, num_blocks=blocks, block_tokens=BLOCK, dtype=dtype, device=device, offload=offload)
    for request in range(batch):
        engine.admit(request, longest)
    for rows in engine.offload.memory.layers.values() if engine.offload else ():
        rows.host.normal_()
    caches = engine.offload.decode if engine.offload else engine.caches
    # One script per group would be the same selection for all; each owner draws the next.
    scripted = Scripted(caches, selections_by_owner(options, len(spec.index_groups)), device)
    engine._decode = Decoder(replace(setup, mode="decode"), weights, scripted, Direct())
    ids = torch.randint(1, 1000, (batch, 1), device=device)
    length = options.context

    def step() -> None:
        nonlocal length
        length += 1
        engine.forward(ids, Rows(list(range(batch)), [length] * batch), prefill=False, last=True)

    for _ in range(6):
        step()
    before = engine.offload.report() if engine.offload else None
    median_s = seconds(step, device, options.repeats)
    moved = 0
    if engine.offload and before:
        after = engine.offload.report()
        moved = (after.link_bytes - before.link_bytes) // (2 * ROW_VALUES) // (options.repeats + 1)
        print(f"hit rate {after.hit_rate:.3f}, stall {after.stall_s}")
    engine.close()
    return [Measured("decode step", options.mode, median_s, moved, options.layers)]


def selections_by_owner(options: argparse.Namespace, groups: int) -> Iterator[np.ndarray]:
    """Each group's own script, in turn."""
    scripts = [selections(options, 1) for _ in range(groups)]
    while True:
        for script in scripts:
            yield next(script)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("ops", "step"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--mode", choices=("none", "gather", "serve_install", "direct"), default="direct")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--pool", type=int, default=8192)
    parser.add_argument("--ways", type=int, default=16)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--hits", type=float, default=0.9)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--graph", action="store_true", help="Replay plan and fetch as CUDA graphs.")
    parser.add_argument("--attention", action="store_true", help="Attention by row too.")
    parser.add_argument("--no-prefetch", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "offload.csv")
    options = parser.parse_args()
    with torch.inference_mode():
        found = bench_ops(options) if options.part == "ops" else bench_step(options)
    where = torch.cuda.get_device_name() if options.device == "cuda" else machine()
    itemsize = 4 if options.part == "step" and options.dtype == "float32" else 2
    rows = []
    for item in found:
        values = (
            datetime.now(UTC).date().isoformat(), where, torch.__version__, item.what, item.mode, options.batch,
            options.context, options.pool, options.ways, 1 + options.drafts, item.layers, options.hits,
            f"{item.median_s:.6f}", item.rows, f"{item.rows * ROW_VALUES * itemsize / item.median_s / 1e9:.2f}",
            options.repeats,
        )  # fmt: skip
        rows.append(dict(zip(COLUMNS, values, strict=True)))
        print(*values)
    append_rows(options.output, COLUMNS, rows)


if __name__ == "__main__":
    main()
