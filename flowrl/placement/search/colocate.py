"""How long a set of members that share a pool takes in each stage, their meshes chosen so that all of them fit.

Members of a pool take turns. Two choices of meshes are made and the faster is taken: one where everything that stays
between calls (weights, gradients, optimizer) fits on the device at once, the KV cache having what is left; and one
where each member has the device to itself in its turn. What then leaves the device and comes back, and what it costs,
is what :mod:`flowrl.placement.cost.pool_memory` says for the plan, as in a simulation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..cost.pool_memory import PoolMemory, Turn, turns_of
from ..cost.roofline import Roofline
from ..cost.work import Work, Workload
from ..cost.worker_memory import Usage
from ..plan.plan import Place
from .branch_and_bound import Set, Spot, Vector
from .parallelism import HERE, Parallelism, Way, front
from .problem import Member, Problem
from .step_time import Op

_NOTHING = Workload(0, 0, 0)
Ways = Mapping[str, Way]


@dataclass(frozen=True)
class Settled:
    """A set on devices: the way of each member, what a step does there, and who leaves the device between turns.

    ``calls``: seconds by id of the call. ``hosted``: bytes that are in host memory for each device, at most.
    """

    ways: Ways
    ops: tuple[Op, ...]
    moved: tuple[str, ...] = ()
    calls: Mapping[str, float] = field(default_factory=dict[str, float])
    hosted: float = 0.0

    def stages(self, count: int) -> Vector:
        """Return seconds by stage."""
        found = [0.0] * count
        for op in self.ops:
            found[op.stage] += op.seconds
        return tuple(found)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(op.seconds for op in self.ops)


@dataclass(frozen=True)
class _Sum:
    """Members that share a device: seconds of all, bytes kept by all, bytes that the neediest takes in its turn."""

    ways: tuple[tuple[str, Way], ...] = ()
    seconds: float = 0.0
    keeps: float = 0.0
    needs: float = 0.0


class Colocated:
    """Costs of sets of units, as the search asks for them (:class:`flowrl.placement.search.branch_and_bound.Table`)."""

    def __init__(self, parallelism: Parallelism, units: Mapping[str, tuple[str, ...]]) -> None:
        self.parallelism, self.units = parallelism, units
        self.problem: Problem = parallelism.problem
        self._settled: dict[tuple[Set, Spot], Settled | None] = {}
        self._published: dict[tuple[object, ...], float] = {}
        self._least: dict[tuple[object, ...], float] = {}

    def stages(self, members: Set, spot: Spot) -> Vector | None:
        """Return seconds by stage of the units ``members`` on ``spot``; None where they do not fit."""
        settled = self.settle(members, spot)
        return None if settled is None else settled.stages(len(self.problem.stages))

    def fits(self, sets: Sequence[Set], spots: Sequence[Spot], other: Mapping[Set, Settled] | None = None) -> bool:
        """Whether pools that share a node leave each other room in its host memory; ``other``: sets on other meshes."""
        cluster, need = self.problem.cluster, dict[int, float]()
        small = [spot[1] % cluster.groups[spot[0]].devices > 0 for spot in spots]
        if sum(small) < 2:
            return True
        for units, spot, devices in zip(sets, spots, self.parallelism.in_a_row(spots), strict=True):
            settled = (other or {}).get(units) or self.settle(units, spot)
            if settled is not None and settled.hosted:
                for node, count in Counter(map(cluster.node, devices)).items():
                    need[node] = need.get(node, 0.0) + settled.hosted * count
        return all(size <= self.parallelism.host(self._group(node)) for node, size in need.items())

    def _group(self, node: int) -> int:
        return self.problem.cluster.groups.index(
            self.problem.cluster.nodes_of(self.problem.cluster.devices_of(node)[0])
        )

    def settle(self, units: Set, spot: Spot) -> Settled | None:
        """Return the fastest ways that fit together; None where there are none."""
        key = (units, spot)
        if key not in self._settled:
            members = [self.problem.by_name[name] for unit in units for name in self.units[unit]]
            choices = [self._together(members, spot), self._in_turns(members, spot)]
            found = [self._ops(members, ways, spot) for ways in choices if ways is not None]
            fitting = [settled for settled in found if settled is not None]
            self._settled[key] = min(fitting, key=lambda s: s.seconds, default=None)
        return self._settled[key]

    def on(self, units: Set, ways: Ways, spot: Spot) -> Settled | None:
        """Return what the units take with these ways; None where they do not fit."""
        return self._ops([self.problem.by_name[name] for unit in units for name in self.units[unit]], ways, spot)

    def other_engines(self, units: Set, spot: Spot, count: int) -> Iterator[Settled]:
        """Yield the same units with an engine on another mesh, up to ``count`` of them, the fastest ones first."""
        taken = self.settle(units, spot)
        members = [self.problem.by_name[name] for unit in units for name in self.units[unit]]
        for member in (m for m in members if m.use == "generate" and taken is not None):
            assert taken is not None, "of units that fit"
            ways = sorted(self.parallelism.every(member, *spot, staging=False), key=lambda way: way.total)
            others = [w for w in ways if w.mesh != taken.ways[member.name].mesh and not w.offload][:count]
            for way in others:
                if (settled := self._ops(members, {**taken.ways, member.name: way}, spot)) is not None:
                    yield settled

    def any_ways(self, member: Member, members: Iterable[Member], spot: Spot) -> list[Way]:
        """Return the ways of a member of a pool of ``members``, those too that do not fit or are slow."""
        return list(self.parallelism.every(member, *spot, staging=self._stages_weights(member, members)))

    # meshes

    def _ways(self, member: Member, members: Iterable[Member], spot: Spot, held: float = 0.0) -> tuple[Way, ...]:
        return self.parallelism.ways(member, *spot, held=held, staging=self._stages_weights(member, members))

    def _stages_weights(self, member: Member, members: Iterable[Member]) -> bool:
        """Whether its weights go to another pool."""
        here = {m.name for m in members}
        return any(train == member.name and generate not in here for train, generate in self.problem.pairs)

    def _together(self, members: Sequence[Member], spot: Spot) -> Ways | None:
        """Everything stays on the device: the trained first, then generates with the KV cache that is left to them."""
        capacity = self.parallelism.capacity(spot[0])
        sums = [_Sum()]
        for member in members:
            if member.use != "generate":
                added = (_add(s, member, w) for s in sums for w in self._ways(member, members, spot))
                sums = front(added, lambda s: (s.seconds, s.keeps, s.needs))
                sums = [s for s in sums if s.keeps + s.needs <= capacity]
        best: _Sum | None = None
        for base in sums:
            if best is not None and base.seconds >= best.seconds:
                break
            total: _Sum | None = base
            for member in (m for m in members if m.use == "generate"):
                ways = self._ways(member, members, spot, total.keeps)
                total = _add(total, member, ways[0]) if ways else None
                if total is None or total.keeps + total.needs > capacity:
                    total = None
                    break
            if total is not None and (best is None or total.seconds < best.seconds):
                best = total
        return None if best is None else dict(best.ways)

    def _in_turns(self, members: Sequence[Member], spot: Spot) -> Ways | None:
        """Each member is alone on the device in its turn, and what it keeps moves in before and out after it."""
        found: dict[str, Way] = {}
        for member in members:
            ways = self._ways(member, members, spot)
            if not ways:
                return None
            moves = 2 * len({self.problem.stage_of[w.node] for w in member.works})
            costs = [w.total + moves * self._move(member, w, "onload", spot) for w in ways]
            found[member.name] = ways[costs.index(min(costs))]
        return found

    # what a step does

    def _ops(self, members: Sequence[Member], ways: Ways, spot: Spot) -> Settled | None:
        """The ops of a step with these meshes; None if they do not fit even in turns."""
        turns = self._turns(members)
        kind = self.problem.cluster.groups[spot[0]].kind
        usages = {name: self._usage(name, ways) for name in ways}
        host = self.parallelism.host(spot[0]) / min(spot[1], self.problem.cluster.groups[spot[0]].devices)
        memory = PoolMemory("pool", kind, self.parallelism.memory(spot[0]), usages, host)
        plain = [turn for turn, _, _ in turns]
        hosted = memory.most_hosted(plain)
        if memory.fits(plain) is not None or hosted > host:
            return None
        moments = memory.timeline(plain).moments
        ops, calls = list[Op](), dict[str, float]()
        for (turn, stage, work), moment in zip(turns, moments, strict=True):
            name = turn.residents[0]
            if turn.publish:
                seconds = self._publish(name, (ways[name], spot), (ways[turn.residents[1]], spot))
            else:
                assert work is not None, "a turn that is no publish is a call"
                seconds = self._seconds(name, work, ways[name], memory.held(turn, plain), spot)
                calls[work.node] = seconds
            ops.append(Op(turn.title, stage, seconds))
            for direction, who in (("onload", moment.onloaded), ("offload", moment.offloaded)):
                for mover in who:
                    member = self.problem.by_name[mover]
                    seconds = self._move(member, ways[mover], direction, spot)
                    ops.append(Op(f"{member.role.name}.{direction}", stage, seconds))
        return Settled(ways, tuple(ops), tuple(memory.swaps(plain)), calls, hosted)

    def _turns(self, members: Sequence[Member]) -> list[tuple[Turn, int, Work | None]]:
        """Calls and publishes of a pool in program order, each with its stage."""
        problem, names = self.problem, {m.name for m in members}
        works = sorted((w for m in members for w in m.works), key=lambda w: problem.place_of[w.node])
        inside = {problem.by_name[a].role.name for a, b in problem.pairs if a in names and b in names}
        rest, found = iter(works), list[tuple[Turn, int, Work | None]]()
        work: Work | None = None
        for turn in turns_of(works, inside, {m.role.name for m in problem.placed}):
            work = work if turn.publish else next(rest)
            assert work is not None, "a publish stands behind an update"
            found.append((turn, problem.stage_of[work.node], work))
        return found

    def _usage(self, name: str, ways: Ways) -> Usage:
        """What a member keeps, now that it is known where the other copy of its worker is."""
        member, way = self.problem.by_name[name], ways[name]
        other = ways.get(f"{member.role.name}.train")
        if member.use != "generate" or other is None:
            return way.usage
        return self.parallelism.usage(member, way.mesh, way.backend, other=Place(HERE, other.mesh, other.backend))

    def _seconds(self, name: str, work: Work, way: Way, held: float, spot: Spot) -> float:
        if work.kind != "generate":
            works = self.problem.by_name[name].works
            return way.seconds[works.index(work)]
        devices = self.parallelism.devices(spot[0], way.mesh.size)
        placed = self.parallelism.placed(work, way.mesh, way.backend, devices, "here", held=held)
        return self.parallelism.costs.seconds(placed)

    def _move(self, member: Member, way: Way, direction: str, spot: Spot) -> float:
        if not way.keeps:
            return 0.0
        title, devices = f"{member.role.name}.{direction}", self.parallelism.devices(spot[0], way.mesh.size)
        work = Work(title, title, direction, member.role, _NOTHING, moved=way.keeps)
        return self.parallelism.costs.seconds(self.parallelism.placed(work, way.mesh, way.backend, devices, "here"))

    # publishes

    def publish(self, pair: tuple[str, str], source: tuple[Set, Spot], target: tuple[Set, Spot]) -> float:
        """Seconds from the pool of the units ``source`` to that of ``target``, of all pairs between the two units."""
        total = 0.0
        for train, generate in self.problem.pairs:
            if train in self.units[pair[0]] and generate in self.units[pair[1]]:
                total += self.publish_one(train, generate, source, target)
        return total

    def publish_least(self, pair: tuple[str, str], source: tuple[Set, Spot], target: tuple[Set, Spot]) -> float:
        """Return seconds that the same does not take less than, as is soon known of a roofline."""
        costs, total = self.parallelism.costs, 0.0
        if not isinstance(costs, Roofline):
            return 0.0
        for train, generate in self.problem.pairs:
            if train in self.units[pair[0]] and generate in self.units[pair[1]]:
                sender, receiver = self.settle(*source), self.settle(*target)
                assert sender is not None and receiver is not None, "a publish was asked of sets that do not fit"
                ways = (sender.ways[train], source[1]), (receiver.ways[generate], target[1])
                key = (train, ways[0][0].mesh, source[1], ways[1][0].mesh, target[1])
                if key not in self._least:
                    self._least[key] = costs.publish_least(self._work(train, *ways, same=False))
                total += self._least[key]
        return total

    def publish_one(
        self,
        train: str,
        generate: str,
        source: tuple[Set, Spot],
        target: tuple[Set, Spot],
        other: Mapping[Set, Settled] | None = None,
    ) -> float:
        """Return the same of one pair of members; ``other``: sets on other meshes."""
        sender, receiver = ((other or {}).get(at[0]) or self.settle(*at) for at in (source, target))
        assert sender is not None and receiver is not None, "a publish was asked of sets that do not fit"
        sent = (sender.ways[train], source[1])
        return self._publish(train, sent, (receiver.ways[generate], target[1]), same=False)

    def _publish(self, train: str, source: tuple[Way, Spot], target: tuple[Way, Spot], *, same: bool = True) -> float:
        key = (train, source[0].mesh, source[1], target[0].mesh, target[1], same)
        if key not in self._published:
            self._published[key] = self.parallelism.costs.seconds(self._work(train, source, target, same=same))
        return self._published[key]

    def _work(self, train: str, source: tuple[Way, Spot], target: tuple[Way, Spot], *, same: bool) -> Work:
        """The publish from a use to another; ``same``: in one pool."""
        role, title = self.problem.by_name[train].role, publish_title(self.problem, train)
        behind = source[1][1] if source[1][0] == target[1][0] and not same else 0
        sending = self.parallelism.devices(source[1][0], source[0].mesh.size)
        receiving = self.parallelism.devices(target[1][0], target[0].mesh.size, behind)
        work = Work(title, title, "publish", role, _NOTHING, source=(source[0].mesh, sending))
        work = replace(work, source_pool="here", mesh=target[0].mesh, devices=receiving)
        return replace(work, pool="here" if same else "there", backend=target[0].backend)


class Floor:
    """What sets cannot take less than: every call on its fastest mesh, nothing moved, nothing published."""

    def __init__(self, table: Colocated, segments: Sequence[int]) -> None:
        self._table, self._segments = table, segments

    def stages(self, members: Set, spot: Spot) -> Vector | None:
        """Return seconds by segment of the units ``members`` on ``spot``; None where one fits nowhere."""
        problem, found = self._table.problem, [0.0] * (max(self._segments) + 1)
        for member in (problem.by_name[name] for unit in members for name in self._table.units[unit]):
            floors = self._table.parallelism.floors(member, *spot)
            if floors is None:
                return None
            for work, seconds in zip(member.works, floors, strict=True):
                found[self._segments[problem.stage_of[work.node]]] += seconds
        return tuple(found)

    def publish(self, pair: tuple[str, str], source: tuple[Set, Spot], target: tuple[Set, Spot]) -> float:
        """Return 0."""
        return 0.0

    def publish_least(self, pair: tuple[str, str], source: tuple[Set, Spot], target: tuple[Set, Spot]) -> float:
        """Return 0."""
        return 0.0

    def fits(self, sets: Sequence[Set], spots: Sequence[Spot]) -> bool:
        """Return that they do: nothing leaves a device."""
        return True


def publish_title(problem: Problem, train: str) -> str:
    """Return ``actor.publish``."""
    return f"{problem.by_name[train].role.name}.publish"


def _add(total: _Sum, member: Member, way: Way) -> _Sum:
    ways = (*total.ways, (member.name, way))
    return _Sum(ways, total.seconds + way.total, total.keeps + way.keeps, max(total.needs, way.needs))
