"""What a step takes in one placement, op by op: the busiest pool, the slowest op, what another cost would change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log

from ..plan.plan import Plan
from .branch_and_bound import step_seconds

_FURTHEST = 32.0  # costs that would have to change by more than this factor are left unsaid


@dataclass(frozen=True)
class Op:
    """Work of one pool in one stage: ``Op("actor.generate", stage=0, seconds=31.5)``."""

    title: str
    stage: int
    seconds: float


@dataclass(frozen=True)
class PoolUse:
    """A pool with what it does in a step; ``device`` is empty for processes of the host.

    ``PoolUse("actor", "h100-80", devices=(0, 1, 2, 3), members={"actor.train": "fsdp=4"}, ops=(Op(...),))``.
    ``moved``: members that leave the device between their turns, as not all fit. ``processes`` of a pool of the host.
    """

    name: str
    device: str
    devices: tuple[int, ...]
    members: Mapping[str, str]
    ops: tuple[Op, ...]
    moved: tuple[str, ...] = ()
    processes: int = 0

    def by_stage(self, stages: int, factors: Mapping[str, float]) -> tuple[float, ...]:
        """Return seconds by stage, and of all behind them; costs multiplied by ``factors`` by title."""
        found = [0.0] * stages
        for op in self.ops:
            found[op.stage] += op.seconds * factors.get(op.title, 1.0)
        return (*found, sum(found))


@dataclass(frozen=True)
class Sent:
    """A publish between pools: ``Sent("actor.publish", pool="rollout", seconds=0.4)``, ``pool`` being where it ends."""

    title: str
    pool: str
    seconds: float


@dataclass(frozen=True)
class Bottleneck:
    """The op that most of a step waits for: ``Bottleneck("actor.generate", "rollout", seconds=31.5, share=0.62)``."""

    title: str
    pool: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Placed:
    """A placement with its costs.

    ``step_seconds`` is what the search reckons, :meth:`seconds` without factors, or what a simulation of the plan has
    put in its place. ``sets``: the members of each pool, by which placements are told apart. ``settings``: what the
    plan says besides as it makes a step shorter: ``("chunks: 4",)``. ``simulated_busy``: by pool the part of a
    simulation in which something ran, where there was one, ``simulated_ops`` the same by title and pool.
    """

    plan: Plan
    pools: tuple[PoolUse, ...]
    sent: tuple[Sent, ...]
    stages: int
    staleness: int
    step_seconds: float = field(default=0.0)
    settings: tuple[str, ...] = ()
    simulated_busy: Mapping[str, float] = field(default_factory=dict[str, float])
    simulated_ops: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])

    @property
    def sets(self) -> tuple[tuple[str, ...], ...]:
        """The members of the pools that have devices."""
        return tuple(tuple(p.members) for p in self.pools if p.device)

    @property
    def slower(self) -> float:
        """How much longer a step is than the search reckons: 1 before a simulation."""
        reckoned = self.seconds()
        return self.step_seconds / reckoned if reckoned else 1.0

    def seconds(self, factors: Mapping[str, float] | None = None) -> float:
        """Return seconds per step, as the search reckons, when costs are multiplied by ``factors``, by title."""
        given = factors or {}
        tops = [p.by_stage(self.stages, given) for p in self.pools]
        latency = sum(max(c) for c in zip(*(t[:-1] for t in tops), strict=True))
        publish, into = 0.0, {p.name: t[-1] for p, t in zip(self.pools, tops, strict=True)}
        for sent in self.sent:
            seconds = sent.seconds * given.get(sent.title, 1.0)
            publish += seconds
            into[sent.pool] += seconds
        return step_seconds(
            tops, latency=latency, publish=publish, into=max(into.values(), default=0.0), staleness=self.staleness
        )

    @property
    def busy(self) -> dict[str, float]:
        """Seconds of a step in which each pool works, publishes that end there among them."""
        return {
            p.name: sum(op.seconds for op in p.ops) + sum(s.seconds for s in self.sent if s.pool == p.name)
            for p in self.pools
        }

    @property
    def busy_parts(self) -> Mapping[str, float]:
        """The part of the time in which each pool works: simulated, or else reckoned for a step."""
        reckoned = {pool: seconds / (self.step_seconds or 1.0) for pool, seconds in self.busy.items()}
        return self.simulated_busy or {pool: min(1.0, part) for pool, part in reckoned.items()}

    @property
    def least(self) -> float:
        """Seconds of a step in which the busiest pool computes: what leaves a device and comes back is left out."""
        calls = ([op.seconds for op in p.ops if not op.title.endswith((".offload", ".onload"))] for p in self.pools)
        return max((sum(seconds) for seconds in calls), default=0.0)

    @property
    def bottleneck(self) -> Bottleneck:
        """The largest op of the pool that sets the pace: of each stage, or of the step where steps overlap.

        Where steps overlap it is what the simulation had the busiest pool do for longest, where there was one.
        """
        if self.staleness and self.simulated_ops:
            return self._simulated_bottleneck()
        busy = self.busy
        slowest = max(busy, key=lambda name: busy[name], default="")
        if self.staleness and self.seconds() <= busy[slowest] * (1 + 1e-9):
            waited = {(op.title, p.name): 0.0 for p in self.pools if p.name == slowest for op in p.ops}
            for pool in self.pools:
                for op in pool.ops if pool.name == slowest else ():
                    waited[op.title, pool.name] += op.seconds
        else:
            waited = self._waited_for()
        for sent in self.sent:
            waited[sent.title, sent.pool] = waited.get((sent.title, sent.pool), 0.0) + sent.seconds
        if not waited:
            return Bottleneck("", "", 0.0, 0.0)
        title, pool = max(waited, key=lambda key: waited[key])
        return Bottleneck(title, pool, waited[title, pool], waited[title, pool] / sum(waited.values()))

    def _simulated_bottleneck(self) -> Bottleneck:
        pool = max(self.simulated_busy, key=lambda name: self.simulated_busy[name])
        parts = {title: part for (title, at), part in self.simulated_ops.items() if at == pool}
        title = max(parts, key=lambda name: parts[name])
        return Bottleneck(title, pool, parts[title] * self.step_seconds, parts[title] / self.simulated_busy[pool])

    def _waited_for(self) -> dict[tuple[str, str], float]:
        found: dict[tuple[str, str], float] = {}
        for stage in range(self.stages):
            pool = max(self.pools, key=lambda p: p.by_stage(self.stages, {})[stage])
            for op in pool.ops:
                if op.stage == stage:
                    found[op.title, pool.name] = found.get((op.title, pool.name), 0.0) + op.seconds
        return found

    @property
    def titles(self) -> tuple[str, ...]:
        """The ops that have a cost here, each once."""
        return tuple(dict.fromkeys([*(op.title for p in self.pools for op in p.ops), *(s.title for s in self.sent)]))


@dataclass(frozen=True)
class Change:
    """``Change("critic.update", 1.8)``: were this op 1.8 times as costly everywhere, the runner-up would be as fast."""

    title: str
    factor: float


def changes(best: Placed, runner_up: Placed) -> tuple[Change, ...]:
    """Return the change of a single op's cost that would put the two level, the smallest first.

    Both stay as they are placed, and as much slower than reckoned as they are; a factor above 32 or below 1/32 is left
    out.
    """
    found: list[Change] = []
    longer = runner_up.slower / best.slower
    for title in dict.fromkeys((*best.titles, *runner_up.titles)):
        factors = [f for f in (_level(best, runner_up, title, longer, up) for up in (True, False)) if f is not None]
        if factors:
            found.append(Change(title, min(factors, key=lambda f: abs(log(f)))))
    return tuple(sorted(found, key=lambda c: abs(log(c.factor))))


def _level(best: Placed, runner_up: Placed, title: str, longer: float, up: bool) -> float | None:
    """The factor nearest to 1, above or below, from which on the runner-up is not slower."""

    def behind(factor: float) -> bool:
        return longer * runner_up.seconds({title: factor}) > best.seconds({title: factor}) * (1 + 1e-12)

    inside, step = 1.0, 2**0.25 if up else 2**-0.25
    if not behind(inside):
        return 1.0
    while 1 / _FURTHEST < inside * step < _FURTHEST:
        if not behind(inside * step):
            outside = inside * step
            for _ in range(40):
                middle = (inside * outside) ** 0.5
                inside, outside = (middle, outside) if behind(middle) else (inside, middle)
            return outside
        inside *= step
    return None
