"""What a step is given beside weights: tokens, positions, lengths and caches."""

from __future__ import annotations

from dataclasses import dataclass

from castoff.dims import Dim, ceil_div
from castoff.model.setup import Setup
from castoff.ops.lengths import Lengths
from castoff.ops.program import Abstract, Recorder

KV_BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Tensors of one forward call. Axes: T tokens, B requests, P rope dims.

    busy_ranks: tokens of all attention-DP ranks over those of this one.
    """

    ids_T: Abstract
    cos_TP: Abstract
    sin_TP: Abstract
    slot_mapping_T: Abstract
    block_tables: Abstract
    seq_lens_B: Abstract
    lengths: Lengths
    busy_ranks: Dim


def abstract_inputs(setup: Setup, lengths: Lengths, busy_ranks: Dim, recorder: Recorder) -> StepInputs:
    """Inputs without data for a batch of these lengths."""
    tokens, rope = lengths.tokens, setup.model.qk_rope_head_dim
    return StepInputs(
        ids_T=recorder.tensor(tokens, dtype="int32"),
        cos_TP=recorder.tensor(tokens, rope),
        sin_TP=recorder.tensor(tokens, rope),
        slot_mapping_T=recorder.tensor(tokens, dtype="int32", kind="metadata"),
        block_tables=recorder.tensor(
            lengths.requests, ceil_div(lengths.longest, KV_BLOCK_TOKENS), dtype="int32", kind="metadata"
        ),
        seq_lens_B=recorder.tensor(lengths.requests, dtype="int32", kind="metadata"),
        lengths=lengths,
        busy_ranks=busy_ranks,
    )


class AbstractCaches:
    """Latent and indexer caches without data, as far as this rank holds them; rows are bytes, since a quantised row
    mixes formats."""

    def __init__(self, setup: Setup, lengths: Lengths, recorder: Recorder) -> None:
        rows = ceil_div(lengths.total_tokens, setup.mesh.dcp.size)
        self._latent = recorder.tensor(rows, setup.cache.latent_row_bytes, dtype="int8", kind="cache")
        self._indexer = recorder.tensor(rows, setup.cache.index_row_bytes, dtype="int8", kind="cache")

    def latent(self, layer: int) -> Abstract:
        """Latent rows of a layer."""
        return self._latent

    def indexer(self, layer: int) -> Abstract:
        """Indexer keys of a full layer."""
        return self._indexer
