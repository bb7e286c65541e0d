"""The runtimes: equal results, honest records, failures with the driver's line, runs that are continued."""

from __future__ import annotations

import json

import pytest
from flows import metrics

import flowrl as fl
from flowrl.errors import FieldError, ResumeError, RowsError, RunError, UsageError
from flowrl.placement.plan.plan import Place, Plan
from flowrl.runtime.local.executor import LocalExecutor
from flowrl.runtime.storage.recorder import Recorder

SPLIT = Plan({"a": "cpu", "b": "cpu", "c": "cpu"}, {"world": Place("b"), "fails": Place("c")})


def run(small, out, *programs, **how):
    return small.flow.run(*(programs or ("train",)), out=out, quiet=True, **how)


class Stop(Exception):
    """Thrown into a run in place of a crash."""


def crash_at(monkeypatch, small, update: int):
    """Have the run die in its update of that number."""
    real, count = small.Counter.__dict__["update"].fn, 0

    def fn(self, batch, *, scale=1.0):
        nonlocal count
        count += 1
        if count == update:
            raise Stop
        return real(self, batch, scale=scale)

    fn.__annotations__ = real.__annotations__
    object.__setattr__(small.Counter.__dict__["update"], "fn", fn)


@pytest.mark.parametrize("status", ["done", "failed"])
def test_a_run_whose_last_picture_fails_says_how_it_ended_and_ends_its_ranks(small, tmp_path, monkeypatch, status):
    """A finished run was said to be running, and one that failed left its ranks open."""
    closed: list[LocalExecutor] = []
    close = LocalExecutor.close

    def curve(self: Recorder) -> str:
        raise ValueError("no picture")

    monkeypatch.setattr(Recorder, "curve", curve)
    monkeypatch.setattr(LocalExecutor, "close", lambda self: (closed.append(self), close(self)))
    if status == "failed":
        crash_at(monkeypatch, small, 2)
    with pytest.raises(ValueError, match="no picture"):
        run(small, tmp_path, runtime="local", parameters={"train": {"steps": 2}})
    assert len(closed) == 1
    assert json.loads((tmp_path / "run.json").read_text())["status"] == status


def test_local_equals_eager_on_one_pool_and_on_three(small, tmp_path):
    outcomes = [
        run(small, tmp_path / "eager", runtime="eager"),
        run(small, tmp_path / "local", runtime="local"),
        run(small, tmp_path / "split", runtime="local", plan=SPLIT),
    ]
    assert len({o.weights_digest for o in outcomes}) == 1
    assert metrics(tmp_path / "eager") == metrics(tmp_path / "local") == metrics(tmp_path / "split")
    assert len(metrics(tmp_path / "eager")) == 10


def test_a_plain_loop_on_plain_workers_gives_the_same_numbers(small, tmp_path):
    run(small, tmp_path / "run", parameters={"train": {"steps": 4}})
    from flowrl.batch import CallInfo

    counter, world = small.Counter(start=1.0), small.World()
    source, scale, baseline, seen = small.Numbers().cursor(), 1.0, 0.0, []
    uid = 0
    for step in range(4):
        rows = source.draw(None)
        batch = small.Numbers().to_batch(rows, uid, None)
        uid += len(rows)
        batch = counter.values(batch.with_call(CallInfo(0, "train", step, "counter.values", 0)))
        batch = world.judge(batch)
        baseline = baseline * 0.9 + batch.r.mean() * 0.1
        if step % 3 == 0:
            scale = scale * 0.9 + baseline * 0.01
            source.draw(2)
            uid += 2
        seen.append(counter.update(batch, scale=scale)["total"])
    assert [line["total"] for line in metrics(tmp_path / "run")] == seen


def test_the_seed_changes_results_and_nothing_else_does(small, tmp_path):
    a = run(small, tmp_path / "a", seed=1)
    b = run(small, tmp_path / "b", seed=2)
    c = run(small, tmp_path / "c", seed=1, checkpoint_every=1)
    assert a.weights_digest == c.weights_digest != b.weights_digest


@pytest.mark.parametrize("at", [1, 2, 4, 7, 10])
@pytest.mark.parametrize("every", [1, 3, 100])
def test_a_run_that_died_is_continued_to_the_same_end(small, tmp_path, monkeypatch, at, every):
    whole = run(small, tmp_path / "whole")
    crash_at(monkeypatch, small, at)
    small.CALLS.clear()
    with pytest.raises(RunError):
        run(small, tmp_path / "run", checkpoint_every=every)
    again = run(small, tmp_path / "run", checkpoint_every=every, resume=True)
    assert again.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert len(small.CALLS) == len(set(small.CALLS)), "the world was touched twice for a row"


def test_a_resumed_run_can_be_cut_again_and_again(small, tmp_path, monkeypatch):
    whole = run(small, tmp_path / "whole")
    for number, at in enumerate((2, 3, 2, 4)):
        crash_at(monkeypatch, small, at)
        with pytest.raises(RunError):
            run(small, tmp_path / "run", checkpoint_every=1, resume=number > 0)
    assert run(small, tmp_path / "run", resume=True).weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


@pytest.mark.parametrize("at", range(1, 7))
def test_resume_in_a_program_of_two_loops(small, tmp_path, monkeypatch, at):
    whole = run(small, tmp_path / "whole", "two_loops")
    crash_at(monkeypatch, small, at)
    with pytest.raises(RunError):
        run(small, tmp_path / "run", "two_loops", checkpoint_every=1)
    assert run(small, tmp_path / "run", "two_loops", resume=True).weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_resume_in_the_second_program_of_a_chain(small, tmp_path, monkeypatch):
    chain = ("train", "ends", "train", "ends")
    whole = run(small, tmp_path / "whole", *chain)
    crash_at(monkeypatch, small, 15)
    with pytest.raises(RunError):
        run(small, tmp_path / "run", *chain, checkpoint_every=2)
    again = run(small, tmp_path / "run", *chain, resume=True)
    assert again.weights_digest == whole.weights_digest
    assert [(p, m.get("total")) for p, m in again.last] == [(p, m.get("total")) for p, m in whole.last]
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_a_finished_run_resumed_changes_nothing(small, tmp_path):
    first = run(small, tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert run(small, tmp_path / "run", resume=True).weights_digest == first.weights_digest
    assert metrics(tmp_path / "run") == lines


def test_another_course_is_refused(small, tmp_path, monkeypatch):
    crash_at(monkeypatch, small, 6)
    with pytest.raises(RunError):
        run(small, tmp_path / "run", checkpoint_every=2)
    with pytest.raises(ResumeError, match="another course"):
        run(small, tmp_path / "run", resume=True, allow_changed=True, parameters={"train": {"every": 2}})


def test_another_seed_is_refused(small, tmp_path, monkeypatch):
    crash_at(monkeypatch, small, 6)
    with pytest.raises(RunError):
        run(small, tmp_path / "run", checkpoint_every=2)
    with pytest.raises(ResumeError, match="seed 0 -> 5"):
        run(small, tmp_path / "run", resume=True, seed=5)


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_a_source_that_ends_ends_the_loop(small, tmp_path, runtime):
    run(small, tmp_path / "run", "ends", runtime=runtime)
    assert [line["count"] for line in metrics(tmp_path / "run")] == [4, 4, 2]


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_a_failure_names_op_and_line_and_counts_the_others(small, tmp_path, runtime):
    with pytest.raises(RunError) as caught:
        run(small, tmp_path / "run", "breaks", runtime=runtime)
    error = caught.value
    assert "fails.fail failed: ValueError: broken on purpose 0" in str(error)
    assert error.at.text == "bad = fails.fail(batch)"
    assert isinstance(error.__cause__, ValueError)
    assert error.__notes__ == ["(1 more calls of this step failed after it)"]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


def test_an_op_that_breaks_its_declaration_is_named(small, tmp_path):
    with pytest.raises(FieldError, match=r"fails.wrong_type declares 'wrong: i32\[\]' but returned f32"):
        run(small, tmp_path / "a", "wrong_type")
    with pytest.raises(RowsError, match="fails.short returned 1 rows of 'short' for 4 rows"):
        run(small, tmp_path / "b", "short")


def test_folders_are_not_overwritten_unasked(small, tmp_path):
    run(small, tmp_path / "run", "ends")
    with pytest.raises(UsageError, match="not empty"):
        run(small, tmp_path / "run", "ends")
    run(small, tmp_path / "run", "ends", overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="left as it is"):
        run(small, tmp_path / "other", "ends", overwrite=True)
    assert (tmp_path / "other" / "thesis.tex").exists()
    with pytest.raises(UsageError, match="holds no run"):
        run(small, tmp_path / "none", "ends", resume=True)


def test_records(small, tmp_path):
    outcome = run(small, tmp_path / "run", parameters={"train": {"steps": 6}})
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["weights_digest"] == outcome.weights_digest
    assert record["parameters"] == [{"steps": 6, "every": 3}]
    assert record["seed"] == 0 and record["status"] == "done"
    assert fl.__version__ and record["versions"]["torch"]
    assert {n["id"] for n in record["graph"]["nodes"]} >= {"counter.values", "world.judge", "counter.update"}
    timeline = [json.loads(line) for line in (tmp_path / "run" / "timeline.jsonl").read_text().splitlines()]
    assert {t["node"] for t in timeline} == {"counter.values", "counter.values#2", "world.judge", "counter.update"}
    assert all(t["pool"] == "main" and t["rows"] > 0 for t in timeline)
    assert all(t["end"] >= t["start"] for t in timeline)
    assert (tmp_path / "run" / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_torn_journal_line_is_dropped(small, tmp_path, monkeypatch):
    whole = run(small, tmp_path / "whole")
    crash_at(monkeypatch, small, 6)
    with pytest.raises(RunError):
        run(small, tmp_path / "run", checkpoint_every=2)
    with (tmp_path / "run" / "journal.jsonl").open("a") as file:
        file.write('{"program": 0, "call": 99, "inp')
    (tmp_path / "run" / "checkpoints" / ".000009.part").mkdir()
    assert run(small, tmp_path / "run", resume=True).weights_digest == whole.weights_digest


def test_an_interrupt_takes_a_checkpoint_and_the_run_goes_on(small, tmp_path):
    import os
    import signal

    whole = run(small, tmp_path / "whole")
    real = small.Counter.__dict__["update"].fn
    sent = []

    def fn(self, batch, *, scale=1.0):
        if len(self.seen) > 10 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))
        return real(self, batch, scale=scale)

    fn.__annotations__ = real.__annotations__
    object.__setattr__(small.Counter.__dict__["update"], "fn", fn)
    stopped = run(small, tmp_path / "run")
    assert stopped.status == "interrupted" and stopped.weights_digest is None
    assert 0 < len(metrics(tmp_path / "run")) < 10
    assert run(small, tmp_path / "run", resume=True).weights_digest == whole.weights_digest
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
