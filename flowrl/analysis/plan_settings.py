"""Which settings of a plan make its step shorter: chunks, publishes, staleness, further devices, caches, offload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ..placement.backends import backend
from ..placement.cluster.mesh import Mesh
from ..placement.plan.plan import Place, Plan
from ..placement.search.find_placement import Refined
from .call_seconds import prompts_of
from .check_plan import plan_findings
from .study import Study

CHUNKS = (1, 2, 4, 8)
ROUNDS = 2  # through all settings, as one may make room for another
_WORTH = 0.001  # of a step; of settings closer to each other the plainest is taken
_GIB = 1 << 30

Simulated = Callable[[Plan], float]
Variants = Iterator[tuple[str, Plan]]  # what is said, and the plan that says it, the plainest first


def refined(study: Study, plan: Plan, seconds: float, staleness: Sequence[int], simulated: Simulated) -> Refined:
    """Return the plan with the settings that make its step shortest, one after the other, and what each of them is.

    ``seconds``: its step, as it is ``simulated``. What ``flowrl check`` refuses is not tried.
    """
    known, said = [(plan, seconds)], dict[str, str]()
    for _ in range(ROUNDS):
        before = plan
        for name, variants in _settings(study.under(plan), staleness):
            tried = list(_timed(study, variants, known, simulated))
            least = min((s for _, _, s in tried), default=seconds)
            if not tried or least >= seconds * (1 - _WORTH):
                continue
            word, plan, seconds = next(one for one in tried if one[2] <= least * (1 + _WORTH))
            said[name] = word
        if plan == before:
            break
    return Refined(plan, seconds, len(known) - 1, tuple(said.values()))


def _timed(
    study: Study, variants: Iterable[tuple[str, Plan]], known: list[tuple[Plan, float]], simulated: Simulated
) -> Iterator[tuple[str, Plan, float]]:
    """Yield the variants that check accepts with their steps, each simulated once."""
    for word, plan in variants:
        seconds = next((s for other, s in known if other == plan), None)
        if seconds is None:
            if plan_findings(study.under(plan))[0]:
                continue
            seconds = simulated(plan)
            known.append((plan, seconds))
        yield word, plan, seconds


def _settings(study: Study, staleness: Sequence[int]) -> Iterator[tuple[str, Variants]]:
    """Yield the settings of a plan by name, each with all of its values."""
    yield "chunks", _chunks(study)
    yield "staleness", _staleness(study, staleness)
    yield "publish", _publishes(study)
    for worker, use, place in list(study.plan.roles()):
        if use == "generate":
            yield f"{worker} devices", _other_kinds(study, worker, place)
            yield f"{worker} kv_cache", _caches(study, worker, place)
        elif backend(place.backend).offload:
            yield f"{worker} offload", _offload(study, worker, use, place)


def _chunks(study: Study) -> Variants:
    most = min((prompts_of(m) for m in study.calls.values() if m.call.op.cost == "generate" and m.rows), default=1)
    for chunks in CHUNKS:
        if chunks <= most:
            pipeline = replace(study.plan.pipeline, chunks=chunks)
            yield f"chunks: {chunks}", study.plan.but(pipeline=pipeline)


def _staleness(study: Study, staleness: Sequence[int]) -> Variants:
    if study.plan.pipeline.staleness:  # else its steps do not overlap, or this is another plan that is looked at too
        for bound in sorted(s for s in staleness if s):
            pipeline = replace(study.plan.pipeline, staleness=bound)
            yield f"staleness: {bound}", study.plan.but(pipeline=pipeline)


def _publishes(study: Study) -> Variants:
    """What every engine of the plan does with running requests, as its backend's row says."""
    rows = [backend(place.backend) for _, use, place in study.plan.roles() if use == "generate"]
    if study.plan.pipeline.staleness and rows:
        for mode in rows[0].publishes:
            if all(mode in row.publishes for row in rows):
                yield f"publish: {mode}", study.plan.but(pipeline=replace(study.plan.pipeline, publish=mode))


def _other_kinds(study: Study, worker: str, place: Place) -> Variants:
    """Further replicas of an engine on devices of another kind that no pool has, whole ones inside nodes."""
    plan, cluster, pool = study.plan, study.plan.cluster, study.plan.pools[place.pool]
    alone = [p for _, _, p in plan.roles() if p.pool == place.pool] == [place]
    replicas = place.mesh["pp"] == 1 and place.mesh.data == place.mesh["dp"]  # further ones are behind the others
    if cluster is None or not alone or not pool.devices or not replicas:
        return
    size = place.mesh.size // place.mesh["dp"]
    free = set(range(cluster.size)) - {device for each in plan.pools.values() for device in each.devices}
    kinds = {cluster.kind(device).name for device in pool.devices}
    yield f"{worker} on {len(pool.devices)} devices of one kind", plan
    for kind in dict.fromkeys(cluster.kind(device).name for device in sorted(free)):
        more: list[int] = []
        for node in range(cluster.nodes):
            here = [device for device in cluster.devices_of(node) if device in free]
            more += here[: len(here) // size * size] if here and cluster.kind(here[0]).name == kind else []
        if kind in kinds or not more:
            continue
        wider = Mesh({**place.mesh.axes, "dp": place.mesh["dp"] + len(more) // size})
        pools = {**plan.pools, pool.name: replace(pool, devices=(*pool.devices, *more))}
        places = {**plan.place, worker: {**plan.place[worker], "generate": replace(place, mesh=wider)}}
        yield f"{worker} also on {len(more)} x {kind}", plan.but(pools=pools, place=places)


def _caches(study: Study, worker: str, place: Place) -> Variants:
    """Smaller KV caches, beside which others need not leave the devices; a wave of rows more for each."""
    memory = study.pool_memory.get(place.pool)
    usage = None if memory is None else memory.residents.get(f"{worker}.generate")
    options = {option.name for option in backend(place.backend).options}
    if usage is None or not usage.rows or not usage.row or "kv_cache" not in options:
        return
    if place.pool not in study.memory:
        return  # nobody leaves
    for waves in (1, 2, 3, 4, 6, 8):
        size = -(-usage.rows // waves) * usage.row
        said = -(-size // (_GIB / 4)) / 4  # whole quarters of a GiB
        options = {**place.options, "kv_cache": said}
        yield f"{worker} kv_cache: {said:g}", study.plan.placing(worker, "generate", replace(place, options=options))


def _offload(study: Study, worker: str, use: str, place: Place) -> Variants:
    """Weights, gradients and optimizer in host memory, where a pool is too small for all."""
    if place.pool in study.memory:
        for word in (False, True):
            yield (
                f"{worker} offload: {str(word).lower()}",
                study.plan.placing(worker, use, replace(place, offload=word)),
            )
