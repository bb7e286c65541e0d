"""What is wrong with a plan for a program, found before any device is touched: every finding in one go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..errors import At, CheckError, FlowError, ModelError, PlanError
from ..graph.check_program import stale
from ..graph.may_see_older_weights import samples, trained_on
from ..graph.tracing.trace_records import Lint, each_once
from ..lowering.engine_refusals import refusals, refusals_of_use
from ..placement.backends import BACKENDS, backend
from ..placement.cost.work import Role
from ..placement.cost.worker_memory import RESERVE_BYTES
from ..placement.model.weight_layout import check_layout
from ..placement.plan.plan import Place
from .call_seconds import prompts_of
from .study import Study


def plan_findings(study: Study) -> tuple[list[FlowError], list[Lint]]:
    """Errors and remarks on a plan, for a program that has no errors of its own."""
    findings: list[FlowError | Lint] = [*stale(study.traced, study.plan.pipeline.staleness)]
    checks: list[Callable[[Study], Iterable[FlowError | Lint]]] = [_pipeline, _unused, _processes, _rows, _support]
    sized = any(pool.devices for pool in study.plan.pools.values())
    if sized:
        try:
            study.roles  # noqa: B018  the sizes of all models
        except ModelError as error:
            sized = False
            what = f"{error.what} Memory and divisibility are not checked."
            findings.append(Lint("size", what, error.at or _file(study)))
    checks += [_models, Study.unsupported, _backends, _memory, _nodes] if sized else [Study.unsupported]
    findings = each_once([*findings, *(finding for check in checks for finding in check(study))])
    return [f for f in findings if isinstance(f, FlowError)], [f for f in findings if isinstance(f, Lint)]


def refuse(study: Study, *, planned: bool) -> None:
    """Raise what keeps a program from running: what its runtime cannot do, and errors of a plan that it was given."""
    if refused := study.unsupported():
        raise refused[0] if len(refused) == 1 else CheckError(refused)
    if planned and (errors := plan_findings(study)[0]):
        raise CheckError(errors)


def _file(study: Study) -> At:
    return At(study.plan.file or "<plan>", 0)


def _places(study: Study) -> Iterator[tuple[str, str, Place, Role]]:
    """Places of workers with a model, that the program uses for what they are placed for."""
    used = {(work.role.name, "generate" if work.kind == "generate" else "train") for work in study.works.values()}
    for worker, use in sorted(used):
        role = study.roles[worker]
        if role.model is not None:
            yield worker, use, study.plan.place_of(worker, use), role


# -- models on meshes --------------------------------------------------------------------------------------------------


def _models(study: Study) -> Iterator[FlowError | Lint]:
    for worker, use, place, role in _places(study):
        assert role.model is not None, "places of workers with a model"
        title = study.plan.title_of(worker, use)
        if place.mesh["ep"] > 1 and not role.model.experts:
            yield PlanError(
                f"{title}: {role.model.name} has no experts for ep={place.mesh['ep']}.",
                at=place.at,
                fix="Write dp in place of ep, or take a mixture-of-experts model.",
            )
            continue
        try:
            check_layout(role.model, place.mesh, backend(place.backend).layout)
        except PlanError as error:
            yield PlanError(f"{title}: {error.what}", at=place.at, have=error.have, fix=error.fix)


def _backends(study: Study) -> Iterator[FlowError | Lint]:
    for worker, use, place, role in _places(study):
        title = study.plan.title_of(worker, use)
        if any(refusals_of_use(place, use=use, trained=role.trains)):
            continue  # as unsupported
        for refusal in refusals(place, role, _device(study, place), use=use):
            yield refusal.error(title, place.at or study.plan.pools[place.pool].at)


def _device(study: Study, place: Place) -> str:
    """The kind of the devices of a place."""
    cluster, devices = study.plan.cluster, study.plan.pools[place.pool].devices
    return cluster.kind(devices[0]).name if cluster is not None and devices else "cpu"


def _nodes(study: Study) -> Iterator[FlowError | Lint]:
    """Tensor-parallel groups across nodes: they work, slowly."""
    cluster = study.plan.cluster
    for worker, use, place, _ in _places(study):
        devices = study.plan.pools[place.pool].devices
        if cluster is None or len(devices) < place.mesh.size or place.mesh["tp"] == 1:
            continue
        if any(len({cluster.node(devices[r]) for r in group}) > 1 for group in place.mesh.groups("tp")):
            groups = f"{study.plan.title_of(worker, use)}: groups of tp={place.mesh['tp']}"
            yield Lint("network", f"{groups} cross nodes, and talk at every layer.", place.at or _file(study))


# -- memory ------------------------------------------------------------------------------------------------------------


def _memory(study: Study) -> Iterator[FlowError | Lint]:
    for name, memory in study.pool_memory.items():
        turns = study.turns(name)
        if not turns:
            continue
        at = _whose(study, memory.timeline(turns).culprit) or study.plan.pools[name].at
        error = memory.fits(turns)
        if error is not None:
            error.at = error.at or at
            yield error
            continue
        swaps = memory.swaps(turns)
        if swaps:
            large = {who: size for who, size in swaps.items() if size > RESERVE_BYTES / 100}
            listed = ", ".join(f"{who} ({size / 1e9:.1f} GB)" for who, size in large.items())
            what = f"pool '{name}': these leave each device between their turns: {listed}."
            if study.runtime != "ray":
                what = (
                    f"pool '{name}': these do not fit beside each other: {listed}. In this process all of them stay; "
                    "with --runtime ray they take turns."
                )
            yield Lint("turns", what, at or _file(study))


def _whose(study: Study, culprit: str) -> At | None:
    """The line of the place of a resident such as ``actor.train optimizer``."""
    worker, _, use = culprit.partition(" ")[0].rpartition(".")
    return study.plan.place_of(worker, use).at if worker in study.roles else None


# -- the pipeline ------------------------------------------------------------------------------------------------------


def _pipeline(study: Study) -> Iterator[FlowError | Lint]:
    steps, at = study.plan.pipeline, study.plan.pipeline.at
    here = _file(study)
    if steps.order == "window":
        yield from _window(study)
    if steps.staleness == 0:
        for key, value, plain in (("order", steps.order, "fifo"), ("publish", steps.publish, "drain")):
            if value != plain:
                yield Lint("pipeline", f"{key}: {value} does nothing with staleness: 0.", at.get(key, here))
        return
    whole = study.parameters.get("steps")
    if isinstance(whole, int) and 0 < whole <= steps.staleness:
        what = f"staleness: {steps.staleness} lets all {whole} steps of the program sample from its first weights."
        yield Lint("pipeline", what, at.get("staleness", here))
    sampled = {p.update.worker for p in trained_on(study.traced)}
    if not sampled:
        what = f"staleness: {steps.staleness} does nothing: no update is trained on rows that its worker has sampled."
        yield Lint("pipeline", what, at.get("staleness", here))
    if steps.publish == "continue":
        for worker in sorted(sampled):
            if not study.plan.split(worker):
                yield PlanError(
                    f"publish: continue keeps the KV cache of '{worker}' through a publish, but its pool "
                    f"'{study.plan.pool(worker)}' takes turns, and the turn of generating ends before.",
                    at=at.get("publish"),
                    fix="Give it a pool of its own to generate in, or write publish: drain.",
                )
    for lint in study.traced.lints:
        if lint.kind == "serial":
            what = f"with staleness: {steps.staleness} steps still do not overlap past this line."
            yield Lint("overlap", what, lint.at)


def _window(study: Study) -> Iterator[FlowError | Lint]:
    """Yield an error unless each prompt of a step is sampled for exactly once: a window exchanges prompt groups."""
    samplers = {m.call.at.line: m.call for m in study.calls.values() if samples(m.call.op, m.call.serves)}
    inside = [call for _, call in sorted(samplers.items()) if call.loop]
    if len(inside) != 1:
        count = f"{len(inside)} of them" if inside else "none"
        yield PlanError(
            f"order: window needs one generate in a step, whose groups it may exchange; this program has {count}.",
            at=inside[1].at if len(inside) > 1 else study.plan.pipeline.at.get("order"),
            fix="Write order: fifo.",
        )


# -- rows and pools ----------------------------------------------------------------------------------------------------


def _rows(study: Study) -> Iterator[FlowError | Lint]:
    chunks = study.plan.pipeline.chunks
    for made in study.calls.values():
        call = made.call
        minibatch: Any = call.arguments.get("minibatch")
        if call.op.cost == "train" and isinstance(minibatch, int) and minibatch > 0:
            if made.rows and minibatch > made.rows:
                what = f"{call.title}: minibatch={minibatch} is more than the {made.rows} rows of a step."
                yield Lint("rows", what, call.at)
            elif made.rows % minibatch:
                what = f"{call.title}: the last mini-batch has {made.rows % minibatch} rows, the others {minibatch}."
                yield Lint("rows", what, call.at)
            parts = study.plan.place_of(call.worker).mesh.data if call.worker in study.workers else 1
            if parts > minibatch:
                idle = f"{parts - minibatch} of {parts} replicas"
                what = f"{call.title}: a mini-batch of {minibatch} rows leaves {idle} without a row."
                yield Lint("rows", what, call.at)
        if call.op.cost == "generate" and chunks > 1:
            prompts = prompts_of(made)
            if 0 < prompts < chunks:
                what = f"chunks: {chunks} are more than the {prompts} prompts of {call.title}."
                yield Lint("rows", what, study.plan.pipeline.at.get("chunks", _file(study)))


def _support(study: Study) -> Iterator[FlowError]:
    """Yield an error for each call that asks which tokens could be drawn of an engine that does not record it."""
    for made in study.calls.values():
        call = made.call
        if call.arguments.get("support") is not True or call.op.cost != "generate":
            continue
        place = study.plan.place_of(call.worker, "generate")
        if "support" not in backend(place.backend).logprobs:
            recording = " or ".join(r.name for r in BACKENDS.values() if r.generates and "support" in r.logprobs)
            yield PlanError(
                f"{study.plan.title_of(call.worker, 'generate')}: {place.backend} does not record which tokens "
                f"could be drawn, which {call.title} asks for with support=True.",
                at=place.at,
                fix=f"Write engine: {recording}, or leave support=True out of the program.",
            )


def _processes(study: Study) -> Iterator[FlowError | Lint]:
    """Devices for workers that have no model, and more processes than rows."""
    for made in study.calls.values():
        worker = made.call.worker
        if worker not in study.workers or made.call.op.cost != "external" or made.call.serves:
            continue
        pool = study.plan.pool_of(worker)
        at = study.plan.place_of(worker).at or pool.at or _file(study)
        if pool.processes > made.rows > 0:
            what = f"pool '{pool.name}' has {pool.processes} processes for {made.rows} rows of {worker}."
            yield Lint("rows", what, at)


def _unused(study: Study) -> Iterator[FlowError | Lint]:
    plan, here = study.plan, _file(study)
    calls = {(c.worker, c.op.cost) for trail in study.traced.trails for c in trail.calls}
    served = {name for trail in study.traced.trails for c in trail.calls for name in c.serves}
    used = {worker for worker, _ in calls} | served
    for worker, use, place in plan.roles():
        if use == "generate" and worker in used and (worker, "generate") not in calls and worker not in served:
            what = f"'{worker}' is placed to generate, and this program does not sample from it."
            yield Lint("unused", what, place.at or here)
    taken = {place.pool for _, _, place in plan.roles()} | {plan.pool(w) for w in study.workers if w in used}
    for name, pool in plan.pools.items():
        if name not in taken:
            yield Lint("unused", f"pool '{name}' has nobody in it.", pool.at or here)
    if plan.cluster is not None:
        idle = plan.cluster.size - sum(len(pool.devices) for pool in plan.pools.values())
        if idle:
            yield Lint("unused", f"{idle} of the {plan.cluster.size} devices of the cluster are in no pool.", here)
