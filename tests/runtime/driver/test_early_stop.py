"""A loop ends early where a number does not improve any more: after the same step, whatever the timing and the resumes."""

from __future__ import annotations

import pytest
from flows import events, metrics, module_of

import flowrl as fl
from flowrl.errors import UsageError
from flowrl.placement.plan.plan import Pipeline, Plan
from flowrl.runtime.driver.early_stop import EarlyStop

ACCURACY = [0.1, 0.5, 0.4, 0.5, 0.9, 0.2, 0.9, float("nan"), 0.3, 0.2]
AHEAD = Plan({"a": "cpu"}, pipeline=Pipeline(staleness=1))


def numbered():
    """Logs an accuracy for each step, in two loops."""
    small = module_of("small_flow")
    flow = fl.Flow("scored")
    counter = flow.worker(small.Counter, name="counter")

    @flow.program
    def scored(steps: int = 10, more: int = 0, tail: bool = False):
        for step, batch in flow.steps(small.Numbers(), steps):
            flow.log(step, counter.update(counter.values(batch)), accuracy=ACCURACY[step])
        for step, batch in flow.steps(small.Numbers(), more):
            flow.log(step, second=counter.values(batch).y.mean(), falls=-float(step))
        if tail:
            flow.log(0, last=counter.values(flow.take(small.Numbers())).y.mean())

    @flow.program
    def test():
        for step, batch in flow.steps(small.Numbers(), 1):
            flow.log(step, total=counter.values(batch).y.mean())

    return flow


def run(out, flow=None, **how):
    return (flow or numbered()).run(out=out, quiet=True, **how)


def steps(out, name="accuracy"):
    return [line["step"] for line in metrics(out) if name in line]


def look(said, values, staleness=0):
    stop = EarlyStop(said, staleness)
    for done, value in enumerate(values, 1):
        stop.note({"program": "scored", "step": done - 1, "accuracy": value}, done)
        if stop.is_enough(done):
            return done, stop.in_words()
    return None


def enough(said, values):
    found = look(said, values)
    return None if found is None else found[0]


def test_it_is_enough_once_so_many_in_a_row_were_not_better():
    assert look("accuracy:2", ACCURACY) == (
        4,
        "accuracy has not been above 0.5, that of step 1, in the 2 numbers since",
    )
    assert enough("accuracy:3", ACCURACY) == 8
    assert look("accuracy:9", ACCURACY) is None
    assert look("accuracy:min:1", ACCURACY) == (2, "accuracy has not been below 0.1, that of step 0, since")
    assert enough("scored/accuracy:2", ACCURACY) == 4
    assert look("other/accuracy:2", ACCURACY) is None
    assert look("accuracy:2", [float("nan")] * 4) == (2, "accuracy was no finite number 2 times")


@pytest.mark.parametrize(("patience", "done"), [(1, 3), (2, 4), (3, 8), (9, 10)])
def test_a_loop_ends_and_the_program_goes_on_behind_it(tmp_path, patience, done):
    run(tmp_path, stop_when=f"accuracy:{patience}", more=2, tail=True)
    assert steps(tmp_path) == list(range(done))
    assert steps(tmp_path, "second") == [0, 1], "another loop is judged by itself"
    assert steps(tmp_path, "last") == [0]
    assert len(events(tmp_path, "stopped early")) == (done < 10)


def test_where_steps_overlap_it_goes_by_those_that_are_surely_recorded(tmp_path):
    for name in ("a", "b"):
        run(tmp_path / name, plan=AHEAD, stop_when="accuracy:2")
        assert steps(tmp_path / name) == list(range(5)), "a step more than where they do not"


@pytest.mark.parametrize("every", [1, 3, 50])
@pytest.mark.parametrize("stop", [2, 5])
def test_a_resumed_run_ends_where_the_other_one_did(tmp_path, monkeypatch, every, stop):
    from flowrl.runtime.storage.recorder import Recorder

    whole = run(tmp_path / "whole", stop_when="accuracy:3", more=2)
    commit = Recorder.commit

    def killed(self, program, step, tokenizer, **more):
        if step.number == stop:
            raise KeyboardInterrupt
        return commit(self, program, step, tokenizer, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", stop_when="accuracy:3", more=2, checkpoint_every=every)
    again = run(tmp_path / "run", stop_when="accuracy:3", more=2, checkpoint_every=every, resume=True)
    assert again.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_one_that_went_through_its_steps_again_ends_there_too(tmp_path, monkeypatch):
    """Without the variables of the driver: the loop that was stopped lies before the checkpoint."""
    from flowrl.runtime.driver.loop_heads import LoopHeads
    from flowrl.runtime.storage.recorder import Recorder

    monkeypatch.setattr(LoopHeads, "record", lambda self, step, opened: None)
    whole = run(tmp_path / "whole", stop_when="accuracy:2", more=4)
    commit = Recorder.commit

    def killed(self, program, step, tokenizer, **more):
        if step.number == 7:
            raise KeyboardInterrupt
        return commit(self, program, step, tokenizer, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", stop_when="accuracy:2", more=4, checkpoint_every=1)
    run(tmp_path / "run", stop_when="accuracy:2", more=4, checkpoint_every=1, resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert whole.weights_digest is not None


def test_it_may_go_by_a_program_that_evaluates(tmp_path):
    out = run(tmp_path, evaluate="test:2", stop_when="test/total:min:1").out
    totals = [line["total"] for line in metrics(out) if line["program"] == "test"]
    worse = next(i for i in range(1, len(totals)) if totals[i] >= min(totals[:i]))
    assert len(totals) == worse + 1, "it is the last one, as nothing was done after it"
    assert steps(out) == list(range(2 * (worse + 1)))


def test_of_a_metric_that_no_line_has_the_run_tells_once_and_goes_on(tmp_path):
    out = run(tmp_path, stop_when="acuracy:1", keep_best="no such", evaluate="test:5").out
    assert steps(out) == list(range(10))
    said = [event["text"] for event in events(out, "warning")]
    assert len(said) == 2
    assert "--stop-when acuracy: no line of metrics has such a number so far" in said[1]
    assert "Did you mean 'accuracy'?" in said[1]
    assert "--keep-best no such" in said[0] and "Logged are accuracy" in said[0]


@pytest.mark.parametrize(
    "said", ["accuracy", "accuracy:0", "accuracy:", ":3", ":min:3", "accuracy:-1", "accuracy:soon"]
)
def test_words_that_say_no_metric_and_patience_are_refused(tmp_path, said):
    with pytest.raises(UsageError, match="names no metric and patience"):
        run(tmp_path / "run", stop_when=said)
    assert not (tmp_path / "run").exists()
