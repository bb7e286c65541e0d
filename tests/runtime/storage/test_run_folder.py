"""What a resumed run is held to, what a run that is stopped at once leaves, and what its records say of time."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time

import pytest

from flowrl.errors import ResumeError, RunError, UsageError
from flowrl.placement.plan.plan import Place, Plan


@pytest.fixture
def replaced(monkeypatch):
    """Put another function in the place of an op's, for the length of a test."""
    undo = []

    def put(cls, name, fn):
        op = cls.__dict__[name]
        undo.append((op, op.fn))
        fn.__annotations__ = op.fn.__annotations__
        object.__setattr__(op, "fn", fn)
        return undo[-1][1]

    yield put
    for op, real in undo:
        object.__setattr__(op, "fn", real)


def crashed(small, replaced, out, *programs, update=8, **how):
    """A run that died in its update of that number."""
    real, count = small.Counter.__dict__["update"].fn, []

    def fn(self, batch, *, scale=1.0):
        count.append(1)
        if len(count) == update:
            raise OSError("the plug was pulled")
        return real(self, batch, scale=scale)

    replaced(small.Counter, "update", fn)
    with pytest.raises(RunError):
        small.flow.run(*programs, out=out, quiet=True, checkpoint_every=2, **how)


def record(out):
    return json.loads((out / "run.json").read_text())


def events(out):
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def test_programs_can_be_added_to_a_run_and_not_exchanged(small, tmp_path, replaced):
    out = tmp_path / "run"
    crashed(small, replaced, out, "ends", "train")
    with pytest.raises(ResumeError, match="the run is one of ends,train, and was asked to go on with train"):
        small.flow.run("train", out=out, quiet=True, resume=True)
    small.flow.run("ends", "train", "ends", out=out, quiet=True, resume=True)
    assert record(out)["programs"] == ["ends", "train", "ends"]
    assert events(out)[-1]["text"] == "train from step 6"
    small.flow.run("ends", "train", "ends", out=out, quiet=True, resume=True)
    assert events(out)[-1]["text"] == "at its end: nothing is left to do"


def test_fewer_steps_than_are_done_are_refused(small, tmp_path, replaced):
    crashed(small, replaced, tmp_path / "run")
    with pytest.raises(ResumeError, match="asked to go on with 3 steps, and the run has done 6"):
        small.flow.run(out=tmp_path / "run", quiet=True, resume=True, parameters={"train": {"steps": 3}})


def test_what_a_resumed_run_was_asked_is_recorded_once_it_has_a_checkpoint(small, tmp_path, replaced):
    out = tmp_path / "run"
    crashed(small, replaced, out)
    with pytest.raises(ResumeError):
        small.flow.run(out=out, quiet=True, resume=True, parameters={"train": {"steps": 3}}, arguments=["bad"])
    assert record(out)["parameters"] == [{"steps": 10, "every": 3}] and record(out)["arguments"] == []
    small.flow.run(out=out, quiet=True, resume=True, parameters={"train": {"steps": 12}}, arguments=["good"])
    assert record(out)["parameters"] == [{"steps": 12, "every": 3}] and record(out)["arguments"] == ["good"]


def test_the_graph_of_a_run_is_that_of_its_largest_program(small, tmp_path):
    small.flow.run("train", "ends", out=tmp_path / "run", quiet=True)
    assert record(tmp_path / "run")["graph"]["program"] == "train"
    assert set(record(tmp_path / "run")["graphs"]) == {"train", "ends"}


def test_times_are_seconds_since_the_run_began_also_after_a_break(small, tmp_path, replaced):
    out = tmp_path / "run"
    crashed(small, replaced, out)
    time.sleep(0.5)
    small.flow.run(out=out, quiet=True, resume=True)
    lines = [json.loads(line) for line in (out / "timeline.jsonl").read_text().splitlines()]
    starts = [line["start"] for line in lines]
    assert 0 <= starts[0] < 60 and starts == sorted(starts)
    assert max(b - a for a, b in itertools.pairwise(starts)) >= 0.5


def test_a_second_interrupt_waits_for_nothing(small, tmp_path, replaced):
    began, end = threading.Event(), threading.Event()

    def judge(self, batch):
        began.set()
        end.wait(60)
        return {"r": batch.y.values}

    def press():
        for _ in range(2):
            assert began.wait(60)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

    replaced(small.World, "judge", judge)
    threading.Thread(target=press, daemon=True).start()
    start = time.monotonic()
    plan = Plan({"a": "cpu", "b": "cpu"}, {"world": Place("b")})
    with pytest.raises(KeyboardInterrupt):
        small.flow.run(out=tmp_path / "run", quiet=True, plan=plan)
    end.set()
    assert time.monotonic() - start < 30
    assert record(tmp_path / "run")["status"] == "interrupted"
    assert events(tmp_path / "run")[-1]["kind"] == "stopped"


def test_a_file_is_no_folder(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file; a run needs a folder"):
        small.flow.run(out=tmp_path / "file", quiet=True)
    with pytest.raises(UsageError, match="cannot be the folder of a run"):
        small.flow.run(out=tmp_path / "file" / "below", quiet=True)


def test_what_is_no_run_is_said_the_first_time(small, tmp_path):
    (tmp_path / "mine").write_text("")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="is not empty and holds no run; it is left as it is") as error:
            small.flow.run(out=tmp_path, quiet=True, overwrite=overwrite)
        assert error.value.fix == "Name another folder with --out."
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="has no run.json; it is left as it is") as error:
        small.flow.run(out=tmp_path, quiet=True)
    assert error.value.fix == "Go on with --resume, or name another folder with --out."
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "mine"]
