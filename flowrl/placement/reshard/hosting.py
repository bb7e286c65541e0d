"""Which device hosts which part of the destination.

A grouping gives each device its place: a number counted through the replicas, so that with a destination of 8 ranks
place 11 is rank 3 of the second replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ...errors import PlanError, did_you_mean
from ..cluster.cluster import Cluster
from ..cluster.mesh import Mesh
from ..model.weight_layout import Layout
from .overlap import overlaps
from .transportation import transport

#: ``overlap``: as much as can be is already there. ``row``: ranks in a row, as a run has them. ``hybridflow``:
#: generation groups take every (t/t_g)-th rank.
#: ``vanilla``: ranks in a row, and everything is gathered within a training replica. ``gather``: everything everywhere.
GROUPINGS = ("overlap", "row", "hybridflow", "vanilla", "gather")


def check_grouping(name: str) -> None:
    """Raise PlanError for a grouping that is none of :data:`GROUPINGS`."""
    if name not in GROUPINGS:
        raise PlanError(f"there is no grouping '{name}'.", have=GROUPINGS, fix=did_you_mean(name, GROUPINGS))


def hybridflow_places(src: Mesh, dst: Mesh) -> list[int]:
    """Return the places that HybridFlow gives the ranks of ``src`` (arXiv:2409.19256, section 5.3).

    The rank at pipeline stage p and tensor-parallel rank t becomes stage p // (pp / pp_g), rank t // (tp / tp_g): the
    ranks of one micro data-parallel group are neighbours, and each has a part of what it hosts. Raises PlanError for
    meshes that are not nested.
    """
    bad = [a for a in src.axes if a not in ("pp", "dp", "tp")] + [a for a in dst.axes if a not in ("pp", "tp")]
    if bad or src["pp"] % dst["pp"] or src["tp"] % dst["tp"]:
        raise PlanError(
            f"HybridFlow's grouping is from pp,dp,tp to a pp and a tp that divide them; this is {src} to {dst}.",
            fix="Use the grouping 'overlap', which takes any two meshes.",
        )
    seen: Counter[int] = Counter()
    places: list[int] = []
    for rank in range(src.size):
        at = src.coordinates(rank)
        stage = at.get("pp", 0) // (src["pp"] // dst["pp"])
        hosted = dst.rank({"pp": stage, "tp": at.get("tp", 0) // (src["tp"] // dst["tp"])})
        places.append(seen[hosted] * dst.size + hosted)
        seen[hosted] += 1
    return places


def overlap_places(
    src: Layout, dst: Layout, held: Mapping[int, int], devices: Sequence[int], cluster: Cluster | None
) -> list[int]:
    """Return places with as many bytes in common as can be with what devices hold (``held``: shard by device).

    With a ``cluster``, the ranks of a replica are inside one node; where a replica is larger than a node, ranks next to
    each other are. Raises PlanError where nodes do not divide so.
    """
    worth = [*overlaps(src, dst), {}]  # the last one is for devices that hold nothing
    kinds = {d: held.get(d, len(worth) - 1) for d in devices}
    if cluster is None:
        hosted = _host(devices, kinds, worth, [len(devices) // len(dst.shards)] * len(dst.shards))
    else:
        hosted = _host_in_nodes(devices, kinds, worth, dst, cluster)
    # Node by node, so that a replica that fits into a node is in one.
    order = sorted(devices, key=cluster.node) if cluster else devices
    places = dict(zip(order, _places(order, hosted, dst), strict=True))
    return [places[d] for d in devices]


def _host(
    devices: Sequence[int], kinds: Mapping[int, int], worth: Sequence[Mapping[int, int]], room: Sequence[int]
) -> dict[int, int]:
    """The shard for each device, ``room[shard]`` devices for each. Devices that hold the same are one source."""
    same: dict[int, list[int]] = {}
    for device in devices:
        same.setdefault(kinds[device], []).append(device)
    flow = transport([len(d) for d in same.values()], room, [worth[k] for k in same])
    hosted: dict[int, int] = {}
    for alike, sent in zip(same.values(), flow, strict=True):
        # Dealt one of each at a time, so that neighbours come to be the ranks of one replica.
        dealt = sorted((copy, shard) for shard, count in sent.items() for copy in range(count))
        hosted.update(zip(alike, (shard for _, shard in dealt), strict=True))
    return hosted


def _host_in_nodes(
    devices: Sequence[int],
    kinds: Mapping[int, int],
    worth: Sequence[Mapping[int, int]],
    dst: Layout,
    cluster: Cluster,
) -> dict[int, int]:
    """First the best way to host each block of shards in each node, then the best block for each node."""
    nodes: dict[int, list[int]] = {}
    for device in devices:
        nodes.setdefault(cluster.node(device), []).append(device)
    blocks = _blocks(nodes, len(dst.shards), dst.mesh)
    known: dict[tuple[tuple[int, ...], int], int] = {}  # nodes whose devices hold the same are alike
    gains: list[dict[int, int]] = []
    for inside in nodes.values():
        gains.append({})
        for number, block in enumerate(blocks):
            key = tuple(sorted(kinds[d] for d in inside)), number
            if key not in known:
                hosted = _host(inside, kinds, worth, _room(block, len(inside), len(dst.shards)))
                known[key] = sum(worth[kinds[d]].get(shard, 0) for d, shard in hosted.items())
            gains[-1][number] = known[key]
    chosen = transport([1] * len(nodes), [len(nodes) // len(blocks)] * len(blocks), gains)
    found: dict[int, int] = {}
    for inside, sent in zip(nodes.values(), chosen, strict=True):
        block = blocks[next(iter(sent))]
        found.update(_host(inside, kinds, worth, _room(block, len(inside), len(dst.shards))))
    return found


def _room(block: range, devices: int, shards: int) -> list[int]:
    """How many devices of a node each shard is for."""
    return [devices // len(block) if shard in block else 0 for shard in range(shards)]


def _blocks(nodes: Mapping[int, Sequence[int]], shards: int, mesh: Mesh) -> list[range]:
    """Shards that go into a node together: all of them as often as they fit, else as many as a node has devices."""
    sizes = sorted({len(inside) for inside in nodes.values()})
    if all(size % shards == 0 for size in sizes):
        return [range(shards)]
    if len(sizes) == 1 and shards % sizes[0] == 0 and sizes[0] % mesh["tp"] == 0:
        return [range(first, first + sizes[0]) for first in range(0, shards, sizes[0])]
    raise PlanError(
        f"{mesh} has groups of {shards} ranks, which do not fit into nodes with {', '.join(map(str, sizes))} devices.",
        fix="Use groups that divide a node, or that a node divides with its tp inside.",
    )


def _places(devices: Sequence[int], hosted: Mapping[int, int], dst: Layout) -> list[int]:
    """The place of each device: the first one that hosts a shard is in the first replica."""
    free: dict[int, list[int]] = {}
    for place in reversed(range(len(devices))):
        free.setdefault(dst.shard_of(place % dst.mesh.size), []).append(place)
    return [free[hosted[d]].pop() for d in devices]
