"""A program under a plan, before anything runs: the work of its calls, its costs, its schedule on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any

from ..errors import ModelError, PlanError, shown
from ..graph.compile_paths import node_ids
from ..graph.tracing.trace_records import HandleLike, Traced
from ..html_tables import table
from ..lowering.bases import bases_of
from ..lowering.deployment import EngineOptions
from ..lowering.lower import Execution, choose_runtime, lower
from ..lowering.roles import roles_of
from ..lowering.scheme_of_program import scheme_of
from ..lowering.unsupported import unsupported
from ..placement.cluster.mesh import Mesh
from ..placement.cost.calibrated_costs import Calibrated
from ..placement.cost.continuous_batch import Turns
from ..placement.cost.cost_model import Costs
from ..placement.cost.host_memory import HostUse, host_uses
from ..placement.cost.pool_memory import PoolMemory, Turn, loads_of, pool_memory, turns_of
from ..placement.cost.roofline import Roofline
from ..placement.cost.work import Role, Work, Workload
from ..placement.plan.plan import Plan
from ..schedule.events import Memory
from ..schedule.fly_program import Flight, Made
from ..schedule.machine import Machine
from ..schedule.scheme import Scheme
from ..schedule.simulation import Simulation, bars_of, pool_times, steady
from ..schedule.virtual_clock import VirtualClock
from ..schedule.wait_graph import WaitRecorder, Waits
from .assumptions import assumptions_of
from .call_seconds import Faster, NoTime, Pace, plays_episodes, prompts_of
from .engine_caches import engine_options
from .row_lengths import RowLengths, Tokens

_MOST_STALENESS = 30  # of the steps whose waits are looked at; above, more of the same are open at a time


@dataclass(frozen=True)
class Study:
    """A program with its parameters, its plan, and what its calls would ask of the devices.

    ``costs``: None takes a roofline of the plan's cluster. ``runtime``: what is to run it, ``eager``, ``local`` or
    ``ray``; the one that the plan needs unless it is said. Nothing is loaded, and no device is touched.
    """

    fn: Callable[..., Any]
    parameters: Mapping[str, Any]
    traced: Traced
    handles: Sequence[HandleLike]
    plan: Plan
    costs: Costs | None = None
    tokens: Tokens = field(default_factory=Tokens)
    seed: int = 0
    runtime: str = ""
    _asked: str = field(init=False, default="", repr=False)  # the runtime, where one was said

    def __post_init__(self) -> None:
        object.__setattr__(self, "_asked", self.runtime)
        object.__setattr__(self, "runtime", self.runtime or choose_runtime(self.plan))

    def under(self, plan: Plan) -> Study:
        """Return the same program under another plan, with what was asked of this one."""
        return replace(self, plan=plan, runtime=self._asked)

    def _repr_html_(self) -> str:
        """Its calls, parameters and plan, for a notebook."""
        asked = ", ".join(f"{name}={value!r}" for name, value in self.parameters.items())
        calls = dict.fromkeys(
            (c.title, f"{shown(c.at.file)}:{c.at.line}") for trail in self.traced.trails for c in trail.calls
        )
        title = f"{self.traced.program}({asked}), runtime {self.runtime}"
        return table(["call", "at"], calls, title=title) + self.plan._repr_svg_()

    # -- what is there ------------------------------------------------------------------------------------------

    @cached_property
    def execution(self) -> Execution:
        """What a run of it is given, and :meth:`simulate` flies."""
        return lower(
            self.traced,
            self.plan,
            self.handles,
            self.runtime,
            fn=self.fn,
            parameters=self.parameters,
            memory=self.memory if self.runtime == "ray" and self.plan.cluster is not None else None,
            engines=self.engine_options,
        )

    @cached_property
    def engine_options(self) -> EngineOptions:
        """What engines are opened with where the plan leaves it to the memory of their devices, by worker."""
        return engine_options(self)

    def unsupported(self) -> list[PlanError]:
        """Return what its runtime cannot do of the plan."""
        return list(unsupported(self.traced, self.plan, self.handles, self.runtime))

    @cached_property
    def workers(self) -> tuple[str, ...]:
        return tuple(h.name for h in self.handles)

    @cached_property
    def roles(self) -> Mapping[str, Role]:
        """Workers by name, with the sizes of their models."""
        return roles_of(self.handles, self.traced, self.plan)

    @property
    def has_sizes(self) -> bool:
        """Whether the sizes of all models are known here: those of a model that was not fetched are not."""
        try:
            return self.roles is not None
        except ModelError:
            return False

    @cached_property
    def cost_model(self) -> Costs:
        return self.costs or Roofline(self.plan.cluster)

    @cached_property
    def ids(self) -> Mapping[Any, str]:
        return node_ids(self.traced)

    @cached_property
    def calls(self) -> Mapping[str, Made]:
        """The calls of one step by node id, with their rows; those outside of steps too."""
        calls: dict[str, Made] = {}

        def note(made: Made) -> int:
            calls[self.ids.get(made.call.place, made.call.title)] = made
            return 1

        clock = VirtualClock(Machine(self._free.setup), NoTime())
        Flight(self.fn, clock, self._free, steps=2, note=note).fly(self.fn, self.parameters)
        return calls

    @cached_property
    def _free(self) -> Scheme:
        """Everything in one pool, to look at calls without a plan."""
        return scheme_of(self.traced, self.plan, self.handles, in_one=True)

    @cached_property
    def works(self) -> Mapping[str, Work]:
        """The work of each worker's call in a steady step, by node id."""
        return {node: self._beside_others(work) for node, work in self._alone.items()}

    @cached_property
    def _alone(self) -> Mapping[str, Work]:
        """The same, as if nobody else were on its devices: what the memory of a pool is reckoned from."""
        works = {node: self._asked_for(made) for node, made in self.calls.items() if made.call.worker in self.roles}
        return {node: work for node, work in works.items() if work is not None}

    def names(self) -> tuple[str, ...]:
        """Return what costs can be given for: titles and node ids of the workers' calls, publishes, moves of memory."""
        publishes = [f"{w}.publish" for w in self.roles if self._publishes(w)]
        calls = [(node, made.call.title) for node, made in self.calls.items() if made.call.op.owner != "batch"]
        return tuple(dict.fromkeys((*(n for n, _ in calls), *(title for _, title in calls), *publishes)))

    # -- the work of a call -------------------------------------------------------------------------------------

    def work(self, made: Made) -> Work | None:
        """Return what a call asks of its devices, beside what others keep there; None for arithmetic on a batch."""
        work = self._asked_for(made)
        return None if work is None else self._beside_others(work)

    def _beside_others(self, work: Work) -> Work:
        """A generate with the bytes that its KV cache cannot have, as others keep them in its turn."""
        if work.kind != "generate" or work.pool not in self.pool_memory:
            return work
        turns = self.turns(work.pool)
        turn = next((t for t in turns if not t.publish and t.title == work.title), None)
        return work if turn is None else replace(work, held=self.pool_memory[work.pool].held(turn, turns))

    def _asked_for(self, made: Made) -> Work | None:
        call = made.call
        if call.op.owner == "batch":
            return None
        node = self.ids.get(call.place, call.title)
        if call.worker not in self.roles:  # a library: it takes no pool, and no time unless some is given
            return Work(node, call.title, "none", Role(call.worker), self.load(made))
        role, use, kind = self.roles[call.worker], "train", call.op.cost
        if call.serves:  # a policy that serves is what takes the time of a rollout
            role, kind = self.roles[call.serves[0]], "generate"
        if kind == "generate":
            use = "generate"
        minibatch = call.arguments.get("minibatch")
        place = self.plan.place_of(role.name, use)
        pool = self.plan.pools[place.pool]
        return Work(
            node,
            call.title,
            kind if kind in ("generate", "forward", "train", "external") else "none",
            role,
            self.load(made),
            place.mesh,
            pool.devices,
            processes=pool.processes,
            minibatches=ceil(made.rows / minibatch) if isinstance(minibatch, int) and minibatch else 1,
            epochs=int(call.arguments.get("epochs", 1) or 1),
            pool=pool.name,
            backend=place.backend,
            micro=int(call.arguments.get("micro_tokens") or 0),
            kv_cache=float(place.options.get("kv_cache", 0)) * (1 << 30) if use == "generate" else 0.0,
            most_rows=int(place.options.get("rows", 0)) if use == "generate" else 0,
            holder=call.worker if call.worker != role.name else "",
            offload=place.offload,
            fp8_weights=use == "generate" and bool(place.options.get("fp8_weights")),
            fp8_cache=use == "generate" and bool(place.options.get("fp8_cache")),
            said=tuple(place.options.items()) if use == "generate" else (),
        )

    def load(self, made: Made) -> Workload:
        """Rows of a call, and tokens of each; as long as in the run that the costs are from, unless it was said."""
        costs = self.costs.costs if isinstance(self.costs, Faster) else self.costs
        if isinstance(costs, Calibrated) and self.tokens == Tokens():
            fit = costs.fits.get(self.ids.get(made.call.place, "")) or costs.fits.get(made.call.title)
            return Workload(made.rows, 0, fit.row_tokens if fit is not None else 0)
        lengths, group = self.lengths.of(made), max(1, made.rows // max(1, made.prompts or made.rows))
        turns = self.episode_turns(made)
        if not lengths.varies and turns is None:
            return Workload(made.rows, lengths.prompt, lengths.mean, group=group)
        longest = lengths.longest(made.rows, group)
        return Workload(made.rows, lengths.prompt, lengths.mean, longest, lengths, group, turns)

    def episode_turns(self, made: Made) -> Turns | None:
        """Return the turns of a call's episodes, where some were said or measured; None of a call that plays none."""
        title = made.call.title
        return self.tokens.turns_of(self.ids.get(made.call.place, title), title) if plays_episodes(made) else None

    @cached_property
    def lengths(self) -> RowLengths:
        """How many tokens the rows of each call have."""
        return RowLengths(self.tokens, self.handles, self.roles)

    def publish(self, worker: str) -> Work:
        """The work of a publish: weights go from where the worker trains to where it generates."""
        source, target = self.plan.place_of(worker, "train"), self.plan.place_of(worker, "generate")
        title = f"{worker}.publish"
        return Work(
            title,
            title,
            "publish",
            self.roles[worker],
            Workload(0, 0, 0),
            target.mesh,
            self.plan.pools[target.pool].devices,
            source=(source.mesh, self.plan.pools[source.pool].devices),
            pool=target.pool,
            source_pool=source.pool,
            copied=self.plan.pipeline.staleness > 0,
            backend=target.backend,
        )

    def swap(self, pool: str, resident: str, what: str) -> Work:
        """The work of a worker that leaves the memory of a pool (``what="offload"``), or comes back (``"onload"``)."""
        devices, size = self.plan.pools[pool].devices, self.pool_memory[pool].residents[resident].moved
        role, mesh = self.roles[resident.partition(".")[0]], Mesh({"dp": len(devices)})
        title = f"{resident}.{what}"
        return Work(title, title, what, role, Workload(0, 0, 0), mesh, devices, pool=pool, moved=size)

    # -- memory -------------------------------------------------------------------------------------------------

    @cached_property
    def pool_memory(self) -> Mapping[str, PoolMemory]:
        """The memory of each pool whose devices are known."""
        loads, micro = loads_of(self._alone.values())
        apart = self.runtime == "ray"  # ranks hold the weights of every worker apart
        bases = {} if apart else bases_of(self.handles, self.plan)
        roles = list(self.roles.values())
        memories = {pool: pool_memory(self.plan, pool, roles, loads, micro, bases) for pool in self.plan.pools}
        return {pool: memory for pool, memory in memories.items() if memory is not None}

    def turns(self, pool: str) -> tuple[Turn, ...]:
        """The calls that a pool does in a step, in program order, and the publishes inside it."""
        works = [work for work in self._alone.values() if work.pool == pool and work.role.model is not None]
        inside = {name for name in self.roles if self._publishes(name) and not self.plan.split(name)}
        return turns_of(works, inside, {name for name, role in self.roles.items() if role.model is not None})

    @cached_property
    def host_memory(self) -> tuple[HostUse, ...]:
        """What lies in the memory of the hosts, by nodes that are alike, pools and phases."""
        if self.plan.cluster is None:
            return ()
        pools = [
            (name, self.plan.pools[name].devices, memory.hosted(turns))
            for name, memory in self.pool_memory.items()
            if (turns := self.turns(name)) and memory.fits(turns) is None
        ]
        return host_uses(self.plan.cluster, pools)

    def _publishes(self, worker: str) -> bool:
        return self.roles[worker].trains and self.roles[worker].generates

    @cached_property
    def memory(self) -> dict[str, Memory]:
        """Who takes turns in the memory of which pool: what leaves when another is needed."""
        swapping: dict[str, Memory] = {}
        for pool, memory in self.pool_memory.items():
            swaps = memory.swaps(self.turns(pool))
            if swaps:
                there = {name: tuple(n for n in memory.with_shared(name) if n in swaps) for name in memory.residents}
                swapping[pool] = Memory(0.0, dict(swaps), there)  # what is not needed has been counted as away
        return swapping

    # -- simulation ---------------------------------------------------------------------------------------------

    def simulate(self, steps: int | None = None) -> Simulation:
        """Fly what a run would be given on a virtual clock."""
        execution, pace = self.execution, Pace(self)
        setup = execution.scheme.setup
        clock = VirtualClock(Machine(setup), pace, home=execution.scheme.home, eager=execution.runtime == "eager")
        flight = Flight(execution.fn, clock, execution.scheme, steps=steps, note=pace.note)
        flight.fly(execution.fn, execution.parameters)
        flown = clock.flown
        pools = {name: pool_text(self.plan, name) if name in self.plan.pools else "" for name in setup.pools}
        bars = bars_of((s for s in flown.spans if s.pools), pace.nodes)
        times = tuple(
            replace(
                time,
                memory=tuple(flown.memory.get(time.name, ())),
                capacity=self.pool_memory[time.name].memory if time.name in self.pool_memory else 0.0,
            )
            for time in pool_times(pools, bars, clock.time)
        )
        return Simulation(
            self.traced.program,
            len(flown.commits),
            clock.time,
            steady(flown.commits, clock.time, setup.staleness),
            bars,
            times,
            clock.lags(),
            self.cost_model.source,
            setup.staleness,
            flown.events,
            assumed=tuple(f"{condition}   {at}" for condition, at in flight.assumed.items()),
            notes=assumptions_of(self, flown.commits),
            workers=self.workers,
            hosts=tuple(use.to_json() for use in self.host_memory),
        )

    def waits(self) -> Waits:
        """Return what can wait for what in the first steps, more than may be open at a time."""
        execution = self.execution
        setup = execution.scheme.setup
        recorder = WaitRecorder(setup)
        steps = min(setup.staleness, _MOST_STALENESS) + 3
        flight = Flight(execution.fn, recorder, execution.scheme, steps=steps, note=prompts_of)
        flight.fly(execution.fn, execution.parameters)
        return recorder.found()


def pool_text(plan: Plan, name: str) -> str:
    """Return what a pool has: ``devices 0-7 (h100-80)``, ``4 processes``, or its device in this process."""
    pool = plan.pools[name]
    record = pool.to_json()
    if pool.devices and plan.cluster is not None:
        kinds = dict.fromkeys(plan.cluster.kind(d).name for d in pool.devices)
        return f"devices {record['devices']} ({', '.join(kinds)})"
    if pool.processes:
        return f"{pool.processes} process{'es' if pool.processes > 1 else ''}"
    return str(record.get("device", "auto"))
