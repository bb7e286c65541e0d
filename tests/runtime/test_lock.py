"""One process at a time writes into a run folder; one that is gone keeps nobody out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flowrl.errors import UsageError
from flowrl.runtime.lock import NAME, Lock, began

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
    file.write_text(SLOW.format(beside=str(Path(__file__).parent)))
    return file


def start(script, out, *words):
    command = [sys.executable, "-m", "flowrl", "run", str(script), "--out", str(out), "--quiet", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(file, seconds=60.0):
    end = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < end, f"{file} is not there"
        time.sleep(0.05)


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
    taken, refused, gate = [], [], threading.Barrier(8)

    def take():
        gate.wait()
        try:
            taken.append(Lock(tmp_path))
        except UsageError:
            refused.append(1)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1 and len(refused) == 7
    taken[0].release()
    Lock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def holder(**changed):
    here = {"space": os.readlink("/proc/self/ns/pid")} if os.path.exists("/proc/self/ns/pid") else {"space": ""}
    said = {"host": os.uname().nodename, "pid": os.getpid(), "began": began(os.getpid()), "since": 0.0}
    return json.dumps({**here, **said, **changed})


def test_a_stale_lock_is_told_from_a_live_one(tmp_path):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    for stale in (
        holder(pid=int(ended.stdout)),  # nobody has that number any more
        holder(began="another boot/17"),  # somebody else has it now
        "torn",
    ):
        (tmp_path / NAME).write_text(stale)
        Lock(tmp_path).release()
    (tmp_path / NAME).write_text(holder())
    with pytest.raises(UsageError, match=f"is in use: process {os.getpid()} on"):
        Lock(tmp_path)


def test_of_another_host_nothing_is_known_and_the_error_says_what_to_remove(tmp_path):
    (tmp_path / NAME).write_text(holder(host="node7", pid=12))
    with pytest.raises(UsageError) as raised:
        Lock(tmp_path)
    assert "process 12 on node7 has been running there since" in raised.value.what
    assert raised.value.fix.endswith(f"If that process is gone, remove {tmp_path / NAME}.")


def test_a_run_that_cannot_read_its_folder_lets_go_of_it(small, tmp_path):
    small.flow.run("train", out=tmp_path, quiet=True, steps=1)
    (tmp_path / "journal.jsonl").write_text("torn\n")
    with pytest.raises(ValueError, match="Expecting value"):
        small.flow.run("train", out=tmp_path, quiet=True, steps=1, resume=True)
    assert not (tmp_path / NAME).exists()
    assert small.flow.run("train", out=tmp_path, quiet=True, steps=1, overwrite=True).status == "done"


def test_a_lock_is_released_by_its_owner_alone(tmp_path):
    mine = Lock(tmp_path)
    (tmp_path / NAME).write_text(holder(host="node7"))
    mine.release()
    assert (tmp_path / NAME).exists()
