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
class OffloadInputs:
    """What a call over offloaded latent rows is told beside.

    own_rows_T: device row of each token, in decode of the layer's region, in prefill of its buffer; negative for
    padding.
    committed_B: how many tokens have final rows; those after them are this step's own. request_slots_B: −1 for padding.
    ring_first_B: position of the first row that the ring has. buffer_tables: of a prefill buffer, as block_tables.
    stored: of a prefill, how many tokens its request had before, how many it has then, and its blocks.
    """

    own_rows_T: Tensor
    committed_B: Tensor
    request_slots_B: Tensor
    ring_first_B: Tensor
    buffer_tables: Tensor | None = None
    stored: tuple[Dim, Dim, tuple[int, ...]] = (0, 0, ())


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Tensors of one forward call. Axes: T tokens, B requests, P rope dims.

    Requests bring equally many tokens each where the tensors are real: T = B · S, the S last tokens of every request.
    longest: tokens of the longest request after the step, or more where the shapes must not follow the lengths.
    lengths: what a cast needs; None where the tensors are real.
    sampled_B: which of its S tokens each request is sampled after, where only one is; None takes the last.
    busy_ranks: tokens of all attention-DP ranks over those of this one.
    offload: None where all latent rows are on the device.
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
    offload: OffloadInputs | None = None

    @property
    def tokens(self) -> Dim:
        """T."""
        return self.ids_T.shape[0]  # type: ignore[no-any-return]

    @property
    def requests(self) -> Dim:
        """B."""
        return self.seq_lens_B.shape[0]  # type: ignore[no-any-return]


def abstract_inputs(
    setup: Setup, lengths: Lengths, busy_ranks: Dim, recorder: Recorder, offload: OffloadInputs | None = None
) -> StepInputs:
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
        offload=offload,
    )


@dataclass(frozen=True, slots=True)
class Selected:
    """What the layers of an index group share in a step.

    topk_TK: the ids that its owner chose; None for dense attention. rows_TK: their physical rows, where rows are
    offloaded. lists: what of the plan its other layers still need.
    """

    topk_TK: Tensor | None = None
    rows_TK: Tensor | None = None
    lists: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of it, in order, as a block takes and gives it; just the ids where there is no more."""
        return (self.topk_TK,) if self.rows_TK is None else (self.topk_TK, self.rows_TK, *self.lists)

    @classmethod
    def of(cls, topk_TK: Tensor | None = None, rows_TK: Tensor | None = None, *lists: Tensor) -> Selected:
        """From such tensors."""
        return cls(topk_TK, rows_TK, lists)


NOTHING = Selected()


@dataclass(frozen=True, slots=True)
class AttendedRows:
    """What attention reads: ids of the rows of `cache` through block tables, or without them rows of it themselves."""

    cache: Tensor
    ids_TK: Tensor | None
    block_tables: Tensor | None = None
    seq_lens_B: Tensor | None = None
    staging: Tensor | None = None


class LatentCache(Protocol):
    """The latent rows of one layer during one call: written, selected, attended to, in this order."""

    @property
    def block_kind(self) -> str:
        """What sets the layer apart from others of its kind, in the ops that follow here; "" for nothing."""

    def written_to(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """The cache that takes this call's rows, and the slot of each token in it (T,), negative for padding."""

    def select(self, inputs: StepInputs, selected: Selected, *, chosen_here: bool) -> tuple[AttendedRows, Selected]:
        """Make the selected rows readable. chosen_here: this layer chose the ids; else an earlier one of its group."""

    def attended(self, inputs: StepInputs, selected: Selected) -> None:
        """Attention has been called: what need not come before it."""


@dataclass(frozen=True, slots=True)
class ResidentLatents:
    """Rows that are all on the device, (blocks, block tokens, X)."""

    cache: Tensor

    @property
    def block_kind(self) -> str:
        """All layers are alike."""
        return ""

    def written_to(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """The cache itself, at the slots of the tokens."""
        return self.cache, inputs.slot_mapping_T

    def select(self, inputs: StepInputs, selected: Selected, *, chosen_here: bool) -> tuple[AttendedRows, Selected]:
        """They are readable as they are."""
        return AttendedRows(self.cache, selected.topk_TK, inputs.block_tables, inputs.seq_lens_B), selected

    def attended(self, inputs: StepInputs, selected: Selected) -> None:
        """Nothing is left to do."""


class CacheSource(Protocol):
    """Where a decoder finds the caches of a layer, abstract or real."""

    def latent(self, layer: int) -> LatentCache:
        """Latent rows."""

    def indexer(self, layer: int) -> Tensor:
        """Indexer keys; full layers only."""


class AbstractCaches:
    """Latent and indexer caches without data, as far as this rank holds them; rows are bytes, since a quantised row
    mixes formats."""

    def __init__(self, setup: Setup, lengths: Lengths, recorder: Recorder) -> None:
        rows = ceil_div(lengths.total_tokens, setup.mesh.dcp.size)
        self._latent = ResidentLatents(recorder.tensor(rows, setup.cache.latent_row_bytes, dtype="int8", kind="cache"))
        self._indexer = recorder.tensor(rows, setup.cache.index_row_bytes, dtype="int8", kind="cache")

    def latent(self, layer: int) -> ResidentLatents:
        """Latent rows of a layer."""
        return self._latent

    def indexer(self, layer: int) -> Abstract:
        """Indexer keys of a full layer."""
        return self._indexer
