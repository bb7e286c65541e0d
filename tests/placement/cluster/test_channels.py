"""Collectives against closed forms: rings, trees, and groups that cross nodes."""

import pytest

from flowrl.placement.cluster.channels import Channel
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.hardware import Hardware
from flowrl.placement.cluster.mesh import Mesh

#: Two nodes of 8: 100 GB/s through all of them, 10 us between nodes, 1 us inside.
ACROSS = Channel(100e9, 10e-6, near=8, near_latency=1e-6, share=12.5e9)


def test_a_ring_across_nodes_has_one_slow_hop_for_each_further_node():
    assert ACROSS.all_gather(16e9, 16) == pytest.approx(10e-6 + 14e-6 + 15 / 16 * 16e9 / 100e9)


def test_a_sum_of_many_bytes_goes_round_the_ring_and_one_of_few_up_the_tree():
    many, few = 16e9, 1e3
    assert ACROSS.all_reduce(many, 16) == 2 * ACROSS.all_gather(many, 16) < ACROSS.tree(many, 16)
    assert ACROSS.all_reduce(few, 16) == pytest.approx(2 * (10e-6 + 7e-6 + few / 100e9))
    assert ACROSS.all_reduce(few, 16) < 2 * ACROSS.all_gather(few, 16)


@pytest.mark.parametrize(("ranks", "hops"), [(2, 1), (3, 2), (4, 2), (5, 3), (16, 4), (17, 5)])
def test_a_tree_of_single_ranks_is_as_deep_as_the_logarithm(ranks, hops):
    assert Channel(1e9, 1e-3).tree(1.0, ranks) == pytest.approx(2 * (hops * 1e-3 + 1e-9))


def test_everyone_sends_to_other_nodes_through_its_own_share():
    size = 16e9
    expected = 24e-6 + 8 * 1e9 / 12.5e9 + 7 * 1e9 / 100e9  # a latency more, eight parts away, seven near
    assert ACROSS.all_to_all(size, 16) == pytest.approx(expected)
    assert Channel(1e9, 1e-3).all_to_all(4e9, 4) == pytest.approx(3 * (1e-3 + 1.0))


@pytest.mark.parametrize("name", ["all_gather", "all_reduce", "all_to_all"])
def test_nothing_takes_no_time_nor_does_a_group_of_one(name):
    assert getattr(ACROSS, name)(0.0, 8) == 0 and getattr(ACROSS, name)(1e9, 1) == 0


def test_more_bytes_never_take_less_time():
    for name in ("all_gather", "all_reduce", "all_to_all"):
        times = [getattr(ACROSS, name)(10.0**power, 16) for power in range(12)]
        assert times == sorted(times)


def test_a_group_on_two_nodes_knows_its_members_in_each():
    channel = Hardware(Cluster.of("h100-80:2x8"), tuple(range(16))).along(Mesh.of("tp=16"), "tp")
    assert (channel.near, channel.near_latency, channel.share) == (8, 3.4e-6, 50e9)
    assert channel.bandwidth == 400e9 and channel.latency == 14e-6
