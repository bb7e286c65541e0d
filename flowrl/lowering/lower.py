"""A program under a plan, lowered: one frozen record that a runtime runs and the simulator flies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..graph.stand_ins.values import is_handle
from ..graph.tracing.trace_records import HandleLike, Reading, Traced
from ..placement.plan.plan import Plan
from ..schedule.events import AGAIN, Begun, Groups, Memory
from ..schedule.scheme import Scheme
from .deployment import Deployments, EngineOptions, deploy_here, deploy_on_ranks, has_model, with_policies
from .scheme_of_program import handed_workers, sampled_workers, scheme_of, trained_workers

QUEUE = 3  # calls that ranks are handed while they are at one: the way to them takes as long as some short calls


@dataclass(frozen=True)
class Execution:
    """All that a runtime, or the simulator, needs to know of a program under a plan; :func:`lower` makes it.

    ``Execution("grpo", fn, {"steps": 400}, "local", plan, ("actor", "reward"), scheme, deployments)``. ``workers`` are
    those that the program uses. ``scheme`` says how each call looks to the schedule, with the setup of the state
    machine: order, staleness, chunks, mode of publishing, queue, memory. ``deployments`` say where each copy of a
    worker is. ``readings``: reads of token ids whose tokenizers are compared once the models are open. ``engines``:
    options that engines are opened with where the plan leaves them to the memory of their devices, by worker.
    """

    program: str
    fn: Callable[..., Any]
    parameters: Mapping[str, Any]
    runtime: str  # eager | local | ray
    plan: Plan
    workers: tuple[str, ...]
    scheme: Scheme
    deployments: Deployments
    readings: tuple[Reading, ...] = ()
    engines: EngineOptions = field(default_factory=dict[str, Mapping[str, float]])

    @property
    def servers(self) -> tuple[str, ...]:
        """The workers of the program that generate with a copy of their own."""
        return tuple(name for name in self.workers if (name, True) in self.deployments)

    def in_order(self, begun: Iterable[Begun], taken: Mapping[int, Groups], *, after: int = 0) -> Execution:
        """The same, with what pools that sample begin with, and the groups of calls, from the call ``after`` on."""
        left = [each for each in begun if any(call >= after for call in _calls_of(each))]
        groups = {call: found for call, found in taken.items() if call >= after}
        return replace(
            self, scheme=replace(self.scheme, setup=replace(self.scheme.setup, begun=tuple(left), taken=groups))
        )

    def without_memory(self) -> Execution:
        """The same, whose workers take no turns in the memory of their pools by a schedule of their own."""
        return replace(self, scheme=replace(self.scheme, setup=replace(self.scheme.setup, memory={})))

    @property
    def swapped(self) -> frozenset[str]:
        """What takes turns in the memory of its pool, such as ``actor.train``."""
        return frozenset(name for held in self.scheme.setup.memory.values() for name in held.sizes)


def lower(
    traced: Traced,
    plan: Plan,
    handles: Sequence[HandleLike],
    runtime: str,
    *,
    fn: Callable[..., Any],
    parameters: Mapping[str, Any],
    memory: Mapping[str, Memory] | None = None,
    engines: EngineOptions | None = None,
) -> Execution:
    """Return what a runtime, or the simulator, is given of a program under a plan.

    ``runtime``: ``eager``, ``local`` or ``ray``. ``fn`` is the program and ``parameters`` what it is called with.
    ``memory`` is that of pools whose residents do not fit together; only ranks have them take turns. ``engines``: as in
    :class:`Execution`.
    """
    eager, ranks = runtime == "eager", runtime == "ray"
    scheme = scheme_of(
        traced,
        plan,
        handles,
        in_one=eager,
        memory=memory if ranks else None,
        queue=QUEUE if ranks else 0,
    )
    used = used_workers(traced, handles)
    if ranks:
        deployments = deploy_on_ranks(handles, plan, trained=trained_workers(traced), sampled=sampled_workers(traced))
    else:
        deployments = deploy_here(handles, plan, apart={w for w, f in scheme.setup.followers.items() if not f.shared})
        scheme = replace(scheme, home=_home(handles, used, scheme))
    deployments = with_policies(deployments, handed_workers(traced))
    readings = tuple(dict.fromkeys(r for trail in traced.trails for r in trail.readings))
    said = engines or {}
    return Execution(traced.program, fn, parameters, runtime, plan, used, scheme, deployments, readings, said)


def _calls_of(begun: Begun) -> tuple[int, ...]:
    """Return the calls that something is about; of a move of weights, whose version says when it was, any."""
    if begun.number == AGAIN:
        return tuple(kept.call for kept in begun.kept)
    return (begun.number,) if begun.number >= 0 else (sys.maxsize,)


def used_workers(traced: Traced, handles: Sequence[HandleLike]) -> tuple[str, ...]:
    """Return the workers that a program calls, hands on, or copies, in the order of their declaration."""
    called = {n for t in traced.trails for c in t.calls for n in (c.worker, *c.serves)}
    sources: list[Any] = [h.arguments.get("of") for h in handles if h.name in called]
    copied = {of.name for of in sources if is_handle(of)}
    return tuple(h.name for h in handles if h.name in called | copied)


def choose_runtime(plan: Plan) -> str:
    """Return the runtime that a plan needs: ``local`` where this process has a device for each pool, else ``ray``.

    On a device of the cluster where a worker trains with one engine and generates with another, each has a process.
    """
    places = [place for _, _, place in plan.roles()]
    fits = all(p.mesh.size == 1 and len(plan.pools[p.pool].devices) <= 1 for p in places)
    return "local" if fits and not any(_two_engines(plan, worker) for worker in plan.place) else "ray"


def _two_engines(plan: Plan, worker: str) -> bool:
    """Whether a worker has an engine to train with and another one to generate, on one device of the cluster."""
    train, generate = plan.place_of(worker, "train"), plan.place_of(worker, "generate")
    return train.pool == generate.pool and train.backend != generate.backend and bool(plan.pools[train.pool].devices)


def _home(handles: Sequence[HandleLike], used: Sequence[str], scheme: Scheme) -> frozenset[str]:
    """The pools that the driver's thread serves: that of the first model (docs/design/0006-home-pool.md).

    None where steps overlap: the thread would open the next step only when a call of this one ends.
    """
    if scheme.setup.staleness:
        return frozenset()
    models = (scheme.train[h.name] for h in handles if h.name in used and has_model(h))
    return frozenset((next(models, scheme.setup.pools[0]),))
