"""Episodes begin, and weights are published, in the order of the simulator and after as many tokens, so each row has the
versions that it foresees: those of open steps beside each other where a publish may come between two tokens."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from copy import copy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import table_engine

sys.path.insert(0, str(Path(__file__).parents[3] / "algorithms"))

import flowrl as fl
from flowrl import rl
from flowrl.analysis.call_seconds import NoTime
from flowrl.backends.stream import Stream
from flowrl.placement.backends import BACKENDS
from flowrl.placement.cost.continuous_batch import Engine
from flowrl.placement.plan.plan import Pipeline, Place, Plan
from flowrl.runtime.driver import running_program
from flowrl.runtime.driver.dispatcher import Dispatcher
from flowrl.runtime.driver.pool_threads import Pools
from flowrl.runtime.local.executor import LocalExecutor
from flowrl.schedule.engine_slots import Rows
from flowrl.schedule.events import Call, Finished, Issued, Publish, Start
from flowrl.schedule.fly_program import Flight
from flowrl.schedule.machine import Machine
from flowrl.schedule.virtual_clock import VirtualClock
from tasks import arithmetic

PROMPTS, GROUP, TURNS = 4, 2, 3
LONGEST = [60, 303, 151, 92, 375, 122, 210, 47]  # tokens of the longest row of each step: steps end out of their order
QUICK = 1e-3  # seconds of what does not sample; a token takes one


def length(number: int) -> int:
    """Tokens that the episode of a prompt has in all its turns."""
    return LONGEST[number // PROMPTS] - 7 * (number % PROMPTS)


def of_turn(number: int, turn: int) -> int:
    """Those of a turn: its part of them."""
    return length(number) * (turn + 1) // TURNS - length(number) * turn // TURNS


class Turns(fl.Env):
    """Says nothing, so that a row goes on with the next turn as if it were one."""

    turns = TURNS
    timeout = None  # its functions are called in the thread of the op, and no step is made beside them

    def reset(self, row, seed):
        return 0, ""

    def step(self, state, action):
        return state + 1, "", float(len(action) % 7), state + 1 == TURNS


class Witness(fl.Worker):
    """Keeps the versions of what is trained on, by the number of the prompt: those of its rows, as often as they differ."""

    versions: ClassVar[dict[int, list[list[int]]]] = {}

    @fl.op(reads="versions")
    def see(self, batch: fl.Batch) -> fl.Metrics:
        for key, versions in zip(batch.keys, batch["versions"].to_list(), strict=True):
            known = self.versions.setdefault(key[0], [])
            known += [versions] if versions not in known else []
        return fl.Metrics(seen=len(batch))


flow = fl.Flow("played")
actor = flow.worker(fl.Actor, arithmetic.MODEL, max_tokens=400)
game = flow.worker(Turns)
witness = flow.worker(Witness)
tasks = fl.data.rows([{"prompt": f"{i:02}"} for i in range(40)], batch=PROMPTS, shuffle=False)


@flow.program
def played(steps: int = len(LONGEST)):
    for step, batch in flow.steps(tasks, steps):
        rows = rl.advantages(game.rollout(batch, policy=actor, n=GROUP))
        witness.see(rows)
        flow.log(step, actor.update(rows, loss=rl.ppo_clip()))


def plan(**pipeline: Any) -> Plan:
    pools = {"train": "cpu", "rollout": "cpu", "games": "cpu", "cpu": "cpu"}
    copies = {"train": Place("train", backend="table"), "generate": Place("rollout", backend="table")}
    place = {"actor": copies, "game": Place("games"), "witness": Place("cpu")}
    return Plan(pools, place, pipeline=Pipeline(**pipeline))


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """An engine whose rows have the tokens of their turn."""
    monkeypatch.setitem(BACKENDS, "table", table_engine.ROW)
    numbers = {tuple(arithmetic.build_tokenizer().encode(f"{i:02}")): i for i in range(40)}

    def end_of(engine: Any, row: Any) -> str | None:
        number = next(n for ids, n in numbers.items() if row.prompt[: len(ids)] == ids)
        had, whole = row.start, 0
        for turn in range(TURNS):
            if whole == had:
                return "stop" if len(row.ids) >= of_turn(number, turn) else None
            whole += of_turn(number, turn)
        raise AssertionError(f"no turn of {number} begins after {had} tokens")

    monkeypatch.setattr(table_engine.Table, "end_of", end_of)
    Witness.versions.clear()


class Order:
    """What a machine has begun with where it samples, in its order: with the step or version, and the tokens that its
    engine had made until then. ``together``: steps that were played beside each other, at most."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int, int]] = []
        self.together = 0
        self.tokens: Any = lambda: 0
        self._steps: dict[int, int] = {}
        self._inside: set[int] = set()

    def machine(self, *given: Any, **named: Any) -> Machine:
        """Return a machine whose commands are noted."""
        made = Machine(*given, **named)
        handle = made.handle

        def noted(event: Any) -> Any:
            commands = handle(event)
            if isinstance(event, Issued) and event.call.serves:
                self._steps[event.call.id] = event.call.step
            elif isinstance(event, Finished):
                self._inside.discard(event.id)
            for command in commands:
                if isinstance(command, Publish):
                    self.begun.append(("publish", command.version, self.tokens()))
                elif isinstance(command, Start) and command.id in self._steps:
                    self._inside.add(command.id)
                    self.together = max(self.together, len(self._inside))
                    self.begun.append(("rollout", self._steps[command.id], self.tokens()))
            return commands

        made.handle = noted
        return made

    def versions(self) -> dict[int, list[list[int]]]:
        """What follows from that: the version of each token of each row, by the number of its prompt."""
        published = [tokens for what, _, tokens in self.begun if what == "publish"]
        found: dict[int, list[list[int]]] = {}
        for what, step, begin in self.begun:
            if what == "rollout":
                before = sum(1 for each in self.begun[: self.begun.index((what, step, begin))] if each[0] == "publish")
                for number in range(PROMPTS * step, PROMPTS * (step + 1)):
                    made = range(begin, begin + length(number))
                    found[number] = [[max(before, sum(tokens <= at for tokens in published)) for at in made]]
        return found


def simulated(made: Plan) -> tuple[Order, VirtualClock]:
    order, execution, engine = Order(), flow.study(made).execution, Engine(1000, lambda rows: 1.0)

    class Pace(NoTime):
        def seconds(self, call: Call) -> float:
            return QUICK

        def rows(self, call: Call) -> Rows:
            return Rows([[float(length(PROMPTS * call.step + p))] * GROUP for p in range(PROMPTS)], engine)

        def publish(self, worker: str) -> float:
            return 0.5

    clock = VirtualClock(order.machine(execution.scheme.setup), Pace(), home=execution.scheme.home)

    def tokens() -> int:
        if "rollout" not in clock._engines:
            return 0
        batch = clock._engines["rollout"].batch
        now = copy(batch)
        now._waiting, now._running = deque(batch._waiting), list(batch._running)
        deque(now._go(clock.time), maxlen=0)
        return int(now._token + 1e-6)

    order.tokens = tokens
    flight = Flight(execution.fn, clock, execution.scheme, steps=None, note=lambda call: PROMPTS)
    flight.fly(execution.fn, execution.parameters)
    return order, clock


class OneAtATime:
    """Has the engine make a token of each row, or take new weights, once all else has come to its end: as if that took no
    time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
        self.waits: Any = None  # for what the driver waits
        self.dispatcher: Dispatcher | None = None
        self.inside: dict[int, Any] = {}  # by thread: the calls whose rows it waits for
        self.stepping = threading.Lock()
        made, wait, install = Dispatcher.__init__, Pools.wait, LocalExecutor.install
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

        def asked(stream: Stream, calls: Any) -> Any:
            order.tokens = lambda: stream.steps
            me = threading.get_ident()
            gate.inside[me] = calls
            try:
                while not stream.has_news(calls):
                    with gate.stepping:
                        if gate.is_quiet(stream):
                            stream.step()
                    time.sleep(2e-4)
                return stream.take(calls)
            finally:
                del gate.inside[me]

        def installed(executor: LocalExecutor, name: str, *given: Any, **named: Any) -> int:
            end, stream = time.monotonic() + 60, executor.open_server(name).stream
            while not gate.is_quiet(stream, publishes=True):
                assert time.monotonic() < end, "other pools do not come to their end"
                time.sleep(2e-4)
            return install(executor, name, *given, **named)

        monkeypatch.setattr(Dispatcher, "__init__", noted)
        monkeypatch.setattr(Pools, "wait", waiting)
        monkeypatch.setattr(Stream, "rows_of", asked)
        monkeypatch.setattr(LocalExecutor, "install", installed)

    def is_quiet(self, stream: Stream, *, publishes: bool = False) -> bool:
        """Whether nothing runs but episodes, all of which wait for a token, or a publish, and the driver waits."""
        dispatcher = self.dispatcher
        assert dispatcher is not None
        with dispatcher.under_way.changed:
            waits, running = self.waits, [number for number in dispatcher.machine.running if number >= 0]
            moves = {node.kind for node in dispatcher.machine._started.values()} - {"call"}
            calls = [dispatcher.under_way.calls.get(number) for number in running]
            play = all(call is not None and call.op.name == "rollout" for call in calls)
            inside = list(self.inside.values())
            wait = len(inside) == len(calls) and not any(map(stream.has_news, inside))
            still = waits is not None and not waits() and play and wait
            if publishes:  # a further publish may be queued behind this one
                return still and "stage" not in moves
            return still and not moves and not dispatcher.under_way.queued


@pytest.mark.parametrize(
    ("staleness", "publish", "beside"),
    [(0, "drain", 1), (1, "drain", 1), (4, "drain", 1), (1, "interrupt", 2), (4, "interrupt", 5), (4, "continue", 5)],
)
def test_a_run_of_episodes_and_its_simulation_are_in_the_same_order(
    tmp_path: Path, staleness: int, publish: str, beside: int
):
    made = plan(staleness=staleness, publish=publish)
    flown, clock = simulated(made)
    ran = Order()
    with pytest.MonkeyPatch.context() as patched:
        OneAtATime(patched, ran)
        patched.setattr(running_program, "Machine", ran.machine)
        flow.run(out=tmp_path / "run", plan=made, quiet=True, save_models=False, runtime="local")
    assert ran.begun == flown.begun
    assert ran.together == flown.together == beside
    assert Witness.versions == flown.versions()
    lags = [number // PROMPTS - min(versions) for number, (versions,) in sorted(Witness.versions.items())]
    assert max(lags) == max(clock.lags()) <= staleness, "the bound, as the simulation tells it"
    several = [number for number, (versions,) in Witness.versions.items() if len(set(versions)) > 1]
    assert bool(several) == (publish != "drain"), "rows go on under weights that are published meanwhile"
