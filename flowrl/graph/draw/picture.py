"""What a drawing shows of a graph: boxes in groups and lines between them, with words, before any format.

A :class:`Picture` adds to the record what a reader wants to see and the record leaves out: the data source
as a box of its own, a box for a worker that only serves, labels of bearable length, tooltips with
everything, and for each line whether it runs against the order of the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...errors import shown
from ..record import Edge, Graph, Node, WorkerInfo

#: The id of the box that stands for the data source. Node ids have a dot in them, so it cannot be taken.
SOURCE = "source"

#: What the record calls a result of arithmetic, which has no name. Drawings leave the word out.
NAMELESS = "value"

#: The word at a carried edge.
NEXT_STEP = "next step"

_ROWS = {"expand": "expands rows", "filter": "filters rows", "regroup": "regroups rows"}


@dataclass(frozen=True)
class Box:
    """Something to draw: ``Box("critic.values", "op", "values", group="critic", tip="critic.values ...")``.

    ``role`` is ``op``, ``update``, ``library``, ``source`` or ``worker`` (a worker that has no call of its
    own).
    """

    id: str
    role: str
    title: str
    notes: tuple[str, ...] = ()
    condition: str | None = None
    group: str | None = None
    tip: str = ""
    node: Node | None = None


@dataclass(frozen=True)
class Line:
    """An edge to draw: ``Line("e3", Edge("rl.gae", "critic.update", "data", ("returns",)), ("returns",))``.

    ``edge.src`` and ``edge.dst`` are ids of boxes, except that a serves edge starts at the group of that
    name where there is one. ``back`` is true where the line runs against program order.
    """

    id: str
    edge: Edge
    label: tuple[str, ...] = ()
    condition: str | None = None
    tip: str = ""
    back: bool = False


@dataclass(frozen=True)
class Group:
    """A worker with calls: ``Group("critic", "Critic", ("critic.values", "critic.update"), hue=1)``.

    ``hue`` numbers its colour.
    """

    name: str
    kind: str
    boxes: tuple[str, ...]
    hue: int
    tip: str = ""


@dataclass(frozen=True)
class Picture:
    """All that is drawn, boxes in program order."""

    program: str
    boxes: tuple[Box, ...]
    groups: tuple[Group, ...]
    lines: tuple[Line, ...]
    summary: str

    def box(self, id: str) -> Box:
        """The box of that id. Raises KeyError."""
        return {box.id: box for box in self.boxes}[id]

    def group(self, name: str | None) -> Group | None:
        """The group of that name, if there is one."""
        return next((group for group in self.groups if group.name == name), None)

    def kinds(self) -> tuple[str, ...]:
        """The kinds of lines that occur, in the order of a legend."""
        found = {line.edge.kind for line in self.lines}
        return tuple(kind for kind in ("data", "weights", "carried", "order", "serves") if kind in found)


def draw(graph: Graph) -> Picture:
    """Everything that a picture of this graph shows."""
    kinds = {worker.name: worker for worker in graph.workers}
    boxes = _boxes(graph, kinds)
    groups = _groups(graph, kinds, boxes)
    place = {box.id: number for number, box in enumerate(boxes)}
    for group in groups:  # a serves edge starts at a group: it counts as standing where its last call stands
        place.setdefault(group.name, max(place[id] for id in group.boxes))
    edges = [*source_edges(graph), *graph.edges]
    lines = tuple(_line(f"e{number}", edge, graph, place) for number, edge in enumerate(edges))
    return Picture(graph.program, boxes, groups, lines, _summary(graph, groups))


def source_edges(graph: Graph) -> tuple[Edge, ...]:
    """The edges that the record leaves out: what the calls read of the data source, which is no node."""
    source = frozenset(graph.source_fields)
    given: dict[str, set[str]] = {}
    for edge in graph.edges:
        if edge.kind in ("data", "carried"):
            given.setdefault(edge.dst, set()).update(edge.fields)
    found = ((n, tuple(f for f in n.reads if f in source - given.get(n.id, set()))) for n in graph.nodes)
    return tuple(Edge(SOURCE, n.id, "data", fields, branch=n.branch) for n, fields in found if fields)


def shorten(fields: Sequence[str], *, lines: int = 3, width: int = 24) -> tuple[str, ...]:
    """Names on at most that many lines; the last ends in the number that did not fit, ``tokens +3``."""
    rows: list[str] = []
    for number, name in enumerate(fields):
        if rows and len(rows[-1]) + 2 + len(name) <= width and len(fields) > lines:
            rows[-1] += f", {name}"
        elif len(rows) < lines:
            rows.append(name)
        else:
            rows[-1] += f" +{len(fields) - number}"
            break
    return tuple(rows)


def names_of(edge: Edge, graph: Graph) -> tuple[str, ...]:
    """The fields of an edge that have names."""
    adds = next((node.adds for node in graph.nodes if node.id == edge.src), ())
    return tuple(name for name in edge.fields if name != NAMELESS or name in adds)


def version_rule(lag: int | None) -> str:
    """What a weights edge promises its reader, in words."""
    if lag is None:
        return "weights"
    return "newest version" if lag == 0 else f"≤ {lag} {'version' if lag == 1 else 'versions'} old"


def place_of(node: Node | WorkerInfo) -> str:
    """File and line as a user would type them: ``algorithms/ppo.py:28``; empty where unknown."""
    if not node.file:
        return ""
    name = node.file if node.file.startswith("<") else shown(node.file)
    return f"{name}:{node.line}" if node.line else name


def title_of(node: Node) -> str:
    """The name of a call inside its group: ``generate``, or ``generate #2`` for its second call."""
    number = node.id.rpartition("#")[2] if "#" in node.id else ""
    return f"{node.op} #{number}" if number else node.op


def _boxes(graph: Graph, kinds: dict[str, WorkerInfo]) -> tuple[Box, ...]:
    boxes: list[Box] = []
    if graph.source_fields:
        tip = "data source\n" + ", ".join(graph.source_fields)
        boxes.append(Box(SOURCE, "source", "data", shorten(graph.source_fields, lines=3, width=26), tip=tip))
    drawn = {node.worker for node in graph.nodes}
    boxes += [_idle(w) for w in graph.workers if w.name not in drawn]
    boxes += [_box(node, kinds) for node in graph.nodes]
    known = {box.id for box in boxes} | drawn
    strangers = dict.fromkeys(end for edge in graph.edges for end in (edge.src, edge.dst) if end not in known)
    return (*boxes, *(Box(end, "library", end, tip=end) for end in strangers))


def _idle(worker: WorkerInfo) -> Box:
    return Box(worker.name, "worker", worker.name, (worker.kind,), tip=_worker_tip(worker))


def _box(node: Node, kinds: dict[str, WorkerInfo]) -> Box:
    library = node.worker not in kinds
    title = f"{node.worker}.{title_of(node)}" if library and node.worker != "batch" else title_of(node)
    marks = [
        _ROWS.get(node.rows),
        f"updates {node.updates}" if node.updates else None,
        "external" if node.external else None,
        "once, outside the steps" if node.stage == "once" else None,
    ]
    return Box(
        node.id,
        "library" if library else "update" if node.updates else "op",
        title,
        tuple(mark for mark in marks if mark),
        node.branch,
        None if library else node.worker,
        _node_tip(node, kinds.get(node.worker)),
        node,
    )


def _groups(graph: Graph, kinds: dict[str, WorkerInfo], boxes: Iterable[Box]) -> tuple[Group, ...]:
    members: dict[str, list[str]] = {}
    for box in boxes:
        if box.group:
            members.setdefault(box.group, []).append(box.id)
    hues = {worker.name: number for number, worker in enumerate(graph.workers)}
    return tuple(
        Group(name, kinds[name].kind, tuple(ids), hues[name], _worker_tip(kinds[name])) for name, ids in members.items()
    )


def _line(id: str, edge: Edge, graph: Graph, place: dict[str, int]) -> Line:
    nodes = {node.id: node for node in graph.nodes}
    ends = [nodes[end] for end in (edge.src, edge.dst) if end in nodes]
    words = {"weights": (version_rule(edge.lag),), "serves": ("serves",)}
    label = words.get(edge.kind) or shorten(names_of(edge, graph))
    if edge.kind == "carried":
        label = (*label, NEXT_STEP)
    elsewhere = edge.branch is not None and edge.branch not in {node.branch for node in ends}
    return Line(
        id,
        edge,
        label,
        edge.branch if elsewhere else None,
        _edge_tip(edge, ends[0] if ends else None),
        place[edge.src] >= place[edge.dst],
    )


def _worker_tip(worker: WorkerInfo) -> str:
    rows = [f"{worker.name}: {worker.kind}", worker.describes, place_of(worker)]
    return "\n".join(row for row in rows if row)


def _node_tip(node: Node, worker: WorkerInfo | None) -> str:
    rows = [
        f"{node.id}  ({worker.kind})" if worker else node.id,
        node.signature or f"({', '.join(node.reads)}) -> ({', '.join(node.adds)})",
        f"if {node.branch}" if node.branch else "",
        f"{place_of(node)}   {node.source}".strip(),
    ]
    return "\n".join(row for row in rows if row)


def _edge_tip(edge: Edge, producer: Node | None) -> str:
    types = producer.types if producer else dict[str, str]()
    what = {
        "data": "data",
        "weights": f"weights, {version_rule(edge.lag)}",
        "order": "order only",
        "carried": "carried into the next step",
        "serves": "serves its engine to the op",
    }.get(edge.kind, edge.kind)
    rows = [f"{edge.src} → {edge.dst}: {what}"]
    rows += [f"{name}: {types[name]}" if name in types else name for name in edge.fields]
    if edge.branch:
        rows.append(f"if {edge.branch}")
    return "\n".join(rows)


def _summary(graph: Graph, groups: Sequence[Group]) -> str:
    workers = ", ".join(group.name for group in groups)
    capped = " Not all paths of the program are in it." if graph.capped else ""
    calls = f"{len(graph.nodes)} calls on {workers or 'no workers'}"
    return f"Dataflow of one step of {graph.program}: {calls}.{capped}"
