"""Episodes that are played on ranks, of which one dies: those of a run that was left alone."""

from __future__ import annotations

import json
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from count_game import Count
from direct import run_direct
from flows import metrics, module_of

import flowrl as fl
from flowrl import rl
from flowrl.analysis.run_difference import compare_runs
from flowrl.environments import AgentEnvironment, reward
from flowrl.errors import RewardError
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.distributed.executor import DistributedExecutor
from flowrl.runtime.storage.digest_lines import read_begun
from flowrl.runtime.storage.replay_folder import prepare_replay
from flowrl.runtime.storage.replay_record import Replay
from flowrl.runtime.values.step_records import Interrupted

SPLIT = {"actor": {"train": Place("train"), "generate": Place("model")}, "game": Place("games")}


def flow(environment=Count):
    module = module_of("stale_flow")
    made = fl.Flow("play")
    actor = made.worker(fl.Actor, module.MODEL, lr=1e-2, max_tokens=4, name="actor")
    game = made.worker(environment, name="game")

    @made.program
    def play(steps: int = 3):
        for step, batch in made.steps(module.arithmetic.prompts(4), steps):
            batch = rl.group_advantages(game.rollout(batch, policy=actor, n=2))
            made.log(step, actor.update(batch, loss=rl.ppo_clip()), reward=batch.rewards.mean())

    return made


def plan(model=1, games=1):
    return Plan(
        {"train": "cpu", "model": Pool("model", processes=model), "games": Pool("games", processes=games)}, SPLIT
    )


def values(out):
    return [{name: line[name] for name in ("loss", "grad_norm", "reward", "response_length")} for line in metrics(out)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    flow().run(out=out, quiet=True)
    return values(out)


@pytest.mark.parametrize(("model", "games"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_ranks_play_what_one_process_plays(tmp_path, alone, model, games):
    ranks: Any = run_direct(flow(), plan(model, games), tmp_path / "run")[1].ranks
    for here, there in zip(values(tmp_path / "run"), alone, strict=True):
        assert (here["reward"], here["response_length"]) == (there["reward"], there["response_length"])
        assert here["loss"] == pytest.approx(there["loss"], abs=1e-4)
    methods = {method for _, method in ranks.calls}
    assert {"poll", "leave_policy"} <= methods and "respond" not in methods
    assert all(0.3 < line["game.rollout/decode_slots_used"] <= 1 for line in metrics(tmp_path / "run"))


@pytest.mark.parametrize("kill", [("poll", 0), ("poll", 7), ("leave_policy", 1), ("offers", 1), ("how", 2)])
def test_a_policy_that_dies_is_asked_again_to_the_same_bits(tmp_path, kill):
    run_direct(flow(), plan(), tmp_path / "calm")
    ranks: Any = run_direct(flow(), plan(), tmp_path / "run", kill=kill)[1].ranks
    assert ranks.restarted == [1], "the rank of the policy"
    assert values(tmp_path / "run") == values(tmp_path / "calm")
    ends = [json.loads((tmp_path / name / "run.json").read_text())["weights_digest"] for name in ("run", "calm")]
    assert ends[0] == ends[1]


class Breaks(Count):
    """Fails in the second turn of every other episode, by its seed."""

    def reset(self, row, seed):
        return (seed, 0), "1"

    def step(self, state, action):
        seed, turn = state
        if turn == 1 and seed % 2:
            raise OSError("down")
        return (seed, turn + 1), "1", float(len(action)), turn == 2


def breaking():
    module = module_of("stale_flow")
    made = fl.Flow("play")
    actor = made.worker(fl.Actor, module.MODEL, lr=1e-2, max_tokens=4, name="actor")
    game = made.worker(Breaks, name="game")

    @made.program
    def play(steps: int = 2):
        for step, batch in made.steps(module.arithmetic.prompts(4), steps):
            batch = game.rollout(batch, policy=actor, n=3, spare=1, on_error="mark", max_failed=1.0)
            ends = game.outcomes(batch)
            batch = rl.group_advantages(batch.filter(~batch.failed))
            made.log(step, actor.update(batch, loss=rl.ppo_clip()), ends, reward=batch.rewards.mean())

    return made


def test_the_same_episodes_take_the_place_of_those_that_failed_on_every_plan(tmp_path):
    """Groups are of those that finished; the rest, whose second episode failed too, is masked and in the ledger."""
    breaking().run(out=tmp_path / "alone", quiet=True)
    names = ("replaced", "finished", "failures", "infrastructure_failure")
    counts = [[line[f"game.rollout/{name}"] for name in names] for line in metrics(tmp_path / "alone")]
    assert all(0 < failed < replaced < 12 and failed + finished == 12 for replaced, finished, failed, _ in counts)
    assert [line["game/replaced"] for line in metrics(tmp_path / "alone")] == [count[0] for count in counts]
    dropped = json.loads((tmp_path / "alone" / "run.json").read_text())["ledger"]["play"]["rows"]["dropped"]
    assert sum(dropped.values()) == sum(count[2] for count in counts)
    for model, games in ((1, 1), (2, 2)):
        out = tmp_path / f"{model}{games}"
        run_direct(breaking(), plan(model, games), out)
        assert [[line[f"game.rollout/{name}"] for name in names] for line in metrics(out)] == counts
        for here, there in zip(metrics(out), metrics(tmp_path / "alone"), strict=True):
            numbers = [{n: v for n, v in line.items() if n.endswith(("loss", "grad_norm"))} for line in (here, there)]
            assert here["reward"] == there["reward"] and len(numbers[0]) >= 2
            assert numbers[0] == pytest.approx(numbers[1], abs=1e-3)


def test_a_run_of_replaced_episodes_goes_on_to_the_same_bits(tmp_path):
    whole = breaking().run(out=tmp_path / "whole", quiet=True)
    breaking().run(out=tmp_path / "parts", quiet=True, steps=1)
    assert breaking().run(out=tmp_path / "parts", quiet=True, resume=True).weights_digest == whole.weights_digest


def test_agents_on_a_rank_are_sampled_what_they_are_in_one_process(tmp_path):
    """Rewards are equal to the last digit, and all that was sampled is in the rows."""
    pytest.importorskip("h11", reason="the gateway needs the package h11")
    flow(Asks).run(out=tmp_path / "alone", quiet=True)
    run_direct(flow(Asks), plan(), tmp_path / "ranks")
    alone, ranks = ([line["reward"] for line in metrics(tmp_path / name)] for name in ("alone", "ranks"))
    assert alone == ranks and len(set(alone)) > 1
    assert all(line["game.rollout/delivered_fraction"] == 1 for line in metrics(tmp_path / "ranks"))


class Asks(AgentEnvironment):
    """Two turns of a conversation, as any client has them."""

    chat = False

    def rows(self):
        return []

    def agent(self, task):
        def ask(messages):
            body = json.dumps({"messages": messages}).encode()
            head = {"Authorization": f"Bearer {task.api_key}"}
            request = urllib.request.Request(f"{task.base_url}/chat/completions", body, head)
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]["message"]

        messages = [{"role": "user", "content": "1"}]
        messages += [ask(messages), {"role": "user", "content": "2"}]
        return "".join(message["content"] or "" for message in [*messages, ask(messages)])

    @reward()
    def length(self, state):
        return sum(ord(letter) for letter in state.result) / 100


@pytest.mark.parametrize(("games", "model"), [(1, 1), (2, 2)])
def test_turns_on_ranks_go_on_under_weights_that_are_published_meanwhile(tmp_path, monkeypatch, games, model):
    """As in one process: the publish of step k comes while step k is played, whose later turns are of the new version."""
    module, install, steps = module_of("straddle_flow"), DistributedExecutor.install, 3
    module.GATE.append(gate := module.Gate(steps))

    def installed(executor, name, version, *weights, **how):
        ranks: Any = executor.ranks
        engine = ranks.ranks[executor.servers[name].ranks[0]].workers[name, True].engine
        gate.before(version, engine)
        moved = install(executor, name, version, *weights, **how)
        gate.after(version, engine)
        return moved

    monkeypatch.setattr(DistributedExecutor, "install", installed)
    plan = module.plan(games=games, model=model)
    run_direct(module.make_flow(), plan, tmp_path / "run", parameters={"straddle": {"steps": steps}})
    module.hold(gate, "hf")
    traffic = [json.loads(line) for line in (tmp_path / "run" / "traffic.jsonl").read_text().splitlines()]
    assert [line["lags"] for line in traffic if "lags" in line] == [{"0": 2}, *[{"1": 2}] * (steps - 1)]
    rows = json.loads((tmp_path / "run" / "run.json").read_text())["ledger"]["straddle"]["rows"]
    assert rows["admitted"] == rows["trained"] == steps * module.PROMPTS * module.GROUP and not rows["live"]


@pytest.mark.parametrize("kill", [("poll", 1), ("how", 0), ("leave_policy", 0)])
def test_a_policy_that_dies_is_asked_again_while_steps_overlap(tmp_path, kill):
    """Nothing was published yet, so it is started again with the weights of the trainer; all rows are trained."""
    made = flow()
    overlapped = replace(plan(), pipeline=Pipeline(staleness=1, publish="interrupt"))
    ranks: Any = run_direct(made, overlapped, tmp_path / "run", kill=kill)[1].ranks
    assert ranks.restarted == [1], "the rank of the policy"
    rows = json.loads((tmp_path / "run" / "run.json").read_text())["ledger"]["play"]["rows"]
    assert rows["admitted"] == rows["trained"] == 3 * 4 * 2 and not rows["live"]


def beside_plan(games: int, model: int) -> Plan:
    pools = {"train": "cpu", "model": Pool("model", processes=model), "games": Pool("games", processes=games)}
    return Plan(pools, SPLIT, pipeline=Pipeline(staleness=1, publish="interrupt"))


def done_again(module, run: Path, out: Path, plan: Plan, until: int | None = None):
    """Do a run again, up to a step; returns how it differs."""
    begun, taken = read_begun(run, "beside")
    record = json.loads((run / "run.json").read_text())
    prepare_replay(run, out, record, Replay(str(run), 0, until, begun=begun, taken=taken), 0, 0)
    with suppress(Interrupted):
        run_direct(module.flow, plan, out, resume=True, allow_changed=True, save_models=False)
    steps = None if until is None else (0, until)
    return compare_runs(run, out, program="beside", steps=steps)


@pytest.mark.parametrize(("games", "model"), [(1, 1), (2, 2)])
def test_episodes_on_ranks_that_overlapped_are_done_again_bit_for_bit(tmp_path, monkeypatch, games, model):
    module, install = module_of("beside_flow"), DistributedExecutor.install
    monkeypatch.setitem(module.GATE, "staleness", 1)
    monkeypatch.setitem(module.GATE, "ready", 0)

    def installed(executor, name, version, *weights, **how):
        moved = install(executor, name, version, *weights, **how)
        module.GATE["ready"] = version
        return moved

    plan = beside_plan(games, model)
    with monkeypatch.context() as patched:
        patched.setattr(DistributedExecutor, "install", installed)
        run_direct(module.flow, plan, tmp_path / "run", save_models=False, trajectories=9, trajectories_every=1)
    lines = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    assert any(len(set(line["versions"]) - {0}) > 1 for line in lines), "under weights that are published meanwhile"
    monkeypatch.delitem(module.GATE, "staleness")
    monkeypatch.setattr(module.Counts, "step", None)  # nobody asks an environment
    found = done_again(module, tmp_path / "run", tmp_path / "again", plan)
    assert found.is_equal and found.calls
    assert done_again(module, tmp_path / "run", tmp_path / "some", plan, until=2).is_equal


def test_episodes_on_ranks_that_a_run_did_not_end_are_not_played_by_its_replay(tmp_path, monkeypatch):
    module = module_of("beside_flow")

    def down(env, state, action):
        if state[0] == 4 and state[1]:
            raise OSError("down")
        return step(env, state, action)

    step, plan = module.Counts.step, beside_plan(2, 1)
    with monkeypatch.context() as patched:
        patched.setattr(module.Counts, "step", down)
        with pytest.raises(RewardError, match="down"):
            run_direct(module.flow, plan, tmp_path / "run", save_models=False)
    until = max(line["step"] for line in metrics(tmp_path / "run"))
    monkeypatch.setattr(module.Counts, "step", None)
    assert until > 1 and done_again(module, tmp_path / "run", tmp_path / "again", plan, until).is_equal
