"""Whether weights and caches of a run fit, before any is made."""

from __future__ import annotations

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.free_memory import available_bytes
from castoff.model.offload_sizes import offloaded_groups
from castoff.model.setup import Setup
from castoff.model.weights import RankWeights
from castoff.offload.host_store import check_host_bytes
from castoff.offload.memory import OffloadRun, run_bytes
from castoff.ops.program import Recorder, Tensor
from castoff.ops.work import DTYPE_BYTES

torch = lazy.load("torch")


def check_fits(setup: Setup, cache_tokens: int, offload: OffloadRun | None, *, dtype: Tensor, device: Tensor) -> None:
    """Raise CastoffError where this rank's weights and caches for so many tokens exceed the memory that is free, or the
    host memory that may be taken."""
    own_bytes = weights_bytes(setup, dtype.itemsize)
    cache_bytes = cache_tokens * _token_bytes(setup, dtype.itemsize, offload)
    if offload is not None:
        held = run_bytes(setup, offload, dtype=dtype)
        check_host_bytes(held.host, offload.host_bytes)
        # On a CPU both are one memory.
        cache_bytes += held.device + (held.host if device.type == "cpu" else 0)
    free = free_bytes(device)
    if free is not None and own_bytes + cache_bytes > free:
        raise CastoffError(
            f"the run needs {own_bytes:,} bytes for weights and {cache_bytes:,} for caches, and {free:,} are "
            "free; take fewer layers with --num-hidden-layers-override, a smaller --dtype, fewer and shorter requests "
            f"at once{', or smaller --pool-tokens' if offload is not None else ''}"
        )


def weights_bytes(setup: Setup, itemsize: int) -> int:
    """Bytes of this rank's weights. itemsize: of values that are not quantised."""
    held, total = RankWeights(setup, Recorder()), 0.0
    layers = setup.model.num_hidden_layers + (setup.mtp.num_mtp_tokens > 0)
    for weights in (held.outer(), *(held.layer(layer) for layer in range(layers))):
        for weight in weights.values():
            plain = weight.values.elements * max(itemsize, DTYPE_BYTES[weight.values.dtype])
            total += float(plain) if weight.is_plain else weight.bytes
    return int(total)


def _token_bytes(setup: Setup, itemsize: int, offload: OffloadRun | None) -> int:
    """Bytes that a token has in the caches that stay on the device."""
    model, cache, has_mtp = setup.model, setup.cache, setup.mtp.num_mtp_tokens > 0
    layers = model.num_hidden_layers + has_mtp
    if offload is not None:
        layers -= sum(len(group) for group in offloaded_groups(setup, offload.options))
    full = model.indexer_types.count("full") + has_mtp if model.indexer else 0
    latent, key = cache.latent_row_bytes, cache.index_row_bytes
    if cache.action == "DISABLED":
        latent = itemsize * (model.kv_lora_rank + model.qk_rope_head_dim)
    if cache.index_action == "DISABLED":
        key = itemsize * cache.index_key_bytes // 2
    return layers * latent + full * key


def free_bytes(device: Tensor) -> int | None:
    """Free memory of the device; None where the system does not tell."""
    return available_bytes() if device.type == "cpu" else int(torch.accelerator.get_memory_info(device)[0])
