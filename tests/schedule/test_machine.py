"""The rules of the schedule: order, versions, lag, no deadlock, over random programs on random times."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import COLOCATED, SHARED, SPLIT, Driver, Times, pools_of, setup

from flowrl.placement.cost.continuous_batch import Engine
from flowrl.schedule.events import (
    PUBLISH,
    Begun,
    Call,
    Closed,
    Ended,
    Entered,
    Finished,
    Follower,
    Issued,
    Memory,
    Opened,
    Publish,
    Setup,
    Start,
)
from flowrl.schedule.group_window import Window, width
from flowrl.schedule.machine import IllegalEvent, Machine
from flowrl.schedule.virtual_clock import Deadlock, Rows

SECONDS = {"actor.generate": 6, "reward.score": 1, "ref.logprobs": 2, "actor.update": 3, "actor.publish": 0.5}
PLACES = {"split": SPLIT, "colocated": COLOCATED, "shared": SHARED}


def grpo(driver: Driver, steps: int, **more) -> None:
    for _ in driver.steps(steps):
        rows = driver.generate(**more)
        driver.update(driver.score(rows), driver.logprobs(rows))
    driver.clock.end()


def test_a_busy_pool_is_handed_one_more_call():
    """With a queue: never a call that samples or updates, never past an earlier one, and publishes wait for all."""
    machine = Machine(setup(queue=1))
    started = lambda event: [c.id for c in machine.handle(event)]  # noqa: E731
    machine.handle(Opened(0))
    score = {"pools": ("train",), "inputs": (), "reads": ("ref",), "queues": True}
    assert started(Issued(Call(0, 0, "ref.logprobs", **score))) == [0]
    assert started(Issued(Call(1, 0, "ref.logprobs", **score))) == [1]
    assert started(Issued(Call(2, 0, "ref.logprobs", **score))) == [], "one waits at the door, not two"
    assert started(Finished(0)) == [2]
    machine.handle(Finished(1))
    assert started(Issued(Call(3, 0, "actor.update", ("train",), (), reads=("actor",), updates="actor"))) == []
    assert started(Issued(Call(4, 0, "ref.logprobs", **score))) == [], "not past the update"
    assert started(Finished(2)) == [3]
    assert started(Issued(Call(5, 0, "ref.logprobs", **score))) == [], "the earlier one first"
    moves = machine.handle(Finished(3))
    assert [c.id for c in moves] == [4, 5]


@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(PLACES)), st.integers(0, 1))
def test_a_queue_changes_no_version(seed, place, staleness):
    """Up to S=1 every read is settled by the program, whatever is handed on early."""
    found = []
    for queue in (0, 1):
        driver = Driver(
            setup(PLACES[place], pools=("train", "rollout", "gpu", "cpu"), staleness=staleness, queue=queue),
            Times(chance=random.Random(seed)),
            pools_of(PLACES[place]),
        )
        grpo(driver, 5)
        found.append(driver.clock.flown.versions)
    assert found[0] == found[1]


def drive(followers, steps=6, times=None, program=grpo, **more) -> Driver:
    pools = ("train", "rollout", "cpu") if followers is SPLIT else ("gpu", "cpu")
    driver = Driver(setup(followers, pools, **more), Times(SECONDS if times is None else times), pools_of(followers))
    program(driver, steps)
    return driver


def versions(driver: Driver) -> list[int]:
    return [seen for _, chunks in sorted(driver.clock.flown.versions.items()) for seen in chunks]


# -- closed forms -----------------------------------------------------------------------------------------------------


def test_at_s0_a_step_takes_the_sum_of_what_is_in_a_row_and_the_longer_of_two_branches():
    assert drive(SPLIT).clock.time == 6 * (6 + max(1, 2) + 3 + 0.5)


def test_colocated_branches_take_turns():
    driver = Driver(setup(SHARED, ("gpu",)), Times(SECONDS), {**pools_of(SHARED), "reward.score": "gpu"})
    grpo(driver, 4)
    assert driver.clock.time == 4 * (6 + 1 + 2 + 3 + 0.5)


def test_one_step_off_on_disjoint_pools_hides_the_shorter_side():
    driver = drive(SPLIT, 20, staleness=1)
    commits = driver.clock.flown.commits
    assert commits[15] - commits[14] == 6.5  # generation and its publish; training is hidden behind it
    longer = drive(SPLIT, 20, {**SECONDS, "actor.update": 9}, staleness=1)
    commits = longer.clock.flown.commits
    assert commits[15] - commits[14] == 2 + 9  # the reference and the update; generation and publish are hidden


def test_pieces_fill_and_drain_a_pipeline():
    times = {"actor.generate": 8.0, "reward.score": 4.0, "ref.logprobs": 2.0}
    driver = drive(SPLIT, 1, times, lambda d, n: grpo(d, n, rowwise=True), chunks=4)
    assert driver.clock.time == 8 + 4 / 4  # the last chunk of the longer branch comes after the last chunk of rows
    whole = drive(SPLIT, 1, times, lambda d, n: grpo(d, n, rowwise=True))
    assert whole.clock.time == 8 + 4
    slow = drive(
        SPLIT, 1, {"actor.generate": 4.0, "ref.logprobs": 8.0}, lambda d, n: grpo(d, n, rowwise=True), chunks=4
    )
    assert slow.clock.time == 4 / 4 + 8


def test_turns_of_residents_that_do_not_fit_together_are_paid_for():
    memory = {"gpu": Memory(80, {"actor.train": 60, "actor.generate": 50})}

    def program(driver: Driver, steps: int) -> None:
        for _ in driver.steps(steps):
            rows = driver.generate(residents=("actor.generate",))
            driver.call("actor.update", rows, reads=("actor",), updates="actor", residents=("actor.train",))
        driver.clock.end()

    times = {"actor.generate": 6, "actor.update": 3, "actor.train.swap": 0.25, "actor.generate.swap": 0.5}
    driver = drive(SHARED, 4, times, program, memory=memory)
    first = 0.5 + 6 + 0.5 + 0.25 + 3
    later = 0.25 + 0.5 + 6 + 0.5 + 0.25 + 3
    assert driver.clock.time == first + 3 * later
    roomy = {"gpu": Memory(120, {"actor.train": 60, "actor.generate": 50})}
    assert drive(SHARED, 4, times, program, memory=roomy).clock.time == 0.75 + 4 * 9
    titles = [s.title for s in driver.clock.flown.spans[:6]]
    assert titles == [
        "actor.generate.onload",
        "actor.generate",
        "actor.generate.offload",
        "actor.train.onload",
        "actor.update",
        "actor.train.offload",
    ]


# -- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["split", "colocated"])
def test_step_k_generates_with_version_k_minus_1_at_s1_wherever_it_runs(place):
    assert versions(drive(PLACES[place], 7, staleness=1)) == [0, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("place", ["split", "colocated", "shared"])
def test_step_k_generates_with_version_k_at_s0(place):
    assert versions(drive(PLACES[place], 5)) == [0, 1, 2, 3, 4]


def test_more_staleness_hides_what_one_step_cannot():
    chance = random.Random(3)
    times = [chance.expovariate(1 / 6) for _ in range(80)]

    def program(driver: Driver, steps: int) -> None:
        for number in driver.steps(steps):
            driver.clock.pace.by_title["actor.generate"] = times[2 * number % 80]
            grpo_rows = driver.generate()
            driver.clock.pace.by_title["actor.update"] = times[(2 * number + 1) % 80]
            driver.update(grpo_rows)
        driver.clock.end()

    spent = [drive(SPLIT, 40, dict(SECONDS), program, staleness=s).clock.time for s in (0, 1, 4)]
    assert spent[0] > spent[1] >= spent[2]


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_log_of_what_was_begun_gives_versions_again(chunks):
    """Of each chunk, too: the pool that samples begins with calls and publishes in the order of the first run."""

    def fly(seed: int, log: tuple[Begun, ...]) -> tuple[list[list[int]], tuple[Begun, ...]]:
        driver = Driver(
            setup(staleness=3, chunks=chunks, begun=log), Times(chance=random.Random(seed)), pools_of(SPLIT)
        )
        begun: list[Begun] = []
        handle = driver.machine.handle

        def noted(event):
            commands = handle(event)
            for command in commands:
                if isinstance(command, Publish):
                    begun.append(Begun("rollout", PUBLISH, command.version, worker="actor"))
                elif isinstance(command, Start) and command.pools == ("rollout",):
                    begun.append(Begun("rollout", command.id, command.chunk))
            return commands

        driver.machine.handle = noted
        grpo(driver, 30, rowwise=True)
        return [seen for _, seen in sorted(driver.clock.flown.versions.items())], tuple(begun)

    first, log = fly(1, ())
    for seed in range(2, 30):
        assert fly(seed, log) == (first, log)
    assert any(fly(seed, ())[0] != first for seed in range(2, 30))
    assert chunks == 1 or any(len(set(seen)) > 1 for seen in first), "chunks of a call have several versions"


# -- programs that must not deadlock ----------------------------------------------------------------------------------


def two_generates(d: Driver, steps: int) -> None:
    for _ in d.steps(steps):
        sampled, greedy = d.generate(), d.generate()
        d.update(d.score(sampled), d.score(greedy))


def refill(d: Driver, steps: int) -> None:
    for number in d.steps(steps):
        rows = [d.score(d.generate())]
        for _ in range(number % 3):
            d.read(rows[-1])
            rows.append(d.score(d.generate()))
        d.update(*rows)


def over_sampling(d: Driver, steps: int) -> None:
    kept: list[int] = []
    for _ in d.steps(steps):
        rows = d.score(d.generate())
        d.read(rows)
        d.update(rows, *kept)
        kept = [rows]


def every_other_step(d: Driver, steps: int) -> None:
    kept: list[int] = []
    for number in d.steps(steps):
        kept.append(d.generate())
        if number % 2:
            d.update(*kept)
            kept = []


def critic_warm_up(d: Driver, steps: int) -> None:
    for number in d.steps(steps):
        rows = d.generate()
        values = d.call("critic.values", rows, reads=("critic",), rowwise=True)
        d.call("critic.update", values, reads=("critic",), updates="critic")
        if number >= 2:
            d.update(values)


def evaluation_inside(d: Driver, steps: int) -> None:
    for number in d.steps(steps):
        if number % 3 == 0:
            d.read(d.score(d.generate(relaxed=False)))
        rows = d.generate()
        loss = d.update(d.score(rows))
        if number % 4 == 1:
            d.read(loss)
        if number % 5 == 2:
            d.generate(relaxed=False)


def reads_everything(d: Driver, steps: int) -> None:
    for _ in d.steps(steps):
        rows = d.generate()
        d.read(rows)
        d.read(d.update(rows))


def updates_twice(d: Driver, steps: int) -> None:
    for _ in d.steps(steps):
        rows = d.generate()
        d.update(rows)
        again = d.call("actor.logprobs", rows, reads=("actor",), rowwise=True)
        d.update(again)


def before_the_loop(d: Driver, steps: int) -> None:
    d.update()
    for _ in d.steps(steps):
        d.update(d.generate())
    d.read(d.generate())
    d.update()


def two_loops(d: Driver, steps: int) -> None:
    grown = iter(range(2 * steps))
    for _ in range(2):
        for _ in range(steps):
            number = next(grown)
            d.clock.open(number)
            d.step = number
            d.update(d.generate())
            d.step = -1
            d.clock.close(number)


def early_update(d: Driver, steps: int) -> None:
    """Trains on the rows of the step before, and reads what came of it before it generates."""
    kept: list[int] = []
    for _ in d.steps(steps):
        d.read(d.update(*kept))
        kept = [d.generate()]


PROGRAMS = [
    two_generates,
    refill,
    over_sampling,
    every_other_step,
    critic_warm_up,
    evaluation_inside,
    reads_everything,
    updates_twice,
    before_the_loop,
    two_loops,
    early_update,
]
CARRIES = {over_sampling: 1, every_other_step: 1, early_update: 1}  # steps that rows are carried


def plain_versions(calls: list[Call], staleness: int) -> list[int]:
    """What a loop without any machine reads: publishes wait ``staleness`` steps, unless an exact read needs them."""
    installed = created = 0
    dirty, step = False, -1
    waiting: list[tuple[int, int]] = []  # (step, version)
    seen: list[int] = []

    def publish(of: int) -> None:
        nonlocal created, dirty
        if dirty:
            created += 1
            waiting.append((of, created))
            dirty = False

    for call in [*calls, None]:
        now = call.step if call is not None else None
        while step >= 0 and now != step:  # the step was closed
            publish(step)
            for of, version in list(waiting):
                if of <= step - staleness:
                    waiting.remove((of, version))
                    installed = version
            step = -1 if now is None or now < 0 or now > step + 1 else step
            if step == -1 or now == step + 1:
                break
        if call is None:
            break
        if now != step:
            step = now
            if staleness and dirty:  # from outside of steps
                publish(-1)
                installed, waiting = created, []
        if call.serves:
            if not (call.relaxed and staleness):
                publish(step)
                if waiting:
                    installed, waiting = waiting[-1][1], []
            seen.append(installed)
        if call.updates == "actor":
            dirty = True
    return seen


ANY = {
    "program": st.sampled_from(PROGRAMS),
    "place": st.sampled_from(["split", "colocated", "shared"]),
    "staleness": st.integers(0, 5),
    "publish": st.sampled_from(["drain", "interrupt", "continue"]),
    "chunks": st.sampled_from([1, 1, 3]),
    "seed": st.integers(0, 10**6),
}


@given(**ANY)
@settings(max_examples=600, deadline=None)
def test_any_program_at_any_staleness_ends_within_the_bounds(program, place, staleness, publish, chunks, seed):
    ends_within_bounds(program, place, staleness, publish, chunks, seed)


@pytest.mark.nightly
@given(**ANY)
@settings(max_examples=20_000, deadline=None)
def test_twenty_thousand_programs_end_within_the_bounds(program, place, staleness, publish, chunks, seed):
    ends_within_bounds(program, place, staleness, publish, chunks, seed)


def ends_within_bounds(program, place, staleness, publish, chunks, seed) -> None:
    if place == "shared":
        staleness = 0
    followers = PLACES[place]
    pools = ("train", "rollout", "cpu") if place == "split" else ("gpu", "cpu")
    made = setup(followers, pools, staleness=staleness, publish=publish, chunks=chunks)
    driver = Driver(made, Times(chance=random.Random(seed)), pools_of(followers))
    program(driver, 8)
    driver.clock.end()
    clock = driver.clock
    steps = 16 if program is two_loops else 8
    # all of it ran, and every step committed, in order
    ran = [(s.id, s.chunk) for s in clock.flown.spans if s.id >= 0]
    assert len(ran) == len(set(ran)) and {id for id, _ in ran} == {c.id for c in driver.calls}
    assert list(clock.flown.commits) == list(range(steps)) and driver.machine.committed == steps
    # a pool has one thing at a time
    for pool in pools:
        mine = sorted((s.start, s.end) for s in clock.flown.spans if pool in s.pools)
        if publish == "drain":
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(mine)), mine
    # lag: at most S for rows of their own step, and what carried rows cross on top
    extra = CARRIES.get(program, 0)
    assert max(clock.lags(), default=0) <= staleness + extra
    assert min(clock.lags(), default=0) >= 0
    if staleness == 0:
        assert versions(driver) == [v for v, c in _by_piece(driver, plain_versions(driver.calls, 0))]
        _steps_do_not_overlap(driver)
    if driver.machine.settled:
        assert versions(driver) == [v for v, c in _by_piece(driver, plain_versions(driver.calls, 1))]


def _by_piece(driver: Driver, seen: list[int]) -> list[tuple[int, Call]]:
    readers = [c for c in driver.calls if c.serves]
    chunks = driver.machine.setup.chunks
    return [(v, c) for v, c in zip(seen, readers, strict=True) for _ in range(chunks if c.rowwise else 1)]


def _steps_do_not_overlap(driver: Driver) -> None:
    ends: dict[int, float] = {}
    starts: dict[int, float] = {}
    for span in driver.clock.flown.spans:
        if span.step >= 0:
            ends[span.step] = max(ends.get(span.step, 0.0), span.end)
            starts[span.step] = min(starts.get(span.step, math.inf), span.start)
    assert all(ends[k] <= starts[k + 1] + 1e-9 for k in ends if k + 1 in starts)


WINDOWS = {
    "staleness": st.integers(0, 4),
    "fraction": st.floats(0.05, 1.0),
    "groups": st.integers(1, 9),
    "publish": st.sampled_from(["drain", "interrupt"]),
    "seed": st.integers(0, 10**6),
}


@given(**WINDOWS)
@settings(max_examples=150, deadline=None)
def test_a_window_drops_nothing_and_keeps_its_bound(staleness, fraction, groups, publish, seed):
    keeps_its_bound(staleness, fraction, groups, publish, seed)


@pytest.mark.nightly
@given(**WINDOWS)
@settings(max_examples=5000, deadline=None)
def test_five_thousand_windows_keep_their_bound(staleness, fraction, groups, publish, seed):
    keeps_its_bound(staleness, fraction, groups, publish, seed)


def keeps_its_bound(staleness, fraction, groups, publish, seed) -> None:
    chance = random.Random(seed)

    def engine(call: Call) -> Rows:
        return Rows(
            [[chance.lognormvariate(0, 1.2) for _ in range(2)] for _ in range(groups)],
            Engine(3 * groups, lambda rows: 1.0),
        )

    made = setup(staleness=staleness, order="window", window=fraction, publish=publish)
    driver = Driver(
        made, Times({"actor.update": chance.random(), "actor.publish": 0.01}, engine=engine), pools_of(SPLIT)
    )
    taken: list[tuple[int, int]] = []
    commands = driver.machine.handle
    driver.machine.handle = lambda event: [  # type: ignore[method-assign]
        taken.extend(getattr(c, "groups", ())) or c for c in commands(event)
    ]
    grpo(driver, 20, groups=groups)
    assert sorted(taken) == [(call.id, g) for call in driver.calls if call.serves for g in range(groups)]
    bound = staleness + math.ceil((width(groups, staleness, fraction) - 1) / groups)
    assert max(driver.clock.lags()) <= bound


def test_a_window_of_one_group_is_fifo():
    window = Window(staleness=2, fraction=0.01)
    window.admit(0, 2)
    window.admit(1, 2)
    assert window.finished(1, 0) == [] and window.finished(0, 1) == []
    assert window.finished(0, 0) == [(0, ((0, 0), (0, 1)))]
    assert window.finished(1, 1) == [(1, ((1, 0), (1, 1)))]


def test_stragglers_hold_up_fifo_and_not_a_window():
    def engine(call: Call) -> Rows:
        return Rows([[10.0 if call.id % 20 == 0 and g == 0 else 1.0] for g in range(4)], Engine(12, lambda rows: 1.0))

    spent = {}
    for order in ("fifo", "window"):
        made = setup(staleness=2, order=order, window=0.5, publish="interrupt")
        driver = Driver(made, Times({"actor.update": 1.0}, engine=engine), pools_of(SPLIT))
        grpo(driver, 20, groups=4)
        spent[order] = driver.clock.time
    assert spent["window"] < spent["fifo"], spent


def test_several_pools_at_once_do_not_deadlock():
    made = Setup(("gpu", "env"), {"actor": Follower("gpu", "gpu")}, staleness=2)
    driver = Driver(made, Times(chance=random.Random(0)), {**pools_of(COLOCATED), "reward.score": "env"})
    for _ in driver.steps(20):
        rollout = Call(driver.next, driver.step, "env.rollout", ("env", "gpu"), serves=("actor",), relaxed=True)
        driver.next += 1
        driver.calls.append(rollout)
        driver.clock.issue(rollout)
        driver.update(driver.score(rollout.id))
    driver.clock.end()
    assert driver.machine.committed == 20


def test_a_checkpoint_between_steps_leaves_one_publish_to_come():
    machine = Machine(setup(staleness=1))
    machine.handle(Opened(0))
    machine.handle(Issued(Call(0, 0, "actor.generate", ("rollout",), serves=("actor",), relaxed=True)))
    machine.handle(Finished(0))
    machine.handle(Issued(Call(1, 0, "actor.update", ("train",), inputs=(0,), reads=("actor",), updates="actor")))
    machine.handle(Finished(1))
    (stage,) = machine.handle(Closed(0))
    machine.handle(Finished(stage.id))
    assert machine.idle and machine.held() == {"actor": 1} and machine.committed == 0
    again = Machine(machine.setup, committed=0, versions={"actor": 0}, held=machine.held())
    assert again.may_open(1) and not again.may_open(2)
    (stage,) = again.handle(Opened(1))
    again.handle(Finished(stage.id))
    (start,) = again.handle(Issued(Call(2, 1, "actor.generate", ("rollout",), serves=("actor",), relaxed=True)))
    assert start.versions == {"actor": 0}
    again.handle(Finished(2))
    (publish,) = again.handle(Closed(1))
    assert (publish.version, publish.step) == (1, 0)
    assert [c.step for c in again.handle(Finished(publish.id))] == [0, 1]


# -- wrong use tells the story ----------------------------------------------------------------------------------------


def test_an_event_that_cannot_be_tells_the_whole_story():
    machine = Machine(setup())
    machine.handle(Opened(0))
    machine.handle(Issued(Call(0, 0, "actor.generate", ("rollout",), serves=("actor",))))
    machine.handle(Issued(Call(1, 0, "actor.update", ("train",), inputs=(0,), updates="actor")))
    with pytest.raises(IllegalEvent) as error:
        machine.handle(Finished(1))
    assert str(error.value) == (
        "Finished(id=1, chunk=0) of something that does not run.\n"
        "0 steps committed, step 0 open, closed none\n"
        "  actor.generate of step 0: running\n"
        "  actor.update of step 0: waits for 1 things"
    )
    with pytest.raises(IllegalEvent, match="step 1 was opened too early"):
        machine.handle(Opened(1))
    with pytest.raises(IllegalEvent, match="issued twice"):
        machine.handle(Issued(Call(1, 0, "actor.update")))
    with pytest.raises(IllegalEvent, match="closed while 0 is open"):
        machine.handle(Closed(3))


def test_a_wait_that_cannot_end_is_a_deadlock_with_its_story():
    driver = Driver(setup(), Times(SECONDS), pools_of(SPLIT))
    driver.clock.open(0)
    driver.step = 0
    driver.generate()
    with pytest.raises(Deadlock, match="the program waits and nothing runs"):
        driver.clock.wait(lambda: False)


def test_the_end_without_steps():
    machine = Machine(setup())
    assert machine.handle(Ended()) == [] and machine.idle


# -- episodes, whose rows join the engine one by one ------------------------------------------------------------------

BESIDE = {"pools": ("train", "rollout", "games"), "publish": "interrupt"}


def rollout(id: int, step: int, **how) -> Call:
    asks = {"whole": False, "joins": True} | how
    return Call(id, step, "game.rollout", ("games", "rollout"), serves=("actor",), relaxed=True, **asks)


def update(id: int, step: int, rows: int) -> Call:
    return Call(id, step, "actor.update", ("train",), (rows,), reads=("actor",), updates="actor")


def played(**how) -> tuple[Machine, list]:
    """Two steps of episodes one step apart, of which the first one's are over and trained on; what its update starts."""
    machine = Machine(setup(staleness=1, **BESIDE))
    for event in (Opened(0), Issued(rollout(0, 0, **how)), Issued(update(1, 0, 0)), Closed(0), Opened(1)):
        machine.handle(event)
    machine.handle(Entered(0))
    machine.handle(Issued(rollout(2, 1, **how)))
    machine.handle(Finished(0))
    stage = machine.handle(Finished(1))[0]
    return machine, machine.handle(Finished(stage.id))


def test_a_publish_comes_while_episodes_are_played():
    _, started = played()
    assert [type(command).__name__ for command in started] == ["Publish"]
    _, started = played(joins=False, whole=True)
    assert started == [], "what keeps its rows to itself is not interrupted"


def test_episodes_of_the_next_step_are_played_beside_and_calls_of_another_kind_are_not():
    machine = Machine(setup(staleness=1, **BESIDE))
    machine.handle(Opened(0))
    assert [c.id for c in machine.handle(Issued(rollout(0, 0)))] == [0]
    assert machine.handle(Issued(rollout(1, 0))) == [], "until the first one has entered"
    assert [c.id for c in machine.handle(Entered(0))] == [1]
    machine.handle(Entered(1))
    generate = Call(2, 0, "actor.generate", ("rollout",), serves=("actor",), relaxed=True)
    assert machine.handle(Issued(generate)) == []
    assert machine.handle(Issued(rollout(3, 0))) == [], "not past an earlier call"
    assert machine.handle(Finished(0)) == []
    assert [c.id for c in machine.handle(Finished(1))] == [2]
    assert machine.handle(Entered(2)) == [], "nor beside rows of a call that is not asked by itself"


def test_a_simulation_has_publishes_in_the_middle_of_episodes():
    """By hand: episodes take 6 s, an update 3 s, a publish 1 s, for which episodes stand still."""
    driver = Driver(setup(staleness=1, **BESIDE), Times({"game.rollout": 6, "actor.update": 3, "actor.publish": 1}), {})
    for step in driver.steps(3):
        rows = driver.next
        driver.next += 2
        driver.clock.issue(rollout(rows, step))
        driver.clock.issue(update(rows + 1, step, rows))
    driver.clock.end()
    spans = [(span.title, span.step, span.start, span.end) for span in driver.clock.flown.spans]
    assert [s for s in spans if s[0] == "game.rollout"] == [
        ("game.rollout", 0, 0, 6),
        ("game.rollout", 1, 0, 6),
        ("game.rollout", 2, 10, 16),
    ]
    publishes = [(start, end) for title, _, start, end in spans if title == "actor.publish"]
    assert publishes == [(9, 10), (12, 13), (20, 21)]
    assert driver.clock.time == 21, "the last episodes have stood still for a second: they end at 17"
    assert versions(driver) == [0, 0, 1] and dict(driver.clock.lags()) == {0: 1, 1: 2}
