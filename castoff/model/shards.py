"""Which piece of every parameter a rank of a run holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from castoff.model.sharding import piece_index
from castoff.spec.mesh import Group, Mesh

if TYPE_CHECKING:
    from castoff.model.weights import Parameter


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
    groups = _groups(mesh)
    placed = ((axis, *groups[group]) for axis, group in split)
    return tuple(Cut(axis, piece_index(own, other), own.size) for axis, own, other in placed if own.size > 1)


def _groups(mesh: Mesh) -> dict[str, tuple[Group, Group]]:
    """The group that a split of a name is over, and the one between which and it tokens are regrouped."""
    shared = mesh.tp if mesh.parallel.enable_shared_expert_tp else Group("shared", 1)
    if mesh.ep.size == 1:
        shared = mesh.moe_tp
    return {
        "tp": (mesh.tp, mesh.o_proj_tp),
        "o_proj_tp": (mesh.o_proj_tp, mesh.tp),
        "mlp_tp": (mesh.mlp_tp, mesh.tp),
        "lmhead_tp": (mesh.lmhead_tp, mesh.tp),
        "embed_tp": (mesh.embed_tp, mesh.tp),
        "ep": (mesh.ep, mesh.ep),
        "moe_tp": (mesh.moe_tp, mesh.moe_tp),
        "shared": (shared, shared),
    }


def held_shape(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> tuple[int, ...]:
    """The shape of this rank's piece of a tensor."""
    pieces = {cut.axis: cut.pieces for cut in cuts}
    return tuple(size // pieces.get(axis, 1) for axis, size in enumerate(shape))
