"""An environment that hangs, exits, forks or crashes is named with its row, on every runtime; so is a blocked loop."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.errors import RewardError
from flowrl.workers.user_code.rows_in_progress import at_work
from flowrl.workers.user_code.run_rows import run_rows

pytestmark = pytest.mark.usefixtures("one_thread")

HERE = Path(__file__).parents[1]


def faulty(monkeypatch, **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("env_fault_flow", HERE / "env_fault_flow.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.flow


def events(out, kind):
    found = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event["text"] for event in found if event["kind"] == kind]


SAID = {
    "hang": "it took longer than 2.0 s",
    "exit": "SystemExit: 3",
    "interrupt": "KeyboardInterrupt",
    "half": "ValueError: half a pair: \ud800",
}
FAULTS = [*(("step", fault) for fault in SAID), ("reset", "hang"), ("anchor", "hang"), ("reset", "exit")]


@pytest.mark.parametrize("runtime", ["eager", "local"])
@pytest.mark.parametrize(("where", "fault"), FAULTS)
def test_it_is_told_with_step_row_and_function(tmp_path, monkeypatch, runtime, where, fault):
    flow = faulty(monkeypatch, FAULT=fault, WHERE=where, TIMEOUT="2" if fault == "hang" else "60")
    with pytest.raises(RewardError) as error:
        flow.run(out=tmp_path / "run", runtime=runtime, quiet=True)
    assert error.value.what.startswith(f"game.{where} of step 1 failed for row 5, sample 0: {SAID[fault]}")
    assert f"Mend {where}, " in error.value.fix and "env_fault_flow.py:" in error.value.fix
    assert ("write timeout = SECONDS in the class" in error.value.fix) == (fault == "hang")
    assert error.value.at.text == "batch = game.rollout(batch, policy=actor, turn_tokens=1)"
    [failed] = events(tmp_path / "run", "failed")
    assert "row 5, sample 0" in failed


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_what_forks_or_changes_directory_hurts_nothing(tmp_path, monkeypatch, runtime):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIMEOUT", "60")
    whole = faulty(monkeypatch, FAULT="").run(out="whole", runtime=runtime, quiet=True)
    for fault, said in (("moves", "changed the working directory to /"), ("forks", "has forked, and its child came")):
        done = faulty(monkeypatch, FAULT=fault).run(out=fault, runtime=runtime, quiet=True)
        assert done.weights_digest == whole.weights_digest and Path.cwd() == tmp_path
        told = [text for text in events(tmp_path / fault, "warning") if said in text]
        assert told and all("of step 1" in text for text in told)
        assert not at_work(tmp_path / fault)


def started(tmp_path, *words, **environment):
    command = [sys.executable, str(HERE / "env_fault_flow.py"), "--out", str(tmp_path / "run"), "--quiet", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)


@pytest.mark.parametrize(("fault", "status"), [("ends", 3), ("crashes", -11)])
def test_the_next_start_names_the_row_that_a_process_died_at(tmp_path, monkeypatch, fault, status):
    first = started(tmp_path, "--checkpoint-every", "1", FAULT=fault, TIMEOUT="60")
    assert first.returncode == status
    if fault == "crashes":
        assert "Segmentation fault" in first.stderr and "env_fault_flow.py" in first.stderr
    monkeypatch.setenv("FAULT", "")
    monkeypatch.setenv("TIMEOUT", "60")
    assert main(["run", str(HERE / "env_fault_flow.py"), "--out", str(tmp_path / "run"), "--quiet", "--resume"]) == 0
    [told] = (text for text in events(tmp_path / "run", "warning") if "died" in text)
    assert told.startswith("the process before died at game.step of step 1 at row 5, sample 0: step, ")
    assert "more" not in told, "its rows are called one after another"


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["hang", "ends"])
def test_on_ranks(tmp_path, fault):
    """A row that hangs stops the run; one at which three processes have died is not called again."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "cluster: {device: cpu, nodes: 1, devices_per_node: 1}\npools: {a: {devices: [0]}, b: {processes: 2}}\n"
        "place: {actor: {pool: a}, last: {pool: a}, game: {pool: b}}\n"
    )
    done = started(tmp_path, "--runtime", "ray", "--plan", str(plan), FAULT=fault, TIMEOUT="2")
    said = "it took longer than 2.0 s" if fault == "hang" else "its process has died 3 times at this row"
    assert done.returncode == 1 and f"game.step of step 1 failed for row 5, sample 0: {said}" in done.stderr, (
        done.stderr
    )
    lost = events(tmp_path / "run", "lost")
    assert len(lost) == (0 if fault == "hang" else 3)
    assert all("it was at game.step of step 1 at row 5, sample 0: step, " in text for text in lost), lost


# -- a loop that is held up -----------------------------------------------------------------------------------------


def test_a_coroutine_that_blocks_its_loop_is_named_and_the_others_are_called():
    import asyncio

    async def fn(number):
        if number == 1:
            time.sleep(1.0)
        await asyncio.sleep(0.01)
        return number

    told = []
    outcomes = run_rows(
        fn,
        [{"number": i} for i in range(6)],
        concurrency=2,
        timeout=0.3,
        tell=lambda row, outcome: told.append(row),
    )
    assert "it waits without await, which stops all others" in str(outcomes[1])
    assert outcomes[2:] == [2, 3, 4, 5], "rows that were not begun are called in another loop"
    assert set(told) >= {2, 3, 4, 5} and 1 not in told, "nothing of what was left behind is handed over"
