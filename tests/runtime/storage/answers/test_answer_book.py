"""An answer of the world is kept as soon as it is there: a call that is killed loses those in flight, and no other."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from answers_run import Run, journalled, run_here, wait_for
from flows import metrics

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.errors import RewardError
from flowrl.runtime.storage.answers import external_answers
from flowrl.runtime.storage.journal import Journal

HERE = Path(__file__).parents[2]
INFO = CallInfo(0, "train", 0, "reward.score", 0)


def rows(count):
    columns = {"prompt": ["p"] * count, "x": [float(i) for i in range(count)]}
    return fl.Batch.of(
        [(i,) for i in range(count)],
        response_ids=fl.Column.of([[1]] * count, dim="response", dtype="i32"),
        **{n: fl.Column.of(values, dtype="any") for n, values in columns.items()},
    )


def ask(folder, fn, count=6, warnings=None, **how):
    """Ask as a process of its own would: with what the journal's file holds."""
    reward = fl.FunctionReward(fn, **how)
    reward.name = "reward"
    journal = Journal(folder / "journal.jsonl")
    op = fl.FunctionReward.__dict__["score"]
    said = warnings if warnings is not None else []
    reward._warn = said.append
    try:
        return external_answers.once(journal, (0, 0), op, reward, {"batch": rows(count)}, {}, INFO, said.append)
    finally:
        journal.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_answers_reach_the_journal_while_the_call_goes_on(tmp_path, is_async):
    go = threading.Event()

    def fn(x):
        if x >= 4:
            assert go.wait(60)
        return x

    async def slow(x):
        import asyncio

        while x >= 4 and not go.is_set():
            await asyncio.sleep(0.01)
        return x

    made = []
    thread = threading.Thread(target=lambda: made.append(ask(tmp_path, slow if is_async else fn)), daemon=True)
    thread.start()
    wait_for(lambda: set(journalled(tmp_path)) == {(i,) for i in range(4)})
    go.set()
    thread.join()
    assert made[0].rewards.to_list() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert sorted(journalled(tmp_path)) == [(i,) for i in range(6)], "each once"


def test_a_call_that_fails_keeps_what_came_and_asks_only_the_rest_again(tmp_path):
    asked = []

    def fails(x):
        asked.append(x)
        if x == 3:
            raise OSError("down")
        return x

    with pytest.raises(RewardError, match="down"):
        ask(tmp_path, fails)
    again = []
    made = ask(tmp_path, lambda x: again.append(x) or x)
    assert sorted(asked) == [0, 1, 2, 3, 4, 5] and again == [3]
    assert made.rewards.to_list() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_rows_that_failed_have_their_mark_again_once_their_call_is_taken(tmp_path):
    """Until then they are asked again: a call with too many of them stops the run, and goes on when the service runs."""

    def fails(x):
        if x == 3:
            raise OSError("down")
        time.sleep(0.05)
        return x

    first = ask(tmp_path, fails, on_error="mark")
    assert first.failed.to_list() == [False, False, False, True, False, False]
    assert first.failed_why.to_list() == ["", "", "", "OSError: down", "", ""]
    again = []
    made = ask(tmp_path, lambda x: again.append(x) or 1 / 0, on_error="mark")
    assert again == [3] and made.failed_why.to_list()[3] == "ZeroDivisionError: division by zero"
    journal = Journal(tmp_path / "journal.jsonl")
    journal.take(0, 0, INFO)
    journal.close()
    made = ask(tmp_path, lambda x: again.append(x) or x, on_error="mark")
    assert again == [3] and made.failed_why.to_list()[3] == "ZeroDivisionError: division by zero"
    assert made.rewards.to_list()[:3] == [0.0, 1.0, 2.0]


def test_an_answer_that_comes_after_its_row_was_given_up_does_not_stay(tmp_path):
    late = threading.Event()

    def fn(x):
        if x == 0:
            late.wait(0.5)  # longer than it has
            return 9.0
        time.sleep(0.7)
        return x

    made = ask(tmp_path, fn, timeout=0.3, on_error=-1.0, count=2, concurrency=1)
    assert made.rewards.to_list()[0] == -1.0
    assert ask(tmp_path, fn, timeout=0.3, on_error=-1.0, count=2).rewards.to_list() == made.rewards.to_list()


def test_many_rows_that_are_quick_are_written_together(tmp_path):
    ask(tmp_path, lambda x: x, count=500)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert len(journalled(tmp_path)) == 500 and len(lines) < 250


KILLED = [
    ("local", "driver"),
    *(pytest.param("ray", who, marks=pytest.mark.nightly) for who in ("driver", "rank", "both")),
]


@pytest.mark.parametrize(("runtime", "who"), KILLED)
def test_rows_that_have_answered_in_a_call_that_is_killed_are_not_asked_again(tmp_path, monkeypatch, runtime, who):
    words = ["--runtime", runtime]
    if runtime == "ray":
        (tmp_path / "plan.yaml").write_text("cluster: {device: cpu, nodes: 1, devices_per_node: 1}\n"
                                            "pools: {a: {processes: 2}}\nplace: {reward: {pool: a}}\n")  # fmt: skip
        words += ["--plan", str(tmp_path / "plan.yaml")]
    run = Run(tmp_path, *words)
    run.until(lambda: run.answered() >= {0, 1, 2, 3})  # of 7 rows; 4, 5 and 6 wait
    run.until(lambda: {x for x, _ in run.calls("begin")} >= {4, 5, 6})
    before = Counter(x for x, _ in run.calls("begin"))
    if who != "driver":
        os.kill(next(pid for x, pid in run.calls("begin") if x == 4), signal.SIGKILL)
    if who != "rank":
        run.process.kill()
        run.process.wait()
    (tmp_path / "go").touch()
    if runtime == "local":
        run_here(monkeypatch, tmp_path, "--resume")
    else:
        run = Run(tmp_path, "--resume") if who != "rank" else run
        assert run.process.wait(240) == 0, (tmp_path / "said").read_text()
    counts = Counter(x for x, _ in run.calls("begin"))
    assert set(counts) == set(range(14)) and set(before.values()) == {1}
    again = {x for x, count in counts.items() if count > 1}
    assert again <= {4, 5, 6}, "only what was in flight"
    assert [line["most"] for line in metrics(tmp_path / "run")] == [3.0, 6.5]


def test_a_batched_call_is_one_and_is_asked_again_as_a_whole(tmp_path, monkeypatch):
    run = Run(tmp_path, BATCHED="1")
    run.until(lambda: any(x == 4 for x, _ in run.calls("begin")))
    run.process.kill()
    run.process.wait()
    (tmp_path / "go").touch()
    run_here(monkeypatch, tmp_path, "--resume", BATCHED="1")
    counts = Counter(x for x, _ in run.calls("begin"))
    assert [counts[x] for x in range(14)] == [2] * 5 + [1] * 9


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1])
def test_batched_rewards_of_processes_killed_at_any_time(tmp_path, seed):
    """A call that has returned is never made again; what is made again is the last call of a process that was killed."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    (tmp_path / "plan.yaml").write_text("cluster: {device: cpu, nodes: 1, devices_per_node: 1}\n"
                                        "pools: {a: {processes: 2}}\nplace: {reward: {pool: a}}\n")  # fmt: skip
    (tmp_path / "go").touch()
    steps, chance = 20, random.Random(seed)
    environment = {"BATCHED": "1", "DELAY": "0.05"}
    words = ["--steps", str(steps), "--checkpoint-every", "4"]
    run = Run(tmp_path, "--runtime", "ray", "--plan", str(tmp_path / "plan.yaml"), *words, **environment)
    killed: set[int] = set()
    for who in ("rank", "driver", "rank", "rank", "driver"):
        far = len(run.calls("end")) + 8
        run.until(lambda run=run, far=far: len(run.calls("end")) > far)  # it goes on
        time.sleep(chance.uniform(0, 0.6))
        pids = sorted({pid for _, pid in run.calls("begin")[-14:]} - killed)
        if who == "rank":
            killed.add(pid := chance.choice(pids))
            os.kill(pid, signal.SIGKILL)
        else:
            killed |= set(pids)
            run.process.kill()
            run.process.wait()
            run = Run(tmp_path, "--resume", **environment)
    assert run.process.wait(300) == 0, (tmp_path / "said").read_text()
    lines = metrics(tmp_path / "run")
    assert [line["most"] for line in lines] == [3.5 * step + 3.0 for step in range(steps)]
    begun = run.calls("begin")
    assert {x for x, _ in begun} == set(range(7 * steps))
    last = {pid: [x for x, own in begun if own == pid][-1] // 7 for pid in killed}  # the step of its last call
    times = Counter(x for x, _ in begun)
    again = {x for x, count in times.items() if count > 1}
    assert again <= {x for x, pid in begun if pid in killed and x // 7 == last[pid]}
    assert max(times.values()) <= 1 + len(killed)
