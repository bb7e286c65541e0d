"""A run of episodes, and simulations of its script that take turns and seconds of its environment from it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from flowrl.cli import main

ROOT = Path(__file__).parents[2]
PAUSE = 0.3
DRIVER = f'''
import asyncio
import sys

sys.path.insert(0, {str(ROOT / "algorithms")!r})

import flowrl as fl
from flowrl import rl
from tasks import guessing


class Slow(fl.Env):
    """Three turns; a step takes {PAUSE} s."""

    def reset(self, row, seed):
        return 0, "3"

    async def step(self, state, action):
        await asyncio.sleep({PAUSE})
        return state + 1, "3", float(len(action)), state == 2


flow = fl.Flow("play")
actor = flow.worker(fl.Actor, guessing.MODEL, lr=1e-3, max_tokens=1)
game = flow.worker(Slow)


@flow.program
def play(steps: int = 4):
    for step, batch in flow.steps(guessing.prompts(4), steps):
        batch = rl.group_advantages(game.rollout(batch, policy=actor, n=2))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()), reward=batch.rewards.mean())


if __name__ == "__main__":
    flow.main()
'''
NOTE = re.compile(r"game\.rollout: (\d+) turns in an episode, and ([\d.]+) s of its environment between two \((.*)\)")
ASSUMED = "game.rollout: episodes of one turn, whose environment takes no time (assumed; see --episode-turns)"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The script, and the folder of a run of it."""
    folder = tmp_path_factory.mktemp("episodes")
    (folder / "play.py").write_text(DRIVER)
    assert main(["run", str(folder / "play.py"), "--out", str(folder / "run"), "--quiet", "--no-save"]) == 0
    return folder / "play.py", folder / "run"


@pytest.fixture
def call(done, capsys):
    def run(*words, command="simulate"):
        capsys.readouterr()
        status = main([command, str(done[0]), *map(str, words)])
        out, err = capsys.readouterr()
        assert status == 0, err
        return json.loads(out)

    return lambda *words, **how: run("--format", "json", *words, **how)


def said_in(record):
    """Turns, seconds, and where they are from, of the note on environments."""
    (found,) = filter(None, map(NOTE.fullmatch, record["notes"]))
    return int(found[1]), float(found[2]), found[3]


def without_notes(record):
    return {name: value for name, value in record.items() if name != "notes"}


def test_turns_and_seconds_are_those_of_the_run(done, call):
    count, seconds, source = said_in(found := call("--run", done[1]))
    assert count == 3 and 0.9 * PAUSE < seconds < PAUSE + 10 and source == f"measured: {done[1]}"
    assert found["step_s"] > 2 * 0.9 * PAUSE, "episodes wait twice"


def test_numbers_of_a_run_are_as_good_as_those_that_are_said(done, call):
    numbers = said_in(found := call("--run", done[1]))
    again = call("--run", done[1], "--episode-turns", f"{numbers[0]}:{numbers[1]}")
    assert without_notes(again) == without_notes(found) and said_in(again) == (*numbers[:2], "said")


def test_what_is_said_goes_before_the_run(done, call):
    assert said_in(call("--run", done[1], "--episode-turns", "5:7.5")) == (5, 7.5, "said")


@pytest.fixture
def older(done, tmp_path):
    """The run as an older flowrl would have written it."""
    shutil.copytree(done[1], tmp_path / "older")
    path = tmp_path / "older" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    new = ("game.rollout/turns", "game.rollout/environment_seconds")
    assert all(name in line for line in lines for name in new)
    old = [{name: value for name, value in line.items() if name not in new} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    return tmp_path / "older"


def test_a_run_that_does_not_say_them_leaves_them_assumed(done, call, older):
    found = call("--run", older)
    assert ASSUMED in found["notes"] and found["step_s"] < call("--run", done[1])["step_s"] - 0.5
    assert said_in(call("--run", older, "--episode-turns", "5:7.5")) == (5, 7.5, "said")


def rollouts(record):
    """Seconds of the rollouts of a simulation."""
    return [span["end_s"] - span["start_s"] for span in record["spans"] if span["node"] == "game.rollout"]


@pytest.fixture(scope="module")
def took(done):
    """Seconds of the rollouts of the run: the least and the most, with a tenth around them."""
    lines = [json.loads(line) for line in (done[1] / "timeline.jsonl").read_text().splitlines()]
    seconds = [line["end"] - line["start"] for line in lines if line["node"] == "game.rollout"]
    return 0.9 * min(seconds), 1.1 * max(seconds)


def test_costs_of_whole_calls_have_them_in_their_seconds(done, call, took):
    """Nothing is added: the seconds of a rollout are those that were measured, or given."""
    for words in (("--run", done[1], "--costs", done[1]), ("--costs", done[1])):
        found = call(*words)
        assert not any("turn" in note for note in found["notes"])
        assert all(took[0] < seconds < took[1] for seconds in rollouts(found))


def test_a_run_that_tells_how_fast_devices_are_tells_them_too(done, call, took, older):
    """What its calls took is fitted without the waits, which a simulation adds again: once, whatever else is said."""
    numbers = said_in(call("--run", done[1]))
    for lengths in (done[1], older):
        found = call("--calibrated-by", done[1], "--run", lengths)
        assert said_in(found) == numbers and all(took[0] < seconds < took[1] for seconds in rollouts(found))
    assert said_in(call("--calibrated-by", done[1])) == numbers
    slower = call("--calibrated-by", done[1], "--run", older, "--episode-turns", "3:9")
    assert rollouts(slower)[0] == pytest.approx(rollouts(found)[0] + 2 * (9 - numbers[1]), rel=0.01)
    blind = call("--calibrated-by", older, "--run", older)
    assert ASSUMED in blind["notes"] and all(took[0] < seconds < took[1] for seconds in rollouts(blind))


def test_a_search_has_them_too(done, call):
    words = ("--cluster", "h100-80:1x8", "--model", "actor=qwen3-8b")
    found = {name: call(*words, *more, command="plan") for name, more in
             (("run", ("--run", done[1])), ("said", ("--run", done[1], "--episode-turns", "3:50")))}  # fmt: skip
    assert found["said"]["step_s"] > found["run"]["step_s"] + 2 * 40


def test_a_folder_that_is_no_run_is_named(done, tmp_path, capsys):
    assert main(["simulate", str(done[0]), "--run", str(tmp_path)]) == 2
    assert "is no folder of a run" in capsys.readouterr().err
