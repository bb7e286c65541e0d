"""The doctor tells from files alone what a run waits for: a function that never returns, processes stopped or killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.cli import main
from flowrl.runtime.driver.monitoring.wait_story import _blame, wait_story
from flowrl.runtime.storage.run_lock import is_stopped
from flowrl.runtime.storage.wait_record import RESTART, read_waits
from flowrl.workers.user_code.rows_in_progress import Notes, at_work

FLOW = Path(__file__).parents[2] / "hang_flow.py"
PATIENCE = 300.0  # seconds: a busy machine is no fault


def until(holds) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.1)


@contextmanager
def started(out: Path, *words: str):
    """A run in a process of its own, which is killed at the end."""
    with (out.parent / "said").open("wb") as said:
        command = [sys.executable, str(FLOW), "--out", str(out), "--quiet", "--no-save", *words]
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_function_that_never_returns_and_a_driver_that_is_stopped_or_killed(tmp_path, capsys):
    out = tmp_path / "run"
    with started(out) as process:
        until(lambda: read_waits(out) is not None)
        story = wait_story(out)
        assert f"process {process.pid} on " in story.state and "is alive" in story.state
        assert [wait.who.partition(" (")[0] for wait in story.waits][-1] == "judge.judge of step 1"
        assert "the program at hang_flow.py:" in story.waits[0].who
        assert story.waits[-1].producer.startswith("user code: judge, ")
        assert "hang_flow.py" in story.blame and "rows from 4 on of judge.judge" in story.blame
        assert main(["doctor", str(out)]) == 1
        assert "To blame: judge, " in capsys.readouterr().out
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: is_stopped(process.pid))
        story = wait_story(out)
        assert (
            story.blame
            == f"process {process.pid} on {os.uname().nodename}, which is stopped, as by SIGSTOP or a debugger"
        )
        assert story.fix == f"kill -CONT {process.pid}"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        story = wait_story(out)
        assert (
            "is gone, and could say nothing: it was killed. The last step that was recorded is 0 of hang."
            in story.state
        )
        assert (
            f"process {process.pid} on {os.uname().nodename}, which is dead, while it was at judge.judge" in story.blame
        )
        assert story.fix.endswith(f"--out {out} --resume")
        assert story.waits, "the waits that it had written down are still told"


def test_a_run_that_goes_on_or_is_done_waits_for_nothing(tmp_path):
    out = tmp_path / "run"
    from flows import module_of

    module_of("small_flow").flow.run("train", out=out, steps=2, quiet=True)
    assert wait_story(out).text() == f"{out} is done, and waits for nothing."
    assert not (out / "waits.json").exists()


@pytest.mark.nightly
def test_a_rank_that_is_stopped_is_named(tmp_path):
    out, plan = tmp_path / "run", tmp_path / "plan.yaml"
    plan.write_text("pools: {a: {device: cpu}, b: {device: cpu}}\nplace: {judge: {pool: b}}\n")
    with started(out, "--how", "stop", "--runtime", "ray", "--plan", str(plan)):
        until(lambda: (found := read_waits(out)) is not None and any(is_stopped(r.pid) for r in found.ranks))
        story = wait_story(out)
        assert "rank 1 of pool 'b', process " in story.blame and story.blame.endswith("which is stopped")
        assert story.fix.startswith("kill -CONT ")
        assert "judge.judge of step 1" in story.waits[-1].who
        pid = int(story.fix.rpartition(" ")[2])
        os.kill(pid, signal.SIGKILL)


def test_the_chain_ends_with_who_runs_and_says_deadline_and_version(tmp_path):
    (tmp_path / "run.json").write_text('{"status": "running", "script": "grpo.py"}')
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    call = {"pools": ["train"], "on": [], "busy": [], "held": False, "running": False}
    now = time.time()
    said = {
        "time": now,
        "quiet": 40.0,
        "driver": "grpo.py:31",
        "calls": [
            {**call, "id": -2, "title": "actor.publish v4", "step": 3, "on": [9], "version": 4},
            {**call, "id": 9, "title": "actor.update", "step": 3, "running": True, "since": now - 40, "at": "grpo.py:30"},
            {**call, "id": 12, "title": "actor.generate", "step": 4, "on": [-2]},
        ],
        "ranks": [
            {"rank": 2, "pool": "train", "pid": dead.pid, "node": "n1", "began": "x", "what": "actor.update of step 3",
             "since": now - 40, "deadline": 600.0}
        ],
    }  # fmt: skip
    (tmp_path / "waits.json").write_text(json.dumps(said))
    story = wait_story(tmp_path)
    assert [str(wait) for wait in story.waits] == [
        "the program at grpo.py:31 waits for actor.generate of step 4",
        "actor.generate of step 4 waits for actor.publish v4 of step 3 (version 4)",
        "actor.publish v4 of step 3 waits for actor.update of step 3 (grpo.py:30)",
        f"actor.update of step 3 (grpo.py:30) waits for rank 2 of pool 'train', process {dead.pid} on n1, which is dead "
        "(40 s so far, of 600 s at most)",
    ]


def test_a_rank_that_is_started_again_is_named(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"status": "running"}))
    rank = {"rank": 2, "pool": "train", "pid": 4711, "node": "n1", "began": "x", "what": RESTART, "since": 60.0}
    (tmp_path / "waits.json").write_text(json.dumps({"time": 73.0, "quiet": 14.0, "ranks": [rank]}))
    assert [str(wait) for wait in wait_story(tmp_path).waits] == [
        "the program waits for rank 2 of pool 'train', process 4711 on n1, which was lost and is started again "
        "(13 s so far, without a deadline)"
    ]
    blame, fix = _blame(tmp_path, read_waits(tmp_path))
    assert blame == "rank 2 of pool 'train', process 4711 on n1, which was lost and is started again"
    assert fix == "Wait: the run goes on by itself once it is there."


def test_a_worker_that_is_being_opened_is_named(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"status": "running"}))
    said = {"time": time.time(), "quiet": 42.0, "opening": "worker 'actor', the copy that generates,"}
    (tmp_path / "waits.json").write_text(json.dumps(said))
    (wait,) = wait_story(tmp_path).waits
    assert str(wait).startswith(
        "the program waits for worker 'actor', the copy that generates, to be opened (42 s so far"
    )


def waits_for_a_reward(out, reward, seconds):
    """What is told of a run whose reward has been at its row for so long."""
    reward.name = "reward"
    batch = fl.Batch.of(1, prompt=fl.Column.of(["a"])).with_call(CallInfo(program="grpo", step=3))
    notes = Notes(out)
    for row in reward._rows(batch):
        notes.begin(row)
    [row] = at_work(out)
    call = {"id": 9, "title": "reward.score", "step": 3, "pools": [], "on": [], "busy": [], "held": False}
    said = {"calls": [{**call, "running": True, "since": row.since, "at": "a.py:30"}], "quiet": seconds}
    (out / "waits.json").write_text(json.dumps({**said, "time": row.since + seconds}))
    (out / "run.json").write_text(json.dumps({"status": "running"}))
    return wait_story(out)


def test_a_failed_run_says_how_to_mend_it_and_then_how_to_go_on(tmp_path):
    (tmp_path / "run.json").write_text('{"status": "failed", "script": "my_flow.py"}')
    line = {"kind": "failed", "text": "RowsError: 'score' is NaN.\n  fix  Return a number."}
    (tmp_path / "events.jsonl").write_text(json.dumps(line) + "\n")
    *_, mend, go_on = wait_story(tmp_path).text().splitlines()
    assert mend == "  fix  Return a number."
    assert go_on.startswith("  then Go on with: flowrl run my_flow.py ")


@pytest.mark.parametrize(
    ("given", "seconds", "deadline", "fix"),
    [
        ({}, 48, "(48 s so far, of 60 s at most)", "Wait until its timeout of 60 s ends it, give"),
        (
            {"timeout": 5},
            48,
            "(48 s so far, of 5 s at most)",
            "Mend the function: it goes on although its timeout of 5",
        ),
        (
            {"timeout": None},
            48,
            "(48 s so far, without a deadline)",
            "Give the worker a timeout, or mend the function.",
        ),
    ],
)
def test_the_timeout_of_a_reward_is_its_deadline(tmp_path, monkeypatch, given, seconds, deadline, fix):
    monkeypatch.setattr("flowrl.runtime.driver.monitoring.wait_story.holder_of", lambda run: (None, "alive"))
    story = waits_for_a_reward(tmp_path, fl.FunctionReward(lambda prompt: 1.0, **given), seconds)
    assert str(story.waits[-1]).endswith(deadline)
    assert story.fix.startswith(fix)
