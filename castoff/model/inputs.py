"""What a step is given beside weights: tokens, positions, lengths and caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from castoff.dims import Dim, ceil_div
from castoff.model.setup import Setup
from castoff.ops.lengths import Lengths
from castoff.ops.program import Abstract, Recorder, Tensor

KV_BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Tensors of one forward call. Axes: T tokens, B requests, P rope dims.

    Requests bring equally many tokens each where the tensors are real: T = B · S, the S last tokens of every request.
    longest: tokens of the longest request after the step, or more where the shapes must not follow the lengths.
    lengths: what a cast needs; None where the tensors are real.
    sampled_B: which of its S tokens each request is sampled after, where only one is; None takes the last.
    busy_ranks: tokens of all attention-DP ranks over those of this one.
    """

    ids_T: Tensor
    cos_TP: Tensor
    sin_TP: Tensor
    slot_mapping_T: Tensor
    block_tables: Tensor
    seq_lens_B: Tensor
    longest: Dim
    lengths: Lengths | None
    busy_ranks: Dim = 1
    sampled_B: Tensor | None = None

    @property
    def tokens(self) -> Dim:
        """T."""
        return self.ids_T.shape[0]  # type: ignore[no-any-return]

    @property
    def requests(self) -> Dim:
        """B."""
        return self.seq_lens_B.shape[0]  # type: ignore[no-any-return]


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
        longest=lengths.longest,
        lengths=lengths,
        busy_ranks=busy_ranks,
    )


class CacheSource(Protocol):
    """Where a decoder finds the caches of a layer, abstract or real."""

    def latent(self, layer: int) -> Tensor:
        """Latent rows."""

    def indexer(self, layer: int) -> Tensor:
        """Indexer keys; full layers only."""


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
