"""Where workers run and how far steps overlap: pools, places with meshes, and a pipeline, checked against a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from ...errors import At, PlanError, did_you_mean
from ..backends import REFERENCE, backend
from ..cluster.cluster import Cluster
from ..cluster.hardware import Hardware
from ..cluster.mesh import Mesh
from .rules import (
    check_alike,
    check_backend,
    check_devices,
    check_disjoint,
    check_least,
    check_offload,
    check_option,
    check_pipeline,
    check_pool_name,
    check_replicas,
    check_source,
    check_uses,
    numbers,
    refuse_mesh,
)


@dataclass(frozen=True)
class Pool:
    """Devices whose workers take turns: ``Pool("train", devices=(0, 1, 2, 3))``.

    One of three: ``devices`` are numbers of the cluster, in the order of mesh ranks; ``processes`` is how many
    processes of the host there are, for workers without a model; ``device`` (``auto``, ``cpu``, ``cuda``, ``cuda:1``)
    is a queue of this process, which a pool without any of them is too. ``least``: with how many of its ranks, replicas
    of each other, a run begins and goes on, and takes up others as they come; 0 begins with all, and goes on with one.
    Raises PlanError for two of the three, and for a ``least`` that cannot be.

    >>> fl.Pool("train", devices=(0, 1, 2, 3)).size
    4
    >>> fl.Pool("rewards", processes=4).to_json()
    {'processes': 4}
    """

    name: str
    devices: tuple[int, ...] = ()
    processes: int = 0
    device: str = ""
    at: At | None = field(default=None, compare=False, repr=False)
    least: int = 0

    def __post_init__(self) -> None:
        check_source(self.name, self.devices, self.processes, self.device, self.at)
        check_least(self.name, self.least, len(self.devices) or self.processes, self.at)
        object.__setattr__(self, "devices", tuple(self.devices))
        if not self.devices and not self.processes and not self.device:
            object.__setattr__(self, "device", "auto")

    @property
    def size(self) -> int:
        """How many ranks it holds: devices, processes, or 1."""
        return len(self.devices) or self.processes or 1

    def to_json(self) -> dict[str, Any]:
        """As a plan says it: ``{"devices": "0-7"}``, ``{"processes": 4}`` or ``{"device": "auto"}``."""
        least = {"least": self.least} if self.least else {}
        if self.devices:
            return {"devices": numbers(self.devices), **least}
        return {"processes": self.processes, **least} if self.processes else {"device": self.device}


@dataclass(frozen=True)
class Place:
    """Where a worker runs: ``Place("train", mesh=Mesh.of("fsdp=4,tp=2"), backend=...)``.

    In a plan, a place without a mesh has one of replicas (``dp``) over all devices of its pool. ``backend`` is the one
    that trains, or the engine that generates. ``offload``: weights, gradients and optimizer live in host memory and
    come to the device layer by layer. ``options``: those of the engine that are said, by name.

    >>> place = fl.Place("train", mesh=fl.Mesh.of("fsdp=4,tp=2"))
    >>> place.pool, place.mesh.size, place.offload
    ('train', 8, False)
    """

    pool: str
    mesh: Mesh = field(default_factory=Mesh)
    backend: str = REFERENCE
    at: At | None = field(default=None, compare=False, repr=False)
    offload: bool = False
    options: Mapping[str, float | bool | str] = field(default_factory=dict[str, "float | bool | str"], hash=False)

    def to_json(self, use: str = "train") -> dict[str, Any]:
        """``{"pool": "train", "mesh": {"fsdp": 8}, "backend": ...}``; without a mesh where it is a single rank."""
        mesh = {"mesh": dict(self.mesh.said)} if self.mesh.size > 1 else {}
        said = {"pool": self.pool, **mesh, "engine" if use == "generate" else "backend": self.backend}
        return {**said, **({"offload": True} if self.offload else {}), **self.options}


@dataclass(frozen=True)
class Pipeline:
    """How far steps overlap: ``Pipeline(staleness=1, order="fifo", publish="drain", chunks=4)``.

    ``staleness``: how many steps may be open behind the oldest that is not committed. ``order``: ``fifo`` trains each
    step on its own prompts, ``window`` may exchange them for finished ones within the part ``window`` of the open
    prompts. ``publish``: what becomes of running requests, ``drain``, ``interrupt`` or ``continue``. ``chunks``: into
    how many parts row-wise ops are cut. ``deadline``: the seconds that a rank may take to answer; 0 is any time.
    ``copies``: on how many ranks sampled rows are kept, 1 or 2. ``restart``: the seconds in which a lost replica has to
    be started again; then the run goes on with the others. ``hang``: the seconds without any progress after which the
    run ends, and says what it waited for; 0 waits for ever. Raises PlanError for other values.

    >>> fl.Pipeline(staleness=1, chunks=4).to_json()
    {'staleness': 1, 'order': 'fifo', 'publish': 'drain', 'chunks': 4}
    """

    staleness: int = 0
    order: str = "fifo"
    window: float = 0.3
    publish: str = "drain"
    chunks: int = 1
    deadline: float = 0.0
    copies: int = 1
    restart: float = 120.0
    hang: float = 1800.0
    at: Mapping[str, At] = field(default_factory=dict[str, At], compare=False, repr=False)  # by key

    def __post_init__(self) -> None:
        check_pipeline(
            self.to_json() | {"restart": self.restart, "hang": self.hang}, self.at, window_default=type(self).window
        )

    def to_json(self) -> dict[str, Any]:
        """``{"staleness": 0, "order": "fifo", "publish": "drain", "chunks": 1}``; with ``window`` where it counts."""
        said = {"staleness": self.staleness, "order": self.order, "window": self.window}
        said |= {"publish": self.publish, "chunks": self.chunks}
        if self.order == "fifo" and self.window == type(self).window:
            del said["window"]
        said |= {"deadline": self.deadline} if self.deadline else {}
        said |= {"restart": self.restart} if self.restart != type(self).restart else {}
        said |= {"hang": self.hang} if self.hang != type(self).hang else {}
        return {**said, "copies": self.copies} if self.copies != 1 else said


@dataclass(frozen=True, init=False)
class Plan:
    """Pools, a place for each worker and use, and the pipeline; what a plan file says.

    >>> plan = fl.Plan(
    ...     {"train": fl.Pool("train", devices=(0, 1, 2, 3)), "rollout": fl.Pool("rollout", devices=(4, 5, 6, 7))},
    ...     {"actor": {"train": fl.Place("train", fl.Mesh.of("fsdp=4")), "generate": fl.Place("rollout")}},
    ...     cluster=fl.Cluster.of("h100-80:1x8"),
    ... )
    >>> plan.split("actor"), plan.devices("actor", "generate"), str(plan.place_of("actor", "generate").mesh)
    (True, (4, 5, 6, 7), 'dp=4')

    Workers of one pool take turns in program order, pools overlap. A worker without a place goes to the first pool,
    one with a single place has it for both uses. A pool may be given by its device alone (``{"main": "cpu"}``), a
    worker by one Place. Raises PlanError where the parts do not fit each other or the cluster.
    """

    pools: Mapping[str, Pool]
    place: Mapping[str, Mapping[str, Place]]  # by worker, then by use: ``train``, ``generate``
    cluster: Cluster | None
    pipeline: Pipeline
    file: str = field(compare=False)

    def __init__(
        self,
        pools: Mapping[str, Pool | str] | None = None,
        place: Mapping[str, Place | Mapping[str, Place]] | None = None,
        cluster: Cluster | None = None,
        pipeline: Pipeline | None = None,
        file: str = "",
    ) -> None:
        whole = Pool("main", devices=tuple(range(cluster.size)) if cluster else ())
        made = {n: p if isinstance(p, Pool) else Pool(n, device=p) for n, p in (pools or {"main": whole}).items()}
        for name, pool in made.items():
            if pool.name != name:
                raise PlanError(f"pool '{pool.name}' is listed as '{name}'.", at=pool.at, fix="Give it one name.")
            check_devices(pool.name, pool.devices, cluster, pool.at)
        check_disjoint({p.name: (p.devices, p.at) for p in made.values()})
        object.__setattr__(self, "pools", made)
        object.__setattr__(self, "cluster", cluster)
        object.__setattr__(self, "pipeline", pipeline or Pipeline())
        object.__setattr__(self, "file", file)
        uses = {w: {"train": p} if isinstance(p, Place) else dict(p) for w, p in (place or {}).items() if p}
        settled = {w: {u: self._settled(w, u, p, len(by)) for u, p in by.items()} for w, by in uses.items()}
        object.__setattr__(self, "place", settled)
        split: dict[str, tuple[str, Mesh]] = {}
        for worker, there in ((worker, there) for worker, by in settled.items() for there in by.values()):
            if there.mesh.size > there.mesh["dp"]:
                other = split.setdefault(there.pool, (worker, there.mesh))
                check_alike(worker, there.mesh, other, made[there.pool], there.at)

    def _settled(self, worker: str, use: str, place: Place, uses: int) -> Place:
        """A place that fits, its mesh written out."""
        title = worker if uses == 1 else f"{worker}.{use}"
        check_uses(worker, use, place.at)
        check_pool_name(title, place.pool, self.pools, place.at)
        check_backend(title, use, place.backend, place.at)
        check_offload(title, place.backend, place.offload, place.at)
        for name, value in place.options.items():
            check_option(title, place.backend, name, value, place.at)
        check_replicas(title, place.backend, place.mesh, self.pools[place.pool], place.at)
        devices = self.pools[place.pool].devices
        if place.mesh.size == 1 and devices:
            return replace(place, mesh=Mesh({"dp": len(devices)}))
        self.check_mesh(title, place.mesh.axes, place.pool, place.at)
        return place

    def check_mesh(self, title: str, axes: Mapping[str, int], name: str, at: At | None) -> None:
        """Raise PlanError for a mesh that does not take the pool as it is; the fix names devices where there are."""
        pool, cluster = self.pools[name], self.cluster
        if axes and (pool.processes or prod(axes.values()) != pool.size):
            taken = {d for p in self.pools.values() if p.name != name for d in p.devices}
            free = frozenset(range(cluster.size if cluster else 0)) - taken
            refuse_mesh(title, axes, name, pool.devices, pool.processes, free, at)

    def _repr_svg_(self) -> str:
        """The picture, for a notebook."""
        from .show import render

        return render(self, "svg")

    @staticmethod
    def one_process() -> Plan:
        """Return the plan of a run without one: everything in one pool of this process, on a GPU if there is one."""
        return Plan()

    @staticmethod
    def load(path: str | Path, changes: Sequence[str] = ()) -> Plan:
        """Read a plan file, or a shipped plan by its name.

        ``changes``: values in the place of what it says, such as ``pipeline.staleness=1``; the last ones win. Raises
        PlanError with file, line and the nearest right word; UsageError where there is no file.
        """
        from .plan_file import load

        return load(path, changes)

    def but(
        self,
        *,
        pipeline: Pipeline | None = None,
        place: Mapping[str, Mapping[str, Place]] | None = None,
        pools: Mapping[str, Pool] | None = None,
    ) -> Plan:
        """Return the same plan with another pipeline, other places, or pools of other devices."""
        where = (pools or self.pools, place or self.place)
        return Plan(*where, self.cluster, pipeline or self.pipeline, file=self.file)

    def placing(self, worker: str, use: str, place: Place) -> Plan:
        """Return the same plan with another place for one use of a worker."""
        return self.but(place={**self.place, worker: {**self.place.get(worker, {}), use: place}})

    def place_of(self, worker: str, use: str = "train") -> Place:
        """Return the place of a worker when it trains or generates; without one, the first pool.

        A backend that does not generate leaves that to the reference engine: a whole model on each of its devices.
        """
        by_use = self.place.get(worker)
        if by_use:
            place = by_use.get(use) or next(iter(by_use.values()))
            if use == "generate" and use not in by_use and not backend(place.backend).generates:
                return Place(place.pool, Mesh({"dp": self.pools[place.pool].size}), at=place.at)
            return place
        pool = next(iter(self.pools.values()))
        return Place(pool.name, Mesh({"dp": len(pool.devices)}) if pool.devices else Mesh())

    def pool_of(self, worker: str, use: str = "train") -> Pool:
        """Return the pool of a worker when it trains or generates."""
        return self.pools[self.place_of(worker, use).pool]

    def pool(self, worker: str, use: str = "train") -> str:
        """Return the name of the pool of a worker."""
        return self.place_of(worker, use).pool

    def split(self, worker: str) -> bool:
        """Whether it trains and generates in different pools."""
        return self.pool(worker, "train") != self.pool(worker, "generate")

    def devices(self, worker: str, use: str = "train") -> tuple[int, ...]:
        """Return the devices of a worker in the order of its ranks; none where its pool has none of the cluster."""
        return self.pool_of(worker, use).devices

    def device(self, worker: str, use: str = "train") -> str:
        """The device of the worker's first rank as this process names it: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``."""
        pool = self.pool_of(worker, use)
        if not pool.devices or self.cluster is None:
            return pool.device or "cpu"
        first = pool.devices[0]
        return "cpu" if self.cluster.kind(first).name == "cpu" else f"cuda:{first}"

    def _kind(self, place: Place) -> str:
        """The kind of devices of a place, as far as the plan says it; ``cpu`` where they may be cores."""
        devices = self.pools[place.pool].devices
        if devices and self.cluster is not None:
            return self.cluster.kind(devices[0]).name
        named = self.pools[place.pool].device or "auto"
        return "cpu" if named == "auto" else named

    def backend(self, worker: str, use: str = "train") -> str:
        """Return the backend that trains a worker, or its engine."""
        return self.place_of(worker, use).backend

    def title_of(self, worker: str, use: str) -> str:
        """Return what a place of a worker is called in a message: by its use too, where the worker has two."""
        return worker if len(self.place.get(worker, {})) < 2 else f"{worker}.{use}"

    def crosses_nodes(self, place: Place, axis: str) -> bool:
        """Whether ranks of a place that split a model along an axis are on devices of several nodes."""
        return Hardware.of(self.cluster, self.pools[place.pool].devices).crosses(place.mesh, axis)

    def roles(self) -> Iterator[tuple[str, str, Place]]:
        """Yield every (worker, use, place) that the plan states; a worker with one place has it under one use."""
        for worker, by_use in self.place.items():
            for use, place in by_use.items():
                yield worker, use, place

    def check_workers(self, names: Iterable[str], backends: Iterable[str] | None = None) -> None:
        """Raise PlanError for a place of a worker that the flow does not have, or a backend or axis that is not there.

        Without ``backends`` none is asked for, as for a plan that is looked at on another machine.
        """
        known, engines = list(names), None if backends is None else list(backends)
        for name, use, place in self.roles():
            if engines is not None and place.backend not in engines:
                raise PlanError(
                    f"'{name}' is placed with backend '{place.backend}', which is not there.",
                    at=place.at,
                    have=engines,
                    fix=did_you_mean(place.backend, engines),
                )
            row = backend(place.backend)
            unrun = list(row.unrun(place.mesh.said, place.options, self._kind(place)))
            if row.one_node and self.crosses_nodes(place, "tp"):
                tp = place.mesh["tp"]
                what = f"groups of tp={tp} cross nodes, and {row.name} splits a model inside a node alone."
                unrun.append((what, f"Give the pool devices in groups of {tp} of a node, or write dp in place of tp."))
            for what, fix in unrun if engines is not None else ():
                raise PlanError(f"{self.title_of(name, use)}: {what}", at=place.at, fix=fix)
            if name not in known:
                raise PlanError(
                    f"the plan places '{name}', which is no worker of this flow.",
                    at=place.at,
                    have=known,
                    fix=did_you_mean(name, known),
                )

    def to_json(self) -> dict[str, Any]:
        """The plan as a record: ``{"cluster": [...], "pools": {...}, "place": {...}, "pipeline": {...}}``.

        A worker with one place has it directly, else by use. Without a cluster there is no such key.
        """
        cluster = {"cluster": self.cluster.to_json()} if self.cluster else {}
        place: dict[str, Any] = {}
        for worker, by_use in self.place.items():
            by = {use: p.to_json(use) for use, p in by_use.items()}
            place[worker] = by["train"] if list(by) == ["train"] else by
        pools = {n: p.to_json() for n, p in self.pools.items()}
        return {**cluster, "pools": pools, "place": place, "pipeline": self.pipeline.to_json()}

    def to_yaml(self) -> str:
        """Return the text of a plan file that loads to an equal plan."""
        from .plan_file import written

        return written(self)
