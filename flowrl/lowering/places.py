"""What a run has its workers opened by: this process, or ranks on Ray."""

from __future__ import annotations

from collections.abc import Container, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends import open_engine, open_tokenizer
from ..errors import UsageError
from ..graph.terms import Traced
from ..placement.plan.plan import Plan
from ..runtime.local.executor import LocalExecutor
from .deployment import devices_by_pool, pools_on_ranks, stands_of
from .scheme import sampled_workers, trained_workers

if TYPE_CHECKING:
    from ..runtime.distributed.executor import DistributedExecutor


def workplace(handles: Sequence[Any], plan: Plan, *, seed: int = 0) -> LocalExecutor:
    """Everything in this process."""
    known = [h.name for h in handles]
    return LocalExecutor(
        declared={h.name: h for h in handles},
        open_engine=open_engine,
        backends={n: plan.backend(n) for n in known},
        devices={n: plan.device(n, "train") for n in known},
        serving_devices={n: plan.device(n, "generate") for n in known},
        pools={n: plan.place_of(n, "train").pool for n in known},
        seed=seed,
    )


def on_ranks(
    handles: Sequence[Any],
    plan: Plan,
    traces: Sequence[Traced],
    *,
    out: str | Path,
    seed: int = 0,
    address: str | None = None,
    swapped: Container[str] = (),
) -> DistributedExecutor:
    """A process on Ray for each device of the plan. Raises UsageError where Ray is not installed.

    ``swapped``: the workers that take turns in the memory of their pool.
    """
    from ..runtime.distributed.executor import DistributedExecutor

    trained = frozenset[str]().union(*(trained_workers(t) for t in traces))
    sampled = frozenset[str]().union(*(sampled_workers(t) for t in traces))
    stands = stands_of(handles, plan, trained=trained, sampled=sampled)
    pools = pools_on_ranks(plan, {s.pool for s in stands.values()} or None)
    try:
        cluster = import_module("flowrl.runtime.distributed.ray.cluster")  # by name: Ray is imported nowhere else
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--runtime ray needs '{error.name}', which is not installed.",
            fix="Install flowrl with its extra: pip install '.[ray]' in the source tree.",
        ) from error
    gpus = devices_by_pool(plan, pools)
    ranks = cluster.RayRanks(
        [cluster.PoolOfRanks(n, r, gpus=int(gpus[n])) for n, r in pools.items()],
        address=address,
    )
    return DistributedExecutor(
        {h.name: h for h in handles},
        ranks,
        stands=stands,
        pools=pools,
        open_engine=open_engine,
        open_tokenizer=open_tokenizer,
        out=Path(out),
        seed=seed,
        deadline=plan.pipeline.deadline or None,
        swapped=swapped,
    )
