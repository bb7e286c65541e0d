"""What is proved of a program under its plan: no deadlock, a place for every rank, memory in every phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..errors import PlanError
from ..lowering.deployment import has_gpus, number_ranks
from .study import Study


def certificate(study: Study) -> tuple[tuple[str, ...], tuple[PlanError, ...]]:
    """Return what is proved, a line each, and what keeps it from being proved.

    The memory of a plan that does not fit is an error of :func:`.check_plan.plan_findings`, which comes first.
    """
    waits = study.waits()
    errors = [*lacking_cores(study)]
    if waits.cycle:
        at = study.plan.pipeline.at.get("staleness")
        errors.insert(0, PlanError(f"the program can come to wait for itself:\n  {waits.text()}", at=at))
    proved = [] if waits.cycle else [waits.text()]
    return (*proved, *([] if errors else _places(study)), *_memory(study)), tuple(errors)


def ranks_of(study: Study) -> dict[str, int]:
    """Return how many ranks each pool has that the program uses; none in one process."""
    if study.runtime != "ray":
        return {}
    used = {deployment.pool for deployment in study.execution.deployments.values()}
    return {pool: len(ranks) for pool, ranks in number_ranks(study.plan, used or None).items()}


def lacking_cores(study: Study) -> Iterator[PlanError]:
    """Yield an error where nodes have fewer cores than ranks: each takes one, beside its GPU if it has one.

    Pools with GPUs are placed first, each rank on the node of its GPU; those of processes take the cores that are left.
    """
    cluster, ranks = study.plan.cluster, ranks_of(study)
    if cluster is None or not ranks or not cluster.cores:
        return
    on_node = Counter(cluster.node(d) for pool in ranks for d in study.plan.pools[pool].devices)
    for node, count in sorted(on_node.items()):
        have = cluster.nodes_of(cluster.devices_of(node)[0]).cores
        if count > have:
            yield PlanError(
                f"node {node} has {have} cores for its {count} ranks with a device, and each takes one.",
                at=next(study.plan.pools[p].at for p in ranks if study.plan.pools[p].devices),
                fix=f"Write cores_per_node: {count} or more if it has them, or use fewer of its devices.",
            )
            return
    total = sum(ranks.values())
    if total > cluster.cores:
        pool = max((p for p in ranks if not study.plan.pools[p].devices), key=lambda p: ranks[p])
        left = ranks[pool] - (total - cluster.cores)
        less = f"Give '{pool}' {left} processes at most, or add nodes." if left > 0 else "Add nodes."
        yield PlanError(
            f"the {total} ranks of this plan take a core each, {ranks[pool]} of them for pool '{pool}', and the "
            f"{cluster.nodes} nodes have {cluster.cores}.",
            at=study.plan.pools[pool].at,
            fix=less,
        )


def _places(study: Study) -> Iterator[str]:
    ranks, cluster = ranks_of(study), study.plan.cluster
    if not ranks:
        return
    each = ", ".join(f"{count} of '{pool}'" for pool, count in ranks.items())
    total = sum(ranks.values())
    if cluster is None:
        yield f"every rank has a place: {each}, as processes of one machine"
        return
    gpus = sum(count for pool, count in ranks.items() if has_gpus(study.plan, pool))
    taken = f"{gpus} of {cluster.size} devices" if gpus else "no device"
    if cluster.cores:
        yield f"every rank has a place: {each}; they take {taken} and {total} of {cluster.cores} cores"
    else:
        yield (
            f"every rank has a place if {total} cores are there: {each}; they take {taken}, and the plan does not say "
            "how many cores_per_node there are"
        )


def _memory(study: Study) -> Iterator[str]:
    """Say of each pool whose devices are known, and of each host, what each phase takes; nothing without all sizes."""
    for name, memory in study.pool_memory.items() if study.has_sizes else ():
        if not (turns := study.turns(name)):
            continue
        phases: dict[str, float] = {}
        for moment in memory.timeline(turns).moments:
            phases[moment.title] = max(phases.get(moment.title, 0.0), moment.total)
        said = ", ".join(f"{title} {size / 1e9:.1f}" for title, size in phases.items())
        yield f"memory of pool '{name}' ({memory.device}), of {memory.memory / 1e9:.1f} GB on each device: {said}"
    for use in study.host_memory if study.has_sizes else ():
        of = "of a host whose memory is not known" if use.has is None else f"of {use.has / 1e9:.1f} GB"
        said = "; ".join(
            f"{name}: " + ", ".join(f"{phase} {sum(parts.values()) / 1e9:.1f}" for phase, parts in phases.items())
            for name, phases in use.pools.items()
        )
        yield f"host memory of {use.where} ({use.device}), {of}, GB: {said}"
