"""A plan for people: who sits where as a table, and as a picture with devices as cells and roles as letters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...errors import UsageError, near
from .plan import Place, Plan, Pool
from .rules import USES, numbers

FORMATS = ("text", "json", "svg")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Seat:
    """A worker at its place: ``Seat("actor", "generate", Place("rollout"), Pool(...), letter="B", hue=0)``.

    ``use`` is empty for a worker that does everything in one place. ``hue`` numbers its colour, that of the worker in
    the drawings of the graph.
    """

    worker: str
    use: str
    place: Place
    pool: Pool
    letter: str
    hue: int

    @property
    def title(self) -> str:
        """``actor.generate``, or ``actor`` where there is one place."""
        return f"{self.worker}.{self.use}" if self.use else self.worker


@dataclass(frozen=True)
class Row:
    """Nodes that look alike, or a pool without devices: ``Row("nodes 0-63", "h100-80", devices=range(8), ...)``.

    ``cells`` has the seats on each device of the first of them; ``devices`` are the numbers of all.
    """

    label: str
    kind: str
    devices: tuple[int, ...]
    cells: tuple[tuple[Seat, ...], ...]
    alike: int = field(default=1)


def render(plan: Plan, format: str = "text", kinds: Mapping[str, str] | None = None, *, colour: bool = False) -> str:
    """Return the plan in one of :data:`FORMATS`: the text is table and picture. ``kinds``: see :func:`table`.

    Raises UsageError for another format.
    """
    if format == "json":
        return json.dumps(plan.to_json(), indent=2, ensure_ascii=False) + "\n"
    if format == "svg":
        from .show_svg import svg

        return svg(plan, kinds)
    if format != "text":
        meant = near(format, FORMATS)
        raise UsageError(
            f"there is no plan format '{format}'.",
            have=FORMATS,
            fix=f"Use --format {meant or 'text'}.",
        )
    return f"{table(plan, kinds)}\n{picture(plan, kinds, colour=colour)}"


def seats(plan: Plan, workers: Iterable[str] = ()) -> tuple[Seat, ...]:
    """Return every worker at each of its places: ``workers`` in their order, then those that the plan alone names.

    Where there are none at all, it is ``everybody`` in the first pool.
    """
    names = list(dict.fromkeys((*workers, *plan.place))) or ["everybody"]
    found: list[Seat] = []
    for hue, worker in enumerate(names):
        by_use = plan.place.get(worker) or {"train": plan.place_of(worker)}
        for use in (u for u in USES if u in by_use):
            n = len(found)
            letter = _LETTERS[n % len(_LETTERS)] + (str(n // len(_LETTERS)) if n >= len(_LETTERS) else "")
            place, alone = by_use[use], list(by_use) == ["train"]
            found.append(Seat(worker, "" if alone else use, place, plan.pools[place.pool], letter, hue))
    return tuple(found)


def rows(plan: Plan, taken: Iterable[Seat]) -> tuple[Row, ...]:
    """Nodes from first to last, those next to each other that look alike as one row; then pools without devices."""
    listed = tuple(taken)
    by_pool = {name: tuple(s for s in listed if s.pool.name == name) for name in plan.pools}
    on = {d: by_pool[p.name] for p in plan.pools.values() for d in p.devices}
    found: list[tuple[list[int], Row]] = []
    for node in range(plan.cluster.nodes if plan.cluster else 0):
        assert plan.cluster is not None
        devices = tuple(plan.cluster.devices_of(node))
        kind, cells = plan.cluster.kind(devices[0]).name, tuple(on.get(d, ()) for d in devices)
        last = found[-1] if found else None
        if last is not None and (last[1].kind, last[1].cells) == (kind, cells):
            last[0].append(node)
        else:
            found.append(([node], Row("", kind, devices, cells)))
    made: list[Row] = []
    for nodes, row in found:
        all_of = tuple(range(row.devices[0], row.devices[0] + len(row.devices) * len(nodes)))
        label = f"node{'s' if len(nodes) > 1 else ''} {numbers(nodes)}{' alike' if len(nodes) > 1 else ''}"
        made.append(Row(label, row.kind, all_of, row.cells, len(nodes)))
    for name, pool in plan.pools.items():
        if not pool.devices:
            made.append(Row(name, _without_devices(pool), (), (by_pool[name],)))
    return tuple(made)


def table(plan: Plan, kinds: Mapping[str, str] | None = None) -> str:
    """Return who sits where, a line per worker and use.

    ``kinds``: what each worker of the flow is (``{"actor": "CausalLM"}``), shown beside its name; workers that the
    plan does not place are then listed too.
    """
    head = ("worker", *(("kind",) if kinds else ()), "use", "pool", "devices", "mesh", "backend", "nodes")
    lines: list[tuple[str, ...]] = [head]
    for seat in seats(plan, kinds or ()):
        kind = (kinds.get(seat.worker, "") or "-",) if kinds else ()
        mesh = " ".join(f"{a}={n}" for a, n in seat.place.mesh.said.items()) or "-"
        backend = "-" if seat.pool.processes else seat.place.backend
        what = _devices(plan, seat.pool), mesh, backend, _nodes(plan, seat.pool)
        lines.append((seat.worker, *kind, seat.use or "all", seat.pool.name, *what))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = ["  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*([_cluster(plan)] if plan.cluster else []), *body, pipeline(plan)]) + "\n"


def picture(plan: Plan, kinds: Mapping[str, str] | None = None, *, colour: bool = False) -> str:
    """Nodes as rows, devices as cells, roles as letters, with a legend; ``colour``: for a terminal that has it."""
    taken = seats(plan, kinds or ())
    drawn = rows(plan, taken)
    per_line = 16
    cell = max((sum(len(s.letter) for s in c) for row in drawn for c in row.cells), default=1)
    cell = max(cell, 1, *(len(str(r.devices[-1])) for r in drawn if r.devices and r.alike == 1))
    margin = max((len(f"{r.label}  {r.kind}") for r in drawn), default=0) + 2
    lines: list[str] = []
    for row in drawn:
        for start in range(0, len(row.cells), per_line):
            part = row.cells[start : start + per_line]
            if row.devices and row.alike == 1:
                above = "  ".join(f"{d:<{cell}}" for d in row.devices[start : start + per_line])
                lines.append((" " * margin + above).rstrip())
            left = f"{row.label}  {row.kind}" if not start else ""
            lines.append((f"{left:<{margin}}" + "  ".join(_cell(c, cell, colour) for c in part)).rstrip())
    lines.append("")
    lines += [f"{_painted(s, s.letter, colour)}  {s.title}" for s in taken]
    if any(not c for row in drawn for c in row.cells):
        lines.append("·  nobody")
    return "\n".join(lines) + "\n"


def pipeline(plan: Plan) -> str:
    """Return ``pipeline: staleness 1, order fifo, publish drain, chunks 4``."""
    return "pipeline: " + ", ".join(f"{k} {v}" for k, v in plan.pipeline.to_json().items())


def _cluster(plan: Plan) -> str:
    assert plan.cluster is not None
    size, nodes = plan.cluster.size, plan.cluster.nodes
    return f"cluster: {plan.cluster}, {size} device{_s(size)} in {nodes} node{_s(nodes)}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _without_devices(pool: Pool) -> str:
    if not pool.processes:
        return pool.device
    return f"{pool.processes} process{'es' if pool.processes > 1 else ''}{_least(pool)}"


def _least(pool: Pool) -> str:
    return f", at least {pool.least}" if pool.least else ""


def _devices(plan: Plan, pool: Pool) -> str:
    if not pool.devices or plan.cluster is None:
        return _without_devices(pool)
    kinds = dict.fromkeys(plan.cluster.kind(d).name for d in pool.devices)
    return f"{numbers(pool.devices)} {'+'.join(kinds)}{_least(pool)}"


def _nodes(plan: Plan, pool: Pool) -> str:
    if not pool.devices or plan.cluster is None:
        return "-"
    return numbers(sorted({plan.cluster.node(d) for d in pool.devices}))


def _cell(cell: tuple[Seat, ...], width: int, colour: bool) -> str:
    letters = "".join(s.letter for s in cell) or "·"
    painted = "".join(_painted(s, s.letter, colour) for s in cell) or "·"
    return painted + " " * (width - len(letters))


def _painted(seat: Seat, text: str, colour: bool) -> str:
    """The text on the worker's colour, black so that it is read on dark and light screens."""
    if not colour:
        return text
    from ...graph.draw.palette import HUES

    edge = HUES[seat.hue % len(HUES)].edge
    red, green, blue = (int(edge[i : i + 2], 16) for i in (1, 3, 5))
    return f"\x1b[30;48;2;{red};{green};{blue}m{text}\x1b[0m"
