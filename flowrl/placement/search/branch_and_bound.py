"""The cheapest split of models into pools: every partition, every allocation, less what provably cannot win.

It knows no models: a :class:`Table` says how long a set of members takes in each stage on so many devices. The
evaluation is ``d_cost`` of HybridFlow (arXiv 2409.19256, section 6), extended to pipelines:

- staleness 0: sum over stages of the largest time among the sets, plus what is published between pools;
- staleness S >= 1, open to partitions in which no set both trains and generates the same model: the larger of (a) the
  busy time of the busiest set and (b) the time of staleness 0 over S + 1, as no more than S + 1 steps are in flight.
  This is what a pipeline reaches when no pool waits for its turn; the simulator tells how near a schedule comes.

**Why pruning is safe.** Write v(s) for the seconds of a set s by stage, with its busy time behind them. The step time
is f(v(s1), ..., v(sk)) plus publishes that are never negative, and f is made of ``max``, ``+`` and division by a
constant: it never falls when an entry of a v rises. For a set that has no devices yet, let low(s, r) be the entrywise
minimum of v(s) over every allowed count that the remaining devices r can hold. Whatever a completion gives to s, it
takes from r, so its v(s) >= low(s, r) entry by entry, and f with low in place of v bounds every completion from below.
A branch is left when this bound reaches the best of its own partition, or, in a partition that does not lead, the best
of all others but the leading one: neither the winner nor the runner-up, which must be another partition, can be in it.
Nothing is assumed about how times fall with devices. Bound and value are computed by the same sequence of additions,
and floating-point ``+``, ``max`` and ``/`` are monotone, so this holds to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from .partitions import partitions

Set = tuple[str, ...]
Spot = tuple[int, int]
Vector = tuple[float, ...]
Options = list[tuple[int, Vector]]  # (devices, seconds by stage and busy) of a set, most devices first
#: Seconds of a publish of a pair from one set to another.
Published = Callable[[tuple[str, str], tuple[Set, Spot], tuple[Set, Spot]], float]
_Left = tuple[Set, tuple[int, ...]]  # a set, and the devices of each stock that are left


@dataclass(frozen=True)
class Stock:
    """Equal devices that sets take from: ``Stock("h100-80", devices=32, counts=(1, 2, 4, 8, 16, 24, 32))``.

    ``counts``: the sizes that a set may take, ascending.
    """

    name: str
    devices: int
    counts: tuple[int, ...]


class Table(Protocol):
    """What sets cost."""

    def stages(self, members: Set, spot: Spot) -> Vector | None:
        """Seconds of the set in each stage on ``spot`` (number of the stock, devices); None where it does not fit."""
        ...

    def publish_least(self, pair: tuple[str, str], source: tuple[Set, Spot], target: tuple[Set, Spot]) -> float:
        """Return seconds that :meth:`publish` does not give less than, where they are known sooner; else 0."""
        ...

    def fits(self, sets: Sequence[Set], spots: Sequence[Spot]) -> bool:
        """Whether sets that fit by themselves fit beside each other."""
        ...

    def publish(self, pair: tuple[str, str], source: tuple[Set, Spot], target: tuple[Set, Spot]) -> float:
        """Return seconds from the pool that trains to the one that generates."""
        ...


@dataclass(frozen=True)
class Question:
    """What is searched: ``Question(("actor", "critic"), (Stock("a100-80", 16, (1, 2, 4, 8, 16)),), stages=3)``.

    ``pairs``: (member that trains, member that generates with its weights). ``fixed``: seconds by stage that pass
    wherever the members are, as on CPU processes. ``staleness``: the bounds to choose from. ``only``: partitions to
    look at, all of them where there are none.
    """

    members: tuple[str, ...]
    stocks: tuple[Stock, ...]
    stages: int
    pairs: tuple[tuple[str, str], ...] = ()
    staleness: tuple[int, ...] = (0,)
    fixed: Vector = ()
    only: tuple[tuple[Set, ...], ...] = ()


@dataclass(frozen=True)
class Choice:
    """One answer: ``Choice((("actor",), ("ref",)), spots=((0, 8), (0, 4)), staleness=0, seconds=12.5)``."""

    sets: tuple[Set, ...]
    spots: tuple[Spot, ...]
    staleness: int
    seconds: float


@dataclass(frozen=True)
class Answer:
    """The winner, the best of another partition, and what was looked at. Both are None where nothing fits.

    ``evaluated`` counts allocations, ``pruned`` the branches (of any size) that were left. ``ranked``: the best
    allocation of each partition and staleness, fastest first, as many as were asked for.
    """

    best: Choice | None
    runner_up: Choice | None
    evaluated: int
    pruned: int
    ranked: tuple[Choice, ...] = ()


def step_seconds(vectors: Sequence[Vector], *, latency: float, publish: float, into: float, staleness: int) -> float:
    """Seconds per step from stages and publishes; ``into`` is the busy time of a generating set with its publishes.

    ``latency``: sum over stages of the largest time, ``vectors`` end with the busy time of their set.
    """
    if staleness == 0:
        return latency + publish
    return max(max((v[-1] for v in vectors), default=0.0), into, (latency + publish) / (staleness + 1))


@dataclass
class _Search:
    question: Question
    table: Table
    evaluated: int = 0
    pruned: int = 0
    first: Choice | None = None
    second: Choice | None = None
    keep: int = 0
    kept: dict[tuple[tuple[Set, ...], int], Choice] = field(default_factory=dict[Any, Choice])
    options: dict[Set, list[Options]] = field(default_factory=dict[Set, "list[Options]"])  # by stock
    lows: dict[Set, list[list[Vector | None]]] = field(default_factory=dict[Set, "list[list[Vector | None]]"])
    low_of: dict[_Left, Vector | None] = field(default_factory=dict["_Left", "Vector | None"])
    limits: dict[tuple[Set, ...], float] = field(default_factory=dict[Any, float])  # until an offer changes them
    marks: dict[tuple[tuple[Set, ...], int], float] = field(default_factory=dict[Any, float])  # the same of a kind

    def answer(self) -> Answer:
        fixed = self.question.fixed or (0.0,) * self.question.stages
        base: Vector = (*fixed, sum(fixed))
        whole = tuple(s.devices for s in self.question.stocks)
        waiting = [
            (self._bound(base, sets, whole, self._staleness(sets)), i, sets)
            for i, sets in enumerate(self.question.only or partitions(self.question.members))
        ]
        for bound, _, sets in sorted(waiting):
            if bound >= self._limit(sets):  # inf where a set fits nowhere
                self.pruned += 1
                continue
            # The set that binds most is placed first, so that poor allocations of it are left early.
            order = sorted(sets, key=lambda s: self._low(s, whole) or (), reverse=True)
            self._place(sets, order, [], base, whole, self._staleness(sets))
        ranked = sorted(self.kept.values(), key=lambda c: c.seconds)[: self.keep]
        return Answer(self.first, self.second, self.evaluated, self.pruned, tuple(ranked))

    def _staleness(self, sets: tuple[Set, ...]) -> tuple[int, ...]:
        """The bounds open to a partition: above 0 only where no set trains and generates one model."""
        pairs = self.question.pairs
        split = bool(pairs) and all(not any(a in s and b in s for s in sets) for a, b in pairs)
        return tuple(sorted(self.question.staleness)) if split else (0,)

    def _limit(self, sets: tuple[Set, ...]) -> float:
        """What an allocation of this partition has to beat, to be a winner, a runner-up, or one of those kept."""
        if sets not in self.limits:
            self.limits[sets] = self._limit_of(sets)
        return self.limits[sets]

    def _limit_of(self, sets: tuple[Set, ...]) -> float:
        if self.first is not None and self.first.sets == sets:
            limit = self.first.seconds
        else:
            limit = self.second.seconds if self.second is not None else inf
        return max(limit, *(self._to_be_kept(sets, bound) for bound in self._staleness(sets))) if self.keep else limit

    def _to_be_kept(self, sets: tuple[Set, ...], staleness: int) -> float:
        """What it has to beat with this staleness: the best of its kind, and the last kept of the others."""
        own = self.kept.get((sets, staleness))
        others = sorted(c.seconds for c in self.kept.values() if c is not own)
        last = others[self.keep - 1] if len(others) >= self.keep else inf
        return min(own.seconds if own is not None else inf, last)

    def _offer(self, choice: Choice) -> None:
        kind = (choice.sets, choice.staleness)
        if self.keep and (kind not in self.kept or choice.seconds < self.kept[kind].seconds):
            self.kept[kind] = choice
            self._forget()
        if self.first is None or choice.seconds < self.first.seconds:
            if self.first is not None and self.first.sets != choice.sets:
                self.second = self.first
            self.first = choice
            self._forget()
        elif choice.sets != self.first.sets and (self.second is None or choice.seconds < self.second.seconds):
            self.second = choice
            self._forget()

    def _forget(self) -> None:
        """Have what is to be beaten be found out anew."""
        self.limits.clear()
        self.marks.clear()

    def _options(self, members: Set) -> list[Options]:
        """By stock: (count, seconds by stage and busy), most devices first."""
        if members not in self.options:
            stocks = self.question.stocks
            options = [
                [(n, (*v, sum(v))) for n in reversed(s.counts) if (v := self.table.stages(members, (i, n))) is not None]
                for i, s in enumerate(stocks)
            ]
            self.options[members] = options
            self.lows[members] = [_prefix_minima(o, s.devices) for o, s in zip(options, stocks, strict=True)]
        return self.options[members]

    def _low(self, members: Set, left: tuple[int, ...]) -> Vector | None:
        """low(s, r): the entrywise minimum over what the remaining devices can hold; None where nothing fits."""
        key = (members, left)
        if key not in self.low_of:
            self._options(members)
            fits = [v for by, n in zip(self.lows[members], left, strict=True) if (v := by[n]) is not None]
            self.low_of[key] = (fits[0] if len(fits) == 1 else tuple(map(min, *fits))) if fits else None
        return self.low_of[key]

    def _bound(self, top: Vector, rest: Sequence[Set], left: tuple[int, ...], staleness: tuple[int, ...]) -> float:
        """f with ``low`` for the sets that are not placed; ``top`` is the entrywise maximum of those that are."""
        for members in rest:
            low = self._low(members, left)
            if low is None:
                return inf
            top = tuple(map(max, top, low))
        latency = sum(top[:-1])
        if staleness[-1] == 0:
            return latency
        return min(latency if staleness[0] == 0 else inf, max(top[-1], latency / (staleness[-1] + 1)))

    def _place(
        self,
        sets: tuple[Set, ...],
        order: Sequence[Set],
        spots: list[Spot],
        top: Vector,
        left: tuple[int, ...],
        staleness: tuple[int, ...],
    ) -> None:
        if len(spots) == len(order):
            self._evaluate(sets, dict(zip(order, spots, strict=True)), top, staleness)
            return
        here, rest = order[len(spots)], order[len(spots) + 1 :]
        least = self._bound(top, order[len(spots) :], left, staleness)
        for stock, options in enumerate(self._options(here)):
            for count, vector in options:
                limit = self._limit(sets)
                if least >= limit:
                    self.pruned += 1
                    return
                if count > left[stock]:
                    continue
                then = (*left[:stock], left[stock] - count, *left[stock + 1 :])
                above = tuple(map(max, top, vector))
                if self._bound(above, rest, then, staleness) >= limit:
                    self.pruned += 1
                    continue
                self._place(sets, order, [*spots, (stock, count)], above, then, staleness)

    def _evaluate(self, sets: tuple[Set, ...], at: dict[Set, Spot], top: Vector, staleness: tuple[int, ...]) -> None:
        spots = tuple(at[s] for s in sets)
        if not self.table.fits(sets, spots):
            return
        self.evaluated += 1
        least = self._steps(sets, at, top, staleness, self.table.publish_least)
        if any(self._matters(sets, bound, seconds) for bound, seconds in zip(staleness, least, strict=True)):
            steps = self._steps(sets, at, top, staleness, self.table.publish)
            for bound, seconds in zip(staleness, steps, strict=True):
                self._offer(Choice(sets, spots, bound, seconds))

    def _matters(self, sets: tuple[Set, ...], staleness: int, seconds: float) -> bool:
        """Whether an allocation of so many seconds would be a winner, a runner-up, or one of those kept."""
        rival = self.first if self.first is None or self.first.sets == sets else self.second
        return (
            rival is None or seconds < rival.seconds or bool(self.keep and seconds < self._to_be_kept(sets, staleness))
        )

    def _steps(
        self, sets: tuple[Set, ...], at: dict[Set, Spot], top: Vector, staleness: tuple[int, ...], published: Published
    ) -> list[float]:
        """Seconds per step by staleness, with publishes that take so long."""
        owner = {m: s for s in sets for m in s}
        publish, into = 0.0, dict[Set, float]()
        for train, generate in self.question.pairs:
            source, target = owner[train], owner[generate]
            if source != target:
                seconds = published((train, generate), (source, at[source]), (target, at[target]))
                publish += seconds
                into[target] = into.get(target, 0.0) + seconds
        latency = sum(top[:-1])
        busy = max((self._busy(s, at[s]) + extra for s, extra in into.items()), default=0.0)
        how = {"latency": latency, "publish": publish, "into": busy}
        return [step_seconds((top,), **how, staleness=bound) for bound in staleness]

    def _busy(self, members: Set, spot: Spot) -> float:
        return next(v[-1] for count, v in self._options(members)[spot[0]] if count == spot[1])


def _prefix_minima(options: Options, devices: int) -> list[Vector | None]:
    """For 0, 1, ... ``devices`` remaining: the entrywise minimum over counts that they can hold."""
    by_count = dict(options)
    found: list[Vector | None] = [None]
    for n in range(1, devices + 1):
        before, here = found[-1], by_count.get(n)
        found.append(before if here is None else here if before is None else tuple(map(min, before, here)))
    return found


def cheapest(question: Question, table: Table, keep: int = 0) -> Answer:
    """Return the winner and the best of another partition, exactly; equals brute force over the same choices.

    ``keep``: so many of the best choices, each of another partition or staleness, exactly too.
    Departures from HybridFlow's algorithm 1: a set may leave devices unused, its minimal allocation is whatever count
    fits (``Table.stages`` gives None below it), and branches that cannot win are left.
    """
    return _Search(question, table, keep=keep).answer()
