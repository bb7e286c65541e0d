"""How fast the responses of a step came, where steps overlap and one commits as soon as another has."""

from __future__ import annotations

import pytest

from flowrl.runtime.storage import recorder as recorders
from flowrl.runtime.storage.recorder import Recorder
from flowrl.runtime.values.step_records import Step


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(recorders, "time", clock)
    return clock


def speeds(out, clock, commits, at_once):
    """Tokens per second of steps of 100 tokens that commit at these seconds."""
    recorder = Recorder(out, groups=0, every=1, at_once=at_once)
    recorder.begin()
    recorder.restart_clock()
    found: list[float] = []
    for number, clock.now in enumerate(commits):
        (line,) = recorder.commit("train", Step(number, sampled={"": (100, 10)}), None)
        found.append(line["tokens_per_second"])
    recorder.close()
    return found


def test_of_overlapping_steps_tokens_per_second_are_those_of_as_many_as_overlap(tmp_path, clock):
    assert speeds(tmp_path, clock, [5, 5.001, 10, 10.001, 15], at_once=2) == [20.0, 40.0, 40.0, 40.0, 40.0]


def test_without_an_overlap_they_are_those_of_the_step(tmp_path, clock):
    assert speeds(tmp_path, clock, [4, 5, 7], at_once=1) == [25.0, 100.0, 50.0]


def test_what_came_before_the_clock_was_started_anew_does_not_count(tmp_path, clock):
    recorder = Recorder(tmp_path, groups=0, every=1, at_once=2)
    recorder.begin()
    for clock.now in (1.0, 51.0):
        (line,) = recorder.commit("train", Step(int(clock.now), sampled={"": (100, 10)}), None)
        clock.now += 49
        recorder.restart_clock()
    assert line["tokens_per_second"] == 100.0
    recorder.close()
