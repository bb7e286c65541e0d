"""A gap between the engine that samples and the trainer is recorded, and told of when rounding does not explain it."""

from __future__ import annotations

import json
import math

import pytest
from flows import events
from letters import SMALL

import flowrl as fl
from flowrl import rl
from flowrl.placement.plan.plan import Pipeline, Place, Plan
from flowrl.runtime.driver.monitoring.gap_alarm import GapAlarm, gap_in, is_beyond

SPLIT = Plan({"train": "cpu", "rollout": "cpu"}, {"actor": {"train": Place("train"), "generate": Place("rollout")}})
PROMPTS = [{"prompt": "ab"}, {"prompt": "cde"}, {"prompt": "f"}]


def gap_of(mean, beyond=0.0, tokens=100.0, bound=1e-3):
    figures = {"gap_mean": mean, "gap_max": mean, "gap_k3": mean, "gap_beyond": beyond}
    return {**figures, "gap_tokens": tokens, "gap_bound": bound}


@pytest.mark.parametrize(
    ("gap", "beyond"),
    [
        (gap_of(1e-6), False),
        (gap_of(3e-4), True),
        (gap_of(1e-4, beyond=0.02), True),
        (gap_of(1e-4, beyond=0.005), False),
        (gap_of(3e-4, bound=0.25), False),
        (gap_of(0.06, bound=0.25), True),
        (gap_of(math.nan), True),
        (gap_of(math.inf), True),
        (gap_of(math.nan, tokens=0.0), False),
    ],
)
def test_when_a_gap_is_beyond_its_bounds(gap, beyond):
    assert is_beyond(gap) == beyond


def test_it_is_told_when_it_comes_when_it_doubles_and_when_it_goes():
    alarm, said = GapAlarm(), []
    for step, mean in enumerate([1e-6, 1e-2, 1.5e-2, 2.1e-2, math.nan, math.nan, 1e-6, 1e-6, 1e-2]):
        said += [(step, text) for text in alarm.look("grpo", step, {"actor.update": gap_of(mean)})]
    assert [step for step, _ in said] == [1, 3, 6, 8]
    assert said[0][1].startswith("grpo: step 1, actor.update: the engine that sampled and the trainer disagree")
    assert "Usual causes: a publish that did not arrive" in said[0][1] and "Try: flowrl gap RUN" in said[0][1]
    assert "differ by 0.01 on average" in said[0][1] and "within its bounds again" in said[2][1]


def test_a_first_gap_that_is_no_number_is_told_once():
    alarm = GapAlarm()
    assert [len([*alarm.look("p", s, {"u": gap_of(math.nan)})]) for s in range(3)] == [1, 0, 0]


def test_metrics_without_a_gap_have_none():
    assert gap_in({"loss": 1.0}) == {} and gap_in(None) == {}
    assert gap_in({"loss": 1.0, **gap_of(0.5)}) == gap_of(0.5)


def digits(response: str) -> float:
    return float(len(response) % 3)


def trained(out, *, log=True, **how):
    """The lines of a run of three steps of GRPO."""
    flow = fl.Flow("small")
    actor = flow.worker(fl.Actor, SMALL, lr=3e-2, max_tokens=6, name="actor")
    reward = flow.worker(fl.FunctionReward, digits, name="reward")

    @flow.program
    def small(steps: int = 3) -> None:
        for step, rows in flow.steps(fl.data.rows(PROMPTS, batch=3), steps):
            batch = rl.group_advantages(reward.score(actor.generate(rows, n=4)))
            metrics = actor.update(batch, loss=rl.ppo_clip())
            if log:
                flow.log(step, metrics)
            else:
                flow.log(step, reward=batch.rewards.mean())

    flow.run(out=out, quiet=True, save_models=False, **how)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("how", [{"runtime": "eager"}, {"plan": SPLIT}], ids=["eager", "split"])
def test_a_sound_run_records_a_small_gap_and_tells_nothing(tmp_path, how):
    lines = trained(tmp_path / "run", **how)
    assert len(lines) == 3 and all(line["gap_max"] < 1e-4 and line["gap_tokens"] > 0 for line in lines)
    assert not any("actor.update/gap_mean" in line for line in lines), "it is logged once"
    assert not events(tmp_path / "run", "gap")


def test_it_is_recorded_where_the_program_does_not_log_it(tmp_path):
    lines = trained(tmp_path / "run", log=False)
    assert all(line["actor.update/gap_max"] < 1e-4 for line in lines)


def test_an_engine_that_misses_its_publishes_is_told_of(tmp_path, monkeypatch):
    """The copy that generates keeps the weights that it began with, and says that it has the new ones."""
    from flowrl.backends.hf.engine import HFEngine

    monkeypatch.setattr(HFEngine, "take_weights", lambda self, weights: None)
    lines = trained(tmp_path / "run", plan=SPLIT)
    assert lines[0]["gap_max"] < 1e-4 and lines[1]["gap_mean"] > 1e-3
    [first, *_] = events(tmp_path / "run", "gap")
    assert first["text"].startswith("small: step 1, actor.update: the engine that sampled and the trainer disagree")
    assert f"differ by {lines[1]['gap_mean']:.2g} on average" in first["text"]


def test_rows_that_are_older_than_the_weights_are_no_gap(tmp_path):
    plan = Plan(SPLIT.pools, SPLIT.place, pipeline=Pipeline(staleness=1))
    lines = trained(tmp_path / "run", plan=plan)
    assert lines[0]["gap_max"] < 1e-4, "the first rows are as new as the weights"
    assert all(line["gap_tokens"] == 0 and line["gap_mean"] is None for line in lines[1:])
    assert not events(tmp_path / "run", "gap")
