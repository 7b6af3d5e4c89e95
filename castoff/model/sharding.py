"""Moving tokens between groups: the four patterns of tensor-parallel layers whose group differs from attention's.

Attention's TP group holds T tokens on each of its ranks ("whole"), or T / tp on each ("split"). A layer whose own
group has m ranks sees T·m/tp tokens: with m > tp they are gathered from neighbouring attention-DP ranks, with m < tp
each of the tp / m groups takes its share. Attention-DP ranks that gather from each other bring equally many tokens.
"""

from __future__ import annotations

from castoff.dims import Dim, ceil_div
from castoff.ops.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    first_tokens,
    matmul_all_reduce,
    on_parts,
    reduce_scatter,
    split_tokens,
)
from castoff.ops.linear import Activations, Weight, linear, quantize
from castoff.ops.program import Tensor
from castoff.spec.mesh import Group


def peers(own: Group, tp: Group) -> Group:
    """The ranks that exchange tokens between a TP group and a layer's own group: the larger over the smaller."""
    larger, smaller = max(own.size, tp.size), min(own.size, tp.size)
    return Group(f"{own.name}_peers", larger // smaller, smaller, process=own.process)


def piece_index(own: Group, other: Group) -> int:
    """Which of own.size pieces of a weight this rank holds, where all_to_alls regroup between `own` and `other`.

    The larger group deals its pieces so that what the peers of a rank hold together is one piece of the smaller group.
    """
    if own.size <= other.size:
        return own.position
    return own.position % other.size * (own.size // other.size) + own.position // other.size


def gather_tokens(x_TD: Activations, own: Group, tp: Group) -> Activations:
    """Whole (T, D) to what a rank of `own` works on: (T·m/tp, D)."""
    if own.size >= tp.size:
        return on_parts(lambda x: all_gather(x, peers(own, tp)), x_TD)
    return on_parts(lambda x: split_tokens(x, peers(own, tp)), x_TD)


def join_tokens(x_TD: Activations, group: Group, tokens: Dim) -> Activations:
    """Pieces of `group` to `tokens` tokens; the padding of the last piece is dropped."""
    return on_parts(lambda x: first_tokens(all_gather(x, group), tokens), x_TD)


def reduce_tokens(partial_TD: Tensor, own: Group, tp: Group, tokens: Dim, *, split: bool) -> Tensor:
    """Partial sums (T·m/tp, D) over `own` to whole (T, D) with T = `tokens`, or to split (T/tp, D)."""
    if own.size > tp.size:
        mine_TD = reduce_scatter(partial_TD, own, stretches=own.size // tp.size)
        return mine_TD if split else join_tokens(mine_TD, tp, tokens)
    if own.size == tp.size:
        return reduce_scatter(partial_TD, tp) if split else all_reduce(partial_TD, tp)
    summed_TD = all_reduce(partial_TD, own)
    return split_tokens(summed_TD, own) if split else join_tokens(summed_TD, peers(own, tp), tokens)


def project_and_reduce(
    x_TI: Tensor, weight: Weight, own: Group, tp: Group, tokens: Dim, *, split: bool, fused: bool
) -> Tensor:
    """A row-split linear layer over `own`, its partial sums reduced to whole or split tokens.

    fused: use one kernel for product and all-reduce where the pattern is that plain.
    """
    if fused and not split and own.size == tp.size > 1:
        return matmul_all_reduce(quantize(x_TI, weight), weight, own)
    return reduce_tokens(linear(x_TI, weight), own, tp, tokens, split=split)


def exchange_heads(x_TI: Tensor, own: Group, tp: Group) -> Tensor:
    """Heads of this TP rank for its T tokens, (T, I), to the inputs of the o_proj group: (T·m/tp, I·tp/m)."""
    if own.size == tp.size:
        return x_TI
    tokens, width = x_TI.shape
    group = peers(own, tp)
    if own.size > tp.size:
        return all_to_all(x_TI, group, shape=(tokens * group.size, width // group.size))
    return all_to_all(x_TI, group, shape=(ceil_div(tokens, group.size), width * group.size))
