"""The recorded calls of all paths made one graph: nodes in program order, edges by what is read, branches labelled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import shown
from .control_dependence import add_control
from .decision_diagram import Diagram, condition, diagram
from .may_see_older_weights import Site, relaxed_calls, site
from .ops.function_spec import Spec
from .ops.shown_settings import settings_of
from .record import Edge, Graph, Node, SourceInfo, WorkerInfo
from .stand_ins.values import replace_values
from .tracing.call_identity import Found, Key, Place, as_written, carried, source_place, steady, written_out
from .tracing.growing_lists import growth
from .tracing.trace_records import Draw, TCall, Traced, Trail


def node_ids(traced: Traced) -> dict[Place, str]:
    """The ids of the graph's nodes, by the place of their calls in the program."""
    return _names(*_in_order(traced.trails))


def ids_by_site(traced: Traced) -> dict[Site, str]:
    """Return the ids by title and lines, as a running program knows its calls; of several in a line, the first."""
    order, sample = _in_order(traced.trails)
    ids = _names(order, sample)
    return {site(sample[place]): ids[place] for place in reversed(order)}


def compile_graph(traced: Traced, workers: Sequence[WorkerInfo] = (), staleness: int = 0) -> Graph:
    """Return the graph of a steady iteration: the second of each loop, and what lies outside of loops."""
    trails = traced.trails
    order, sample = _in_order(trails)
    sources = _sources(trails)
    ids = {place: source.id for place, source in sources.items()} | _names(order, sample)
    there = _there(ids, trails)
    when = {place: _when(there[place], _steadied(place, trails), trails) for place in ids}
    edges_found = _all_edges(traced, ids)
    which = {key: _when(found.trails, there[key[1]], trails) for key, found in edges_found.items()}
    again = growth(traced.longer)
    for key in again.edges & set(edges_found):
        edges_found[key].repeats = True
    add_control(edges_found, there, when, which, trails, order)
    label = {place: condition(found) for place, found in when.items()}
    relaxed = relaxed_calls(traced)
    lag = {p: staleness if site(sample[p]) in relaxed else 0 for p in order}
    rank = {place: number for number, place in enumerate(ids)}
    edges = [
        Edge(
            src=str(src[0]) if kind == "serves" else ids[src],
            dst=ids[dst],
            kind=kind,
            fields=tuple(found.fields),
            lag=lag[dst] if kind == "weights" else None,
            branch=condition(which.get((src, dst, kind))) or label[dst],
            made=_made(found.fields),
            repeats=found.repeats,
        )
        for (src, dst, kind), found in sorted(
            edges_found.items(), key=lambda e: (rank[e[0][1]], rank.get(e[0][0], -1), e[0][2])
        )
    ]
    calls: dict[Place, list[TCall]] = defaultdict(list)  # of each path that makes them
    for call in (call for trail in trails for call in steady(trail)):
        calls[call.place].append(call)
    nodes = tuple(_node(ids[p], calls[p], label[p], p in again.places) for p in order)
    used = {n.worker for n in nodes} | {e.src for e in edges if e.kind == "serves"}
    return Graph(
        program=traced.program,
        nodes=nodes,
        edges=tuple(edges),
        workers=tuple(w for w in workers if w.name in used),
        source_fields=tuple(dict.fromkeys(name for source in sources.values() for name in source.fields)),
        paths=len(trails),
        capped=traced.capped,
        sources=tuple(replace(source, branch=label[place]) for place, source in sources.items()),
    )


def _there(ids: Iterable[Place], trails: Sequence[Trail]) -> dict[Place, set[int]]:
    """The paths on which a steady step makes each call, or draws from each source."""
    paths: dict[Place, set[int]] = {place: set() for place in ids}
    for number, trail in enumerate(trails):
        for call in steady(trail):
            paths[call.place].add(number)
        for draw in trail.draws.values():
            if draw.iteration in (0, 2):
                paths[source_place(draw)].add(number)
    return paths


def _when(present: set[int], within: set[int], trails: Sequence[Trail]) -> Diagram | None:
    """The outcomes on which it hangs whether something happens, of the paths that could have it."""
    return diagram({path: path in present for path in sorted(within | present)}, trails)


def _all_edges(traced: Traced, ids: Mapping[Place, str]) -> dict[Key, Found]:
    """The edges of all paths, but for control."""
    edges: dict[Key, Found] = defaultdict(Found)
    for number, trail in enumerate(traced.trails):
        for (src, dst, kind), names in _edges(trail).items():
            if dst in ids and (kind == "serves" or src in ids):
                edge = edges[(src, dst, kind)]
                edge.trails.add(number)
                for name, made in names.items():
                    edge.fields.setdefault(name, made)
    return edges


def _made(fields: Mapping[str, str]) -> tuple[str, ...]:
    """The names that fields had where they were made; empty where all have kept them."""
    names = tuple(before or name for name, before in fields.items())
    return () if names == tuple(fields) else names


# -- sources --------------------------------------------------------------------------------------------------------


def _sources(trails: Sequence[Trail]) -> dict[Place, SourceInfo]:
    """The sources that a program draws from, by what tells them apart, in the order of the lines that do."""
    sources: dict[Place, SourceInfo] = {}
    counts: dict[str, int] = defaultdict(int)
    draws = (draw for trail in trails for draw in trail.draws.values())
    for draw in sorted(draws, key=lambda draw: (draw.loop, draw.lines)):
        place = source_place(draw)
        if place in sources:
            continue
        counts[draw.name] += 1
        number = f"#{counts[draw.name]}" if counts[draw.name] > 1 else ""
        sources[place] = SourceInfo(
            id=f"data.{draw.name}{number}",
            name=draw.name,
            describes=draw.describes,
            fields=tuple(draw.schema),
            types={name: str(type_) for name, type_ in draw.schema.items()},
            file=shown(draw.at.file),
            line=draw.at.line,
            stage="step" if draw.iteration else "once",
        )
    return sources


# -- calls ----------------------------------------------------------------------------------------------------------


def _in_order(trails: Sequence[Trail]) -> tuple[list[Place], dict[Place, TCall]]:
    """Places in program order over all paths: what a path has more than others stands behind its forerunner there.

    What neither has to do with the other, as no path makes both, stands in the order of the lines.
    """
    order: list[Place] = []
    sample: dict[Place, TCall] = {}
    for trail in trails:
        at = -1
        mine = {call.place for call in steady(trail)}
        for call in steady(trail):
            if call.place in sample:
                at = order.index(call.place)
                continue
            at += 1
            while at < len(order) and order[at] not in mine and _lines(order[at]) < _lines(call.place):
                at += 1
            order.insert(at, call.place)
            sample[call.place] = call
    return order, sample


def _lines(place: Place) -> tuple[object, ...]:
    """The loop of a place, and the lines that lead to it from the program's own down."""
    return (place[0], *place[3:-1])


def _names(order: Iterable[Place], sample: Mapping[Place, TCall]) -> dict[Place, str]:
    counts: dict[str, int] = defaultdict(int)
    ids: dict[Place, str] = {}
    for place in order:
        title = sample[place].title
        counts[title] += 1
        ids[place] = title if counts[title] == 1 else f"{title}#{counts[title]}"
    return ids


def _node(id: str, calls: Sequence[TCall], branch: str | None, repeats: bool) -> Node:
    call = calls[0]
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
        loss=_loss(calls, dict.fromkeys(name for c in calls for name in c.others)),
        settings=settings_of(calls),
        expression=call.text,
        repeats=repeats,
    )


def _loss(calls: Sequence[TCall], others: Iterable[str]) -> str | None:
    """Return what an update minimises, and whose rows where ``others`` sampled them: ``sft() on rows of teacher``."""
    loss, whose = _minimised(calls), " and ".join(others)
    return f"{loss} on rows of {whose}" if loss and whose else loss


def _minimised(calls: Sequence[TCall]) -> str | None:
    """Return what an update minimises: a computed parameter as its expression, one that differs as all its values."""
    specs = [v for call in calls for v in call.arguments.values() if isinstance(v, Spec)]
    losses = [spec.with_parameters(replace_values(dict(spec.parameters), written_out)) for spec in specs]
    texts = list(dict.fromkeys(map(repr, losses)))
    if len(texts) < 2:
        return texts[0] if texts else None
    first = losses[0]
    if any((loss.name, list(loss.parameters)) != (first.name, list(first.parameters)) for loss in losses):
        return " or ".join(texts)
    merged: dict[str, Any] = {}
    for name, value in first.parameters.items():
        values = list(dict.fromkeys(str(loss.parameters[name]) for loss in losses))
        merged[name] = as_written(" or ".join(values)) if len(values) > 1 else value
    return repr(first.with_parameters(merged))


def _edges(trail: Trail) -> dict[Key, dict[str, str]]:
    """All edges into the steady calls of one path, but for control: fields with the names they were made under."""
    edges: dict[Key, dict[str, str]] = defaultdict(dict)
    for call in steady(trail):
        for use in call.uses:
            maker = trail.draws[use.draw] if use.call is None else trail.calls[use.call]
            place = source_place(maker) if isinstance(maker, Draw) else maker.place
            names = edges[(place, call.place, "carried" if carried(maker, call.loop, call.iteration) else "data")]
            names.setdefault(use.name, use.made)
        for worker in call.serves:
            edges[((worker,), call.place, "serves")] = {}
        for worker in (call.worker, *call.serves):
            before = reversed(trail.calls[: call.index])  # the call sees the weights of the last update
            last = next((c for c in before if c.worker == worker and c.updates), None)
            if last is not None and not (call.updates and call.worker == worker):
                edges[(last.place, call.place, "weights")] = {}
    for src, dst in _orders(trail):
        edges[(src.place, dst.place, "order")] = {}
    return edges


# -- order ----------------------------------------------------------------------------------------------------------


def _orders(trail: Trail) -> list[tuple[TCall, TCall]]:
    """Calls of one worker that no data ties together, of which one updates what the other sees."""
    calls = steady(trail)
    reach: dict[int, set[int]] = {}
    for call in calls:
        sources = set(call.makers)
        reach[call.index] = sources.union(*(reach.get(s, set()) for s in sources))
    orders: list[tuple[TCall, TCall]] = []
    for i, late in enumerate(calls):
        if not late.updates:
            continue
        for early in calls[:i]:
            touches = late.worker == early.worker or late.worker in early.serves
            if touches and early.iteration == late.iteration and early.index not in reach[late.index]:
                orders.append((early, late))
                reach[late.index] |= {early.index, *reach[early.index]}
    return orders


def _steadied(place: Place, trails: Sequence[Trail]) -> set[int]:
    """The paths that came to the steady iteration of the loop of a call or source, and did not leave it before."""
    loop = place[1] if place[0] == "data" else place[0]
    return {i for i, trail in enumerate(trails) if not loop or (loop, 2) in trail.began}
