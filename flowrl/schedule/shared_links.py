"""Moves and calls that pass a link at the same time share it: each goes on as fast as a fair share of it allows.

A fluid model. Alone, something takes its seconds and keeps a part of each of its links busy: a publish all of the
network of the pool that it comes to, an update as much of it as gathering weights takes of its time. Where the parts of
a link are more than all of it, everything on it goes on more slowly, by the max-min fair rates (Bertsekas and Gallager
1992, Data Networks, section 6.5.2): rates rise together until a link is full, and then those of the others.

A call that computes for a part of its time and sends in the rest, beside a move that sends all the time, takes as long
as if each had half of the link while both send: ``1 + u`` times its seconds, where it sends for a part ``u`` of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from math import inf

#: A link of a pool: ``("rollout", "network")`` between nodes, ``("rollout", "link")`` inside one.
Link = tuple[str, str]
#: The part of each link that something keeps busy while it is alone.
Parts = Mapping[Link, float]

_ROUNDING = 1e-9


def fair_rates(flows: Mapping[Hashable, Parts]) -> dict[Hashable, float]:
    """Return how fast each goes on, as a part of its speed alone: the max-min fair rates, none above 1.

    >>> fair_rates({"publish": {("train", "network"): 1.0}, "update": {("train", "network"): 0.25}})
    {'publish': 0.8, 'update': 0.8}
    """
    rates = dict[Hashable, float]()
    left = {link: 1.0 for parts in flows.values() for link in parts}
    open_ = {key: {link: part for link, part in parts.items() if part > 0} for key, parts in flows.items()}
    while open_:
        asked = dict[Link, float]()
        for parts in open_.values():
            for link, part in parts.items():
                asked[link] = asked.get(link, 0.0) + part
        level = min((left[link] / part for link, part in asked.items()), default=inf)
        full = {link for link, part in asked.items() if left[link] / part <= level * (1 + _ROUNDING)}
        done = list(open_) if level >= 1 else [key for key, parts in open_.items() if full & parts.keys()]
        for key in done:
            rates[key] = min(1.0, level)
            for link, part in open_.pop(key).items():
                left[link] -= part * rates[key]
    return {key: rates[key] for key in flows}


@dataclass(slots=True)
class _Flow:
    """What is left of something, in seconds alone, and when it is through at its rate."""

    parts: Parts
    left: float
    rate: float = 0.0
    end: float = inf


@dataclass
class SharedLinks:
    """What is under way. Times never go back.

    >>> links = SharedLinks()
    >>> links.begin("publish", 4.0, {("train", "network"): 1.0}, time=0.0)
    >>> links.begin("update", 4.0, {("train", "network"): 0.25}, time=0.0)
    >>> links.next(), links.finish(5.0)
    (5.0, ['publish', 'update'])
    """

    _flows: dict[Hashable, _Flow] = field(default_factory=dict[Hashable, _Flow])
    _time: float = 0.0

    def begin(self, key: Hashable, seconds: float, parts: Parts, *, time: float) -> None:
        """Begin something that takes so many seconds alone."""
        self._pass(time)
        self._flows[key] = _Flow(parts, seconds)
        self._share()

    def next(self) -> float:
        """Return when the next of them is through, if nothing comes between; inf where there is none."""
        return min((flow.end for flow in self._flows.values()), default=inf)

    def finish(self, time: float) -> list[Hashable]:
        """Go on to a time; return what is through by then, in the order in which it began."""
        done = [key for key, flow in self._flows.items() if flow.end <= time]
        self._pass(time)
        for key in done:
            del self._flows[key]
        if done:
            self._share()
        return done

    def _pass(self, time: float) -> None:
        for flow in self._flows.values():
            flow.left = max(0.0, flow.left - (time - self._time) * flow.rate)
        self._time = time

    def _share(self) -> None:
        """Give everybody the rate that is fair now; who keeps its rate is through when it was to be."""
        for key, rate in fair_rates({key: flow.parts for key, flow in self._flows.items()}).items():
            flow = self._flows[key]
            if rate != flow.rate:
                flow.rate, flow.end = rate, self._time + flow.left / rate
