"""Updates that change nothing are told of once, with what to look at."""

import json
import runpy
from pathlib import Path

import pytest

import flowrl as fl
from flowrl import rl
from flowrl.runtime.driver.monitoring.learning_stalled import stalled

TASK = runpy.run_path(str(Path(__file__).parents[4] / "algorithms" / "tasks" / "arithmetic.py"))
PROMPTS = fl.data.rows([{"prompt": "1+2="}], batch=1)


def lines(*norms):
    return [{"step": i} if norm is None else {"step": i, "actor/grad_norm": norm} for i, norm in enumerate(norms)]


@pytest.mark.parametrize(
    ("norms", "ended", "told"),
    [
        ([0.0] * 10, False, True),
        ([0.0] * 9, False, False),
        ([0.0] * 11, False, False),  # it was told of
        ([1.0] + [0.0] * 10, False, True),
        ([0.0] * 9 + [0.1], False, False),
        ([None] * 10, False, False),
        ([0.0] * 3, True, True),
        ([0.0] * 2, True, False),
        ([0.0, 0.1, 0.0], True, False),
        ([0.0] * 12, True, False),
    ],
)
def test_when_it_is_told(norms, ended, told):
    assert (stalled(lines(*norms), ended=ended) is not None) == told


@pytest.mark.parametrize(
    ("rewards", "ended", "told"),
    [
        ([0.0] * 10, False, "reward is 0 in each of the last 10 steps: "),
        ([0.5] + [0.25] * 10, False, "reward is 0.25 in each of the last 10 steps: "),
        ([0.0] * 11, False, None),  # it was told of
        ([0.0] * 9 + [0.1], False, None),
        ([1.0] * 4, True, "reward is 1 in all 4 steps: "),
        ([1.0] * 2, True, None),
        ([None] * 10, False, None),
    ],
)
def test_rewards_that_never_differ_are_told_of_though_other_terms_move_the_weights(rewards, ended, told):
    some = [{"grad_norm": 0.1, "reward": r} if r is not None else {"grad_norm": 0.1} for r in rewards]
    text = stalled(some, ended=ended)
    assert (text is None) == (told is None) and (text or "").startswith(told or "")
    assert stalled([{"reward": r} for r in rewards], ended=ended) is None, "a program that trains nothing"


def constant(response: str) -> float:
    return 1.0


@pytest.mark.parametrize("steps", [4, 12])
def test_a_run_whose_rewards_are_all_equal_says_so_once(tmp_path, steps):
    flow = fl.Flow("f")
    actor = flow.worker(fl.Actor, TASK["MODEL"], max_tokens=1, name="actor")
    reward = flow.worker(fl.FunctionReward, constant, name="reward")

    @flow.program
    def f(steps: int = 4):
        for step, batch in flow.steps(PROMPTS, steps):
            batch = rl.group_advantages(reward.score(actor.generate(batch, n=2)))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))

    flow.run(out=tmp_path, quiet=True, save_models=False, parameters={"f": {"steps": steps}})
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    [text] = [e["text"] for e in events if e["kind"] == "warning"]
    which = "all 4" if steps == 4 else "the last 10"
    assert text.startswith(f"f: the updates of {which} steps changed nothing: grad_norm is 0.")
