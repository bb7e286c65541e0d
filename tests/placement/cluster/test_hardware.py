"""Which channel a group of devices has, held against looking at every device."""

from __future__ import annotations

import random
from collections import Counter

from flowrl.placement.cluster.cluster import Cluster
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
