"""How each use of a worker is spread over n devices: HybridFlow's algorithm 2, by cost model and memory.

For a use and a number of devices, every mesh that the model can be split over is costed; those that another beats in
seconds, bytes kept and bytes needed at once are left out. What is left is chosen from when it is known who else is in
the pool (:mod:`flowrl.placement.search.colocate`). Everything is computed once per (use, kind of device, number of
devices).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TypeVar

from ..backends import backend as row_of
from ..cluster.mesh import Mesh
from ..cost.cost_model import Costs
from ..cost.host_memory import host_room
from ..cost.per_device_counts import MICRO_TOKENS
from ..cost.pool_memory import loads_of
from ..cost.work import Work
from ..cost.worker_memory import Usage, room, usage_of
from ..plan.plan import Place
from .branch_and_bound import Spot
from .candidate_meshes import meshes
from .problem import Member, Problem

#: KV caches are sized in steps of this many bytes of what others keep, rounded up, so that few sizes are costed.
_HELD_STEP = 1e9
HERE = "here"  # the pool at hand, which has no name yet


@dataclass(frozen=True)
class Way:
    """One use on one mesh: ``Way(Mesh({"fsdp": 8}), backend, seconds=(1.2, 30.5), usage=usage)``.

    ``seconds`` by call of the use; ``usage``: bytes on each device. ``offload``: its weights are in host memory.
    """

    mesh: Mesh
    backend: str
    seconds: tuple[float, ...]
    usage: Usage
    offload: bool = False

    @cached_property
    def total(self) -> float:
        """Seconds of all calls of a step."""
        return sum(self.seconds)

    @cached_property
    def keeps(self) -> float:
        """Bytes per device from step to step."""
        return self.usage.staying

    @cached_property
    def needs(self) -> float:
        """Bytes more while it runs, at the least."""
        return self.usage.needed


class Parallelism:
    """The ways of every use of a problem.

    ``relaxed``: constraints to leave out, ``memory`` or ``divisibility``. ``like``: another one of the same problem and
    costs, whose seconds need not be computed again.
    """

    def __init__(
        self,
        problem: Problem,
        costs: Costs,
        relaxed: frozenset[str] = frozenset(),
        like: Parallelism | None = None,
    ) -> None:
        self.problem, self.costs, self.relaxed = problem, costs, relaxed
        self._starts = [0]
        for group in problem.cluster.groups:
            self._starts.append(self._starts[-1] + group.count * group.devices)
        self._rows: dict[tuple[int, int], tuple[int, ...]] = {}
        self._floors: dict[tuple[str, int, int], tuple[float, ...] | None] = {}
        self._found: dict[tuple[str, int, int, float, bool], tuple[Way, ...]] = {}
        self._seconds: dict[tuple[object, ...], tuple[float, ...]] = like._seconds if like else {}

    def devices(self, group: int, count: int, behind: int = 0) -> tuple[int, ...]:
        """``count`` devices of a group of nodes, the first ``behind`` left out: equal to any others of that number."""
        key = (self._starts[group] + behind, count)
        if key not in self._rows:
            self._rows[key] = tuple(range(key[0], key[0] + count))
        return self._rows[key]

    def capacity(self, group: int) -> float:
        """Return bytes of a device that calls can have."""
        return room(self.memory(group))

    def memory(self, group: int) -> float:
        """Return bytes of a device."""
        return 1e18 if "memory" in self.relaxed else self.problem.cluster.kind(self._starts[group]).memory

    def host(self, group: int) -> float:
        """Return bytes of host memory of a node that workers can have."""
        return inf if "memory" in self.relaxed else host_room(self.problem.cluster.groups[group])

    def in_a_row(self, spots: Sequence[Spot]) -> list[tuple[int, ...]]:
        """Return the devices of pools: in each group of nodes one after another, the largest first.

        So no pool crosses a node in part.
        """
        taken = dict.fromkeys(range(len(self.problem.cluster.groups)), 0)
        found: dict[int, tuple[int, ...]] = {}
        for i in sorted(range(len(spots)), key=lambda i: (spots[i][0], -spots[i][1])):
            group, count = spots[i]
            found[i] = self.devices(group, count, taken[group])
            taken[group] += count
        return [found[i] for i in range(len(spots))]

    def ways(
        self, member: Member, group: int, count: int, *, held: float = 0.0, staging: bool = False
    ) -> tuple[Way, ...]:
        """Return ways that fit beside ``held`` bytes of others, fastest first; none beats another in everything.

        ``staging``: weights go to another pool, and are set aside until they are there.
        """
        held = -(-held // _HELD_STEP) * _HELD_STEP
        key = (member.name, group, count, held, staging)
        if key not in self._found:
            ways = self._costed(member, group, count, held, staging)
            self._found[key] = tuple(front(ways, lambda w: (w.total, w.keeps, w.needs)))
        return self._found[key]

    def floors(self, member: Member, group: int, count: int) -> tuple[float, ...] | None:
        """Return the least seconds of each call on so many devices, whatever the mesh; None where no mesh fits."""
        key = (member.name, group, count)
        if key not in self._floors:
            ways = list(self._costed(member, group, count, 0.0, staging=False))
            self._floors[key] = tuple(map(min, zip(*(w.seconds for w in ways), strict=True))) if ways else None
        return self._floors[key]

    def _meshes(self, member: Member, group: int, size: int) -> Iterator[tuple[Mesh, str, bool]]:
        """Yield meshes with their backend, and where host memory may be used, with the weights there too."""
        model = member.role.model
        assert model is not None, f"{member.name} takes no devices"
        nodes, loads = self.problem.cluster.groups[group], [w.load for w in member.works]
        found = meshes(
            member.role,
            member.use,
            size,
            node=nodes.devices,
            device=nodes.kind,
            backend=member.backend,
            any_split="divisibility" in self.relaxed,
            cp=any(load.rows < size or load.prompt + load.response > MICRO_TOKENS for load in loads),
        )
        for mesh, backend in found:
            yield mesh, backend, False
            if self.problem.offload and member.use == "train" and row_of(backend).offload:
                yield mesh, backend, True

    def every(self, member: Member, group: int, size: int, *, staging: bool) -> Iterable[Way]:
        """Yield all ways, those too that do not fit; the least seconds of an engine are those without others."""
        devices = self.devices(group, size)
        for mesh, backend, offload in self._meshes(member, group, size):
            usage = self.usage(member, mesh, backend, staging=staging, offload=offload)
            yield Way(mesh, backend, self._timed(member, mesh, backend, devices, 0.0, offload), usage, offload)

    def _costed(self, member: Member, group: int, size: int, held: float, staging: bool) -> Iterable[Way]:
        devices, free = self.devices(group, size), self.capacity(group) - held
        for mesh, backend, offload in self._meshes(member, group, size):
            usage = self.usage(member, mesh, backend, staging=staging, offload=offload)
            if usage.staying + usage.needed <= free:
                yield Way(mesh, backend, self._timed(member, mesh, backend, devices, held, offload), usage, offload)

    def usage(
        self,
        member: Member,
        mesh: Mesh,
        backend: str,
        *,
        other: Place | None = None,
        staging: bool = False,
        offload: bool = False,
    ) -> Usage:
        """Return bytes on each device of a pool; ``other``: where the worker trains, if that is in this pool."""
        role, use = member.role, member.use
        load = loads_of(member.works)[0][role.name, use]
        reads = f"{role.name}.train" in self.problem.by_name
        place = Place(HERE, mesh, backend, offload=offload)
        micro = self.problem.micro.get(role.name, 0)
        return usage_of(role, use, place, other, load, micro=micro, reads=reads, staging=staging)

    def _timed(
        self, member: Member, mesh: Mesh, backend: str, devices: tuple[int, ...], held: float, offload: bool
    ) -> tuple[float, ...]:
        key = (member.name, mesh, backend, devices[0], len(devices), held, offload, "memory" in self.relaxed)
        if key not in self._seconds:
            works = [
                self.placed(w, mesh, backend, devices, member.name, held=held, offload=offload) for w in member.works
            ]
            self._seconds[key] = tuple(self.costs.seconds(w) for w in works)
        return self._seconds[key]

    def placed(
        self,
        work: Work,
        mesh: Mesh,
        backend: str,
        devices: tuple[int, ...],
        pool: str,
        *,
        held: float = 0.0,
        offload: bool = False,
    ) -> Work:
        """Return the work with where it runs."""
        if "memory" in self.relaxed:
            held = -1e15  # as if the KV cache had all the memory in the world
        where = {"mesh": mesh, "backend": backend, "devices": devices, "pool": pool}
        return replace(work, **where, held=held, offload=offload)


T = TypeVar("T")


def front(choices: Iterable[T], measures: Callable[[T], tuple[float, float, float]]) -> list[T]:
    """Return choices, fastest first, without those that another one is no slower and no larger than.

    ``measures``: seconds of one, bytes that it keeps, bytes that it needs in its turn.
    """
    kept: list[tuple[float, float, T]] = []
    for (_, keeps, needs), one in sorted(((measures(c), c) for c in choices), key=lambda pair: pair[0]):
        if not any(k <= keeps and n <= needs for k, n, _ in kept):
            kept.append((keeps, needs, one))
    return [one for *_, one in kept]
