"""Paged caches on the device: latent rows of every layer, indexer keys of full layers, and who owns which block."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.model.inputs import ResidentLatents
from castoff.model.setup import Setup
from castoff.ops.cache_rows import row_storage
from castoff.ops.program import Tensor
from castoff.spec.quant import AttentionAction

torch = lazy.load("torch")


class PagedCaches:
    """Latent and indexer caches of `num_blocks` blocks of `block_tokens` rows.

    One block more than asked for takes the rows that have no place (padding). MTP blocks have the caches of one layer.
    offloaded: layers whose latent rows are elsewhere.
    """

    def __init__(
        self, setup: Setup, num_blocks: int, block_tokens: int, *, dtype: Tensor, device: Tensor,
        offloaded: Collection[int] = (),
    ) -> None:  # fmt: skip
        model = setup.model
        has_mtp = setup.mtp.num_mtp_tokens > 0
        layers = model.num_hidden_layers + has_mtp
        full = [
            layer for layer in range(model.num_hidden_layers) if model.indexer and model.indexer_types[layer] == "full"
        ]
        if has_mtp and model.indexer:
            full.append(model.num_hidden_layers)

        cache = setup.cache

        def rows(values: int, row_bytes: int, action: AttentionAction) -> Tensor:
            width, stored = row_storage(values, row_bytes, action, dtype)
            return torch.zeros(num_blocks + 1, block_tokens, width, dtype=stored, device=device)

        latent, index = (
            model.kv_lora_rank + model.qk_rope_head_dim,
            model.indexer.index_head_dim if model.indexer else 0,
        )
        own = [layer for layer in range(layers) if layer not in offloaded]
        self._latent = {layer: rows(latent, cache.latent_row_bytes, cache.action) for layer in own}
        self._device = device
        self._indexer = {layer: rows(index, cache.index_row_bytes, cache.index_action) for layer in full}
        self.block_tokens = block_tokens

    def latent(self, layer: int) -> ResidentLatents:
        """Latent rows of a layer, (blocks, block tokens, kv_lora_rank + rope), or the bytes of quantised rows."""
        return ResidentLatents(self._latent[layer])

    def indexer(self, layer: int) -> Tensor:
        """Indexer keys of a full layer, (blocks, block tokens, index_head_dim), or the bytes of quantised keys."""
        return self._indexer[layer]

    @property
    def bytes(self) -> int:
        """Bytes of all caches."""
        return sum(cache.nbytes for cache in (*self._latent.values(), *self._indexer.values()))

    def save(self, blocks: list[int]) -> SavedRows:
        """Copies of some blocks, latent rows and indexer keys together: the one without the other is of no use."""
        index = torch.tensor(blocks, device=self._device)
        return SavedRows(
            {layer: cache[index].clone() for layer, cache in self._latent.items()},
            {layer: cache[index].clone() for layer, cache in self._indexer.items()},
        )

    def restore(self, saved: SavedRows, blocks: list[int]) -> None:
        """Put saved blocks, in order, at other places."""
        index = torch.tensor(blocks, device=self._device)
        for layer, rows in saved.latent.items():
            self._latent[layer][index] = rows
        for layer, rows in saved.indexer.items():
            self._indexer[layer][index] = rows


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Rows of some blocks: per layer that is on the device, and per full layer."""

    latent: dict[int, Tensor]
    indexer: dict[int, Tensor]


class BlockPool:
    """Which blocks are free, and the blocks of each request in order. Requests may share their first blocks."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._block_tokens = block_tokens
        self._owned: dict[int, list[int]] = {}
        self._owners = [0] * num_blocks

    def grow(self, request: int, tokens: int) -> None:
        """Give a request the blocks that `tokens` tokens need. Raises CastoffError where none are left."""
        owned = self._owned.setdefault(request, [])
        needed = -(-tokens // self._block_tokens) - len(owned)
        if needed > len(self._free):
            raise CastoffError(
                f"the KV cache is full: request {request} needs {needed} more blocks of {self._block_tokens} tokens, "
                f"and {len(self._free)} are free"
            )
        for _ in range(needed):
            block = self._free.pop()
            self._owners[block] = 1
            owned.append(block)

    def share(self, request: int, with_request: int, blocks: int) -> None:
        """Give a request, which has none yet, the first blocks of another. Neither may write to them from now on."""
        assert not self._owned.get(request), "a shared prefix comes first"
        shared = self._owned[with_request][:blocks]
        assert len(shared) == blocks, "only blocks that are there can be shared"
        self._owned[request] = shared
        for block in shared:
            self._owners[block] += 1

    def release(self, request: int) -> None:
        """Take all blocks of a request back; those that another one has too stay its own."""
        for block in reversed(self._owned.pop(request, [])):
            self._owners[block] -= 1
            if not self._owners[block]:
                self._free.append(block)

    def blocks(self, request: int) -> list[int]:
        """Blocks of a request, in order of position."""
        return self._owned.get(request, [])

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)
