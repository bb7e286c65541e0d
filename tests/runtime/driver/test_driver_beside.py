"""Episodes of several steps are played beside each other, and go on under the weights that are published meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import table_engine
from flows import module_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl import rl
from flowrl.placement.backends import BACKENDS
from flowrl.placement.plan.plan import Pipeline, Place, Plan
from flowrl.runtime.local.executor import LocalExecutor

STEPS = 4


def lines(out: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def straddle(monkeypatch):
    """The flow, with its gate told of each publish."""
    monkeypatch.setitem(BACKENDS, "table", table_engine.ROW)
    module = module_of("straddle_flow")
    module.GATE.append(module.Gate(STEPS))
    install = LocalExecutor.install

    def installed(executor, name, version, *weights, **how):
        engine = executor.open_server(name).engine
        module.GATE[-1].before(version, engine)
        moved = install(executor, name, version, *weights, **how)
        module.GATE[-1].after(version, engine)
        return moved

    monkeypatch.setattr(LocalExecutor, "install", installed)
    return module


@pytest.mark.parametrize("publish", ["interrupt", "continue"])
@pytest.mark.parametrize("engine", ["hf", "table"])
def test_later_turns_are_those_of_the_next_weights_and_earlier_ones_stay(straddle, tmp_path, engine, publish):
    out = tmp_path / "run"
    plan = straddle.plan(engine, publish)
    straddle.make_flow().run(out=out, plan=plan, quiet=True, runtime="local", save_models=False, steps=STEPS)
    straddle.hold(straddle.GATE[-1], engine)
    assert [line["lags"] for line in lines(out, "traffic") if "lags" in line] == [{"0": 2}, *[{"1": 2}] * (STEPS - 1)]
    rows = json.loads((out / "run.json").read_text())["ledger"]["straddle"]["rows"]
    assert rows["admitted"] == rows["trained"] == STEPS * straddle.PROMPTS * straddle.GROUP
    assert not rows["live"] and not rows["dropped"]


#: Pools of the trained copy, the one that generates, and the environment.
PLACEMENTS = [
    ("train", "rollout", "games"),
    ("train", "rollout", "train"),
    ("train", "rollout", "rollout"),
    ("train", "train", "games"),
    ("train", "train", "train"),
]


class Counts(fl.Env):
    turns = 3

    def reset(self, row, seed):
        return (0, 1 + seed % 3), "1"

    def step(self, state, action):
        turn, turns = state
        return (turn + 1, turns), "1", float(len(action) % 3), turn + 1 == turns


def flow_of_games() -> fl.Flow:
    flow = fl.Flow("games")
    model = module_of("straddle_flow").MODEL
    actor = flow.worker(fl.Actor, model, lr=1e-3, max_tokens=12, name="actor")
    game = flow.worker(Counts, name="game")

    @flow.program
    def games(
        steps: int = 4, prompts: int = 2, every: int = 1, look: bool = False, more: bool = False, mix: bool = False
    ):
        source = fl.data.rows([{"prompt": str(i)} for i in range(10)], batch=prompts)
        for step, batch in flow.steps(source, steps):
            rows = game.rollout(batch, policy=actor, n=2)
            if more:
                rows = rows.concat(game.rollout(flow.more(1), policy=actor, n=2))
            rows = rl.group_advantages(rows)
            if mix:
                flow.log(step, plain=actor.generate(batch, n=2).versions.row_mean().min())
            if step % every == 0:
                flow.log(step, actor.update(rows, loss=rl.ppo_clip()))
            if look:
                held = game.rollout(flow.take(fl.data.rows([{"prompt": "3"}], batch=1)), policy=actor, greedy=True)
                flow.log(step, at=held.versions.row_sum().sum() / held.response_mask.row_sum().sum())

    return flow


CASES = (
    st.sampled_from(PLACEMENTS),
    st.sampled_from(["drain", "interrupt", "continue"]),
    st.integers(0, 3),
    st.integers(1, 2),
    st.fixed_dictionaries(
        {
            "steps": st.integers(3, 6),
            "prompts": st.integers(1, 3),
            "every": st.integers(1, 2),
            "look": st.booleans(),
            "more": st.booleans(),
            "mix": st.booleans(),
        }
    ),
)


def hold(pools, publish, staleness, chunks, program):
    """Run a program; hold its lag to the bound, its ledger to what was asked for, and evaluations to their weights."""
    train, rollout, games = pools
    if publish == "continue" and train == rollout:
        publish = "interrupt"  # a turn of generating ends before a publish
    place = {"train": Place(train, backend="table"), "generate": Place(rollout, backend="table")}
    pipeline = Pipeline(staleness=staleness, publish=publish, chunks=chunks)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setitem(BACKENDS, "table", table_engine.ROW)
        plan = Plan(dict.fromkeys(pools, "cpu"), {"actor": place, "game": Place(games)}, pipeline=pipeline)
        how = {"quiet": True, "save_models": False, "runtime": "local", "parameters": {"games": program}}
        flow_of_games().run("games", out=Path(folder) / "run", plan=plan, **how)
        traffic, told = lines(Path(folder) / "run", "traffic"), lines(Path(folder) / "run", "metrics")
        rows = json.loads((Path(folder) / "run" / "run.json").read_text())["ledger"]["games"]["rows"]
    found = [int(lag) for line in traffic for lag in line.get("lags", {})]
    assert found and min(found) >= 0 and max(found) <= staleness
    assert rows["admitted"] == rows["trained"] + sum(rows["dropped"].values()) and not rows["live"]
    assert rows["admitted"] == program["steps"] * 2 * (program["prompts"] + program["more"])
    if program["look"]:  # an evaluation sees every update before it
        assert [line["at"] for line in told] == [step // program["every"] + 1 for step in range(program["steps"])]


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate], database=None)
@given(*CASES)
def test_programs_of_episodes_hold_their_bounds_under_any_plan(pools, publish, staleness, chunks, program):
    hold(pools, publish, staleness, chunks, program)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(max_examples=200, deadline=None, phases=[Phase.generate], database=None)
@given(*CASES)
def test_two_hundred_programs_of_episodes_hold_their_bounds(pools, publish, staleness, chunks, program):
    hold(pools, publish, staleness, chunks, program)
