"""One process at a time writes into a run folder; one that is gone keeps nobody out."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from flowrl.errors import ResumeError, UsageError
from flowrl.runtime.storage import run_lock as lock
from flowrl.runtime.storage.run_lock import NAME, Lock, began

SLOW = """
import sys, time
from pathlib import Path
sys.path.insert(0, {beside!r})
import small_flow
from small_flow import flow, world, counter, fails

real = small_flow.World.__dict__["judge"].fn
def judge(self, batch):
    time.sleep(0.2)
    return real(self, batch)
judge.__annotations__ = real.__annotations__
object.__setattr__(small_flow.World.__dict__["judge"], "fn", judge)
"""


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(SLOW.format(beside=str(Path(__file__).parents[1])))
    return file


def start(script, out, *words):
    command = [sys.executable, "-m", "flowrl", "run", str(script), "--out", str(out), "--quiet", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(file, seconds=60.0):
    end = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < end, f"{file} is not there"
        time.sleep(0.05)


def test_a_process_that_is_stopped_while_it_looks_at_the_lock_keeps_nobody_out(tmp_path, monkeypatch):
    """It has the folder to itself for that moment, as has another user who can open it."""
    monkeypatch.setattr(lock, "PATIENCE", 0.2)
    stopped, done = os.open(tmp_path, os.O_RDONLY), threading.Event()
    fcntl.flock(stopped, fcntl.LOCK_EX)

    def take():
        Lock(tmp_path).release()
        done.set()

    try:
        threading.Thread(target=take, daemon=True).start()
        assert done.wait(20)
    finally:
        os.close(stopped)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_refused_and_one_after_a_kill_is_not(script, tmp_path):
    out = tmp_path / "run"
    first = start(script, out, "--program", "evaluated", "--steps", "100000", "--checkpoint-every", "2")
    wait_for(out / "checkpoints" / "000000" / "manifest.json")
    for words in (("--program", "evaluated"), ("--resume",), ("--program", "evaluated", "--overwrite")):
        second = start(script, out, *words)
        said = second.communicate(timeout=60)[1]
        assert second.returncode == 2
        what, fix = said.rstrip().splitlines()
        assert what.startswith(f"UsageError: {out} is in use: process {first.pid} on ")
        assert fix == "  fix  Wait until it has ended, stop it, or name another folder with --out."
    assert first.poll() is None, "the first run went on"
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert (out / NAME).exists()
    newest = sorted((out / "checkpoints").glob("0*"))[-1]
    steps = json.loads((newest / "manifest.json").read_text())["program"]["steps"] + 3
    again = start(script, out, "--resume", "--steps", str(steps))
    said = again.communicate(timeout=120)[1]
    assert again.returncode == 0, said
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(steps + 1))  # the last is the evaluation's
    assert not (out / NAME).exists()


@pytest.mark.slow
def test_of_runs_that_start_at_the_same_time_one_goes_on(script, tmp_path):
    runs = [start(script, tmp_path / "run", "--steps", "5") for _ in range(3)]
    said = [(run.communicate(timeout=120)[1], run.returncode) for run in runs]
    assert sorted(status for _, status in said) == [0, 2, 2]
    assert all("in use" in text or "not empty" in text for text, status in said if status)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(5))


def test_of_many_at_once_one_has_the_folder(tmp_path):
    taken, refused, gate = [], [], threading.Barrier(8, timeout=60)

    def take():
        gate.wait()
        try:
            taken.append(Lock(tmp_path))
        except UsageError:
            refused.append(1)

    threads = [threading.Thread(target=take, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1 and len(refused) == 7
    taken[0].release()
    Lock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def holder(**changed):
    """The lock of a process of this host, which is the one that pytest runs in unless it is said."""
    said = {**lock._here(), "pid": os.getppid(), "began": began(os.getppid()), "since": 0.0}
    return json.dumps({**said, **changed})


def test_a_stale_lock_is_told_from_a_live_one(tmp_path):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    for stale in (
        holder(pid=int(ended.stdout)),  # nobody has that number any more
        holder(began=f"{lock._boot()}/17"),  # somebody else has it now
        holder(began="another boot/17"),  # the host was started anew
        holder(pid=os.getpid(), began=began(os.getpid())),  # this process was another program then
        "",
        "torn",
    ):
        (tmp_path / NAME).write_text(stale)
        Lock(tmp_path).release()
    (tmp_path / NAME).unlink(missing_ok=True)
    (tmp_path / NAME).mkdir()
    Lock(tmp_path).release()
    (tmp_path / NAME).write_text(holder())
    for unlock in (False, True):
        with pytest.raises(UsageError, match=f"is in use: process {os.getppid()} on"):
            Lock(tmp_path, unlock=unlock)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A host that says which machine it is, as all but some containers do."""
    here = lock._here()
    monkeypatch.setattr(lock, "_here", lambda: {**here, "machine": "1f0c"})


UNSEEN = (
    {"host": "node7", "pid": 12},
    {"space": "pid:[17]"},  # in another container
    {"began": "another boot/17", "machine": "9ab3"},  # another host of the same name
)


@pytest.mark.parametrize("there", UNSEEN)
def test_of_another_host_nothing_is_known_and_the_error_says_the_word(tmp_path, there):
    (tmp_path / NAME).write_text(holder(**there))
    with pytest.raises(UsageError) as raised:
        Lock(tmp_path)
    said = json.loads(holder(**there))
    assert raised.value.what == (
        f"{tmp_path} is in use: process {said['pid']} on {said['host']} has been running there since "
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(0))}, which cannot be seen from here; nothing was written "
        "there for less than a minute."
    )
    assert raised.value.fix.endswith("If that process is gone, add --unlock.")
    mine = Lock(tmp_path, unlock=True)
    assert mine.taken_from == f"process {said['pid']} on {said['host']}"
    mine.release()
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_folder_was_given_to_another_one_stops(tmp_path):
    mine = Lock(tmp_path)
    mine.check()
    (tmp_path / NAME).unlink()
    mine.check()  # somebody has removed it: it is made again
    assert (tmp_path / NAME).exists()
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).write_text(holder(host="node7", pid=12))
    with pytest.raises(ResumeError) as raised:
        mine.check()
    assert "was given to process 12 on node7 while this run was writing there" in raised.value.what
    mine.release()
    assert json.loads((tmp_path / NAME).read_text())["host"] == "node7"


def test_a_run_stops_where_its_folder_was_given_to_another_one(small, tmp_path):
    def judge(self, batch):
        (tmp_path / NAME).unlink()
        (tmp_path / NAME).write_text(holder(host="node7", pid=12))
        return {"r": batch.y.values}

    op = small.World.__dict__["judge"]
    judge.__annotations__ = op.fn.__annotations__
    object.__setattr__(op, "fn", judge)
    with pytest.raises(ResumeError, match="was given to process 12 on node7"):
        small.flow.run(out=tmp_path, quiet=True)
    assert (tmp_path / "metrics.jsonl").read_text() == (tmp_path / "events.jsonl").read_text() == ""
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "running"
    with pytest.raises(UsageError, match="--unlock"):
        small.flow.run(out=tmp_path, quiet=True, resume=True)


def test_without_locks_of_the_file_system_one_of_many_takes_what_is_stale(tmp_path, monkeypatch):
    """As on network file systems that have none."""
    monkeypatch.setattr(lock, "_alone", lambda file: nullcontext())
    for _ in range(20):
        (tmp_path / NAME).write_text("torn")
        taken, gate = [], threading.Barrier(4, timeout=60)

        def take(gate=gate, taken=taken):
            gate.wait()
            with suppress(UsageError):
                taken.append(Lock(tmp_path))

        threads = [threading.Thread(target=take, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1
        taken[0].release()
        assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_read_its_folder_lets_go_of_it(small, tmp_path):
    small.flow.run("train", out=tmp_path, quiet=True, steps=1)
    (tmp_path / "journal.jsonl").unlink()
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(ResumeError, match="journal.jsonl cannot be read: Is a directory"):
        small.flow.run("train", out=tmp_path, quiet=True, steps=1, resume=True)
    assert not (tmp_path / NAME).exists()
    assert small.flow.run("train", out=tmp_path, quiet=True, steps=1, overwrite=True).status == "done"


def test_a_lock_is_released_by_its_owner_alone(tmp_path):
    mine = Lock(tmp_path)
    (tmp_path / NAME).write_text(holder(host="node7"))
    mine.release()
    assert (tmp_path / NAME).exists()
