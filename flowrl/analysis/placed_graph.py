"""The graph of a program with its plan: who runs where, what moves between pools, and which weights arrive."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..errors import FlowError, ModelError
from ..graph.may_see_older_weights import relaxed_calls, site
from ..graph.record import Edge, Graph, Node, PoolInfo, WorkerInfo
from ..placement.backends import backend
from ..placement.cost.work import Workload
from ..placement.plan.plan import Plan
from ..placement.plan.rules import numbers
from ..placement.reshard.planner import plan_reshard
from ..schedule.report.figures import totals
from ..schedule.simulation import Simulation
from .study import Study, pool_text

_WIDTHS = {"bool": 1, "i32": 4, "i64": 8, "f32": 4, "f64": 8, "bf16": 2}
_ANY = 64  # bytes of a value of unknown type (assumed): a text or a number of the data set
_TYPE = re.compile(r"^(\w+)(?:\[(.*)\])?$")


def placed_graph(study: Study, graph: Graph, simulation: Simulation | None = None) -> Graph:
    """The graph with pools, meshes and layouts on its nodes, bytes and transports on its edges.

    Between an update and what generates from its weights stands the publish that takes them there (a reshard, where
    both are in one pool). With a simulation, nodes have the seconds of a call and pools how busy they were.
    """
    nodes = _beside_their_rows([_node(node, study) for node in graph.nodes], graph)
    moved = {w: _publish(w, study) for w in sorted(_followers(graph, study))}
    last = {w: max((i for i, n in enumerate(nodes) if n.worker == w and n.updates), default=-1) for w in moved}
    for worker, place in sorted(last.items(), key=lambda item: -item[1]):
        nodes.insert(place + 1, moved[worker])
    placed = replace(
        graph,
        nodes=tuple(nodes),
        workers=tuple(_serving(w, graph, study) for w in graph.workers),
        pools=tuple(_pool(name, study.plan) for name in study.plan.pools),
        plan=f"Bytes are a forecast for one step of {study.plan.file or 'the plan'}.",
    )
    placed = replace(placed, edges=_edges(graph, placed, study, moved))
    return placed if simulation is None else overlaid(placed, simulation)


def recorded_graph(study: Study, graph: Graph, *, planned: bool) -> Graph:
    """The graph that a run keeps: with places, where it has a plan and the sizes of models are known."""
    if planned:
        with suppress(ModelError):
            return placed_graph(study, graph)
    return graph


def overlaid(graph: Graph, simulation: Simulation) -> Graph:
    """Return a graph with what a simulation found: seconds of calls, their part of the time of pools, busy pools."""
    totals_of = {total.node: total for total in reversed(totals(simulation))}  # of the first pool that a call takes
    whole, steps = simulation.makespan, max(simulation.steps, 1)
    busy = {p.name: p.busy for p in simulation.pools}

    def timed(node: Node) -> Node:
        total = totals_of.get(node.id)
        return node if total is None else replace(node, seconds=total.mean, share=total.share if whole else None)

    def used(pool: PoolInfo) -> PoolInfo:
        part = busy.get(pool.name)
        return pool if part is None else replace(pool, busy=part, seconds=part * whole / steps)

    basis = f"{graph.plan} Times: {simulation.cost_source}, a step takes {simulation.step_seconds:.3g} s."
    return replace(graph, nodes=tuple(map(timed, graph.nodes)), pools=tuple(map(used, graph.pools)), plan=basis)


def _beside_their_rows(nodes: Sequence[Node], graph: Graph) -> list[Node]:
    """Calls of a library in the pool where their rows are, as they run there; numbers stay in the driver."""
    placed = {node.id: node for node in nodes}
    for node in nodes:  # in the order of the program: what is read has its place already
        if node.pool is None and (node.reads or node.rows != "same"):
            placed[node.id] = replace(node, pool=_origin(node.id, placed, graph))
    return list(placed.values())


def _serving(worker: WorkerInfo, graph: Graph, study: Study) -> WorkerInfo:
    """A worker that others sample from, with the place of its engine."""
    if worker.name not in study.roles or not any(e.kind == "serves" and e.src == worker.name for e in graph.edges):
        return worker
    return replace(worker, **_where(worker.name, "generate", study))


def _pool(name: str, plan: Plan) -> PoolInfo:
    pool, text = plan.pools[name], pool_text(plan, name)
    if pool.devices and plan.cluster is not None:
        kinds = dict.fromkeys(plan.cluster.kind(d).name for d in pool.devices)
        return PoolInfo(name, text, numbers(pool.devices), ", ".join(kinds), len(pool.devices))
    return PoolInfo(name, text, "", "cpu" if pool.processes else pool.device, pool.processes or 1)


def _followers(graph: Graph, study: Study) -> set[str]:
    """Trained workers that something in the graph generates from."""
    trained = {n.worker for n in graph.nodes if n.updates}
    return {w for w in trained if any(_samples(n, w, graph) for n in graph.nodes)} & set(study.roles)


def _samples(node: Node, worker: str, graph: Graph) -> bool:
    serves = any(e.kind == "serves" and e.src == worker and e.dst == node.id for e in graph.edges)
    return (node.worker == worker and node.cost == "generate") or serves


def _node(node: Node, study: Study) -> Node:
    if node.worker not in study.roles:
        return node
    return replace(node, **_where(node.worker, "generate" if node.cost == "generate" else "train", study))


def _where(worker: str, use: str, study: Study) -> dict[str, Any]:
    """Pool, mesh and layout of a use of a worker, as a graph has them."""
    place = study.plan.place_of(worker, use)
    mesh = str(place.mesh) if place.mesh.size > 1 else "1"
    return {"pool": place.pool, "mesh": mesh, "layout": _layout(worker, mesh, study, place.backend)}


def _layout(worker: str, mesh: str, study: Study, backend: str) -> str:
    """How rows and weights lie on a mesh, by axis names."""
    processes = study.plan.pool_of(worker).processes
    axes = [part.split("=")[0] for part in mesh.split(",") if "=" in part]
    rows = [a for a in axes if a in ("dp", "fsdp", "ep")]
    weights = [a for a in axes if a in ("fsdp", "tp", "pp", "ep", "folded_ep")]
    model = study.roles[worker].model is not None
    if not axes:
        return backend if model else f"rows over {processes} processes" if processes > 1 else "one process"
    parts = [f"rows over {' x '.join(rows)}" if rows else "all rows"]
    if model:
        parts += [f"weights over {' x '.join(weights)}" if weights else "all weights", backend]
    return ", ".join(parts)


def _publish(worker: str, study: Study) -> Node:
    kind = "publish" if study.plan.split(worker) else "reshard"
    return Node(f"{worker}.publish", worker, kind, kind=kind, **_where(worker, "generate", study))


def _edges(graph: Graph, placed: Graph, study: Study, moved: Mapping[str, Node]) -> tuple[Edge, ...]:
    pools = {node.id: node.pool for node in placed.nodes}
    nodes = {node.id: node for node in placed.nodes}
    relaxed, edges = _relaxed(study), list[Edge]()
    into: set[tuple[str, str]] = set()
    for edge in graph.edges:
        src, dst = nodes.get(edge.src), nodes.get(edge.dst)
        worker = src.worker if src is not None else edge.src
        if edge.kind == "weights" and dst is not None and worker in moved and _samples(dst, worker, graph):
            move = moved[worker]
            if (edge.src, move.id) not in into:
                into.add((edge.src, move.id))
                source = pools.get(edge.src)
                way = transport(study.plan, source, move.pool)
                size = _weights(study, worker)
                edges.append(replace(edge, dst=move.id, lag=0, bytes=size, transport=way))
            lag = study.plan.pipeline.staleness if edge.lag is None or edge.dst in relaxed else 0
            version = "v(k)" if not lag else _older(lag, study)
            edges.append(replace(edge, src=move.id, lag=lag, bytes=0.0, transport="same pool", version=version))
        elif edge.kind in ("data", "carried") and dst is not None:
            target = dst.pool or _origin(dst.id, nodes, graph)
            way = transport(study.plan, _origin(edge.src, nodes, graph), target)
            edges.append(replace(edge, bytes=_data(edge, nodes, study), transport=way))
        else:
            way = transport(study.plan, pools.get(edge.src), pools.get(edge.dst)) if edge.kind == "serves" else None
            edges.append(replace(edge, transport=way))
    return tuple(edges)


def _older(lag: int, study: Study) -> str:
    """Return which version a relaxed read of step k sees: with fifo and drain at S=1 that of the step before."""
    steps = study.plan.pipeline
    settled = lag == 1 and (steps.order, steps.publish) == ("fifo", "drain")
    return "v(k-1)" if settled else f"v(k-{lag}) or newer"


def _relaxed(study: Study) -> frozenset[str]:
    """Return the nodes of the calls that may see older weights."""
    sites, calls = relaxed_calls(study.traced), (call for trail in study.traced.trails for call in trail.calls)
    return frozenset(study.ids[call.place] for call in calls if site(call) in sites and call.place in study.ids)


def _origin(id: str, nodes: Mapping[str, Node], graph: Graph) -> str | None:
    """The pool that rows come from: a library call hands on those of its first input."""
    node, seen = nodes.get(id), set[str]()
    while node is not None and node.pool is None and node.id not in seen:
        seen.add(node.id)
        brings = (e for e in graph.edges if e.dst == id and e.kind in ("data", "carried") and e.src in nodes)
        first = next(brings, None)
        id, node = (first.src, nodes[first.src]) if first is not None else (id, None)
    return node.pool if node is not None else None


def transport(plan: Plan, source: str | None, target: str | None) -> str | None:
    """How bytes get from pool to pool: within one, through the host, over a link inside a node, over the network."""
    if source is None or target is None:
        return None
    if source == target:
        return "same pool"
    a, b = plan.pools[source], plan.pools[target]
    if not a.devices or not b.devices or plan.cluster is None:
        return "host" if a.devices or b.devices or a.processes or b.processes else "same process"
    nodes = [{plan.cluster.node(d) for d in pool.devices} for pool in (a, b)]
    return "link" if nodes[0] == nodes[1] and len(nodes[0]) == 1 else "network"


def _weights(study: Study, worker: str) -> float | None:
    """Bytes that all devices receive in a publish; None for a model of unknown size."""
    work = study.publish(worker)
    if work.role.model is None:
        return None
    if not work.devices or work.source is None or not work.source[1]:
        return float(work.role.model.bytes) if study.plan.split(worker) or study.plan.pipeline.staleness else 0.0
    source, devices = work.source
    try:
        rules = backend(work.backend).layout
        move = plan_reshard(work.role.model, source, work.mesh, devices, work.devices, grouping="row", rules=rules)
    except FlowError:  # a mesh that does not divide the model: the check says so
        return None
    return float(move.total)


def _data(edge: Edge, nodes: Mapping[str, Node], study: Study) -> float | None:
    """Bytes of the fields of an edge, in a step: rows by tokens by the width of the type."""
    call = study.calls.get(edge.src)
    if call is None:
        return None
    load: Workload = study.load(call)
    types: dict[str, str] = {}
    for id in (edge.src, edge.dst):
        types.update(nodes[id].types if id in nodes else {})
    return sum(_column(types.get(name, ""), load) for name in edge.fields if name != "keys")


def _column(type_: str, load: Workload) -> float:
    match = _TYPE.match(type_)
    if match is None or match[1] not in _WIDTHS:
        return load.rows * _ANY
    lengths = {"*prompt": load.prompt, "*response": load.response, "*token": load.prompt + load.response}
    width = float(_WIDTHS[match[1]])
    for dim in filter(None, (d.strip() for d in (match[2] or "").split(","))):
        width *= lengths.get(dim, float(dim) if dim.isdigit() else 1.0)
    return load.rows * width


def edge_records(graph: Graph) -> Sequence[Mapping[str, object]]:
    """Return what crosses between nodes in a step, for the record of a simulation."""
    return [
        {"src": e.src, "dst": e.dst, "kind": e.kind, "bytes": e.bytes, "transport": e.transport}
        for e in graph.edges
        if e.bytes
    ]
