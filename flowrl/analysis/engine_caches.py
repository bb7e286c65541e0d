"""The KV cache of each engine, and its rows at once: as the plan says, or what others leave it on its GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lowering.deployment import EngineOptions, has_gpus
from ..placement.backends import backend
from ..placement.plan.plan import Place, Plan

if TYPE_CHECKING:
    from .study import Study

_MOST_ROWS = 1024  # of a replica in one batch, unless a plan says more
_MIB = 1 << 20
_GIB = 1 << 30


def engine_options(study: Study) -> EngineOptions:
    """Return what engines are opened with where the plan leaves it to the memory of their devices, by worker.

    On GPUs of a cluster the KV cache is all that others leave it, and a batch has all rows of a replica. Elsewhere an
    engine takes its defaults.
    """
    found: dict[str, dict[str, float]] = {}
    if not any(leaves_cache(study.plan, place) for _, _, place in study.plan.roles()):
        return found
    for pool, memory in study.pool_memory.items() if study.has_sizes else ():
        turns = study.turns(pool)
        for name, usage in memory.residents.items() if turns and memory.fits(turns) is None else ():
            place = study.plan.place_of(usage.role, usage.use)
            if usage.keeps and leaves_cache(study.plan, place):
                size = memory.cache(name, turns, in_turns=study.runtime == "ray")
                rows = max(int(backend(place.backend).default("rows")), min(usage.rows, _MOST_ROWS))
                found[usage.role] = {"kv_cache": size // _MIB / 1024, "rows": rows}
    return found


def cache_of(study: Study, worker: str) -> float | None:
    """Return the bytes of the KV cache of a worker's engine on each device in a run.

    None where its pool does not fit, or where the engine has no such cache.
    """
    place = study.plan.place_of(worker, "generate")
    if not backend(place.backend).keeps_cache:
        return None
    if leaves_cache(study.plan, place):
        left = study.engine_options.get(worker, {}).get("kv_cache")
        return None if left is None else left * _GIB
    return float(place.options.get("kv_cache") or backend(place.backend).default("kv_cache")) * _GIB


def leaves_cache(plan: Plan, place: Place) -> bool:
    """Whether the plan leaves the KV cache of an engine to the memory of its devices."""
    if not backend(place.backend).keeps_cache or "kv_cache" in place.options:
        return False
    known = plan.cluster is not None and bool(plan.pools[place.pool].devices)
    return known and has_gpus(plan, place.pool)
