"""The engine of the policy that is evaluated: that of ``--engine``, or where a plan has a worker generate."""

from __future__ import annotations

from dataclasses import replace

from ...backends import names as engines
from ...backends.check_here import check_here
from ...errors import PlanError, UsageError, did_you_mean
from ...lowering.deployment import Deployment, WorkerSpec
from ...placement.backends import backend, names_of
from ...placement.plan.plan import Place, Plan

#: What an evaluation calls its policy.
POLICY = "policy"


def find_engine(file: str | None, engine: str | None) -> WorkerSpec:
    """Return how the policy is opened in this process: by which backend, on which device, with which options.

    ``file`` is a plan, or the name of a shipped one; ``engine`` takes the place of the engine that it names. Raises
    UsageError for an engine that does not generate, and PlanError, with the line of the plan, for options that the
    engine does not have, for more than one device, for what this machine lacks, and where it is not known which place
    is that of the policy.
    """
    plan = Plan.one_process() if file is None else Plan.load(file)
    worker = _worker_of(plan)
    place, pool = plan.place_of(worker, "generate"), plan.pool_of(worker, "generate")
    if engine is not None:
        place = replace(place, backend=_generating(engine))
    if pool.size > 1:
        title = plan.title_of(worker, "generate")
        what = f"{title}: flowrl eval opens one engine, and pool '{pool.name}' has {pool.size} ranks."
        fix = f"Give the pool one, or write --engine {place.backend} in place of --plan."
        raise PlanError(what, at=place.at, fix=fix)
    own = Plan({pool.name: pool}, {worker: {"generate": place}}, plan.cluster, file=plan.file)
    own.check_workers([worker], engines())
    spec = WorkerSpec(worker, False, place.backend, own.device(worker, "generate"), options=place.options)
    check_here(own, {spec.key: Deployment(pool.name, spec)}, [worker], in_this_process=True)
    return spec


def _generating(engine: str) -> str:
    """Return the name of an engine that generates. Raises UsageError for another one."""
    known = [name for name in names_of("generate") if backend(name).built]
    if engine not in known:
        fix = did_you_mean(engine, known, form="Write --engine {}.")
        raise UsageError(f"--engine {engine} is no engine that generates.", have=known, fix=fix)
    return engine


def _worker_of(plan: Plan) -> str:
    """Return the worker whose place the policy takes: its own, else the only one that the plan has generate.

    A place for no use in particular may be one to generate, and that of a reward: PlanError where it is not known.
    """
    if POLICY in plan.place or not plan.place:
        return POLICY
    found = [worker for worker, by_use in plan.place.items() if "generate" in by_use]
    if len(found) > 1:
        at: Place = plan.place_of(found[1], "generate")
        what = f"the plan has {' and '.join(found)} generate, and one policy is evaluated."
        raise PlanError(what, at=at.at, fix=f"Call the place of the one that is evaluated '{POLICY}'.")
    others = [worker for worker in plan.place if worker not in found]
    if not found or (others and "train" not in plan.place[found[0]]):  # a judge generates and does not train
        who = f"{found[0]} alone generate, which does not train" if found else "no worker generate"
        what = f"the plan has {who}: it does not say where the policy is."
        raise PlanError(what, at=plan.place_of(others[0]).at, fix=f"Add {POLICY}: {{generate: {{pool: ...}}}}.")
    return found[0]
