"""How a rank has ended is told: its status, its signal, or that the kernel's memory killer ended it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flowrl.runtime.distributed import process_exits as exits
from flowrl.runtime.distributed.process_exits import Counter, Watched, counter_of

#: A process that starts another one, says its number, and reaps it: nobody here is its parent.
PARENT = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdin=subprocess.PIPE); "
    "print(p.pid, flush=True); sys.stdin.readline(); p.communicate(b'now'); print('reaped', flush=True)"
)
V2 = "low 0\nhigh 0\nmax 12\noom 3\noom_kill {}\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
KNOWS = tuple(int(n) for n in platform.release().split("-")[0].split(".")[:2]) >= (6, 15)


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("cgroup", "file", "text"),
    [
        ("0::/job/a\n", "job/a/memory.events", V2),
        ("4:memory:/job/a\n1:cpu:/\n0::/\n", "memory/job/a/memory.oom_control", V1),
        ("5:cpu,memory:/b:c\n0::/\n", "memory/b:c/memory.oom_control", V1),
        ("1:name=systemd:/x\n0::/x\n", "unified/x/memory.events", V2),
    ],
)
def test_the_counter_is_that_of_the_control_group(tmp_path, cgroup, file, text):
    write(tmp_path / "proc" / "7" / "cgroup", cgroup)
    counted = write(tmp_path / "groups" / file, text.format(2))
    counter = counter_of(7, tmp_path / "proc", tmp_path / "groups")
    assert counter.file == counted and counter.read() == 2 and counter.bytes() is None
    counted.write_text(text.format(3))
    assert counter.read() == 3
    write(counter.limit, "2147483648\n")
    assert counter.bytes() == 2 << 30
    for without in ("max\n", "9223372036854771712\n"):
        write(counter.limit, without)
        assert counter.bytes() is None


def test_without_control_groups_it_is_that_of_the_machine(tmp_path):
    vmstat = write(tmp_path / "vmstat", "nr_free_pages 12\noom_kill 5\n")
    assert counter_of(7, tmp_path, tmp_path).read() == 5
    vmstat.unlink()
    assert counter_of(7, tmp_path, tmp_path).read() == 0
    assert Counter(tmp_path).read() == 0


@pytest.fixture
def ends():
    """Has a process that is nobody's child here run some code when it is told to, and gives it watched and ended."""
    if not hasattr(os, "pidfd_open"):
        pytest.skip("pidfds are Linux's")
    started: list[subprocess.Popen] = []

    def run(code: str, before=lambda watched: None) -> Watched:
        code = f"import sys, os; sys.stdin.readline(); {code}"
        words = [sys.executable, "-c", PARENT, code]
        parent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(parent)
        watched = Watched(int(parent.stdout.readline()))
        assert watched.ended() == "", "it runs"
        before(watched)
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "reaped\n"
        return watched

    yield run
    for parent in started:
        parent.kill()
        parent.communicate()


@pytest.mark.skipif(not KNOWS, reason="Linux before 6.15 tells the status of a process to its parent alone")
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os._exit(3)", "it ended with status 3"),
        ("os.kill(os.getpid(), 9)", "it was killed by SIGKILL, which the run did not send; the kernel's memory killer"),
        ("os.kill(os.getpid(), 11)", "it was ended by SIGSEGV"),
    ],
)
def test_the_real_end_of_a_process_is_told(ends, code, said):
    watched = ends(code)
    assert watched.ended().startswith(said)
    watched.close()
    assert watched.ended() == ""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="pidfds are Linux's")
def test_one_thread_may_let_go_of_a_process_while_another_asks_how_it_ended(tmp_path, monkeypatch):
    """As where several wait for a rank, and the first of them has it started again."""
    watched, said = Watched(os.getpid()), []
    (tmp_path / str(os.getpid())).mkdir()
    os.mkfifo(stat := tmp_path / str(os.getpid()) / "stat")
    monkeypatch.setattr(exits, "PROC", tmp_path)
    asks = threading.Thread(target=lambda: said.append(watched.ended()), daemon=True)
    asks.start()
    with stat.open("w") as file:  # it reads
        leaves = threading.Thread(target=watched.close, daemon=True)
        leaves.start()
        leaves.join(0.2)
        file.write("7 (python) S 0")
    asks.join(30)
    leaves.join(30)
    assert said == [""] and not leaves.is_alive()
    assert watched.ended() == ""


def test_the_memory_killer_is_told_by_its_counter(ends, tmp_path, monkeypatch):
    counted = write(tmp_path / "memory.events", V2.format(4))
    limit = write(tmp_path / "memory.max", str(3 << 29))
    monkeypatch.setattr(exits, "counter_of", lambda pid: Counter(counted, limit))
    killed = ends("os.kill(os.getpid(), 9)", lambda watched: counted.write_text(V2.format(5)))
    said = "it ran out of memory, and the kernel's memory killer ended it (its control group may have 1.5 GiB)"
    assert killed.ended() == said
    if KNOWS:
        left = ends("os._exit(0)", lambda watched: counted.write_text(V2.format(6)))
        assert left.ended() == "it ended with status 0", "another process of the group was ended"


def test_in_a_real_control_group():
    """A process that takes more than the group may have."""
    groups = Path("/sys/fs/cgroup/memory")
    group = (groups if groups.is_dir() else Path("/sys/fs/cgroup")) / f"flowrl-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = group / ("memory.limit_in_bytes" if groups.is_dir() else "memory.max")
        limit.write_text(str(64 << 20))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    try:
        code = (
            f"open('{group}/cgroup.procs', 'w').write(str(os.getpid())); print('in', file=sys.stderr); "
            "import time; time.sleep(1.0); x = bytearray(512 << 20); x[::4096] = b'1' * len(x[::4096])"
        )
        script = [sys.executable, "-c", f"import os, sys; {code}"]
        process = subprocess.Popen(script, stderr=subprocess.PIPE, text=True)
        assert process.stderr.readline() == "in\n"
        watched = Watched(process.pid)
        process.wait(60)
        assert process.returncode == -9
        assert watched.ended() == (
            "it ran out of memory, and the kernel's memory killer ended it (its control group may have 0.1 GiB)"
        )
        watched.close()
    finally:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)
