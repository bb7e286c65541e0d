"""What a group of devices can do together: as much as its slowest device, and over which channel its collectives go."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .channels import Channel
from .cluster import Cluster, Nodes
from .device_specs import DeviceKind, kind_named
from .mesh import Mesh


@dataclass(frozen=True)
class Hardware:
    """The devices of one call. Of devices of several kinds the slowest decides, figure by figure.

    ``Hardware(Cluster.of("h100-80:2x8"), tuple(range(16)), link=0.7, network=0.7)``: of the peak of its channels, so
    much is reached. Without devices: one of kind ``cpu``.
    """

    cluster: Cluster | None
    devices: tuple[int, ...] = ()
    link: float = 1.0
    network: float = 1.0

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(cluster: Cluster | None, devices: tuple[int, ...], link: float = 1.0, network: float = 1.0) -> Hardware:
        """Return the same, kept: what was found out about these devices need not be found out again."""
        return Hardware(cluster, devices, link, network)

    @cached_property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """The kinds among the devices."""
        if self.cluster is None or not self.devices:
            return (kind_named("cpu"),)
        return tuple({k.name: k for k in map(self.cluster.kind, self.devices)}.values())

    @cached_property
    def _members(self) -> dict[tuple[Mesh, tuple[str, ...]], int]:
        return {}

    @property
    def names(self) -> str:
        """``h100-80``, or ``h100-80 and l40s``."""
        return " and ".join(dict.fromkeys(k.name for k in self.kinds))

    @property
    def is_host(self) -> bool:
        """Whether they are CPUs, which move bytes themselves."""
        return all(k.name == "cpu" for k in self.kinds)

    def flops(self, dtype_bytes: float) -> float:
        """Return peak operations per second of the slowest device in the dtype of that many bytes."""
        name = {1: "fp8", 2: "bf16", 4: "fp32"}.get(round(dtype_bytes), "bf16")
        return min(k.flops.get(name) or k.flops["bf16"] for k in self.kinds)

    @property
    def memory(self) -> float:
        """Bytes of the smallest device."""
        return min(k.memory for k in self.kinds)

    @property
    def bandwidth(self) -> float:
        """Bytes per second between the slowest device and its memory."""
        return min(k.bandwidth for k in self.kinds)

    @property
    def host(self) -> float:
        """Bytes per second between a device and the memory of its host."""
        return min(k.host for k in self.kinds)

    def channel(self, members: int = 0, slower: float = 1.0, apart: float = 1.0) -> Channel:
        """Return the one inside a node; with ``members``, that over the network, so many in each node taking part.

        ``slower``: how many times less passes for a ring; ``apart`` for what goes to any device of another node.
        """
        link = min(k.link for k in self.kinds) * self.link
        if not members:
            return Channel(link, max(k.link_latency for k in self.kinds))
        network = min(k.network for k in self.kinds) * self.network
        far, near = max(k.network_latency for k in self.kinds), max(k.link_latency for k in self.kinds)
        return Channel(min(link, members * network / slower), far, members, near, min(link, network / apart))

    def along(self, mesh: Mesh, *axes: str) -> Channel:
        """The channel of the groups along these axes: the link inside a node, the network where a group crosses nodes.

        A ring across nodes uses the adapters of all its members in a node, so ``k`` of them have ``k`` times the
        network share of one, and never more than their link.
        """
        members = self._crossing(mesh, axes)
        return self.channel(members, *self.oversubscribed(mesh, axes)) if members else self.channel()

    def oversubscribed(self, mesh: Mesh | None = None, axes: tuple[str, ...] = ()) -> tuple[float, float]:
        """Return how many times less passes between switches for rings along these axes, and for other messages.

        Without a mesh: among all of the devices.
        """
        nodes = self._slowest_network
        if nodes is None or nodes.oversubscription == 1:
            return 1.0, 1.0
        factor = nodes.oversubscription
        if self._under_one_switch(nodes, mesh, axes):
            return 1.0, factor if nodes.rails else 1.0
        return (1.0 if nodes.rails and not nodes.nodes_per_switch else factor), factor

    @cached_property
    def _slowest_network(self) -> Nodes | None:
        """Those of the nodes of the devices between whose switches the least passes."""
        if self.cluster is None or not self.devices:
            return None
        groups = self.cluster.groups
        there = {self.cluster.nodes_of(device) for device in self.devices} if len(groups) > 1 else groups
        return max(there, key=lambda nodes: nodes.oversubscription)

    def _under_one_switch(self, nodes: Nodes, mesh: Mesh | None, axes: tuple[str, ...]) -> bool:
        assert self.cluster is not None
        most = nodes.nodes_per_switch or 1
        node = self.cluster.node
        if mesh is None:
            return len({node(device) // most for device in self.devices}) < 2
        if len(self.devices) < mesh.size:
            return True
        return all(len({node(self.devices[rank]) // most for rank in group}) < 2 for group in mesh.groups(*axes))

    def crosses(self, mesh: Mesh, *axes: str) -> bool:
        """Whether a group along these axes has devices in several nodes."""
        return self._crossing(mesh, axes) > 0

    def _crossing(self, mesh: Mesh, axes: tuple[str, ...]) -> int:
        """0 when every group along the axes is inside a node, else the fewest members that one has in a node."""
        cluster, key = self.cluster, (mesh, axes)
        if cluster is None or len(self.devices) < mesh.size:
            return 0
        if key not in self._members and (offset := self._offset) is not None:
            self._members[key] = _in_a_node(mesh, axes, offset, len(cluster.devices_of(cluster.node(self.devices[0]))))
        elif key not in self._members:
            groups = (Counter(cluster.node(self.devices[rank]) for rank in g) for g in mesh.groups(*axes))
            self._members[key] = min((min(nodes.values()) for nodes in groups if len(nodes) > 1), default=0)
        return self._members[key]

    @cached_property
    def _offset(self) -> int | None:
        """The place of the first device in its node, where they follow one another through nodes of one size."""
        cluster, devices = self.cluster, self.devices
        if cluster is None or not devices or devices != tuple(range(devices[0], devices[0] + len(devices))):
            return None
        first, last = cluster.node(devices[0]), cluster.node(devices[-1])
        sizes = {len(cluster.devices_of(node)) for node in range(first, last + 1)}
        return devices[0] - cluster.devices_of(first)[0] if len(sizes) == 1 else None

    @cached_property
    def one_node(self) -> bool:
        """Whether all devices are in one node."""
        return self.cluster is None or len({self.cluster.node(d) for d in self.devices}) < 2


def _in_a_node(mesh: Mesh, axes: tuple[str, ...], offset: int, node: int) -> int:
    """The fewest members that a group which crosses nodes has in one, on devices in a row through nodes of one size.

    Groups whose first devices are at the same place of a node lie alike, so one of each is looked at.
    """
    strides, stride = dict[str, int](), 1
    for axis in reversed(list(mesh.axes)):
        strides[axis] = stride
        stride *= mesh[axis]
    first, members = {offset % node}, [0]
    for axis, step in strides.items():
        if axis in axes:
            members = [m + i * step for m in members for i in range(mesh[axis])]
        else:
            first = {(f + i * step) % node for f in first for i in range(min(mesh[axis], node))}
    groups = (Counter((f + m) // node for m in members) for f in first)
    return min((min(nodes.values()) for nodes in groups if len(nodes) > 1), default=0)
