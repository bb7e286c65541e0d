"""How weights get from one layout to another: which device hosts which part, and how many bytes that moves.

Layouts become boxes, and boxes are planned as those of a run are (:mod:`flowrl.placement.reshard.senders`): what is
counted here is what a run moves between devices that hold and host the same. What is counted, for each device of the
destination:

- received: bytes of its destination part that are not in its source part. The groupings ``vanilla`` and ``gather``,
  which are there for comparison, receive the whole model but for the source part.
- peak: bytes of weights there at the worst moment. The source part stays, as training goes on with it, and the
  destination part uses it in place: the bytes that are in either. The whole model for ``vanilla`` and ``gather``.
- redundant: bytes of the source part that are not in the destination part, so kept for training alone. ``gather``
  writes a copy beside the source part, so all of it.

For nested meshes these are the formulas of HybridFlow, arXiv:2409.19256, table 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from ...errors import PlanError
from ..backends import LayoutRules
from ..cluster.cluster import Cluster
from ..cluster.mesh import Mesh
from ..model.model_shape import ModelShape
from ..model.weight_layout import PLAIN, Box, Layout
from .hosting import check_grouping, hybridflow_places, overlap_places
from .senders import Alike, Move, MovePlan


@dataclass(frozen=True)
class Reshard:
    """A move of weights, planned.

    >>> move = plan_reshard(ModelShape.uniform(1, columns=8), Mesh.of("tp=4,dp=2"), Mesh.of("tp=2"))
    >>> move.model_bytes, move.received[0], move.peak[0], move.redundant[0]
    (16, 4, 8, 0)
    >>> [(t.source, t.box) for t in move.transfers() if t.target == 0]
    [(1, ((2, 4), (0, 1)))]

    ``plan`` has the boxes, its processes being devices. ``devices`` are those of the destination; ``ranks`` (of the
    destination's mesh), ``received``, ``peak`` and ``redundant`` go with them.
    """

    src: Layout
    dst: Layout
    src_devices: tuple[int, ...]
    devices: tuple[int, ...]
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]  # which copy of the destination a device belongs to
    grouping: str
    plan: MovePlan
    cluster: Cluster | None = None

    @property
    def model_bytes(self) -> int:
        """Bytes of the model, each weight once."""
        return self.src.model.parameters * self.src.model.dtype_bytes

    @property
    def total(self) -> int:
        """Bytes received by all devices together."""
        return sum(self.received)

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Bytes from other devices, by device."""
        return tuple(self.plan.received.get(d, 0) * self.src.model.dtype_bytes for d in self.devices)

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """Bytes to other devices, by device of the source."""
        sent = self.plan.traffic.sent
        return tuple(sent.get(d, 0) * self.src.model.dtype_bytes for d in self.src_devices)

    @cached_property
    def busiest(self) -> tuple[float, float]:
        """The most bytes that a device sends or receives inside its node, and to or from other nodes."""
        passing = self.plan.traffic
        inside = max(self._most(passing.sent_inside), self._most(passing.received_inside))
        return inside, max(self._most(passing.sent_between), self._most(passing.received_between))

    @cached_property
    def busiest_sender(self) -> tuple[float, float]:
        """The most bytes that a device sends of what it holds inside its node, and to other nodes."""
        passing = self.plan.traffic
        held = Counter(passing.sent_inside) - Counter(passing.passed_on)
        return self._most(held), self._most(passing.sent_between)

    @cached_property
    def busiest_receiver(self) -> tuple[float, float]:
        """The most bytes that a device receives inside its node, and from other nodes."""
        passing = self.plan.traffic
        return self._most(passing.received_inside), self._most(passing.received_between)

    @cached_property
    def relayed(self) -> float:
        """The most bytes that a device passes on or takes over inside its node, of what came from another one."""
        return max(self._most(self.plan.traffic.passed_on), self._most(self.plan.traffic.taken_over))

    @cached_property
    def at_once(self) -> float:
        """The most bytes that a device sends or receives inside its node without waiting for others."""
        passing = self.plan.traffic
        received = Counter(passing.received_inside) - Counter(passing.taken_over)
        return max(self.busiest_sender[0], self._most(received))

    def _most(self, numbers: Mapping[int, int]) -> float:
        return float(max(numbers.values(), default=0) * self.src.model.dtype_bytes)

    @cached_property
    def node_links(self) -> dict[int, tuple[int, int]] | None:
        """Bytes that leave each node and that come to it, of nodes with any; None without a cluster."""
        if self.cluster is None:
            return None
        out, into = Counter[int](), Counter[int]()
        for of, found in ((self.plan.traffic.sent_between, out), (self.plan.traffic.received_between, into)):
            for device, numbers in of.items():
                found[self.cluster.node(device)] += numbers * self.src.model.dtype_bytes
        return {node: (out[node], into[node]) for node in sorted({*(+out), *(+into)})}

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """Bytes of weights at the worst moment, by device."""
        if self._everything:
            return (self.model_bytes,) * len(self.devices)
        return tuple(old + new for old, new in zip(self._before, self.received, strict=True))

    @cached_property
    def redundant(self) -> tuple[int, ...]:
        """Bytes that are kept for training alone, by device."""
        if self.grouping == "gather":
            return self._before
        sizes, size = self.dst.sizes(), self.src.model.dtype_bytes
        plan = self.plan
        if self._everything:
            plan = plan_layouts(self.src, self.src_devices, self.dst, self.devices, self.ranks)
        after = (sizes[self.dst.shard_of(rank)] for rank in self.ranks)
        got = (plan.received.get(d, 0) * size for d in self.devices)
        return tuple(old - (new - lacked) for old, new, lacked in zip(self._before, after, got, strict=True))

    def transfers(self) -> Iterator[Move]:
        """Yield the slices that devices lack, computed while they are read: for a large model, millions.

        Each comes from a holder in the same node if there is one, and of those from the one that sent least so far.
        What no holder of a node has comes to it once; others there get it from who got it (``relayed``).
        """
        return (move for move in self.plan.moves() if not move.local)

    @cached_property
    def links(self) -> dict[str, int] | None:
        """Bytes received by where they come from: ``{"same_node", "between_nodes"}``; None without a cluster."""
        if self.cluster is None:
            return None
        inside = sum(self.plan.traffic.received_inside.values()) * self.src.model.dtype_bytes
        return {"same_node": inside, "between_nodes": self.total - inside}

    def to_json(self) -> dict[str, Any]:
        """Return bytes by device as lists in the order of ``devices``, with what was asked."""
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
            "bytes_sent": list(self.sent),
            "peak_bytes": list(self.peak),
            "redundant_bytes": list(self.redundant),
        }
        return {**found, "bytes_by_link": self.links} if self.cluster else found

    @property
    def _everything(self) -> bool:
        """Whether each device receives the whole model."""
        return self.grouping in ("vanilla", "gather")

    @cached_property
    def _before(self) -> tuple[int, ...]:
        """Bytes of the source part, by device."""
        sizes = self.src.sizes()
        held = {d: sizes[self.src.shard_of(rank)] for rank, d in enumerate(self.src_devices)}
        return tuple(held.get(d, 0) for d in self.devices)


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
    rules: LayoutRules = PLAIN,
) -> Reshard:
    """Return the plan of a move of a model's weights from one mesh to another.

    ``src_devices``: the device of each rank of ``src``, the first ones if left out. ``dst_devices``: those of the
    destination, which is replicated to fill them; the source's if left out. With the grouping ``overlap`` the bytes
    received by all devices together are the fewest that any choice of hosts allows. ``inside_node`` keeps the ranks of
    a replica in one node of ``cluster``. ``fused``: see :mod:`flowrl.placement.model.weight_layout`. ``rules``:
    those of the backend of the destination, such as an engine's.

    Raises PlanError where a size does not divide, devices do not fit, or the grouping does not take these meshes.
    """
    check_grouping(grouping)
    old, new = _layout(model, src, src_fused, PLAIN), _layout(model, dst, dst_fused, rules)
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
    replicas = tuple(replica for replica, _ in numbered)
    whole = Layout(model, Mesh()) if grouping in ("vanilla", "gather") else None
    plan = plan_layouts(old, sources, whole or new, devices, [0] * len(ranks) if whole else ranks, cluster=cluster)
    return Reshard(old, new, sources, devices, ranks, replicas, grouping, plan, cluster=cluster)


@lru_cache(maxsize=128)
def _layout(model: ModelShape, mesh: Mesh, fused: bool, rules: LayoutRules) -> Layout:
    """A layout, kept: what each rank has need not be found out again."""
    return Layout(model, mesh, fused, rules)


def plan_layouts(
    src: Layout,
    src_devices: Sequence[int],
    dst: Layout,
    devices: Sequence[int],
    ranks: Sequence[int],
    *,
    cluster: Cluster | None = None,
) -> MovePlan:
    """Return the plan from one layout of a model to another; ``devices`` host the ``ranks`` of the destination."""
    held = {d: src.shards[src.shard_of(rank)] for rank, d in enumerate(src_devices)}
    wanted = {d: dst.shards[dst.shard_of(rank)] for d, rank in zip(devices, ranks, strict=True)}
    return MovePlan(tuple(_alike(src.model, held, wanted)), cluster.node if cluster else None)


def _alike(
    model: ModelShape, held: Mapping[int, Sequence[Box]], wanted: Mapping[int, Sequence[Box]]
) -> Iterator[Alike]:
    """The weights of each stack, cut into runs of layers of which every device has all or nothing."""
    for number, stack in enumerate(model.stacks):
        have, want = ({d: b[number] for d, b in side.items() if b[number]} for side in (held, wanted))
        ends = sorted({end for box in {*have.values(), *want.values()} for end in box[0]})
        for first, last in pairwise(ends):
            yield Alike(stack.names[first:last], _among(have, first, last), _among(want, first, last))


def _among(boxes: Mapping[int, Box], first: int, last: int) -> dict[int, tuple[Box, ...]]:
    """By device what it has of each of some layers."""
    found: dict[int, tuple[Box, ...]] = {}
    same: dict[int, tuple[Box, ...]] = {}  # by object: devices that have the same box have one, and are to share this
    for device, box in boxes.items():
        if box[0][0] <= first and last <= box[0][1]:
            if id(box) not in same:
                same[id(box)] = (box[1:],)
            found[device] = same[id(box)]
    return found


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
