"""When Ray's own processes die, the run says so in one line, with the command that goes on; and that command does."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the extra [ray] is not installed")
pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")

SCRIPT = """
import sys, time
sys.path.insert(0, {beside!r})
from small_flow import Numbers
import flowrl as fl
from flowrl.runtime.distributed.ray import ray_head

ray_head.PATIENCE = 3.0

class World(fl.Worker):
    @fl.op(reads="x", adds="r: f32[]", cost="external", pieces=True)
    def judge(self, batch):
        time.sleep(0.2)
        return {{"r": batch.x.values * 2}}

flow = fl.Flow("slow")
world = flow.worker(World)

@flow.program
def slow(steps: int = 100000):
    for step, batch in flow.steps(Numbers(), steps):
        flow.log(step, reward=world.judge(batch).r.mean())
"""
PLAN = "pools:\n  b: {processes: 2}\nplace:\n  world: {pool: b}\n"


def child_of(pid: int, name: str) -> int:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            said = stat.read_text()
        except OSError:
            continue
        command, rest = said.partition("(")[2].rpartition(")")[::2]
        if command == name and int(rest.split()[1]) == pid:
            return int(stat.parent.name)
    raise AssertionError(f"{pid} has no child {name}")


def wait_for(file: Path, run: subprocess.Popen) -> None:
    end = time.monotonic() + 120
    while not file.exists():
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < end, f"{file} is not there"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "said"),
    [
        pytest.param("raylet", "raylet", marks=pytest.mark.nightly),  # as test_of_a_running_cluster_too does it
        ("gcs_server", "head (gcs_server)"),
    ],
)
def test_the_run_says_what_died_and_how_to_go_on(tmp_path, process, said):
    script, plan, out = tmp_path / "slow.py", tmp_path / "plan.yaml", tmp_path / "run"
    script.write_text(SCRIPT.format(beside=str(Path(__file__).parents[1])))
    plan.write_text(PLAN)
    words = [sys.executable, "-m", "flowrl", "run", str(script), "--out", str(out), "--quiet"]
    how = ["--runtime", "ray", "--plan", str(plan), "--checkpoint-every", "2"]
    run = subprocess.Popen([*words, *how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(out / "checkpoints" / "000001" / "manifest.json", run)
    dead = child_of(run.pid, process)
    os.kill(dead, signal.SIGKILL)
    start = time.monotonic()
    lines = run.communicate(timeout=120)[1].splitlines()
    assert time.monotonic() - start < 30 and run.returncode == 1
    assert lines[-1] == (
        f"Ray's {said} on this host, process {dead}, has ended, and all ranks with it; go on with: flowrl run {script} "
        f"--out {out} --resume"
    )
    assert len(lines) < 6, "\n".join(lines)
    assert json.loads((out / "run.json").read_text())["status"] == "failed" and not (out / "run.lock").exists()
    newest = sorted((out / "checkpoints").glob("0*"))[-1]
    steps = json.loads((newest / "manifest.json").read_text())["program"]["steps"] + 2
    again = subprocess.run([*words, "--resume", "--steps", str(steps)], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert len((out / "metrics.jsonl").read_text().splitlines()) == steps


@pytest.fixture
def running():
    """A Ray that somebody has started, on loopback and with a token: its folder, its address, what reaches it."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # sockets take no long names
    token = folder / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    how = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=4", "--include-dashboard=false"]
    words = [str(Path(sys.executable).with_name("ray")), "start", *words, f"--temp-dir={folder}"]
    try:
        started = subprocess.run(words, env={**os.environ, **how}, capture_output=True, text=True, check=False)
        assert started.returncode == 0, started.stdout + started.stderr
        yield folder, f"127.0.0.1:{port}", how
    finally:
        for pid, _ in of_folder(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def of_folder(folder: Path) -> list[tuple[int, str]]:
    """The processes that were started with words that name a folder, with their programs."""
    found: list[tuple[int, str]] = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(folder) in (words := file.read_text()):
                found.append((int(file.parent.name), Path(words.split("\0")[0]).name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("process", ["raylet", "gcs_server"])
def test_of_a_running_cluster_too(tmp_path, running, process):
    """Nobody here has started it, so that nobody here is told by the system that it has ended."""
    folder, address, how = running
    script, plan, out = tmp_path / "slow.py", tmp_path / "plan.yaml", tmp_path / "run"
    script.write_text(SCRIPT.format(beside=str(Path(__file__).parents[1])))
    plan.write_text(PLAN)
    words = [sys.executable, "-m", "flowrl", "run", str(script), "--out", str(out), "--quiet", "--runtime", "ray"]
    words += ["--address", address, "--plan", str(plan), "--checkpoint-every", "2"]
    run = subprocess.Popen(words, env={**os.environ, **how}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(out / "checkpoints" / "000001" / "manifest.json", run)
    [dead] = [pid for pid, program in of_folder(folder) if program == process]
    os.kill(dead, signal.SIGKILL)
    lines = run.communicate(timeout=60)[1].splitlines()
    assert run.returncode == 1, lines
    said = {
        "raylet": r"Ray's raylet on this host has ended, and all ranks here with it",
        "gcs_server": rf"the head of Ray's cluster \(gcs_server\) at {address} has not answered for \d+ s, and no rank .*",
    }
    assert re.fullmatch(rf"{said[process]}; go on with: flowrl run {script} --out {out} --resume", lines[-1]), lines
    assert json.loads((out / "run.json").read_text())["status"] == "failed" and not (out / "run.lock").exists()
