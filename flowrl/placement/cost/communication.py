"""Seconds that the devices of a call spend on sending: activations between shards, weights and gradients, a publish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from ..backends import LayoutRules, backend
from ..cluster.cluster import Cluster
from ..cluster.hardware import Hardware
from ..cluster.mesh import Mesh
from ..model.model_shape import ModelShape
from ..model.weight_layout import PLAIN, Layout
from ..reshard.planner import plan_reshard
from .per_device_counts import kv_bytes, micro_tokens, parameters_on_device, parts_of, stages
from .work import Role, Work


def model_of(work: Work) -> ModelShape:
    """Return the model that a call computes."""
    assert work.role.model is not None, f"{work.title} computes no model"
    return work.role.model


def activations(work: Work, hardware: Hardware, tokens: float, passes: float) -> float:
    """Return seconds of what ranks exchange while ``tokens`` of a replica go ``passes`` times through the layers.

    It comes in micro-batches, which are not rounded up: with one token more a step must not become faster.
    """
    parts = max(1.0, tokens / micro_tokens(work.load, work.micro))
    layers = model_of(work).layers / stages(model_of(work), work.mesh)
    by_layer = tensor_parallel(work, hardware, tokens / parts) + expert_parallel(work, hardware, tokens / parts)
    by_layer += context_parallel(work, hardware, tokens / parts)
    return parts * (passes * layers * by_layer + min(passes, 2) * stage_to_stage(work, hardware, tokens / parts))


def tensor_parallel(work: Work, hardware: Hardware, tokens: float) -> float:
    """Return seconds of a layer's two all-reduces (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

    Of one, that of attention, where experts fold: each of them is whole.
    """
    size = _activation(work, tokens / work.mesh["cp"])
    return (1 if work.mesh.folded > 1 else 2) * hardware.along(work.mesh, "tp").all_reduce(size, work.mesh["tp"])


def context_parallel(work: Work, hardware: Hardware, tokens: float) -> float:
    """Return the time of keys and values of a layer round the ring (Liu et al. 2023, arXiv:2310.01889)."""
    mesh, model = work.mesh, model_of(work)
    size = kv_bytes(model, mesh, tokens) / (model.layers / stages(model, mesh))
    return (mesh["cp"] - 1) * hardware.along(mesh, "cp").send(size)


def expert_parallel(work: Work, hardware: Hardware, tokens: float) -> float:
    """Tokens go to their experts and come back: two all-to-alls in a layer (Lepikhin et al. 2020, arXiv:2006.16668)."""
    model, mesh = model_of(work), work.mesh.experts
    if not model.experts or mesh["ep"] == 1:
        return 0.0
    here = work.mesh["cp"] * (work.mesh["tp"] if work.mesh.folded > 1 else 1)  # ranks of tp then have other tokens
    size = _activation(work, tokens / here) * model.experts_per_token
    return 2 * hardware.along(mesh, "ep").all_to_all(size, mesh["ep"])


def stage_to_stage(work: Work, hardware: Hardware, tokens: float) -> float:
    """Return seconds of the activations of a micro-batch to the next stage, or their gradients back."""
    if work.mesh["pp"] == 1:
        return 0.0
    return hardware.along(work.mesh, "pp").send(_activation(work, tokens / work.mesh["cp"]))


def decoded_token(work: Work, hardware: Hardware, rows: float, groups: float) -> float:
    """Return seconds of a token for each row: exchanges in every layer, and with pp a message to the next stage."""
    mesh, model = work.mesh, model_of(work)
    size = _activation(work, rows / groups)
    layer = 2 * hardware.along(mesh, "tp").all_reduce(size, mesh["tp"]) + expert_parallel(work, hardware, rows / groups)
    seconds = model.layers * layer
    return seconds + (mesh["pp"] * hardware.along(mesh, "pp").send(size) if mesh["pp"] > 1 else 0.0)


def sharded_weights(work: Work, hardware: Hardware, tokens: float, times: int) -> float:
    """FSDP: for each micro-batch the weights of each layer are gathered, or their gradients reduced and scattered.

    ``times``: 1 for a forward pass, 2 with a backward pass, 3 with gradients (Zhao et al. 2023, arXiv:2304.11277).
    """
    mesh, model = work.mesh, model_of(work)
    layers = model.layers / stages(model, mesh)
    layer = parameters_on_device(work.role, mesh, sharded=False) / layers
    parts = max(1.0, tokens / micro_tokens(work.load, work.micro))
    ring = hardware.along(mesh, "fsdp")
    seconds = min(times, 2) * ring.all_gather(layer * model.dtype_bytes, mesh["fsdp"])
    if times > 2:
        seconds += ring.all_gather(layer * gradient_bytes(work), mesh["fsdp"])
    return parts * layers * seconds


def gradient_bytes(work: Work) -> int:
    """Return bytes of a number of a gradient, as ranks add it up."""
    width = model_of(work).dtype_bytes
    return max(4, width) if backend(work.backend).gradients == "fp32" else width


def host_copies(work: Work, hardware: Hardware, tokens: float, times: int) -> float:
    """Return seconds in which a device's part of each layer comes from host memory, or its gradients go there.

    For each micro-batch, ``times`` as in :func:`sharded_weights`; 0 unless the weights are offloaded.
    """
    if not work.offload:
        return 0.0
    parts = max(1.0, tokens / micro_tokens(work.load, work.micro))
    width = min(times, 2) * model_of(work).dtype_bytes + max(0, times - 2) * gradient_bytes(work)
    return parts * width * parameters_on_device(work.role, work.mesh) / hardware.host


def gradients(work: Work, hardware: Hardware) -> float:
    """Replicas of a weight agree on its gradient: an all-reduce, once for each optimizer step.

    A distributed optimizer reduces and scatters them, and gathers weights in the dtype of the model: an all-reduce of
    half as many bytes each.
    """
    mesh, model, parts = work.mesh, model_of(work), parts_of(work.role)
    width: float = gradient_bytes(work)
    if backend(work.backend).optimizer_over_copies:
        width = (width + model.dtype_bytes) / 2
    shards = mesh["tp"] * stages(model, mesh) * mesh["fsdp"]
    trained = 1 - work.role.frozen
    dense = (work.role.lora or trained * parts.dense) / shards * width
    copies, lie = mesh["dp"] * mesh["cp"], mesh.experts
    seconds = hardware.along(mesh, "dp", "cp", "ep").all_reduce(dense, copies * mesh["ep"])
    if lie is not mesh:
        shards = stages(model, mesh)
    experts = 0.0 if work.role.lora else trained * parts.experts / shards / lie["ep"] * width
    return seconds + hardware.along(lie, "dp", "cp").all_reduce(experts, lie["dp"] * lie["cp"])


def seconds_by_channel(work: Work, hardware: Hardware, tokens: float, passes: int, times: int) -> tuple[float, float]:
    """Return how long links inside nodes, and the network between them, are busy for all of this in an update.

    Of what goes ``passes`` times through the layers, of weights that are gathered as often as ``times`` says, and of
    gradients where that is more than once; whether computation hides it or not.
    """
    mesh, model = work.mesh, model_of(work)
    parts = max(1.0, tokens / micro_tokens(work.load, work.micro))
    layers, each = passes * model.layers / stages(model, mesh), tokens / parts
    busy = (
        (mesh, ("tp",), parts * layers * tensor_parallel(work, hardware, each)),
        (mesh, ("cp",), parts * layers * context_parallel(work, hardware, each)),
        (mesh.experts, ("ep",), parts * layers * expert_parallel(work, hardware, each)),
        (mesh, ("pp",), parts * min(passes, 2) * stage_to_stage(work, hardware, each)),
        (mesh, ("fsdp",), sharded_weights(work, hardware, tokens, times)),
        (mesh, ("dp", "cp", "ep"), gradients(work, hardware) if times > 1 else 0.0),
    )
    between = sum(seconds for lie, axes, seconds in busy if seconds and hardware.crosses(lie, *axes))
    return sum(seconds for *_, seconds in busy) - between, between


@dataclass(frozen=True)
class Passing:
    """Bytes of a publish that pass the busiest device, sent or received: ``Passing(inside=2e9, between=16e9)``.

    ``inside``: to and from devices of its node, the most that any has; ``between``: the same of other nodes. The link
    of a node is the sum of its devices' shares, so it is never busier than the busiest of them. ``relayed``: bytes that
    pass it inside its node after they came from another one. ``sent`` and ``received`` are the first two of those that
    send what they hold, and of those that receive, what is relayed to them included, where they are known.
    """

    inside: float = 0.0
    between: float = 0.0
    relayed: float = 0.0
    sent: tuple[float, float] | None = None
    received: tuple[float, float] | None = None


def publish_bytes(
    role: Role,
    source: Mesh,
    devices: tuple[int, ...],
    mesh: Mesh,
    to: tuple[int, ...],
    rules: LayoutRules = PLAIN,
    cluster: Cluster | None = None,
) -> Passing:
    """Return what the device receives which receives most, when weights go from one mesh to another.

    A shard of the destination less the shard of the source that the device has already, if it has one: for nested
    meshes on the same devices that is (t p - t_g p_g) / (t_g p_g t p) M, HybridFlow's table 2 (arXiv:2409.19256).
    Adapters are merged on the way, so that all weights move. ``rules`` make no difference to it. Inside a pool whose
    source replicas are each in one node, nothing crosses the network. To other nodes it crosses once for each of them.
    """
    if role.model is None:
        return Passing()
    wanted = parameters_on_device(role, mesh, sharded=False) * role.model.dtype_bytes
    had = parameters_on_device(role, source) * role.model.dtype_bytes
    same = bool(to) and set(to) <= set(devices)
    size = max(0.0, wanted - had) if same else wanted
    near = same and not Hardware.of(cluster, devices).crosses(source, "pp", "fsdp", "ep", "tp")
    if near or Hardware.of(cluster, tuple(dict.fromkeys((*devices, *to)))).one_node:
        return Passing(inside=size)
    nodes = len({cluster.node(device) for device in to}) if cluster is not None else 1
    brought = size / max(1, len(to) * mesh["dp"] // mesh.size // nodes)  # by each of the replicas of a node
    return Passing(between=brought, relayed=size - brought)


@lru_cache(maxsize=4096)
def planned_bytes(
    role: Role,
    source: Mesh,
    devices: tuple[int, ...],
    mesh: Mesh,
    to: tuple[int, ...],
    rules: LayoutRules = PLAIN,
    cluster: Cluster | None = None,
) -> Passing:
    """Return the most that a device receives or sends: box by box, as a run moves them, between any meshes.

    Few ranks that train send the weights of many replicas, each its part to every one of them: also where these are in
    one node. Ranks are on their devices in a row, as those of a run. ``rules``: how the backend lays weights out that
    they go to.
    """
    if role.model is None or not devices or not to:  # without devices there are no shards to compare
        return publish_bytes(role, source, devices, mesh, to, rules, cluster)
    move = plan_reshard(role.model, source, mesh, devices, to, cluster=cluster, grouping="row", rules=rules)
    return Passing(move.at_once, move.busiest[1], move.relayed, move.busiest_sender, move.busiest_receiver)


@lru_cache(maxsize=1024)
def _shards(model: ModelShape, mesh: Mesh, rules: LayoutRules) -> tuple[int, int]:
    """Bytes of the largest part that a rank of a mesh has, and of those of all ranks of a copy."""
    layout = Layout(model, mesh, rules=rules)
    sizes = layout.sizes()
    return max(sizes), sum(sizes[layout.shard_of(rank)] for rank in range(mesh.size))


def publish_least(work: Work, hardware: Hardware) -> float:
    """Return seconds that a publish to other devices does not take less than.

    One of them receives the largest part, and those that train send the parts of all copies, evenly at best.
    """
    if work.source is None or work.role.model is None or not work.source[1] or not work.devices:
        return 0.0
    devices, mesh = work.source[1], work.mesh
    if mesh.folded == 1:  # without its copies
        mesh = Mesh({axis: size for axis, size in mesh.axes.items() if axis != "dp"})
    size, copy = _shards(work.role.model, mesh, backend(work.backend).layout)
    both = Hardware.of(hardware.cluster, (*devices, *work.devices), hardware.link, hardware.network)
    if both.one_node:
        most = max(size, copy * (len(work.devices) // mesh.size) / len(devices))
        return both.channel().send(most) * (1 - 1e-9)
    copies = _nodes_with_a_copy(hardware.cluster, work.devices, mesh.size)
    most = max(size, copies * work.role.model.bytes / len(devices))
    _, apart = both.oversubscribed()
    return min(both.channel().send(most), both.channel(1, apart, apart).send(most)) * (1 - 1e-9)


def _nodes_with_a_copy(cluster: Cluster | None, devices: tuple[int, ...], size: int) -> int:
    """In how many nodes there is a whole copy at least, each on so many devices in a row; it comes there once."""
    found: set[int] = set()
    for first in range(0, len(devices) - size + 1, size):
        nodes = {cluster.node(device) for device in devices[first : first + size]} if cluster is not None else {0}
        if len(nodes) == 1:
            found |= nodes
    return max(1, len(found))


#: What passes the busiest device, of a publish between these meshes and devices.
Received = Callable[[Role, Mesh, tuple[int, ...], Mesh, tuple[int, ...], LayoutRules, Cluster | None], Passing]


def in_one_process(work: Work) -> bool:
    """Whether a publish is between two workers of a process, whose copies share their memory."""
    return work.source is not None and not work.source[1] and work.pool == work.source_pool


def publish(work: Work, hardware: Hardware, received: Received = publish_bytes) -> float:
    """From the ranks that train to those that generate: each slice from a holder to everyone who lacks it.

    It takes as long as the busiest device sends or receives, inside its node or to and from others, and then passes on
    in its node what came from another one.
    """
    busiest = _passing(work, hardware, received)
    first, then = (
        _sending(work, hardware, *size) for size in ((busiest.inside, busiest.between), (busiest.relayed, 0))
    )
    return max(first) + then[0]


def publish_by_channel(
    work: Work, hardware: Hardware, received: Received = publish_bytes
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return how long a publish keeps the links inside nodes and the network busy: of who trains, of who generates."""
    busiest = _passing(work, hardware, received)
    ends = (side or (busiest.inside, busiest.between) for side in (busiest.sent, busiest.received))
    sent, got = (_sending(work, hardware, *side) for side in ends)
    return sent, got


def _passing(work: Work, hardware: Hardware, received: Received) -> Passing:
    """What passes the busiest device."""
    if work.source is None or in_one_process(work):
        return Passing()
    source, devices = work.source
    rules = backend(work.backend).layout
    return received(work.role, source, devices, work.mesh, work.devices, rules, hardware.cluster)


def _sending(work: Work, hardware: Hardware, inside: float, between: float) -> tuple[float, float]:
    """Seconds of so many bytes inside a node, and of so many between nodes."""
    devices = work.source[1] if work.source is not None else ()
    all_of_them = tuple(dict.fromkeys((*devices, *work.devices)))
    both = Hardware.of(hardware.cluster, all_of_them, hardware.link, hardware.network)
    _, apart = both.oversubscribed()
    return both.channel().send(inside), both.channel(1, apart, apart).send(between)


def _activation(work: Work, tokens: float) -> float:
    model = model_of(work)
    return tokens * model.hidden * model.dtype_bytes
