"""A generate whose replicas are on devices of several kinds: rows are dealt by speed, so that all end together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..cluster.cluster import Cluster
from ..cluster.mesh import Mesh
from .continuous_batch import Engine
from .work import Work

_HALVINGS = 24  # of seconds, until rows are dealt


def replicas_by_kind(work: Work, cluster: Cluster | None) -> list[Work]:
    """Return the replicas on each kind of devices as a generate of their own, with their even part of the rows.

    Only the work itself where its replicas have devices of one kind, or are no replicas. A replica with devices of
    several kinds counts as one of these kinds together: its slowest decides.
    """
    mesh = work.mesh
    if cluster is None or mesh["dp"] < 2 or mesh.data != mesh["dp"] or len(work.devices) < mesh.size:
        return [work]
    found: dict[tuple[str, ...], list[int]] = {}
    for ranks in mesh.groups(*(axis for axis in mesh.axes if axis != "dp")):
        devices = [work.devices[rank] for rank in ranks]
        found.setdefault(tuple(sorted({cluster.kind(d).name for d in devices})), []).extend(devices)
    if len(found) < 2:
        return [work]
    each = {axis: size for axis, size in mesh.axes.items() if axis != "dp"}
    size = mesh.size // mesh["dp"]
    parts: list[Work] = []
    for devices in found.values():
        lie = Mesh({"dp": len(devices) // size, **each})
        parts.append(replace(work, mesh=lie, devices=tuple(devices)))
    return parts


def deal_rows(parts: Sequence[Work], seconds: Callable[[Work], float]) -> list[Work]:
    """Return the replicas with rows of their own, in whole prompts, so that the last of them is through soonest.

    ``seconds`` of more rows are not less. Parts without any rows are left out.
    """
    load = parts[0].load
    group = max(1, load.group)
    prompts, known = -(-load.rows // group), dict[tuple[int, int], float]()

    def takes(part: int, count: int) -> float:
        if (part, count) not in known:
            known[part, count] = seconds(_with_prompts(parts[part], count)) if count else 0.0
        return known[part, count]

    def within(part: int, limit: float) -> int:
        """The most prompts that a part is through with by then."""
        low, high = 0, prompts
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if takes(part, middle) <= limit else (low, middle - 1)
        return low

    low, high = 0.0, min(takes(part, prompts) for part in range(len(parts)))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = sum(within(part, middle) for part in range(len(parts))) >= prompts
        low, high = (low, middle) if enough else (middle, high)
    counts = [within(part, high) for part in range(len(parts))]
    order = sorted(range(len(parts)), key=lambda part: -takes(part, counts[part]))
    for part in order:  # who ends last gives up what is too many
        counts[part] -= min(counts[part], max(0, sum(counts) - prompts))
    return [_with_prompts(parts[part], counts[part]) for part in range(len(parts)) if counts[part]]


def _with_prompts(work: Work, prompts: int) -> Work:
    return replace(work, load=replace(work.load, rows=min(prompts * work.load.group, work.load.rows)))


def together(engines: Sequence[Engine], rows: Sequence[int]) -> Engine:
    """Return the engines of parts with so many rows as one, which makes as many tokens at a time as they do."""
    parts = [count / sum(rows) for count in rows]

    def step(running: int) -> float:
        each = [(running * part, engine) for part, engine in zip(parts, engines, strict=True)]
        return running / sum(count / engine.step(max(1, -int(-count // 1))) for count, engine in each)

    def beside(running: int) -> float:
        hidden = [e.beside(round(running * part)) if e.beside else 0.0 for e, part in zip(engines, parts, strict=True)]
        return sum(part * one for part, one in zip(parts, hidden, strict=True))

    prefills = [engine.prefill for engine in engines]
    return Engine(
        sum(engine.slots for engine in engines),
        step,
        1 / sum(1 / prefill for prefill in prefills) if all(prefills) else 0.0,
        max(engine.prompt for engine in engines),
        beside=beside if any(engine.beside for engine in engines) else None,
    )
