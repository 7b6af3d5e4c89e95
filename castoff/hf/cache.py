"""A transformers Cache whose latent rows lie in castoff's host store, and `offload`, which makes one for a model."""

from __future__ import annotations

from typing import Any, NoReturn

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.hf.attention import ATTENTION, LAYER_ROWS, LayerRows, register
from castoff.hf.latents import LatentStore, Room
from castoff.hf.library import transformers
from castoff.hf.structure import check_layers, setup_of
from castoff.model.setup import Setup
from castoff.offload.report import OffloadReport
from castoff.ops.cache_rows import latent_rows
from castoff.ops.program import Tensor
from castoff.spec.offload import Offload, check_offload

torch = lazy.load("torch")


_CacheLayer: Any = transformers.cache_utils.CacheLayerMixin
_Cache: Any = transformers.Cache


class LatentLayer(_CacheLayer):  # type: ignore[misc]
    """One layer of an `OffloadedCache`: what transformers' model code calls."""

    is_sliding = False
    is_croppable = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, model: Any, setup: Setup, store: LatentStore, layer: int) -> None:
        super().__init__()
        self._model = model
        self._setup = setup
        self._store = store
        self._layer = layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: all memory was taken when the cache was made."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *, kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hand the fused rows on to castoff's attention, which stores them once it has the layer's selection.

        key_states: latents after their norm, (B, 1, S, R). value_states: rotated keys, (B, 1, S, P). kwargs: what the
        attention function will get; mutated. Returns one token of each: whatever is returned, transformers expands
        to keys and values of all heads, which nobody reads.
        """
        if kwargs is None or self._model.config._attn_implementation != ATTENTION:
            raise CastoffError(
                f'an OffloadedCache works with attn_implementation="{ATTENTION}" of transformers 5.24 or later, which '
                "castoff.hf.offload sets until the cache is closed"
            )
        if self._model.training or (torch.is_grad_enabled() and key_states.requires_grad):
            raise CastoffError("castoff offloads inference: call the model after eval(), under torch.no_grad()")
        rows_BSX = latent_rows(key_states[:, 0], value_states[:, 0], self._setup.cache)
        self._store.check_rows(rows_BSX)
        if self._layer == 0:
            self._store.begin(*rows_BSX.shape[:2])
        kwargs[LAYER_ROWS] = LayerRows(self._store, self._layer, rows_BSX.flatten(0, 1))
        return key_states[:, :, -1:], value_states[:, :, -1:]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Add indexer keys (B, S, E); returns those of all tokens, (B, L, E)."""
        return self._store.index_keys(self._layer, indexer_key_states)

    def get_seq_length(self) -> int:
        """Tokens of each request, this pass's not among them."""
        return self._store.length

    def get_max_length(self) -> int:
        """Tokens that each request may have."""
        return self._store.room.max_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of a mask, and the position of the first."""
        return self._store.length + query_length, 0

    def reset(self) -> None:
        """Forget all tokens."""
        self._store.reset()

    def activate_past_recording(self) -> NoReturn:
        """Raises CastoffError: it announces that tokens will be taken back."""
        raise CastoffError("assisted generation takes tokens back, which castoff's cache cannot: run it without one")

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Raises CastoffError."""
        raise CastoffError("castoff's cache cannot give up its last tokens: reset() it, and prefill again")

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Raises CastoffError."""
        raise CastoffError("beam search reorders the cache, which castoff's cannot: use num_beams=1")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Raises CastoffError."""
        raise CastoffError("castoff's cache cannot repeat its requests: reset() it, and prefill the larger batch")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Raises CastoffError."""
        raise CastoffError("castoff's cache cannot drop some of its requests: reset() it, and prefill the others")


class OffloadedCache(_Cache):  # type: ignore[misc]
    """The cache that `offload` makes: pass it as `cache=`. `reset()` it before another prompt, `close()` it at the end.

    A context manager that closes itself.
    """

    def __init__(self, model: Any, setup: Setup, store: LatentStore) -> None:
        super().__init__(layers=[LatentLayer(model, setup, store, i) for i in range(setup.model.num_hidden_layers)])
        self._model = model
        self._store = store
        self._before: str | None = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)

    def report(self) -> OffloadReport | None:
        """Hit rates and bytes over the link so far; None where all rows are on the device."""
        return self._store.report()

    def close(self) -> None:
        """Give the model the attention that it had, and end the streams."""
        if self._before is not None:
            self._model.set_attn_implementation(self._before)
            self._before = None
            self._store.close()

    def __enter__(self) -> OffloadedCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def offload(model: Any, options: Offload, *, max_tokens: int, batch: int = 1, check: bool = False) -> OffloadedCache:
    """Give a Hugging Face model castoff's attention, and make the cache that goes with it.

        with castoff.hf.offload(model, Offload(offload="direct", pool_tokens=8192), max_tokens=65536) as cache:
            model.generate(ids, cache=cache, max_new_tokens=256)

    model: GlmMoeDsaForCausalLM or DeepseekV32ForCausalLM, whole on one device, in its plain dtype. options: mode and
    pool; mode none is castoff's attention over rows on the device. max_tokens: of prompt and answer, padding included.
    batch: rows of `input_ids` at most. check: compare every row that attention reads with the host's.
    Takes all memory at once. Raises CastoffError for what cannot be offloaded, and where the host has not enough.
    """
    check_offload(options)
    if options.mtp_gather_reuse is not None:
        raise CastoffError("mtp_gather_reuse is about draft calls, and transformers' models have no MTP block")
    for name, value in (("max_tokens", max_tokens), ("batch", batch)):
        if value < 1:
            raise CastoffError(f"{name} must be at least 1, got {value}")
    if not isinstance(model, transformers.PreTrainedModel):
        raise CastoffError(f"castoff.hf.offload takes a model of transformers, got {type(model).__name__}")
    if model.config._attn_implementation == ATTENTION:
        raise CastoffError("the model has an OffloadedCache already: close() it before another is made")
    setup = setup_of(model.config, model.config.name_or_path or type(model).__name__)
    weight = check_layers(model, setup.model)
    register()
    store = LatentStore(
        setup, options, Room(batch=batch, max_tokens=max_tokens), dtype=weight.dtype, device=weight.device, check=check
    )
    return OffloadedCache(model, setup, store)
