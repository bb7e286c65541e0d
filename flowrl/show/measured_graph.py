"""The graph of a program with what its run has measured so far, drawn in a thread of its own and kept."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..analysis.run_pages import look_at
from ..errors import FlowError
from ..graph.draw import palette, render
from ..graph.record import Edge, Graph

TAIL = 1 << 20  # bytes of the digests in which the newest versions are looked for
SEEN = ("timeline.jsonl", "traffic.jsonl", "run.json")  # what a drawing is made of

_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")  # which no picture may contain


class Drawings:
    """Draws one graph at a time, and again when its run has gone on."""

    def __init__(self) -> None:
        self._artist = ThreadPoolExecutor(1, thread_name_prefix="flowrl graph")
        self._lock = threading.Lock()
        self._kept: dict[tuple[Path, str], tuple[list[int], dict[str, Any]]] = {}
        self._drawn: dict[tuple[Path, str], tuple[list[int], Future[dict[str, Any]]]] = {}

    def newest(self, run: Path, program: str) -> dict[str, Any] | None:
        """The newest drawing that is done, None before the first one. Has another made where the run has gone on."""
        which, seen = (run, program), [_size(run / name) for name in SEEN]
        with self._lock:
            if which in self._drawn and self._drawn[which][1].done():
                made_of, drawn = self._drawn.pop(which)
                self._kept[which] = made_of, drawn.result()
            if which not in self._drawn and (which not in self._kept or self._kept[which][0] != seen):
                self._drawn[which] = seen, self._artist.submit(draw, run, program)
            return self._kept[which][1] if which in self._kept else None

    def close(self) -> None:
        """Draw nothing more."""
        self._artist.shutdown(wait=True, cancel_futures=True)


def draw(run: Path, program: str) -> dict[str, Any]:
    """The picture of a program's graph and its calls as plain data; why there is none, where that is so."""
    try:
        graph, flown = look_at(run, program or None)
        versions = newest_versions(run / "digests.jsonl", graph.program)
        graph = with_versions(graph, versions, flown.lags if flown is not None else {})
        picture = _NOT_XML.sub("\ufffd", render(graph, "svg").replace(palette.STYLE, ""))
    except FlowError as error:
        return {"picture": "", "problem": str(error).splitlines()[0], "nodes": [], "basis": ""}
    except (KeyError, TypeError, ValueError, OSError) as error:  # a record that is damaged, or of another flowrl
        return {"picture": "", "problem": f"its graph cannot be drawn: {error}", "nodes": [], "basis": ""}
    return {"picture": picture, "problem": "", "nodes": nodes_of(graph, versions), "basis": graph.plan}


def with_versions(graph: Graph, versions: Mapping[str, Mapping[str, Sequence[int]]], lags: Mapping[int, int]) -> Graph:
    """The graph with what was measured on the edges along which weights go: the newest version that a call has seen,
    and how many publishes lay between the rows of the run and the weights that were trained on them."""
    seen = [lag for lag, groups in sorted(lags.items()) if groups]
    lag = f"lag {seen[0]}" if len(seen) == 1 else f"lag {seen[0]} to {seen[-1]}" if seen else ""
    edges: list[Edge] = []
    for edge in graph.edges:
        found = versions.get(edge.dst, {}) if edge.kind in ("weights", "serves") else {}
        worker = edge.src.partition(".")[0]
        now = f"v{found[worker][-1]}" if found.get(worker) else ""
        edges.append(replace(edge, version=", ".join(filter(None, (now, lag))), lag=None) if now else edge)
    return replace(graph, edges=tuple(edges))


def nodes_of(graph: Graph, versions: Mapping[str, Mapping[str, Sequence[int]]]) -> list[dict[str, Any]]:
    """Each call of a graph: where it is written, how long it takes, what comes in and goes out, of which version."""
    return [
        {
            "id": node.id,
            "source": node.source or node.expression,
            "at": f"{node.file}:{node.line}" if node.file else "",
            "pool": node.pool or "",
            "mesh": node.mesh or "",
            "layout": node.layout or "",
            "seconds": node.seconds,
            "share": node.share,
            "read": sum(edge.bytes or 0 for edge in graph.edges if edge.dst == node.id),
            "made": sum(edge.bytes or 0 for edge in graph.edges if edge.src == node.id),
            "reads": list(node.reads),
            "adds": list(node.adds),
            "settings": {**node.settings, **({"loss": node.loss} if node.loss else {})},
            "versions": dict(versions.get(node.id, {})),
        }
        for node in graph.nodes
    ]


def newest_versions(path: Path, program: str) -> dict[str, dict[str, list[int]]]:
    """The versions of the weights that the newest calls of a program were started with, as the last lines say."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL))
            lines = file.read(TAIL).split(b"\n")[1 if size > TAIL else 0 : -1]
    except OSError:
        return {}
    found: dict[str, dict[str, list[int]]] = {}
    for raw in reversed(lines):
        if b'"versions"' not in raw:
            continue
        try:
            line = json.loads(raw)
            if line["program"] == program:
                found.setdefault(line["node"], line["versions"])
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
