"""A run that has come to a standstill ends by itself, with its story; one in which something goes on never does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from small_flow import Counter, Numbers

import flowrl as fl
from flowrl.runtime.driver.monitoring import hang_watch
from flowrl.runtime.driver.monitoring.hang_watch import HangWatch, Signs
from flowrl.runtime.driver.monitoring.wait_story import Wait, WaitStory
from flowrl.workers.headway import Headway, headway, make_headway

FLOW = Path(__file__).parents[2] / "hang_flow.py"


ENDED: list[str] = []  # what has come to its end by itself
REALLY: list[int] = []  # steps that were really done


def take_long(how: str) -> None:
    end = time.monotonic() + (60.0 if how == "never" else 6.0)
    while time.monotonic() < end:
        if how == "passes":
            make_headway()
        if how != "computes":
            time.sleep(0.05)
    ENDED.append(how)


def after_values(how: str) -> None:
    """What the program does by itself where it runs; a trace comes by, too."""
    if REALLY:
        take_long(how)


class Judge(fl.Worker):
    """Takes long, and computes, makes headway or waits in that time."""

    @fl.op(reads="x", adds="r: f32[]", cost="external")
    def judge(self, batch, *, how: str):
        take_long(how)
        return {"r": batch.x.values}


class Counted(Counter):
    """Says that it was really called."""

    @fl.op(reads="x", adds="y: f32[]", cost="forward")
    def values(self, batch):
        REALLY.append(1)
        return {"y": batch.x.values}


flow = fl.Flow("slow")
judge = flow.worker(Judge)
counter = flow.worker(Counted)


@flow.program
def slow(how: str = "computes"):
    for step, batch in flow.steps(Numbers(), 1):
        flow.log(step, counter.update(counter.values(judge.judge(batch, how=how))))


@flow.program
def by_itself(how: str = "computes"):
    for step, batch in flow.steps(Numbers(), 1):
        metrics = counter.update(counter.values(batch))
        if metrics["count"] > 0:  # it is done
            after_values(how)
        flow.log(step, metrics)


def run(program: str, out: Path, how: str, hang: float = 3.0, pool: str = "main") -> None:
    plan = out.parent / "plan.yaml"
    pools = f"pools: {{main: {{device: cpu}}, other: {{device: cpu}}}}\nplace: {{judge: {{pool: {pool}}}}}\n"
    plan.write_text(f"{pools}pipeline: {{hang: {hang}}}\n")
    flow.run(program, out=out, plan=plan, how=how, quiet=True, save_models=False)


@pytest.fixture
def soon(monkeypatch):
    """Looks follow each other quickly."""
    REALLY.clear()
    ENDED.clear()
    monkeypatch.setattr(hang_watch, "LOOK", 0.1)


@pytest.mark.parametrize("program", ["slow", "by_itself"])
def test_what_waits_for_ever_is_ended_and_said_in_the_folder(program, tmp_path, soon):
    out = tmp_path / "run"
    with pytest.raises(fl.errors.Stalled) as error:
        run(program, out, "never")
    assert "never" not in ENDED
    text = str(error.value)
    assert "Nothing has gone on for " in text and "so the run is ended." in text
    assert ("user code: judge, " if program == "slow" else "its own code: no call is under way") in text
    assert "To blame: " in text and "a longer pipeline.hang than 3, or 0 to wait for ever." in text
    assert json.loads((out / "run.json").read_text())["status"] == "failed"
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [e for e in events if e["kind"] == "failed" and "To blame: " in e["text"]]


@pytest.mark.parametrize(
    ("program", "how", "hang"),
    [("slow", "passes", 3.0), ("slow", "computes", 3.0), ("by_itself", "computes", 3.0), ("slow", "sleeps", 0)],
)
def test_what_takes_longer_than_the_limit_and_goes_on_is_left_alone(program, how, hang, tmp_path, soon):
    run(program, tmp_path / "run", how, hang)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "done"


def test_a_run_in_another_thread_is_ended_where_it_waits(tmp_path, soon):
    found: list[BaseException] = []

    def go() -> None:
        try:
            run("slow", tmp_path / "run", "never", pool="other")
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    thread.join(60)
    assert isinstance(found[0], fl.errors.Stalled)


def test_a_process_in_a_function_that_never_returns_ends_with_the_story(tmp_path):
    out, plan = tmp_path / "run", tmp_path / "plan.yaml"
    plan.write_text("pipeline: {hang: 6}\n")
    command = [sys.executable, str(FLOW), "--out", str(out), "--quiet", "--no-save", "--plan", str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "Stalled: Nothing has gone on for " in done.stderr
    assert "judge.judge of step 1 (hang_flow.py:" in done.stderr and "To blame: judge, " in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["stop", "never"])
def test_ranks_without_a_deadline(how, tmp_path):
    out, plan = tmp_path / "run", tmp_path / "plan.yaml"
    pools = "pools: {a: {device: cpu}, b: {device: cpu}}\nplace: {judge: {pool: b}}\n"
    plan.write_text(pools + "pipeline: {hang: 60}\n")
    command = [sys.executable, str(FLOW), "--out", str(out), "--quiet", "--no-save", "--plan", str(plan)]
    done = subprocess.run([*command, "--runtime", "ray", "--how", how], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    who = "rank 1 of pool 'b', process " if how == "stop" else "judge, "
    assert f"To blame: {who}" in done.stderr and " of step 1 (hang_flow.py:" in done.stderr


# -- the signs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "goes_on"),
    [
        (Signs(1, {"driver": Headway(5, 2.0), "rank 0": Headway(7, 1.0)}, own=True), False),
        (Signs(2, {"driver": Headway(5, 2.0)}, own=True), True),  # an event
        (Signs(1, {"driver": Headway(5, 2.0), "rank 0": Headway(8, 1.0)}, own=True), True),  # a pass on a rank
        (Signs(1, {"driver": Headway(5, 12.0)}, own=True), False),  # a processor spins in what is counted
        (Signs(1, {"driver": Headway(5, 12.0)}), True),  # or computes what nobody counts
        (Signs(1, {"driver": Headway(5, 2.5)}), False),  # it looks around
        (Signs(1, {"driver": Headway(5, 2.0), "rank 9": Headway(1, 0.0)}), False),  # nobody had looked at that
        (Signs(1, {}), False),  # nobody answers
    ],
)
def test_what_counts_as_a_sign(now, goes_on):
    before = Signs(1, {"driver": Headway(5, 2.0), "rank 0": Headway(7, 1.0)}, own=True)
    assert now.goes_on_since(before, 10.0) is goes_on


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now, self.events, self.count, self.ended = 0.0, 0, 0, list[fl.errors.Stalled]()
        self.asked = 0

    def signs(self) -> Signs:
        self.asked += 1
        return Signs(self.events, {"driver": Headway(self.count, 0.0)}, own=True)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(hang_watch.time, "monotonic", lambda: clock.now)
    return clock


def watch_of(clock: Clock, limit: float) -> HangWatch:
    story = WaitStory("", (Wait("a of step 3", "b of step 2"),), "b, which is stopped")
    signs: dict = {"events": lambda: clock.events, "signs": clock.signs}
    return HangWatch(limit, **signs, story=lambda: story, end=clock.ended.append)


def test_the_limit_counts_from_the_last_sign_and_processes_are_asked_now_and_then(clock):
    watch = watch_of(clock, 600.0)
    for second in range(0, 3000, 2):
        clock.now, clock.count = float(second), second // 500
        assert not watch.look()
    assert clock.asked <= 3000 / 30 + 1
    while not watch.look():
        clock.now += 2.0
    assert 3100 <= clock.now <= 3000 + 600 + 30
    assert str(clock.ended[0]).startswith(
        "Nothing has gone on for 600 s, so the run is ended.\n  a of step 3 waits for b of step 2\n"
        "  To blame: b, which is stopped\n"
    )


def test_an_event_of_the_driver_begins_anew_without_asking_anybody(clock):
    watch = watch_of(clock, 60.0)
    for second in range(0, 1000, 2):
        clock.now, clock.events = float(second), second
        assert not watch.look()
    assert not clock.asked


def test_time_in_which_the_process_stood_still_does_not_count(clock):
    watch = watch_of(clock, 60.0)
    watch.look()
    clock.now = 10_000.0  # a laptop was closed, or somebody has stopped the driver and let it go on
    assert not watch.look()
    clock.now += 2.0
    assert not watch.look()


def test_this_process_says_how_far_it_has_come():
    before = headway()
    make_headway()
    assert headway().count == before.count + 1 and headway().seconds >= before.seconds


def test_the_main_thread_is_woken_wherever_it_is_and_only_by_that_error():
    from flowrl.runtime.driver.stop_signals import Stop

    stop = Stop(lambda text: None)
    with pytest.raises(fl.errors.Stalled), stop.listening():
        threading.Timer(0.2, stop.end_with, [fl.errors.Stalled("it is still")]).start()
        time.sleep(30)
    assert not stop.asked, "nobody has asked for a checkpoint"
    with stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.asked
