"""User code that hangs, exits, forks, crashes or moves away is named with its row, and hurts nothing else."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.errors import RewardError, RunError
from flowrl.runtime.local.user_code_watch import Watch
from flowrl.workers.user_code.rows_in_progress import Notes, Row, at_work, bury

HERE = Path(__file__).parents[1]
KNOWS = tuple(int(n) for n in platform.release().split("-")[0].split(".")[:2]) >= (6, 15)  # how a process has ended
NAMED = {"row": "row 5", "async": "row 5", "batched": "all 4 rows, 4 to 7"}


def faulty(monkeypatch, **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("fault_flow", HERE / "fault_flow.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.flow


def events(out, kind):
    found = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event["text"] for event in found if event["kind"] == kind]


@pytest.mark.parametrize("runtime", ["eager", "local"])
@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("hang", "it took longer than 2.0 s"),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt"),
        ("half", "ValueError: half a pair: \ud800"),
    ],
)
def test_it_is_told_with_step_row_and_function(tmp_path, monkeypatch, runtime, kind, fault, said):
    flow = faulty(monkeypatch, FAULT=fault, KIND=kind, TIMEOUT="2" if fault == "hang" else "60")
    with pytest.raises(RewardError) as error:
        flow.run(out=tmp_path / "run", runtime=runtime, quiet=True)
    name = {"row": "row", "async": "awaited", "batched": "batched"}[kind]
    assert error.value.what.startswith(f"reward.score of step 1: {name} failed for {NAMED[kind]}: {said}")
    assert f"Mend the function ({name}, " in error.value.fix and "fault_flow.py:" in error.value.fix
    assert error.value.at.text == "batch = reward.score(batch)"
    [failed] = events(tmp_path / "run", "failed")
    assert NAMED[kind] in failed


@pytest.mark.parametrize("fault", ["exit", "half"])
def test_an_op_of_the_users_own_is_told_with_its_line(tmp_path, monkeypatch, fault):
    flow = faulty(monkeypatch, FAULT=fault, KIND="op")
    with pytest.raises(RunError, match="SystemExit: 3" if fault == "exit" else "half a pair") as error:
        flow.run(out=tmp_path / "run", quiet=True)
    assert error.value.at.text == "batch = reward.score(batch)"


@pytest.mark.parametrize("kind", ["row", "async", "batched", "op"])
@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_what_forks_or_changes_directory_hurts_nothing(tmp_path, monkeypatch, runtime, kind):
    """The child is ended where it comes back; the run folder, which was said relative, is where it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIMEOUT", "60")
    whole = faulty(monkeypatch, FAULT="", KIND=kind).run(out="whole", runtime=runtime, quiet=True)
    for fault, said in (("moves", "changed the working directory to /"), ("forks", "has forked, and its child came")):
        done = faulty(monkeypatch, FAULT=fault, KIND=kind).run(out=fault, runtime=runtime, quiet=True)
        assert done.weights_digest == whole.weights_digest
        assert Path.cwd() == tmp_path
        [warning] = [text for text in events(tmp_path / fault, "warning") if said in text]
        assert "of step 1" in warning
        assert (tmp_path / fault / "reward.png").exists() and not at_work(tmp_path / fault)


@pytest.mark.parametrize("kind", ["row", "async", "batched", "op"])
@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_what_prints_or_warns_without_end_is_bounded_and_named(tmp_path, monkeypatch, capsys, runtime, kind):
    monkeypatch.setenv("TIMEOUT", "60")
    whole = faulty(monkeypatch, FAULT="", KIND=kind).run(out=tmp_path / "whole", runtime=runtime, quiet=True)
    row = {"batched": "4 rows from 4 on", "op": "4 rows from 4 on"}.get(kind, "row 5")
    for fault in ("prints", "warns"):
        capsys.readouterr()
        done = faulty(monkeypatch, FAULT=fault, KIND=kind).run(out=tmp_path / fault, runtime=runtime, quiet=True)
        shown = capsys.readouterr()
        assert done.weights_digest == whole.weights_digest, "it goes on"
        told = events(tmp_path / fault, "warning")
        if fault == "prints":
            [text] = told
            assert f"of step 1 at {row}" in text
            assert text.endswith("has printed more than 1 MiB; what else this call prints is left out")
            assert 1 << 20 <= len(shown.out) + len(shown.err) < 1.01 * (1 << 20)
        else:
            assert len(told) == 21 and told[0].startswith("reward.score of step 1: 0 xxx")
            assert told[-1] == "reward.score of step 1: it has warned 20 times; what else it warns of is left out"


@pytest.mark.parametrize("kind", ["row", "op"])
def test_a_message_without_end_is_cut(tmp_path, monkeypatch, kind):
    with pytest.raises((RewardError, RunError)) as error:
        faulty(monkeypatch, FAULT="long", KIND=kind).run(out=tmp_path / "run", quiet=True)
    assert len(error.value.report()) < 3000 and "characters)" in error.value.what
    assert (tmp_path / "run" / "events.jsonl").stat().st_size < 5000


def started(tmp_path, *words, **environment):
    command = [sys.executable, str(HERE / "fault_flow.py"), "--out", str(tmp_path / "run"), "--quiet", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)


@pytest.mark.parametrize(("fault", "status"), [("ends", 3), ("crashes", -11)])
def test_the_next_start_names_the_rows_that_a_process_died_at(tmp_path, monkeypatch, fault, status):
    """First all that were asked for at once; asked for one at a time from then on, it is one."""
    first = started(tmp_path, "--checkpoint-every", "1", FAULT=fault)
    assert first.returncode == status
    if fault == "crashes":
        assert "Segmentation fault" in first.stderr and "fault_flow.py" in first.stderr
    again = started(tmp_path, "--resume", FAULT=fault)
    assert again.returncode == status
    monkeypatch.setenv("FAULT", "")
    assert main(["run", str(HERE / "fault_flow.py"), "--out", str(tmp_path / "run"), "--quiet", "--resume"]) == 0
    one, two = (text for text in events(tmp_path / "run", "warning") if "died" in text)
    assert one.startswith("the process before died at reward.score of step 1 at row ") and "row, " in one
    assert two.startswith("the process before died at reward.score of step 1 at row 5 (prompt '5+1='): row, ")
    assert "more" not in two


def test_a_row_without_a_limit_is_told_of_while_it_takes_long(tmp_path):
    """After a minute, and after twice as many; not again when it is done."""
    told, now = [], [1000.0]
    notes = Notes(tmp_path, "user_code.cpu.3")
    watch = Watch(tmp_path, told.append, lambda: now[0])
    number = notes.begin(Row("p", 3, "reward.score", (17, 2), "exact, rewards.py:12", "12+7="))
    now[0] = since = at_work(tmp_path)[0].since
    for seconds in (5, 59, 61, 100, 121, 130, 500, 700):
        now[0] = since + seconds
        watch.look()
    notes.end(number)
    watch.look()
    row = "reward.score of step 3 at row 17, sample 2 (prompt '12+7='): exact, rewards.py:12"
    assert told == [f"{row} has taken {n} s so far" for n in (60, 120, 240)]


def test_notes_know_who_died_with_others_and_who_alone(tmp_path):
    rows = [Row("p", 0, "reward.score", (i,), "f, a.py:1", "\ud800ü" * 900) for i in range(3)]
    for among in (rows, rows[1:2], rows[1:2]):
        notes = Notes(tmp_path, "user_code.cpu.0")
        for row in among:
            notes.begin(row)
        assert [r.key for r in bury(tmp_path, "user_code.*.0")] == [r.key for r in among]
        notes.close()
    assert [Notes(tmp_path, "user_code.cpu.0").count_deaths(row) for row in rows] == [1, 3, 1]


def test_a_row_that_only_died_among_others_or_with_the_driver_is_asked_for_again(tmp_path):
    rows = [Row("p", 0, "reward.score", (i,), "f, a.py:1") for i in range(2)]
    for _ in range(5):
        notes = Notes(tmp_path)
        for row in rows:
            notes.begin(row)
        bury(tmp_path, "user_code", driver=True)
        notes.close()
    assert [Notes(tmp_path).count_deaths(row) for row in rows] == [2, 2]


@pytest.mark.slow
def test_on_ranks_a_row_that_ends_its_process_is_left_out_the_third_time(tmp_path):
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "pools:\n  a: {processes: 1}\n  b: {processes: 1}\nplace: {counter: {pool: a}, reward: {pool: b}}\n"
    )
    words = ("--runtime", "ray", "--plan", str(plan))
    done = started(tmp_path, *words, FAULT="killed", ON_ERROR="mark")
    assert done.returncode == 0, done.stderr
    lost, out = events(tmp_path / "run", "lost"), tmp_path / "run"
    if KNOWS:
        assert all("it was killed by SIGKILL, which the run did not send; the kernel's" in text for text in lost), lost
    assert 3 <= len(lost) <= 4 and all("it was at reward.score of step 1 at row" in text for text in lost), lost
    assert "at row 5 (prompt '5+1='): row, " in lost[-1] and "more" not in lost[-1]
    [warning] = (text for text in events(out, "warning") if "died" in text)
    assert warning.startswith("reward.score of step 1: row failed for row 5: its process has died 3 times at this row")
    rewards = [json.loads(line)["reward"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rewards == pytest.approx([1.5, 17 / 3, 9.5])
