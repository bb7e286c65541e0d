"""What a plan gains nothing from, or pays for, without being wrong: remarks on it for a program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import At
from ..graph.may_see_older_weights import trained_on
from ..graph.tracing.trace_records import Lint
from ..placement.backends import backend
from ..placement.cost.mixed_replicas import replicas_by_kind
from ..placement.cost.work import Role
from ..placement.plan.plan import Pipeline, Place
from .call_seconds import prompts_of
from .study import Study


def file_of(study: Study) -> At:
    """Return the plan's file, for what is at no line of it."""
    return At(study.plan.file or "<plan>", 0)


def says_nothing(study: Study) -> Iterator[Lint]:
    """Yield a remark for a plan file without a word in it: it is as good as none."""
    plan = study.plan
    pools = any(pool.at is not None for pool in plan.pools.values())
    if plan.file and not (pools or plan.place or plan.cluster) and plan.pipeline == Pipeline():
        what = "this plan is empty: a run has one pool of this process, as without a plan."
        yield Lint("empty", what, file_of(study))


def placed_models(study: Study) -> Iterator[tuple[str, str, Place, Role]]:
    """Yield the places of workers with a model, that the program uses for what they are placed for."""
    used = {(work.role.name, "generate" if work.kind == "generate" else "train") for work in study.works.values()}
    for worker, use in sorted(used):
        role = study.roles[worker]
        if role.model is not None:
            yield worker, use, study.plan.place_of(worker, use), role


def slow_network(study: Study) -> Iterator[Lint]:
    """Yield a remark for tensor-parallel groups across nodes: they work, slowly."""
    for worker, use, place, _ in placed_models(study):
        if not study.plan.crosses_nodes(place, "tp"):
            continue
        groups, row = f"{study.plan.title_of(worker, use)}: groups of tp={place.mesh['tp']}", backend(place.backend)
        why = f"and no run has {row.name} so" if row.one_node and row.built else "and talk at every layer"
        yield Lint("network", f"{groups} cross nodes, {why}.", place.at or file_of(study))


def several_kinds(study: Study) -> Iterator[Lint]:
    """Yield a remark for each pool of models with devices of several kinds: the least counts, but for replicas."""
    cluster = study.plan.cluster
    taken = {place.pool for _, _, place, _ in placed_models(study)}
    generates = [work for work in study.works.values() if work.kind == "generate"]
    dealt = {work.pool for work in generates if len(replicas_by_kind(work, cluster)) > 1}
    for name, pool in study.plan.pools.items():
        if cluster is None or name not in taken:
            continue
        kinds = dict.fromkeys(cluster.kind(device).name for device in pool.devices)
        if len(kinds) > 1:
            what = f"pool '{name}' has devices of several kinds, {' and '.join(kinds)}: each call is as slow as on the"
            what = f"{what} slowest, and the smallest memory counts."
            if name in dealt:
                what += " A forecast deals rows to the replicas of an engine by their speed; a run deals them evenly."
            yield Lint("kinds", what, pool.at or file_of(study))


def models_on_processes(study: Study) -> Iterator[Lint]:
    """Yield a remark for each model in a pool of host processes, where there are devices: of those nothing is known."""
    if study.plan.cluster is None:
        return
    for worker, use, place, role in placed_models(study):
        pool = study.plan.pools[place.pool]
        if pool.processes and role.model is not None:
            title = study.plan.title_of(worker, use)
            what = f"{title}: each of the {pool.processes} processes of pool '{pool.name}' computes a whole "
            what += f"{role.model.name} on the cores of a host, whose memory is not checked."
            yield Lint("processes", what, place.at or pool.at or file_of(study))


def never_run(study: Study) -> Iterator[Lint]:
    """Yield a remark for what no run has had on GPUs, an engine or an axis of its mesh: other commands know it."""
    for worker, use, place, role in placed_models(study):
        row = backend(place.backend)
        known = {axis: size for axis, size in place.mesh.said.items() if axis in row.axes}
        experts = role.model is not None and bool(role.model.experts)
        for what, _ in row.unrun(known, place.options, kind, experts=experts) if (kind := _gpus(study, place)) else ():
            title = study.plan.title_of(worker, use)
            yield Lint("unrun", f"{title}: {what} flowrl run refuses it.", place.at or file_of(study))


def _gpus(study: Study, place: Place) -> str:
    """The kind of the GPUs of a place; empty where it has none."""
    cluster, devices = study.plan.cluster, study.plan.pools[place.pool].devices
    kind = cluster.kind(devices[0]).name if cluster is not None and devices else "cpu"
    return "" if kind == "cpu" else kind


def cut_responses(study: Study) -> Iterator[Lint]:
    """Yield a remark for rows that may become longer than the model has positions: a run ends them there."""
    said = study.tokens.prompt is not None or study.tokens.numbers
    for work in study.works.values() if said else ():
        model, load = work.role.model, work.load
        most = load.prompt + max(load.response, load.longest)
        if model is not None and work.kind == "generate" and model.positions and load.prompt < model.positions < most:
            what = f"{work.title}: rows of {most:.0f} tokens end at the {model.positions} positions of {model.name}."
            yield Lint("positions", what, study.plan.place_of(work.role.name, "generate").at or file_of(study))


def idle_pipeline(study: Study) -> Iterator[Lint]:
    """Yield a remark for each word of the pipeline that does nothing for this program."""
    steps, at = study.plan.pipeline, study.plan.pipeline.at
    here = file_of(study)
    if steps.staleness == 0:
        for key, value, plain in (("order", steps.order, "fifo"), ("publish", steps.publish, "drain")):
            if value != plain:
                yield Lint("pipeline", f"{key}: {value} does nothing with staleness: 0.", at.get(key, here))
        return
    whole = study.parameters.get("steps")
    if isinstance(whole, int) and 0 < whole <= steps.staleness:
        what = f"staleness: {steps.staleness} lets all {whole} steps of the program sample from its first weights."
        yield Lint("pipeline", what, at.get("staleness", here))
    if not any(trained_on(study.traced)):
        what = f"staleness: {steps.staleness} does nothing: no update is trained on rows that its worker has sampled."
        yield Lint("pipeline", what, at.get("staleness", here))
    for lint in study.traced.lints:
        if lint.kind == "serial":
            what = f"with staleness: {steps.staleness} steps still do not overlap past this line."
            yield Lint("overlap", what, lint.at)


def uneven_rows(study: Study) -> Iterator[Lint]:
    """Yield a remark where mini-batches, replicas or chunks do not divide the rows of a step."""
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
                yield Lint("rows", what, study.plan.pipeline.at.get("chunks", file_of(study)))


def idle_processes(study: Study) -> Iterator[Lint]:
    """Yield a remark for each pool with more processes than rows."""
    for made in study.calls.values():
        worker = made.call.worker
        if worker not in study.workers or made.call.op.cost != "external" or made.call.serves:
            continue
        pool = study.plan.pool_of(worker)
        at = study.plan.place_of(worker).at or pool.at or file_of(study)
        if pool.processes > made.rows > 0:
            what = f"pool '{pool.name}' has {pool.processes} processes for {made.rows} rows of {worker}."
            yield Lint("rows", what, at)


def unused(study: Study) -> Iterator[Lint]:
    """Yield a remark for each place, pool and device that the program does not use."""
    plan, here = study.plan, file_of(study)
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
