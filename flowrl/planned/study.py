"""A program under a plan, before anything runs: the work of its calls, its costs, its schedule on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from typing import Any

from ..graph.compile import node_ids
from ..graph.terms import Traced
from ..placement.calibrate import placed
from ..placement.cost import Calibrated, Costs
from ..placement.lengths import Lengths
from ..placement.mesh import Mesh
from ..placement.plan import Plan
from ..placement.pool_memory import PoolMemory, Turn, pool_memory
from ..placement.roofline import Efficiency, Roofline
from ..placement.work import Role, Work, Workload
from ..schedule.events import Call, Memory
from ..schedule.flight import Flight, Made
from ..schedule.machine import Machine
from ..schedule.scheme import Scheme
from ..schedule.simulation import Simulation, bars_of, pool_times, steady
from ..schedule.virtual import Rows, VirtualClock
from .roles import HandleLike, roles_of
from .scheme import scheme_of
from .texts import CHARACTERS, Texts, texts_of

PROMPT = 512  # tokens of a prompt, where neither the data nor the command line says
RESPONSE = 1024


@dataclass(frozen=True)
class Tokens:
    """What is said of lengths: ``Tokens(prompt=1024, kind="lognormal", numbers=(800, 1.0))``; None: not said.

    ``source``: the run that they were measured in, where it is one.
    """

    prompt: float | None = None
    kind: str = "fixed"
    numbers: tuple[float, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Study:
    """A program with its parameters, its plan, and what its calls would ask of the devices.

    ``costs``: None takes a roofline of the plan's cluster. Nothing is loaded, and no device is touched.
    """

    fn: Callable[..., Any]
    parameters: Mapping[str, Any]
    traced: Traced
    handles: Sequence[HandleLike]
    plan: Plan
    costs: Costs | None = None
    tokens: Tokens = field(default_factory=Tokens)
    seed: int = 0

    # -- what is there ------------------------------------------------------------------------------------------

    @cached_property
    def workers(self) -> tuple[str, ...]:
        return tuple(h.name for h in self.handles)

    @cached_property
    def roles(self) -> Mapping[str, Role]:
        """Workers by name, with the sizes of their models."""
        return roles_of(self.handles, self.traced)

    @cached_property
    def cost_model(self) -> Costs:
        return self.costs or Roofline(self.plan.cluster)

    @cached_property
    def ids(self) -> Mapping[Any, str]:
        return node_ids(self.traced)

    @cached_property
    def calls(self) -> Mapping[str, Made]:
        """The calls of one step by node id, with their rows; those outside of steps too."""
        found: dict[str, Made] = {}

        def note(made: Made) -> int:
            found[self.ids.get(made.call.place, made.call.title)] = made
            return 1

        clock = VirtualClock(Machine(self._free.setup), _NoTime())
        Flight(self.fn, clock, self._free, steps=2, note=note).fly(self.fn, self.parameters)
        return found

    @cached_property
    def _free(self) -> Scheme:
        """Everything in one pool, to look at calls without a plan."""
        return scheme_of(self.traced, self.plan, self.workers, in_one=True)

    @cached_property
    def works(self) -> Mapping[str, Work]:
        """The work of each worker's call in a steady step, by node id."""
        found = {node: self.work(made) for node, made in self.calls.items() if made.call.worker in self.roles}
        return {node: work for node, work in found.items() if work is not None}

    def names(self) -> tuple[str, ...]:
        """What costs can be given for: titles and node ids of the workers' calls, publishes, moves of memory."""
        publishes = [f"{w}.publish" for w in self.roles if self._publishes(w)]
        calls = [(node, made.call.title) for node, made in self.calls.items() if made.call.op.owner != "batch"]
        return tuple(dict.fromkeys((*(n for n, _ in calls), *(title for _, title in calls), *publishes)))

    # -- the work of a call -------------------------------------------------------------------------------------

    def work(self, made: Made) -> Work | None:
        """What a call asks of its devices; None for arithmetic on a batch."""
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
        )

    def load(self, made: Made) -> Workload:
        """Rows of a call, and tokens of each; as long as in the run that the costs are from, unless it was said."""
        if isinstance(self.costs, Calibrated) and self.tokens == Tokens():
            fit = self.costs.fits.get(self.ids.get(made.call.place, "")) or self.costs.fits.get(made.call.title)
            return Workload(made.rows, 0, fit.row_tokens if fit is not None else 0)
        lengths = self.lengths(made)
        return Workload(made.rows, lengths.prompt, lengths.mean)

    def lengths(self, made: Made) -> Lengths:
        """How long the rows of a call are: as was said, else as the data say, else the most that may be sampled."""
        prompt, response = self._prompt(made)[0], self._response(made)[0]
        said = self.tokens
        if not said.numbers:
            return Lengths(prompt, response)
        most = max(response, said.numbers[0]) if said.kind == "fixed" else inf
        return Lengths(prompt, most, said.kind, said.numbers)

    def _prompt(self, made: Made) -> tuple[float, str]:
        """Tokens of a call's average prompt, and in words where that is from."""
        said = self.tokens
        if said.prompt is not None:
            return said.prompt, f"measured: {said.source}" if said.source else "said"
        texts, vocab = self._texts(made), self._vocabulary(made)
        if texts is not None:
            return texts.tokens(texts.prompt, vocab), texts.basis(vocab)
        return PROMPT, "assumed"

    def _response(self, made: Made) -> tuple[float, str]:
        """Tokens of a call's responses where nothing was said of them, and in words where that is from."""
        call, texts, vocab = made.call, self._texts(made), self._vocabulary(made)
        if texts is not None and texts.response is not None:
            return texts.tokens(texts.response, vocab), texts.basis(vocab)
        most: Any = call.arguments.get("max_tokens")
        names = (*call.serves, call.worker, *(r.name for r in self.roles.values() if r.generates))
        given = {h.name: h.arguments.get("max_tokens") for h in self.handles}
        asked = most if most is not None else next((m for m in map(given.get, names) if isinstance(m, int)), None)
        return (asked, "max_tokens, the most") if asked is not None else (RESPONSE, "assumed")

    def _texts(self, made: Made) -> Texts | None:
        """The texts of the first of a call's sources that says something of them."""
        for source in made.sources:
            if id(source) not in self._looked:  # kept with the source, so that the id stays its own
                self._looked[id(source)] = (source, texts_of(source))
            if self._looked[id(source)][1] is not None:
                return self._looked[id(source)][1]
        return None

    @cached_property
    def _looked(self) -> dict[int, tuple[Any, Texts | None]]:
        return {}

    def _vocabulary(self, made: Made) -> int:
        """Entries of the vocabulary of the model that reads a call's rows: the call's own, else one that generates."""
        known = [self.roles[n] for n in (*made.call.serves, made.call.worker) if n in self.roles]
        models = [r.model for r in (*known, *(r for r in self.roles.values() if r.generates)) if r.model is not None]
        return models[0].vocab if models else CHARACTERS + 1

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
            backend=target.backend,
        )

    # -- memory -------------------------------------------------------------------------------------------------

    @cached_property
    def pool_memory(self) -> Mapping[str, PoolMemory]:
        """The memory of each pool whose devices are known."""
        loads: dict[tuple[str, str], Workload] = {}
        for work in self.works.values():
            key = (work.role.name, "generate" if work.kind == "generate" else "train")
            if key not in loads or work.load.tokens > loads[key].tokens:
                loads[key] = work.load
        found = {pool: pool_memory(self.plan, pool, list(self.roles.values()), loads) for pool in self.plan.pools}
        return {pool: memory for pool, memory in found.items() if memory is not None}

    def turns(self, pool: str) -> tuple[Turn, ...]:
        """The calls that a pool does in a step, in program order, and the publishes inside it."""
        found: list[Turn] = []
        for work in self.works.values():
            if work.pool == pool and work.role.model is not None:
                use = "generate" if work.kind == "generate" else "train"
                holder = self.calls[work.node].call.worker  # of a handle, whose model is needed at the same time
                both = (f"{holder}.train",) if holder != work.role.name and self.roles[holder].model is not None else ()
                found.append(Turn(work.title, (f"{work.role.name}.{use}", *both)))
                if work.kind == "train" and self._publishes(work.role.name) and not self.plan.split(work.role.name):
                    both = (f"{work.role.name}.train", f"{work.role.name}.generate")
                    found.append(Turn(f"{work.role.name}.publish", both, publish=True))
        return tuple(found)

    def _publishes(self, worker: str) -> bool:
        return self.roles[worker].trains and self.roles[worker].generates

    @cached_property
    def memory(self) -> dict[str, Memory]:
        """Who takes turns in the memory of which pool: what leaves when another is needed."""
        found: dict[str, Memory] = {}
        for pool, memory in self.pool_memory.items():
            swaps = memory.swaps(self.turns(pool))
            if swaps:
                found[pool] = Memory(max(swaps.values()), dict(swaps))
        return found

    # -- simulation ---------------------------------------------------------------------------------------------

    def simulate(self, steps: int | None = None) -> Simulation:
        """Fly the program with the real schedule on a virtual clock."""
        scheme = scheme_of(self.traced, self.plan, self.workers, memory=self.memory)
        pace = _Pace(self)
        clock = VirtualClock(Machine(scheme.setup), pace)
        flight = Flight(self.fn, clock, scheme, steps=steps, note=pace.note)
        flight.fly(self.fn, self.parameters)
        flown = clock.flown
        pools = {name: pool_text(self.plan, name) for name in self.plan.pools}
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
            steady(flown.commits, clock.time, scheme.setup.staleness),
            bars,
            times,
            clock.lags(),
            self.cost_model.source,
            scheme.setup.staleness,
            flown.events,
            assumed=tuple(f"not ({c})   {at}" for c, at in flight.assumed.conditions.items()),
            notes=self._notes(),
            workers=self.workers,
        )

    def _notes(self) -> tuple[str, ...]:
        """What the times rest on."""
        found = [*self._said_of_lengths(), *self._said_of_places()]
        if self.costs is None:
            if any(work.kind == "external" for work in self.works.values()):
                row = Efficiency().row_s
                found.append(f"a row of a reward or environment: {1000 * row:g} ms on a process (assumed)")
            found.append("the roofline is not calibrated: compare plans, do not promise seconds")
        return tuple(found)

    def _said_of_places(self) -> Iterator[str]:
        """Calls whose seconds were measured elsewhere than where the plan has them."""
        for work in self.works.values():
            was = self.costs.places.get(work.title) if isinstance(self.costs, Calibrated) else None
            now = placed(work.backend, work.mesh)
            if was is not None and work.role.model is not None and was != now:
                yield f"{work.node}: its seconds were measured on {was}, and are taken for {now}"

    def _said_of_lengths(self) -> Iterator[str]:
        """Tokens of prompts and responses, with where they are from, by the calls of which they are alike."""
        if isinstance(self.costs, Calibrated) and self.tokens == Tokens():
            yield f"tokens of a row: those of each call of {self.costs.run}"
            return
        alike: dict[str, list[str]] = {}
        for node, made in self.calls.items():
            if node in self.works and made.rows:
                prompt, response = self._prompt(made), self._response(made)
                if self.tokens.numbers:
                    basis = f"measured: {self.tokens.source}" if self.tokens.source else "said"
                    length = f"{self.lengths(made).words} ({basis})"
                else:
                    length = f"{_plain(response[0])} ({response[1]})"
                alike.setdefault(
                    f"tokens of a prompt: {_plain(prompt[0])} ({prompt[1]}); of a response: {length}", []
                ).append(node)
        for said, nodes in alike.items():
            yield said if len(alike) == 1 else f"{', '.join(nodes)}: {said}"


def pool_text(plan: Plan, name: str) -> str:
    """What a pool has: ``devices 0-7 (h100-80)``, ``4 processes``, or its device in this process."""
    pool = plan.pools[name]
    said = pool.to_json()
    if pool.devices and plan.cluster is not None:
        kinds = dict.fromkeys(plan.cluster.kind(d).name for d in pool.devices)
        return f"devices {said['devices']} ({', '.join(kinds)})"
    return f"{pool.processes} processes" if pool.processes else str(said.get("device", "auto"))


class _NoTime:
    """Calls that take no time: for looking at a program, not at a schedule."""

    def seconds(self, call: Call) -> float:
        return 0.0

    def rows(self, call: Call) -> Rows | None:
        return None

    def publish(self, worker: str) -> float:
        return 0.0

    def swap(self, pool: str, resident: str) -> float:
        return 0.0


class _Pace:
    """The costs of a study, for the virtual clock. Equal calls are priced once."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self.nodes: dict[int, str] = {}
        self._works: dict[int, Work] = {}
        self._made: dict[int, Made] = {}
        self._known: dict[tuple[str, Workload], float] = {}
        self._moves: dict[tuple[str, str], float] = {}

    def note(self, made: Made) -> int:
        """Remember a call before it is issued. Returns its prompt groups."""
        study, call = self._study, made.call
        self.nodes[call.index] = study.ids.get(call.place, call.title)
        work = study.work(made)
        if work is not None:
            self._works[call.index] = work
            self._made[call.index] = made
        n = call.arguments.get("n")
        return max(1, made.rows // n) if isinstance(n, int) and n else max(1, made.rows)

    def seconds(self, call: Call) -> float:
        work = self._works.get(call.id)
        if work is None:
            return 0.0
        key = (work.node, work.load)
        if key not in self._known:
            self._known[key] = self._study.cost_model.seconds(work)
        return self._known[key]

    def rows(self, call: Call) -> Rows | None:
        """Rows of their own lengths. An engine runs as many at once as one call has; a row takes its share of the
        seconds that the call has for rows of average length."""
        made = self._made.get(call.id)
        lengths = self._study.lengths(made) if made is not None else None
        if made is None or lengths is None or not lengths.varies or not made.rows:
            return None
        each = self.seconds(call) / lengths.mean
        drawn = [each * tokens for tokens in lengths.draw(made.rows, f"{self._study.seed} {call.id}")]
        size = max(1, made.rows // max(1, call.groups or self._groups(made)))
        return Rows([drawn[i : i + size] for i in range(0, len(drawn), size)], made.rows)

    def _groups(self, made: Made) -> int:
        n = made.call.arguments.get("n")
        return made.rows // n if isinstance(n, int) and n else made.rows

    def publish(self, worker: str) -> float:
        return self._move(("publish", worker), lambda: self._study.publish(worker))

    def swap(self, pool: str, resident: str) -> float:
        return self._move((pool, resident), lambda: self._swapped(pool, resident))

    def _move(self, key: tuple[str, str], work: Callable[[], Work]) -> float:
        if key not in self._moves:
            self._moves[key] = self._study.cost_model.seconds(work())
        return self._moves[key]

    def _swapped(self, pool: str, resident: str) -> Work:
        worker, _, _ = resident.rpartition(".")
        study = self._study
        size = study.memory[pool].sizes[resident]
        devices = study.plan.pools[pool].devices
        role, mesh, title = study.roles[worker], Mesh({"dp": len(devices)}), f"{resident}.offload"
        return Work(title, title, "offload", role, Workload(0, 0, 0), mesh, devices, pool=pool, moved=size)


def _plain(count: float) -> str:
    """A count of tokens: ``1024``, ``5.78``."""
    return f"{count:g}" if count == round(count) else f"{count:.3g}" if count < 100 else f"{count:.0f}"
