"""Plans of KV offload: which physical row every selected token has, and which rows must be brought to the device first.

One plan per index group and step. The latent rows of one layer lie in a `region` on the device, the rows of all
request slots one after the other, as its row codes say:

    pool row of request slot r, set n, way w      r · P + n · W + w             P = N · W
    ring row of request slot r, token position p  R · P + r · G + p mod G       this step's tokens, and a few before
    staging row i of request slot r               R · (P + G) + r · Y + i       in a buffer that layers share in turn
    no row                                        −1

All layers of a group have the same rows, so one plan serves them. A token's set is its id mod N.

Axes: B rows of a call, S queries of each, T = B · S, K selected tokens, X = S · K, R request slots, N sets, W ways,
G ring rows and Y staging rows of a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import lazy_loader as lazy

from castoff.ops import accelerator
from castoff.ops.program import Abstract, Op, OpCall, Shapes, Tensor
from castoff.ops.work import Part, Work
from castoff.policy import arrays, direct, previous, published
from castoff.policy.arrays import STATS, Selection
from castoff.spec.offload import PoolPolicy

torch = lazy.load("torch")


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """R request slots with N sets of W ways, G ring rows and Y staging rows each; how a way is chosen for a miss.

    policy: "previous" where a set is a query's last selection. Of a cast, whose sizes need not be whole, listed is the
    share of a step's places (T · K) that the lists of a plan name, and hosted the share that is read from the host;
    None takes the worst case.
    """

    requests: Any
    sets: Any
    ways: int
    ring_tokens: int
    staging_rows: int
    policy: PoolPolicy | Literal["previous"]
    listed: Any = None
    hosted: Any = None

    @property
    def pool_tokens(self) -> Any:
        """P, rows of a request's pool."""
        return self.sets * self.ways

    @property
    def pool_rows(self) -> Any:
        """Rows of all pools of a layer; codes of ring rows start here."""
        return self.requests * self.pool_tokens

    @property
    def layer_rows(self) -> Any:
        """Rows of pools and rings of a layer; codes of staging rows start here."""
        return self.requests * (self.pool_tokens + self.ring_tokens)


@dataclass(frozen=True, slots=True)
class PoolState:
    """What one index group knows of its pools: int32 (R, N, W) and (R, N).

    tags: token ids, −1 for free. used: tokens committed at the last step that used the row, −1 for never. hands: FIFO
    heads or CLOCK hands. marks: CLOCK's reference bits, one per way.
    """

    tags_RNW: Tensor
    used_RNW: Tensor
    hands_RN: Tensor
    marks_RN: Tensor


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a plan is told of a call. T-axis: the cache slot of each token, negative for padding.

    seq_lens: tokens of each row with this call's. committed: those before which a token may be cached; the others are
    this step's own. request_slots: −1 for a row of padding. ring_first: position of the first row that the ring has.
    """

    slot_mapping_T: Tensor
    seq_lens_B: Tensor
    committed_B: Tensor
    request_slots_B: Tensor
    ring_first_B: Tensor


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Rows that attention reads, (T, K), and what must be copied before: int32 lists (B, X), of which counts_B count.

    ids: the token, or −2 − position for a row of the ring. rows: where it goes. figures: by `policy.arrays.STATS`.
    """

    rows_TK: Tensor
    ids_BX: Tensor
    to_rows_BX: Tensor
    counts_B: Tensor
    figures_BC: Tensor


@dataclass(frozen=True, slots=True)
class ServePlan:
    """Where each selected row comes from, (T, K): a pool row, −2 − id for the host, −1 for none; what to install later.

    Lists (B, X): the distinct missed ids, the pool row of each (−1 where a later one of the list takes it), and which
    flat (T · K) position has its payload.
    """

    sources_TK: Tensor
    ids_BX: Tensor
    to_rows_BX: Tensor
    from_BX: Tensor
    counts_B: Tensor
    figures_BC: Tensor


def _shapes(topk_TK: Abstract, *inputs: Abstract, sizes: PoolSizes, lists: int) -> Shapes:
    tokens, columns = topk_TK.shape
    requests = inputs[1].shape[0]
    # Real lists have room for every place; those of a cast are as long as is expected.
    entries = tokens // requests * columns if sizes.listed is None else tokens / requests * columns * sizes.listed
    listed = ((requests, entries), "int32")
    return (
        ((tokens, columns), "int32"),
        *(listed,) * lists,
        ((requests,), "int32"),
        ((requests, len(STATS)), "int32"),
    )


def _work(call: OpCall) -> Work:
    """Every id is compared with the tags of its set, and leaves a row and entries of the lists.

    A last selection is as long as the new one, so its tags are put into a table, and each id asks that.
    """
    topk_TK, sizes = call.tensor(0), call.attributes["sizes"]
    moved = topk_TK.bytes + sum(output.bytes for output in call.outputs)
    if sizes.policy == "previous":
        asked = 2 * topk_TK.elements
        part = Part(
            "look_up", vector_flops=asked, bytes=moved + topk_TK.bytes, gather_bytes=4 * asked, gather_rows=asked
        )
        return Work((part,))
    tags = topk_TK.elements * sizes.ways
    return Work((Part("look_up", vector_flops=tags, bytes=moved, gather_bytes=4 * tags, gather_rows=topk_TK.elements),))


def _metadata_work(call: OpCall) -> Work:
    ids_BX = call.tensor(1)
    return Work((Part("tags", vector_flops=ids_BX.elements, bytes=4 * ids_BX.bytes),), holds_cores=False)


def _arrays(tensors: tuple[Tensor, ...]) -> list[Any]:
    """Tensors of a CPU as numpy arrays of the same memory."""
    return [tensor.numpy() for tensor in tensors]


def _planned(plan: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array) for array in plan)


def _direct_reference(*inputs: Tensor, sizes: PoolSizes, lists: int) -> tuple[Tensor, ...]:
    *selection, ring_first, tags, used, hands, marks = _arrays(inputs)
    assert sizes.policy != "previous"
    plan = direct.plan_direct(
        sizes.policy, Selection(*selection), ring_first, arrays.PoolState(tags, used, hands, marks),
        ring_tokens=sizes.ring_tokens, staging_rows=sizes.staging_rows,
    )  # fmt: skip
    return _planned(plan)


def _gather_reference(*inputs: Tensor, sizes: PoolSizes, lists: int) -> tuple[Tensor, ...]:
    *selection, _, tags, _, _, _ = _arrays(inputs)
    return _planned(previous.plan_gather(Selection(*selection), tags))


def _serve_reference(*inputs: Tensor, sizes: PoolSizes, lists: int) -> tuple[Tensor, ...]:
    *selection, _, tags, _, hands, _ = _arrays(inputs)
    return _planned(published.plan_serve(Selection(*selection), tags, hands))


def _metadata_reference(*inputs: Tensor, sizes: PoolSizes) -> tuple[()]:
    request_slots, ids, rows, counts, *state = _arrays(inputs)
    published.install_metadata(ids, rows, counts, request_slots, *state)
    return ()


# The state is inputs 6 to 9: tags, used, hands, marks.
PLAN_DIRECT = Op(
    "offload_plan", "offload_plan", _shapes, _work, _direct_reference, outputs=5, mutates=(6, 7, 8, 9),
    opaque=True, kernel=accelerator.plan_direct,
)  # fmt: skip
PLAN_GATHER = Op(
    "gather_plan", "offload_plan", _shapes, _work, _gather_reference, outputs=5, mutates=(6,),
    opaque=True, kernel=accelerator.plan_gather,
)  # fmt: skip
PLAN_SERVE = Op(
    "serve_plan", "offload_plan", _shapes, _work, _serve_reference, outputs=6,
    opaque=True, kernel=accelerator.plan_serve,
)  # fmt: skip
INSTALL_METADATA = Op(
    "install_metadata", "offload_plan", lambda *_, **__: (), _metadata_work, _metadata_reference, outputs=0,
    mutates=(4, 5), opaque=True, kernel=accelerator.install_metadata,
)  # fmt: skip


def plan_direct(topk_TK: Tensor, inputs: PlanInputs, state: PoolState, sizes: PoolSizes) -> RowPlan:
    """Rows for the selected tokens: hits stay, every missed token gets its final row, once. Mutates the state.

        of each request, ids in the order of (query, rank):
            id >= committed              its ring row                                  (this step's own token)
            id in tags[id mod N]         that pool row
            any other, first time        the way of its set that the policy gives up among those that no id of this
                                         step uses; tags name it from now on; its staging row where all are in use
                                         copied from the ring where that still has it, else from the host
            again                        the same row

    Two calls with equal inputs and state have equal results. A rejected draft never enters the tags.
    """
    return RowPlan(*PLAN_DIRECT(topk_TK, *_tensors(inputs, state), sizes=sizes, lists=2))


def plan_gather(topk_TK: Tensor, inputs: PlanInputs, state: PoolState, sizes: PoolSizes) -> RowPlan:
    """Rows for the selected tokens where each query keeps its last selection alone. Mutates the tags.

    Set s is the buffer of query s. Committed ids that it holds stay where they are; every other id is read from the
    host, this step's own too, into the lowest rows that the new selection leaves free.
    """
    return RowPlan(*PLAN_GATHER(topk_TK, *_tensors(inputs, state), sizes=sizes, lists=2))


def plan_serve(topk_TK: Tensor, inputs: PlanInputs, state: PoolState, sizes: PoolSizes) -> ServePlan:
    """Where each selected row comes from, and the FIFO slots that missed tokens get later. Changes nothing.

    This is DsaPlan of the published shared-indexer offload, with the slots that its DsaInstall works out for itself.
    """
    return ServePlan(*PLAN_SERVE(topk_TK, *_tensors(inputs, state), sizes=sizes, lists=3))


def install_metadata(request_slots_B: Tensor, plan: ServePlan, state: PoolState, sizes: PoolSizes) -> None:
    """Name the installed tokens in the tags and move the FIFO heads on: once per group, after its last install."""
    INSTALL_METADATA(
        request_slots_B, plan.ids_BX, plan.to_rows_BX, plan.counts_B, state.tags_RNW, state.hands_RN, sizes=sizes
    )


def _tensors(inputs: PlanInputs, state: PoolState) -> tuple[Tensor, ...]:
    return (
        inputs.slot_mapping_T, inputs.seq_lens_B, inputs.committed_B, inputs.request_slots_B, inputs.ring_first_B,
        state.tags_RNW, state.used_RNW, state.hands_RN, state.marks_RN,
    )  # fmt: skip
