"""The simulation as one page to explore: lanes of bars to zoom into, pools, lag, nodes. Nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from string import Template
from typing import Any

from ...graph.draw.strokes import text
from ..simulation import PoolTime, Simulation
from .figures import (
    Lane,
    Look,
    counted,
    duration,
    host_phases,
    lanes,
    looks,
    nodes_text,
    percent,
    printable,
    totals,
    volume,
)

_SCRIPTS = ("data.js", "draw.js", "act.js")  # one script in three files; the last begins
_DIGITS = 12  # of times on the page: enough for microseconds in months


def render(simulation: Simulation) -> str:
    """The page. Every name of a program, a plan or a file stands in it as text."""
    made = lanes(simulation)
    return Template(_file("page.html")).substitute(
        program=text(printable(simulation.program)),
        what="run" if simulation.real else "simulation",
        subtitle=text(printable(_subtitle(simulation))),
        style=_file("page.css"),
        script="\n".join(map(_file, _SCRIPTS)),
        tiles="\n".join(_tiles(simulation)),
        legend="\n".join(_legend(simulation)),
        pools="\n".join(_pool(lane.pool) for lane in made),
        lag="\n".join(_lag(simulation)),
        nodes=_nodes(simulation),
        edges=_edges(simulation) + _hosts(simulation),
        rests="\n".join(_rests(simulation)),
        record=_embedded(_record(simulation, made)),
    )


def _file(name: str) -> str:
    return files("flowrl.schedule.report").joinpath(name).read_text(encoding="utf-8")


# -- what stands in the page without its script ------------------------------------------------------------------------


def _subtitle(simulation: Simulation) -> str:
    clock = "as they ran" if simulation.real else "on the virtual clock"
    return f"{counted(simulation.steps, 'step')} {clock}, costs: {simulation.cost_source or 'not said'}"


def _tiles(simulation: Simulation) -> Iterator[str]:
    lag = "no versions" if simulation.real else "nothing trained"
    if simulation.lags:
        lag = f"{simulation.lag_mean:.3g} mean, {simulation.lag_max} max"
    tiles = (
        ("steady step", duration(simulation.step_seconds) if simulation.steps else "-", ""),
        ("makespan", duration(simulation.makespan), ""),
        ("steps", str(simulation.steps), ""),
        ("staleness", str(simulation.staleness), "How many steps the rollout may be ahead of the training"),
        ("lag", lag, "Publishes between the weights that sampled rows and those that trained on them"),
        ("costs", simulation.cost_source or "not said", "Where the seconds of a call come from"),
    )
    for name, value, tip in tiles:
        title = f' title="{text(tip)}"' if tip else ""
        yield f"<div{title}><dt>{name}</dt><dd>{text(printable(value))}</dd></div>"


def _legend(simulation: Simulation) -> Iterator[str]:
    for number, (node, look) in enumerate(looks(simulation).items()):
        sample = _sample(look)
        yield (
            f'<li><button type="button" data-node="{number}" aria-pressed="false">{sample}'
            f"<span>{text(printable(node))}</span></button></li>"
        )


def _sample(look: Look) -> str:
    if look.move:
        return f'<i class="sample move" style="border-color:{look.edge}"></i>'
    return f'<i class="sample" style="background:{look.fill};border-color:{look.edge}"></i>'


def _pool(pool: PoolTime) -> str:
    """A row of the table of pools: how much of the time it works, and what it waits for otherwise."""
    idle_share = max(0.0, 1 - pool.busy)
    idle = sorted(pool.idle.items(), key=lambda i: -i[1])
    whole = sum(seconds for _, seconds in idle) or 1.0
    parts = [f'<i class="busy" style="width:{100 * min(pool.busy, 1):.2f}%" title="busy {percent(pool.busy)}"></i>']
    reasons: list[str] = []
    for number, (reason, seconds) in enumerate(idle):
        share, kind = idle_share * seconds / whole, min(number, 3)
        said = text(printable(reason))
        tip = f"{said}: {duration(seconds)}, {percent(share)}"
        parts.append(f'<i class="idle{kind}" style="width:{100 * share:.2f}%" title="{tip}"></i>')
        reasons.append(f'<li><i class="idle{kind}"></i>{said} <b>{duration(seconds)}</b></li>')
    return (
        f'<tr><th scope="row">{text(printable(pool.name))}<small>{text(printable(pool.describes))}</small></th>'
        f'<td class="number">{percent(pool.busy)}</td><td><div class="share">{"".join(parts)}</div>'
        f'<ul class="reasons">{"".join(reasons) or "<li>never idle</li>"}</ul></td></tr>'
    )


def _lag(simulation: Simulation) -> Iterator[str]:
    """The histogram, a row for each lag up to the largest."""
    whole, most = sum(simulation.lags.values()), max(simulation.lags.values(), default=0)
    if not most:
        which = " that say which version sampled them" if simulation.real else ""
        said = f"No rows{which} were trained on."
        yield f'<p class="none">{said}</p>'
        return
    shown = range(min(simulation.lags), simulation.lag_max + 1) if simulation.lag_max < 50 else sorted(simulation.lags)
    head = '<th scope="col">lag</th><th></th><th scope="col" class="number">prompt groups</th>'
    yield f"<table><thead><tr>{head}</tr></thead><tbody>"
    for lag in shown:
        count = simulation.lags.get(lag, 0)
        bar = f'<i class="bar" style="width:{100 * count / most:.2f}%"></i>'
        groups = f"{count:,} <small>{percent(count / whole)}</small>"
        yield f'<tr><th scope="row">{lag}</th><td class="wide">{bar}</td><td class="number">{groups}</td></tr>'
    yield "</tbody></table>"


def _nodes(simulation: Simulation) -> str:
    colours = looks(simulation)
    numbers = {node: n for n, node in enumerate(colours)}

    def button(node: str) -> str:
        known = f'data-node="{numbers[node]}" aria-pressed="false"'
        return f'{_sample(colours[node])}<button type="button" {known}>{text(printable(node))}</button>'

    rows = [
        (
            button(t.node),
            text(printable(t.pool)),
            f"{t.count:,}",
            duration(t.mean),
            duration(t.seconds),
            percent(t.share),
        )
        for t in totals(simulation)
    ]
    return _table(("node", "pool", "calls", "mean", "total", "of the pool"), rows, numbers_from=2)


def _edges(simulation: Simulation) -> str:
    rows = [
        (
            text(printable(f"{e.get('src', '')} → {e.get('dst', '')}")),
            text(printable(str(e.get("transport") or "-"))),
            volume(float(e["bytes"])),
        )
        for e in simulation.edges
        if e.get("bytes")
    ]
    found = _table(("edge", "transport", "bytes of a step"), rows, numbers_from=2)
    return f"<section><h2>Bytes between nodes</h2>{found}</section>" if rows else ""


def _hosts(simulation: Simulation) -> str:
    """The memory of hosts: what each pool has there when it has most, and of how much."""
    rows = [
        (
            text(nodes_text(host["nodes"])),
            text(printable(pool)),
            text(printable(phase)),
            volume(size),
            volume(host["has"]) if host["has"] else "-",
            percent(size / host["has"]) if host["has"] else "-",
        )
        for host in simulation.hosts
        for pool, phase, size in host_phases(host)
    ]
    found = _table(("host memory of", "pool", "most in", "bytes", "host has", "of it"), rows, numbers_from=3)
    return f"<section><h2>Host memory</h2>{found}</section>" if rows else ""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], *, numbers_from: int) -> str:
    """A table; its cells are markup."""

    def cell(tag: str, number: int, said: str) -> str:
        look = ' class="number"' if number >= numbers_from else ""
        return f"<{tag}{look}>{said}</{tag}>"

    names = "".join(cell("th", n, name) for n, name in enumerate(head))
    body = "\n".join("<tr>" + "".join(cell("td", n, c) for n, c in enumerate(row)) + "</tr>" for row in rows)
    if not body:
        return '<p class="none">Nothing ran.</p>'
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _rests(simulation: Simulation) -> Iterator[str]:
    """What the times rest on: conditions that were assumed, and notes."""
    told = (
        ("Explained", simulation.explained.get("words", ())),
        ("Machines", simulation.machines.get("words", ())),
        ("Assumed", simulation.assumed),
    )
    for title, lines in (*told, ("Notes", simulation.notes)):
        if lines:
            items = "".join(f"<li>{text(printable(line))}</li>" for line in lines)
            yield f"<h3>{title}</h3><ul>{items}</ul>"


# -- what the script draws ---------------------------------------------------------------------------------------------


def _record(simulation: Simulation, made: Sequence[Lane]) -> dict[str, Any]:
    """Bars as columns, in the order of their starts; pools, nodes and what was waited for as numbers into lists."""
    colours, bars = looks(simulation), simulation.bars
    nodes = {node: n for n, node in enumerate(colours)}
    reasons = {reason: n for n, reason in enumerate(dict.fromkeys(b.because for b in bars))}
    places = {i: (n, row) for n, lane in enumerate(made) for row, items in enumerate(lane.rows) for i in items}
    order = sorted(range(len(bars)), key=lambda i: bars[i].start)
    return {
        "makespan": simulation.makespan,
        "pools": [_lane(lane) for lane in made],
        "nodes": [{"id": printable(n), **asdict(look)} for n, look in colours.items()],
        "reasons": [printable(reason) for reason in reasons],
        "bars": {
            "node": [nodes[bars[i].node] for i in order],
            "step": [bars[i].step for i in order],
            "lane": [places[i][0] for i in order],
            "row": [places[i][1] for i in order],
            "start": [_short(bars[i].start) for i in order],
            "end": [_short(bars[i].end) for i in order],
            "because": [reasons[bars[i].because] for i in order],
            "piece": [bars[i].chunk for i in order],
        },
    }


def _lane(lane: Lane) -> dict[str, Any]:
    pool = lane.pool
    return {
        "name": printable(pool.name),
        "describes": printable(pool.describes),
        "busy": pool.busy,
        "rows": len(lane.rows),
        "memory": [[_short(at), size] for at, size in pool.memory],
        "capacity": pool.capacity,
    }


def _short(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")


def _embedded(record: object) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or start another."""
    found = json.dumps(record, ensure_ascii=True, separators=(",", ":"))
    return found.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
