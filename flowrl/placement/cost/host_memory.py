"""The memory of hosts: what workers that make way, offloaded ones and staged weights take of it on each node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from ...errors import PlanError
from ..cluster.cluster import Cluster, Nodes

#: The part of a host's memory that a plan leaves free (assumed): for the system, processes, Ray's store and rows.
FREE_PART = 0.1
#: What is in host memory for each device of a pool, bytes by part, by phase.
Phases = Mapping[str, Mapping[str, float]]


def host_room(nodes: Nodes) -> float:
    """Return bytes of a node's host memory that workers can have; without end where nobody knows how much there is.

    That of a ``cpu`` device is the memory of its host, and what leaves it lies in a file.
    """
    has = nodes.host_bytes
    return inf if has is None else has * (1 - FREE_PART)


@dataclass(frozen=True)
class HostUse:
    """What lies in the host memory of each of some equal nodes, bytes by part, by pool and phase.

    ``HostUse((0, 1), "h100-80", 2e12, {"gpu": {"the start": {"actor.train optimizer": 4e11}}})``; ``has``: None where
    nobody knows it. Pools of a node work at the same time, so each counts with its largest phase.
    """

    nodes: tuple[int, ...]
    device: str
    has: float | None
    pools: Mapping[str, Phases]

    @property
    def peaks(self) -> dict[str, str]:
        """The phase of each pool in which most lies there."""
        return {name: max(phases, key=lambda p: sum(phases[p].values())) for name, phases in self.pools.items()}

    @property
    def need(self) -> float:
        """Bytes of all pools in the largest phase of each."""
        return sum(sum(self.pools[name][phase].values()) for name, phase in self.peaks.items())

    @property
    def where(self) -> str:
        """``node 3``, or ``each of the nodes 0-7``."""
        first, last = self.nodes[0], self.nodes[-1]
        if first == last:
            return f"node {first}"
        listed = f"{first}-{last}" if last - first + 1 == len(self.nodes) else ", ".join(map(str, self.nodes))
        return f"each of the nodes {listed}"

    @property
    def error(self) -> PlanError | None:
        """Return None, or how much is needed for what, and what would help; ``at`` is not known here."""
        if self.has is None or self.need <= self.has * (1 - FREE_PART):
            return None
        return PlanError(
            f"{self.where} ({self.device}) needs {_gb(self.need)} GB of host memory beside the {FREE_PART:.0%} that "
            f"stay free, and has {_gb(self.has)} GB: {self._listed()}.",
            fix="Place workers so that fewer make way for others, take more nodes, or write host_memory: in the "
            "cluster if its nodes have more.",
        )

    def _listed(self) -> str:
        parts = Counter[str]()
        for name, phase in self.peaks.items():
            parts.update(self.pools[name][phase])
        largest = sorted(((size, part) for part, size in parts.items() if size >= 5e7), key=lambda p: (-p[0], p[1]))
        return ", ".join(f"{part} {_gb(size)}" for size, part in largest)

    def to_json(self) -> dict[str, object]:
        """As plain data: bytes of each phase of each pool."""
        phases = {name: {p: sum(parts.values()) for p, parts in by.items()} for name, by in self.pools.items()}
        return {"nodes": list(self.nodes), "device": self.device, "has": self.has, "need": self.need, "pools": phases}


def host_uses(cluster: Cluster, pools: Iterable[tuple[str, Sequence[int], Phases]]) -> tuple[HostUse, ...]:
    """Return what lies on which nodes, equal nodes together, of pools with their devices; nodes with nothing left out.

    Devices of kind ``cpu`` put nothing there.
    """
    on_node: dict[int, dict[str, int]] = {}
    phases: dict[str, Phases] = {}
    for name, devices, by_phase in pools:
        if not any(parts for parts in by_phase.values()):
            continue
        phases[name] = by_phase
        for node, count in Counter(map(cluster.node, devices)).items():
            if cluster.nodes_of(cluster.devices_of(node)[0]).kind != "cpu":
                on_node.setdefault(node, {})[name] = count
    alike: dict[object, list[int]] = {}
    for node in sorted(on_node):
        group = cluster.nodes_of(cluster.devices_of(node)[0])
        alike.setdefault((group.kind, group.host_bytes, tuple(on_node[node].items())), []).append(node)
    found: list[HostUse] = []
    for nodes in alike.values():
        group, counts = cluster.nodes_of(cluster.devices_of(nodes[0])[0]), on_node[nodes[0]]
        shares = {
            name: {phase: {part: n * size for part, size in parts.items()} for phase, parts in phases[name].items()}
            for name, n in counts.items()
        }
        found.append(HostUse(tuple(nodes), group.kind, group.host_bytes, shares))
    return tuple(found)


def _gb(size: float) -> str:
    """Bytes as GB (1e9), with one digit where that says anything."""
    return f"{size / 1e9:.1f}".removesuffix(".0")
