"""What benchmarks/account.py finds wrong with the rows of a run: nothing in a whole one, and each fault by its name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import account
import kills
from account import Setting

SETTING, STEPS = Setting(1, "interrupt", "fifo", "evaluate"), 5
Line = dict[str, Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to its end, without faults."""
    out = tmp_path_factory.mktemp("account") / "run"
    words = ["--steps", str(STEPS), "--runtime", "local", "--staleness", "1", "--publish", "interrupt"]
    command = [
        sys.executable,
        str(Path(account.__file__ or "").with_name("kills_driver.py")),
        str(out),
        *words,
        "--program",
        "evaluate",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def changed(whole: Path, to: Path, name: str, change: Callable[[list[Any]], None]) -> dict[str, str]:
    """What is found in a copy of a run, one file of which is changed."""
    out = to / "run"
    shutil.copytree(whole, out)
    shutil.copytree(whole.with_name("run.faults"), to / "run.faults")
    file = out / name
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {what: seen for what, seen in account.account(out, SETTING, STEPS).items() if seen}


def judged(lines: list[Line]) -> Line:
    """The line of the journal of a row of the first step."""
    return next(line for line in lines if line.get("op") == "reward.score" and not line["outside"])


def again(lines: list[Line], **other: Any) -> None:
    lines.append({**judged(lines), **other})


def count(lines: list[Line]) -> None:
    lines[1]["rows"]["trained"] += 1


def old(lines: list[Line]) -> None:
    lines[-1]["versions"][0] = lines[-1]["step"] - SETTING.bound - 1


def mixed(lines: list[Line]) -> None:
    lines[-1]["versions"] = [lines[-1]["step"], lines[-1]["step"] - 1]


def early(lines: list[Line]) -> None:
    lines[-1]["versions"][-1] = lines[-1]["step"] + 1


def told_old(lines: list[Line]) -> None:
    next(line for line in lines if line["lags"])["lags"] = {"2": 4}


def untold(lines: list[Line]) -> None:
    next(line for line in lines if line["lags"])["lags"] = {}


FAULTS = {
    "a row in two places of the ledger": ("ledger.jsonl", count, "the ledger does not close"),
    "a step that is not there": ("metrics.jsonl", lambda lines: lines.pop(2), "steps are not all there"),
    "a row that is not there": ("trajectories.jsonl", lambda lines: lines.pop(7), "rows lost"),
    "a row in two updates": ("trajectories.jsonl", lambda lines: lines.append(lines[0]), "rows trained twice"),
    "a row of old weights": ("trajectories.jsonl", old, "rows too old"),
    "a row of later weights, then of older ones": ("trajectories.jsonl", mixed, "rows too old"),
    "a row of weights that are not there yet": ("trajectories.jsonl", early, "rows too old"),
    "an age above the bound": ("traffic.jsonl", told_old, "rows too old"),
    "an update without ages": ("traffic.jsonl", untold, "rows too old"),
    "the same question again": ("journal.jsonl", again, "asked twice"),
    "a row with other tokens without a loss": (
        "journal.jsonl",
        lambda lines: again(lines, inputs=["other"]),
        "asked twice",
    ),
    "answers that are in no journal": (
        "../run.faults/answers.jsonl",
        lambda lines: lines.extend(lines[:2]),
        "asked twice",
    ),
    "a reward that is another one": (
        "trajectories.jsonl",
        lambda lines: lines[0].update(rewards=7.0),
        "rewards that nobody gave",
    ),
    "an evaluation by older weights": (
        "metrics.jsonl",
        lambda lines: lines[3].update(at=2.0),
        "evaluated by other weights",
    ),
}


@pytest.mark.slow
def test_nothing_is_wrong_with_a_whole_run(whole, tmp_path):
    assert changed(whole, tmp_path, "metrics.jsonl", lambda lines: None) == {}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_by_its_name(whole, tmp_path, fault):
    name, change, finding = FAULTS[fault]
    assert finding in changed(whole, tmp_path, name, change)


@pytest.mark.slow
def test_a_question_that_was_never_put_is_found(whole, tmp_path):
    """All answers of the world are gone: those in the journal came from nowhere."""
    found = changed(whole, tmp_path, "../run.faults/answers.jsonl", lambda lines: lines.clear())
    assert "rewards that nobody gave" in found


@pytest.mark.slow
def test_rows_may_be_asked_again_after_a_loss(whole, tmp_path):
    """With other tokens, once for each loss; the same question is never asked again."""
    event = {"time": 0.0, "kind": "recovered", "text": "rank 2 was lost"}
    shutil.copytree(whole, tmp_path / "lost")
    shutil.copytree(whole.with_name("run.faults"), tmp_path / "lost.faults")
    with (tmp_path / "lost" / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    journal = tmp_path / "lost" / "journal.jsonl"
    with journal.open("a") as file:
        file.write(json.dumps({**judged(account.read(journal)), "inputs": ["other"]}) + "\n")
    given = account.faults.beside(tmp_path / "lost") / "answers.jsonl"
    with given.open("a") as file:
        file.write(json.dumps([1, "1+1=", "2"]) + "\n")
    assert not account.asked_twice(tmp_path / "lost", SETTING)
    with journal.open("a") as file:
        file.write(json.dumps({**judged(account.read(journal)), "inputs": ["a third"]}) + "\n")
    assert "2 times more, after 1 losses" in account.asked_twice(tmp_path / "lost", SETTING)


def test_the_bound_of_a_window_is_that_of_the_schedule():
    """W = 4 (S + 1) groups of 4 prompts each: S + ceil((W - 1) / 4)."""
    bounds = [Setting(s, "drain", order).bound for s in (1, 4) for order in ("fifo", "window")]
    assert bounds == [1, 3, 4, 9]


def test_rows_are_the_same_where_no_timing_decides():
    settled = [
        Setting(s, publish, order)
        for s in (0, 1, 4)
        for publish in ("drain", "interrupt")
        for order in ("fifo", "window")
        if Setting(s, publish, order).is_settled
    ]
    assert settled == [Setting(0), Setting(0, order="window"), Setting(1)]


def test_settings_are_those_that_a_plan_may_have():
    words = {"staleness": [0, 1], "publish": ["drain", "interrupt"], "order": ["fifo", "window"]}
    asked = kills.argparse.Namespace(**words, program=["plain", "refill"])
    every = kills.settings_of(asked)
    assert len(every) == len(set(every)) == 1 + 4 + 1 + 2
    assert {s.order for s in every if s.program == "refill"} == {"fifo"}
    assert [s for s in every if not s.staleness] == [Setting(), Setting(program="refill")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--publish", "interrupt"], "need --staleness 1 or more"),
        (["--order", "window", "--staleness", "1", "--program", "refill"], "window --program plain"),
        (["--program", "dapo"], "there are plain, refill, evaluate"),
    ],
)
def test_settings_that_cannot_be_are_refused(words, said, capsys):
    with pytest.raises(SystemExit):
        kills.main(words)
    assert said in capsys.readouterr().err
