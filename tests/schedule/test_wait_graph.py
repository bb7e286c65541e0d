"""What can wait for what: a superset of the waits of every run, without a cycle; a wrong rule gives one, and is shown."""

from __future__ import annotations

import random

import pytest
from every_order import Actions, deadlocks
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import COLOCATED, SHARED, SPLIT, Driver, Times, pools_of, setup

from flowrl.schedule.events import Setup
from flowrl.schedule.machine import Machine
from flowrl.schedule.publish_rules import PublishRules
from flowrl.schedule.virtual_clock import Deadlock
from flowrl.schedule.wait_graph import WaitRecorder, Waits

PLACES = {"split": SPLIT, "colocated": COLOCATED, "shared": SHARED}


def some_program(driver: Driver, steps: int, seed: int) -> None:
    """Calls at random: some samples, some reads of what is there, updates or none, and values that are waited for."""
    chance, made = random.Random(seed), []
    for _ in driver.steps(steps):
        for _ in range(chance.randint(1, 4)):
            given = chance.sample(made[-6:], min(len(made[-6:]), chance.randint(0, 2)))
            made.append(chance.choice([driver.generate, driver.score, driver.logprobs, driver.update])(*given))
            if chance.random() < 0.2:
                driver.read(chance.choice(made))
    if chance.random() < 0.5:
        driver.update(*made[-1:])
    driver.clock.end()


def grpo(driver: Driver, steps: int) -> None:
    for _ in driver.steps(steps):
        rows = driver.generate()
        driver.update(driver.score(rows), driver.logprobs(rows))
    driver.clock.end()


def driver_of(place: str, clock=None, **more) -> Driver:
    followers = PLACES[place]
    made = setup(followers, ("train", "rollout", "cpu") if place == "split" else ("gpu", "cpu"), **more)
    driver = Driver(made, Times(chance=random.Random(0)), pools_of(followers))
    if clock is not None:
        driver.clock = clock(made)
    return driver


def waits_of(program, place: str, *given, **more) -> tuple[Waits, WaitRecorder]:
    driver = driver_of(place, WaitRecorder, **more)
    program(driver, *given)
    return driver.clock.found(), driver.clock


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(sorted(PLACES)),
    st.integers(0, 3),
    st.sampled_from(["drain", "interrupt"]),
    st.sampled_from([1, 3]),
)
@settings(max_examples=150, deadline=None)
def test_every_wait_of_a_run_on_random_times_is_in_the_graph(seed, place, staleness, publish, chunks):
    more = {"staleness": 0 if place == "shared" else staleness, "publish": publish, "chunks": chunks}
    found, recorder = waits_of(some_program, place, 5, seed, **more)
    assert not found.cycle and found.steps == 5
    driver = driver_of(place, **more)
    driver.clock.pace.chance = random.Random(seed)
    names = WaitRecorder(driver.machine.setup)
    names.machine.__dict__ = driver.machine.__dict__
    handle = driver.machine.handle

    def watched(event):
        commands = handle(event)
        names._calls = {call.id: call for call in driver.calls}
        for node in driver.machine.unfinished():
            for other in node.on:
                assert names._title(other) in recorder.waits[names._title(node.id)]
        return commands

    driver.machine.handle = watched
    some_program(driver, 5, seed)
    assert driver.machine.committed == 5


@pytest.mark.parametrize(("place", "staleness"), [("split", 0), ("split", 1), ("shared", 0), ("colocated", 1)])
def test_no_order_of_events_ends_in_a_deadlock(place, staleness):
    driver = driver_of(place, Actions, staleness=staleness)
    grpo(driver, staleness + 2)
    found, states = deadlocks(driver.clock.setup, driver.clock.done)
    assert not found and states > 50
    assert not waits_of(grpo, place, staleness + 2, staleness=staleness)[0].cycle


def _held(monkeypatch):
    """Publishes are held for the next step although that waits for them."""
    monkeypatch.setattr(Setup, "settled", property(lambda self: True))


def _late(monkeypatch):
    """A step opens only when fewer than S before it are uncommitted."""
    monkeypatch.setattr(Machine, "may_open", lambda self, step: step - self.committed < self.setup.staleness)


def _newer(monkeypatch):
    """What samples waits for a publish that is held until it has sampled."""
    plain = PublishRules.see

    def see(self, node, call, worker):
        plain(self, node, call, worker)
        node.wait_for(self.copies[worker].last)

    monkeypatch.setattr(PublishRules, "see", see)


@pytest.mark.parametrize(
    ("fault", "staleness", "says"),
    [
        (_held, 0, ["actor.publish of version 1", "the commit of step 0", "the opening of step 1"]),
        (_late, 0, ["the opening of step 0", "the commit of step 0"]),
        (_newer, 1, ["actor.publish of version 1", "actor.generate (call 4 of step 1)"]),
    ],
)
def test_a_wrong_rule_is_a_cycle_that_is_told_and_some_order_ends_in_it(monkeypatch, fault, staleness, says):
    fault(monkeypatch)
    found = waits_of(grpo, "split", 1 if fault is _late else 2, staleness=staleness)[0]
    assert found.cycle and set(says) <= set(found.cycle)
    lines = found.text().split("\n  waits for ")
    assert lines[0] == lines[-1] and len(lines) == len(found.cycle) + 1
    driver = driver_of("split", Actions, staleness=staleness)
    grpo(driver, 2)
    assert deadlocks(driver.clock.setup, driver.clock.done)[0]
    with pytest.raises(Deadlock):
        grpo(driver_of("split", staleness=staleness), 3)


def test_the_counts_of_a_small_program():
    found = waits_of(grpo, "split", 2)[0]
    assert (found.steps, found.calls, found.moves) == (2, 8, 4)  # a stage and a publish for each step
    assert found.text().startswith("no deadlock: the ")
