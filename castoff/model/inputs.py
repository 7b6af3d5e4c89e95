"""What a step is given beside weights: tokens, positions, lengths and caches."""

from __future__ import annotations

from dataclasses import dataclass

from castoff.dims import ceil_div
from castoff.model.setup import Setup
from castoff.ops.lengths import Lengths
from castoff.ops.program import Abstract, Recorder

KV_BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Tensors of one forward call. Axes: T tokens, B requests, P rope dims."""

    ids_T: Abstract
    cos_TP: Abstract
    sin_TP: Abstract
    slot_mapping_T: Abstract
    block_tables: Abstract
    seq_lens_B: Abstract
    lengths: Lengths


def abstract_inputs(setup: Setup, lengths: Lengths, recorder: Recorder) -> StepInputs:
    """Inputs without data for a batch of these lengths."""
    tokens, rope = lengths.tokens, setup.model.qk_rope_head_dim
    return StepInputs(
        ids_T=recorder.tensor(tokens, dtype="int32"),
        cos_TP=recorder.tensor(tokens, rope),
        sin_TP=recorder.tensor(tokens, rope),
        slot_mapping_T=recorder.tensor(tokens, dtype="int32"),
        block_tables=recorder.tensor(lengths.requests, ceil_div(lengths.longest, KV_BLOCK_TOKENS), dtype="int32"),
        seq_lens_B=recorder.tensor(lengths.requests, dtype="int32"),
        lengths=lengths,
    )


class AbstractCaches:
    """Latent and indexer caches without data; rows are bytes, since a quantised row mixes formats."""

    def __init__(self, setup: Setup, lengths: Lengths, recorder: Recorder) -> None:
        self._latent = recorder.tensor(lengths.total_tokens, setup.cache.latent_row_bytes, dtype="int8", kind="cache")
        self._indexer = recorder.tensor(lengths.total_tokens, setup.cache.index_row_bytes, dtype="int8", kind="cache")

    def latent(self, layer: int) -> Abstract:
        """Latent rows of a layer."""
        return self._latent

    def indexer(self, layer: int) -> Abstract:
        """Indexer keys of a full layer."""
        return self._indexer
