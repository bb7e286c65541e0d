"""A run begins with calls and publishes in the order in which the simulator does: rows of one version share a batch of
the engine where the plan drains before a publish, and at staleness 0 and 1 each call has the engine for itself."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import table_engine

sys.path.insert(0, str(Path(__file__).parents[3] / "algorithms"))

import flowrl as fl
from flowrl import rl
from flowrl.analysis.call_seconds import NoTime
from flowrl.placement.backends import BACKENDS
from flowrl.placement.cost.continuous_batch import Engine
from flowrl.placement.plan.plan import Pipeline, Place, Plan
from flowrl.runtime.driver import running_program
from flowrl.runtime.driver.dispatcher import Dispatcher
from flowrl.runtime.driver.pool_threads import Pools
from flowrl.runtime.local.shared_engine import SharedEngine
from flowrl.schedule.engine_slots import Rows
from flowrl.schedule.events import Call, Finished, Issued, Publish, Start
from flowrl.schedule.fly_program import Flight
from flowrl.schedule.machine import Machine
from flowrl.schedule.virtual_clock import VirtualClock
from tasks import arithmetic

PROMPTS, GROUP = 4, 2
TOKENS = [60, 300, 150, 90, 375, 120, 210, 45]  # of all rows of each generate: steps end out of their order
QUICK = 1e-3  # seconds of what does not sample; a token takes one


class Witness(fl.Worker):
    """Keeps the versions of what is trained on."""

    versions: ClassVar[list[list[int]]] = []

    @fl.op(reads="versions")
    def see(self, batch: fl.Batch) -> fl.Metrics:
        self.versions.extend(batch["versions"].to_list())
        return fl.Metrics(seen=len(batch))


flow = fl.Flow("ordered")
actor = flow.worker(fl.Actor, arithmetic.MODEL, max_tokens=400)
reward = flow.worker(fl.FunctionReward, lambda prompt, response: float(len(response) % 7))
witness = flow.worker(Witness)


@flow.program
def ordered(steps: int = len(TOKENS)):
    for step, batch in flow.steps(arithmetic.prompts(PROMPTS), steps):
        rows = rl.advantages(reward.score(actor.generate(batch, n=GROUP)))
        witness.see(rows)
        flow.log(step, actor.update(rows, loss=rl.ppo_clip()))


def plan(**pipeline: Any) -> Plan:
    pools = {"train": "cpu", "rollout": "cpu", "cpu": "cpu"}
    copies = {"train": Place("train", backend="table"), "generate": Place("rollout", backend="table")}
    place = {"actor": copies, "reward": Place("cpu"), "witness": Place("cpu")}
    return Plan(pools, place, pipeline=Pipeline(**pipeline))


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setitem(BACKENDS, "table", table_engine.ROW)
    Witness.versions.clear()


class Order:
    """What machines have begun with in the pool that samples, in their order, and how many calls were there together."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int, int]] = []
        self.together = 0
        self._steps: dict[int, int] = {}
        self._inside: set[tuple[int, int]] = set()

    def machine(self, *given: Any, **named: Any) -> Machine:
        """Return a machine whose commands are noted."""
        made = Machine(*given, **named)
        handle = made.handle

        def noted(event: Any) -> Any:
            commands = handle(event)
            self._note(event, commands)
            return commands

        made.handle = noted
        return made

    def _note(self, event: Any, commands: Any) -> None:
        if isinstance(event, Issued):
            self._steps[event.call.id] = event.call.step
        elif isinstance(event, Finished):
            self._inside.discard((event.id, event.chunk))
        for command in commands:
            if isinstance(command, Publish):
                self.begun.append(("publish", command.version, 0))
            elif isinstance(command, Start) and command.pools == ("rollout",):
                self._inside.add((command.id, command.chunk))
                self.together = max(self.together, len(self._inside))
                self.begun.append(("generate", self._steps[command.id], command.chunk))


def simulated(made: Plan) -> Order:
    order = Order()
    execution = flow.study(made).execution
    engine, tokens = Engine(1000, lambda rows: 1.0), iter(TOKENS)
    known: dict[int, Rows] = {}

    class Pace(NoTime):
        def seconds(self, call: Call) -> float:
            return QUICK

        def rows(self, call: Call) -> Rows:
            if call.id not in known:
                known[call.id] = Rows([[float(next(tokens))] * GROUP] * PROMPTS, engine)
            return known[call.id]

        def publish(self, worker: str) -> float:
            return 0.5

    clock = VirtualClock(order.machine(execution.scheme.setup), Pace(), home=execution.scheme.home)
    flight = Flight(execution.fn, clock, execution.scheme, steps=None, note=lambda call: PROMPTS)
    flight.fly(execution.fn, execution.parameters)
    return order


class OneAtATime:
    """Has the engine make a step, or take new weights, once all else has come to its end: as if that took no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
        self.waits: Any = None  # for what the driver waits
        self.dispatcher: Dispatcher | None = None
        made, wait, step, publish = Dispatcher.__init__, Pools.wait, SharedEngine.step, SharedEngine.publish
        gate = self

        def noted(dispatcher: Dispatcher, *given: Any, **named: Any) -> None:
            made(dispatcher, *given, **named)
            gate.dispatcher = dispatcher

        def waiting(pools: Pools, done: Any) -> None:
            gate.waits = done
            try:
                wait(pools, done)
            finally:
                gate.waits = None

        def stepped(shared: SharedEngine) -> None:
            if gate.is_quiet():
                step(shared)
            else:
                time.sleep(1e-3)

        def published(shared: SharedEngine, *given: Any, **named: Any) -> int:
            end = time.monotonic() + 60
            while not gate.is_quiet(publishes=True):
                assert time.monotonic() < end, "other pools do not come to their end"
                time.sleep(1e-3)
            return publish(shared, *given, **named)

        def end_of(engine: Any, row: Any) -> str | None:
            return "length" if len(row.ids) >= TOKENS[(row.call - 1) // chunks] else None

        monkeypatch.setattr(Dispatcher, "__init__", noted)
        monkeypatch.setattr(Pools, "wait", waiting)
        monkeypatch.setattr(SharedEngine, "step", stepped)
        monkeypatch.setattr(SharedEngine, "publish", published)
        monkeypatch.setattr(table_engine.Table, "end_of", end_of)

    def is_quiet(self, *, publishes: bool = False) -> bool:
        """Whether nothing runs but what samples, or a publish, and the driver waits."""
        dispatcher = self.dispatcher
        assert dispatcher is not None
        with dispatcher.under_way.changed:
            waits = self.waits
            running = [dispatcher.under_way.calls.get(number) for number in dispatcher.machine.running if number >= 0]
            moves = {node.kind for node in dispatcher.machine._started.values()} - {"call"}
            sample = all(call is not None and call.streams for call in running)
            still = sample and waits is not None and not waits()
            if publishes:  # a further publish may be queued behind this one
                return still and "stage" not in moves
            return still and not moves and not dispatcher.under_way.queued


@pytest.mark.parametrize(("staleness", "chunks"), [(2, 1), (3, 1), (3, 2)])
def test_with_drain_a_run_and_its_simulation_begin_in_the_same_order(tmp_path: Path, staleness: int, chunks: int):
    """Calls of all open steps are in one batch; a publish waits until their rows have ended, and keeps later ones out."""
    made = plan(staleness=staleness, publish="drain", chunks=chunks)
    flown = simulated(made)
    with pytest.MonkeyPatch.context() as patched:
        OneAtATime(patched, chunks)
        ran = Order()
        patched.setattr(running_program, "Machine", ran.machine)
        flow.run(out=tmp_path / "run", plan=made, quiet=True, save_models=False)
    assert ran.begun == flown.begun
    assert ran.together == flown.together == (staleness + 1) * chunks
    assert all(len(set(versions)) == 1 for versions in Witness.versions), "rows of one version"


@pytest.mark.parametrize(("staleness", "chunks"), [(0, 2), (1, 1), (1, 2)])
def test_up_to_one_step_apart_a_call_has_the_engine_for_itself(tmp_path: Path, staleness: int, chunks: int):
    """What an engine computes depends on the program alone then, chunks too: in a run and in its simulation."""
    made = plan(staleness=staleness, publish="drain", chunks=chunks)
    flown = simulated(made)
    with pytest.MonkeyPatch.context() as patched:
        ran = Order()
        patched.setattr(running_program, "Machine", ran.machine)
        flow.run(out=tmp_path / "run", plan=made, quiet=True, save_models=False)
    assert ran.begun == flown.begun and ran.together == flown.together == 1
