"""The machines of a plan: groups of equal nodes, devices numbered through, each of a known kind."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import Any

from ...errors import PlanError
from .byte_sizes import written_size
from .device_specs import KINDS, DeviceKind, kind_named
from .this_machine import devices_here, host_bytes

_PART = re.compile(r"^\s*([^:\s]+)\s*:\s*(\d+)\s*x\s*(\d+)\s*$", re.ASCII)
_HOW = "Write kind:NODESxDEVICES, such as h100-80:4x8; several with +; or auto."
MOST = 1 << 20  # devices; more is a slip of the keyboard


@dataclass(frozen=True)
class Nodes:
    """Equal nodes: ``Nodes("h100-80", count=2, devices=8)``.

    ``network``: Gb/s of a node, where it is known better. ``oversubscription``: how many times less than that passes
    between switches, of which each has ``nodes_per_switch`` of the nodes in a row, 0 a switch for each node. ``rails``:
    equal devices of nodes have a switch of their own, so that rings stay on it; what goes to other devices does not.
    ``cores``: those of the processors of a node, of which each rank takes one; 0 where nobody has said.
    ``host_memory``: bytes of a node beside its devices, where they are known better than from the kind.
    """

    kind: str
    count: int
    devices: int
    network: float | None = None
    oversubscription: float = 1.0
    nodes_per_switch: int = 0
    rails: bool = False
    cores: int = 0
    host_memory: float | None = None

    def __post_init__(self) -> None:
        kind_named(self.kind)
        if self.count < 1 or self.devices < 1:
            raise PlanError(f"a cluster of {self.count} nodes with {self.devices} devices has no device.", fix=_HOW)
        if self.count * self.devices > MOST:
            raise PlanError(f"{self.count} nodes with {self.devices} devices are more than {MOST} devices.")
        if self.network is not None and not self.network > 0:
            raise PlanError(f"a network of {self.network:g} Gb/s moves nothing.")
        if self.host_memory is not None:
            self._check_host()
        if not 1 <= self.oversubscription < inf:
            what = "oversubscription is how many times less passes between switches, from 1 up, not "
            raise PlanError(f"{what}{self.oversubscription:g}.", fix="Write oversubscription: 2, or leave it out.")
        if self.oversubscription == 1 and (self.nodes_per_switch or self.rails):
            said = "nodes_per_switch" if self.nodes_per_switch else "rails"
            raise PlanError(f"{said} changes nothing without oversubscription.", fix="Add oversubscription: 2.")

    def _check_host(self) -> None:
        if self.kind == "cpu":
            what = "host_memory is what a node has beside its devices; a cpu device computes in the memory of its host."
            raise PlanError(what, fix="Take it out.")
        if not 0 < (self.host_memory or 0) < inf:
            raise PlanError(
                f"a host_memory of {self.host_memory:g} bytes holds nothing.", fix="Write host_memory: 2TiB."
            )

    @property
    def host_bytes(self) -> float | None:
        """Bytes of memory of the host of a node, as said or by the kind of its devices; None where nobody knows."""
        if self.host_memory is not None:
            return self.host_memory
        share = kind_named(self.kind).host_memory
        return None if share is None else share * self.devices

    @cached_property
    def device_kind(self) -> DeviceKind:
        """The kind of its devices, with the network of these nodes."""
        kind = kind_named(self.kind)
        if self.network is None:
            return kind
        share = self.network * 1e9 / 8 / self.devices
        return replace(kind, network=share, sources={**kind.sources, "network": "the plan"})


@dataclass(frozen=True)
class Cluster:
    """Nodes in a row. Devices are numbered through them: with nodes of 8, device 8 is the first of the second node.

    >>> cluster = fl.Cluster.of("h100-80:2x8+l40s:1x4")
    >>> cluster.size, cluster.nodes, cluster.node(8), cluster.kind(17).name, str(cluster)
    (20, 3, 1, 'l40s', 'h100-80:2x8+l40s:1x4')
    """

    groups: tuple[Nodes, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise PlanError("a cluster has nodes.", fix=_HOW)
        object.__setattr__(self, "groups", tuple(self.groups))

    @cached_property
    def _kinds(self) -> list[DeviceKind]:
        return [g.device_kind for g in self.groups for _ in range(g.count)]

    @cached_property
    def _groups(self) -> list[Nodes]:
        return [g for g in self.groups for _ in range(g.count)]

    @cached_property
    def _ends(self) -> list[int]:
        """For each node the number of the device behind its last one."""
        return list(accumulate(g.devices for g in self.groups for _ in range(g.count)))

    @property
    def size(self) -> int:
        """How many devices there are."""
        return self._ends[-1] if self._ends else 0

    @property
    def cores(self) -> int:
        """How many cores of processors all nodes have; 0 where that of some is not known."""
        return sum(g.cores * g.count for g in self.groups) if all(g.cores for g in self.groups) else 0

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self._ends)

    def node(self, device: int) -> int:
        """Return the node that a device is in. Raises IndexError."""
        if not 0 <= device < self.size:
            raise IndexError(f"device {device} of {self.size}")
        return bisect_right(self._ends, device)

    def nodes_of(self, device: int) -> Nodes:
        """Return the group of nodes that a device is in. Raises IndexError."""
        return self._groups[self.node(device)]

    def kind(self, device: int) -> DeviceKind:
        """Return the kind of a device. Raises IndexError."""
        return self._kinds[self.node(device)]

    def devices_of(self, node: int) -> range:
        """Return the devices of a node."""
        return range(self._ends[node - 1] if node else 0, self._ends[node])

    @staticmethod
    def of(text: str) -> Cluster:
        """Read ``h100-80:4x8`` (kind, nodes x devices per node), several with ``+``; ``auto``: this machine.

        Raises PlanError for anything else.
        """
        if text.strip() == "auto":
            return Cluster.auto()
        groups: list[Nodes] = []
        for part in text.split("+"):
            found = _PART.match(part)
            if not found:
                raise PlanError(f"'{part.strip()}' is no cluster.", have=KINDS, fix=_HOW)
            groups.append(Nodes(found[1], int(found[2]), int(found[3])))
        return Cluster(tuple(groups))

    @staticmethod
    def auto() -> Cluster:
        """Return the machine at hand: its GPUs as nvidia-smi names them, or else a node with a device per CPU core.

        Raises PlanError for a GPU of a kind that is not known.
        """
        here = devices_here()
        if len(here) == 1 and here[0][0] != "cpu":
            return Cluster((Nodes(here[0][0], 1, here[0][1], host_memory=host_bytes()),))
        return Cluster(tuple(Nodes(kind, 1, devices) for kind, devices in here))

    def __str__(self) -> str:
        return "+".join(f"{g.kind}:{g.count}x{g.devices}" for g in self.groups)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the groups as a plan file writes them."""
        return [
            {"device": g.kind, "nodes": g.count, "devices_per_node": g.devices}
            | ({} if g.network is None else {"network": g.network})
            | ({} if g.oversubscription == 1 else {"oversubscription": g.oversubscription})
            | ({"nodes_per_switch": g.nodes_per_switch} if g.nodes_per_switch else {})
            | ({"rails": True} if g.rails else {})
            | ({"cores_per_node": g.cores} if g.cores else {})
            | ({} if g.host_memory is None else {"host_memory": written_size(g.host_memory)})
            for g in self.groups
        ]
