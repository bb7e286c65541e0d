"""For how much of its time a call or a publish keeps links busy, which others may want at the same time."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from . import communication as traffic
from .per_device_counts import rows_of_replica
from .roofline import Roofline
from .work import Work

_NAMES = ("link", "network")  # inside nodes, and between them


def link_parts(costs: Roofline, work: Work) -> dict[tuple[str, str], float]:
    """Return the part of its seconds in which a work keeps each link of a pool busy: ``{("train", "network"): 1}``.

    Of an engine none: its rows come and go, and what its ranks exchange stays inside a node as a rule.
    """
    if work.kind not in ("train", "forward", "publish") or work.role.model is None:
        return {}
    seconds = costs.seconds(work)
    if work.kind == "publish":
        ends = zip((work.source_pool, work.pool), _of_publish(costs, work), strict=True)
    else:
        ends = iter([(work.pool, _of_call(costs, work))])
    parts: dict[tuple[str, str], float] = {}
    for pool, both in ends:
        for name, busy in zip(_NAMES, both, strict=True):
            if busy > 0 and seconds > 0:
                parts[pool, name] = max(parts.get((pool, name), 0.0), min(1.0, busy / seconds))
    return parts


def _of_publish(costs: Roofline, work: Work) -> tuple[tuple[float, float], tuple[float, float]]:
    return traffic.publish_by_channel(work, costs.hardware(work), costs.received)


def _of_call(costs: Roofline, work: Work) -> tuple[float, float]:
    hardware, load = costs.hardware(work), work.load
    if work.kind == "forward":
        tokens = rows_of_replica(load, work.mesh, work.processes) * (load.prompt + load.response)
        return traffic.seconds_by_channel(work, hardware, tokens, passes=1, times=1)
    load = replace(load, rows=ceil(load.rows / work.minibatches))
    tokens = rows_of_replica(load, work.mesh, work.processes) * (load.prompt + load.response)
    passes, times = 3 if work.role.recomputes(work.backend) else 2, 2 if work.role.lora else 3
    inside, between = traffic.seconds_by_channel(work, hardware, tokens, passes, times)
    turns = work.minibatches * work.epochs
    return turns * inside, turns * between
