"""How weights get from one layout to another: which device hosts which part, and how many bytes that moves.

A device fetches only what it lacks. What is counted, for each device of the destination:

- received: bytes of its destination part that are not in its source part. The groupings ``vanilla`` and ``gather``,
  which are there for comparison, receive the whole model but for the source part.
- peak: bytes of weights there at the worst moment. The source part stays, as training goes on with it, and the
  destination part uses it in place: the bytes that are in either. The whole model for ``vanilla`` and ``gather``.
- redundant: bytes of the source part that are not in the destination part, so kept for training alone. ``gather``
  writes a copy beside the source part, so all of it.

For nested meshes these are the formulas of HybridFlow, arXiv:2409.19256, table 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...errors import PlanError
from ..cluster.cluster import Cluster
from ..cluster.mesh import Mesh
from ..model.layout import Layout, common, volume
from ..model.shape import ModelShape
from .groupings import check_grouping, hybridflow_places, overlap_places
from .transfers import Transfer, Wants


@dataclass(frozen=True)
class Reshard:
    """A move of weights, planned.

    >>> move = plan_reshard(ModelShape.uniform(1, columns=8), Mesh.of("tp=4,dp=2"), Mesh.of("tp=2"))
    >>> move.model_bytes, move.received[0], move.peak[0], move.redundant[0]
    (16, 4, 8, 0)
    >>> [(t.source, t.box) for t in move.transfers() if t.target == 0]
    [(1, ((2, 4), (0, 1)))]

    ``devices`` are those of the destination; ``ranks`` (of the destination's mesh), ``received``, ``peak`` and
    ``redundant`` go with them.
    """

    src: Layout
    dst: Layout
    src_devices: tuple[int, ...]
    devices: tuple[int, ...]
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]  # which copy of the destination a device belongs to
    grouping: str
    received: tuple[int, ...]
    peak: tuple[int, ...]
    redundant: tuple[int, ...]
    cluster: Cluster | None = None

    @property
    def model_bytes(self) -> int:
        """Bytes of the model, each weight once."""
        return self.src.model.parameters * self.src.model.dtype_bytes

    @property
    def total(self) -> int:
        """Bytes received by all devices together."""
        return sum(self.received)

    def transfers(self) -> Iterator[Transfer]:
        """The slices, computed while they are read, as they are many: for a large model, millions.

        Each comes from a holder in the same node if there is one, and of those from the one that sent least so far.
        """
        return self._wants.transfers()

    @cached_property
    def links(self) -> dict[str, int] | None:
        """Bytes received by where they come from: ``{"same_node", "between_nodes"}``; None without a cluster."""
        if self.cluster is None:
            return None
        inside = self._wants.from_own_node(self.cluster)
        return {"same_node": inside, "between_nodes": self.total - inside}

    def to_json(self) -> dict[str, Any]:
        """Bytes by device as lists in the order of ``devices``, with what was asked."""
        found: dict[str, Any] = {
            "model": self.src.model.name,
            "source": str(self.src.mesh),
            "destination": str(self.dst.mesh),
            "grouping": self.grouping,
            "model_bytes": self.model_bytes,
            "source_devices": list(self.src_devices),
            "devices": list(self.devices),
            "ranks": list(self.ranks),
            "replicas": list(self.replicas),
            "bytes_received": list(self.received),
            "peak_bytes": list(self.peak),
            "redundant_bytes": list(self.redundant),
        }
        return {**found, "bytes_by_link": self.links} if self.cluster else found

    @cached_property
    def _wants(self) -> Wants:
        whole = Layout(self.src.model, Mesh()).shards[0]
        everything = self.grouping in ("vanilla", "gather")
        parts = (whole if everything else self.dst.shards[self.dst.shard_of(r)] for r in self.ranks)
        return Wants(self.src, self.src_devices, dict(zip(self.devices, parts, strict=True)), self.cluster)


def plan_reshard(
    model: ModelShape,
    src: Mesh,
    dst: Mesh,
    src_devices: Sequence[int] | None = None,
    dst_devices: Sequence[int] | None = None,
    *,
    cluster: Cluster | None = None,
    inside_node: bool = False,
    grouping: str = "overlap",
    src_fused: bool = False,
    dst_fused: bool = False,
) -> Reshard:
    """Plan the move of a model's weights from one mesh to another.

    ``src_devices``: the device of each rank of ``src``, the first ones if left out. ``dst_devices``: those of the
    destination, which is replicated to fill them; the source's if left out. With the grouping ``overlap`` the bytes
    received by all devices together are the fewest that any choice of hosts allows. ``inside_node`` keeps the ranks of
    a replica in one node of ``cluster``. ``fused``: see :mod:`flowrl.placement.model.layout`.

    Raises PlanError where a size does not divide, devices do not fit, or the grouping does not take these meshes.
    """
    check_grouping(grouping)
    old, new = Layout(model, src, src_fused), Layout(model, dst, dst_fused)
    sources = tuple(range(src.size) if src_devices is None else src_devices)
    devices = sources if dst_devices is None else tuple(dst_devices)
    _check_devices(src, sources, "source", cluster)
    _check_devices(dst, devices, "destination", cluster)
    if inside_node and cluster is None:
        raise PlanError("groups are to stay inside a node, but no cluster says where nodes end.", fix="Give a cluster.")
    held = {d: old.shard_of(rank) for rank, d in enumerate(sources)}
    if grouping == "hybridflow":
        if devices != sources:
            raise PlanError(
                "HybridFlow's grouping is for a source and a destination on the same devices.",
                fix="Use the grouping 'overlap', which takes any devices.",
            )
        places: Iterable[int] = hybridflow_places(src, dst)
    elif grouping == "overlap":
        places = overlap_places(old, new, held, devices, cluster if inside_node else None)
    else:
        places = range(len(devices))
    numbered = [divmod(p, dst.size) for p in places]
    ranks = tuple(rank for _, rank in numbered)
    counts = _count(old, new, [held.get(d) for d in devices], ranks, grouping)
    replicas = tuple(replica for replica, _ in numbered)
    return Reshard(old, new, sources, devices, ranks, replicas, grouping, *counts, cluster=cluster)


def _count(
    src: Layout, dst: Layout, held: Sequence[int | None], ranks: Sequence[int], grouping: str
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Received, peak and redundant bytes; devices with the same part before and after have the same."""
    before, after = src.sizes(), dst.sizes()
    whole = src.model.parameters * src.model.dtype_bytes
    known: dict[tuple[int | None, int], tuple[int, int, int]] = {}
    found: list[tuple[int, int, int]] = []
    for a, rank in zip(held, ranks, strict=True):
        b = dst.shard_of(rank)
        if (a, b) not in known:
            old = 0 if a is None else before[a]
            boxes = () if a is None else zip(src.shards[a], dst.shards[b], strict=True)
            both = sum(volume(common(x, y)) for x, y in boxes) * src.model.dtype_bytes
            if grouping in ("vanilla", "gather"):
                known[a, b] = whole - old, whole, old if grouping == "gather" else old - both
            else:
                known[a, b] = after[b] - both, after[b] + old - both, old - both
        found.append(known[a, b])
    received, peak, redundant = zip(*found, strict=True)
    return received, peak, redundant


def _check_devices(mesh: Mesh, devices: Sequence[int], what: str, cluster: Cluster | None) -> None:
    """Raise PlanError for devices that are there twice, too many or too few, or not in the cluster."""
    if len(set(devices)) != len(devices):
        twice = next(d for d in devices if list(devices).count(d) > 1)
        raise PlanError(f"device {twice} is there twice among those of the {what}.")
    if what == "source" and len(devices) != mesh.size:
        raise PlanError(
            f"the source {mesh} takes {mesh.size} devices; there are {len(devices)}.",
            fix="Add dp to the mesh for copies, or name as many devices.",
        )
    if not devices or len(devices) % mesh.size:
        raise PlanError(
            f"the destination {mesh} takes {mesh.size} devices, and copies of it do not fill {len(devices)}.",
            fix=f"Name a multiple of {mesh.size} devices.",
        )
    if cluster is not None and max(devices) >= cluster.size:
        raise PlanError(
            f"device {max(devices)} of the {what} is not in the cluster {cluster}, which has {cluster.size}.",
            fix=f"Name devices up to {cluster.size - 1}, or a larger cluster.",
        )
