"""Calls on the virtual clock: episodes of open steps share their policy's engine, whether lengths of rows vary or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.analysis.row_lengths import Tokens
from flowrl.analysis.study import Study
from flowrl.cli.arguments.script import load_script
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.continuous_batch import Turns
from flowrl.placement.cost.cost_model import Costs, GivenCosts
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.schedule.simulation import Simulation

GIGPO = str(Path(__file__).parents[2] / "algorithms" / "gigpo.py")
STEPS = 24
GIVEN = GivenCosts({"game.rollout": 6.0, "actor.update": 2.0, "actor.publish": 0.25})


@pytest.fixture(scope="module")
def flow():
    flow = load_script(GIGPO)
    flow.use_model("actor", "qwen3-8b")
    return flow


def flown(flow, staleness: int, publish: str, tokens: Tokens | None = None, costs: Costs | None = None) -> Simulation:
    pools = {
        "train": Pool("train", devices=tuple(range(4))),
        "rollout": Pool("rollout", devices=tuple(range(4, 8))),
        "cpu": Pool("cpu", processes=8),
    }
    train, generate = Place("train", Mesh.of("fsdp=4"), "fsdp2"), Place("rollout", Mesh.of("dp=4"), "vllm")
    place = {"actor": {"train": train, "generate": generate}, "game": Place("cpu")}
    plan = Plan(pools, place, Cluster.of("h100-80:1x8"), Pipeline(staleness=staleness, publish=publish))
    study: Study = flow.study(plan, "gigpo", tokens=tokens or Tokens(), costs=costs, steps=STEPS)
    return study.simulate(STEPS)


@pytest.mark.parametrize("publish", ["interrupt", "continue"])
@pytest.mark.parametrize("staleness", [1, 4])
def test_episodes_of_given_seconds_take_the_engine_in_turn(flow, staleness, publish):
    """As many rows run at once as a call has: however many steps are open, one takes what its episodes and its publish take."""
    found = flown(flow, staleness, publish, costs=GIVEN)
    assert found.step_seconds == pytest.approx(6.25, rel=0.01)
    assert found.makespan == pytest.approx(6 * STEPS + 0.25 * (STEPS - 1) + 2.25, rel=0.01)
    assert flown(flow, staleness, "drain", costs=GIVEN).step_seconds == pytest.approx(6.25, rel=0.01)


@pytest.mark.parametrize("publish", ["interrupt", "continue"])
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_rows_of_one_length_share_an_engine_as_rows_do_whose_lengths_hardly_vary(flow, staleness, publish):
    one = flown(flow, staleness, publish, Tokens(256, "fixed", (1500.0,)))
    about = flown(flow, staleness, publish, Tokens(256, "lognormal", (1500.0, 0.02, 3000.0)))
    assert one.step_seconds == pytest.approx(about.step_seconds, rel=0.05)
    assert one.makespan == pytest.approx(about.makespan, rel=0.05) and one.lags == about.lags


def test_alone_in_their_engine_they_take_what_they_are_priced_at(flow):
    """With staleness 0 no other step is there, and with more the first step has the engine for itself until it ends."""
    tokens = Tokens(256, "fixed", (1500.0,))
    alone, beside = flown(flow, 0, "drain", tokens), flown(flow, 4, "interrupt", tokens)
    first = [next(b for b in found.bars if b.node == "game.rollout") for found in (alone, beside)]
    assert first[1].end - first[1].start == pytest.approx(first[0].end - first[0].start, rel=0.01)


def rollout(found: Simulation) -> float:
    bar = next(b for b in found.bars if b.node == "game.rollout")
    return bar.end - bar.start


def test_alone_in_their_engine_episodes_of_equal_turns_wait_for_their_environments_together(flow):
    """The engine is empty meanwhile, and as fast as before when they come back."""
    one, turns = Tokens(256, "fixed", (1500.0,)), Turns(4, 1.5)
    plain, waits = (flown(flow, 0, "drain", replace(one, turns=each)) for each in (None, turns))
    assert rollout(waits) == pytest.approx(rollout(plain) + turns.waits, rel=1e-3)
    assert waits.step_seconds == pytest.approx(plain.step_seconds + 4.5, rel=1e-3)
    assert rollout(flown(flow, 0, "drain", replace(one, turns=Turns(4, 0.0)))) == pytest.approx(
        rollout(plain), rel=1e-3
    )


def test_the_seconds_of_environments_are_hidden_by_the_episodes_of_other_steps(flow):
    """As much of them as there are steps ahead: others have the slots that a row has no need of."""
    tokens = Tokens(256, "lognormal", (1500.0, 0.5, 6000.0))
    slow = replace(tokens, turns=Turns(6, 8.0))
    more = {s: flown(flow, s, "interrupt", slow).step_seconds for s in (0, 1, 4)}
    least = {s: flown(flow, s, "interrupt", tokens).step_seconds for s in (0, 1, 4)}
    assert more[0] > least[0] + 35 and more[0] > more[1] > more[4] >= least[4]
    assert more[1] - least[1] < (more[0] - least[0]) / 1.5


def test_what_is_taken_of_environments_is_said(flow):
    said = [flown(flow, 0, "drain", Tokens(256, turns=each)).notes for each in (None, Turns(4, 1.5))]
    assert (
        "game.rollout: episodes of one turn, whose environment takes no time (assumed; see --episode-turns)" in said[0]
    )
    assert "game.rollout: 4 turns in an episode, and 1.5 s of its environment between two (said)" in said[1]
    assert not any("turn" in note for note in flown(flow, 0, "drain", costs=GIVEN).notes), "it is in what was given"
