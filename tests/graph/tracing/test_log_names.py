"""The names of what is logged: they depend on the line alone, and two numbers never have the same one."""

from __future__ import annotations

import datetime
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flowrl.errors import At, ProgramError
from flowrl.graph.stand_ins.values import MetricsValue
from flowrl.graph.tracing.log_names import Names, logged

HERE = At("driver.py", 3)


def metrics(worker):
    return MetricsValue(None, SimpleNamespace(title=f"{worker}.update"))


def names(*given, **values):
    return [item.under("loss") if item.is_metrics else item.name for item in logged(given, values, HERE)]


def test_one_update_keeps_its_names_and_several_are_told_apart_by_their_workers():
    assert names(metrics("actor")) == ["loss"]
    assert names(metrics("actor"), metrics("critic")) == ["actor/loss", "critic/loss"]
    assert names(metrics("actor"), metrics("critic"), metrics("actor")) == ["actor/loss", "critic/loss", "actor_2/loss"]
    assert names(metrics("user"), {"loss": 1.0}) == ["metrics/loss", "metrics_2/loss"]


def test_a_keyword_that_is_called_like_a_worker_takes_nothing_away():
    assert names(metrics("actor"), metrics("critic"), actor=1.0) == ["actor/loss", "critic/loss", "actor"]


def test_a_worker_may_be_called_like_the_second_metrics_of_another():
    assert names(metrics("actor_2"), metrics("actor")) == ["actor_2/loss", "actor/loss"]
    with pytest.raises(ProgramError, match=r"two of these metrics would be called 'actor_2/...'"):
        logged([metrics("actor_2"), metrics("actor"), metrics("actor")], {}, HERE)


def test_a_name_of_a_number_may_have_several_lines_and_one_of_metrics_one_meaning():
    seen = Names({})
    assert seen.add(0, "reward", "", At("driver.py", 3)) is None
    assert seen.add(1, "reward", "", At("driver.py", 5)) is None
    assert seen.add(0, "loss", "actor.update", At("driver.py", 6)) is None
    assert seen.add(1, "loss", "actor.update", At("driver.py", 7)) is None
    wrong = seen.add(2, "loss", "critic.update", At("driver.py", 8))
    assert wrong.what == (
        "flow.log: 'loss' is of actor.update (line 6) in some steps, and of critic.update (line 8) in others."
    )


def test_two_numbers_of_a_step_have_two_names():
    seen = Names({})
    assert seen.add(0, "reward", "", At("driver.py", 3)) is None
    assert seen.add(0, "reward", "", At("driver.py", 5)).report() == (
        "ProgramError: flow.log: a step has two numbers called 'reward': the keyword reward= (line 3), and the keyword "
        "reward= (line 5).\n  at   driver.py:5\n  fix  Use another name for one of them."
    )


@pytest.mark.parametrize(
    "value", [1, 0.5, None, True, "text", float("nan"), [1, 2], np.float32(2), np.ones(1), {"a": 1}]
)
def test_what_a_record_can_hold_is_taken(value):
    assert names(x=value)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.array([0.1, 0.2]), "'x' has 2 values"),
        (torch.ones(3), "'x' has 3 values"),
        (torch.ones(0), "'x' has 0 values"),
        ({"a": np.ones(2)}, "'x/a' has 2 values"),
        (datetime.date(2020, 1, 1), "'x' is date datetime.date"),
        ({1, 2}, "'x' is set"),
        ({"a": {"b": {1}}}, "'x/a' is dict"),
    ],
)
def test_what_it_cannot_is_told_at_its_line(value, what):
    with pytest.raises(ProgramError, match=what) as e:
        logged([], {"x": value}, HERE)
    assert e.value.at == HERE
