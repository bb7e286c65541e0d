"""Ranks that have an engine together: the driver asks them alike, the first one answers, and they are lost together.

The engine is `hf` on each of two ranks (`team_ranks.py`).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import direct
import pytest
from flows import events, module_of
from team_ranks import TOGETHER, Team, use_teams

from flowrl.analysis.run_difference import compare_runs
from flowrl.backends.continuous import ContinuousBatch
from flowrl.errors import RankLost, RunError
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.distributed.calls.streamed_calls import EngineOnRanks
from flowrl.runtime.distributed.rank_client import RankClient
from flowrl.runtime.distributed.rank_process.rank import Rank
from flowrl.runtime.distributed.ray.rank_actor import lane_of
from flowrl.runtime.storage.digest_lines import read_begun
from flowrl.runtime.storage.replay_folder import Replay, prepare_replay
from flowrl.schedule.events import AGAIN


@pytest.fixture(autouse=True)
def teams(monkeypatch):
    use_teams(monkeypatch)


def plan(mesh: str = "", least: int = 0, **pipeline) -> Plan:
    """One rank trains, and others sample: one by itself, or teams of two."""
    size = Mesh.of(mesh).size if mesh else 1
    pools = {
        "train": Pool("train", devices=(0,)),
        "rollout": Pool("rollout", devices=tuple(range(1, 1 + size)), least=least),
        "cpu": Pool("cpu", processes=1),
    }
    served = Place("rollout", Mesh.of(mesh), "vllm") if mesh else Place("rollout")
    place = {"actor": {"train": Place("train"), "generate": served}, "reward": Place("cpu")}
    return Plan(pools, place, cluster=Cluster.of(f"cpu:1x{1 + size}"), pipeline=Pipeline(**pipeline))


@pytest.fixture(scope="module")
def module():
    return module_of("long_rows_flow")


def run(module, out: Path, made: Plan, **how):
    """Returns the rows that the witness has seen, and the executor."""
    module.Witness.rows.clear()
    outcome, place = direct.run_direct(module.flow, made, out, save_models=False, **how)
    rows = {key: row for (_, key), row in module.Witness.rows.items()}
    assert outcome.status == "done" and len(rows) == module.STEPS * module.PROMPTS * module.GROUP
    return rows, place


@pytest.fixture(scope="module")
def calm(module, tmp_path_factory):
    """The rows of a run whose engine is on one rank."""
    return run(module, tmp_path_factory.mktemp("calm") / "run", plan(staleness=1, publish="interrupt"))[0]


def check_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for key, row in wanted.items():
        now = found[key]
        assert (now["response_ids"], now["finished"]) == (row["response_ids"], row["finished"])
        assert now["rollout_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=1e-5)
        assert now["versions"] == sorted(now["versions"])


@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        ("tp=2", {"staleness": 1, "publish": "interrupt"}),
        ("tp=2", {"staleness": 2, "chunks": 2}),
        ("dp=2,tp=2", {"staleness": 2, "publish": "interrupt"}),
        ("dp=2,tp=2", {"staleness": 2, "order": "window", "publish": "interrupt"}),
    ],
)
def test_both_ranks_of_a_team_are_asked_alike_and_the_first_one_answers(module, calm, tmp_path, mesh, pipeline):
    found, place = run(module, tmp_path / "run", plan(mesh, **pipeline))
    check_equal(found, calm)
    size = Mesh.of(mesh).size
    asked = {rank: [m for r, m in place.ranks.calls if r == rank and m in TOGETHER] for rank in range(1, 1 + size)}
    for rank in range(1, 1 + size, 2):
        assert asked[rank] == asked[rank + 1] and asked[rank].count("begin") > 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "timeline.jsonl").read_text().splitlines()]
    ranks = [{rank for rank, *_ in line["ranks"]} for line in lines if line["node"] == "actor.generate"]
    assert ranks and all({r + 1 if r % 2 else r - 1 for r in each} == each for each in ranks)
    assert place.client.traffic.payload == 0 and not events(tmp_path / "run", "lost")
    assert {lane_of(method, ()) for method in TOGETHER} == {"work"}, "each rank does them in the order of the driver"
    written = {rank for rank, method in place.ranks.calls if method == "weights_written"}
    assert not written & set(asked) and all("weights_written_in_turn" in methods for methods in asked.values())


@pytest.mark.parametrize(("rank", "count"), [(1, 9), (2, 9), (2, 25)])
def test_ranks_of_a_team_are_lost_together_and_their_rows_go_on(module, calm, tmp_path, rank, count):
    """With the weights that were kept aside, from the tokens that the first of them has told."""
    made = plan("tp=2", staleness=1, publish="interrupt", copies=2)
    found, place = run(module, tmp_path / "run", made, kill=("advance", count, rank))
    check_equal(found, calm)
    assert sorted(place.ranks.restarted) == [1, 2]
    assert [e["text"] for e in events(tmp_path / "run", "renewed")] == ["ranks 1, 2"]
    assert f"rank {rank} died during actor.generate" in events(tmp_path / "run", "lost")[0]["text"]
    kept = [event["text"] for event in events(tmp_path / "run", "kept")]
    assert kept and all("kept tokens: actor.generate of step" in text and "on rank 1" in text for text in kept)
    copies = [r for r, method in place.ranks.calls if method == "keep_copy"]
    assert copies and not {1, 2} & set(copies), "those of both are on a rank that is not lost with them"


@pytest.mark.parametrize(("rank", "count"), [(1, 9), (4, 9), (4, 25)])
def test_a_team_that_is_lost_leaves_the_other_one_alone(module, calm, tmp_path, rank, count):
    """It gets its weights from the other team, and its rows go on from what was told of them."""
    made = plan("dp=2,tp=2", staleness=1, publish="interrupt")
    found, place = run(module, tmp_path / "run", made, kill=("advance", count, rank))
    check_equal(found, calm)
    team, first = ([1, 2], 1) if rank < 3 else ([3, 4], 3)
    assert sorted(place.ranks.restarted) == team
    assert [e["text"] for e in events(tmp_path / "run", "renewed")] == [f"ranks {team[0]}, {team[1]}"]
    kept = [event["text"] for event in events(tmp_path / "run", "kept")]
    assert kept and all(text.endswith(f"on rank {first}") for text in kept)
    opened = [r for r, method in place.ranks.calls if method == "join_team"]
    assert sorted(opened) == sorted([1, 2, 3, 4, *team]), "a process group of each team, and again of the lost one"


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_team_that_is_lost_in_a_whole_call_does_its_own_part_again(module, tmp_path, monkeypatch, rank):
    wanted, _ = run(module, tmp_path / "calm", plan("dp=2,tp=2"))
    asked, send = [], direct.Direct.send

    def dies(ranks, at, method, *said):
        if method == "run" and said[0].title == "actor.generate":
            asked.append(at)
            if asked.count(at) == 2 and at == rank:
                ranks.dead.add(at)
        return send(ranks, at, method, *said)

    monkeypatch.setattr(direct.Direct, "send", dies)
    found, place = run(module, tmp_path / "run", plan("dp=2,tp=2"))
    assert found == wanted
    team = [1, 2] if rank < 3 else [3, 4]
    assert sorted(place.ranks.restarted) == team and not events(tmp_path / "run", "recovered")
    assert Counter(asked) == {r: module.STEPS + (r in team) for r in (1, 2, 3, 4)}


S_1 = {"staleness": 1, "publish": "interrupt"}


@pytest.mark.parametrize(
    ("pipeline", "kill"), [(S_1, ("advance", 9, 4)), (S_1, ("advance", 9, 1)), ({}, ("run", 1, 3))]
)
def test_a_run_goes_on_without_a_team_that_is_lost_for_good(module, tmp_path, pipeline, kill):
    """Also with the one of them that could be started again: it cannot compute without the other."""
    made = plan("dp=2,tp=2", **pipeline)
    wanted, _ = run(module, tmp_path / "calm", made)
    found, place = run(module, tmp_path / "run", made, kill=kill, homeless={kill[2]})
    check_equal(found, wanted)
    gone, left = ((1, 2), (3, 4)) if kill[2] < 3 else ((3, 4), (1, 2))
    assert place.client.pools["rollout"] == left and not events(tmp_path / "run", "recovered")
    said = f"pool 'rollout' goes on with 2 ranks: ranks {gone[0]}, {gone[1]} could not be started again within 120 s"
    assert [event["text"] for event in events(tmp_path / "run", "resized")] == [said]
    assert all(event["text"].endswith(f"on rank {left[0]}") for event in events(tmp_path / "run", "kept"))


def test_a_stand_in_that_is_lost_in_the_same_call_begins_again_with_its_team(module, calm, tmp_path, monkeypatch):
    """A team is gone for good in a call, and the one that stands in for it is lost once it has answered for it."""
    advance, seen, begun, send = EngineOnRanks.advance, [], Counter(), RankClient.send

    def dies(engine, what):
        client = engine.client
        for call in list(engine.calls.values()) if not seen and client.stand_in(3) != 3 else ():
            part = call.parts.get(3)
            if part is not None and part.answer is not None and not call.has_answers:
                seen.append((set(part.beside), client.lineage.copy_of(part.rank_call.keep)))
                client.link.dead.add(1)
                break
        return advance(engine, what)

    def sent(client, method, calls):
        if method == "begin" and seen:
            begun.update(map(client.stand_in, calls))
        return send(client, method, calls)

    monkeypatch.setattr(EngineOnRanks, "advance", dies)
    monkeypatch.setattr(RankClient, "send", sent)
    made = plan("dp=2,tp=2", copies=2, **S_1)
    found, place = run(module, tmp_path / "run", made, kill=("advance", 9, 4), homeless={4})
    check_equal(found, calm)
    ((beside, copy),) = seen
    assert beside == {4} and copy not in (1, 2), "a copy is no good where it is lost with the rows"
    assert begun[1] == begun[2] > 0 and sorted(place.ranks.restarted)[:2] == [1, 2]
    assert not events(tmp_path / "run", "recovered")


@pytest.mark.parametrize("pipeline", [S_1, {}])
def test_two_ranks_that_come_are_a_team(module, tmp_path, pipeline):
    made = plan("dp=2,tp=2", **pipeline)
    wanted, _ = run(module, tmp_path / "calm", made)
    kill = ("advance" if pipeline else "run", 3 if pipeline else 1, 4)
    found, place = run(module, tmp_path / "run", made, kill=kill, homeless={4}, room=1, coming=2)
    check_equal(found, wanted)
    assert place.client.pools["rollout"] == (1, 2, 6, 7)
    said = [event["text"] for event in events(tmp_path / "run", "resized")]
    assert said[1:] == ["pool 'rollout' has all its ranks: ranks 6, 7 have come"]
    done = Counter(place.ranks.calls)
    assert done[6, "begin" if pipeline else "run"] == done[7, "begin" if pipeline else "run"] > 0


def test_a_pool_begins_with_one_team_and_takes_up_another(module, tmp_path):
    wanted, _ = run(module, tmp_path / "calm", plan("dp=2,tp=2", **S_1))
    how = {"absent": {3, 4}, "room": 2, "coming": 2}
    found, place = run(module, tmp_path / "run", plan("dp=2,tp=2", least=2, **S_1), **how)
    check_equal(found, wanted)
    assert place.client.pools["rollout"] == (1, 2, 6, 7)
    assert [event["text"] for event in events(tmp_path / "run", "resized")] == [
        "pool 'rollout' begins with 2 of 4 ranks",
        "pool 'rollout' has all its ranks: ranks 6, 7 have come",
    ]


def test_one_that_comes_alone_does_not_take_part(module, tmp_path):
    made = plan("dp=2,tp=2", **S_1)
    _, place = run(module, tmp_path / "run", made, kill=("advance", 3, 4), homeless={4}, room=1)
    assert place.client.pools["rollout"] == (1, 2) and len(events(tmp_path / "run", "resized")) == 1
    assert (6, "open") not in place.ranks.calls


def test_a_team_that_fails_as_it_takes_part_is_given_up(module, tmp_path, monkeypatch):
    opened = Rank.open

    def fails(rank, spec):
        if rank.number == 7:
            raise RuntimeError("there is no memory")
        return opened(rank, spec)

    monkeypatch.setattr(Rank, "open", fails)
    made = plan("dp=2,tp=2", **S_1)
    _, place = run(module, tmp_path / "run", made, kill=("advance", 3, 4), homeless={4}, room=1, coming=2)
    assert place.client.pools["rollout"] == (1, 2)
    assert any(
        "ranks 6, 7 came to pool 'rollout', and could not take part: " in event["text"]
        and "there is no memory" in event["text"]
        for event in events(tmp_path / "run", "warning")
    )


@pytest.mark.parametrize(("mesh", "joined"), [("dp=2,tp=2", [(2, 0), (2, 1)] * 2), ("tp=2", [(2, 0), (2, 1)])])
def test_each_team_has_a_process_group_of_its_own(module, tmp_path, monkeypatch, mesh, joined):
    asked, join = [], Rank.join_team
    monkeypatch.setattr(Rank, "join_team", lambda rank, *said: asked.append((rank.number, *said)) or join(rank, *said))
    run(module, tmp_path / "run", plan(mesh))
    asked.sort()
    assert [(size, number) for _, size, number, *_ in asked] == joined
    meetings = [meeting for *_, meeting, _ in asked]
    assert meetings[::2] == meetings[1::2] and len(set(meetings)) == len(joined) // 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("order", ["fifo", "window"])
@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_rows_that_stand_still_for_a_publish_that_is_lost_are_broken_off(module, tmp_path, monkeypatch, mesh, order):
    """The rank that trains dies as it moves weights: those that the rows wait for do not come."""
    wait, step, running = RankClient.wait, ContinuousBatch.step, []
    monkeypatch.setattr(ContinuousBatch, "step", lambda batch: time.sleep(5e-3) or step(batch))

    def dies(client, sent, what, on_death=None):
        found = wait(client, sent, what, on_death)
        if what.startswith("publish of") and on_death is not None and not running:
            if not (count := len(client.link.ranks[1].workers["actor", True].engine.running())):
                return found  # no rows run as the weights come
            running.append(count)
            client.link.dead.add(0)
            on_death()
            raise RankLost(f"rank 0 died during {what}.", ranks=[0])
        return found

    monkeypatch.setattr(RankClient, "wait", dies)
    made = plan(mesh, staleness=2 if order == "window" else 1, order=order, publish="interrupt")
    _, place = run(module, tmp_path / "run", made)
    assert running and 0 in place.ranks.restarted and events(tmp_path / "run", "recovered")
    assert "rank 0 died during publish of actor version" in events(tmp_path / "run", "lost")[0]["text"]


def test_rows_that_ranks_of_a_team_had_not_alike_end_the_run(module, tmp_path, monkeypatch):
    """As a rank that has drawn other tokens says it."""
    agree, asked = Team.any_rank, []

    def differ(team, place, said):
        found = agree(team, place, said)
        asked.append(place)
        if len(asked) > 40:
            raise RunError("The ranks that split 'random llama' have drawn other tokens for the same rows.")
        return found

    monkeypatch.setattr(Team, "any_rank", differ)
    with pytest.raises(RunError, match="have drawn other tokens for the same rows"):
        run(module, tmp_path / "run", plan("tp=2", staleness=1, publish="interrupt"))


@pytest.mark.parametrize("kill", [None, ("advance", 25, 2)])
def test_a_run_of_teams_is_done_again_bit_for_bit(module, tmp_path, kill):
    """Each team makes as many steps between two starts as it made; rows begin again where they did, on both ranks."""
    mesh = "tp=2" if kill else "dp=2,tp=2"
    made = plan(mesh, staleness=2, publish="interrupt", copies=2)
    run(module, tmp_path / "run", made, kill=kill)
    begun, taken = read_begun(tmp_path / "run", "long_rows")
    assert len(begun) > 6 and any(each.number == AGAIN for each in begun) == (kill is not None)
    replay = Replay(str(tmp_path / "run"), 0, begun=begun, taken=taken)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    prepare_replay(tmp_path / "run", tmp_path / "again", record, replay, 0, 0)
    run(module, tmp_path / "again", made, resume=True, allow_changed=True)
    found = compare_runs(tmp_path / "run", tmp_path / "again")
    assert found.is_equal and found.calls
    again, _ = read_begun(tmp_path / "again", "long_rows")
    least = min(len(begun), len(again))  # publishes of the last steps are in no record
    assert again[:least] == begun[:least]
