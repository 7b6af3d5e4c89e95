"""What `castoff run` is asked for: its flags, the keys of its --config file, and the argument of `run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.ops.accelerator import require_triton
from castoff.ops.quantization import RUNNABLE_ACTIONS
from castoff.runtime.graphs import GraphMode
from castoff.runtime.sampling import Sampling
from castoff.spec.checks import MOST
from castoff.spec.offload import Offload, check_offload
from castoff.spec.quant import AttentionAction, LinearAction

torch = lazy.load("torch")


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
    batch: requests that run at once, over all attention-DP ranks.
    dtype: of weights, caches and activations that are not quantised.
    quantize_linear_action: format of the linear layers, experts included; unset keeps the checkpoint's own.
    quantize_attention_action: format of the latent KV cache.
    quantize_indexer_action: format of the indexer cache; unset means quantize_attention_action.
    device: where tensors live; npu needs torch_npu and is untested.
    graph: carry out decode steps op by op, compiled by torch.compile, or as a CUDA graph.
    kv_block_tokens: tokens of a cache block, from 16 to 256.
    chunk_tokens: tokens of a prefill chunk.
    share_prefixes: requests whose prompt begins as a running one's take over its cache rows; what follows is computed
        in other chunks, so tokens may differ where two are as likely.
    temperature: 0 takes the most likely token.
    top_p: share of probability that is drawn from.
    seed: of random prompts and of drawn tokens.
    host_gib: host memory that an offloaded KV cache may take, in GiB; unset takes what is free.
    check: in decode steps, compare the rows that attention reads with the host's, and pools with their rules.
    record: write what the indexers select in decode steps to this trace file; of the first process's requests.
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
    quantize_linear_action: LinearAction | None = None
    quantize_attention_action: AttentionAction = "DISABLED"
    quantize_indexer_action: AttentionAction | None = None
    device: Literal["cpu", "cuda", "npu"] = "cpu"
    graph: GraphMode = "eager"
    kv_block_tokens: int = 128
    chunk_tokens: int = 512
    share_prefixes: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    host_gib: float | None = None
    check: bool = False
    record: Path | None = None
    profile: Path | None = None

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen; raises CastoffError for a temperature or top-p that cannot be."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, seed=self.seed)


def check_options(options: RunOptions, offload: Offload) -> None:
    """Refuse options that no model could run with, before anything is loaded.

    Raises CastoffError, also where torch is not installed or sees no such device.
    """
    check_offload(offload)
    for flag, is_given in (("--host-gib", options.host_gib is not None), ("--check", options.check)):
        if is_given and not offload.offloads:
            raise CastoffError(f"{flag} is for an offloaded KV cache; give --offload gather, serve_install or direct")
    if options.host_gib is not None and not 0 < options.host_gib < MOST:
        raise CastoffError(f"--host-gib must be above 0, got {options.host_gib:g}")
    if options.check and options.graph != "eager":
        raise CastoffError(f"--check looks at every step from outside, and --graph {options.graph} hides it; use eager")
    try:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
    except ModuleNotFoundError:
        raise CastoffError("running needs torch: pip install 'castoff[run]'") from None
    if options.device != "cpu" and (accelerator is None or accelerator.type != options.device):
        raise CastoffError(f"--device {options.device}: torch sees no such device here; use --device cpu")
    if options.device != "cpu" and offload.offloads:
        require_triton(f"--offload {offload.offload}")
    if options.graph == "cudagraph" and options.device != "cuda":
        raise CastoffError(f"--graph cudagraph needs --device cuda, got {options.device}; use --graph compile or eager")
    action = options.quantize_linear_action
    if action is not None and action not in RUNNABLE_ACTIONS:
        raise CastoffError(
            f"--quantize-linear-action {action} can be cast, and cannot be run; choose among "
            f"{', '.join(RUNNABLE_ACTIONS)}"
        )
    given = [options.prompt is not None, options.prompt_file is not None, options.random_prompts is not None]
    if sum(given) != 1:
        raise CastoffError("give one of --prompt TEXT, --prompt-file FILE, --random-prompts NxLEN")
    if not 16 <= options.kv_block_tokens <= 256:
        raise CastoffError(f"--kv-block-tokens must be from 16 to 256, got {options.kv_block_tokens}")
    for name in ("batch", "chunk_tokens", "max_new_tokens"):
        value = getattr(options, name)
        if not 1 <= value <= MOST:
            raise CastoffError(f"--{name.replace('_', '-')} must be from 1 to {MOST}, got {value}")
    # Sampling checks its own fields.
    _ = options.sampling
