"""Which parameter says how many steps a program does."""

from __future__ import annotations

from typing import Any

from flowrl.graph.script.length_parameters import steps_of_only_loop

flow: Any = None


def plain(count: int = 4):
    for step, batch in flow.steps(None, count):
        flow.log(step, batch)


def doubled(steps: int = 4):
    for step, batch in flow.steps(None, 2 * steps):
        flow.log(step, batch)


def changed(steps: int = 4):
    steps += 1
    for step, batch in flow.steps(None, steps):
        flow.log(step, batch)


def two_loops(steps: int = 4):
    for step, batch in flow.steps(None, 3):
        flow.log(step, batch)
    for step, batch in flow.steps(None, steps):
        flow.log(step, batch)


def inside(steps: int = 4):
    for _ in range(2):
        for step, batch in flow.steps(None, steps):
            flow.log(step, batch)


def endless():
    for step, batch in flow.steps(None):
        flow.log(step, batch)


def test_it_is_known_where_the_only_loop_has_it_as_it_is():
    assert steps_of_only_loop(plain) == "count"
    for program in (doubled, changed, two_loops, inside, endless):
        assert steps_of_only_loop(program) is None, program.__name__
