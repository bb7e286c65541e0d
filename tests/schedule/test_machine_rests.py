"""In a pool that samples and trains, rows stand still for calls that come before theirs, and go on after the publish."""

from __future__ import annotations

import pytest
from programs import COLOCATED, Driver, Times, pools_of, setup

from flowrl.placement.cost.continuous_batch import Engine
from flowrl.schedule.engine_slots import Rows
from flowrl.schedule.events import (
    Call,
    Closed,
    Commit,
    Entered,
    Finished,
    GoOn,
    Issued,
    Memory,
    Opened,
    Publish,
    Stage,
    Start,
)
from flowrl.schedule.machine import Machine

RELAXED = {"serves": ("actor",), "relaxed": True}
SIZES = Memory(3.0, {"actor.train": 3.0, "actor.generate": 2.0})


def begun(commands) -> list[tuple]:
    """What is begun, in short: (id, pools whose rows rest), ("stage" or "publish", version), ("on", pool), ("commit", k)."""
    found: list[tuple] = []
    for command in commands:
        match command:
            case Start():
                found.append((command.id, command.rests))
            case Stage():
                found.append(("stage", command.version, command.id))
            case Publish():
                found.append(("publish", command.version, command.id))
            case GoOn():
                found.append(("on", command.pool, command.offload, command.onload))
            case Commit():
                found.append(("commit", command.step))
    return found


class Told:
    """A machine that is told events one by one."""

    def __init__(self, **more) -> None:
        pools = ("gpu", "cpu")
        self.machine = Machine(setup(COLOCATED, pools, staleness=1, publish="interrupt", **more))

    def __call__(self, event) -> list[tuple]:
        return begun(self.machine.handle(event))

    def step(self, number: int, first: int) -> list[list[tuple]]:
        """Issue generate, score, logprobs and update of a step, and close it."""
        train = ("actor.train",) if self.machine.setup.memory else ()
        serve = ("actor.generate",) if self.machine.setup.memory else ()
        calls = [
            Call(first, number, "actor.generate", ("gpu",), residents=serve, **RELAXED),
            Call(first + 1, number, "reward.score", ("cpu",), (first,)),
            Call(first + 2, number, "actor.logprobs", ("gpu",), (first,), reads=("actor",), residents=train),
            Call(first + 3, number, "actor.update", ("gpu",), (first + 1, first + 2), reads=("actor",),
                 updates="actor", residents=train),
        ]  # fmt: skip
        return [self(Opened(number)), *(self(Issued(call)) for call in calls), self(Closed(number))]


def test_episodes_that_ask_by_themselves_do_not_stand_still():
    """Their calls have threads of their own: what trains in their pool waits until they are over."""
    told = Told()
    for number, first in ((0, 0), (1, 4)):
        told(Opened(number))
        told(Issued(Call(first, number, "game.rollout", ("gpu",), joins=True, **RELAXED)))
        told(Issued(Call(first + 1, number, "actor.update", ("gpu",), (first,), reads=("actor",), updates="actor")))
        told(Closed(number))
        if not number:
            assert told(Entered(0)) == []
    assert told(Entered(4)) == []
    assert told(Finished(0)) == [], "the other step's episodes are played"
    assert told(Finished(4)) == [(1, ())]


@pytest.mark.parametrize("memory", [False, True])
def test_rows_of_the_next_step_stand_still_from_the_first_call_of_this_one_to_its_publish(memory):
    told = Told(memory={"gpu": SIZES} if memory else {})
    told.step(0, 0)
    told.step(1, 4)
    assert told(Entered(0)) == [(4, ())], "the next step's rows join"
    assert told(Finished(0)) == [(1, ()), (2, ("gpu",))], "rewards elsewhere, log-probabilities where rows run"
    assert told(Finished(2)) == [], "the update is still to come: rows do not go on for a moment"
    assert told(Finished(1)) == [(3, ())], "rows rest already"
    ((_, version, stage),) = told(Finished(3))
    ((_, _, publish),) = told(Finished(stage))
    moves = ((("gpu", "actor.train"),), (("gpu", "actor.generate"),)) if memory else ((), ())
    assert version == 1 and told(Finished(publish)) == [("commit", 0), ("on", "gpu", *moves)]
    assert told(Finished(4)) == [(5, ()), (6, ())], "nothing runs that would stand still"


def test_a_call_that_samples_and_is_earlier_goes_on_first():
    """Its rows are what a later call needs: rows go on for it, and no call waits for another that waits for it."""
    told = Told()
    told(Opened(0))
    told(Issued(Call(0, 0, "actor.generate", ("gpu",), **RELAXED)))
    told(Issued(Call(1, 0, "actor.logprobs", ("gpu",), (0,), reads=("actor",))))
    told(Entered(0))
    told(Issued(Call(2, 0, "actor.generate", ("gpu",), **RELAXED)))
    told(Issued(Call(3, 0, "actor.update", ("gpu",), (1, 2), reads=("actor",), updates="actor")))
    assert told(Finished(0)) == [(1, ("gpu",))]
    assert told(Finished(1)) == [("on", "gpu", (), ())], "the update needs these rows"
    assert told(Finished(2)) == [(3, ())]


def test_an_update_does_not_stand_in_for_rows_of_its_own_step():
    told = Told()
    told.step(0, 0)
    told(Entered(0))
    assert told(Issued(Call(9, -1, "ref.logprobs", ("gpu",), reads=("ref",)))) == [], "it is later than rows that run"


def test_drain_and_continue_let_rows_end():
    for publish in ("drain", "continue"):
        told = Told()
        told.machine = Machine(setup(COLOCATED, ("gpu", "cpu"), staleness=1, publish=publish))
        told.step(0, 0)
        told.step(1, 4)
        told(Entered(0))
        assert told(Finished(0)) == [(1, ())]
        assert told(Finished(4)) == [(2, ())], "the rows of the next step have ended"


@pytest.mark.parametrize("rows", [False, True])
def test_simulated_rows_stand_still_as_long_as_others_have_their_pool(rows):
    """Two steps of which the second one's rows begin with the first one's: 4 seconds of rows, of which 3 are left when
    the update of 5 seconds begins; then 3 more, and the second update."""
    times = Times({"actor.generate": 4.0, "actor.update": 5.0})
    if rows:
        engine = Engine(64, lambda running: 1.0)
        times.engine = lambda call: Rows([[1.0 if call.step == 0 else 4.0]], engine)
    driver = Driver(setup(COLOCATED, ("gpu", "cpu"), staleness=1, publish="interrupt"), times, pools_of(COLOCATED))
    for _ in driver.steps(2):
        driver.update(driver.generate())
    driver.clock.end()
    if rows:
        assert driver.clock.time == pytest.approx(1 + 5 + 3 + 5)
    else:  # a block of a call takes the pool: nothing joins it
        assert driver.clock.time == pytest.approx(4 + 5 + 4 + 5)
