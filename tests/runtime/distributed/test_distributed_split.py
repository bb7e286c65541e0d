"""Episodes whose policy is split over ranks: rows and weights of a run without, on ranks that are asked alike.

The engine is `hf` on each of two ranks (`team_ranks.py`).
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from dataclasses import replace

import direct
import pytest
import straddle_flow
import torch
from count_game import Count
from flows import events, metrics, module_of
from team_ranks import use_teams

import flowrl as fl
from flowrl import rl
from flowrl.backends.continuous import ContinuousBatch
from flowrl.errors import EngineLost, RunError
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.distributed.executor import DistributedExecutor
from flowrl.runtime.distributed.rank_process.rank import Rank
from flowrl.runtime.distributed.rank_process.remote_stream import RemoteStream

#: What the engine of each rank was asked, and with which error one fails: (rank, after so many steps of all its engines).
ASKED, FAILS = defaultdict(list), {}


def watch(number, engine):
    """Have an engine note what it is asked, and fail where a test says so."""
    submit, step, abort = engine.submit, engine.step, engine.abort
    generate, written = engine.generate, engine.weights_written
    pause, resume = engine.pause, engine.resume
    asked, lost = ASKED[number], []

    def noted_submit(request):
        asked.append(("submit", request.prompts.to_list(), request.seeds.tolist()))
        return submit(request)

    def noted_step():
        at, error = FAILS.get(number, (None, None))
        asked.append(("step", len(engine.running())))
        if lost or (at is not None and sum(what == "step" for what, *_ in asked) > at):
            FAILS.pop(number, None)
            lost.append(error or lost[0])
            raise lost[0]
        return step()

    def noted_abort(call, rows=None):
        found = abort(call, rows)
        asked.append(("abort", [(row.row, row.ids) for row in found]))
        return found

    def noted_generate(*said):
        asked.append(("generate", len(engine.running())))
        return generate(*said)

    def noted_written():
        asked.append(("written", len(engine.running())))
        return written()

    def noted_pause():
        asked.append(("pause", len(engine.running())))
        pause()

    def noted_resume(*said, **how):
        asked.append(("resume", *said, *how.values()))
        resume(*said, **how)

    engine.submit, engine.step, engine.abort = noted_submit, noted_step, noted_abort
    engine.generate, engine.weights_written = noted_generate, noted_written
    engine.pause, engine.resume = noted_pause, noted_resume


@pytest.fixture(autouse=True)
def teams(monkeypatch):
    ASKED.clear()
    FAILS.clear()
    use_teams(monkeypatch, watch)


def make_flow(asks=""):
    """A flow that trains on episodes; ``asks``: the same engine answers prompts ``before`` or ``after`` these."""
    module = module_of("stale_flow")
    made = fl.Flow("play")
    actor = made.worker(fl.Actor, module.MODEL, lr=1e-2, max_tokens=4, name="actor")
    game = made.worker(Count, name="game")

    def answer():
        asked = made.take(module.arithmetic.heldout(8, repeat=True))
        return float(actor.generate(asked).response_mask.row_sum().mean())

    @made.program
    def play(steps: int = 3):
        for step, batch in made.steps(module.arithmetic.prompts(4), steps):
            lengths = [answer() for _ in range(asks == "before")]
            batch = rl.group_advantages(game.rollout(batch, policy=actor, n=2))
            length = sum([*lengths, *(answer() for _ in range(asks == "after"))])
            made.log(step, actor.update(batch, loss=rl.ppo_clip()), reward=batch.rewards.mean(), length=length)

    return made


def plan(mesh: str = "", replicas: int = 1, games: int = 1, at: str = "games", **pipeline) -> Plan:
    """One rank trains, others sample: whole models, or teams of two."""
    size = Mesh.of(mesh).size if mesh else replicas
    pools = {
        "train": Pool("train", devices=(0,)),
        "rollout": Pool("rollout", devices=tuple(range(1, 1 + size))),
        "games": Pool("games", processes=games),
    }
    served = Place("rollout", Mesh.of(mesh or f"dp={replicas}"), "vllm" if mesh else "hf")
    place = {"actor": {"train": Place("train"), "generate": served}, "game": Place(at)}
    return Plan(pools, place, cluster=Cluster.of(f"cpu:1x{1 + size}"), pipeline=Pipeline(**pipeline))


def run(out, made: Plan, flow=None, **how):
    """The rows that were played, in the order of the run, the numbers of its steps and the executor."""
    settings = {"save_models": False, "trajectories": 64, "trajectories_every": 1}
    outcome, place = direct.run_direct(flow or make_flow(), made, out, **settings, **how)
    assert outcome.status == "done"
    lines = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    what = ("response_ids", "rollout_logprobs", "rewards", "versions")
    rows = {(line["step"], *line["key"]): [line.get(name) for name in what] for line in lines}
    assert len(rows) == 3 * 4 * 2
    names = ("loss", "grad_norm", "reward", "length", "game.rollout/decode_slots_used")
    return rows, [{name: line[name] for name in names} for line in metrics(out)], place


def check_alike(ranks: int):
    """Both ranks of each team were asked the same, in the same order."""
    assert sorted(ASKED) == list(range(1, 1 + ranks)) and all(ASKED.values())
    for first in range(1, 1 + ranks, 2):
        assert ASKED[first] == ASKED[first + 1]


def check_none_left():
    """No row of an episode is in the batch of another call, nor as weights are written."""
    found = [asked for each in ASKED.values() for asked in each if asked[0] in ("generate", "written")]
    assert found and all(rows == 0 for _, rows in found)


@pytest.mark.parametrize(
    ("mesh", "replicas", "asks"),
    [("tp=2", 1, "before"), ("tp=2", 1, "after"), ("dp=2,tp=2", 2, "")],
)
def test_a_run_is_that_of_whole_models_bit_for_bit(tmp_path, mesh, replicas, asks):
    flow = make_flow(asks)
    wanted = run(tmp_path / "whole", plan(replicas=replicas), flow)
    found = run(tmp_path / "split", plan(mesh), flow)
    assert found[:2] == wanted[:2] and found[1][0]["game.rollout/decode_slots_used"] > 0.3
    check_alike(Mesh.of(mesh).size)
    said = {rank for rank, method in found[2].ranks.calls if method == "mirror"}
    assert said == set(range(2, 1 + Mesh.of(mesh).size, 2)), "the others of each team alone"
    assert {what for what, *_ in ASKED[1]} == {"submit", "step", "written", *(["generate"] if asks else [])}
    check_none_left()
    firsts = range(1, 1 + Mesh.of(mesh).size, 2)
    asked = [rank for rank, method in found[2].ranks.calls if method == "hold_rows"]
    assert asked and set(asked) == set(firsts), "before weights come"
    ends = [json.loads((tmp_path / name / "run.json").read_text())["weights_digest"] for name in ("whole", "split")]
    assert ends[0] == ends[1]
    assert found[2].client.traffic.payload == 0 and not events(tmp_path / "split", "lost")


@pytest.mark.parametrize(("mesh", "at", "pipeline"), [
    ("tp=2", "games", {"staleness": 2}),
    ("dp=2,tp=2", "games", {}),
    ("tp=2", "rollout", {}),
])  # fmt: skip
def test_processes_that_play_at_once_get_the_rows_of_one(tmp_path, mesh, at, pipeline):
    """Those of the policy's own ranks too, which ask the first one. The rows beside a row are others."""
    wanted = run(tmp_path / "whole", plan(games=1, **pipeline))
    found = run(tmp_path / "split", plan(mesh, games=2, at=at, **pipeline))
    assert found[0].keys() == wanted[0].keys()
    for key, (ids, logprobs, rewards, versions) in wanted[0].items():
        assert [found[0][key][place] for place in (0, 2, 3)] == [ids, rewards, versions]
        assert found[0][key][1] == pytest.approx(logprobs, abs=1e-4)
    check_alike(Mesh.of(mesh).size)


@pytest.mark.parametrize("kill", [("mirror", 5, 2), ("mirror", 0, 2), ("poll", 4, 1), ("offers", 1, 1)])
def test_ranks_that_die_as_they_are_asked_are_started_again_together(tmp_path, kill):
    wanted = run(tmp_path / "calm", plan("tp=2"))
    found = run(tmp_path / "run", plan("tp=2"), kill=kill)
    assert found[:2] == wanted[:2] and found[2].ranks.restarted == [1, 2]
    assert f"rank {kill[2]} died during game.rollout" in events(tmp_path / "run", "lost")[0]["text"]


@pytest.mark.parametrize(("mesh", "rank", "restarted"), [("", 1, [1]), ("tp=2", 1, [1, 2]), ("tp=2", 2, [1, 2])])
def test_an_engine_whose_process_ends_is_named_and_started_again(tmp_path, monkeypatch, mesh, rank, restarted):
    """Its rank is lost, whole or split, and not the one of the environment, which says so."""
    if not mesh:
        import flowrl.backends

        open_engine, numbers = flowrl.backends.open_engine, iter([0, 1])

        def open_one(name, build):
            engine = open_engine(name, build)
            watch(next(numbers, 9), engine)
            return engine

        monkeypatch.setattr(flowrl.backends, "open_engine", open_one)
    wanted = run(tmp_path / "calm", plan())
    if not mesh:
        numbers = iter([0, 1])
    FAILS[rank] = len([what for what, *_ in ASKED[rank] if what == "step"]) + 6, EngineLost("it is gone, with -9.")
    found = run(tmp_path / "run", plan(mesh))
    assert found[:2] == wanted[:2] and found[2].ranks.restarted == restarted
    (lost,) = events(tmp_path / "run", "lost")
    assert f"rank {rank} of pool 'rollout' has lost its engine during game.rollout of step" in lost["text"]
    assert "it is gone, with -9" in lost["text"]


@pytest.mark.parametrize("rank", [1, 2])
def test_an_engine_that_fails_ends_the_run_with_its_reason(tmp_path, rank):
    FAILS[rank] = 5, RunError("no more memory.")
    with pytest.raises(RunError, match=r"no more memory\.") as failed:
        run(tmp_path / "run", plan("tp=2"))
    assert rank == 1 or "actor on rank 2: no more memory." in str(failed.value)


def test_tokens_that_differ_end_the_run(tmp_path, monkeypatch):
    def change(number, engine):
        step = engine.step
        if number == 2:
            engine.step = lambda: [replace(row, ids=(*row.ids[:-1], row.ids[-1] ^ 1)) for row in step()]

    use_teams(monkeypatch, change)
    with pytest.raises(RunError, match="The ranks that split 'actor' have drawn other tokens for the same rows"):
        run(tmp_path / "run", plan("tp=2"))


@pytest.mark.parametrize("asks", ["before", "after"])
def test_an_environment_that_dies_leaves_no_rows_to_what_comes_next(tmp_path, monkeypatch, asks):
    """It is started again and plays anew; what it had asked for is in the batch until a publish or a call."""
    tell, leave, died = RemoteStream._tell, RemoteStream.leave, []

    def dies(stream, engine, *, waits):
        if died or not engine.queued or engine.queued[0].number < 2:
            return tell(stream, engine, waits=waits)
        died.append(stream)
        asked = engine.queued[0].request
        longer = replace(asked, sampling=replace(asked.sampling, max_tokens=60))  # than all that is played anew
        engine.queued[:] = [replace(engine.queued[0], request=longer)]
        tell(stream, engine, waits=waits)
        stream._peers.dead.add(3)
        raise SystemExit("killed")

    wanted = run(tmp_path / "calm", plan("tp=2"), make_flow(asks))
    ASKED.clear()
    monkeypatch.setattr(RemoteStream, "_tell", dies)
    monkeypatch.setattr(RemoteStream, "leave", lambda stream, calls: [] if stream in died else leave(stream, calls))
    found = run(tmp_path / "run", plan("tp=2"), make_flow(asks))
    assert died and found[2].ranks.restarted == [3]
    assert [each[0] for each in found[0].values()] == [each[0] for each in wanted[0].values()]
    check_alike(2)
    assert any(what == "abort" and rows for what, rows, *_ in ASKED[1])
    check_none_left()


class Amid(straddle_flow.Gate):
    """Has episodes of step k wait behind their first turn until version k is about to come, in the midst of the next."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.ready = defaultdict(threading.Event)

    def turn(self, step: int, turn: int) -> None:
        if turn == 0 and step:
            assert self.ready[step].wait(straddle_flow.WAIT), (
                f"version {step} was not trained while step {step} is played"
            )


@pytest.mark.parametrize("publish", ["interrupt", "continue"])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_episodes_go_on_over_publishes(tmp_path, monkeypatch, mesh, publish):
    """Each token is drawn under the weights that it names, and all ranks of a team stop and go on alike."""
    steps, install = 5, DistributedExecutor.install
    straddle_flow.GATE.append(gate := Amid(steps))

    def slow(number, engine):
        step = engine.step
        engine.step = lambda: time.sleep(5e-3) or step()
        watch(number, engine)

    def installed(executor, name, version, *weights, **how):
        engine = executor.ranks.ranks[executor.servers[name].ranks[0]].workers[name, True].engine
        gate.ready[version].set()
        end = time.monotonic() + 0.5
        while not engine.running() and time.monotonic() < end:
            time.sleep(1e-3)
        gate.before(version, engine)
        moved = install(executor, name, version, *weights, **how)
        gate.after(version, engine)
        return moved

    use_teams(monkeypatch, slow)
    monkeypatch.setattr(DistributedExecutor, "install", installed)
    monkeypatch.setattr(ContinuousBatch, "end_of", lambda batch, row: "length" if len(row.ids) >= row.limit else None)
    made = plan(mesh, staleness=1, publish=publish)
    made = replace(made, pools={**made.pools, "keep": "cpu"}, place={**made.place, "keep": Place("keep")})
    outcome, place = direct.run_direct(
        straddle_flow.make_flow(), made, tmp_path / "run", parameters={"straddle": {"steps": steps}}, save_models=False
    )
    assert outcome.status == "done" and place.client.traffic.payload == 0
    check_alike(Mesh.of(mesh).size)
    paused = [each[1] for each in ASKED[1] if each[0] == "pause"]
    assert len(paused) >= steps and any(paused), "rows ran as weights came"
    assert sorted(gate.kept) == list(range(steps))
    mixed = 0
    for step, rows in gate.kept.items():
        for versions, turns in zip(rows.versions.to_list(), rows.turn_ids.to_list(), strict=True):
            drawn = [(turn, version) for turn, version in zip(turns, versions, strict=True) if turn >= 0]
            assert drawn == sorted(drawn) and {version for _, version in drawn} <= {step - 1, step}
            mixed += len({version for _, version in drawn}) > 1
        for version in {step - 1, step} if publish == "interrupt" else ():
            mine = rows.response_mask.values & (rows.versions.values == version)
            fresh = straddle_flow.fresh_logprobs(rows, gate.weights[max(version, 0)], "hf")
            torch.testing.assert_close(rows.rollout_logprobs.values[mine], fresh[mine], atol=1e-4, rtol=0)
    assert mixed
    rows = json.loads((tmp_path / "run" / "run.json").read_text())["ledger"]["straddle"]["rows"]
    assert rows["admitted"] == rows["trained"] == steps * straddle_flow.PROMPTS * straddle_flow.GROUP


@pytest.mark.parametrize(
    "kill",
    [("mirror", 9, 2), ("poll", 4, 1), ("hold_rows", 1, 1), *(("weights_written_in_turn", 2, rank) for rank in (1, 2))],
)
def test_ranks_that_die_as_episodes_go_on_over_publishes_are_started_again(tmp_path, kill):
    made = plan("tp=2", staleness=1, publish="interrupt")
    outcome, place = direct.run_direct(make_flow(), made, tmp_path / "run", kill=kill, save_models=False)
    assert outcome.status == "done" and place.ranks.restarted[:2] == [1, 2]
    rows = json.loads((tmp_path / "run" / "run.json").read_text())["ledger"]["play"]["rows"]
    assert rows["admitted"] == rows["trained"] == 3 * 4 * 2 and not rows["live"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_a_publish_that_fails_while_episodes_wait_for_it_ends_the_run(tmp_path, monkeypatch, mesh):
    """Their rows stand still for weights that do not come."""
    written, count = Rank.weights_written, []

    def fails(rank, key, version, *said, **how):
        if key[1]:
            count.append(version)
        if key[1] and version == 2:
            raise RunError("no memory for the weights.", fix="Nothing.")
        return written(rank, key, version, *said, **how)

    monkeypatch.setattr(Rank, "weights_written", fails)
    with pytest.raises(RunError, match=r"no memory for the weights\."):
        run(tmp_path / "run", plan(mesh, staleness=1, publish="interrupt"))
    assert 2 in count


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kill", [("run", 1, 0), ("sums", 1, 0), ("sums", 2, 0), ("sums", 4, 0)])
@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_after_going_back_episodes_are_played_again(tmp_path, mesh, kill):
    """The trainer is lost as it is trained, or in a publish that episodes wait for: all forget them."""
    made = plan(mesh, staleness=1, publish="interrupt")
    outcome, place = direct.run_direct(make_flow(), made, tmp_path / "run", kill=kill, save_models=False)
    assert outcome.status == "done" and 0 in place.ranks.restarted
    rows = json.loads((tmp_path / "run" / "run.json").read_text())["ledger"]["play"]["rows"]
    assert rows["admitted"] == rows["trained"] == 3 * 4 * 2 and not rows["live"]
