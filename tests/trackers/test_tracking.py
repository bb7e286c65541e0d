"""Lines reach each tracker in order and by a thread of its own; one that fails or hangs harms nobody else."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from flowrl.trackers.tracker import TrackedRun
from flowrl.trackers.tracking import Count, Tracking

RUN = TrackedRun("first", "grpo", "0c5e", Path("first"))


class Noted:
    """Notes what it is told."""

    def __init__(self, run):
        self.run, self.calls = run, []

    def log(self, program, step, numbers):
        self.calls.append((program, step, numbers))

    def samples(self, program, step, rows):
        self.calls.append((program, step, [row["key"] for row in rows]))

    def close(self, status):
        self.calls.append(status)


def line(step, program="grpo", **more):
    return {"program": program, "step": step, **more}


def tracked(*lines, make: Any = Noted, history=(), room=1000, **others):
    """What trackers were called with, by name; the counts; the warnings."""
    made: dict[str, Any] = {}
    warnings: list[str] = []

    def maker(name, make):
        def opened(run):
            made[name] = make(run)
            return made[name]

        return opened

    makers = {name: maker(name, make) for name, make in {"noted": make, **others}.items()}
    tracking = Tracking(RUN, makers, warnings.append, history, room)
    for stream, said in lines:
        tracking.tell(stream, said)
    counts = tracking.close("done", patience=60)
    return {name: tracker.calls for name, tracker in made.items()}, counts, warnings


def test_numbers_arrive_in_order_and_samples_of_a_step_together():
    calls, counts, warnings = tracked(
        ("metrics", line(0, reward=0.5, loss=float("nan"), note="text")),
        ("trajectories", line(0, key=[0, 0])),
        ("trajectories", line(0, key=[0, 1])),
        ("timeline", line(0, node="actor.generate")),
        ("metrics", line(1, reward=1)),
        ("trajectories", line(1, key=[4, 0])),
    )
    assert calls["noted"] == [
        ("grpo", 0, {"reward": 0.5}),
        ("grpo", 0, [[0, 0], [0, 1]]),
        ("grpo", 1, {"reward": 1.0}),
        ("grpo", 1, [[4, 0]]),
        "done",
    ]
    assert counts == {"noted": Count(given=5, lost=0)} and warnings == []


def test_loops_of_a_program_follow_one_another_and_programs_stand_apart():
    said = [line(s) for s in (0, 1, 2, 0, 1)] + [line(0, "evaluate"), line(2)]
    calls, _, _ = tracked(*[("metrics", one) for one in said])
    assert [call[:2] for call in calls["noted"][:-1]] == [("grpo", s) for s in range(5)] + [
        ("evaluate", 0),
        ("grpo", 5),
    ]


def test_a_run_that_goes_on_has_its_steps_where_they_were():
    calls, _, _ = tracked(("metrics", line(1)), history=[line(s) for s in (0, 1, 2, 0)])
    assert [call[1] for call in calls["noted"][:-1]] == [4]


def test_after_a_rewind_steps_that_are_done_again_have_the_same_place():
    made = []
    tracking = Tracking(RUN, {"noted": lambda run: made.append(Noted(run)) or made[0]}, pytest.fail)
    for step in (0, 1, 2):
        tracking.tell("metrics", line(step))
    tracking.rewind([line(0)])
    tracking.tell("metrics", line(1))
    tracking.close("failed", 60)
    assert [c[1] for c in made[0].calls[:-1]] == [0, 1, 2, 1] and made[0].calls[-1] == "failed"


class Alarmed(Noted):
    """Takes events too."""

    def event(self, kind, text, level):
        self.calls.append((kind, text, level))


def event(kind, text="it happened"):
    return "events", {"time": 1.7e9, "kind": kind, "text": text}


def test_events_reach_trackers_that_take_them_in_their_order_with_how_grave_they_are():
    said = [("metrics", line(0)), event("alarm", "entropy fell"), ("metrics", line(1)), event("resumed"), event("hint")]
    calls, counts, warnings = tracked(*said, make=Alarmed, plain=Noted)
    assert calls["noted"] == [
        ("grpo", 0, {}),
        ("alarm", "entropy fell", "alarm"),
        ("grpo", 1, {}),
        ("resumed", "it happened", "note"),
        ("hint", "it happened", "warning"),
        "done",
    ]
    assert calls["plain"] == [("grpo", 0, {}), ("grpo", 1, {}), "done"], "a tracker of one's own need not take them"
    assert counts == {"noted": Count(5, 0), "plain": Count(2, 0)} and warnings == []


def test_an_event_does_not_part_the_samples_of_a_step():
    rows = [("trajectories", line(0, key=[0, place])) for place in (0, 1)]
    calls, _, _ = tracked(("metrics", line(0)), rows[0], event("warning"), rows[1], make=Alarmed)
    assert [call for call in calls["noted"] if call[:2] == ("grpo", 0)][1] == ("grpo", 0, [[0, 0], [0, 1]])


def test_events_of_the_end_are_not_lines_for_trackers():
    """What is told of trackers as they are closed comes when they have ended."""
    made = []
    tracking = Tracking(RUN, {"noted": lambda run: made.append(Alarmed(run)) or made[0]}, pytest.fail)
    assert tracking.close("done", 60) == {"noted": Count(0, 0)}
    tracking.tell(*event("tracker"))
    assert made[0].calls == ["done"]


def test_an_event_that_a_tracker_cannot_take_is_told_of_once_and_counted():
    class Refuses(Noted):
        def event(self, kind, text, level):
            raise ConnectionError("no route to host")

    calls, counts, warnings = tracked(event("alarm"), event("lost"), ("metrics", line(0)), make=Refuses)
    assert warnings == ["tracker noted failed, and the run goes on: ConnectionError: no route to host"]
    assert calls["noted"] == [("grpo", 0, {}), "done"] and counts == {"noted": Count(3, 2)}


class Broken(Noted):
    def log(self, program, step, numbers):
        if step != 1:
            raise ConnectionError("no route to host\nand more")
        super().log(program, step, numbers)


def test_a_tracker_that_fails_is_told_of_once_and_others_go_on():
    calls, counts, warnings = tracked(*[("metrics", line(s)) for s in range(3)], broken=Broken)
    assert warnings == ["tracker broken failed, and the run goes on: ConnectionError: no route to host"]
    assert counts == {"noted": Count(3, 0), "broken": Count(3, 2)}
    assert calls["broken"] == [("grpo", 1, {}), "done"] and len(calls["noted"]) == 4


def test_a_tracker_that_cannot_be_started_loses_all():
    def refuses(run):
        raise SystemExit("no key")

    _, counts, warnings = tracked(("metrics", line(0)), make=refuses)
    assert warnings == ["tracker noted could not be started, and the run goes on without it: SystemExit: no key"]
    assert counts == {"noted": Count(1, 1)}


def test_a_tracker_that_hangs_stops_nobody_and_what_it_has_not_taken_is_counted():
    entered, release = threading.Event(), threading.Event()

    class Hangs(Noted):
        def log(self, program, step, numbers):
            entered.set()
            assert release.wait(600)

    warnings = []
    tracking = Tracking(RUN, {"hangs": Hangs}, warnings.append, room=2)
    tracking.tell("metrics", line(0))
    assert entered.wait(600)
    for step in range(1, 6):
        tracking.tell("metrics", line(step))
    counts = tracking.close("done", patience=0.01)
    assert counts == {"hangs": Count(given=6, lost=5)}
    assert warnings == [
        "tracker hangs is slower than the run: 2 lines wait for it, and further ones are lost",
        "tracker hangs has not ended in time and is left alone",
    ]
    release.set()
