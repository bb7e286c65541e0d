"""What a plan says of pools, calls and edges, in the words of the drawings."""

from __future__ import annotations

from collections.abc import Sequence

from ..record import Edge, Graph, Node, PoolInfo, WorkerInfo

#: What needs no word at an edge: nothing leaves the pool.
INSIDE = ("same pool", "same process")

_ROWS, _WIDTH = 2, 40  # lines of a layout in a box, and their length


def bytes_text(size: float) -> str:
    """``1.2 GB``, of 1e9 bytes."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            return f"{size:.0f} {unit}" if size >= 99.5 or unit == "B" else f"{size:.2g} {unit}"
        size /= 1000
    raise AssertionError("there is a last unit")


def seconds_text(seconds: float) -> str:
    """``6.2 s``, ``350 ms``; minutes where there are two or more: ``3.5 min``."""
    for size, unit in ((60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= size * (2 if unit == "min" else 0.9995):
            scaled = seconds / size
            return f"{scaled:.0f} {unit}" if scaled >= 99.5 else f"{scaled:.2g} {unit}"
    return "0 s" if seconds < 1e-9 else f"{seconds * 1e6:.2g} µs"


def part_text(part: float) -> str:
    """``61 %``; a part that is not nothing is never called 0."""
    return "< 1 %" if 0 < part < 0.005 else f"{part:.0%}".replace("%", " %")


def pools_of(graph: Graph) -> tuple[PoolInfo, ...]:
    """The pools of the graph, those among them that only a call or a worker names."""
    known = {pool.name for pool in graph.pools}
    named = [thing.pool for thing in (*graph.nodes, *graph.workers) if thing.pool and thing.pool not in known]
    return (*graph.pools, *(PoolInfo(name) for name in dict.fromkeys(named)))


def pool_text(pool: PoolInfo) -> str:
    """Return what a pool has: ``devices 0-7 · 8 × h100-80``, or what its record says of it."""
    if pool.describes and not pool.devices:
        return pool.describes
    many = f"{pool.count} × {pool.kind}" if pool.count and pool.kind else pool.kind
    return " · ".join(word for word in (f"devices {pool.devices}" if pool.devices else "", many) if word)


def busy_text(pool: PoolInfo) -> str:
    """How much of the time a pool works: ``83 % busy``; empty where that is not known."""
    return "" if pool.busy is None else f"{part_text(pool.busy)} busy"


def place_rows(thing: Node | WorkerInfo) -> tuple[str, ...]:
    """Mesh and layout, for a box. A mesh of one device is not worth a word, nor are those that moving weights take."""
    if isinstance(thing, Node) and thing.kind != "op":
        return ()
    mesh = f"mesh {spaced(thing.mesh)}" if thing.mesh and thing.mesh != "1" else ""
    parts = [part.strip() for part in (thing.layout or "").replace(";", ",").split(",")]
    return tuple(row for row in (mesh, *packed([*filter(None, parts)], lines=_ROWS, width=_WIDTH)) if row)


def spaced(mesh: str) -> str:
    """``fsdp=4, tp=2``."""
    return ", ".join(part.strip() for part in mesh.split(","))


def time_text(node: Node) -> str:
    """The time of a call and its share: ``6.2 s · 61 %``; empty where there was no run."""
    if node.seconds is None:
        return ""
    return seconds_text(node.seconds) + ("" if node.share is None else f" · {part_text(node.share)}")


def place_lines(node: Node) -> tuple[str, ...]:
    """Return the place and the time of a call in full, for a tooltip or a card."""
    where = [f"pool {node.pool}" if node.pool else "", f"mesh {spaced(node.mesh)}" if node.mesh else ""]
    time = "" if node.seconds is None else f"{seconds_text(node.seconds)} per call"
    part = "" if node.share is None else f"{part_text(node.share)} of the time of its pool"
    rows = (_joined(where), node.layout or "", _joined([time, part]))
    return tuple(row for row in rows if row)


def tells_bytes(edge: Edge) -> bool:
    """Whether bytes are known, and more than none; a publish that moves nothing, as in one process, says so."""
    return bool(edge.bytes) or (edge.bytes is not None and edge.kind == "weights" and not edge.version)


def bytes_row(edge: Edge) -> str:
    """Return what goes over an edge in a step, and how where it leaves the pool: ``1.2 GB · network``."""
    if edge.bytes is None or not tells_bytes(edge):
        return ""
    return bytes_text(edge.bytes) + (f" · {edge.transport}" if edge.transport and edge.transport not in INSIDE else "")


def edge_lines(edge: Edge) -> tuple[str, ...]:
    """Bytes, transport and version in full, for a tooltip or a card."""
    size = "" if edge.bytes is None else f"{bytes_text(edge.bytes)} in a step"
    rows = (_joined([size, edge.transport or ""]), f"reads {edge.version}" if edge.version else "")
    return tuple(row for row in rows if row)


def version_text(edge: Edge) -> str:
    """Which version step k reads, and how old it may be: ``v(k-1), lag ≤ 1``. Other words stand for themselves."""
    version = edge.version or ""
    return _joined([version, f"lag ≤ {edge.lag}" if edge.lag and version.startswith("v(") else ""])


def packed(names: Sequence[str], *, lines: int, width: int) -> tuple[str, ...]:
    """Names on at most that many lines; the last ends in the number that did not fit, ``tokens +3``."""
    rows: list[str] = []
    for number, name in enumerate(names):
        if rows and len(rows[-1]) + 2 + len(name) <= width:
            rows[-1] += f", {name}"
        elif len(rows) < lines:
            rows.append(name)
        else:
            rows[-1] += f" +{len(names) - number}"
            break
    return tuple(rows)


def _joined(words: Sequence[str]) -> str:
    return ", ".join(word for word in words if word)
