"""What a drawing shows of a graph: boxes in groups and lines between them, with words, before any format.

A :class:`Picture` adds to the record what a reader wants to see and the record leaves out: a box for a worker that
only serves, labels of bearable length, tooltips with everything, and for each line whether it runs against the order
of the program. Arithmetic is folded into the expression that it is a part of. Boxes stand in groups by worker, or
by pool where a plan places them; then they keep the colours of their workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import shown
from ..record import Edge, Graph, Node, PoolInfo, SourceInfo, WorkerInfo
from . import plan_in_words as placed
from .fold_arithmetic import folded

#: What the record calls a result of arithmetic, which has no name. Drawings leave the word out.
NAMELESS = "value"

#: The word at a carried edge.
NEXT_STEP = "next step"

#: The words at a carried edge that brings values of several steps.
NEXT_STEPS = "next steps"

_ACROSS, _DOWN = 34, 3  # letters and lines of an expression or a condition

#: What the nodes of a plan are.
MOVES = {"publish": "weights sent to another pool", "reshard": "weights that change their layout in a pool"}
_ONCE = "once, outside the steps"
_ROWS = {"expand": "expands rows", "filter": "filters rows", "regroup": "regroups rows"}


@dataclass(frozen=True)
class Box:
    """Something to draw: ``Box("critic.values", "op", "values", group="critic", tip="critic.values ...")``.

    ``role`` is ``op``, ``update``, ``library``, ``source``, ``worker`` (a worker that has no call of its own), ``move``
    (weights on their way) or ``none`` (stands in for the calls of a pool that has none). ``hue`` numbers the colour of
    its worker. A long ``title`` has line breaks. ``place`` are mesh and layout, ``time`` and ``share`` those of a run,
    all empty without a plan.
    """

    id: str
    role: str
    title: str
    notes: tuple[str, ...] = ()
    condition: str | None = None
    group: str | None = None
    tip: str = ""
    node: Node | None = None
    hue: int | None = None
    place: tuple[str, ...] = ()
    time: str = ""
    share: float | None = None

    @property
    def conditions(self) -> tuple[str, ...]:
        """The condition as it is written below all else."""
        return wrapped(f"if {self.condition}") if self.condition else ()

    @property
    def rows(self) -> tuple[str, ...]:
        """What stands below the title, but for the condition: settings first."""
        settings = wrapped(given(self.node)) if self.node else ()
        return (*settings, *self.notes, *self.place, *([self.time] if self.time else []))


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

    @property
    def conditions(self) -> tuple[str, ...]:
        """The condition as it is written below the label."""
        return wrapped(f"if {self.condition}") if self.condition else ()


@dataclass(frozen=True)
class Group:
    """A worker with calls: ``Group("critic", "Critic", ("critic.values", "critic.update"), hue=1)``.

    ``hue`` numbers its colour. Or a pool, which is grey: ``Group("pool train", "devices 0-7", (...), 0, pool=True)``.
    """

    name: str
    kind: str
    boxes: tuple[str, ...]
    hue: int
    tip: str = ""
    pool: bool = False
    busy: float | None = None


@dataclass(frozen=True)
class Picture:
    """All that is drawn, boxes in program order."""

    program: str
    boxes: tuple[Box, ...]
    groups: tuple[Group, ...]
    lines: tuple[Line, ...]
    summary: str
    workers: tuple[tuple[str, str, int], ...] = ()  # name, class and hue where the groups are pools

    def box(self, id: str) -> Box:
        """The box of that id. Raises KeyError."""
        return {box.id: box for box in self.boxes}[id]

    def group(self, name: str | None) -> Group | None:
        """The group of that name, if there is one."""
        return next((group for group in self.groups if group.name == name), None)

    def kinds(self) -> tuple[str, ...]:
        """The kinds of lines that occur, in the order of a legend."""
        there = {line.edge.kind for line in self.lines}
        return tuple(kind for kind in ("data", "weights", "carried", "control", "order", "serves") if kind in there)


def draw(graph: Graph) -> Picture:
    """Everything that a picture of this graph shows."""
    graph = folded(graph)
    kinds = {worker.name: worker for worker in graph.workers}
    pools = placed.pools_of(graph)
    boxes = _boxes(graph, kinds, pools)
    groups = _pools(pools, boxes) if pools else _groups(graph, kinds, boxes)
    place = {box.id: number for number, box in enumerate(boxes)}
    for group in groups:  # a serves edge starts at a group: it counts as standing where its last call stands
        place.setdefault(group.name, max(place[id] for id in group.boxes))
    edges = [_served(edge, graph) if pools else edge for edge in graph.edges]
    lines = tuple(_line(f"e{number}", edge, graph, place) for number, edge in enumerate(edges))
    hues = {box.hue for box in boxes}
    workers = tuple((w.name, w.kind, hue) for hue, w in enumerate(graph.workers) if pools and hue in hues)
    return Picture(graph.program, boxes, groups, lines, _summary(graph, pools), workers)


def shorten(fields: Sequence[str], *, lines: int = 3, width: int = 24) -> tuple[str, ...]:
    """Names on lines of their own, or packed on as many lines where they are more."""
    return tuple(fields) if len(fields) <= lines else placed.packed(fields, lines=lines, width=width)


def wrapped(text: str) -> tuple[str, ...]:
    """An expression or a condition on few lines, broken at blanks; what does not fit is cut."""
    rows: list[str] = []
    for word in text.split():
        if rows and len(rows[-1]) + 1 + len(word) <= _ACROSS:
            rows[-1] += f" {word}"
        else:
            rows.append(word)
    if len(rows) > _DOWN:
        rows[_DOWN - 1 :] = [f"{rows[_DOWN - 1]} …"]
    return tuple(row if len(row) <= 2 * _ACROSS else f"{row[: 2 * _ACROSS - 1]}…" for row in rows)


def names_of(edge: Edge, graph: Graph) -> tuple[str, ...]:
    """The fields of an edge that have names; one that was made under another name says both: ``rewards as costs``."""
    adds = next((node.adds for node in graph.nodes if node.id == edge.src), ())
    pairs = zip(edge.fields, edge.made or edge.fields, strict=True)
    named = ((name, made) for name, made in pairs if name != NAMELESS or name in adds)
    return tuple(name if made == name else f"{made} as {name}" for name, made in named)


def version_rule(lag: int | None) -> str:
    """Return what a weights edge promises its reader, in words."""
    if lag is None:
        return "weights"
    return "newest version" if lag == 0 else f"≤ {lag} {'version' if lag == 1 else 'versions'} old"


def given(thing: Node | WorkerInfo) -> str:
    """The settings of a call or a worker as a call writes them: ``n=8, temperature=0.6``."""
    return ", ".join(f"{name}={value}" for name, value in thing.settings.items())


def place_of(node: Node | WorkerInfo | SourceInfo) -> str:
    """File and line as a user would type them: ``algorithms/ppo.py:28``; empty where unknown."""
    if not node.file:
        return ""
    name = node.file if node.file.startswith("<") else shown(node.file)
    return f"{name}:{node.line}" if node.line else name


def title_of(node: Node) -> str:
    """The name of a call inside its group: ``generate``, or ``generate #2`` for its second call."""
    number = node.id.rpartition("#")[2] if "#" in node.id else ""
    return f"{node.op} #{number}" if number else node.op


def _boxes(graph: Graph, kinds: dict[str, WorkerInfo], pools: Sequence[PoolInfo]) -> tuple[Box, ...]:
    boxes = [_source(source) for source in graph.sources]
    calling = {node.worker for node in graph.nodes}
    serving = {edge.src for edge in graph.edges_of("serves")} if pools else set[str]()
    hues = {worker.name: number for number, worker in enumerate(graph.workers)}
    alone = [w for w in graph.workers if w.name not in calling or w.name in serving]
    boxes += [_idle(w, graph, hues[w.name] if pools else None) for w in alone]
    boxes += [_box(node, kinds, hues.get(node.worker)) for node in graph.nodes]
    if pools:
        boxes = [_in_pool(box) for box in boxes]
        full = {box.group for box in boxes}
        boxes += [_nothing(pool) for pool in pools if _pool_id(pool.name) not in full]
    known = {box.id for box in boxes} | (set[str]() if pools else calling)
    strangers = dict.fromkeys(end for edge in graph.edges for end in (edge.src, edge.dst) if end not in known)
    return (*boxes, *(Box(end, "library", end, tip=end) for end in strangers))


def _source(source: SourceInfo) -> Box:
    columns = [f"{name}: {source.types[name]}" if name in source.types else name for name in source.fields]
    when = [f"if {source.branch}"] if source.branch else []
    rows = [f"{source.id}: a source of data", source.describes, place_of(source), *when, *columns]
    notes = (*shorten(source.fields, lines=3, width=26), *([_ONCE] if source.stage == "once" else []))
    return Box(source.id, "source", source.id.partition(".")[2], notes, source.branch, tip=_rows_of_text(rows))


def _idle(worker: WorkerInfo, graph: Graph, hue: int | None) -> Box:
    """Return the box of a worker that serves, where its weights are brought to unless the plan says where."""
    moved = (n.pool for n in graph.nodes if n.worker == worker.name and n.kind != "op")
    pool, rows = worker.pool or next(moved, None), placed.place_rows(worker)
    tip, group = _worker_tip(worker), _pool_id(pool) if pool else None
    return Box(worker.name, "worker", worker.name, (worker.kind,), group=group, tip=tip, hue=hue, place=rows)


def _box(node: Node, kinds: dict[str, WorkerInfo], hue: int | None) -> Box:
    library = node.worker not in kinds
    title = "\n".join(wrapped(node.expression)) or title_of(node)
    title = f"{node.worker}.{title_of(node)}" if library and node.worker != "batch" else title
    marks = [
        "once for each that is carried" if node.repeats else None,
        _ROWS.get(node.rows),
        f"updates {node.updates}" if node.updates else None,
        "external" if node.external else None,
        _ONCE if node.stage == "once" else None,
    ]
    moves = node.kind != "op"
    return Box(
        node.id,
        "move" if moves else "library" if library else "update" if node.updates else "op",
        title,
        tuple(mark for mark in marks if mark),
        node.branch,
        None if library else node.worker,
        _node_tip(node, kinds.get(node.worker)),
        node,
        hue,
        placed.place_rows(node),
        placed.time_text(node),
        node.share if node.seconds is not None else None,
    )


def _in_pool(box: Box) -> Box:
    """The box where the plan puts it, a publish between the pools; its title says the worker, as no group does."""
    node = box.node
    if node is None:
        return box
    title = box.title if node.expression or node.worker == "batch" else f"{node.worker}.{title_of(node)}"
    return replace(box, title=title, group=_pool_id(node.pool) if node.pool and node.kind != "publish" else None)


def _nothing(pool: PoolInfo) -> Box:
    group = _pool_id(pool.name)
    return Box(f"{group}: no calls", "none", "no calls", group=group, tip=f"no call is placed in {group}")


def _pools(pools: Sequence[PoolInfo], boxes: Iterable[Box]) -> tuple[Group, ...]:
    groups: list[Group] = []
    for number, pool in enumerate(pools):
        name = _pool_id(pool.name)
        words = [word for word in (placed.pool_text(pool), placed.busy_text(pool)) if word]
        time = f"{placed.seconds_text(pool.seconds)} of work in a step" if pool.seconds is not None else ""
        members = tuple(box.id for box in boxes if box.group == name)
        tip = _rows_of_text([name, *words, time])
        groups.append(Group(name, " · ".join(words), members, number, tip, True, pool.busy))
    return tuple(groups)


def _pool_id(name: str) -> str:
    """The name of the group of a pool. Workers are called by names without blanks, so it cannot be taken."""
    return f"pool {name}"


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
    words: dict[str, tuple[str, ...]] = {"weights": (_version_row(edge, nodes),), "serves": ("serves",)}
    size = placed.bytes_row(edge)
    label = words.get(edge.kind) or shorten(names_of(edge, graph), lines=2 if size else 3, width=20)
    label = tuple(word for word in (*label, size) if word)
    if edge.kind == "carried":
        label = (*label, NEXT_STEPS if edge.repeats else NEXT_STEP)
    if edge.kind == "control":  # the box that it goes to says the condition, where it is that of the box
        label = tuple(row for name in edge.fields for row in wrapped(f"{name}?")) if edge.branch is None else ()
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
    return _rows_of_text([f"{worker.name}: {worker.kind}", worker.describes, place_of(worker)])


def _node_tip(node: Node, worker: WorkerInfo | None) -> str:
    rows = [
        f"{node.id}  ({worker.kind})" if worker else node.id,
        MOVES.get(node.kind) or node.signature or f"({', '.join(node.reads)}) -> ({', '.join(node.adds)})",
        node.expression,
        f"if {node.branch}" if node.branch else "",
        f"{place_of(node)}   {node.source}".strip(),
        *placed.place_lines(node),
    ]
    return _rows_of_text(rows)


def _edge_tip(edge: Edge, producer: Node | None) -> str:
    types = producer.types if producer else dict[str, str]()
    what = {
        "data": "data",
        "weights": f"weights, {version_rule(edge.lag)}",
        "order": "order only",
        "carried": "carried into the next step",
        "serves": "serves its engine to the op",
        "control": "decides on it",
    }.get(edge.kind, edge.kind)
    rows = [f"{edge.src} → {edge.dst}: {what}"]
    for name, made in zip(edge.fields, edge.made or edge.fields, strict=True):
        field = name if name == made else f"{made} as {name}"
        rows.append(f"{field}: {types[made]}" if made in types else field)
    rows.append("of several steps before" if edge.repeats else "")
    rows += placed.edge_lines(edge)
    rows.append(f"if {edge.branch}" if edge.branch else "")
    return _rows_of_text(rows)


def _rows_of_text(rows: Iterable[str]) -> str:
    return "\n".join(row for row in rows if row)


def _served(edge: Edge, graph: Graph) -> Edge:
    """Weights for an op that holds a worker's handle go to the box of that worker, from where they are served."""
    made_by = {node.id: node.worker for node in graph.nodes}.get(edge.src)
    serves = edge.kind == "weights" and any(
        other.kind == "serves" and (other.src, other.dst) == (made_by, edge.dst) for other in graph.edges
    )
    return replace(edge, dst=made_by) if serves and made_by else edge


def _version_row(edge: Edge, nodes: Mapping[str, Node]) -> str:
    """Return what a weights edge promises. One that brings weights to their way promises nothing yet."""
    if edge.version:
        return placed.version_text(edge)
    moves = edge.dst in nodes and nodes[edge.dst].kind != "op"
    return "" if moves else version_rule(edge.lag)


def _summary(graph: Graph, pools: Sequence[PoolInfo]) -> str:
    called = dict.fromkeys(node.worker for node in graph.nodes)
    workers = ", ".join(worker for worker in called if worker in {w.name for w in graph.workers})
    capped = " Not all paths of the program are in it." if graph.capped else ""
    calls = f"{sum(node.kind == 'op' for node in graph.nodes)} calls on {workers or 'no workers'}"
    where = f" in {'pools' if len(pools) > 1 else 'pool'} {', '.join(p.name for p in pools)}" if pools else ""
    basis = f" {graph.plan}" if graph.plan else ""
    return f"Dataflow of one step of {graph.program}: {calls}{where}.{capped}{basis}"
