"""Episodes on processes of Ray: their calls meet in the batch of the policy's process, which may die meanwhile."""

from __future__ import annotations

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
