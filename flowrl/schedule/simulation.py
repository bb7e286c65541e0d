"""What a simulated program did: spans on pools, who waited for what, how stale rows were, and what that rests on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from .virtual_clock import Span

_LEAST = 1e-9  # seconds; below, a gap is rounding


@dataclass(frozen=True)
class Bar:
    """Something that kept a pool busy: ``Bar("actor.generate", 3, "rollout", 12.0, 18.0, "actor.publish")``.

    ``node`` is its id in the graph; ``because`` names what it had waited for, ``chunk`` counts from 0. ``call`` is the
    same number for all chunks of a call, which may run side by side; -1 for a publish, an offload or an onload.
    """

    node: str
    step: int
    pool: str
    start: float
    end: float
    because: str = ""
    chunk: int = 0
    call: int = -1


@dataclass(frozen=True)
class PoolTime:
    """A pool over the whole run: ``PoolTime("train", "devices 0-7", busy=0.62, idle={"actor.generate": 12.5})``.

    ``busy`` is a fraction of the makespan; ``idle`` the seconds without work, by what the pool waited for; ``memory``
    (seconds, bytes on each device) where residents take turns; ``capacity`` the bytes of a device, where known.
    """

    name: str
    describes: str = ""
    busy: float = 0.0
    idle: Mapping[str, float] = field(default_factory=dict[str, float])
    memory: tuple[tuple[float, float], ...] = ()
    capacity: float = 0.0


@dataclass(frozen=True)
class Simulation:
    """A program on the virtual clock. ``step_seconds`` is the steady step: between commits in the second half.

    ``lags``: prompt groups by publishes between sampling and training. ``assumed``: conditions on values that only a
    run knows, as they were taken. ``notes``: what else the times rest on.
    """

    program: str
    steps: int
    makespan: float
    step_seconds: float
    bars: tuple[Bar, ...]
    pools: tuple[PoolTime, ...]
    lags: Mapping[int, int]
    cost_source: str
    staleness: int = 0
    events: int = 0
    edges: tuple[Mapping[str, Any], ...] = ()  # {"src", "dst", "bytes", "transport"} per step
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    real: bool = False  # measured in a run, not flown on the virtual clock
    workers: tuple[str, ...] = ()  # in the order of the program, for their colours
    explained: Mapping[str, Any] = field(default_factory=dict[str, Any])  # {"path", "changes", "uncertain", "words"}
    machines: Mapping[str, Any] = field(default_factory=dict[str, Any])  # {"device_hours", "price", "lost", "words"..}
    hosts: tuple[Mapping[str, Any], ...] = ()  # {"nodes", "device", "has", "need", "pools": {pool: {phase: bytes}}}

    @property
    def lag_max(self) -> int:
        return max(self.lags, default=0)

    @property
    def lag_mean(self) -> float:
        """Over prompt groups."""
        count = sum(self.lags.values())
        return sum(lag * n for lag, n in self.lags.items()) / count if count else 0.0

    def to_json(self) -> dict[str, Any]:
        """The documented record (docs/simulator.md)."""
        return {
            "program": self.program,
            "steps": self.steps,
            "makespan_s": self.makespan,
            "step_s": self.step_seconds,
            "pools": {
                p.name: {
                    "busy": p.busy,
                    "idle": dict(p.idle),
                    "devices": p.describes,
                    "memory": [list(m) for m in p.memory],
                }
                for p in self.pools
            },
            "spans": [
                {
                    "node": b.node,
                    "step": b.step,
                    "pool": b.pool,
                    "start_s": b.start,
                    "end_s": b.end,
                    "piece": b.chunk,
                    "because": b.because,
                }
                for b in self.bars
            ],
            "lag": {"max": self.lag_max, "mean": self.lag_mean, "histogram": {str(k): v for k, v in self.lags.items()}},
            "edges": [dict(e) for e in self.edges],
            "staleness": self.staleness,
            "cost_source": self.cost_source,
            "assumed": list(self.assumed),
            "notes": list(self.notes),
            **({"explained": dict(self.explained)} if self.explained else {}),
            **({"machines": dict(self.machines)} if self.machines else {}),
            **({"hosts": [dict(host) for host in self.hosts]} if self.hosts else {}),
        }


def bars_of(spans: Iterable[Span], nodes: Mapping[int, str]) -> tuple[Bar, ...]:
    """A bar for each pool of each span, in the order of their starts. ``nodes``: ids of the graph by call."""
    bars = [
        Bar(nodes.get(s.id, s.title), s.step, pool, s.start, s.end, s.because, s.chunk, s.id)
        for s in spans
        for pool in s.pools
    ]
    return tuple(sorted(bars, key=lambda b: (b.start, b.end)))


def covered(bars: Iterable[Bar]) -> float:
    """Seconds in which at least one of the bars runs: those that overlap are not counted twice."""
    seconds, at = 0.0, float("-inf")
    for bar in sorted(bars, key=lambda b: b.start):
        seconds += max(0.0, bar.end - max(bar.start, at))
        at = max(at, bar.end)
    return seconds


def by_call(bars: Iterable[Bar]) -> list[list[Bar]]:
    """Bars of each call together; a bar without a call is on its own."""
    found: dict[tuple[int, int], list[Bar]] = {}
    for number, bar in enumerate(bars):
        found.setdefault((bar.call, -1 if bar.call >= 0 else number), []).append(bar)
    return list(found.values())


def pool_times(pools: Mapping[str, str], bars: Sequence[Bar], makespan: float) -> tuple[PoolTime, ...]:
    """Busy and idle time of each pool. A gap is put down to what the bar behind it had waited for."""
    mine: dict[str, list[Bar]] = defaultdict(list)
    for bar in bars:
        mine[bar.pool].append(bar)
    found: list[PoolTime] = []
    for name, describes in pools.items():
        busy, at = 0.0, 0.0
        idle: dict[str, float] = defaultdict(float)
        for bar in mine[name]:
            if bar.start > at + _LEAST:
                idle[bar.because or "the start"] += bar.start - at
            if bar.end > at:
                busy += bar.end - max(bar.start, at)
                at = bar.end
        if makespan > at + _LEAST:
            idle["the end"] += makespan - at
        longest = dict(sorted(idle.items(), key=lambda i: -i[1]))
        found.append(PoolTime(name, describes, busy / makespan if makespan else 0.0, longest))
    return tuple(found)


def steady_window(count: int, staleness: int) -> tuple[int, int]:
    """Return the steps between whose ends a steady step is measured, of at least two."""
    first = max(min(count // 2, count - 1) - 1, 0)
    last = max(count - 1 - (staleness if count > 3 else 0), first + 1)
    if last - first > staleness:  # steps that are open together may end together: of such rounds, whole ones
        first += (last - first) % (staleness + 1)
    return first, last


def steady_error(commits: Mapping[int, float], staleness: int) -> tuple[float, int]:
    """Return by what part a steady step may be off, a standard error, and of how many steps it is an average.

    Of rounds of steps that are open together, which end together; 0 where there are not two of them.
    """
    times = [commits[k] for k in sorted(commits)]
    if len(times) < 2:
        return 0.0, len(times)
    first, last = steady_window(len(times), staleness)
    ends = times[first : last + 1 : staleness + 1]
    rounds = [b - a for a, b in pairwise(ends)]
    mean = fmean(rounds) if rounds else 0.0
    return (stdev(rounds) / mean / sqrt(len(rounds)) if len(rounds) > 1 and mean else 0.0), last - first


def steady(commits: Mapping[int, float], makespan: float, staleness: int) -> float:
    """Seconds of a steady step: between commits, without the filling at the start and the draining at the end.

    While the last ``staleness`` steps are done no others begin, so that they are faster.
    """
    times = [commits[k] for k in sorted(commits)]
    count = len(times)
    if count < 2:
        return makespan / max(count, 1)
    first, last = steady_window(count, staleness)
    return (times[last] - times[first]) / (last - first)
