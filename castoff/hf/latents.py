"""The latent rows of a Hugging Face model in castoff's memory, one pass over its layers after the other.

All requests of a batch have equally many tokens: a position is a column of the batch. Tokens of left padding have rows
like all others, which no query selects.

Axes: B requests of a pass, S tokens of each, T = B · S, L tokens of a request with this pass's, K selected tokens,
H heads, E index_head_dim, X a latent row or a head's query, V v_head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.model.inputs import (
    KV_BLOCK_TOKENS,
    NOTHING,
    LatentCache,
    OffloadInputs,
    ResidentLatents,
    Selected,
    StepInputs,
)
from castoff.model.offload import PrefillRows
from castoff.model.setup import Setup
from castoff.offload.caches import CallRows, OffloadedCaches
from castoff.offload.memory import OffloadRun
from castoff.offload.report import OffloadReport
from castoff.offload.streams import open_streams
from castoff.ops.attention import AttentionSizes, multihead_latent_attention
from castoff.ops.cache_rows import row_storage
from castoff.ops.linear import Weight
from castoff.ops.mlapo import write_rows
from castoff.ops.program import Tensor
from castoff.spec.offload import Offload

torch = lazy.load("torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a cache has room for. batch: requests at once. max_tokens: of each, padding included."""

    batch: int
    max_tokens: int

    @property
    def blocks(self) -> int:
        """Blocks of one request."""
        return -(-self.max_tokens // KV_BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """What stays on the device, by layer: indexer keys (B, tokens, E) of full layers, and latent rows (blocks, block
    tokens, X) where they are not offloaded."""

    index_keys: Mapping[int, Tensor]
    latents: Mapping[int, Tensor]

    def latent(self, layer: int) -> ResidentLatents:
        """Latent rows of a layer."""
        return ResidentLatents(self.latents[layer])

    def indexer(self, layer: int) -> Tensor:
        """Indexer keys of a full layer."""
        return self.index_keys[layer]


def device_rows(setup: Setup, room: Room, *, latents: bool, dtype: Tensor, device: Tensor) -> DeviceRows:
    """Take the memory for them."""
    model, cache = setup.model, setup.cache
    assert model.indexer is not None
    width, stored = row_storage(
        model.kv_lora_rank + model.qk_rope_head_dim, cache.latent_row_bytes, cache.action, dtype
    )
    rows, keys = (
        (room.batch * room.blocks + 1, KV_BLOCK_TOKENS, width),
        (room.batch, room.max_tokens, model.indexer.index_head_dim),
    )
    full = [layer for layer, kind in enumerate(model.indexer_types) if kind == "full"]
    return DeviceRows(
        {layer: torch.zeros(keys, dtype=dtype, device=device) for layer in full},
        {layer: torch.zeros(rows, dtype=stored, device=device) for layer in range(model.num_hidden_layers * latents)},
    )


@dataclass(slots=True)
class _Pass:
    """A pass that has begun. calls: what layers are told, in decode of all requests at once, in prefill of one after
    the other. layer: whose turn it is. selected: by each call, in the index group of that layer."""

    requests: int
    queries: int
    prefill: bool
    calls: tuple[StepInputs, ...]
    layer: int
    selected: list[Selected]


class LatentStore:
    """Latent rows and indexer keys of a batch.

    Raises CastoffError where the host has not enough memory.
    """

    def __init__(
        self, setup: Setup, options: Offload, room: Room, *, dtype: Tensor, device: Tensor, check: bool
    ) -> None:
        self.room = room
        self.length = 0
        self._setup = setup
        self._dtype = dtype
        self._device = device
        self._requests = 0
        self._pass: _Pass | None = None
        self._offload: OffloadedCaches | None = None
        # What is made inside inference mode cannot be written to outside.
        with torch.inference_mode(mode=False):
            if options.offloads:
                run = OffloadRun(
                    options=options, slots=room.batch, num_blocks=room.batch * room.blocks,
                    block_tokens=KV_BLOCK_TOKENS, longest=room.max_tokens, check=check,
                )  # fmt: skip
                # Every layer is offloaded, and indexer keys are not asked for there.
                resident, streams = DeviceRows({}, {}), open_streams(device, inline=False)
                self._offload = OffloadedCaches(setup, run, resident, streams, dtype=dtype, device=device)
            self._resident = device_rows(setup, room, latents=not options.offloads, dtype=dtype, device=device)

    def check_rows(self, rows_BSX: Tensor) -> None:
        """Raise CastoffError where a model gives rows of another kind than when the cache was made."""
        if rows_BSX.dtype != self._dtype or rows_BSX.device != self._device:
            raise CastoffError(
                f"the cache was made for rows of {self._dtype} on {self._device}, and these are of {rows_BSX.dtype} on "
                f"{rows_BSX.device}: make it once the model is as it will be"
            )

    def begin(self, requests: int, queries: int) -> None:
        """Begin a pass over `queries` more tokens of every request. A pass that did not end is forgotten."""
        self._abandon()
        if self.length + queries > self.room.max_tokens:
            raise CastoffError(
                f"the cache has room for max_tokens={self.room.max_tokens} tokens of each request, and this call "
                f"would make them {self.length + queries}; give castoff.hf.offload more, or reset() the cache"
            )
        if self.length == 0:
            self._admit(requests)
        if requests != self._requests:
            raise CastoffError(
                f"the cache holds {self._requests} requests, and this call brings {requests}; reset() it before "
                "another batch, and use num_beams=1"
            )
        prefill = queries > 1 or self.length == 0
        calls = [[request] for request in range(requests)] if prefill else [list(range(requests))]
        inputs = tuple(self._inputs(call, queries, prefill=prefill) for call in calls)
        self._pass = _Pass(requests, queries, prefill, inputs, 0, [NOTHING] * len(inputs))

    def index_keys(self, layer: int, keys_BSE: Tensor) -> Tensor:
        """Add a full layer's indexer keys of this pass; returns all of them, (B, L, E)."""
        found = self._running(layer)
        keys_BLE = self._resident.indexer(layer)[: found.requests, : self.length + found.queries]
        keys_BLE[:, self.length :] = keys_BSE
        return keys_BLE

    def attend(
        self, layer: int, rows_TX: Tensor, q_THX: Tensor, topk_TK: Tensor, kv_b: Tensor, softmax_scale: float
    ) -> Tensor:
        """Store a layer's rows of this pass and attend to the selected ones, (T, H, V).

        topk_TK: int32, −1 for none, at most index_topk of them. kv_b: the weight of kv_b_proj.
        """
        found = self._running(layer)
        topk_limit = self._setup.topk_limit
        assert topk_limit is not None
        topk_TK = torch.nn.functional.pad(topk_TK, (0, topk_limit - topk_TK.shape[1]), value=-1)
        tokens = rows_TX.shape[0] // len(found.calls)
        owns = self._setup.model.indexer_types[layer] == "full"
        outputs: list[Tensor] = []
        for call, inputs in enumerate(found.calls):
            part = slice(call * tokens, (call + 1) * tokens)
            latent = self._latent(layer, found)
            cache, slots_T = latent.written_to(inputs)
            write_rows(cache, slots_T, rows_TX[part])
            chosen = Selected(topk_TK[part]) if owns else found.selected[call]
            rows, found.selected[call] = latent.select(inputs, chosen, chosen_here=owns)
            outputs += multihead_latent_attention(
                q_THX[part], rows.cache, rows.ids_TK, rows.block_tables, rows.seq_lens_B, Weight(kv_b),
                self._sizes(softmax_scale), None, staging=rows.staging,
                phase="prefill" if found.prefill else "decode", quantized=False,
            )  # fmt: skip
            latent.attended(inputs, found.selected[call])
        found.layer += 1
        if found.layer == self._setup.model.num_hidden_layers:
            self.length += found.queries
            self._pass = None
        return torch.cat(outputs)

    def reset(self) -> None:
        """Forget all requests."""
        self._abandon()
        if self._offload is not None:
            for request in range(self._requests):
                self._offload.release(request)
        self._requests = self.length = 0

    def report(self) -> OffloadReport | None:
        """What offload did so far; None where all rows are on the device."""
        return None if self._offload is None else self._offload.report()

    def close(self) -> None:
        """End the streams."""
        if self._offload is not None:
            self._offload.close()

    def _admit(self, requests: int) -> None:
        if requests > self.room.batch:
            raise CastoffError(
                f"the cache has room for batch={self.room.batch} requests, and this call brings {requests}; "
                "num_return_sequences counts each of them"
            )
        self.reset()
        if self._offload is not None:
            for request in range(requests):
                self._offload.admit(request)
        self._requests = requests

    def _abandon(self) -> None:
        if self._pass is not None and self._offload is not None:
            self._offload.abort(range(self._requests))
        self._pass = None

    def _running(self, layer: int) -> _Pass:
        if self._pass is None or self._pass.layer != layer:
            raise CastoffError(
                f"layer {layer} came out of turn: a model that castoff offloads calls its layers in order, each once"
            )
        return self._pass

    def _latent(self, layer: int, found: _Pass) -> LatentCache:
        if self._offload is None:
            return self._resident.latent(layer)
        rows = (self._offload.prefill if found.prefill else self._offload.decode).latent(layer)
        if isinstance(rows, PrefillRows) and found.requests > 1:
            # The next rows to come are another request's of this layer, not this one's of the next.
            return replace(rows, is_first=True, following=None)
        return rows

    def _inputs(self, requests: list[int], queries: int, *, prefill: bool) -> StepInputs:
        """What layers are told of a call."""
        device, length = self._device, self.length + queries
        positions_BS = torch.arange(self.length, length, device=device).expand(len(requests), -1)
        first_block_B = torch.tensor(requests, device=device) * self.room.blocks
        needed = -(-length // KV_BLOCK_TOKENS)
        slots_T = (first_block_B[:, None] * KV_BLOCK_TOKENS + positions_BS).flatten()
        nothing = torch.empty(slots_T.shape[0], 0, dtype=self._dtype, device=device)
        # What tokens these are, and their angles, has no part in storing and finding rows.
        return StepInputs(
            ids_T=slots_T,
            cos_TP=nothing,
            sin_TP=nothing,
            slot_mapping_T=slots_T,
            block_tables=first_block_B[:, None] + torch.arange(needed, device=device),
            seq_lens_B=torch.full((len(requests),), length, device=device),
            longest=length,
            lengths=None,
            offload=self._offload_inputs(requests, length, positions_BS, slots_T, prefill=prefill),
        )

    def _offload_inputs(
        self, requests: list[int], length: int, positions_BS: Tensor, slots_T: Tensor, *, prefill: bool
    ) -> OffloadInputs | None:
        if self._offload is None:
            return None
        count, blocks = len(requests), self.room.blocks
        owned = [range(request * blocks, (request + 1) * blocks) for request in requests]
        rows = CallRows(False, length - self.length, requests, [length] * count, [self.length] * count, owned)
        if prefill:
            return self._offload.prefill_inputs(rows, positions_BS, slots_T, -(-length // KV_BLOCK_TOKENS))
        return self._offload.decode_inputs(rows, positions_BS, slots_T)

    def _sizes(self, softmax_scale: float) -> AttentionSizes:
        model = self._setup.model
        return AttentionSizes(
            heads=model.num_attention_heads,
            qk_nope_head_dim=model.qk_nope_head_dim,
            qk_rope_head_dim=model.qk_rope_head_dim,
            kv_lora_rank=model.kv_lora_rank,
            v_head_dim=model.v_head_dim,
            cache=self._setup.cache,
            softmax_scale=softmax_scale,
            topk_limit=self._setup.topk_limit,
        )
