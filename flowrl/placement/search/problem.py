"""What a placement is searched for: the uses of the workers, the work of a step by stages, and the machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ...errors import PlanError, did_you_mean
from ..cluster.cluster import Cluster
from ..cost.pool_memory import loads_of
from ..cost.work import Role, Work
from ..plan.plan import Pipeline


@dataclass(frozen=True)
class Member:
    """One use of a worker, with its calls of one step: ``Member(actor, "train", (log_probs, update))``.

    ``use`` is ``train`` (updates, and everything else that its trained copy does, also for a worker that is never
    trained) or ``generate``. The works are templates: mesh and devices are what the search fills in, the backend too
    where none is asked for. Members whose role has no model take ``processes`` of the host and no devices.
    """

    role: Role
    use: str
    works: tuple[Work, ...]
    backend: str = ""
    processes: int = 1

    @property
    def name(self) -> str:
        """``actor.train``."""
        return f"{self.role.name}.{self.use}"


@dataclass(frozen=True)
class Problem:
    """Everything that a search asks for.

    ``Problem(Cluster.of("h100-80:4x8"), members, stages=(("actor.generate#1",), ("ref.log_probs#1",
    "critic.values#1"), ("actor.update#1", "critic.update#1")), pairs=(("actor.train", "actor.generate"),))``

    ``stages``: ids of calls (``Work.node``), a stage being what may run at the same time; a stage begins when the one
    before it has ended. ``pairs``: (member that trains, member that generates with its weights). ``staleness``: the
    bounds to choose from; give bounds above 0 only for a program whose losses correct for stale rows. ``together``:
    names of members that have to share a pool. ``integers``: pools of any size, not only parts of a node and whole
    nodes. ``order``: ids of calls as the program makes them, for which the stages stand where it is not said. Raises
    PlanError for a name or a call that is not there, or is there twice. ``segments``: of each stage the number of its
    segment; a segment really begins when the one before it has ended, stages of one segment may overlap in a schedule.
    ``offload``: weights, gradients and optimizer may be in host memory, where a backend can. ``followers``: workers
    with a model and without calls that take time, which go where another one trains: ``(("average", "actor"),)``.
    """

    cluster: Cluster
    members: tuple[Member, ...]
    stages: tuple[tuple[str, ...], ...]
    pairs: tuple[tuple[str, str], ...] = ()
    staleness: tuple[int, ...] = (0,)
    together: tuple[tuple[str, ...], ...] = ()
    integers: bool = False
    order: tuple[str, ...] = ()
    segments: tuple[int, ...] = ()
    offload: bool = False
    followers: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        names = [m.name for m in self.members]
        _once(names, "member")
        for name in (n for group in (*self.pairs, *self.together) for n in group):
            _known(name, names, "member")
        calls = [w.node for m in self.members for w in m.works]
        staged = [node for stage in self.stages for node in stage]
        _once(calls, "call")
        _once(staged, "call of the stages")
        for node in staged:
            _known(node, calls, "call")
        for node in calls:
            _known(node, staged, "call of the stages")
        if not self.staleness or min(self.staleness) < 0:
            raise PlanError(f"staleness {self.staleness} is nothing to choose from.", fix="Give bounds from 0 up.")
        Pipeline(staleness=max(self.staleness))  # raises what a plan with it would

    @cached_property
    def by_name(self) -> dict[str, Member]:
        """Members by name."""
        return {m.name: m for m in self.members}

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """Number of the stage by call."""
        return {node: i for i, stage in enumerate(self.stages) for node in stage}

    @cached_property
    def place_of(self) -> dict[str, int]:
        """Number of the call in the program."""
        return {node: i for i, node in enumerate(self.order or [n for stage in self.stages for n in stage])}

    @cached_property
    def micro(self) -> Mapping[str, int]:
        """Tokens of a forward pass by worker, where a call says so."""
        return loads_of(w for m in self.members for w in m.works)[1]

    @cached_property
    def placed(self) -> tuple[Member, ...]:
        """Members that take devices."""
        return tuple(m for m in self.members if m.role.model is not None)

    @cached_property
    def hosted(self) -> tuple[Member, ...]:
        """Members that take processes of the host."""
        return tuple(m for m in self.members if m.role.model is None)

    @cached_property
    def units(self) -> tuple[tuple[str, ...], ...]:
        """Members that take devices, in groups that nothing separates."""
        groups = [[m.name] for m in self.placed]
        for joined in self.together:
            hit = [g for g in groups if set(g) & set(joined)]
            if len(hit) > 1:
                groups = [g for g in groups if g not in hit[1:]]
                hit[0].extend(n for g in hit[1:] for n in g)
        return tuple(tuple(g) for g in groups)


def _once(names: Iterable[str], what: str) -> None:
    seen = set[str]()
    for name in names:
        if name in seen:
            raise PlanError(f"the {what} '{name}' is there twice.")
        seen.add(name)


def _known(name: str, names: Iterable[str], what: str) -> None:
    have = list(names)
    if name not in have:
        raise PlanError(f"'{name}' is no {what} of the problem.", have=have, fix=did_you_mean(name, have))
