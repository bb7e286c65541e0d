"""Programs that are run between the steps of others: what they log, and that nothing else changes by them."""

from __future__ import annotations

import json

import pytest
import torch
from flows import events, metrics, module_of

from flowrl.errors import CheckError, UsageError
from flowrl.placement.plan.plan import Pipeline, Place, Plan
from flowrl.runtime.driver.run_texts import evaluation_label
from flowrl.runtime.storage.recorder import Recorder

AHEAD = Plan({"a": "cpu", "b": "cpu"}, {"world": Place("b")}, pipeline=Pipeline(staleness=1))


@pytest.fixture
def made():
    module_of("small_flow")  # afresh, as its worker notes calls
    return module_of("evaluated_flow")


def run(made, out, *programs, **how):
    return made.flow.run(*(programs or ("train",)), out=out, quiet=True, **how)


def of(out, program):
    return [line for line in metrics(out) if line["program"] == program]


def scores(out, program="evaluate"):
    return {line["step"]: line["score"] for line in of(out, program)}


def digests(out, program="train"):
    lines = [json.loads(line) for line in (out / "digests.jsonl").read_text().splitlines()]
    return [line for line in lines if line["program"] == program]


@pytest.mark.parametrize(("runtime", "plan"), [("eager", None), ("local", None), ("local", AHEAD)])
def test_it_is_run_every_so_many_steps_and_at_the_end_and_changes_nothing(made, tmp_path, runtime, plan):
    how = {"runtime": runtime, "plan": plan, "steps": 7}
    alone = run(made, tmp_path / "alone", **how)
    tested = run(made, tmp_path / "tested", evaluate=["evaluate:3", "probe:2"], **how)
    assert tested.weights_digest == alone.weights_digest
    assert of(tmp_path / "tested", "train") == of(tmp_path / "alone", "train")
    assert digests(tmp_path / "tested") == digests(tmp_path / "alone")
    assert [line["step"] for line in of(tmp_path / "tested", "evaluate")] == [3, 6, 7]
    assert [line["step"] for line in of(tmp_path / "tested", "probe")] == [2, 4, 6, 7]


def test_its_numbers_are_those_that_the_program_gives_alone_with_these_weights(made, tmp_path):
    run(made, tmp_path / "tested", evaluate="evaluate:3", steps=7)
    for steps, found in scores(tmp_path / "tested").items():
        run(made, tmp_path / f"after {steps}", "train", "evaluate", steps=steps)
        alone = [line["score"] for line in of(tmp_path / f"after {steps}", "evaluate")]
        assert len(alone) == 2, "it has two steps"
        assert found == pytest.approx(sum(alone) / 2), "of several steps a number is the mean"


def test_more_steps_between_than_there_are_leave_the_one_at_the_end(made, tmp_path):
    run(made, tmp_path / "run", evaluate="evaluate:100", steps=2)
    assert list(scores(tmp_path / "run")) == [2]


def test_steps_count_over_all_loops_and_each_program_that_trains_has_its_own(made, tmp_path):
    run(made, tmp_path / "run", "train", "probe", "spoils", evaluate="evaluate:2", warm=3, steps=2)
    assert list(scores(tmp_path / "run")) == [2, 4, 5]
    assert list(scores(tmp_path / "run", "evaluate-2")) == [1]
    assert evaluation_label(["evaluate", "grpo"], [False, True], 1, "evaluate") == "evaluate-2"


def test_after_what_stands_behind_the_loop_it_is_run_once_more(made, tmp_path):
    run(made, tmp_path / "run", evaluate="evaluate:2", steps=2, tail=True)
    assert [line["step"] for line in of(tmp_path / "run", "evaluate")] == [2, 2]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("plan", [None, AHEAD])
@pytest.mark.parametrize("last", ["evaluate", "train"])
def test_a_resume_runs_it_again_only_where_that_is_undone_and_asks_the_world_for_nothing_twice(
    made, tmp_path, monkeypatch, plan, last
):
    how = {"plan": plan, "evaluate": "evaluate:3", "steps": 10, "checkpoint_every": 4}
    whole = run(made, tmp_path / "whole", **how)
    made.CALLS.clear()
    commit = Recorder.commit

    def killed(self, program, step, tokenizer, **more):
        if program == last and step.number == 6:
            raise Killed
        return commit(self, program, step, tokenizer, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "commit", killed)
        with pytest.raises(Killed):
            run(made, tmp_path / "run", **how)
    again = run(made, tmp_path / "run", resume=True, **how)
    assert again.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert len(made.CALLS) == 4 * 10 + 6 * 4, "ten steps of four rows, and four evaluations of six"
    assert events(tmp_path / "run", "warning") == []


def test_a_run_that_is_done_has_nothing_left_and_is_made_longer_with_the_last_one_anew(made, tmp_path):
    how = {"evaluate": "evaluate:3"}
    whole = run(made, tmp_path / "whole", steps=7, **how)
    run(made, tmp_path / "run", steps=4, **how)
    run(made, tmp_path / "run", steps=4, resume=True, **how)
    assert list(scores(tmp_path / "run")) == [3, 4]
    again = run(made, tmp_path / "run", steps=7, resume=True, **how)
    assert again.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_it_may_be_asked_for_when_a_run_goes_on_and_asked_for_otherwise(made, tmp_path):
    run(made, tmp_path / "run", steps=4)
    run(made, tmp_path / "run", steps=6, resume=True, evaluate="evaluate:5")
    assert list(scores(tmp_path / "run")) == [5, 6]


def test_the_best_checkpoint_may_go_by_its_metric(made, tmp_path):
    run(made, tmp_path / "run", evaluate="evaluate:2", keep_best="evaluate/score:min", steps=6, checkpoint_every=2)
    best = json.loads((tmp_path / "run" / "run.json").read_text())["best"]
    found = scores(tmp_path / "run")
    assert (best["program"], best["step"]) == ("evaluate", min(found, key=lambda step: found[step]))
    assert best["value"] == min(found.values())


def test_a_score_of_the_end_counts_for_the_checkpoint_of_the_last_step(made, tmp_path):
    how = {"evaluate": "evaluate:100", "keep_best": "evaluate/score", "checkpoint_every": 2}
    run(made, tmp_path / "run", steps=4, **how)
    manifests = [json.loads(p.read_text()) for p in sorted((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))]
    assert [m["program"]["steps"] for m in manifests] == [2, 4], "the evaluation has changed nothing"
    assert [m.get("best", {}).get("value") for m in manifests] == [None, scores(tmp_path / "run")[4]]
    run(made, tmp_path / "run", steps=6, resume=True, **how)
    assert list(scores(tmp_path / "run")) == [6], "that of the end comes after the last step now"


def test_what_it_did_is_in_the_records_of_the_run(made, tmp_path):
    run(made, tmp_path / "run", evaluate="evaluate:2", steps=4)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["evaluations"] == [{"program": "evaluate", "every": 2, "parameters": {"level": 0.0}}]
    assert {"train", "evaluate"} == set(record["graphs"]) == set(record["ledger"])
    assert record["ledger"]["evaluate"]["rows"]["live"] == 0
    assert {line["step"] for line in digests(tmp_path / "run", "evaluate")} == {2, 4}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["seconds"] > 0 for line in lines)


def test_its_parameters_are_given_by_its_name(made, tmp_path):
    run(made, tmp_path / "run", evaluate="evaluate:2", steps=2, parameters={"evaluate": {"level": 1e9}})
    assert [line["above"] for line in of(tmp_path / "run", "evaluate")] == [0.0]


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("evaluate", "names no program and number of steps"),
        ("evaluate:0", "names no program and number of steps"),
        ("evaluate:-3", "names no program and number of steps"),
        ("evaluate:often", "names no program and number of steps"),
        (":3", "names no program and number of steps"),
        ("evalute:3", "has no program 'evalute'"),
        ("spoils:3", "counter.update changes 'counter'"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(made, tmp_path, said, what):
    with pytest.raises((UsageError, CheckError)) as raised:
        run(made, tmp_path / "run", evaluate=said, steps=2)
    assert what in raised.value.report()
    assert not (tmp_path / "run").exists()


def test_between_steps_that_train_nothing_there_is_nothing_to_evaluate(made, tmp_path):
    with pytest.raises(UsageError, match="none of probe trains"):
        run(made, tmp_path / "run", "probe", evaluate="evaluate:1")


def test_a_failure_in_it_is_one_of_the_run_with_its_line(made, tmp_path, monkeypatch):
    real = made.Numbers.to_batch

    def to_batch(self, rows, first_uid, tokenizer):
        if self is made.HELD:
            raise ValueError("broken on purpose")
        return real(self, rows, first_uid, tokenizer)

    monkeypatch.setattr(made.Numbers, "to_batch", to_batch)
    with pytest.raises(ValueError, match="broken on purpose"):
        run(made, tmp_path / "run", evaluate="evaluate:2", steps=4)
    assert [line["step"] for line in of(tmp_path / "run", "train")] == [0, 1], "the steps before it are recorded"


def overlapping(runtime, tmp_path, pools, place, staleness):
    """A policy that generates with older weights is evaluated with the newest ones, and goes on as if it was not."""
    module = module_of("overlap_flow")
    module.Witness.rows.clear()
    module_flow = module.flow
    arithmetic = module.arithmetic

    def held_out():
        for step, batch in module_flow.steps(arithmetic.heldout(4)):
            rows = module.reward.score(module.actor.generate(batch, greedy=True))
            module_flow.log(step, score=rows.rewards.mean(), version=rows.versions.row_mean().min())

    module_flow.program(held_out)
    plan = Plan(pools, place, pipeline=Pipeline(staleness=staleness))
    how = {
        "plan": plan,
        "runtime": runtime,
        "quiet": True,
        "save_models": False,
        "parameters": {"overlap": {"steps": 4}},
    }
    alone = module_flow.run(out=tmp_path / "alone", **how)
    tested = module_flow.run(out=tmp_path / "tested", evaluate="held_out:2", **how)
    assert tested.weights_digest == alone.weights_digest
    assert digests(tmp_path / "tested", "overlap") == digests(tmp_path / "alone", "overlap")
    found = of(tmp_path / "tested", "held_out")
    assert [(line["step"], line["version"]) for line in found] == [(2, 2.0), (4, 4.0)], "with all updates so far"
    return tmp_path / "tested"


def test_weights_are_exact_where_steps_overlap(tmp_path):
    torch.set_num_threads(1)
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("cpu")}
    out = overlapping("local", tmp_path, {"train": "cpu", "rollout": "cpu", "cpu": "cpu"}, place, 1)
    rows = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows if row["program"] == "held_out"} == {2, 4}, "rows of each are written down"
