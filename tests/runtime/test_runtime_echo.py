"""An engine that only generates, added by one row of the table and one module: echo_engine.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import echo_engine
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "algorithms"))
import flowrl as fl
from flowrl import rl
from flowrl.errors import FlowError, WorkerError
from flowrl.placement.backends import BACKENDS
from flowrl.placement.plan.plan import Plan
from flowrl.workers.engine import generates, has_weights, trains
from flowrl.workers.model_options import Build
from tasks import arithmetic

PLAN = "pools: {main: {device: cpu}}\nplace:\n  actor: {generate: {pool: main, engine: echo}}\n"


def flow_of(**how):
    """Programs that sample, train and read."""
    flow = fl.Flow("echo")
    actor = flow.worker(fl.Actor, model=arithmetic.MODEL, name="actor", **how)
    reward = flow.worker(fl.FunctionReward, lambda prompt, response: float(response == prompt[:4]), name="reward")

    @flow.program
    def echo(steps: int = 2):
        for step, batch in flow.steps(arithmetic.prompts(3), steps):
            batch = reward.score(actor.generate(batch, n=2, max_tokens=4))
            flow.log(step, reward=batch.rewards.mean())

    @flow.program
    def train(steps: int = 2):
        for step, batch in flow.steps(arithmetic.prompts(3), steps):
            batch = rl.group_advantages(reward.score(actor.generate(batch, n=2, max_tokens=4)))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))

    @flow.program
    def read(steps: int = 2):
        for step, batch in flow.steps(arithmetic.prompts(3), steps):
            flow.log(step, entropy=actor.entropies(actor.generate(batch, n=2, max_tokens=4)).entropies.mean())

    return flow


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """A file with a plan of this text, on a table that has the row."""
    monkeypatch.setitem(BACKENDS, "echo", echo_engine.ROW)

    def written(text):
        (tmp_path / "echo.yaml").write_text(text)
        return tmp_path / "echo.yaml"

    return written


def test_it_runs_where_it_is_placed(plan, tmp_path):
    flow_of(lr=None).run("echo", plan=plan(PLAN), out=tmp_path / "run", quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    assert len(rows) >= 4
    assert all(row["response"] == row["prompt"][:4] and row["rewards"] == 1.0 for row in rows)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["plan"]["place"]["actor"]["generate"]["engine"] == "echo"


def test_it_is_simulated_and_checked_like_the_others(plan):
    assert not flow_of(lr=None).check("echo").errors
    study = flow_of(lr=None).study(Plan.load(plan(PLAN)), "echo")
    assert study.simulate(2).steps == 2


@pytest.mark.parametrize(
    ("program", "text", "what", "line", "fix"),
    [
        ("train", PLAN, "actor: echo only generates, and the program updates it", 3, "Add train: {backend: hf"),
        ("read", PLAN, "actor: echo only generates, and the program calls more than its generate", 3, "Add train"),
        (
            "train",
            PLAN.replace("generate:", "train: {pool: a}, generate:").replace("main: {d", "a: {device: cpu}, main: {d"),
            "actor.generate: echo never takes new weights, and the program updates them",
            3,
            "Write engine: hf",
        ),
        (
            "train",
            "pools: {main: {device: cpu}}\nplace:\n  actor: {pool: main, backend: echo}\n",
            "'actor': there is no backend 'echo'",
            3,
            "An engine generates: write generate: {engine: echo}",
        ),
    ],
)
def test_it_is_refused_where_it_cannot_train(plan, tmp_path, program, text, what, line, fix):
    with pytest.raises(FlowError) as info:
        flow_of().run(program, plan=plan(text), out=tmp_path / "run", quiet=True)
    (error,) = getattr(info.value, "errors", [info.value])
    assert what in error.what and error.fix.startswith(fix)
    assert error.at.file.endswith("echo.yaml") and error.at.line == line


def test_it_fakes_nothing():
    engine = echo_engine.open_engine(Build(arithmetic.MODEL))
    assert generates(engine) and not has_weights(engine) and not trains(engine)
    offered = {name for name in dir(engine) if not name.startswith("_")}
    assert offered == {"tokenizer", "positions", "generate"}
    actor = fl.Actor(model=arithmetic.MODEL, lr=None)
    actor._engine, actor.name = engine, "actor"
    assert actor.digest() is None and not actor.save_model("nowhere")
    with pytest.raises(WorkerError, match="The engine of 'actor' does not read or train"):
        actor.training_engine()
    with pytest.raises(WorkerError, match="The engine of 'actor' does not have weights"):
        actor.stage()
