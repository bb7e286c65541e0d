"""The newest checkpoints are kept, and the best one by a metric; its models are saved, as other libraries load them."""

from __future__ import annotations

import json

import pytest
import torch
from flows import module_of
from letters import SMALL

import flowrl as fl
from flowrl import rl
from flowrl.errors import UsageError
from flowrl.runtime.driver.best_step import Score

ACCURACY = [0.1, 0.5, 0.9, 0.2, 0.9, 0.3]


def numbered():
    """Logs an accuracy for each step, and a loss for every second one."""
    numbers = module_of("small_flow").Numbers
    flow = fl.Flow("numbered")

    @flow.program
    def scored(steps: int = 6):
        for step, _ in flow.steps(numbers(), steps):
            flow.log(step, accuracy=ACCURACY[step])
            if step % 2:
                flow.log(step, loss=float(step))

    return flow


def kept(out):
    """Of the checkpoints that are there, after how many steps each was taken, and what it says of being the best."""
    manifests = [json.loads(path.read_text()) for path in sorted(out.glob("checkpoints/*/manifest.json"))]
    return [(m["program"]["steps"], m.get("best", {}).get("value")) for m in manifests]


def run(out, **how):
    return numbered().run(out=out, quiet=True, checkpoint_every=1, **how).out


def test_so_many_of_the_newest_are_kept(tmp_path):
    assert [steps for steps, _ in kept(run(tmp_path / "two"))] == [5, 6], "the last step's is that of the end too"
    assert [steps for steps, _ in kept(run(tmp_path / "four", keep_last=4))] == [3, 4, 5, 6]
    assert [steps for steps, _ in kept(run(tmp_path / "one", keep_last=1))] == [6]


def test_the_best_is_kept_beside_them_and_named_in_the_record(tmp_path):
    out = run(tmp_path / "run", keep_best="accuracy")
    assert kept(out) == [(5, 0.9), (6, 0.3)], "of two equal ones the newer counts"
    out = run(tmp_path / "short", keep_best="accuracy", keep_last=1)
    assert kept(out) == [(5, 0.9), (6, 0.3)]
    best = json.loads((out / "run.json").read_text())["best"]
    assert best == {
        "metric": "accuracy",
        "value": 0.9,
        "program": "scored",
        "step": 4,
        "checkpoint": best["checkpoint"],
    }
    assert (out / "checkpoints" / best["checkpoint"]).is_dir()


def test_the_smallest_may_be_the_best_and_a_checkpoint_without_a_number_is_not_compared(tmp_path):
    out = run(tmp_path / "run", keep_best="loss:min", keep_last=1)
    assert kept(out) == [(2, 1.0), (6, 5.0)]
    assert kept(run(tmp_path / "none", keep_best="no such")) == [(5, None), (6, None)]


def test_a_resumed_run_compares_with_what_was_there(tmp_path):
    run(tmp_path / "run", keep_best="accuracy", steps=4)
    assert kept(run(tmp_path / "run", keep_best="accuracy", resume=True, steps=6, keep_last=1)) == [(5, 0.9), (6, 0.3)]
    run(tmp_path / "high", keep_best="accuracy", steps=3)
    assert kept(run(tmp_path / "high", keep_best="accuracy", resume=True, steps=4, keep_last=1)) == [
        (3, 0.9),
        (4, 0.2),
    ]


def test_a_number_of_older_weights_is_not_taken_for_that_of_newer_ones():
    score = Score("accuracy")
    for step, accuracy in enumerate((0.4, 0.5, None, float("nan"))):
        score.note({"program": "p", "step": step, "accuracy": accuracy})
    assert (score.take() or {})["value"] == 0.5 and score.take() is None
    score.note({"program": "p", "step": 4, "accuracy": 0.9})
    score.rewind()
    assert score.take() is None


def test_none_of_it_is_no_number(tmp_path):
    with pytest.raises(UsageError, match="keep_last=0 is not a whole number of at least 1"):
        run(tmp_path / "run", keep_last=0)


def length(response: str) -> float:
    return float(len(response))


def trained():
    flow = fl.Flow("trained")
    actor = flow.worker(fl.Actor, SMALL, name="actor", lr=1e-2, max_tokens=6)
    reward = flow.worker(fl.FunctionReward, length, name="reward")

    @flow.program
    def train(steps: int = 4, enough: float = 1.0):
        for step, rows in flow.steps(fl.data.rows([{"prompt": "ab"}, {"prompt": "cde"}], batch=2), steps):
            batch = rl.group_advantages(reward.score(actor.generate(rows, n=3)))
            accuracy = batch.rewards.mean() * 0 + ACCURACY[step]
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()), accuracy=accuracy)
            if float(accuracy) > enough:
                break

    return flow


def weights(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_models_of_the_best_are_saved_and_load_elsewhere(tmp_path):
    out = trained().run(out=tmp_path / "run", quiet=True, checkpoint_every=1, keep_best="accuracy").out
    until = trained().run(out=tmp_path / "until", quiet=True, steps=3).out
    assert same(weights(out / "best" / "actor"), weights(until / "model" / "actor"))
    assert not same(weights(out / "best" / "actor"), weights(out / "model" / "actor"))
    assert json.loads((out / "run.json").read_text())["best"]["step"] == 2


def test_a_saved_model_has_a_card_of_its_run(tmp_path):
    out = trained().run(out=tmp_path / "run", quiet=True, checkpoint_every=1, keep_best="accuracy", seed=7).out
    record = json.loads((out / "run.json").read_text())
    final, best = ((out / name / "actor" / "README.md").read_text() for name in ("model", "best"))
    for said in ("# actor, trained with flowrl", "| seed | 7 |", "| train: steps | 4 |", "| actor: lr | 0.01 |"):
        assert said in final and said in best
    top = final.split("---")[1]
    assert "pipeline_tag: text-generation" in top and "base_model" not in top, "a model with random weights"
    assert f"The final weights of run `{record['id']}`" in final and record["weights_digest"] in final
    assert "| at step 3 of train | |" in final and "| accuracy | 0.2 |" in final
    assert "The weights of the best checkpoint, by `accuracy`," in best and "| at step 2 of train | |" in best


def test_a_program_may_stop_early(tmp_path):
    out = trained().run(out=tmp_path / "run", quiet=True, enough=0.4).out
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((out / "run.json").read_text())["status"] == "done"
