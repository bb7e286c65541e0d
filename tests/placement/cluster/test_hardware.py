"""Which channel a group of devices has, held against looking at every device."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from flowrl.placement.cluster.cluster import Cluster, Nodes
from flowrl.placement.cluster.hardware import Hardware
from flowrl.placement.cluster.mesh import AXES, Mesh

CLUSTERS = ("h100-80:4x8", "h100-80:3x5", "a100-80:2x3", "h100-80:1x72", "h100-80:2x8+l40s:3x4", "a100-80:6x4")


def fewest_in_a_node(cluster: Cluster, mesh: Mesh, devices: tuple[int, ...], axes: tuple[str, ...]) -> int:
    """Of groups that cross nodes, the fewest members that one has in a node: every group, every device."""
    groups = [Counter(cluster.node(devices[rank]) for rank in group) for group in mesh.groups(*axes)]
    return min((min(nodes.values()) for nodes in groups if len(nodes) > 1), default=0)


def test_a_group_has_the_channel_of_its_fewest_members_in_a_node():
    chance, seen = random.Random(0), 0
    while seen < 400:
        cluster = Cluster.of(chance.choice(CLUSTERS))
        mesh = Mesh({axis: chance.choice((1, 1, 1, 2, 3, 4, 5, 8)) for axis in AXES})
        if mesh.size > cluster.size:
            continue
        devices = tuple(range(cluster.size))
        first = chance.randrange(cluster.size - mesh.size + 1)
        used = chance.choice((devices[first:], tuple(chance.sample(devices, mesh.size))))
        axes = tuple(chance.sample(AXES, chance.randint(1, 3)))
        fewest = fewest_in_a_node(cluster, mesh, used, axes)
        assert Hardware(cluster, used).along(mesh, *axes) == Hardware(cluster, used).channel(fewest)
        seen += 1


def over(cluster: Cluster, mesh: str, *axes: str) -> tuple[float, float]:
    """Bytes per second of a ring and of a message to any device, of what they would be without oversubscription."""
    plain = Cluster(tuple(replace(g, oversubscription=1.0, nodes_per_switch=0, rails=False) for g in cluster.groups))
    devices = tuple(range(cluster.size))
    slow, fast = (Hardware(c, devices).along(Mesh.of(mesh), *axes) for c in (cluster, plain))
    return slow.bandwidth / fast.bandwidth, slow.share / fast.share


def test_less_passes_between_switches_and_nothing_less_below_one():
    every = Cluster((Nodes("h100-80", 8, 8, oversubscription=4.0),))
    assert over(every, "dp=8,tp=8", "dp") == (0.25, 0.25)
    blocks = Cluster((Nodes("h100-80", 8, 8, oversubscription=4.0, nodes_per_switch=4),))
    assert over(blocks, "dp=8,tp=8", "dp") == (0.25, 0.25), "through all eight nodes"
    assert over(blocks, "pp=2,dp=4,tp=8", "dp") == (1.0, 1.0), "four nodes below one switch"
    assert over(blocks, "pp=2,dp=4,tp=8", "pp") == (0.25, 0.25)
    along = Hardware(blocks, tuple(range(64))).along(Mesh.of("dp=8,tp=8"), "tp")
    assert along == Hardware(Cluster.of("h100-80:8x8"), tuple(range(64))).along(Mesh.of("dp=8,tp=8"), "tp")


def test_rings_stay_on_their_rail_and_other_messages_do_not():
    rails = Cluster((Nodes("h100-80", 8, 8, oversubscription=4.0, rails=True),))
    assert over(rails, "dp=8,tp=8", "dp") == (1.0, 0.25)
    blocks = Cluster((Nodes("h100-80", 8, 8, oversubscription=4.0, rails=True, nodes_per_switch=4),))
    assert over(blocks, "pp=2,dp=4,tp=8", "dp") == (1.0, 0.25)
    assert over(blocks, "dp=8,tp=8", "dp") == (0.25, 0.25)
    both = Cluster((Nodes("l40s", 2, 8), *blocks.groups))
    assert Hardware(both, tuple(range(16))).oversubscribed() == (1.0, 1.0), "nobody of them is behind such switches"
