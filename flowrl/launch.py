"""What opens the workers of a run: this process, or ranks on Ray, each as the lowered programs say."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .backends import open_engine, open_tokenizer
from .backends.check_here import check_here
from .errors import UsageError
from .lowering.deployment import (
    Deployment,
    has_gpus,
    has_model,
    number_ranks,
    replicas_apart,
    teams_of,
    teams_on_one_node,
    with_engine_options,
    with_policies,
)
from .lowering.lower import Execution
from .runtime.local.executor import LocalExecutor

if TYPE_CHECKING:
    from .runtime.distributed.executor import DistributedExecutor


def launch(
    executions: Sequence[Execution], handles: Sequence[Any], *, out: Path, seed: int = 0, address: str | None = None
) -> LocalExecutor | DistributedExecutor:
    """Return what opens the workers of programs that are run one after another, all under one plan.

    Nothing is started yet. Raises UsageError where Ray is asked for and not installed, and for an ``address`` of a
    Ray cluster where the runtime is another one; PlanError for a device or an engine that this machine lacks.
    """
    on_ranks = executions[0].runtime == "ray"
    used = {name for execution in executions for name in execution.workers}
    models = {handle.name for handle in handles if handle.name in used and has_model(handle)}
    if address is None:  # other machines of a cluster may have what this one lacks
        check_here(executions[0].plan, _deployments(executions), models, in_this_process=not on_ranks)
    if on_ranks:
        return _on_ranks(executions, handles, out=out, seed=seed, address=address)
    if address is not None:
        raise UsageError(
            f"--address {address} is for --runtime ray, and the runtime is {executions[0].runtime}.",
            fix='Add --runtime ray (runtime="ray" in Python), or leave the address out.',
        )
    declared = {h.name: h for h in handles}
    return LocalExecutor(declared, open_engine, deployments=_deployments(executions), seed=seed)


def _on_ranks(
    executions: Sequence[Execution], handles: Sequence[Any], *, out: Path, seed: int, address: str | None
) -> DistributedExecutor:
    from .runtime.distributed.executor import DistributedExecutor

    plan, deployments = executions[0].plan, replicas_apart(_deployments(executions))
    pools = number_ranks(plan, {d.pool for d in deployments.values()} or None)
    try:
        cluster = import_module("flowrl.runtime.distributed.ray.start_ranks")  # by name: Ray is imported nowhere else
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--runtime ray needs '{error.name}', which is not installed.",
            fix="Install flowrl with its extra: pip install '.[ray]' in the source tree.",
        ) from error
    places: list[Any] = []
    for name, ranks in pools.items():
        teams, gpus = teams_of(deployments, name), int(has_gpus(plan, name))
        team, near = max(map(len, teams), default=1), teams_on_one_node(deployments, name)
        places.append(cluster.PoolOfRanks(name, ranks, gpus, plan.pools[name].least, team, near))
    ranks = cluster.RayRanks(places, address=address)
    return DistributedExecutor(
        {h.name: h for h in handles},
        ranks,
        deployments=deployments,
        pools=pools,
        open_engine=open_engine,
        open_tokenizer=open_tokenizer,
        out=out,
        seed=seed,
        deadline=plan.pipeline.deadline or None,
        staleness=plan.pipeline.staleness,
        copies=plan.pipeline.copies,
        patience=plan.pipeline.restart,
        least={name: pool.least for name, pool in plan.pools.items() if pool.least},
        swapped=frozenset[str]().union(*(execution.swapped for execution in executions)),
    )


def _deployments(executions: Sequence[Execution]) -> dict[tuple[str, bool], Deployment]:
    """Return where workers are in any of the programs: equal copies of theirs are one, with the policies of all.

    An engine has what all programs leave it of its devices.
    """
    found: dict[tuple[str, bool], Deployment] = {}
    for execution in executions:
        known = {name: deployment.spec.policies for (name, _), deployment in found.items()}
        found |= with_policies(execution.deployments, known)
    return with_engine_options(found, [execution.engines for execution in executions])
