"""A continuous batch in time: the same as a loop over single tokens, whoever asks in between."""

from __future__ import annotations

from collections import deque
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.placement.cost.continuous_batch import ContinuousBatch, Engine, between_points, seconds_of

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


@settings(max_examples=100)
@given(ROWS, STEPS, st.integers(1, 12), st.lists(st.floats(0.0, 40.0), max_size=6))
def test_looks_ahead_and_stops_change_nothing(tokens, steps, slots, stops):
    engine = Engine(slots, lambda rows: steps[rows - 1], 0.25, prompt=2)
    plain, stopped = ContinuousBatch(engine), ContinuousBatch(engine)
    for row, count in enumerate(tokens):
        plain.submit(row, [count])
        stopped.submit(row, [count])
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
