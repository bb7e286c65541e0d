"""What a person sees of a run: what is opened, how far it is, and which figures come first."""

import contextlib
import io
import os
import sys
import threading

import pytest
from flows import module_of
from rich.console import Console

from flowrl.runtime.driver.progress import Progress
from flowrl.runtime.values.step_records import Timing


@pytest.fixture
def shown():
    """A display that writes into a text, and a line for every step."""
    progress = Progress()
    progress.console = Console(file=io.StringIO(), soft_wrap=True)
    return progress


def text(progress):
    return progress.console.file.getvalue()


def test_it_begins_with_the_program_and_what_is_opened(shown):
    shown.opening("warmup", {"actor": "Actor"}, "runs/a")
    shown.opening("grpo", {"actor": "Actor", "ref": "Reference", "reward": "FunctionReward"}, "runs/a")
    shown.opening("evaluate", {"actor": "Actor"}, "runs/a")
    assert text(shown).splitlines() == [
        "warmup: opening actor (Actor); folder runs/a",
        "grpo: opening ref (Reference), reward (FunctionReward); folder runs/a",
    ]


def test_quiet_says_nothing_of_what_is_opened():
    progress = Progress(quiet=True)
    progress.console = Console(file=io.StringIO())
    progress.opening("grpo", {"actor": "Actor"}, "runs/a")
    assert text(progress) == ""


@pytest.mark.parametrize(
    ("seconds", "steps", "wanted"),
    [
        (0.25, 41, "grpo 1/41  250 ms/step  10 s left"),
        (9.0, 101, "grpo 1/101  9 s/step  15 min 0 s left"),
        (90.0, 801, "grpo 1/801  90 s/step  20 h 0 min left"),
        (3.0, 1, "grpo 1/1  3 s/step"),
        (3.0, None, "grpo 1  3 s/step"),
    ],
)
def test_what_is_left_is_said_in_minutes_and_hours(shown, seconds, steps, wanted):
    shown.start("grpo", steps, 0)
    with shown:
        shown.step({"program": "grpo", "step": 0, "seconds": seconds}, [])
    assert text(shown).splitlines()[-1].partition("  [")[0].strip() == wanted


def test_a_step_without_a_number_takes_no_part_in_the_mean(shown):
    shown.start("grpo", 3, 0)
    with shown:
        for step, ratio in enumerate((1.0, float("nan"), 2.0)):
            shown.step({"program": "grpo", "step": step, "seconds": 1.0, "ratio": ratio}, [])
    assert "  ratio 1.5  " in text(shown).splitlines()[-1]


def test_seconds_and_tokens_per_second_are_those_of_the_last_steps_together(shown):
    """Of steps that overlap one commits milliseconds after another; a line that was said leaves nothing out."""
    shown.start("grpo", 40, 0)
    for step in range(20):
        seconds, tokens = (5.0, 100.0) if step % 2 else (0.001, 500000.0)
        shown.step({"program": "grpo", "step": step, "seconds": seconds, "tokens_per_second": tokens}, [])
    shown._say()
    shown.step({"program": "grpo", "step": 20, "seconds": 0.001, "tokens_per_second": 500000.0}, [])
    shown._say()
    first, last = text(shown).splitlines()
    assert first.startswith("grpo 20/40  2.5 s/step") and "tokens_per_second 200 " in first
    assert last.startswith("grpo 21/40  2.5 s/step") and "tokens_per_second 200 " in last


def test_the_loss_of_each_worker_comes_before_its_approximate_kl(shown):
    line = {"actor/approx_kl": 0.1, "actor/kl": 0.2, "actor/loss": 0.3, "critic/loss": 0.4, "grade": 1.0, "reward": 0.5}
    shown.start("ppo", 1, 0)
    with shown:
        shown.step({"program": "ppo", "step": 0, "seconds": 1.0, **line}, [])
    said = text(shown).splitlines()[-1]
    names = ["reward", "actor/loss", "critic/loss", "actor/kl", "actor/approx_kl", "grade"]
    places = [said.index(f"{name} ") for name in names]
    assert places == sorted(places)


def test_what_a_program_logs_by_keyword_comes_first(shown):
    measured = dict.fromkeys(["loss", "grad_norm", "kl", "response_length", "tokens_per_second", "entropy", "ess"], 0.5)
    shown.start("grpo", 3, 0)
    with shown:
        shown.step({"step": 0, "seconds": 1.0, **measured, "right": 0.75, "reward": 1.0}, [], named=["right", "reward"])
        shown.step({"step": 1, "seconds": 1.0, **measured}, [])
    said = text(shown).splitlines()[-1].partition(" left")[2].partition("[")[0].split()
    assert said[::2] == ["reward", "right", "response_length", "tokens_per_second", "loss", "grad_norm"]


def test_a_run_tells_its_display_what_was_logged_by_keyword(monkeypatch, tmp_path):
    said: list[list[str]] = []
    monkeypatch.setattr(Progress, "step", lambda self, line, timings, *, named: said.append(named))
    module_of("small_flow").flow.run("train", out=tmp_path / "run", quiet=True, steps=2)
    assert said == [["extra", "reward", "baseline", "scale"], ["reward", "baseline", "scale"]]


@pytest.mark.parametrize("lost", ["pipe", "closed"])
def test_a_display_that_nobody_can_read_any_more_ends_nothing(monkeypatch, lost):
    read, write = os.pipe()
    stream = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress() as shown:
        shown.note("before")
        assert os.read(read, 100) == b"before\n"
        os.close(read)
        if lost == "closed":
            with contextlib.suppress(OSError):
                stream.close()
        shown.start("grpo", 3, 0)
        shown.note("nobody reads this")
        shown.step({"step": 0, "reward": 0.5, "seconds": 1.0}, [])
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        stream.close()


def test_a_step_that_commits_as_the_live_display_is_drawn_does_not_end_it(shown):
    """Its thread ended with an error of Python's about what it went through, on the terminal, and the display stood."""

    def step():
        shown.step({"step": 1, "seconds": 1.0, "loss": 0.5}, [Timing("rl.ppo", 1, "", 0.0, 0.25, 4, 8)])

    class Drawn(int):
        """A figure that is read as a step commits in another thread, unless that has to wait."""

        def __float__(self):
            if committing.ident is None:
                committing.start()
                committing.join(0.2)
            return float(int(self))

    committing = threading.Thread(target=step)
    shown.quiet = True
    for loss in (1, Drawn(2)):
        shown.step({"step": 0, "seconds": 1.0, "loss": loss}, [Timing("actor.update", 0, "", 0.0, 0.5, 4, 8)])
    shown.console.print(shown._table())
    committing.join(10)
    assert "actor.update" in text(shown) and "loss" in text(shown)
    shown.console.print(shown._table())
    assert "rl.ppo" in text(shown)
