"""The simulation for a screen: a summary, tables of pools, nodes, edges and memory, what it rests on at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import floor, log10
from textwrap import wrap
from typing import Any

from ..simulation import PoolTime, Simulation
from .figures import counted, cut, duration, host_phases, nodes_text, percent, printable, room, totals, volume

WIDTH = 100
_NAME = 30  # columns of a name at most
_REASONS = 3  # of idling that are told
_LAST = 40  # columns that a last column of text has at least, where it can use them
_TIED = "\u00a0"  # a space at which no line is broken; it is printed as a plain one


def render(simulation: Simulation) -> str:
    """All of it in lines of at most 100 columns. Nothing in it needs colours."""
    parts = [
        _summary(simulation),
        _pools(simulation),
        _nodes(simulation),
        _edges(simulation),
        _memory(simulation),
        _hosts(simulation),
        _listed("explained", simulation.explained.get("words", ())),
        _listed("machines", simulation.machines.get("words", ())),
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
    said = [f"{cut(printable(name), _NAME)} {duration(seconds)}" for name, seconds in main[:_REASONS]]
    rest = sum(seconds for _, seconds in main[_REASONS:])
    found = [*said, *([f"others {duration(rest)}"] if rest else [])]
    return ", ".join(item.replace(" ", _TIED) for item in found) or "-"


def _nodes(simulation: Simulation) -> Iterator[str]:
    found = totals(simulation)
    factor, unit = _unit(max((t.seconds for t in found), default=0.0))
    means = _aligned([factor * t.mean for t in found])
    sums = _aligned([factor * t.seconds for t in found])
    rows = [
        (t.node, t.pool, str(t.count), mean, total, percent(t.share))
        for t, mean, total in zip(found, means, sums, strict=True)
    ]
    return _table(("node", "pool", "calls", f"mean {unit}", f"total {unit}", "of pool"), rows, right=(2, 3, 4, 5))


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


def _hosts(simulation: Simulation) -> Iterator[str]:
    rows: list[tuple[str, ...]] = []
    for host in simulation.hosts:
        has = host["has"]
        for pool, phase, size in host_phases(host):
            share = percent(size / has) if has else "-"
            rows.append((nodes_text(host["nodes"]), pool, phase, volume(size), volume(has) if has else "-", share))
    return _table(("host memory of", "pool", "most in", "bytes", "host has", "of it"), rows, right=(3, 4, 5))


def _listed(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield title
    for line in lines:
        yield from wrap(printable(line), WIDTH, initial_indent="  - ", subsequent_indent="    ")


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Iterable[int] = (), widest: int = _NAME
) -> Iterator[str]:
    """Aligned columns under their names; nothing where there are no rows. Names are cut until all fits.

    A last column of text has what is left, in as many lines as it needs.
    """
    if not rows:
        return
    last, to_right = len(head) - 1, set(right)
    cells = [list(head), *([printable(c).replace("\\xa0", _TIED) for c in row] for row in rows)]
    longest = [max(room(row[n]) for row in cells) for n in range(len(head))]
    widths = [w if n in to_right else min(w, _LAST if n == last else widest) for n, w in enumerate(longest)]
    while sum(widths) + 2 * last > WIDTH:
        widths[max((n for n in range(len(head)) if n not in to_right), key=lambda n: widths[n])] -= 1
    if last not in to_right:
        widths[last] = WIDTH - sum(widths[:-1]) - 2 * last
    for row in cells:
        start = [_pad(cut(c, widths[n]), widths[n], n in to_right) for n, c in enumerate(row) if n < last]
        ends = [row[last]] if last in to_right else wrap(row[last], widths[last], break_on_hyphens=False)
        for number, end in enumerate(ends or [""]):
            line = [" " * w for w in widths[:-1]] if number else start
            yield "  ".join([*line, _pad(end, widths[last], last in to_right)]).replace(_TIED, " ").rstrip()


def _pad(text: str, columns: int, right: bool) -> str:
    space = " " * (columns - room(text))
    return space + text if right else text + space


def _unit(most: float) -> tuple[float, str]:
    """What the seconds of a table are multiplied with, and the unit then."""
    return (1e6, "µs") if 0 < most < 1e-3 else (1e3, "ms") if 0 < most < 1 else (1.0, "s")


def _aligned(values: Sequence[float]) -> list[str]:
    """Numbers of one column with as many decimals each: three digits of the smallest where they are not many."""
    positive = [v for v in values if v > 0]
    if not positive:
        return ["0"] * len(values)
    decimals = 2 - floor(log10(min(positive)))
    decimals = max(0, min(decimals, 9, 9 - floor(log10(max(positive)))))
    return [f"{v:.{decimals}f}" for v in values]
