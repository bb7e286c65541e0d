"""The examples of docs/verification.md run as they stand, and verdicts are told in an environment."""

import re
from pathlib import Path

import pytest

from flowrl.environments import Environment, reward, verify
from flowrl.environments.verify import mathematics
from flowrl.environments.verify.unit_tests import OUTCOMES

PAGE = Path(__file__).parents[2] / "docs" / "verification.md"


def test_the_examples_run():
    pytest.importorskip("math_verify", reason="the page shows the package math-verify")
    names = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["judge"].read("Score: 5") == 0.5 and names["graded"].name == "graded"


def test_every_outcome_and_limit_is_on_the_page():
    text = PAGE.read_text()
    wanted = {*OUTCOMES, *mathematics.OUTCOMES, *vars(verify.Limits())}
    assert [name for name in wanted if f"`{name}`" not in text] == []


class Graded(Environment):
    turns = 1

    @reward(weight=0.5)
    def code(self, response):
        return verify.unit_tests(response, ["pass"])


def test_an_outcome_is_among_the_scores():
    env = Graded()
    state, _ = env.reset({"prompt": "?"}, seed=0)
    env.step(state, "raise ValueError")
    total, scores = env.grade(state)
    assert total == 0 and scores["code_crashed"] == 1
    assert sum(scores[f"code_{name}"] for name in verify.unit_tests("", ["pass"]).outcomes) == 1
    assert all(type(value) is float for value in scores.values())
