"""Which piece of every parameter a rank of a run holds."""

from __future__ import annotations

from dataclasses import dataclass

from castoff.model.sharding import piece_index
from castoff.model.weights import Parameter
from castoff.spec.mesh import Group, Mesh


@dataclass(frozen=True, slots=True)
class Cut:
    """An axis is cut into equal pieces, of which one is held."""

    axis: int
    index: int
    pieces: int

    def span(self, size: int) -> tuple[int, int]:
        """Start and end of the piece on an axis of that size."""
        width = size // self.pieces
        return self.index * width, (self.index + 1) * width


def rank_cuts(parameter: Parameter, mesh: Mesh) -> tuple[Cut, ...]:
    """How a parameter is cut for this rank; none where it holds the whole."""
    split = parameter.split
    if parameter.name == "model.embed_tokens":
        split = ((0 if mesh.parallel.word_embedding_tp == "row" else 1, "embed_tp"),)
    placed = ((axis, *_regrouped(group, mesh)) for axis, group in split)
    return tuple(Cut(axis, piece_index(own, other), own.size) for axis, own, other in placed if own.size > 1)


def _regrouped(group: str, mesh: Mesh) -> tuple[Group, Group]:
    """The group that a split is over, and the one between which and it tokens are regrouped."""
    match group:
        case "shared" if mesh.ep.size == 1:
            return mesh.moe_tp, mesh.moe_tp
        case "shared":
            own = mesh.tp if mesh.parallel.enable_shared_expert_tp else Group("shared", 1)
            return own, own
        case "ep" | "moe_tp":
            own = mesh.ep if group == "ep" else mesh.moe_tp
            return own, own
        case "tp":
            return mesh.tp, mesh.o_proj_tp
    own = {"o_proj_tp": mesh.o_proj_tp, "mlp_tp": mesh.mlp_tp, "lmhead_tp": mesh.lmhead_tp, "embed_tp": mesh.embed_tp}[
        group
    ]
    return own, mesh.tp


def held_shape(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[int, ...]:
    """The shape of this rank's piece of a tensor."""
    pieces = {cut.axis: cut.pieces for cut in cuts}
    return tuple(size // pieces.get(axis, 1) for axis, size in enumerate(shape))
