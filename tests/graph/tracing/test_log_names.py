"""The names of what is logged: they depend on the line alone, and two numbers never have the same one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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
