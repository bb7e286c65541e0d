"""The recorded calls of all paths made one graph: nodes in program order, edges by what is read, branches labelled."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import shown
from .op import Spec
from .oracle import Decision
from .record import Edge, Graph, Node, WorkerInfo
from .relaxed import Site, relaxed_calls, site
from .terms import TCall, Traced, Trail
from .values import find

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object that says no more of itself
Place = tuple[object, ...]
Key = tuple[Place, Place, str]  # from, to, kind


@dataclass
class _Found:
    """What the paths say of one node or edge."""

    trails: set[int] = field(default_factory=set[int])
    fields: list[str] = field(default_factory=list[str])


def node_ids(traced: Traced) -> dict[Place, str]:
    """The ids of the graph's nodes, by the place of their calls in the program."""
    return _names(*_in_order(traced.trails))


def ids_by_site(traced: Traced) -> dict[Site, str]:
    """The same by title, file and line, as a running program knows its calls; of several in a line, the first."""
    order, sample = _in_order(traced.trails)
    ids = _names(order, sample)
    found: dict[Site, str] = {}
    for place in order:
        found.setdefault(site(sample[place]), ids[place])
    return found


def compile_graph(traced: Traced, workers: Sequence[WorkerInfo] = (), staleness: int = 0) -> Graph:
    """One steady iteration: the second of each loop, and what lies outside of loops."""
    order, sample = _in_order(traced.trails)
    ids = _names(order, sample)
    relaxed = relaxed_calls(traced)
    nodes_found: dict[Place, _Found] = {place: _Found() for place in order}
    edges_found: dict[Key, _Found] = defaultdict(_Found)
    for number, trail in enumerate(traced.trails):
        for call in _steady(trail):
            nodes_found[call.place].trails.add(number)
        for (src, dst, kind), names in _edges(trail).items():
            if (dst in ids) and (kind == "serves" or src in ids):
                found = edges_found[(src, dst, kind)]
                found.trails.add(number)
                found.fields += [n for n in names if n not in found.fields]
    for (src, dst), label in _chosen(traced.trails).items():
        if src in ids and dst in ids:
            edges_found[(src, dst, "carried")].trails |= nodes_found[dst].trails
            edges_found[(src, dst, "carried")].fields.append(label)
    nodes = tuple(
        _node(ids[p], sample[p], _branch(nodes_found[p].trails, traced.trails, _steadied(p, traced.trails)))
        for p in order
    )
    label = {p: n.branch for p, n in zip(order, nodes, strict=True)}
    edges = [
        Edge(
            src=str(src[0]) if kind == "serves" else ids[src],
            dst=ids[dst],
            kind=kind,
            fields=tuple(found.fields),
            lag=(staleness if site(sample[dst]) in relaxed else 0) if kind == "weights" else None,
            branch=label[dst]
            if found.trails == nodes_found[dst].trails
            else _branch(found.trails, traced.trails, nodes_found[dst].trails),
        )
        for (src, dst, kind), found in edges_found.items()
    ]
    place_of = {ids[p]: i for i, p in enumerate(order)}
    edges.sort(key=lambda e: (place_of[e.dst], place_of.get(e.src, -1), e.kind))
    source: dict[str, object] = {}
    for trail in traced.trails:
        source.update(trail.source_fields)
    used = {n.worker for n in nodes} | {e.src for e in edges if e.kind == "serves"}
    return Graph(
        program=traced.program,
        nodes=nodes,
        edges=tuple(edges),
        workers=tuple(w for w in workers if w.name in used),
        source_fields=tuple(source),
        paths=len(traced.trails),
        capped=traced.capped,
    )


def _steady(trail: Trail) -> list[TCall]:
    return [c for c in trail.calls if c.iteration in (0, 2)]


def _in_order(trails: Sequence[Trail]) -> tuple[list[Place], dict[Place, TCall]]:
    """Places in program order over all paths: what a path has more than others stands behind its forerunner there."""
    order: list[Place] = []
    sample: dict[Place, TCall] = {}
    for trail in trails:
        at = -1
        for call in _steady(trail):
            if call.place in sample:
                at = order.index(call.place)
                continue
            at += 1
            order.insert(at, call.place)
            sample[call.place] = call
    return order, sample


def _names(order: Iterable[Place], sample: Mapping[Place, TCall]) -> dict[Place, str]:
    counts: dict[str, int] = defaultdict(int)
    ids: dict[Place, str] = {}
    for place in order:
        title = sample[place].title
        counts[title] += 1
        ids[place] = title if counts[title] == 1 else f"{title}#{counts[title]}"
    return ids


def _node(id: str, call: TCall, branch: str | None) -> Node:
    reads = {n: t for fields in call.signature.reads.values() for n, t in fields.items()}
    into: Mapping[str, str] = call.arguments.get("into") or {}
    adds = call.signature.adds
    types = {n: str(t) for n, t in [*reads.items(), *adds.items()] if t is not None}
    return Node(
        id=id,
        worker=call.worker,
        op=call.op.name,
        file=shown(call.at.file),
        line=call.at.line,
        source=call.at.text,
        reads=tuple(reads),
        adds=tuple(into.get(n, n) for n in adds),
        types=types,
        updates=call.updates,
        rows=call.op.rows,
        cost=call.op.cost,
        external=call.op.external,
        branch=branch,
        stage="step" if call.iteration else "once",
        signature=str(call.signature),
        loss=next((repr(value) for value in call.arguments.values() if isinstance(value, Spec)), None),
    )


def _edges(trail: Trail) -> dict[Key, list[str]]:
    """All edges into the steady calls of one path."""
    edges: dict[Key, list[str]] = defaultdict(list)
    for call in _steady(trail):
        for maker, name in call.uses:
            made = trail.calls[maker]
            carried = made.loop == call.loop and made.iteration == 1 and call.iteration == 2
            names = edges[(made.place, call.place, "carried" if carried else "data")]
            if name not in names:
                names.append(name)
        for worker in call.serves:
            edges[((worker,), call.place, "serves")] = []
        for worker in (call.worker, *call.serves):
            last = _last_update(trail, call, worker)
            if last is not None and not (call.updates and call.worker == worker):
                edges[(last.place, call.place, "weights")] = []
    for src, dst in _orders(trail):
        edges[(src.place, dst.place, "order")] = []
    return edges


def _chosen(trails: Sequence[Trail]) -> dict[tuple[Place, Place], str]:
    """Carried choices: arguments of a steady call that differ with an outcome of the step before.

    ``if float(kl) > target: coef *= 1.5`` makes ``coef`` of the next step depend on ``kl``, through the condition.
    """
    said: dict[Place, dict[int, str]] = defaultdict(dict)
    for number, trail in enumerate(trails):
        for call in _steady(trail):
            if call.iteration == 2:
                plain = {n: v for n, v in call.arguments.items() if next(find([v]), None) is None}
                said[call.place][number] = _ADDRESS.sub("", repr(plain))
    found: dict[tuple[Place, Place], str] = {}
    for place, arguments in said.items():
        if len(set(arguments.values())) < 2:
            continue
        for number, trail in enumerate(trails):
            for decision in trail.path.taken:
                if decision.iteration != 1 or number not in arguments:
                    continue
                other = _same_but(trails, number, decision)
                if other in arguments and arguments[other] != arguments[number]:
                    for maker in decision.calls:
                        found[(trail.calls[maker].place, place)] = decision.condition
    return found


def _same_but(trails: Sequence[Trail], number: int, decision: Decision) -> int | None:
    """The path that took the same outcomes as another up to a decision, and the other one there."""
    mine = trails[number].path.taken
    upto = mine.index(decision)
    for other, trail in enumerate(trails):
        taken = trail.path.taken
        same = len(taken) > upto and all(a.outcome == b.outcome for a, b in zip(mine[:upto], taken, strict=False))
        if same and taken[upto].condition == decision.condition and taken[upto].outcome != decision.outcome:
            return other
    return None


def _last_update(trail: Trail, call: TCall, worker: str) -> TCall | None:
    """The update whose weights a call sees: the last one of the worker before it on the path."""
    before = [c for c in trail.calls[: call.index] if c.worker == worker and c.updates]
    return before[-1] if before else None


def _orders(trail: Trail) -> list[tuple[TCall, TCall]]:
    """Calls of one worker that no data ties together, of which one updates what the other sees."""
    steady = _steady(trail)
    reach: dict[int, set[int]] = {}
    for call in steady:
        sources = {m for m, _ in call.uses}
        reach[call.index] = sources.union(*(reach.get(s, set()) for s in sources))
    found: list[tuple[TCall, TCall]] = []
    for i, late in enumerate(steady):
        if not late.updates:
            continue
        for early in steady[:i]:
            touches = late.worker == early.worker or late.worker in early.serves
            if touches and early.iteration == late.iteration and early.index not in reach[late.index]:
                found.append((early, late))
                reach[late.index] |= {early.index, *reach[early.index]}
    return found


def _steadied(place: Place, trails: Sequence[Trail]) -> set[int]:
    """The paths that came to the steady iteration of a call's loop, and did not leave the loop before it."""
    loop = place[0]
    return {i for i, trail in enumerate(trails) if not loop or (loop, 2) in trail.began}


def _branch(present: set[int], trails: Sequence[Trail], within: set[int]) -> str | None:
    """Under which outcomes something happens: those that all paths with it share, and some of ``within`` lack."""
    absent = within - present
    if not absent or not present:
        return None
    said = [[(d.label, d.iteration) for d in trail.path.taken if not d.forced] for trail in trails]
    shared = set(said[min(present)]).intersection(*(said[t] for t in present))
    labels = [
        label if iteration != 1 else f"{label} in the step before"
        for label, iteration in sorted(shared, key=lambda x: (-x[1], said[min(present)].index(x)))
        if not all((label, iteration) in said[t] for t in absent) and (f"{label} again", iteration) not in shared
    ]
    return " and ".join(dict.fromkeys(labels)) or "on some paths"
