"""What can wait for what: a superset of the waits of every run, without a cycle; a wrong rule gives one, and is shown."""

from __future__ import annotations

import random

import pytest
from every_order import Actions, deadlocks
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import COLOCATED, SHARED, SPLIT, Driver, Times, pools_of, setup

from flowrl.schedule.events import Setup
from flowrl.schedule.group_window import Window
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
            kind = chance.choice([driver.generate, driver.score, driver.logprobs, driver.update])
            more = {"groups": chance.randint(1, 3)} if kind == driver.generate else {}
            made.append(kind(*given, **more))
            if chance.random() < 0.2:
                driver.read(chance.choice(made))
    if chance.random() < 0.5:
        driver.update(*made[-1:])
    driver.clock.end()


def grpo(driver: Driver, steps: int) -> None:
    for _ in driver.steps(steps):
        rows = driver.generate(groups=2)
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
    st.sampled_from([None, 0.1, 0.4, 1.0]),
)
@settings(max_examples=200, deadline=None)
def test_every_wait_of_a_run_on_random_times_is_in_the_graph(seed, place, staleness, publish, chunks, window):
    more = {"staleness": 0 if place == "shared" else staleness, "publish": publish, "chunks": chunks}
    more |= {} if window is None else {"order": "window", "window": window}
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
        for call, others, groups in waits_for_groups(driver.machine):
            found = recorder.waits[names._title(call)]
            assert {names._title(other) for other in others} <= {*found, *beyond(recorder, found)}
            assert {names.groups_of(other) for other in groups} <= set(found)
        return commands

    driver.machine.handle = watched
    some_program(driver, 5, seed)
    assert driver.machine.committed == 5


def waits_for_groups(machine: Machine):
    """Yield the calls that wait for groups, the calls that get theirs before them, and those that have the groups that
    would let the first of them go on: of these the oldest that nobody has taken is one."""
    window = machine._window
    if window is None:
        return
    wanting = [call for call, _ in window._wanting]
    for place, call in enumerate(wanting):
        open_groups = [number for number in sorted(window._owner) if number not in window._done]
        first = place == 0 and open_groups and min(window._owner) == open_groups[0]
        yield call, wanting[:place], [window._owner[open_groups[0]][0]] if first else []


def beyond(recorder: WaitRecorder, found):
    """All that is waited for behind these."""
    seen, todo = set(), list(found)
    while todo:
        for other in recorder.waits.get(todo.pop(), ()):
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen


@pytest.mark.parametrize(
    ("place", "more"),
    [
        ("split", {"staleness": 0}),
        ("split", {"staleness": 1}),
        ("shared", {"staleness": 0}),
        ("colocated", {"staleness": 1}),
        ("split", {"staleness": 1, "order": "window", "window": 0.1, "publish": "interrupt"}),
        ("split", {"staleness": 1, "order": "window", "window": 1.0, "publish": "interrupt"}),
        ("colocated", {"staleness": 1, "order": "window", "window": 0.6, "publish": "interrupt"}),
    ],
)
def test_no_order_of_events_ends_in_a_deadlock(place, more):
    driver, steps = driver_of(place, Actions, **more), more["staleness"] + 2
    grpo(driver, steps)
    found, states = deadlocks(driver.clock.setup, driver.clock.done, most=60_000)
    assert not found and states > 50
    assert not waits_of(grpo, place, steps, **more)[0].cycle


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sampled_from([0.01, 0.3, 1.0]), st.randoms())
@settings(max_examples=200, deadline=None)
def test_a_call_is_given_groups_once_those_of_it_and_of_the_calls_before_have_ended(groups, fraction, chance):
    window, ended, complete = Window(staleness=2, fraction=fraction), set(), []
    todo = [(call, group) for call, count in enumerate(groups) for group in range(count)]
    for call, count in enumerate(groups):
        window.admit(call, count)
    chance.shuffle(todo)
    for call, group in todo:
        ended.add((call, group))
        complete += [done for done, _ in window.finished(call, group)]
        for each in range(len(groups)):
            if all((call, group) in ended for call in range(each + 1) for group in range(groups[call])):
                assert each in complete
    assert complete == list(range(len(groups)))


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
