"""A step says how many turns its episodes have and how long environments take between two, whichever runtime plays them."""

from __future__ import annotations

import asyncio
import json

import pytest
from direct import run_direct
from flows import module_of

import flowrl as fl
from flowrl import rl
from flowrl.analysis.run_difference import compare_runs
from flowrl.placement.plan.plan import Place, Plan, Pool

PAUSE = 0.2  # seconds of a step
NAMES = ("turns", "environment_seconds")


class Slow(fl.Env):
    """Three turns; each of its steps waits, all of them beside each other."""

    pause, last = PAUSE, 2

    def reset(self, row, seed):
        return 0, "1"

    async def step(self, state, action):
        await asyncio.sleep(self.pause)
        return state + 1, "1", float(len(action)), state == self.last


class Quick(Slow):
    """Two turns without a pause."""

    pause, last = 0.0, 1


class Once(Slow):
    last = 0


def flow(game=None, **how):
    """A program that plays a game, or none, with a policy that nobody trains."""
    module = module_of("stale_flow")
    made = fl.Flow("play")
    actor = made.worker(fl.Actor, module.MODEL, lr=None, max_tokens=3, name="actor")
    player = made.worker(game, name="game") if game is not None else None

    @made.program
    def play(steps: int = 2):
        for step, batch in made.steps(module.arithmetic.prompts(3), steps):
            batch = player.rollout(batch, policy=actor, n=2) if player is not None else actor.generate(batch, n=2)
            made.log(step, rows=len(batch))

    return made


def told(out, program="play"):
    """What each step says of turns and environments, by call."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name.rpartition("/")[2] in NAMES}
        for line in lines
        if line["program"] == program
    ]


def near(seconds):
    """Whether it is the pause, on a machine that may be busy."""
    return 0.9 * PAUSE < seconds < PAUSE + 10


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_it_is_there_in_one_process(tmp_path, runtime):
    flow(Slow).run(out=tmp_path / "run", quiet=True, runtime=runtime)
    found = told(tmp_path / "run")
    assert len(found) == 2 and all(line["game.rollout/turns"] == 3 and len(line) == 2 for line in found)
    assert all(near(line["game.rollout/environment_seconds"]) for line in found)


@pytest.mark.parametrize("games", [1, 2])
def test_it_is_there_on_ranks(tmp_path, games):
    pools = {"model": Pool("model", processes=1), "games": Pool("games", processes=games)}
    run_direct(flow(Slow), Plan(pools, {"actor": Place("model"), "game": Place("games")}), tmp_path / "run")
    found = told(tmp_path / "run")
    assert len(found) == 2 and all(line["game.rollout/turns"] == 3 and len(line) == 2 for line in found)
    assert all(near(line["game.rollout/environment_seconds"]) for line in found)


def test_each_call_of_each_policy_has_its_own(tmp_path):
    """Two policies that play two games: four calls, of which two wait."""
    module = module_of("stale_flow")
    made = fl.Flow("play")
    first, second = (made.worker(fl.Actor, module.MODEL, lr=None, max_tokens=3, name=name) for name in ("a", "b"))
    slow, quick = made.worker(Slow, name="slow"), made.worker(Quick, name="quick")

    @made.program
    def play(steps: int = 2):
        for step, batch in made.steps(module.arithmetic.prompts(3), steps):
            rewards = [slow.rollout(batch, policy=first).rewards, quick.rollout(batch, policy=first).rewards]
            rewards.append(slow.rollout(batch, policy=second).rewards)
            rewards.append(quick.rollout(batch, policy=second).rewards)
            made.log(step, **{f"reward{i}": reward.mean() for i, reward in enumerate(rewards)})

    made.run(out=tmp_path / "run", quiet=True)
    quickest = 1000.0
    for line in told(tmp_path / "run"):
        calls = sorted({name.rpartition("/")[0] for name in line})
        assert [call.partition(".")[0] for call in calls] == ["quick", "quick", "slow", "slow"] and len(line) == 8
        for call in calls:
            waits, seconds = call.startswith("slow"), line[f"{call}/environment_seconds"]
            assert line[f"{call}/turns"] == (3 if waits else 2)
            assert near(seconds) if waits else seconds >= 0
            quickest = min(quickest, seconds)
    assert quickest < 0.9 * PAUSE, "of four calls that do not wait one was not held up either"


def test_without_an_environment_or_a_second_turn_there_is_none(tmp_path):
    flow().run(out=tmp_path / "none", quiet=True)
    assert told(tmp_path / "none") == [{}, {}]
    flow(Once).run(out=tmp_path / "one", quiet=True)
    assert told(tmp_path / "one") == [{"game.rollout/turns": 1}] * 2


def test_an_evaluation_tells_it_of_all_its_steps(tmp_path):
    module = module_of("stale_flow")
    made = fl.Flow("play")
    actor = made.worker(fl.Actor, module.MODEL, lr=1e-3, max_tokens=3, name="actor")
    game = made.worker(Slow, name="game")

    @made.program
    def play(steps: int = 1):
        for step, batch in made.steps(module.arithmetic.prompts(3), steps):
            batch = rl.group_advantages(game.rollout(batch, policy=actor, n=2))
            made.log(step, actor.update(batch, loss=rl.ppo_clip()))

    @made.program
    def test():
        for step, batch in made.steps(module.arithmetic.heldout(4, repeat=True), 2):
            made.log(step, held=game.rollout(batch, policy=actor).rewards.mean())

    made.run("play", out=tmp_path / "run", quiet=True, evaluate="test:5")
    (line,) = told(tmp_path / "run", "test")
    assert line["game.rollout/turns"] == 3 and near(line["game.rollout/environment_seconds"])


def test_clocks_decide_it_and_no_comparison_of_runs_looks_at_it(tmp_path):
    flow(Slow).run(out=tmp_path / "slow", quiet=True)
    flow(type("Slow", (Slow,), {"pause": 0.0})).run(out=tmp_path / "quick", quiet=True)
    slow, quick = (told(tmp_path / name)[0]["game.rollout/environment_seconds"] for name in ("slow", "quick"))
    assert slow != quick
    found = compare_runs(tmp_path / "slow", tmp_path / "quick")
    assert found.metric is None, found


def test_a_run_that_is_gone_on_with_tells_it_of_further_steps(tmp_path):
    made = flow(Slow)
    made.run(out=tmp_path / "run", quiet=True, steps=1, checkpoint_every=1)
    made.run(out=tmp_path / "run", quiet=True, steps=3, resume=True)
    found = told(tmp_path / "run")
    assert len(found) == 3 and all(near(line["game.rollout/environment_seconds"]) for line in found)
