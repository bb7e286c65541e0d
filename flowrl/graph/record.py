"""The dataflow graph as a frozen record: nodes, edges, and the forms in which it is handed on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, cast

from ..errors import FlowError

if TYPE_CHECKING:
    import networkx

EDGE_KINDS = ("data", "weights", "order", "carried", "serves", "control")
NODE_KINDS = ("op", "publish", "reshard")
SCHEMA = 1


@dataclass(frozen=True)
class Node:
    """One call of an op in a steady step, or a movement of weights that a plan adds.

    ``Node("critic.values", worker="critic", op="values", file="algorithms/ppo.py", line=28, ...)``. ``branch`` says
    under which outcome of the program's own conditions the call happens, None when always. ``stage`` is ``step`` for
    what happens in every step, ``once`` for what lies outside ``flow.steps``. ``loss`` is what an update minimises, in
    words, ``settings`` what else a call is given that is not the default, ``{"n": "8"}``, ``expression`` how arithmetic
    is written. ``repeats``: it is made once for each of the values that a growing list brings from earlier steps.

    With a plan it also says where it runs: ``pool``, ``mesh`` ("fsdp=4,tp=2") and ``layout``, how rows and weights lie
    on it. ``kind`` is ``op`` for a call; between an update and what generates from its weights the plan puts a node of
    kind ``publish`` (they go to another pool) or ``reshard`` (they change their layout inside one). After a run or a
    simulation ``seconds`` are those of one call, and ``share`` its part of the pool's time (0 to 1).
    """

    id: str
    worker: str
    op: str
    file: str = ""
    line: int = 0
    source: str = ""
    reads: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict[str, str])
    updates: str | None = None
    rows: str = "same"
    cost: str = "none"
    external: bool = False
    branch: str | None = None
    stage: str = "step"
    signature: str = ""
    loss: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    expression: str = ""
    repeats: bool = False
    kind: str = "op"  # op | publish | reshard
    pool: str | None = None
    mesh: str | None = None
    layout: str | None = None
    seconds: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class Edge:
    """What flows or orders between two nodes: ``Edge("actor.generate", "reward.score", "data", ("response_ids",))``.

    ``src`` of what comes from the data is the id of a source. A control edge runs from what a condition looks at to
    what hangs on it. ``made`` are the names that the fields had where they were made, empty where all are the same;
    ``repeats``: a carried edge brings values of several earlier steps.

    ``lag`` is the staleness allowed on a weights edge (0: the newest version), None on others. A serves edge runs
    from a worker's name to the op that holds its handle. With a plan, ``bytes`` go along it in a step, by ``transport``
    ("same pool", "link", "network", ...), and ``version`` says which weights step k reads ("v(k-1)").
    """

    src: str
    dst: str
    kind: str
    fields: tuple[str, ...] = ()
    lag: int | None = None
    branch: str | None = None
    made: tuple[str, ...] = ()
    repeats: bool = False
    bytes: float | None = None
    transport: str | None = None
    version: str | None = None


@dataclass(frozen=True)
class WorkerInfo:
    """A worker of the flow: ``WorkerInfo("actor", "Actor", line=8)``. ``settings``: what it was declared with.

    ``pool``, ``mesh`` and ``layout`` are those of the engine that it serves to the ops of others, where a plan says so.
    """

    name: str
    kind: str
    file: str = ""
    line: int = 0
    describes: str = ""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    pool: str | None = None
    mesh: str | None = None
    layout: str | None = None


@dataclass(frozen=True)
class SourceInfo:
    """A source of data: ``SourceInfo("data.heldout", "heldout", "test.jsonl, 64 rows a step", ("prompt_ids", ...))``.

    ``name`` is that of the variable that holds it, or of what makes it; ``fields`` are its columns. ``branch`` and
    ``stage`` say when it is drawn from, as those of a node do.
    """

    id: str
    name: str
    describes: str = ""
    fields: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict[str, str])
    file: str = ""
    line: int = 0
    branch: str | None = None
    stage: str = "step"


@dataclass(frozen=True)
class PoolInfo:
    """A pool of the plan: ``PoolInfo("train", devices="0-7", kind="h100-80", count=8, busy=0.83)``.

    ``describes`` says what it has, where that is better said in words: ``4 processes``. ``busy`` is the fraction of a
    run or a simulation in which the pool worked (0 to 1), ``seconds`` how long it worked per step.
    """

    name: str
    describes: str = ""
    devices: str = ""
    kind: str = ""
    count: int = 0
    busy: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Graph:
    """The dataflow of one steady iteration of a program, and where a plan puts it."""

    program: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    workers: tuple[WorkerInfo, ...] = ()
    source_fields: tuple[str, ...] = ()
    paths: int = 1
    capped: bool = False
    pools: tuple[PoolInfo, ...] = ()  # of the plan, where there is one
    plan: str = ""  # in words: what bytes and times rest on
    sources: tuple[SourceInfo, ...] = ()  # in the order in which they are drawn from

    def _repr_svg_(self) -> str | None:
        """The picture, for a notebook; None where pygraphviz is missing."""
        from .draw import render

        try:
            return render(self, "svg")
        except FlowError:
            return None

    def node(self, id: str) -> Node:
        """The node of that id. Raises KeyError."""
        return {node.id: node for node in self.nodes}[id]

    def edges_of(self, kind: str) -> tuple[Edge, ...]:
        """All edges of one kind."""
        return tuple(e for e in self.edges if e.kind == kind)

    def to_json(self) -> dict[str, Any]:
        """The documented record (docs/reading_graphs.md). ``Graph.from_json`` reads it back.

        The keys that a plan fills are all there in a graph with pools, and left out in one without a plan.
        """
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "program": self.program,
            "nodes": [_plain(asdict(n)) for n in self.nodes],
            "edges": [_plain(asdict(e)) for e in self.edges],
            "workers": [asdict(w) for w in self.workers],
            "sources": [_plain(asdict(s)) for s in self.sources],
            "source_fields": list(self.source_fields),
            "paths": self.paths,
            "capped": self.capped,
            "pools": [asdict(p) for p in self.pools],
            "plan": self.plan,
        }
        return record if self.pools else _unplaced(record)

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Graph:
        """Read what :meth:`to_json` gave."""
        if record.get("schema", SCHEMA) != SCHEMA:
            raise ValueError(f"graph record of schema {record['schema']}; this flowrl reads {SCHEMA}")
        kinds = {"nodes": Node, "edges": Edge, "workers": WorkerInfo, "pools": PoolInfo, "sources": SourceInfo}
        parts: dict[str, Any] = {p: tuple(cls(**_tuples(r)) for r in record.get(p, ())) for p, cls in kinds.items()}
        if record.get("source_fields") and "sources" not in record:
            columns = tuple(record["source_fields"])
            parts["sources"], parts["edges"] = _one_source(columns, parts["nodes"], parts["edges"])
        plain = {name: record[name] for name in _about() if name in record and name not in parts}
        return Graph(**_tuples(plain), **parts)

    def to_networkx(self) -> networkx.MultiDiGraph[Any]:
        """A networkx graph with every attribute on its nodes and edges; workers that serve become nodes too."""
        import networkx as nx

        graph: networkx.MultiDiGraph[Any] = nx.MultiDiGraph(**{name: getattr(self, name) for name in _about()})
        for node in self.nodes:
            graph.add_node(node.id, node=node)
        for place, edge in enumerate(self.edges):
            graph.add_edge(edge.src, edge.dst, edge=edge, place=place)
        return graph

    @staticmethod
    def from_networkx(graph: networkx.MultiDiGraph[Any]) -> Graph:
        """Read what :meth:`to_networkx` gave, changed or not."""
        about: dict[str, Any] = {"program": "", **{name: graph.graph[name] for name in _about() if name in graph.graph}}
        nodes = tuple(d["node"] for _, d in graph.nodes(data=True) if "node" in d)
        edges = sorted((d for *_, d in graph.edges(data=True)), key=lambda d: d.get("place", graph.number_of_edges()))
        return Graph(**about, nodes=nodes, edges=tuple(d["edge"] for d in edges))


def _about() -> tuple[str, ...]:
    """The fields of a graph besides its nodes and edges."""
    return tuple(f.name for f in fields(Graph) if f.name not in ("nodes", "edges"))


def _one_source(
    fields: tuple[str, ...], nodes: tuple[Node, ...], edges: tuple[Edge, ...]
) -> tuple[tuple[SourceInfo, ...], tuple[Edge, ...]]:
    """The source, and what is read of it, of a record that knew the columns of all sources together."""
    given: dict[str, set[str]] = {}
    for edge in edges:
        if edge.kind in ("data", "carried"):
            given.setdefault(edge.dst, set()).update(edge.fields)
    source = SourceInfo("data.source", "source", fields=fields)
    read = ((n, tuple(f for f in n.reads if f in set(fields) - given.get(n.id, set()))) for n in nodes)
    drawn = (Edge(source.id, n.id, "data", names, branch=n.branch) for n, names in read if names)
    return (source,), (*drawn, *edges)


#: What a plan fills, with what stands there without one.
_PLACED: Mapping[str, Mapping[str, Any]] = {
    "nodes": {"kind": "op", **dict.fromkeys(("pool", "mesh", "layout", "seconds", "share"))},
    "edges": dict.fromkeys(("bytes", "transport", "version")),
    "workers": dict.fromkeys(("pool", "mesh", "layout")),
}


def _unplaced(record: dict[str, Any]) -> dict[str, Any]:
    """The record without what no plan has filled in."""
    for part, keys in _PLACED.items():
        if all(thing[key] == empty for thing in record[part] for key, empty in keys.items()):
            record[part] = [{k: v for k, v in thing.items() if k not in keys} for thing in record[part]]
    return {k: v for k, v in record.items() if v or k not in ("pools", "plan")}


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    return {k: list(cast("tuple[Any, ...]", v)) if isinstance(v, tuple) else v for k, v in record.items()}


def _tuples(record: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for k, v in record.items()}
