"""Time of a collective on a device's links, hierarchical where its group spans tiers."""

from __future__ import annotations

from dataclasses import dataclass

from castoff.dims import Dim, ceil_div, maximum
from castoff.ops.work import Collective
from castoff.spec.device import Device, LinkTier
from castoff.spec.mesh import Group


@dataclass(frozen=True, slots=True)
class Level:
    """One step of the hierarchy: `ranks` units of the level below exchange over links of one tier."""

    ranks: int
    bandwidth_bytes_per_s: float
    latency_s: float


def levels_of(group: Group, tiers: tuple[LinkTier, ...]) -> tuple[Level, ...]:
    """The levels that a group spans, innermost first.

    A tier whose units hold one member of the group adds no level. In a full mesh of M units, n of them use only the
    links among themselves, so a rank injects (n − 1) / (M − 1) of its bandwidth.
    """
    levels, spanned, inner_devices = [], 1, 1
    for tier in tiers:
        members = min(group.size, max(1, tier.num_devices // group.stride))
        ranks = int(ceil_div(members, spanned))
        if ranks > 1:
            units = tier.num_devices // inner_devices
            mesh_share = min(1.0, (ranks - 1) / max(units - 1, 1)) if tier.topology == "full_mesh" else 1.0
            levels.append(Level(ranks, tier.bandwidth_bytes_per_s * mesh_share, tier.latency_s))
            spanned = members
        inner_devices = tier.num_devices
    return tuple(levels)


def collective_s(collective: Collective, device: Device, link_efficiency: float) -> Dim:
    """Seconds on the links, without the launch.

    all_gather and reduce_scatter work level by level on what the level needs: B·(n − 1)/n innermost, then B/n of it.
    all_reduce is one of each. all_to_all sends to the peers of all levels at once, so the slowest level decides.
    """
    if collective.kind == "send_recv":
        tier = next(tier for tier in device.tiers if not _crosses(collective.group, tier.num_devices))
        return collective.bytes / (tier.bandwidth_bytes_per_s * link_efficiency) + tier.latency_s
    levels = levels_of(collective.group, device.tiers)
    if collective.kind == "all_to_all":
        return _all_to_all_s(collective, levels, link_efficiency)
    phases = 2 if collective.kind == "all_reduce" else 1
    seconds: Dim = 0.0
    share = 1.0
    for level in levels:
        moved = collective.bytes * (share * (level.ranks - 1) / level.ranks)
        seconds = seconds + moved / (level.bandwidth_bytes_per_s * link_efficiency) + level.latency_s
        share /= level.ranks
    return phases * seconds


def _crosses(hop: Group, devices: int) -> bool:
    """Whether a rank of the sending stage and its partner lie in different units of `devices` devices."""
    senders = range(hop.first, hop.first + hop.stride)
    return any(rank // devices != (rank + hop.stride) // devices for rank in senders)


def _all_to_all_s(collective: Collective, levels: tuple[Level, ...], link_efficiency: float) -> Dim:
    seconds: Dim = 0.0
    inside = 1
    for level in levels:
        reached = min(inside * level.ranks, collective.group.size)
        moved = collective.bytes * ((reached - inside) / collective.group.size)
        seconds = maximum(seconds, moved / (level.bandwidth_bytes_per_s * link_efficiency) + level.latency_s)
        inside = reached
    return seconds
