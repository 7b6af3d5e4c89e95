"""How long castoff's reference decoder takes on CPU beside transformers' (SDPA): GLM-5.2 cut to 4 layers, 8 experts.

    python benchmarks/bench_run.py --which castoff --dtype float32 --context 512
    python benchmarks/bench_run.py --which transformers --dtype float32 --context 16384

One process each, so that neither has the other's memory. Measures one prefill chunk, the last 512 tokens of the context
behind caches of random rows, and one decode step behind it: the median of several, appended to benchmarks/run.csv with
the most memory that the process had.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from rows import append_rows, machine

from castoff import Mtp, Quant, Scenario
from castoff.runtime.checkpoint import LoadedWeights
from castoff.runtime.engine import Engine, Rows
from castoff.runtime.stored import WHOLE, Part, Piece
from castoff.runtime.structure import run_setup
from castoff.spec.model import raw_config, read_model

COLUMNS = ("date", "machine", "torch", "which", "dtype", "context", "prefill_s", "decode_s", "repeats", "peak_gib")
LAYERS, EXPERTS = 4, 8
CHUNK_TOKENS = 512


class Cheap:
    """One row of small random values over and over: the numbers do not change the time."""

    def scales(self, piece: Piece) -> None:
        return None

    def read(self, piece: Piece, part: Part = WHOLE) -> torch.Tensor:
        return random_row(piece.shape[-1]).expand(piece.shape)


def random_row(width: int) -> torch.Tensor:
    return torch.empty(width).uniform_(-0.02, 0.02)


def config() -> dict[str, object]:
    values = raw_config("zai-org/GLM-5.2")
    cut = {"num_hidden_layers": LAYERS, "n_routed_experts": EXPERTS}
    lists = {key: values[key][:LAYERS] for key in ("indexer_types", "mlp_layer_types")}  # type: ignore[index]
    return {**values, **cut, **lists}


def castoff_steps(dtype: torch.dtype, context: int) -> tuple[Callable[[], object], Callable[[], object]]:
    spec = read_model(config(), name="GLM-5.2 cut", source="benchmark")
    scenario = Scenario(quant=Quant(quantize_linear_action="DISABLED"), mtp=Mtp())
    setup = run_setup(spec, scenario)
    cpu = torch.device("cpu")
    weights = LoadedWeights(setup, Cheap(), dtype=dtype, device=cpu)
    engine = Engine(setup, weights, num_blocks=context // 128 + 2, block_tokens=128, dtype=dtype, device=cpu)
    engine.pool.grow(0, context + 1)
    for layer in range(LAYERS):
        engine.caches.latent(layer).cache.normal_()
        if spec.indexer_types[layer] == "full":
            engine.caches.indexer(layer).normal_()
    ids = torch.randint(1, 1000, (1, context + 1))
    start = max(context - CHUNK_TOKENS, 0)
    return (
        lambda: engine.forward(ids[:, start:context], Rows([0], [context]), prefill=True, last=True),
        lambda: engine.forward(ids[:, context:], Rows([0], [context + 1]), prefill=False, last=True),
    )


def transformers_steps(dtype: torch.dtype, context: int) -> tuple[Callable[[], object], Callable[[], object]]:
    from transformers import DynamicCache, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM._from_config(GlmMoeDsaConfig(**config()), attn_implementation="sdpa", dtype=dtype)
    model = model.to_empty(device="cpu").eval()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.copy_(random_row(tensor.shape[-1]))
    ids = torch.randint(1, 1000, (1, context + 1))
    start = max(context - CHUNK_TOKENS, 0)
    state: dict[str, object] = {}

    def filled() -> DynamicCache:
        cache, hf = DynamicCache(config=model.config), model.config
        for layer in range(LAYERS if start else 0):
            latent, key = torch.randn(1, 1, start, hf.kv_lora_rank), torch.randn(1, 1, start, hf.qk_rope_head_dim)
            cache.update(latent.to(dtype), key.to(dtype), layer)
            if hf.indexer_types[layer] == "full":
                cache.update_indexer(torch.randn(1, start, hf.index_head_dim, dtype=dtype), layer)
        return cache

    def prefill() -> None:
        state["cache"] = model(ids[:, start:context], cache=filled(), use_cache=True, logits_to_keep=1).cache

    def decode() -> None:
        # The cache grows by one token a call.
        model(ids[:, context:], cache=state["cache"], use_cache=True)

    return prefill, decode


def median_s(step: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--which", choices=("castoff", "transformers"), required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "run.csv")
    options = parser.parse_args()
    make = castoff_steps if options.which == "castoff" else transformers_steps
    with torch.inference_mode():
        prefill, decode = make(getattr(torch, options.dtype), options.context)
        prefill_s, decode_s = median_s(prefill, options.repeats), median_s(decode, options.repeats)
    row = dict(zip(COLUMNS, (
        datetime.now(UTC).date().isoformat(), machine(), torch.__version__,
        options.which, options.dtype, options.context, f"{prefill_s:.4f}", f"{decode_s:.4f}", options.repeats,
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f}",
    ), strict=True))  # fmt: skip
    append_rows(options.output, COLUMNS, [row])
    print(*row.values())


if __name__ == "__main__":
    main()
