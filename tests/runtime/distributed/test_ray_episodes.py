"""Episodes on processes of Ray: their calls meet in the batch of the policy's process, which may die meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest
from flows import metrics, module_of

pytest.importorskip("ray", reason="the extra [ray] is not installed")

import flowrl as fl
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.distributed.executor import DistributedExecutor

pytestmark = pytest.mark.slow

TOKENS = 60  # of a turn


@pytest.fixture(scope="module")
def cluster():
    """One Ray for all tests of this file."""
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def played(cls, **how):
    """A flow in which episodes are played with a model that nobody trains, and their tokens are recorded."""
    module = module_of("stale_flow")
    flow = fl.Flow("play")
    actor = flow.worker(fl.Actor, module.MODEL, lr=None, max_tokens=4, name="actor")
    game = flow.worker(cls, name="game")

    @flow.program
    def play(steps: int = 3):
        for step, batch in flow.steps(module.arithmetic.prompts(4), steps):
            batch = game.rollout(batch, policy=actor, n=2, **how)
            sure = batch.rollout_logprobs.row_sum().mean()
            flow.log(step, reward=batch.rewards.mean(), length=batch.response_mask.row_sum().mean(), sure=sure)

    return flow


def plan(processes=2):
    pools = {"model": Pool("model", processes=1), "games": Pool("games", processes=processes)}
    return Plan(pools, {"actor": Place("model"), "game": Place("games")}, pipeline=Pipeline(deadline=120))


def run(flow, out, **how):
    flow.run("play", out=out, quiet=True, trajectories=8, trajectories_every=1, **how)
    rows = {(row["step"], str(row["key"])): (row["response_ids"], row["rewards"]) for row in trajectories(out)}
    return metrics(out), rows


def trajectories(out):
    return [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]


def same(found, expected):
    for here, there in zip(found[0], expected[0], strict=True):
        assert (here["reward"], here["length"]) == (there["reward"], there["length"])
        assert here["sure"] == pytest.approx(there["sure"], abs=1e-3)
    assert found[1] == expected[1] and len(found[1]) > 0


class Answers(fl.Env):
    """Two turns, between which half a second passes."""

    async def step(self, state, action):
        await asyncio.sleep(0.5)
        return state + 1, "", float(len(action)), state == 1

    def reset(self, row, seed):
        return 0, ""


def test_processes_tell_how_long_their_environments_took(cluster, tmp_path):
    found, _ = run(played(Answers), tmp_path / "ranks", runtime="ray", plan=plan())
    assert all(0.45 < line["game.rollout/environment_seconds"] < 20 for line in found)
    assert [line["game.rollout/turns"] for line in found] == [2, 2, 2]


class Meet(fl.Env):
    """One turn, which begins once both processes are there; its outcome is the process."""

    folder = ""

    def reset(self, row, seed):
        if self.folder:
            Path(self.folder, f"{os.getpid()}").touch()
            until = time.monotonic() + 60
            while len(os.listdir(self.folder)) < 2 and time.monotonic() < until:
                time.sleep(0.005)
        return 0, ""

    def step(self, state, action):
        return state, "", float(len(action)), f"{os.getpid()}"


def test_two_processes_share_the_batch_of_the_policy(cluster, tmp_path):
    """The engine makes fewer steps than for one process and then for the other; tokens are those of one process."""
    (tmp_path / "met").mkdir()
    cls = type("Meet", (Meet,), {"folder": str(tmp_path / "met")})
    found = run(played(cls, turn_tokens=TOKENS), tmp_path / "ranks", runtime="ray", plan=plan())
    same(found, run(played(Meet, turn_tokens=TOKENS), tmp_path / "local"))
    shares = []
    for step, line in enumerate(found[0]):
        lengths: dict[str, list[int]] = {}
        for row in trajectories(tmp_path / "ranks"):
            if row["step"] == step:
                lengths.setdefault(row["finish_reason"], []).append(len(row["response_ids"]))
        assert [len(rows) for rows in lengths.values()] == [4, 4], "each process plays half of the episodes"
        steps = sum(map(sum, lengths.values())) / line["game.rollout/decode_slots_used"] / 8
        shares.append(steps / sum(map(max, lengths.values())))
        assert shares[-1] > 0.5 - 1e-9
    assert min(shares) < 0.8, shares


class Kills(fl.Env):
    """Three turns; in one of step 1 it kills the process of the policy, once."""

    turns = 3
    run = ""

    def reset(self, row, seed):
        return 0, ""

    def step(self, state, action):
        ranks = os.path.join(self.run, "ranks.json")
        done = os.path.join(self.run, "killed")
        if self.run and state == 1 and not os.path.exists(done):
            said = json.loads(Path(ranks).read_text())
            Path(done).touch()
            os.kill(next(each["pid"] for each in said.values() if each["pool"] == "model"), signal.SIGKILL)
        return state + 1, "1", float(len(action)), state == 2


def test_a_policy_that_is_killed_answers_again(cluster, tmp_path):
    """It is started again, and the episodes are played as they would have been."""
    cls = type("Kills", (Kills,), {"run": str(tmp_path / "ranks")})
    found = run(played(cls), tmp_path / "ranks", runtime="ray", plan=plan())
    assert (tmp_path / "ranks" / "killed").exists()
    same(found, run(played(Kills), tmp_path / "local"))
    events = [json.loads(line) for line in (tmp_path / "ranks" / "events.jsonl").read_text().splitlines()]
    lost = [event for event in events if event["kind"] == "lost"]
    assert len(lost) == 1 and "pool 'model'" in lost[0]["text"]


class Waits(fl.Env):
    """Step k waits behind its first turn until version k is published, which comes of the update of the step before."""

    turns = 3
    folder = ""

    def reset(self, row, seed):
        return (int(row["number"]) // 2, 0), "1"

    def step(self, state, action):
        step, turn = state
        end = time.monotonic() + 60
        while turn == 0 and step and not Path(self.folder, f"version.{step}").exists():
            assert time.monotonic() < end, "the publish waits for the episodes"
            time.sleep(0.01)
        return (step, turn + 1), "1", float(len(action)), turn == 2


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_publishes_come_while_episodes_wait_and_those_of_two_steps_are_played_at_once(
    cluster, tmp_path, monkeypatch, processes
):
    install, steps = DistributedExecutor.install, 3

    def installed(executor, name, version, *weights, **how):
        moved = install(executor, name, version, *weights, **how)
        (tmp_path / f"version.{version}").touch()
        return moved

    monkeypatch.setattr(DistributedExecutor, "install", installed)
    flow = fl.Flow("play")
    actor = flow.worker(fl.Actor, module_of("stale_flow").MODEL, lr=1e-2, max_tokens=4, name="actor")
    game = flow.worker(type("WaitsThere", (Waits,), {"folder": str(tmp_path)}), name="game")

    @flow.program
    def play():
        rows = fl.data.rows([{"prompt": "2", "number": i} for i in range(2 * steps)], batch=2, shuffle=False)
        for step, batch in flow.steps(rows, steps):
            batch = fl.rl.group_advantages(game.rollout(batch, policy=actor, n=2))
            flow.log(step, actor.update(batch, loss=fl.rl.ppo_clip()), reward=batch.rewards.mean())

    pools = {name: Pool(name, processes=processes if name == "games" else 1) for name in ("train", "model", "games")}
    place = {"actor": {"train": Place("train"), "generate": Place("model")}, "game": Place("games")}
    pipeline = Pipeline(staleness=1, publish="interrupt", deadline=120)
    flow.run(
        "play",
        runtime="ray",
        out=tmp_path / "run",
        quiet=True,
        plan=Plan(pools, place, pipeline=pipeline),
        trajectories=4,
        trajectories_every=1,
    )
    found = {}
    for row in trajectories(tmp_path / "run"):
        mask, versions = row["response_mask"], row["versions"]
        sampled = [version for version, is_sampled in zip(versions, mask, strict=True) if is_sampled]
        assert sampled == sorted(sampled)
        found.setdefault(row["step"], set()).update(sampled)
    assert found[0] == {0} and all({step} < found[step] <= {step - 1, step} for step in range(1, steps))
    lags = [json.loads(line).get("lags") for line in (tmp_path / "run" / "traffic.jsonl").read_text().splitlines()]
    assert [each for each in lags if each] == [{"0": 2}, *[{"1": 2}] * (steps - 1)]
