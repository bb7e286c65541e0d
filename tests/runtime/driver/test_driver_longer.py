"""A run that is done is made longer: it equals one that was never stopped. Or it is said why it cannot be."""

from __future__ import annotations

import json

import pytest
from flows import events, metrics

from flowrl.errors import ResumeError
from flowrl.placement.plan.plan import Pipeline, Place, Plan
from flowrl.runtime.driver.take_checkpoint import Checkpoints

TWO_POOLS = {"a": "cpu", "b": "cpu"}
AHEAD = Plan(TWO_POOLS, {"world": Place("b")}, pipeline=Pipeline(staleness=1))


def run(small, out, *programs, **how):
    return small.flow.run(*(programs or ("train",)), out=out, quiet=True, **how)


def steps(count, program="train", **more):
    return {"parameters": {program: {"steps": count, **more}}}


def resumed(out):
    return [event["text"] for event in events(out, "resumed")]


@pytest.mark.parametrize("runtime", ["eager", "local"])
@pytest.mark.parametrize("every", [1, 3, 50])
def test_a_run_that_is_done_is_made_longer(small, tmp_path, runtime, every):
    whole = run(small, tmp_path / "whole", runtime=runtime, **steps(7))
    small.CALLS.clear()
    run(small, tmp_path / "run", runtime=runtime, checkpoint_every=every, **steps(4))
    again = run(small, tmp_path / "run", runtime=runtime, checkpoint_every=every, resume=True, **steps(7))
    assert again.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert resumed(tmp_path / "run") == ["train from step 4"]
    assert [event["text"] for event in events(tmp_path / "run", "changed")] == ["train: steps 4 -> 7"]
    assert len(small.CALLS) == len(set(small.CALLS)), "the world was touched twice for a row"


def test_it_may_be_made_longer_again_and_again_and_stands_still_where_nothing_is_asked(small, tmp_path):
    whole = run(small, tmp_path / "whole", **steps(9))
    run(small, tmp_path / "run", **steps(2))
    for count in (5, 5, 9):
        again = run(small, tmp_path / "run", resume=True, **steps(count))
    assert again.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert resumed(tmp_path / "run")[1] == "at its end: nothing is left to do"


def test_with_steps_that_overlap_too(small, tmp_path):
    whole = run(small, tmp_path / "whole", plan=AHEAD, **steps(7))
    run(small, tmp_path / "run", plan=AHEAD, **steps(4))
    again = run(small, tmp_path / "run", plan=AHEAD, resume=True, **steps(7))
    assert again.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_the_last_of_several_programs_goes_on(small, tmp_path):
    whole = run(small, tmp_path / "whole", "two_loops", "train", **steps(7))
    run(small, tmp_path / "run", "two_loops", "train", **steps(4))
    again = run(small, tmp_path / "run", "two_loops", "train", resume=True, **steps(7))
    assert again.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert [program for program, _ in again.last] == ["two_loops", "train"]


def test_the_last_program_goes_on_and_another_one_follows(small, tmp_path):
    whole = run(small, tmp_path / "whole", "train", "ends", **steps(7))
    run(small, tmp_path / "run", **steps(4))
    again = run(small, tmp_path / "run", "train", "ends", resume=True, **steps(7))
    assert again.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_a_program_that_others_have_gone_on_from_stays_as_it_was(small, tmp_path):
    run(small, tmp_path / "run", "train", "ends", **steps(4))
    with pytest.raises(ResumeError) as raised:
        run(small, tmp_path / "run", "train", "ends", resume=True, **steps(7))
    assert raised.value.report() == (
        "ResumeError: a program that has ended stays as it was.\n"
        "  train: steps 4 -> 7 ('ends' has gone on from what it gave)\n"
        "  fix  Leave it as it was, or start another run with --out."
    )


def test_a_program_that_does_more_after_its_loop_is_done_again_from_the_checkpoint_before(small, tmp_path):
    for out, count in (("whole", 7), ("run", 4)):
        run(small, tmp_path / out, "evaluated", checkpoint_every=3, **steps(count, "evaluated"))
    small.CALLS.clear()
    again = run(small, tmp_path / "run", "evaluated", resume=True, **steps(7, "evaluated"))
    whole = run(small, tmp_path / "whole", "evaluated", resume=True, **steps(7, "evaluated"))
    assert again.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert resumed(tmp_path / "run") == ["evaluated from step 3"]


def test_or_from_its_start_where_there_is_none(small, tmp_path):
    whole = run(small, tmp_path / "whole", "evaluated", **steps(7, "evaluated"))
    run(small, tmp_path / "run", "evaluated", **steps(4, "evaluated"))
    again = run(small, tmp_path / "run", "evaluated", resume=True, **steps(7, "evaluated"))
    assert again.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


@pytest.mark.parametrize("every", [1, 3, 50])
def test_a_test_after_the_loop_is_made_again_with_the_final_weights(small, tmp_path, every):
    """Its call has the number of a step's call that follows now, whose rows nobody has answered."""
    whole = run(small, tmp_path / "whole", "tested", **steps(7, "tested"))
    run(small, tmp_path / "run", "tested", checkpoint_every=every, **steps(4, "tested"))
    small.CALLS.clear()
    again = run(small, tmp_path / "run", "tested", resume=True, **steps(7, "tested"))
    assert again.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert len(small.CALLS) == 3 * 4 + 3, "rows of the steps that were done are answered from the journal"
    assert events(tmp_path / "run", "warning") == []


def files(out):
    """What lies in a run folder, without who holds it and the rows that user code is at."""
    passing = ("lock", "user_code")
    paths = [p for p in out.rglob("*") if p.is_file() and not any(word in p.name for word in passing)]
    return {p.relative_to(out): p.read_bytes() for p in paths}


def refused(small, out, count, program="train", **more):
    with pytest.raises(ResumeError) as raised:
        run(small, out, program, resume=True, **steps(count, program), **more)
    return raised.value.report()


@pytest.mark.parametrize(("plan", "runtime"), [(None, "eager"), (AHEAD, "local")])
def test_fewer_steps_than_are_done_are_refused_before_anything_is_opened(small, tmp_path, monkeypatch, plan, runtime):
    whole = run(small, tmp_path / "whole", plan=plan, runtime=runtime, **steps(7))
    run(small, tmp_path / "run", plan=plan, runtime=runtime, **steps(4))
    before = files(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(small.Counter, "open", lambda self, opening: pytest.fail("a worker was opened"), raising=False)
        assert refused(small, tmp_path / "run", 2, plan=plan, runtime=runtime) == (
            "ResumeError: 'train' was asked to go on with 2 steps, and the run has done 4.\n"
            "  fix  Give it steps=4 or more, or leave it as it was."
        )
    assert files(tmp_path / "run") == before
    again = run(small, tmp_path / "run", plan=plan, runtime=runtime, resume=True, **steps(7))
    assert again.weights_digest == whole.weights_digest


@pytest.mark.parametrize(("plan", "runtime"), [(None, "eager"), (AHEAD, "local")])
def test_where_that_is_known_late_nothing_is_recorded(small, tmp_path, monkeypatch, plan, runtime):
    """Nobody knows from the code how many steps the program does."""
    how = {"plan": plan, "runtime": runtime}
    whole = run(small, tmp_path / "whole", **how, **steps(7))
    run(small, tmp_path / "run", **how, **steps(4))
    before = files(tmp_path / "run")
    monkeypatch.setattr("flowrl.runtime.storage.changes_since_start.steps_of_only_loop", lambda fn: None)
    assert refused(small, tmp_path / "run", 2, **how) == (
        "ResumeError: 'train' ended after 2 steps; the run has done 4.\n"
        "  fix  Give it at least the steps that are done."
    )
    after = files(tmp_path / "run")
    changed = {str(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed == {"events.jsonl"}
    assert [event["kind"] for event in events(tmp_path / "run", "refused")] == ["refused"]
    again = run(small, tmp_path / "run", **how, resume=True, **steps(7))
    assert again.weights_digest == whole.weights_digest


def test_the_end_of_a_program_costs_one_checkpoint(small, tmp_path):
    run(small, tmp_path / "run", **steps(4))
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["000000"]


@pytest.mark.parametrize(("plan", "runtime"), [(None, "eager"), (AHEAD, "local")])
def test_a_checkpoint_that_is_due_after_the_last_step_is_that_of_the_end_too(small, tmp_path, plan, runtime):
    run(small, tmp_path / "run", checkpoint_every=2, plan=plan, runtime=runtime, **steps(4))
    manifests = [json.loads(p.read_text()) for p in sorted((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))]
    assert [(m["program"]["steps"], "ended" in m) for m in manifests] == [(2, False), (4, True)]


def test_so_it_is_where_the_run_was_killed_between_the_two(small, tmp_path, monkeypatch):
    whole = run(small, tmp_path / "whole", **steps(4))
    take = Checkpoints.take

    def killed(self, point):
        if (tmp_path / "run" / "checkpoints" / "000001").exists():
            raise KeyboardInterrupt
        take(self, point)
        self.wait()

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "take", killed)
        with pytest.raises(KeyboardInterrupt):
            run(small, tmp_path / "run", checkpoint_every=2, **steps(4))
    again = run(small, tmp_path / "run", checkpoint_every=2, resume=True, **steps(4))
    assert again.weights_digest == whole.weights_digest
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["000000", "000001"]


@pytest.mark.parametrize("every", [1, 50])
def test_steps_that_another_loop_has_gone_on_from_stay_as_many_as_they_were(small, tmp_path, every):
    whole = run(small, tmp_path / "whole", "warmed_up", **steps(6, "warmed_up"))
    run(small, tmp_path / "run", "warmed_up", checkpoint_every=every, **steps(4, "warmed_up"))
    with pytest.raises(ResumeError) as raised:
        run(small, tmp_path / "run", "warmed_up", resume=True, **steps(6, "warmed_up", warm=3))
    assert raised.value.what == "program 'warmed_up' took another course than the run that is continued."
    again = run(small, tmp_path / "run", "warmed_up", resume=True, **steps(6, "warmed_up"))
    assert again.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_where_more_was_done_after_the_loop_fewer_steps_are_refused_before_anything_is_taken_away(small, tmp_path):
    run(small, tmp_path / "run", "evaluated", **steps(4, "evaluated"))
    before = metrics(tmp_path / "run")
    with pytest.raises(ResumeError) as raised:
        run(small, tmp_path / "run", "evaluated", resume=True, **steps(2, "evaluated"))
    assert raised.value.report() == (
        "ResumeError: 'evaluated' has ended with 4 steps, and was asked to go on with 2.\n"
        "  fix  Give it at least the steps that are done."
    )
    run(small, tmp_path / "run", "evaluated", resume=True, **steps(4, "evaluated"))
    assert resumed(tmp_path / "run") == ["at its end: nothing is left to do"]
    assert metrics(tmp_path / "run") == before
