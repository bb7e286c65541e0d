"""What is wrong with a plan for a program, found before any device is touched: every finding in one go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..errors import At, CheckError, FlowError, ModelError, PlanError
from ..graph.check_program import stale
from ..graph.may_see_older_weights import samples, trained_on
from ..graph.tracing.trace_records import Lint, each_once
from ..placement.backends import BACKENDS, backend, names_of
from ..placement.cost.per_device_counts import kv_bytes
from ..placement.cost.pool_memory import PoolMemory
from ..placement.cost.worker_memory import RESERVE_BYTES
from ..placement.model.weight_layout import check_layout
from ..placement.plan.plan import Place
from ..placement.search.engine_refusals import refusals, refusals_of_use
from .engine_caches import cache_of
from .plan_warnings import (
    cut_responses,
    file_of,
    idle_pipeline,
    idle_processes,
    models_on_processes,
    never_run,
    placed_models,
    says_nothing,
    several_kinds,
    slow_network,
    uneven_rows,
    unused,
)
from .study import Study

_GIB = 1 << 30


def plan_findings(study: Study) -> tuple[list[FlowError], list[Lint]]:
    """Errors and remarks on a plan, for a program that has no errors of its own."""
    findings: list[FlowError | Lint] = [*stale(study.traced, study.plan.pipeline.staleness)]
    checks: list[Callable[[Study], Iterable[FlowError | Lint]]]
    checks = [says_nothing, _pipeline, idle_pipeline, unused, idle_processes, uneven_rows, _support]
    sized = any(pool.devices for pool in study.plan.pools.values())
    if sized:
        try:
            study.roles  # noqa: B018  the sizes of all models
        except ModelError as error:
            sized = False
            what = f"{error.what} Memory and divisibility are not checked."
            findings.append(Lint("size", what, error.at or file_of(study)))
    checks += [*_SIZED, several_kinds, models_on_processes, never_run, cut_responses] if sized else [Study.unsupported]
    findings = each_once([*findings, *(finding for check in checks for finding in check(study))])
    return [f for f in findings if isinstance(f, FlowError)], [f for f in findings if isinstance(f, Lint)]


def refuse(study: Study, *, planned: bool) -> None:
    """Raise what keeps a program from running: what its runtime cannot do, and errors of a plan that it was given."""
    if refused := study.unsupported():
        raise refused[0] if len(refused) == 1 else CheckError(refused)
    if planned and (errors := each_once([*plan_findings(study)[0], *(error for _, error in _stuck(study))])):
        raise CheckError(errors)


# -- models on meshes --------------------------------------------------------------------------------------------------


def _models(study: Study) -> Iterator[FlowError | Lint]:
    for worker, use, place, role in placed_models(study):
        assert role.model is not None, "places of workers with a model"
        title = study.plan.title_of(worker, use)
        split, fix = ("folded_ep", "Take it out") if place.mesh.folded > 1 else ("ep", "Write dp in place of ep")
        if place.mesh.experts["ep"] > 1 and not role.model.experts:
            yield PlanError(
                f"{title}: {role.model.name} has no experts for {split}={place.mesh.experts['ep']}.",
                at=place.at,
                fix=f"{fix}, or take a mixture-of-experts model.",
            )
            continue
        try:
            check_layout(role.model, place.mesh, backend(place.backend).layout)
        except PlanError as error:
            yield PlanError(f"{title}: {error.what}", at=place.at, have=error.have, fix=error.fix)


def _backends(study: Study) -> Iterator[FlowError | Lint]:
    for worker, use, place, role in placed_models(study):
        title = study.plan.title_of(worker, use)
        if any(refusals_of_use(place, use=use, trained=role.trains)):
            continue  # as unsupported
        for refusal in refusals(place, role, _device(study, place), use=use):
            yield refusal.error(title, place.at or study.plan.pools[place.pool].at)


def _device(study: Study, place: Place) -> str:
    """The kind of the devices of a place."""
    cluster, devices = study.plan.cluster, study.plan.pools[place.pool].devices
    return cluster.kind(devices[0]).name if cluster is not None and devices else "cpu"


def too_long(study: Study) -> Iterator[PlanError]:
    """Yield an error for prompts that leave a model no position for a response: a run refuses it."""
    for work in study.works.values() if study.tokens.prompt is not None else ():
        model = work.role.model
        if model is not None and work.kind == "generate" and 0 < model.positions <= work.load.prompt:
            yield PlanError(
                f"{work.title}: prompts of {work.load.prompt:.0f} tokens; {model.name} has {model.positions} "
                "positions in all.",
                at=study.plan.place_of(work.role.name, "generate").at,
                fix="Shorten or filter the prompts, or use a model with more positions.",
            )


# -- memory ------------------------------------------------------------------------------------------------------------


def short_caches(study: Study) -> Iterator[tuple[str, Place, float, float, int]]:
    """Yield the engines whose KV cache cannot hold one row of as many tokens as the engine may be given.

    Each with its place, the bytes of the cache, those of a token, and the tokens of such a row.
    """
    for worker, use, place, role in placed_models(study):
        row, said, kind = backend(place.backend), place.options, _device(study, place)
        if use != "generate" or role.model is None or not row.keeps_cache or said.get(row.remote):
            continue
        experts = bool(role.model.experts)
        size = cache_of(study, worker)
        if size is None or any(row.unrun(place.mesh.said, said, kind, experts=experts)):
            continue  # there is another error, or run has no such engine
        most = min((t for t in (role.model.positions, int(said.get("context") or 0)) if t), default=0)
        token = kv_bytes(role.model, place.mesh, 1)
        if most * token > size:
            yield worker, place, size, token, most


def _whole_row(study: Study) -> Iterator[PlanError]:
    """Yield an error for each of them: engines refuse to start with one, or end rows where it is full."""
    for worker, place, size, token, most in short_caches(study):
        title, fits = study.plan.title_of(worker, "generate"), int(size / token)
        wanted = -(-most * token // (_GIB / 4)) / 4  # whole quarters of a GiB
        said = "kv_cache" in place.options or _device(study, place) == "cpu"
        more = f"write kv_cache: {wanted:g}" if said else "place others elsewhere"
        yield PlanError(
            f"{title}: the KV cache of {size / _GIB:.3g} GiB holds {fits} tokens, and {place.backend} may be given a "
            f"row of {most}.",
            at=place.at or study.plan.pools[place.pool].at,
            fix=f"Write context: {max(2, fits)} beside the engine if no row is longer, or {more}.",
        )


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
            yield Lint("turns", what, at or file_of(study))


def _hosts(study: Study) -> Iterator[FlowError | Lint]:
    """Yield an error for each node whose host has too little memory, a remark where nobody knows how much it has."""
    for use in study.host_memory:
        at = next((at for pool in use.pools if (at := study.plan.pools[pool].at)), None) or file_of(study)
        if (error := use.error) is not None:
            error.at = at
            yield error
        elif use.has is None and use.need > RESERVE_BYTES:
            what = (
                f"{use.where} ({use.device}) needs {use.need / 1e9:.1f} GB of host memory, and how much it has is not "
                "known: say host_memory: in the cluster to have it checked."
            )
            yield Lint("host", what, at)


def memory_errors(study: Study) -> list[FlowError]:
    """Return what keeps a plan from fitting in the memory of devices and hosts; nothing without the sizes of models."""
    if not study.has_sizes:
        return []
    found = each_once([*_memory(study), *_hosts(study)])
    return [error for error in found if isinstance(error, FlowError)]


def _stuck(study: Study) -> Iterator[tuple[PoolMemory, PlanError]]:
    """Yield an error for each engine that would have to leave the memory of its pool between turns, and never does."""
    for pool, memory in study.pool_memory.items() if study.runtime == "ray" and study.has_sizes else ():
        turns = study.turns(pool)
        for resident, size in () if memory.fits(turns) else memory.swaps(turns).items():
            worker, _, use = resident.partition(".")
            place = study.plan.place_of(worker, use)
            if not backend(place.backend).sleeps:
                listed = " or ".join(name for name in names_of(use) if backend(name).sleeps)
                word = "engine" if use == "generate" else "backend"
                error = PlanError(
                    f"{study.plan.title_of(worker, use)}: {place.backend} does not leave its memory between turns, and "
                    f"pool '{pool}' has no room for its {size / 1e9:.1f} GB beside the others.",
                    at=place.at or study.plan.pools[pool].at,
                    fix=f"Place it in a pool of its own, or write {word}: {listed}.",
                )
                yield memory, error


def _never_away(study: Study) -> Iterator[FlowError | Lint]:
    """Yield them as errors; on GPUs as remarks: a run refuses the plan, other commands know it."""
    for memory, error in _stuck(study):
        remark = Lint("unrun", f"{error.what} flowrl run refuses it.", error.at or file_of(study))
        yield error if memory.device == "cpu" else remark


def _whose(study: Study, culprit: str) -> At | None:
    """The line of the place of a resident such as ``actor.train optimizer``."""
    worker, _, use = culprit.partition(" ")[0].rpartition(".")
    return study.plan.place_of(worker, use).at if worker in study.roles else None


# -- the pipeline ------------------------------------------------------------------------------------------------------


def _pipeline(study: Study) -> Iterator[PlanError]:
    """Yield an error for each word of the pipeline that the program or the plan leaves no room for."""
    steps = study.plan.pipeline
    if steps.order == "window":
        yield from _window(study)
    if steps.staleness and steps.publish == "continue":
        for worker in sorted({p.update.worker for p in trained_on(study.traced)}):
            if not study.plan.split(worker):
                yield PlanError(
                    f"publish: continue keeps the KV cache of '{worker}' through a publish, but its pool "
                    f"'{study.plan.pool(worker)}' takes turns, and the turn of generating ends before.",
                    at=steps.at.get("publish"),
                    fix="Give it a pool of its own to generate in, or write publish: drain.",
                )


def _window(study: Study) -> Iterator[PlanError]:
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


# -- rows ----------------------------------------------------------------------------------------------------


def _support(study: Study) -> Iterator[FlowError]:
    """Yield an error for each call that asks which tokens could be drawn of an engine that does not record it."""
    for made in study.calls.values():
        call = made.call
        if call.arguments.get("support") is not True or not samples(call.op, call.serves):
            continue
        for worker in call.serves or (call.worker,):
            place = study.plan.place_of(worker, "generate")
            if "support" in backend(place.backend).logprobs:
                continue
            recording = " or ".join(r.name for r in BACKENDS.values() if r.generates and "support" in r.logprobs)
            yield PlanError(
                f"{study.plan.title_of(worker, 'generate')}: {place.backend} does not record which tokens "
                f"could be drawn, which {call.title} asks for with support=True.",
                at=place.at,
                fix=f"Write engine: {recording}, or leave support=True out of the program.",
            )


#: Checks that need the sizes of all models.
_SIZED: tuple[Callable[[Study], Iterable[FlowError | Lint]], ...]
_SIZED = (_models, Study.unsupported, _backends, too_long, _memory, _whole_row, _hosts, _never_away, slow_network)
