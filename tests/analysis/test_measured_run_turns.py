"""Turns of episodes and seconds of environments of a run: as its metrics have them, by call, whatever else is there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.analysis.measured_run import turns_of_run, with_turns_of
from flowrl.analysis.row_lengths import Tokens
from flowrl.cli.arguments.script import load_script
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.continuous_batch import Turns
from flowrl.placement.cost.cost_model import GivenCosts
from flowrl.placement.plan.plan import Place, Plan, Pool

GIGPO = str(Path(__file__).parents[2] / "algorithms" / "gigpo.py")


def write(folder: Path, *steps: dict, program="gigpo"):
    """A folder whose metrics have lines of these numbers."""
    with (folder / "metrics.jsonl").open("a") as file:
        for step, numbers in enumerate(steps):
            file.write(json.dumps({"program": program, "step": step, "seconds": 2.0, **numbers}) + "\n")
    return folder


def said(turns, seconds=None, call="game.rollout"):
    return {f"{call}/turns": turns} | ({} if seconds is None else {f"{call}/environment_seconds": seconds})


def test_they_are_those_of_the_metrics(tmp_path):
    write(tmp_path, said(4, 1.5), said(4, 1.5), said(4, 1.5))
    assert turns_of_run(tmp_path, "gigpo") == {"game.rollout": Turns(4, 1.5)}


@pytest.mark.parametrize(("steps", "turns"), [
    ([(3.4, 1.5)], Turns(3, 1.8)),  # 2.4 waits of 1.5 s
    ([(3.5, 1.0)], Turns(4, 0.833333)),
    ([(1.25, 2.0)], Turns(2, 0.5)),  # a quarter of the episodes have a second turn
    ([(2, 1.0), (4, 3.0)], Turns(3, 2.5)),  # four waits of 10 s in all
    ([(3, 1.0), (1, None)], Turns(2, 1.0)),
    ([(3, 0.0)], Turns(3, 0.0)),
    ([(1, None), (1, None)], Turns(1, 0.0)),
    ([(0.5, None)], Turns(1, 0.0)),  # half of them failed before they began
])  # fmt: skip
def test_an_episode_waits_as_long_in_all_as_an_average_one(tmp_path, steps, turns):
    write(tmp_path, *(said(*step) for step in steps))
    assert turns_of_run(tmp_path, "gigpo") == {"game.rollout": turns}


def test_each_call_of_each_program_has_its_own(tmp_path):
    write(tmp_path, said(4, 1.5) | said(2, 9.0, "game.rollout#2"), said(2, 0.5, "other.rollout"))
    write(tmp_path, said(7, 7.0), program="evaluate")
    found = turns_of_run(tmp_path, "gigpo")
    assert found == {"game.rollout": Turns(4, 1.5), "game.rollout#2": Turns(2, 9.0), "other.rollout": Turns(2, 0.5)}
    assert turns_of_run(tmp_path, "evaluate") == {"game.rollout": Turns(7, 7.0)}
    tokens = with_turns_of(tmp_path, "gigpo", Tokens(256))
    wanted = {"game.rollout": 4, "game.rollout#2": 2, "game.rollout#3": 4, "other.rollout": 2}
    for node, count in wanted.items():
        turns = tokens.turns_of(node, node.partition("#")[0])
        assert turns is not None and turns.count == count, node
    assert tokens.turns_of("third.rollout", "third.rollout") is None
    assert replace(tokens, turns=Turns(9, 9.0)).turns_of("game.rollout", "game.rollout") == Turns(9, 9.0)


@pytest.mark.parametrize("odd", [
    said(4),  # of an older run, or one whose episodes were all known when it was resumed
    {"game.rollout/environment_seconds": 2.0},
    said("four", 1.0), said(4, "1 s"), said(None, 1.0), said(4, None), said(True, 1.0), said(4, False),
    said(-4, 1.0), said(4, -1.0), said(float("nan"), 1.0), said(4, float("inf")), said([4], 1.0),
    {"turns": 4, "environment_seconds": 1.0},  # what a program may log
])  # fmt: skip
def test_what_says_nothing_is_left_out(tmp_path, odd):
    assert turns_of_run(write(tmp_path, odd), "gigpo") == {}
    tokens = Tokens(256, "fixed", (8.0,))
    assert with_turns_of(tmp_path, "gigpo", tokens) is tokens
    assert turns_of_run(write(tmp_path, said(4, 1.5)), "gigpo") == {"game.rollout": Turns(4, 1.5)}


def test_a_line_that_is_cut_off_or_a_folder_without_metrics_says_nothing(tmp_path):
    assert turns_of_run(tmp_path, "gigpo") == {}
    write(tmp_path, said(4, 1.5))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"program": "gigpo", "game.rollout/turns": 9, "game.rollout/environment_sec')
    assert turns_of_run(tmp_path, "gigpo") == {"game.rollout": Turns(4, 1.5)}


@pytest.fixture(scope="module")
def flow():
    flow = load_script(GIGPO)
    flow.use_model("actor", "qwen3-8b")
    return flow


def flown(flow, tokens, costs=None):
    pools = {"gpus": Pool("gpus", devices=tuple(range(8))), "cpu": Pool("cpu", processes=8)}
    actor = {"train": Place("gpus", Mesh.of("fsdp=8"), "fsdp2"), "generate": Place("gpus", Mesh.of("dp=8"), "vllm")}
    plan = Plan(pools, {"actor": actor, "game": Place("cpu")}, Cluster.of("h100-80:1x8"))
    return flow.study(plan, "gigpo", tokens=tokens, costs=costs, steps=6).simulate(6)


def test_a_simulation_has_them_as_if_they_were_said_and_says_where_they_are_from(flow, tmp_path):
    tokens = Tokens(256, "fixed", (1500.0,))
    found = flown(flow, with_turns_of(write(tmp_path, said(4, 1.5)), "gigpo", tokens))
    wanted = flown(flow, replace(tokens, turns=Turns(4, 1.5)))
    assert found.bars == wanted.bars and found.step_seconds == wanted.step_seconds
    assert found.step_seconds == pytest.approx(flown(flow, tokens).step_seconds + 4.5, rel=1e-3)
    told = "game.rollout: 4 turns in an episode, and 1.5 s of its environment between two"
    assert f"{told} (measured: {tmp_path})" in found.notes and f"{told} (said)" in wanted.notes


def test_episodes_of_one_turn_are_said_to_be_measured(flow, tmp_path):
    found = flown(flow, with_turns_of(write(tmp_path, said(1)), "gigpo", Tokens(256)))
    assert f"game.rollout: episodes of one turn (measured: {tmp_path})" in found.notes
    assert not any("--episode-turns" in note for note in found.notes)


def test_nothing_is_said_of_them_where_seconds_are_given(flow):
    given = GivenCosts({"game.rollout": 6.0, "actor.update": 2.0})
    assert not any("turn" in note for note in flown(flow, Tokens(256), given).notes)
