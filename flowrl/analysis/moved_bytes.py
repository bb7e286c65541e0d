"""The bytes that a run has moved, put on the edges of its graph in the place of a forecast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from ..graph.record import Edge, Graph
from ..runtime.storage.run_record import records_within

Bytes = Mapping[str, Mapping[str, float]]  # by node and field


@dataclass(frozen=True)
class Moved:
    """What an average step of a run moved: ``Moved({"actor.update": 1.0}, {"actor.update": {"tokens": 3152.0}}, ...)``.

    ``calls`` of each node, ``reads`` and ``makes`` their bytes by field, ``weights`` the bytes of each publish.
    ``lags``: prompt groups of the whole run by the publishes between their oldest token and the weights.
    """

    calls: Mapping[str, float]
    reads: Bytes
    makes: Bytes
    weights: Mapping[str, float]
    lags: Mapping[int, int]


def moved(run: Path, program: str) -> Moved | None:
    """Return what a program of a run moved, from its ``traffic.jsonl``; None for a run without one."""
    lines = [line for line in records_within(run / "traffic.jsonl") if line.get("program") == program]
    if not lines:
        return None
    steps, lags = len({line["step"] for line in lines}), Counter[int]()
    for line in lines:
        lags.update({int(lag): count for lag, count in line["lags"].items()})
    reads, makes = (_average([line[what] for line in lines], steps) for what in ("reads", "makes"))
    single = _average([{what: line[what] for what in ("calls", "weights")} for line in lines], steps)
    return Moved(single["calls"], reads, makes, single["weights"], dict(sorted(lags.items())))


def sampled_lengths(run: Path, program: str) -> tuple[float, tuple[float, ...], float] | None:
    """Tokens of an average prompt of a run, quantiles of its responses, and how alike those to one prompt are.

    None for a run that sampled nothing.
    """
    lines = [line for line in records_within(run / "traffic.jsonl") if line.get("program") == program]
    prompts, responses = ([line[what] for line in lines if line.get(what)] for what in ("prompts", "responses"))
    if not prompts or not responses:
        return None
    middle = [fmean(part) for part in zip(*prompts, strict=True)]
    alike = [line["alike"] for line in lines if line.get("alike") is not None]
    return fmean(middle), tuple(fmean(p) for p in zip(*responses, strict=True)), max(0.0, fmean(alike or [0.0]))


def with_moved(graph: Graph, found: Moved) -> Graph:
    """The graph with measured bytes on its edges: rows that were read, weights that were published.

    Of a field that comes to a call along one edge, it is what the call read; where several bring it, or the call reads
    it under another name, it is what was made at the beginning of the edge, for each time that the call was made.
    """
    kinds = {node.id: node.kind for node in graph.nodes}
    comes = Counter((e.dst, name) for e in graph.edges if e.kind in ("data", "carried") for name in e.fields)

    def measured(edge: Edge) -> Edge:
        if edge.kind == "weights" and kinds.get(edge.dst, "op") != "op":
            return replace(edge, bytes=found.weights.get(edge.dst, 0.0))
        if edge.kind not in ("data", "carried"):
            return edge
        fields = [name for name in edge.fields if name != "keys"]
        return replace(edge, bytes=sum(_field(edge, n, found, alone=comes[edge.dst, n] == 1) for n in fields))

    return replace(graph, edges=tuple(map(measured, graph.edges)), plan="Bytes are measured, of an average step.")


def _field(edge: Edge, name: str, found: Moved, *, alone: bool) -> float:
    """Bytes of one field of an edge."""
    read = found.reads.get(edge.dst, {})
    if alone and name in read:
        return read[name]
    made, calls = found.makes.get(edge.src, {}), found.calls.get(edge.src, 0.0)
    size = made[name] if name in made else made.get("value", 0.0)
    return size * found.calls.get(edge.dst, 0.0) / calls if calls else 0.0


def _average(lines: Iterable[Bytes], steps: int) -> Bytes:
    """Counts of a step on average, by what they are of and by name."""
    total: dict[str, Counter[str]] = {}
    for line in lines:
        for node, fields in line.items():
            total.setdefault(node, Counter()).update(fields)
    return {node: {name: size / steps for name, size in fields.items()} for node, fields in total.items()}
