"""Where each worker of a flow is under a plan: in which pool, by which backend, with which part of the rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import PlanError
from ..graph.tracing.trace_records import HandleLike
from ..placement.backends import REFERENCE, backend
from ..placement.cluster.cluster import Cluster
from ..placement.cluster.mesh import DATA_AXES, Mesh
from ..placement.plan.plan import Place, Plan, Pool


@dataclass(frozen=True)
class WorkerSpec:
    """What a copy of a worker is: ``WorkerSpec("actor", backend=..., axes={"fsdp": 4, "tp": 2})``.

    ``serving``: the copy that only generates. ``device`` is what its process calls it.
    """

    worker: str
    serving: bool = False
    backend: str = REFERENCE
    device: str = "cpu"
    axes: Mapping[str, int] = field(default_factory=dict[str, int])
    collective: bool = False  # its ranks compute together; otherwise each for itself
    offload: bool = False
    options: Mapping[str, float | bool | str] = field(default_factory=dict[str, "float | bool | str"])  # of its engine
    policies: tuple[str, ...] = ()  # workers that its ops are handed

    @property
    def key(self) -> tuple[str, bool]:
        """By what a rank knows it."""
        return self.worker, self.serving

    @property
    def size(self) -> int:
        """How many ranks have a whole copy of its model together."""
        return Mesh(self.axes).size if self.collective else 1


@dataclass(frozen=True)
class Deployment:
    """Where a copy of a worker is: ``Deployment("train", WorkerSpec("actor", axes={"fsdp": 2}), shares=(0, 1))``.

    ``shares``: for each rank of the pool the part of the rows that it has.

    >>> engine = Deployment("rollout", WorkerSpec("actor", axes={"tp": 2}, collective=True), shares=(0, 0, 1, 1))
    >>> engine.teams
    ((0, 1), (2, 3))
    """

    pool: str
    spec: WorkerSpec
    shares: tuple[int, ...] = (0,)

    @property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        """The places in the pool whose ranks compute together: all of them, or those of each replica."""
        places = range(len(self.shares))
        if not self.spec.collective:
            return tuple((place,) for place in places)
        if self.spec.size == len(self.shares):
            return (tuple(places),)
        return tuple(tuple(p for p in places if self.shares[p] == share) for share in dict.fromkeys(self.shares))


Deployments = Mapping[tuple[str, bool], Deployment]  # by worker, and whether it is the copy that generates
EngineOptions = Mapping[str, Mapping[str, float]]  # by worker: {"actor": {"kv_cache": 41.25, "rows": 512}}


def deploy_here(handles: Sequence[HandleLike], plan: Plan, *, apart: Collection[str]) -> Deployments:
    """Return where workers are in this process. ``apart``: those that generate with a copy of their own."""
    deployments: dict[tuple[str, bool], Deployment] = {}
    for name in (handle.name for handle in handles):
        for serving in (False, True) if name in apart else (False,):
            use = "generate" if serving else "train"
            stated = plan.place.get(name, {}).get(use, plan.place_of(name))  # else its one engine does both
            spec = WorkerSpec(name, serving, stated.backend, plan.device(name, use), options=stated.options)
            deployments[name, serving] = Deployment(plan.pool(name, use), spec)
    return deployments


def deploy_on_ranks(
    handles: Sequence[HandleLike], plan: Plan, *, trained: Collection[str], sampled: Collection[str]
) -> Deployments:
    """Return where workers are with a process for each device.

    ``trained`` and ``sampled``: workers whose weights change, and those that generate. A copy of its own generates
    where pool, mesh or backend differ, where steps overlap, and where the backend cannot generate.
    """
    deployments: dict[tuple[str, bool], Deployment] = {}
    for handle in handles:
        name, model = handle.name, has_model(handle)
        place = plan.place_of(name, "train")
        deployments[name, False] = _deployment(name, plan, place, model=model)
        if name not in sampled or not model:
            continue
        serving = plan.place_of(name, "generate")
        apart = serving.pool != place.pool or serving.backend != place.backend or serving.mesh != place.mesh
        if apart or (plan.pipeline.staleness and name in trained):
            deployments[name, True] = _deployment(name, plan, serving, model=True, serving=True)
    return deployments


def with_policies(
    deployments: Deployments, handed: Mapping[str, Collection[str]]
) -> dict[tuple[str, bool], Deployment]:
    """Return deployments whose workers know which others their ops are handed, besides those that they know."""
    found = dict(deployments)
    for key, each in deployments.items():
        if more := [name for name in handed.get(key[0], ()) if name not in each.spec.policies]:
            found[key] = replace(each, spec=replace(each.spec, policies=(*each.spec.policies, *more)))
    return found


def with_engine_options(deployments: Deployments, said: Iterable[EngineOptions]) -> dict[tuple[str, bool], Deployment]:
    """Return deployments whose engines have options that a plan leaves open.

    Of several programs that have the same engine, the smallest cache of keys and values and the most rows.
    """
    least: dict[str, dict[str, float]] = {}
    for worker, options in (each for engines in said for each in engines.items()):
        known = least.setdefault(worker, dict(options))
        for name, size in options.items():
            known[name] = (min if name == "kv_cache" else max)(size, known[name])
    found = dict(deployments)
    for key, each in deployments.items():
        if key[0] in least and backend(each.spec.backend).keeps_cache:
            found[key] = replace(each, spec=replace(each.spec, options={**least[key[0]], **each.spec.options}))
    return found


def replicas_apart(deployments: Deployments) -> dict[tuple[str, bool], Deployment]:
    """Return deployments in which each replica of a split engine that only generates computes without the others.

    Not where another worker of its pool needs all ranks together: a process has one such group.
    """
    found = dict(deployments)
    for pool in {each.pool for each in deployments.values()}:
        there = {key: each for key, each in deployments.items() if each.pool == pool and each.spec.collective}
        trains = any(backend(each.spec.backend).trains for each in there.values())
        alike = len({each.shares for each in there.values()}) == 1
        for key, each in there.items() if alike and not trains else ():
            axes = {axis: size for axis, size in each.spec.axes.items() if axis != "dp"}
            found[key] = replace(each, spec=replace(each.spec, axes=axes))
    return found


def teams_of(deployments: Deployments, pool: str) -> tuple[tuple[int, ...], ...]:
    """Return the places in a pool by who computes together; none where each rank is by itself."""
    return next((each.teams for each in deployments.values() if each.pool == pool and each.spec.collective), ())


def teams_on_one_node(deployments: Deployments, pool: str) -> bool:
    """Whether each team of a pool has to be on one node, by the engine that its ranks split."""
    split = [each.spec for each in deployments.values() if each.pool == pool and each.spec.collective]
    alike = len({tuple(spec.axes.items()) for spec in split}) == 1
    return alike and all(backend(spec.backend).one_node for spec in split)


def number_ranks(plan: Plan, used: Collection[str] | None = None) -> dict[str, tuple[int, ...]]:
    """Return the numbers of the ranks of each pool, counted over pools in the order of the plan."""
    ranks: dict[str, tuple[int, ...]] = {}
    count = 0
    for name, pool in plan.pools.items():
        if used is not None and name not in used:
            continue
        ranks[name] = tuple(range(count, count + pool.size))
        count += pool.size
    return ranks


def has_model(handle: HandleLike) -> bool:
    """Whether a worker has a model, so that it asks for an engine."""
    return hasattr(handle.cls, "build")


def has_gpus(plan: Plan, pool: str) -> bool:
    """Whether the ranks of a pool have GPUs."""
    return _device(plan, plan.pools[pool]).startswith("cuda")


def _deployment(name: str, plan: Plan, place: Place, *, model: bool, serving: bool = False) -> Deployment:
    pool, mesh = plan.pools[place.pool], place.mesh
    row = backend(place.backend)
    replicas = not row.trains and not any(mesh[axis] > 1 for axis in row.axes if axis != "dp")
    collective = model and row.collective and not replicas
    shares = _shares(mesh) if collective else tuple(range(pool.size))
    axes = dict(mesh.said) if collective else {}
    spec = WorkerSpec(name, serving, place.backend, _device(plan, pool), axes, collective, place.offload, place.options)
    return Deployment(place.pool, spec, shares)


def _shares(mesh: Mesh) -> tuple[int, ...]:
    """For each rank of a mesh the part of the rows that it has."""
    shares: list[int] = []
    for rank in range(mesh.size):
        at, share = mesh.coordinates(rank), 0
        for axis in DATA_AXES:
            share = share * mesh[axis] + at.get(axis, 0)
        shares.append(share)
    return tuple(shares)


def _device(plan: Plan, pool: Pool) -> str:
    """Return what a rank of a pool calls its device: Ray shows it one GPU, where the pool has some."""
    if pool.processes:
        return "cpu"
    if not pool.devices or plan.cluster is None:
        return "cuda:0" if (_has_gpu() if pool.device in ("", "auto") else pool.device != "cpu") else "cpu"
    return "cpu" if plan.cluster.kind(pool.devices[0]).name == "cpu" else "cuda:0"


def _has_gpu() -> bool:
    """Whether this machine has a GPU, of a kind that is known or not."""
    try:
        return Cluster.auto().kind(0).name != "cpu"
    except PlanError:
        return True
