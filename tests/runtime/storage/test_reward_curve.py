"""The lines of a reward curve."""

import pytest
from letters import SMALL

import flowrl as fl
from flowrl import rl
from flowrl.runtime.storage.reward_curve import curves


def test_each_loop_of_a_program_is_a_line_of_its_own():
    def lines(program, *rewards):
        return [{"program": program, "step": step, "reward": reward} for step, reward in enumerate(rewards)]

    history = [
        *lines("warmup", 0.1),
        *lines("train", 0.1, 0.2),
        *lines("train", 0.3, 0.4, 0.5),
        *lines("test", 0.9, 1.0),
    ]
    assert curves(history) == [
        ("train, loop 1", [0, 1], [0.1, 0.2]),
        ("train, loop 2", [0, 1, 2], [0.3, 0.4, 0.5]),
        ("test", [0, 1], [0.9, 1.0]),
    ]


def test_a_step_without_a_reward_is_left_out_also_before_it_was_written_and_read_again():
    rewards = (0.5, float("nan"), None, 0.75)
    history = [{"program": "train", "step": step, "reward": reward} for step, reward in enumerate(rewards)]
    assert curves([*history, {"program": "train", "step": 4}]) == [("train", [0, 3], [0.5, 0.75])]


def test_without_a_reward_it_is_what_was_measured_without_being_asked():
    history = [{"program": "train", "step": s, "reward/math": s / 2, "reward/code": 1.0, "right": 1} for s in range(2)]
    assert curves(history) == [
        ("train, reward/math", [0, 1], [0.0, 0.5]),
        ("train, reward/code", [0, 1], [1.0, 1.0]),
    ]
    assert curves([{**line, "reward": 0.25} for line in history]) == [("train", [0, 1], [0.25, 0.25])]


def graded(name):
    flow = fl.Flow("graded")
    actor = flow.worker(fl.Actor, SMALL, name="actor", max_tokens=4)
    reward = flow.worker(fl.FunctionReward, lambda response: float(len(response)), name="reward")

    @flow.program
    def train(steps: int = 2):
        for step, rows in flow.steps(fl.data.rows([{"prompt": "ab"}], batch=1), steps):
            batch = rl.group_advantages(reward.score(actor.generate(rows, n=2)))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()), **{name: batch.rewards.mean()})

    return flow


@pytest.mark.parametrize("name", ["reward", "right"])
def test_a_run_says_why_there_is_no_curve(tmp_path, capsys, name):
    out = graded(name).run(out=tmp_path / "run", save_models=False).out
    said = capsys.readouterr().err
    assert ("no reward.png: no number called 'reward' was logged." in said) == (name == "right")
    assert (out / "reward.png").exists() == (name == "reward")
