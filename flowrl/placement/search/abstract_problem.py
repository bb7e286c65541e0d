"""A problem as the abstract search knows it, sets on numbers of devices, and its answers as plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ...errors import PlanError
from ..cluster.cluster import Nodes
from ..cluster.mesh import Mesh
from ..cost.cost_model import Costs
from ..cost.roofline import Roofline
from ..plan.plan import Pipeline, Place, Plan, Pool
from .branch_and_bound import Choice, Question, Set, Stock, cheapest
from .colocate import Colocated, Floor, Settled, publish_title
from .parallelism import Parallelism, Way
from .partitions import all_counts, node_counts, partitions
from .problem import Problem
from .step_time import Op, Placed, PoolUse, Sent

_MOST_UNITS = 8  # Bell(8) = 4140 partitions


class Asked:
    """A problem with its costs. ``relaxed``: constraints to leave out; ``anywhere``: pools may share nodes in part.

    ``like``: another one of the same problem and costs.
    """

    def __init__(
        self,
        problem: Problem,
        costs: Costs,
        relaxed: frozenset[str] = frozenset(),
        anywhere: bool = False,
        like: Asked | None = None,
    ) -> None:
        if len(problem.units) > _MOST_UNITS:
            names = ["+".join(u) for u in problem.units]
            what = f"{len(names)} uses to place apart or together are too many: {_MOST_UNITS} at most."
            raise PlanError(what, have=names, fix="Name some that stay together.")
        self.problem, self.costs, self.relaxed, self.anywhere = problem, costs, relaxed, anywhere
        self._steady: Asked | None = None
        self.units = {"+".join(u): u for u in problem.units}
        self.parallelism = Parallelism(problem, costs, relaxed, like.parallelism if like else None)
        self.table = Colocated(self.parallelism, self.units)

    def question(self) -> Question:
        problem = self.problem
        unit_of = {name: unit for unit, names in self.units.items() for name in names}
        fixed = [0.0] * len(problem.stages)
        for op in self._hosted():
            fixed[op.stage] += op.seconds
        return Question(
            members=tuple(self.units),
            stocks=tuple(self._stock(i, g) for i, g in enumerate(problem.cluster.groups)),
            stages=len(problem.stages),
            pairs=tuple(dict.fromkeys((unit_of[a], unit_of[b]) for a, b in problem.pairs)),
            staleness=tuple(sorted(set(problem.staleness))),
            fixed=tuple(fixed),
        )

    @property
    def varies(self) -> bool:
        """Whether rows have lengths or turns of their own: the generates of steps that overlap then share an engine."""
        return any(work.load.varies for member in self.problem.members for work in member.works)

    def bound(self) -> float | None:
        """Return seconds that no step of the simulator takes less than, of any placement that is looked at.

        A segment takes as long as its busiest pool, each call on the mesh where it is fastest. Where rows have lengths
        of their own, that is so on average over many steps, and where steps overlap, of engines that are always full.
        None where costs are not by such engines.
        """
        if not self.varies:
            return self._floor(self.question())
        if not isinstance(self.costs, Roofline):
            return None
        in_turn = self._floor(replace(self.question(), staleness=(0,)))
        full = self.steady()
        overlapped = full._floor(full.overlapped()) if full is not None else None
        return min((s for s in (in_turn, overlapped) if s is not None), default=None)

    def steady(self) -> Asked | None:
        """Return the same with engines that the steps in flight keep full; None where no steps overlap in one."""
        if not self.varies or not isinstance(self.costs, Roofline) or not any(self._splits()):
            return None
        if self._steady is None and max(self.problem.staleness) > 0:
            self._steady = Asked(self.problem, replace(self.costs, steady=True), self.relaxed, self.anywhere)
        return self._steady

    def overlapped(self) -> Question:
        """Return the question of the placements alone in which steps overlap."""
        asked = self.question()
        return replace(asked, staleness=tuple(s for s in asked.staleness if s), only=tuple(self._splits()))

    def _splits(self) -> Iterator[tuple[Set, ...]]:
        """Yield the ways to share pools in which no pool trains and generates with one model."""
        pairs = self.question().pairs
        for sets in partitions(tuple(self.units)) if pairs else ():
            if not any(a in s and b in s for s in sets for a, b in pairs):
                yield sets

    def _floor(self, asked: Question) -> float | None:
        problem = self.problem
        segments = problem.segments or tuple(range(len(problem.stages)))
        fixed = [0.0] * (max(segments) + 1)
        for stage, seconds in enumerate(asked.fixed):
            fixed[segments[stage]] += seconds
        merged = replace(asked, stages=len(fixed), fixed=tuple(fixed))
        best = cheapest(merged, Floor(self.table, segments)).best
        return None if best is None else best.seconds

    def sets_of(self, sets: Iterable[Iterable[str]]) -> tuple[Set, ...]:
        """Return sets of members as sets of units."""
        wanted = [set(s) for s in sets]
        found = tuple(tuple(u for u, names in self.units.items() if set(names) <= s) for s in wanted)
        if sorted(u for s in found for u in s) != sorted(self.units):
            have = ["+".join(u) for u in self.units.values()]
            raise PlanError("these sets are no partition of what is placed.", have=have)
        return found

    def _stock(self, number: int, group: Nodes) -> Stock:
        total = group.count * group.devices
        counts = set(node_counts(nodes=group.count, devices=group.devices))
        if self.problem.integers or self.anywhere:
            step = 1 if self.problem.integers else max(1, total // 16)
            counts |= set(all_counts(total)[step - 1 :: step])
        return Stock(f"{number}:{group.kind}", total, tuple(sorted(counts)))

    def _hosted(self) -> list[Op]:
        """What runs on processes of the host, wherever the rest is: all of them are in one pool."""
        processes = max((m.processes for m in self.problem.hosted), default=1)
        works = [work for m in self.problem.hosted for work in m.works]
        placed = [replace(w, mesh=Mesh(), devices=(), processes=processes, pool="cpu") for w in works]
        return [Op(w.title, self.problem.stage_of[w.node], self.costs.seconds(w)) for w in placed]

    def placed(self, choice: Choice, other: Mapping[Set, Settled] | None = None) -> Placed:
        """An answer with devices: pools one after another, the largest first, so that none crosses a node in part.

        ``other``: sets on other meshes than those that the search takes.
        """
        rows = self.parallelism.in_a_row(choice.spots)
        order = sorted(range(len(choice.sets)), key=lambda i: (choice.spots[i][0], -choice.spots[i][1]))
        names = _names([tuple(n for u in s for n in self.units[u]) for s in choice.sets])
        pools: list[PoolUse] = []
        place: dict[str, dict[str, Place]] = {}
        for i in order:
            group, units = choice.spots[i][0], choice.sets[i]
            settled = (other or {}).get(units) or self.table.settle(units, choice.spots[i])
            assert settled is not None, "a set was chosen that does not fit"
            devices = rows[i]
            for name, way in settled.ways.items():
                member = self.problem.by_name[name]
                place.setdefault(member.role.name, {})[member.use] = Place(
                    names[i], way.mesh, way.backend, offload=way.offload
                )
            members = {n: _way_text(w) for n, w in settled.ways.items()}
            kind = self.problem.cluster.groups[group].kind
            pools.append(PoolUse(names[i], kind, devices, members, settled.ops, settled.moved))
        listed = [Pool(p.name, devices=p.devices) for p in pools]
        if self.problem.hosted:
            processes = max(m.processes for m in self.problem.hosted)
            listed.append(Pool("cpu", processes=processes))
            members = {m.name: "" for m in self.problem.hosted}
            pools.append(PoolUse("cpu", "", (), members, tuple(self._hosted()), processes=processes))
            for member in self.problem.hosted:
                place.setdefault(member.role.name, {})[member.use] = Place("cpu")
        for worker, leader in self.problem.followers:
            place[worker] = {"train": place[leader]["train"]}
        pipeline = Pipeline(staleness=choice.staleness)
        plan = Plan({p.name: p for p in listed}, place, cluster=self.problem.cluster, pipeline=pipeline)
        sent = tuple(self._sent(choice, names, other))
        return Placed(plan, tuple(pools), sent, len(self.problem.stages), choice.staleness, choice.seconds)

    def _sent(self, choice: Choice, names: list[str], other: Mapping[Set, Settled] | None) -> Iterable[Sent]:
        at = {n: i for i, s in enumerate(choice.sets) for u in s for n in self.units[u]}
        for train, generate in self.problem.pairs:
            i, j = at[train], at[generate]
            if i != j:
                source, target = (choice.sets[i], choice.spots[i]), (choice.sets[j], choice.spots[j])
                seconds = self.table.publish_one(train, generate, source, target, other)
                yield Sent(publish_title(self.problem, train), names[j], seconds)


def _way_text(way: Way) -> str:
    return f"{way.backend} {way.mesh}{', in host memory' if way.offload else ''}"


def _names(sets: list[tuple[str, ...]]) -> list[str]:
    """A name for each pool: ``all``, ``train``, ``rollout`` where that says it, else its workers' names."""
    if len(sets) == 1:
        return ["all"]
    pools = [[m.rpartition(".")[::2] for m in members] for members in sets]
    engines = sum(all(use == "generate" for _, use in pool) for pool in pools)
    names: list[str] = []
    for pool in pools:
        uses = {worker: {u for w, u in pool if w == worker} for worker, _ in pool}
        if any("generate" not in used for used in uses.values()) or len(pool) > 1 or engines > 1:
            names.append("_".join(f"{w}_rollout" if used == {"generate"} else w for w, used in uses.items()))
        else:
            names.append("rollout")
        if all("generate" not in used for used in uses.values()) and engines == len(sets) - 1:
            names[-1] = "train"
    return names
