"""The simulation for a screen: a summary, tables of pools, nodes, edges and memory, what it rests on at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import floor, log10
from textwrap import wrap
from typing import Any

from ..simulation import PoolTime, Simulation
from .figures import counted, cut, duration, percent, printable, room, totals, volume

WIDTH = 100
_NAME = 30  # columns of a name at most
_REASONS = 3  # of idling that are told


def render(simulation: Simulation) -> str:
    """All of it in lines of at most 100 columns. Nothing in it needs colours."""
    parts = [
        _summary(simulation),
        _pools(simulation),
        _nodes(simulation),
        _edges(simulation),
        _memory(simulation),
        _listed("assumed", simulation.assumed),
        _listed("notes", simulation.notes),
    ]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part))) + "\n"


def _summary(simulation: Simulation) -> Iterator[str]:
    what = f"{counted(simulation.steps, 'step')} in {duration(simulation.makespan)}"
    steady = f", a steady step takes {duration(simulation.step_seconds)}" if simulation.steps else ""
    yield cut(f"{printable(simulation.program)}: {what}{steady}", WIDTH)
    yield cut(f"  costs      {printable(simulation.cost_source) or 'not said'}", WIDTH)
    yield f"  staleness  {simulation.staleness}"
    yield cut(f"  lag        {_lag(simulation)}", WIDTH)


def _lag(simulation: Simulation) -> str:
    if not simulation.lags:
        return "no rows were trained on"
    shown = ", ".join(f"{lag}: {count}" for lag, count in sorted(simulation.lags.items()))
    return f"mean {simulation.lag_mean:.3g}, max {simulation.lag_max}; prompt groups by lag {shown}"


def _pools(simulation: Simulation) -> Iterator[str]:
    rows = [
        (p.name, p.describes or "-", percent(p.busy), percent(max(0.0, 1 - p.busy)), _reasons(p))
        for p in simulation.pools
    ]
    return _table(("pool", "has", "busy", "idle", "waited for"), rows, right=(2, 3))


def _reasons(pool: PoolTime) -> str:
    """What a pool waited for longest, with seconds, and how much there is besides."""
    main = sorted(pool.idle.items(), key=lambda i: -i[1])
    said = [f"{printable(name)} {duration(seconds)}" for name, seconds in main[:_REASONS]]
    rest = sum(seconds for _, seconds in main[_REASONS:])
    return ", ".join([*said, *([f"others {duration(rest)}"] if rest else [])]) or "-"


def _nodes(simulation: Simulation) -> Iterator[str]:
    found = totals(simulation)
    means, sums = _aligned([t.mean for t in found]), _aligned([t.seconds for t in found])
    rows = [
        (t.node, t.pool, str(t.count), mean, total, percent(t.share))
        for t, mean, total in zip(found, means, sums, strict=True)
    ]
    return _table(("node", "pool", "calls", "mean s", "total s", "of pool"), rows, right=(2, 3, 4, 5))


def _edges(simulation: Simulation) -> Iterator[str]:
    rows = [
        (f"{_word(e, 'src')} -> {_word(e, 'dst')}", volume(float(e["bytes"])), _word(e, "transport") or "-")
        for e in simulation.edges
        if e.get("bytes")
    ]
    return _table(("edge", "bytes of a step", "transport"), rows, right=(1,), widest=60)


def _word(edge: Mapping[str, Any], key: str) -> str:
    return str(edge.get(key) or "")


def _memory(simulation: Simulation) -> Iterator[str]:
    rows: list[tuple[str, ...]] = []
    for pool in simulation.pools:
        if not pool.memory:
            continue
        at, peak = max(pool.memory, key=lambda m: m[1])
        has = volume(pool.capacity) if pool.capacity else "-"
        share = percent(peak / pool.capacity) if pool.capacity else "-"
        rows.append((pool.name, volume(peak), has, share, duration(at)))
    return _table(("memory of", "peak", "device has", "of it", "first at"), rows, right=(1, 2, 3, 4))


def _listed(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield title
    for line in lines:
        yield from wrap(printable(line), WIDTH, initial_indent="  - ", subsequent_indent="    ")


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Iterable[int] = (), widest: int = _NAME
) -> Iterator[str]:
    """Aligned columns under their names; nothing where there are no rows. The last column takes what is left."""
    if not rows:
        return
    last, to_right = len(head) - 1, set(right)
    cells = [[printable(c) if n == last else cut(printable(c), widest) for n, c in enumerate(row)] for row in rows]
    widths = [max(room(row[n]) for row in (list(head), *cells)) for n in range(len(head))]
    left = max(8, WIDTH - sum(widths[:-1]) - 2 * last)
    for row in (list(head), *cells):
        line = [_pad(c, widths[n], n in to_right) for n, c in enumerate(row) if n < last]
        end = _pad(row[last], widths[last], True) if last in to_right else cut(row[last], left)
        yield "  ".join([*line, end]).rstrip()


def _pad(text: str, columns: int, right: bool) -> str:
    space = " " * (columns - room(text))
    return space + text if right else text + space


def _aligned(values: Sequence[float]) -> list[str]:
    """Numbers of one column with as many decimals each: three digits of the smallest where they are not many."""
    positive = [v for v in values if v > 0]
    if not positive:
        return ["0"] * len(values)
    decimals = 2 - floor(log10(min(positive)))
    decimals = max(0, min(decimals, 9, 9 - floor(log10(max(positive)))))
    return [f"{v:.{decimals}f}" for v in values]
