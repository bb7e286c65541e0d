"""What every format shows of a simulation beyond its record: lanes, totals of nodes, colours, words for quantities."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...graph.draw.palette import HUES, NEUTRAL, PAPER, Hue
from ..simulation import Bar, PoolTime, Simulation, by_call, covered

#: What moves weights instead of working on rows.
MOVES = ("publish", "offload", "onload")

_ROUNDING = 1e-9  # of the makespan


@dataclass(frozen=True)
class Lane:
    """The bars of a pool in rows: ``Lane(PoolTime("rollout"), rows=((0, 2, 5), (1, 4)))`` with places in the bars.

    Bars of one row do not overlap. Requests that run side by side (a rollout pool with steps in flight) take several.
    """

    pool: PoolTime
    rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Total:
    """A node over the run: ``Total("actor.generate", "rollout", count=20, mean=6.0, seconds=120.0, share=0.89)``.

    ``count`` is of calls; ``mean`` the seconds of one, in which at least one of its chunks runs. ``seconds`` are those
    in which at least one call runs, and ``share`` their part of the makespan: what overlaps is not counted twice.
    """

    node: str
    pool: str
    count: int
    mean: float
    seconds: float
    share: float


@dataclass(frozen=True)
class Look:
    """How bars of a node are painted: ``Look("#7fb0e0", "#1f2328", "#7fb0e0")``; ``move``: it carries weights."""

    fill: str
    ink: str
    edge: str
    move: bool = False


def lanes(simulation: Simulation) -> tuple[Lane, ...]:
    """A lane for each pool, in the order of the plan; pools that only bars name come last."""
    pools = {p.name: p for p in simulation.pools}
    rows: dict[str, list[list[int]]] = {name: [] for name in pools}
    ends: dict[str, list[float]] = defaultdict(list)
    slack = simulation.makespan * _ROUNDING
    order = sorted(range(len(simulation.bars)), key=lambda i: (simulation.bars[i].start, simulation.bars[i].end))
    for i in order:
        bar = simulation.bars[i]
        free = ends[bar.pool]
        row = next((r for r, end in enumerate(free) if end <= bar.start + slack), len(free))
        if row == len(free):
            free.append(bar.end)
            rows.setdefault(bar.pool, []).append([])
        free[row] = max(free[row], bar.end)
        rows[bar.pool][row].append(i)
    return tuple(Lane(pools.get(n) or PoolTime(n), tuple(map(tuple, r))) for n, r in rows.items())


def totals(simulation: Simulation) -> tuple[Total, ...]:
    """Seconds of each node in each pool, in the order of the pools, the longest first."""
    bars: dict[tuple[str, str], list[Bar]] = defaultdict(list)
    for bar in simulation.bars:
        bars[bar.pool, bar.node].append(bar)
    found: list[Total] = []
    for (pool, node), mine in bars.items():
        calls, seconds, whole = by_call(mine), covered(mine), simulation.makespan
        mean = sum(map(covered, calls)) / len(calls)
        found.append(Total(node, pool, len(calls), mean, seconds, seconds / whole if whole else 0.0))
    order = {lane.pool.name: n for n, lane in enumerate(lanes(simulation))}
    return tuple(sorted(found, key=lambda t: (order[t.pool], -t.seconds, t.node)))


def first_use(simulation: Simulation) -> dict[str, None]:
    """The nodes in the order of their first bars."""
    return dict.fromkeys(bar.node for bar in simulation.bars)


def worker_of(node: str) -> str:
    """``actor`` of ``actor.generate``."""
    return node.partition(".")[0]


def title_of(node: str) -> str:
    """``actor.generate`` of ``actor.generate#2``, the second call of that name in a program."""
    return node.partition("#")[0]


def is_move(node: str) -> bool:
    """Whether a node is a publish, an offload or an onload."""
    return node.rpartition(".")[2] in MOVES


def looks(simulation: Simulation) -> dict[str, Look]:
    """The colours of all nodes: the hue of the worker as in the graph, a shade per op; moves are hollow."""
    nodes = first_use(simulation)
    workers = list(dict.fromkeys((*simulation.workers, *map(worker_of, nodes))))
    found: dict[str, Look] = {}
    for number, worker in enumerate(workers):
        hue = HUES[number % len(HUES)] if worker else NEUTRAL
        ops = [n for n in nodes if worker_of(n) == worker and not is_move(n)]
        found |= {node: _shade(hue, 0.75 * n / max(len(ops) - 1, 1)) for n, node in enumerate(ops)}
        moves = (n for n in nodes if worker_of(n) == worker and is_move(n))
        found |= {node: Look(hue.edge, hue.ink, hue.edge, move=True) for node in moves}
    return {node: found[node] for node in nodes}


def _shade(hue: Hue, deep: float) -> Look:
    """Between the outline of the hue (0) and its ink (1), with letters that can be read on it."""
    light, dark = _parts(hue.edge), _parts(hue.ink)
    fill = tuple(round(a + (b - a) * deep) for a, b in zip(light, dark, strict=True))
    ink = PAPER if _luminance(fill) < 0.24 else "#10151b"
    return Look("#" + "".join(f"{c:02x}" for c in fill), ink, hue.edge)


def _parts(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def _luminance(colour: Sequence[int]) -> float:
    """Relative luminance of a colour (WCAG 2.2, section 3)."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# -- words ------------------------------------------------------------------------------------------------------------


def duration(seconds: float, *, most: float = 999.5) -> str:
    """Seconds as they are read: ``350 ms``, ``6.5 s``, ``16 min 40 s``, ``2 h 46 min``, ``11 d 13 h``.

    From ``most`` seconds on they are minutes.
    """
    if seconds < 0:
        return f"-{duration(-seconds, most=most)}"
    for limit, factor, unit in ((0.9995e-6, 1e9, "ns"), (0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (most, 1, "s")):
        if 0 < seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    for step, big, small in ((1, "min", "s"), (60, "h", "min"), (3600, "d", "h")):
        per = 24 if big == "d" else 60
        count = round(seconds / step)
        if count < per * (120 if big == "min" else 48 if big == "h" else float("inf")):
            return f"{count // per} {big} {count % per} {small}" if count else "0 s"
    raise AssertionError("the last unit has no end")


def volume(count: float) -> str:
    """Bytes as they are read: ``812 B``, ``1.52 GB`` of 1e9."""
    for limit, factor, unit in ((999.5, 1, "B"), (999.5e3, 1e3, "kB"), (999.5e6, 1e6, "MB"), (999.5e9, 1e9, "GB")):
        if abs(count) < limit:
            return f"{count / factor:.3g} {unit}"
    return f"{count / 1e12:.4g} TB"


def percent(fraction: float) -> str:
    """``62.0 %``."""
    return f"{100 * fraction:.1f} %"


def counted(count: int, word: str) -> str:
    """``1 step``, ``20 steps``."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """Without line breaks and control characters, which would break a line of a table; they stand as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def room(text: str) -> int:
    """Columns that a text takes on a screen."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, columns: int) -> str:
    """The text in at most so many columns; what is cut shows as an ellipsis."""
    if room(text) <= columns:
        return text
    kept = ""
    for char in text:
        if room(kept + char) > columns - 1:
            break
        kept += char
    return kept + "…"


def host_phases(host: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield the pools of a host's record, each with the phase in which it has most there, and how many bytes."""
    for pool, phases in host["pools"].items():
        phase = max(phases, key=lambda name: phases[name])
        yield pool, phase, phases[phase]


def nodes_text(nodes: Sequence[int]) -> str:
    """Return ``node 3``, or ``nodes 0-7, each``."""
    if len(nodes) == 1:
        return f"node {nodes[0]}"
    row = nodes[-1] - nodes[0] + 1 == len(nodes)
    return f"nodes {f'{nodes[0]}-{nodes[-1]}' if row else ', '.join(map(str, nodes))}, each"
