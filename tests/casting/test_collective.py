"""The levels that a group spans on each shipped topology, and the seconds of every kind of collective."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.casting.collective import Level, collective_s, levels_of
from castoff.dims import Dim
from castoff.ops.work import Collective, CollectiveKind
from castoff.spec.device import Device, LinkTier, Topology, shipped_devices
from castoff.spec.mesh import Group
from tests.casting.strategies import scaled
from tests.generators import device

A3 = "ATLAS_800_A3_752T_128G_DIE"
A2 = "ATLAS_800_A2_376T_64G"
A350 = "ATLAS_350_425T_112G"
H200 = "h200_sxm"

KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
EFFICIENCY = 0.7
MESSAGE = 3 * 2**20


def ranks(size: int, stride: int = 1, *, on: str) -> tuple[int, ...]:
    return tuple(level.ranks for level in levels_of(Group("any", size, stride), device(on).tiers))


def seconds(
    kind: CollectiveKind,
    size: int,
    stride: int = 1,
    *,
    on: str | Device,
    message: Dim = MESSAGE,
    efficiency: float = EFFICIENCY,
) -> Dim:
    where = device(on) if isinstance(on, str) else on
    return collective_s(Collective(kind, message, Group("any", size, stride)), where, efficiency)


class TestLevels:
    @pytest.mark.parametrize(
        ("on", "size", "stride", "expected"),
        [
            # A3: a card is a pair of dies, a node eight cards, a super node 48 nodes.
            (A3, 2, 1, (2,)),
            (A3, 4, 1, (2, 2)),
            (A3, 8, 1, (2, 4)),
            (A3, 16, 1, (2, 8)),
            (A3, 32, 1, (2, 8, 2)),
            (A3, 768, 1, (2, 8, 48)),
            (A3, 3, 1, (2, 2)),
            (A3, 12, 1, (2, 6)),
            # One die of every card: the pair has no part in it.
            (A3, 8, 2, (8,)),
            (A3, 4, 4, (4,)),
            (A3, 16, 2, (8, 2)),
            # One die of every node.
            (A3, 2, 16, (2,)),
            (A3, 48, 16, (48,)),
            (A3, 24, 32, (24,)),
            (A2, 2, 1, (2,)),
            (A2, 8, 1, (8,)),
            (A2, 16, 1, (8, 2)),
            (A2, 4, 2, (4,)),
            (A2, 8, 2, (4, 2)),
            (A2, 2, 8, (2,)),
            (H200, 8, 1, (8,)),
            (H200, 32, 1, (8, 4)),
            (H200, 4, 8, (4,)),
            (H200, 1024, 1, (8, 128)),
            (A350, 4, 1, (4,)),
            (A350, 8, 1, (4, 2)),
            (A350, 16, 1, (4, 2, 2)),
            (A350, 4, 4, (2, 2)),
        ],
    )
    def test_ranks(self, on: str, size: int, stride: int, expected: tuple[int, ...]) -> None:
        assert ranks(size, stride, on=on) == expected

    @pytest.mark.parametrize("on", shipped_devices())
    def test_a_group_of_one_has_no_level(self, on: str) -> None:
        assert levels_of(Group("alone", 1), device(on).tiers) == ()

    def test_bandwidth_and_latency_are_those_of_the_tier(self) -> None:
        pair, node, super_node = device(A3).tiers
        assert levels_of(Group("ep", 32), device(A3).tiers) == (
            Level(2, pair.bandwidth_bytes_per_s, pair.latency_s),
            Level(8, node.bandwidth_bytes_per_s, node.latency_s),
            Level(2, super_node.bandwidth_bytes_per_s, super_node.latency_s),
        )

    def test_dp_group_over_nodes_skips_the_inner_tiers(self) -> None:
        *_, super_node = device(A3).tiers
        assert levels_of(Group("dp", 4, 16), device(A3).tiers) == (
            Level(4, super_node.bandwidth_bytes_per_s, super_node.latency_s),
        )

    @pytest.mark.parametrize(("size", "links"), [(2, 1), (4, 3), (8, 7)])
    def test_a_part_of_a_full_mesh_uses_its_own_links_only(self, size: int, links: int) -> None:
        node = device(A2).tiers[0]
        (level,) = levels_of(Group("tp", size), device(A2).tiers)
        assert level.bandwidth_bytes_per_s == pytest.approx(node.bandwidth_bytes_per_s * links / 7)

    @pytest.mark.parametrize(
        ("on", "size", "stride", "share"), [(A2, 4, 2, 3 / 7), (A2, 2, 4, 1 / 7), (A350, 2, 2, 1 / 3)]
    )
    def test_a_stride_does_not_add_links(self, on: str, size: int, stride: int, share: float) -> None:
        # Four of eight fully meshed devices have three links among themselves, whichever four they are.
        tier = device(on).tiers[0]
        level = levels_of(Group("ep", size, stride), device(on).tiers)[0]
        assert level.bandwidth_bytes_per_s == pytest.approx(tier.bandwidth_bytes_per_s * share)

    @pytest.mark.parametrize("size", [2, 4, 8])
    def test_a_part_of_a_switch_has_its_whole_bandwidth(self, size: int) -> None:
        (level,) = levels_of(Group("tp", size), device(H200).tiers)
        assert level.bandwidth_bytes_per_s == device(H200).tiers[0].bandwidth_bytes_per_s

    @given(
        on=st.sampled_from([A3, A2, H200, A350]),
        size=st.integers(0, 9).map(lambda power: 2**power),
        stride=st.integers(0, 9).map(lambda power: 2**power),
    )
    def test_levels_hold_the_group(self, on: str, size: int, stride: int) -> None:
        if size * stride <= device(on).max_devices:
            product = int(np.prod([1, *ranks(size, stride, on=on)]))
            # 768 is not a power of two, so the last level may have a unit that is not full.
            assert size <= product < 2 * size
            assert all(level > 1 for level in ranks(size, stride, on=on))


class TestSeconds:
    """On one tier: 8 GPUs of an NVLink node."""

    n = 8
    link = device(H200).tiers[0]
    rate = link.bandwidth_bytes_per_s * EFFICIENCY

    @pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
    def test_one_pass(self, kind: CollectiveKind) -> None:
        expected = MESSAGE * 7 / 8 / self.rate + self.link.latency_s
        assert seconds(kind, self.n, on=H200) == pytest.approx(expected, rel=1e-12)

    def test_all_reduce_is_two(self) -> None:
        expected = 2 * (MESSAGE * 7 / 8 / self.rate + self.link.latency_s)
        assert seconds("all_reduce", self.n, on=H200) == pytest.approx(expected, rel=1e-12)

    def test_send_recv_is_the_message(self) -> None:
        expected = MESSAGE / self.rate + self.link.latency_s
        assert seconds("send_recv", 2, on=H200) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize(("on", "stride", "tier"), [(A3, 1, 0), (A3, 2, 1), (A3, 8, 1), (A3, 16, 2), (H200, 8, 1)])
    def test_send_recv_takes_the_tier_that_joins_the_stages(self, on: str, stride: int, tier: int) -> None:
        link = device(on).tiers[tier]
        expected = MESSAGE / (link.bandwidth_bytes_per_s * EFFICIENCY) + link.latency_s
        assert seconds("send_recv", 2, stride, on=on) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("kind", KINDS)
    def test_one_value_per_scenario(self, kind: CollectiveKind) -> None:
        messages = np.array([1.0, 4096.0, 1e9])
        each = [seconds(kind, 32, on=A3, message=float(message)) for message in messages]
        np.testing.assert_allclose(seconds(kind, 32, on=A3, message=messages), each, rtol=1e-12)


class TestHierarchy:
    """32 dies of an A3: pairs, cards of a node, two nodes."""

    size = 32

    def test_all_gather_moves_at_each_level_what_the_level_needs(self) -> None:
        pair, node, super_node = device(A3).tiers
        expected = (
            MESSAGE / 2 / (pair.bandwidth_bytes_per_s * EFFICIENCY)
            + pair.latency_s
            + MESSAGE / 2 * 7 / 8 / (node.bandwidth_bytes_per_s * EFFICIENCY)
            + node.latency_s
            + MESSAGE / 16 * 1 / 2 / (super_node.bandwidth_bytes_per_s * EFFICIENCY)
            + super_node.latency_s
        )
        assert seconds("all_gather", self.size, on=A3) == pytest.approx(expected, rel=1e-12)
        assert seconds("reduce_scatter", self.size, on=A3) == pytest.approx(expected, rel=1e-12)
        assert seconds("all_reduce", self.size, on=A3) == pytest.approx(2 * expected, rel=1e-12)

    def test_all_to_all_waits_for_its_slowest_level(self) -> None:
        # Of 32 equal pieces one stays, 1 crosses the pair, 14 the node, 16 the super node.
        pair, node, super_node = device(A3).tiers
        expected = max(
            MESSAGE * pieces / 32 / (tier.bandwidth_bytes_per_s * EFFICIENCY) + tier.latency_s
            for pieces, tier in ((1, pair), (14, node), (16, super_node))
        )
        assert seconds("all_to_all", self.size, on=A3) == pytest.approx(expected, rel=1e-12)

    def test_all_to_all_over_infiniband(self) -> None:
        _, infiniband = device(H200).tiers
        expected = MESSAGE * 24 / 32 / (infiniband.bandwidth_bytes_per_s * EFFICIENCY) + infiniband.latency_s
        assert seconds("all_to_all", 32, on=H200) == pytest.approx(expected, rel=1e-12)

    def test_spanning_tiers_is_hierarchical_and_cheaper_than_flat(self) -> None:
        # Flat over InfiniBand would move 15/16 of the message on its links, the hierarchy 1/16.
        _, infiniband = device(H200).tiers
        flat = MESSAGE * 15 / 16 / (infiniband.bandwidth_bytes_per_s * EFFICIENCY)
        inside = seconds("all_gather", 8, on=H200)
        both = seconds("all_gather", 16, on=H200)
        assert inside < both < flat
        extra = MESSAGE / 8 / 2 / (infiniband.bandwidth_bytes_per_s * EFFICIENCY) + infiniband.latency_s
        assert both == pytest.approx(inside + extra, rel=1e-12)


def tiers_of(sizes: list[int], topology: Topology) -> tuple[LinkTier, ...]:
    joined = np.cumprod(sizes)
    return tuple(
        LinkTier(
            name=f"tier {index}",
            num_devices=int(count),
            bandwidth_bytes_per_s=1e11 / (index + 1),
            latency_s=1e-6 * (index + 1),
            topology=topology,
            source="test",
        )
        for index, count in enumerate(joined)
    )


@pytest.mark.property
@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(2, 64),
    stride=st.sampled_from([1, 2, 4, 8]),
    on=st.sampled_from([A3, A2, H200]),
    message=st.integers(0, 2**34),
    more=st.integers(0, 2**34),
)
def test_more_bytes_are_never_faster(
    kind: CollectiveKind, size: int, stride: int, on: str, message: int, more: int
) -> None:
    fewer_s = seconds(kind, size, stride, on=on, message=message)
    assert 0 < fewer_s <= seconds(kind, size, stride, on=on, message=message + more)


@pytest.mark.property
@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(2, 64),
    on=st.sampled_from([A3, A2, H200]),
    message=st.integers(0, 2**34),
    factor=st.floats(1, 100),
)
def test_better_links_are_never_slower(kind: CollectiveKind, size: int, on: str, message: int, factor: float) -> None:
    as_it_is = seconds(kind, size, on=on, message=message)
    assert seconds(kind, size, on=scaled(device(on), links=factor), message=message) <= as_it_is
    assert seconds(kind, size, on=scaled(device(on), latency=1 / factor), message=message) <= as_it_is
    assert seconds(kind, size, on=on, message=message, efficiency=1.0) <= as_it_is


@pytest.mark.property
@given(
    kind=st.sampled_from([kind for kind in KINDS if kind != "send_recv"]),
    powers=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    sizes=st.lists(st.sampled_from([2, 4, 8]), min_size=2, max_size=3),
    message=st.integers(0, 2**34),
)
def test_more_ranks_on_switches_are_never_faster(
    kind: CollectiveKind, powers: tuple[int, int], sizes: list[int], message: int
) -> None:
    # On a full mesh more ranks also mean more links, so this holds for switches only.
    tiers = tiers_of(sizes, "switch")
    few, many = sorted(min(2**power, tiers[-1].num_devices) for power in powers)
    where = replace(device(H200), tiers=tiers)
    less = seconds(kind, few, on=where, message=message)
    assert less <= seconds(kind, many, on=where, message=message) * (1 + 1e-12)
