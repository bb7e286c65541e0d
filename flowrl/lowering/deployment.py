"""Where each worker of a flow stands on ranks, as its plan says it; what ranks cannot do is said before they start."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..errors import PlanError
from ..placement.cluster.cluster import Cluster
from ..placement.cluster.mesh import DATA_AXES, Mesh
from ..placement.plan.plan import Place, Plan, Pool
from ..placement.plan.rules import TRAIN_ONLY
from ..runtime.distributed.open_groups import Stand
from ..runtime.distributed.protocol import Post
from .roles import HandleLike

COLLECTIVE = TRAIN_ONLY  # backends whose ranks compute together


def pools_on_ranks(plan: Plan, used: Collection[str] | None = None) -> dict[str, tuple[int, ...]]:
    """The numbers of the ranks of each pool, counted over pools in the order of the plan."""
    found: dict[str, tuple[int, ...]] = {}
    count = 0
    for name, pool in plan.pools.items():
        if used is not None and name not in used:
            continue
        found[name] = tuple(range(count, count + pool.size))
        count += pool.size
    return found


def stands_of(
    handles: Sequence[HandleLike], plan: Plan, *, trained: Collection[str], sampled: Collection[str]
) -> dict[tuple[str, bool], Stand]:
    """For each worker, and for each copy that only generates, its pool and what it is there.

    ``trained`` and ``sampled``: workers whose weights change, and those that generate. A copy of its own generates
    where pool, mesh or backend differ, where steps overlap, and where the backend cannot generate. Raises PlanError
    for what no rank can do.
    """
    found: dict[tuple[str, bool], Stand] = {}
    for handle in handles:
        name, model = handle.name, hasattr(handle.cls, "build")
        place = plan.place_of(name, "train")
        found[name, False] = _stand(name, plan, place, model=model, trains=name in trained)
        if name not in sampled or not model:
            continue
        serving = plan.place_of(name, "generate")
        apart = serving.pool != place.pool or serving.backend != place.backend or serving.mesh != place.mesh
        if apart or (plan.pipeline.staleness and name in trained):
            found[name, True] = _stand(name, plan, serving, model=True, trains=False, serving=True)
    return found


def _stand(name: str, plan: Plan, place: Place, *, model: bool, trains: bool, serving: bool = False) -> Stand:
    pool, mesh = plan.pools[place.pool], place.mesh
    collective = model and place.backend in COLLECTIVE
    if model and not collective:
        _check_replicas(name, place, pool, mesh, trains=trains, serving=serving)
    places = _places(mesh) if collective else tuple(range(pool.size))
    axes = dict(mesh.axes) if collective else {}
    post = Post(name, serving, place.backend, _device(plan, pool), axes, collective, place.offload)
    return Stand(place.pool, post, places)


def _check_replicas(name: str, place: Place, pool: Pool, mesh: Mesh, *, trains: bool, serving: bool) -> None:
    """An engine of its own on every rank holds the whole model, and does not train with the others."""
    if trains and pool.size > 1:
        raise PlanError(
            f"'{name}' is trained by '{place.backend}' on {pool.size} devices, and that backend trains on one.",
            at=place.at,
            fix="Write backend: fsdp2, with mesh: {fsdp: " + str(pool.size) + "}.",
        )
    split = {a: n for a, n in mesh.axes.items() if a != "dp"}
    if split:
        what = " x ".join(f"{a}={n}" for a, n in split.items())
        fix = f"Write mesh: {{dp: {pool.size}}}." if serving else f"Write backend: fsdp2, or mesh: {{dp: {pool.size}}}."
        raise PlanError(
            f"'{name}': '{place.backend}' holds whole models, and cannot be split by {what}.", at=place.at, fix=fix
        )


def _places(mesh: Mesh) -> tuple[int, ...]:
    """For each rank of a mesh the part of the rows that it has."""
    found: list[int] = []
    for rank in range(mesh.size):
        at, place = mesh.coordinates(rank), 0
        for axis in DATA_AXES:
            place = place * mesh[axis] + at.get(axis, 0)
        found.append(place)
    return tuple(found)


def _device(plan: Plan, pool: Pool) -> str:
    """What a rank of a pool calls its device: Ray shows it one GPU, where the pool has some."""
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


def devices_by_pool(plan: Plan, names: Mapping[str, Sequence[int]]) -> dict[str, bool]:
    """For each pool whether its ranks have GPUs."""
    return {name: _device(plan, plan.pools[name]).startswith("cuda") for name in names}
