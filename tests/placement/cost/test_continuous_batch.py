"""A continuous batch in time: the same as a loop over single tokens, whoever asks in between."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise
from math import inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flowrl.placement.cost.continuous_batch import ContinuousBatch, Engine, Turns, between_points, seconds_of

ROWS = st.lists(st.integers(1, 9), min_size=1, max_size=12)
STEPS = st.lists(st.sampled_from([0.5, 1.0, 1.25, 3.0]), min_size=12, max_size=12)


def by_token(engine: Engine, tokens: list[int]) -> list[float]:
    """When each row ends, by a loop over tokens: what the batch has to give."""
    waiting, running, time = deque(enumerate(tokens)), dict[int, int](), 0.0
    ends = [0.0] * len(tokens)
    while waiting or running:
        while waiting and len(running) < engine.slots:
            row, count = waiting.popleft()
            running[row] = count
            time += engine.prefill * engine.prompt
        time += engine.step(len(running))
        for row in list(running):
            running[row] -= 1
            if not running[row]:
                del running[row]
                ends[row] = time
    return ends


def by_moments(engine: Engine, tokens: list[float], turns: Turns) -> tuple[list[float], list[float]]:
    """The same of rows of several turns, by a loop over moments in which anything changes; and when rows came back."""
    left = {row: [count / turns.count] * turns.count for row, count in enumerate(tokens)}
    waiting, away, running = deque(left), dict[int, float](), dict[int, float]()
    time, stalled, ends, backs = 0.0, 0.0, [0.0] * len(tokens), list[float]()
    while waiting or away or running:
        for row in sorted((row for row, back in away.items() if back <= time), key=away.__getitem__):
            del away[row]
            waiting.append(row)
        while waiting and len(running) < engine.slots:
            row = waiting.popleft()
            if len(left[row]) == turns.count:
                stalled += engine.prefill * engine.prompt
            running[row] = left[row].pop(0)
        step = engine.step(len(running)) if running else 0.0
        over = stalled + min(running.values()) * step if running else inf
        passed = min(over, min(away.values(), default=inf) - time)
        made = max(0.0, passed - stalled) / step if running else 0.0
        if running:
            stalled = max(0.0, stalled - passed)
        time += passed
        for row in list(running):
            running[row] -= made
            if running[row] < 1e-9:
                del running[row]
                if left[row]:
                    away[row] = time + turns.seconds
                    backs.append(away[row])
                else:
                    ends[row] = time
    return ends, backs


def ends_of(batch: ContinuousBatch, until: float = inf) -> dict[object, float]:
    return {moved.key: moved.time for moved in batch.advance(until) if moved.left}


@settings(max_examples=150)
@given(ROWS, STEPS, st.integers(1, 12), st.sampled_from([0.0, 0.25]))
def test_rows_end_when_a_loop_over_tokens_ends_them(tokens, steps, slots, prefill):
    engine = Engine(slots, lambda rows: steps[rows - 1], prefill, prompt=4)
    batch = ContinuousBatch(engine)
    for row, count in enumerate(tokens):
        batch.submit(row, [count])
    found, want = ends_of(batch), by_token(engine, tokens)
    assert [found[row] for row in range(len(tokens))] == pytest.approx(want)
    assert seconds_of(engine, tokens) == pytest.approx(max(want))


@settings(max_examples=150)
@given(
    ROWS, STEPS, st.integers(1, 12), st.integers(1, 4), st.sampled_from([0.0719, 0.7317, 2.3071, 31.9]), st.booleans()
)
def test_rows_of_turns_end_when_a_loop_over_moments_ends_them(numbers, steps, slots, count, seconds, reads):
    """A row that waits for its environment has no slot, and asks for one again behind those that wait."""
    tokens = [each + 0.05 * random.Random(row).random() for row, each in enumerate(numbers)]  # no two end together
    engine = Engine(slots, lambda rows: steps[rows - 1], 0.21 if reads else 0.0, prompt=4)
    batch = ContinuousBatch(engine)
    for row, each in enumerate(tokens):
        batch.submit(row, [each], turns=Turns(count, seconds))
    found, (want, backs) = ends_of(batch), by_moments(engine, tokens, Turns(count, seconds))
    assume(all(b - a > 1e-6 for a, b in pairwise(sorted(backs))))  # of two at a time either may be the first
    assert [found[row] for row in range(len(tokens))] == pytest.approx(want)
    assert seconds_of(engine, tokens, turns=Turns(count, seconds)) == pytest.approx(max(want))


def test_an_environment_keeps_a_row_and_not_its_slot():
    one, turns = Engine(1, lambda rows: 1.0), Turns(3, 2.0)
    assert seconds_of(one, [6], turns=turns) == 6 + turns.waits == 10
    batch = ContinuousBatch(one)
    batch.submit("first", [6], turns=turns)
    batch.submit("second", [2])
    assert [(moved.key, moved.time, moved.entered) for moved in batch.advance(inf)] == [
        ("first", 0, 1),
        ("second", 2, 1),
        ("second", 4, 0),  # while the first one is away
        ("first", 10, 0),
    ]


def test_weights_that_change_while_a_row_is_away_cost_it_time_when_it_comes_back():
    batch = ContinuousBatch(Engine(2, lambda rows: 1.0, prefill=0.5, prompt=2))
    batch.submit("row", [4], turns=Turns(2, 3.0))
    batch.advance(4.0)  # a second for the prompt, two tokens, and one of three seconds away
    batch.interrupt()
    batch.stall(1.0)  # its environment goes on meanwhile
    assert ends_of(batch) == {"row": 1 + 2 + 3 + 4 * 0.5 + 2}


@settings(max_examples=100)
@given(ROWS, STEPS, st.integers(1, 12), st.lists(st.floats(0.0, 40.0), max_size=6))
def test_looks_ahead_and_stops_change_nothing(tokens, steps, slots, stops):
    engine = Engine(slots, lambda rows: steps[rows - 1], 0.25, prompt=2)
    plain, stopped = ContinuousBatch(engine), ContinuousBatch(engine)
    for row, count in enumerate(tokens):  # every other one has turns
        for batch in (plain, stopped):
            batch.submit(row, [count], turns=Turns(1 + 2 * (row % 2), 1.7))
    want, found = ends_of(plain), dict[object, float]()
    for stop in sorted(stops):
        ahead = stopped.until(lambda moved: moved.left > 0)
        new = ends_of(stopped, stop)
        assert (min(new.values()) if new else inf) == pytest.approx(ahead) or ahead > stop
        found |= new
    while (ahead := stopped.until(lambda moved: moved.left > 0)) < inf:
        new = ends_of(stopped, ahead)
        assert set(new.values()) == {ahead}
        found |= new
    assert found == pytest.approx(want)


def test_rows_that_come_later_slow_down_those_that_run():
    batch = ContinuousBatch(Engine(4, lambda rows: float(rows)))
    batch.submit("first", [10])
    assert ends_of(batch, 4.0) == {}
    batch.submit("second", [2])
    assert ends_of(batch) == {"second": 8.0, "first": 12.0}  # 4 alone, 2 tokens of 2 s, 4 alone


def test_a_pause_and_weights_that_change_cost_time():
    batch = ContinuousBatch(Engine(4, lambda rows: 1.0, prefill=0.5, prompt=2))
    batch.stall(100.0)  # nobody runs
    batch.submit("row", [6])
    batch.advance(3.0)  # a second for the prompt, then two tokens
    batch.stall(5.0)
    batch.interrupt()  # two tokens of prompt and two more are computed again
    assert ends_of(batch) == {"row": 1 + 6 + 5 + 2.0}


def test_what_is_computed_again_may_take_other_seconds_than_a_prompt():
    """Prompts that are free in a fit are no reason for rows that go on after a publish to be so."""
    batch = ContinuousBatch(Engine(4, lambda rows: 1.0, prefill=0.0, prompt=2, again=0.25))
    batch.submit("row", [6])
    batch.advance(2.0)
    batch.interrupt()  # two tokens of prompt and two more
    assert ends_of(batch) == {"row": 6 + 4 * 0.25}


def test_a_row_of_a_weight_takes_as_many_slots():
    engine = Engine(4, lambda rows: float(rows))
    assert seconds_of(engine, [5], [4]) == seconds_of(engine, [5] * 4) == 20
    assert seconds_of(engine, [5, 5], [3, 3]) == 30  # the second waits for the first
    assert seconds_of(engine, [5], [9]) == 45  # an empty engine takes it


def test_a_line_between_points_is_near_and_asks_little():
    asked = list[int]()

    def step(rows: int) -> float:
        asked.append(rows)
        return 0.01 + max(1e-5 * rows, 4e-8 * rows * rows)

    near = between_points(step)
    assert [near(n) for n in range(1, 17)] == [step(n) for n in range(1, 17)]
    asked.clear()
    worst = max(abs(near(n) / (0.01 + max(1e-5 * n, 4e-8 * n * n)) - 1) for n in range(1, 5000))
    assert worst < 4e-3 and len(asked) < 100
