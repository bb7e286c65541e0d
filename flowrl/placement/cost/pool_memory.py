"""The memory of a pool over time: who is on its devices in which turn, who has to make way, and what does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import ceil, inf

from ...errors import PlanError
from ..cluster.cluster import Cluster
from ..cluster.hardware import Hardware
from ..plan.plan import Plan
from .host_memory import Phases, host_room
from .work import Role, Work, Workload
from .worker_memory import Usage, over_base, reserve, resident, room

#: Up to so many workers of a pool, every choice of those that make way is tried; beyond, all of them do.
TRIED = 12
#: The phase before the first turn of a run, to which everybody who takes turns has left the devices.
START = "the start"


@dataclass(frozen=True)
class Turn:
    """One call in program order: ``Turn("actor.update", ("actor.train",))``.

    A publish inside a pool has both uses on the devices, their weights alone: ``Turn("actor.publish", ("actor.train",
    "actor.generate"), publish=True)``.
    """

    title: str
    residents: tuple[str, ...]
    publish: bool = False


def turns_of(works: Sequence[Work], publishing: Container[str], reading: Container[str]) -> tuple[Turn, ...]:
    """Return the turns of a pool from its calls, in program order.

    Behind its last update the weights of a worker in ``publishing`` go to its other copy in this pool. ``reading``:
    workers with a model, whose trained copy is there too while a policy serves them.
    """
    last = {work.role.name: i for i, work in enumerate(works) if work.kind == "train"}
    turns: list[Turn] = []
    for i, work in enumerate(works):
        name = work.role.name
        both = (f"{work.holder}.train",) if work.holder in reading else ()
        turns.append(Turn(work.title, (f"{name}.{work.use}", *both)))
        if last.get(name) == i and name in publishing:
            turns.append(Turn(f"{name}.publish", (f"{name}.train", f"{name}.generate"), publish=True))
    return tuple(turns)


def loads_of(works: Iterable[Work]) -> tuple[dict[tuple[str, str], Workload], dict[str, int]]:
    """Return the largest call of each worker in each use, and its tokens of a forward pass where a call says so."""
    loads: dict[tuple[str, str], Workload] = {}
    micro: dict[str, int] = {}
    for work in works:
        key = (work.role.name, work.use)
        if key not in loads or work.load.tokens > loads[key].tokens:
            loads[key] = work.load
        if work.micro:
            micro[work.role.name] = max(micro.get(work.role.name, 0), work.micro)
    return loads, micro


@dataclass(frozen=True)
class Moment:
    """What is on each device during a turn, bytes by ``resident part``, and who came and went before it.

    ``hosted``: what is then in host memory for each device, those who come among them: whoever leaves does so before.
    """

    title: str
    parts: Mapping[str, float]
    offloaded: tuple[str, ...] = ()
    onloaded: tuple[str, ...] = ()
    hosted: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Timeline:
    """Memory over one round of turns. ``culprit`` is the largest part at the peak: ``actor.train optimizer``."""

    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda m: m.total)

    @property
    def culprit(self) -> str:
        parts = {name: size for name, size in self.peak.parts.items() if name != "reserve"}
        return max(parts, key=lambda name: parts[name]) if parts else ""


@dataclass(frozen=True)
class PoolMemory:
    """Each device of a pool: its bytes and the workers that live there, by name (``actor.train``).

    ``PoolMemory("train", "h100-80", 80e9, {"actor.train": usage, "ref.train": usage})``. All meshes of a pool begin at
    its first device, so the first device holds a shard of everybody; the smallest device counts. ``host``: bytes of
    host memory that a node has for each of its devices here, where it is known.
    """

    pool: str
    device: str
    memory: float
    residents: Mapping[str, Usage]
    host: float = inf

    @cached_property
    def _known(self) -> dict[tuple[Turn, ...], dict[str, float]]:
        return {}

    def swaps(self, turns: Sequence[Turn]) -> Mapping[str, float]:
        """Return the workers that are offloaded between turns, with the bytes of each on a device; none if all fit.

        Of all choices that fit, the one with the fewest waves of generation, then the fewest bytes moved; those for
        which the host has no memory come last. Where no choice fits, everybody makes way: see :meth:`fits`.
        """
        key = tuple(turns)
        if key not in self._known:
            chosen = self._choose(key)
            self._known[key] = {name: self.residents[name].staying for name in sorted(chosen)}
        return self._known[key]

    def timeline(self, turns: Sequence[Turn]) -> Timeline:
        """Return bytes of each turn of a round; what the last turn left is what the first one finds."""
        swapped, moments = set(self.swaps(turns)), list[Moment]()
        here = swapped & set(self._present(turns[-1])) if turns else set[str]()
        for turn in turns:
            wanted = swapped & set(self._present(turn))
            parts, hosted = self._parts(turn, swapped), self._hosted(swapped - (here & wanted))
            leaving, coming = tuple(sorted(here - wanted)), tuple(sorted(wanted - here))
            moments.append(Moment(turn.title, parts, leaving, coming, hosted))
            here = wanted
        return Timeline(tuple(moments))

    def hosted(self, turns: Sequence[Turn]) -> Phases:
        """Return what is in host memory for each device, by phase: before the first turn everybody who moves is."""
        phases: dict[str, Mapping[str, float]] = {START: self._hosted(set(self.swaps(turns)))}
        for moment in self.timeline(turns).moments:
            before = phases.get(moment.title, {})
            phases[moment.title] = max(before, moment.hosted, key=lambda parts: sum(parts.values()))
        return phases

    def most_hosted(self, turns: Sequence[Turn]) -> float:
        """Return the bytes of the largest of these phases, the first one."""
        return sum(self._hosted(set(self.swaps(turns))).values())

    def _hosted(self, away: Container[str]) -> dict[str, float]:
        """Bytes in host memory for each device: of those that are away, and what always is there."""
        found: dict[str, float] = {}
        for name, usage in self.residents.items():
            parts = {**usage.hosted, **(usage.idle if name in away else {})}
            found |= {f"{name} {part}": size for part, size in parts.items() if size}
        return found

    def held(self, turn: Turn, turns: Sequence[Turn]) -> float:
        """Return bytes on each device during a generate that its KV cache cannot have, its own weights left out.

        What a cost model wants to know (``Work.held``), which counts those weights itself. A cache that stays between
        calls cannot have what others need in their turns either.
        """
        swapped = set(self.swaps(turns))
        parts, own = self._parts(turn, swapped), turn.residents[0] if turn.residents else ""
        weights = {f"{name} weights" for name in self.with_shared(own)}
        here = sum(size for name, size in parts.items() if name not in {"reserve", f"{own} kv cache", *weights})
        if not self._keeps(own):
            return here
        most = room(self.memory) - sum(size for name, size in parts.items() if name in weights)
        return max(here, most - self._left_in_all(own, turns, swapped))

    def cache(self, name: str, turns: Sequence[Turn], *, in_turns: bool = True) -> float:
        """Return the bytes of the KV cache of an engine on each device: what others leave it in all turns in which it
        is there. Engines that are there together have equal parts. ``in_turns``: workers leave the devices between
        their turns where they have to, else all of them stay.
        """
        return max(0.0, self._left_in_all(name, turns, set(self.swaps(turns)) if in_turns else set()))

    def fits(self, turns: Sequence[Turn]) -> PlanError | None:
        """Return None, or which turn needs how much of what, and what would help; ``at`` is not known here.

        Rows never fail to fit: a KV cache has to hold one row of the longest length, others wait for the next wave.
        """
        swapped = set(self.swaps(turns))
        worst = max(turns, key=lambda t: self._least(t, swapped), default=None)
        if worst is None or self._least(worst, swapped) <= room(self.memory):
            return None
        parts = self._parts(worst, swapped, least=True)
        need = sum(parts.values())
        listed = sorted(((s, self._label(n, worst)) for n, s in parts.items() if s >= 5e7), key=lambda p: (-p[0], p[1]))
        text = ", ".join(f"{label} {_gb(size)}" for size, label in listed)
        away = sorted(n for n in swapped if n not in self._present(worst) and self.residents[n].staying)
        without = f", with {' and '.join(away)} offloaded" if away else ""
        return PlanError(
            f"pool '{self.pool}' ({self.device}): {worst.title} needs {_gb(need)} GB of {_gb(self.memory)} GB"
            f" on each device{without}: {text}.",
            fix=self._fix(worst, parts),
        )

    # who is there

    def _present(self, turn: Turn) -> tuple[str, ...]:
        """The residents that a turn needs on the devices, with those whose weights they share."""
        wanted = (n for resident in turn.residents for n in self.with_shared(resident))
        return tuple(n for n in dict.fromkeys(wanted) if n in self.residents)

    def with_shared(self, name: str) -> tuple[str, ...]:
        """Return a resident, and those that have the weights that it works with."""
        usage = self.residents.get(name)
        return (name, *self.with_shared(usage.shares)) if usage is not None and usage.shares else (name,)

    def _stays(self, name: str, turn: Turn, swapped: set[str]) -> bool:
        return name not in swapped or name in self._present(turn)

    def _parts(self, turn: Turn, swapped: set[str], *, least: bool = False) -> dict[str, float]:
        """Bytes by resident and part during a turn; working parts as large as they can be, or at their least."""
        parts = {"reserve": reserve(self.memory)}
        for name, usage in self.residents.items():
            if self._stays(name, turn, swapped):
                lean = turn.publish and name in swapped
                idle = {p: s for p, s in usage.idle.items() if not lean or "weights" in p}
                parts |= {f"{name} {part}": size for part, size in {**idle, **usage.emptied}.items()}
        for name in () if turn.publish else turn.residents[:1]:
            usage = self.residents.get(name)
            if usage is not None:
                free = 0.0 if least else self.memory - sum(parts.values())
                parts |= {f"{name} {part}": size for part, size in usage.working_in(free).items()}
        return {part: size for part, size in parts.items() if size}

    def _keeps(self, name: str) -> bool:
        """Whether an engine has what others leave it; on CPUs it takes its default, which is small."""
        return name in self.residents and self.residents[name].keeps and self.device != "cpu"

    def _left_in_all(self, name: str, turns: Sequence[Turn], swapped: set[str]) -> float:
        """The least that a KV cache has left in any turn in which its engine is there."""
        return min((self._left(turn, swapped) for turn in turns if self._stays(name, turn, swapped)), default=0.0)

    def _left(self, turn: Turn, swapped: set[str]) -> float:
        """Bytes of a turn that are left for the KV cache of each engine that keeps one and is there."""
        parts = self._parts(turn, swapped, least=True)
        engines = [n for n in self.residents if self._keeps(n) and self._stays(n, turn, swapped)]
        caches = {f"{engine} kv cache" for engine in engines}
        return (self.memory - sum(size for part, size in parts.items() if part not in caches)) / max(1, len(engines))

    def _least(self, turn: Turn, swapped: set[str]) -> float:
        return sum(self._parts(turn, swapped, least=True).values()) - reserve(self.memory)

    # who makes way

    def _choose(self, turns: tuple[Turn, ...]) -> tuple[str, ...]:
        movable = [n for n, u in self.residents.items() if u.staying]
        if len(movable) > TRIED:
            fits = all(self._least(t, set()) <= room(self.memory) for t in turns)
            return () if fits else tuple(movable)
        best: tuple[tuple[bool, int, float, int], tuple[str, ...]] | None = None
        for count in range(len(movable) + 1):
            for choice in combinations(movable, count):
                swapped = set(choice)
                if all(self._least(t, swapped) <= room(self.memory) for t in turns):
                    moved = sum(self.residents[n].moved * self._comings(n, turns) for n in choice)
                    full = sum(self._hosted(swapped).values()) > self.host
                    rank = (full, self._waves(turns, swapped), moved, count)
                    best = min(best or (rank, choice), (rank, choice))
        return best[1] if best else tuple(movable)

    def _comings(self, name: str, turns: tuple[Turn, ...]) -> int:
        """How often a round of turns comes to a worker that was away; 0 for one that is always or never needed."""
        there = [name in self._present(turn) for turn in turns]
        return sum(1 for i, here in enumerate(there) if here and not there[i - 1])

    def _waves(self, turns: tuple[Turn, ...], swapped: set[str]) -> int:
        waves = 0
        for turn in turns:
            usage = self.residents.get(turn.residents[0]) if turn.residents and not turn.publish else None
            if usage is not None and usage.row:
                others = sum(u.staying for n, u in self.residents.items() if self._stays(n, turn, swapped))
                free = room(self.memory) - others
                if self._keeps(turn.residents[0]):
                    working = sum(size for part, size in usage.working.items() if part not in usage.least)
                    free = min(free, self._left_in_all(turn.residents[0], turns, swapped) + working)
                waves += usage.waves(free)
        return waves

    # what to say

    def _label(self, name: str, turn: Turn) -> str:
        """Parts of the worker at work by their own name, its other use and other workers in front of theirs."""
        owner, _, part = name.partition(" ")
        if not part or owner in turn.residents[:1]:
            return part or name
        usage = self.residents[owner]
        mine = usage.role == self.residents[turn.residents[0]].role if turn.residents[0] in self.residents else False
        return f"{'training' if usage.use == 'train' else 'generation'} {part}" if mine else f"{usage.role} {part}"

    def _fix(self, turn: Turn, parts: Mapping[str, float]) -> str:
        """What helps depends on what is largest: state is sharded further, working parts are made smaller."""
        own = turn.residents[0]
        role = self.residents[own].role
        sizes = {n.partition(" ")[2]: s for n, s in parts.items() if n.startswith(own + " ")}
        working = sum(sizes.get(part, 0.0) for part in ("activations", "logits", "kv cache"))
        others = sum(s for n, s in parts.items() if not n.startswith(own + " "))
        state = sum(sizes.values()) - working
        if state and others + working < self.memory:
            axis = "tp or pp" if own.endswith(".generate") else "fsdp or tp"
            times = ceil(state / (self.memory - others - working) - 1e-9)
            if times > 1 and state >= working:
                return f"Shard {role} over {times} times as many devices ({axis}), or take devices with more memory."
        if sizes.get("kv cache", 0.0) >= max(sizes.get("activations", 0.0), sizes.get("logits", 0.0)) and working:
            return f"Allow {role} fewer tokens per response, or shard it over more devices (tp or pp)."
        if others - reserve(self.memory) > sum(sizes.values()):
            return f"Place {role} in another pool, or shard the others over more devices."
        return f"Give {turn.title} fewer micro_tokens, or shard {role} over more devices (tp or cp)."


def pool_memory(
    plan: Plan,
    pool: str,
    roles: Sequence[Role],
    loads: Mapping[tuple[str, str], Workload],
    micro: Mapping[str, int] | None = None,
    bases: Mapping[str, str] | None = None,
) -> PoolMemory | None:
    """Return the memory of one pool of a plan; None for a pool without devices of a cluster, whose memory is not known.

    ``loads``: the largest call of a worker in a use; a use without one does not live anywhere. ``micro``: tokens of a
    forward pass by worker, where a call says so. ``bases``: the worker that has the weights of another in memory.
    """
    devices = plan.pools[pool].devices
    if plan.cluster is None or not devices:
        return None
    residents: dict[str, Usage] = {}
    for role in roles:
        for use in ("train", "generate"):
            place, load = plan.place_of(role.name, use), loads.get((role.name, use))
            if load is not None and place.pool == pool:
                tokens = micro.get(role.name, 0) if micro else 0
                reads = (role.name, "train") in loads
                residents[f"{role.name}.{use}"] = resident(role, use, place, plan, load, micro=tokens, reads=reads)
    hardware = Hardware(plan.cluster, devices)
    residents = _with_bases(residents, bases or {}, roles, plan)
    return PoolMemory(pool, hardware.names, hardware.memory, residents, _host(plan.cluster, devices))


def _host(cluster: Cluster, devices: Sequence[int]) -> float:
    """Bytes of host memory that the node which has least has for each of these devices."""
    counts = Counter(map(cluster.node, devices))
    return min(host_room(cluster.nodes_of(cluster.devices_of(node)[0])) / n for node, n in counts.items())


def _with_bases(
    residents: Mapping[str, Usage], bases: Mapping[str, str], roles: Sequence[Role], plan: Plan
) -> dict[str, Usage]:
    """The residents of a pool, where weights that several workers have in common are those of one of them."""
    found = dict(residents)
    holders: dict[str, str] = {}  # the worker at the bottom -> the use that has its weights in memory
    by_name = {role.name: role for role in roles}
    for worker in sorted(by_name, key=lambda name: name in bases):  # whoever has weights of its own comes first
        bottom = worker
        while bottom in bases:
            bottom = bases[bottom]
        for use in ("train", "generate"):
            name = f"{worker}.{use}"
            if name not in found or found[name].shares or "weights" not in found[name].idle:
                continue
            if worker not in bases or bottom not in holders:
                holders.setdefault(bottom, name)
            elif use == "train" or f"{worker}.train" not in found:  # else a copy that generates, adapters merged
                mesh = plan.place_of(worker, use).mesh
                found[name] = over_base(found[name], by_name[worker], mesh, holders[bottom])
    return found


def _gb(size: float) -> str:
    """Bytes as GB (1e9), with one digit where that says anything."""
    return f"{size / 1e9:.1f}".removesuffix(".0")
