"""Pools that have fewer ranks than the plan says: replicas that are lost for good, and those that come later."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace

import pytest
from direct import LOST, Direct, run_direct
from flows import module_of

import flowrl as fl
from flowrl.errors import RankLost
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.distributed.calls.pending_calls import CallOnRanks
from flowrl.runtime.distributed.open_groups import OpenGroups
from flowrl.runtime.distributed.protocol import Failed
from flowrl.runtime.driver.monitoring.wait_story import wait_story
from flowrl.runtime.storage.wait_record import RESTART

THREE = Plan({"a": "cpu", "b": Pool("b", processes=3)}, {"learner": {"train": Place("a"), "generate": Place("b")}})


@pytest.fixture
def shares(monkeypatch):
    """Which rows each rank was told to generate: (step, rank, keys), in the order of the calls."""
    told, real = [], Direct.send

    def send(self, rank, method, *args):
        if method == "run" and args[0].title.endswith(".generate"):
            told.append((args[0].info.step, rank, next(iter(args[0].arguments.values())).keys))
        return real(self, rank, method, *args)

    monkeypatch.setattr(Direct, "send", send)
    return told


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The folder of a run that nobody disturbs."""
    out = tmp_path_factory.mktemp("calm")
    run_direct(module_of("replicas_flow").trained, THREE, out, "learn", trajectories=8, trajectories_every=1)
    return out


def events(out, *kinds):
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [(line["kind"], line["text"]) for line in lines if not kinds or line["kind"] in kinds]


def tokens(out):
    lines = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    return {(line["step"], tuple(line["key"])): line["response_ids"] for line in lines}


def record(out):
    return json.loads((out / "run.json").read_text())


@pytest.mark.parametrize(
    "kill",
    [("run", 3, 2), ("run", 0, 1), ("sums", 2, 3), ("weights_written", 1, 1)],
    ids=str,
)
def test_a_replica_that_is_lost_for_good_leaves_the_others_its_rows(shares, calm, tmp_path, kill):
    lost = kill[2]
    out = tmp_path / "run"
    flow = module_of("replicas_flow").trained
    _, place = run_direct(flow, THREE, out, "learn", kill=kill, homeless={lost}, trajectories=8, trajectories_every=1)
    left = tuple(rank for rank in (1, 2, 3) if rank != lost)
    assert place.client.pools == {"a": (0,), "b": left}
    assert isinstance(place.ranks, Direct) and not place.ranks.restarted
    kinds = [kind for kind, _ in events(out, "lost", "renewed", "resized", "recovered")]
    assert kinds == ["lost", "resized"]
    said = f"pool 'b' goes on with 2 ranks: rank {lost} could not be started again within 120 s"
    assert events(out, "resized") == [("resized", said)]
    assert record(out)["replicas"] == {"b": {"ranks": 2, "planned": 3}} and record(out)["plan"]["pools"]["b"] == {
        "processes": 3
    }
    assert "Pool 'b' has 2 of 3 ranks." in wait_story(out).text()
    assert tokens(out) == tokens(calm), "tokens do not depend on who makes a row"
    assert record(out)["ledger"] == record(calm)["ledger"]
    last = [one for one in shares if one[0] == 5]
    assert {rank for _, rank, _ in last} == set(left) and sum(len(keys) for *_, keys in last) == 8


ASKED: Counter[tuple[int, ...]] = Counter()


class Judge(fl.Worker):
    """Notes in ``ASKED`` how often it was asked for each row."""

    @fl.op(reads="y", adds="r: f32[]", cost="external", pieces="row")
    def judge(self, batch):
        ASKED.update(batch.keys)
        return {"r": batch.y.values * 2}


def judged_run(out, processes, **how):
    """A run of three steps in which so many processes judge nine rows."""
    ASKED.clear()
    small, flow = module_of("small_flow"), fl.Flow("judged")
    counter, judge = flow.worker(small.Counter, name="counter"), flow.worker(Judge, name="judge")

    @flow.program
    def judged(steps: int = 3):
        for step, batch in flow.steps(small.Numbers(9), steps):
            batch = judge.judge(counter.values(batch))
            flow.log(step, counter.update(batch), reward=batch.r.mean())

    plan = Plan({"a": "cpu", "b": Pool("b", processes=processes)}, {"counter": Place("a"), "judge": Place("b")})
    return run_direct(flow, plan, out, "judged", **how)[1]


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("of", ["judge.judge", "batch.mean"], ids=["before it is heard", "with its rows"])
def test_rows_that_a_lost_replica_had_answered_are_asked_for_by_nobody_again(monkeypatch, tmp_path, processes, of):
    """The others had read its journal before it wrote them. Each goes on with the rows that it had."""
    told, real, lost = [], Direct.send, set()

    def send(self, rank, method, *args):
        if method != "run" or args[0].info.step != 1:
            return real(self, rank, method, *args)
        if args[0].title == "judge.judge":
            told.append((rank, set(next(iter(args[0].arguments.values())).keys)))
        if args[0].title == of == "batch.mean" and not lost:  # which needs rows of rank 1
            lost.add(1)
            self.dead.add(1)
        answer = real(self, rank, method, *args)
        if args[0].title == of == "judge.judge" and rank == 1 and not lost:
            lost.add(1)
            self.dead.add(1)
            return LOST
        return answer

    monkeypatch.setattr(Direct, "send", send)
    place = judged_run(tmp_path, processes, homeless={1})
    assert lost and place.client.pools["b"] == tuple(range(2, processes + 1))
    assert [kind for kind, _ in events(tmp_path, "lost", "renewed", "resized", "recovered")] == ["lost", "resized"]
    assert len(ASKED) == 27 and set(ASKED.values()) == {1}
    own, again = dict(told[:processes]), told[processes:]
    if of == "judge.judge":
        assert {rank: keys for rank, keys in again if rank != 2} == {r: own[r] for r in range(3, processes + 1)}
    assert dict(again)[2] >= own[1]


@pytest.mark.parametrize("kill", [("open", 0, 2), ("run", 2, 0)], ids=str)
def test_a_run_that_goes_back_opens_its_workers_on_who_is_left(monkeypatch, calm, tmp_path, kill):
    """A replica that dies as it is opened, or beside the rank that trains."""
    real = Direct.wait

    def wait(self, *args):
        if 0 in self.dead:
            self.dead.add(2)
        return real(self, *args)

    monkeypatch.setattr(Direct, "wait", wait)
    flow, how = module_of("replicas_flow").trained, {"trajectories": 8, "trajectories_every": 1}
    _, place = run_direct(flow, THREE, tmp_path, "learn", kill=kill, homeless={2}, checkpoint_every=2, **how)
    assert place.client.pools["b"] == (1, 3)
    kinds = [kind for kind, _ in events(tmp_path, "lost", "renewed", "resized", "recovered")]
    assert kinds == ["lost", "resized", "recovered"]
    assert tokens(tmp_path) == tokens(calm) and record(tmp_path)["ledger"] == record(calm)["ledger"]


@pytest.mark.parametrize("kill", [("run", 1, 0), ("run", 1, 2)], ids=["going back", "in its step"])
def test_who_asks_meanwhile_is_told_of_a_restart(monkeypatch, tmp_path, kill):
    """It may take a minute, in which no call is under way."""
    told, open_groups = [], OpenGroups.restart_ranks

    def restart_ranks(self, ranks, within=None):
        real = self.ranks.restart

        def restart(*args):
            told.extend(self.client.asked())
            return real(*args)

        with monkeypatch.context() as patched:
            patched.setattr(self.ranks, "restart", restart)
            return open_groups(self, ranks, within)

    monkeypatch.setattr(OpenGroups, "restart_ranks", restart_ranks)
    _, place = run_direct(module_of("replicas_flow").trained, THREE, tmp_path, "learn", kill=kill)
    assert [(asked.what, asked.ranks) for asked in told if asked.what == RESTART] == [(RESTART, (kill[2],))]
    assert not place.client.asked()


def test_what_a_rank_was_asked_as_it_died_is_told_in_words(tmp_path):
    run_direct(module_of("replicas_flow").trained, THREE, tmp_path, "learn", kill=("let_go", 1, 0))
    [(_, lost)] = events(tmp_path, "lost")
    assert "died during learner: forgetting weights that are published" in lost


def test_the_last_one_is_waited_for_and_then_the_run_ends(tmp_path):
    plan = replace(THREE, pools={"a": "cpu", "b": Pool("b", processes=1)})
    flow = module_of("replicas_flow").trained
    with pytest.raises(RankLost, match="rank 1 has not answered starting ranks in time"):
        run_direct(flow, plan, tmp_path, "learn", kill=("run", 1, 1), homeless={1})
    assert not events(tmp_path, "resized") and record(tmp_path)["status"] == "failed"


@pytest.mark.parametrize(("copies", "way"), [(1, ["lost", "resized", "lost", "recovered"]), (2, ["lost", "resized"])])
def test_rows_that_a_lost_replica_had_come_from_their_copies(monkeypatch, tmp_path, copies, way):
    """At staleness 1 a replica is lost that has rows of older weights: who stands in for it takes them from a copy."""
    plan = replace(THREE, pipeline=Pipeline(staleness=1, copies=copies))
    flow, how = module_of("replicas_flow").trained, {"trajectories": 8, "trajectories_every": 1}
    run_direct(flow, plan, tmp_path / "whole", "learn", **how)
    real_send, real_begin, die = Direct.send, CallOnRanks.__init__, [(3, 1)]

    def send(self, rank, method, *args):
        if method == "run" and args[0].title.endswith(".generate") and (args[0].info.step, rank) in die:
            die.clear()
            self.dead.add(rank)
        return real_send(self, rank, method, *args)

    def begin(self, client, call, group, arguments):
        if call.title == "reward.score" and call.step == 2:  # its rows are not looked at before that rank is lost
            until = time.monotonic() + 60
            while die and time.monotonic() < until:
                time.sleep(0.01)
        real_begin(self, client, call, group, arguments)

    monkeypatch.setattr(Direct, "send", send)
    monkeypatch.setattr(CallOnRanks, "__init__", begin)
    out = tmp_path / "run"
    _, place = run_direct(flow, plan, out, "learn", homeless={1}, checkpoint_every=100, **how)
    assert place.client.pools["b"] == (2, 3)
    assert [kind for kind, _ in events(out, "lost", "renewed", "resized", "recovered")] == way
    assert tokens(out) == tokens(tmp_path / "whole")


def test_tokens_of_hf_are_those_of_all_replicas(tmp_path):
    """Also one step apart, where the rank that trains works meanwhile."""
    module = module_of("overlap_flow")
    plan = pool_of_hf(staleness=1, copies=2)
    how = {"parameters": {"overlap": {"steps": 4}}, "save_models": False, "trajectories": 8, "trajectories_every": 1}
    run_direct(module.flow, plan, tmp_path / "whole", **how)
    for number, kill in enumerate((("run", 2, 1), ("weights_written", 2, 2))):
        out = tmp_path / str(number)
        _, place = run_direct(module.flow, plan, out, kill=kill, homeless={kill[2]}, **how)
        assert len(place.client.pools["rollout"]) == 1
        assert len(events(out, "resized")) == 1 and not events(out, "recovered")
        assert tokens(out) == tokens(tmp_path / "whole")


INTERRUPT, WINDOW = {"publish": "interrupt"}, {"order": "window", "window": 1.0}


@pytest.mark.parametrize(
    ("pipeline", "kill"),
    [
        (INTERRUPT, ("advance", 2, 1)),
        (WINDOW, ("advance", 7, 2)),
        pytest.param(INTERRUPT, ("begin", 2, 1), marks=pytest.mark.nightly),
        pytest.param(INTERRUPT, ("advance", 7, 2), marks=pytest.mark.nightly),
        pytest.param(WINDOW, ("begin", 2, 1), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_rows_that_leave_one_by_one_go_on_elsewhere(tmp_path, pipeline, kill):
    """The unfinished rows of the lost rank are sampled by another one, beside its own of the same call."""
    module = module_of("overlap_flow")
    module.Witness.rows.clear()
    plan = pool_of_hf(staleness=1, **pipeline)
    how = {"parameters": {"overlap": {"steps": 4}}, "save_models": False}
    _, place = run_direct(module.flow, plan, tmp_path, kill=kill, homeless={kill[2]}, **how)
    assert len(place.client.pools["rollout"]) == 1
    assert len(events(tmp_path, "resized")) == 1 and not events(tmp_path, "recovered")
    trained = sorted({key[0] for _, batch in module.Witness.rows for key in batch.keys})
    assert trained == list(range(len(trained))), "every prompt is trained on"
    rows = record(tmp_path)["ledger"]["overlap"]["rows"]
    assert rows["admitted"] == rows["trained"] + rows["live"] and not rows["dropped"], rows


@pytest.mark.parametrize("kill", [("run", 3, 2), ("weights_written", 2, 1)], ids=str)
def test_a_rank_that_comes_back_has_rows_again(shares, calm, tmp_path, kill):
    """Under a number of its own, from the publish on before which it came."""
    flow, lost, how = module_of("replicas_flow").trained, kill[2], {"trajectories": 8, "trajectories_every": 1}
    _, place = run_direct(flow, THREE, tmp_path, "learn", kill=kill, homeless={lost}, room=1, **how)
    assert place.client.pools["b"] == (*(rank for rank in (1, 2, 3) if rank != lost), 4)
    said = [text for _, text in events(tmp_path, "resized")]
    assert len(said) == 2 and said[1] == "pool 'b' has all its ranks: rank 4 has come"
    assert record(tmp_path)["replicas"] == {} and "Pool" not in wait_story(tmp_path).text()
    assert tokens(tmp_path) == tokens(calm) and record(tmp_path)["ledger"] == record(calm)["ledger"]
    last = {rank: len(keys) for step, rank, keys in shares if step == 5}
    assert set(last) == set(place.client.pools["b"]) and sum(last.values()) == 8


LEAST = replace(THREE, pools={"a": "cpu", "b": Pool("b", processes=3, least=1)})


def test_a_pool_begins_with_the_least_and_takes_up_who_comes(shares, calm, tmp_path):
    flow, how = module_of("replicas_flow").trained, {"trajectories": 8, "trajectories_every": 1}
    _, place = run_direct(flow, LEAST, tmp_path, "learn", absent={2, 3}, room=3, **how)
    assert place.client.pools["b"] == (1, 4)
    assert [text for _, text in events(tmp_path, "resized")] == [
        "pool 'b' begins with 1 of 3 ranks",
        "pool 'b' has 2 of 3 ranks: rank 4 has come",
    ]
    assert record(tmp_path)["replicas"] == {"b": {"ranks": 2, "planned": 3}}
    assert "Pool 'b' has 2 of 3 ranks." in wait_story(tmp_path).text()
    assert tokens(tmp_path) == tokens(calm)
    by_step = [{rank for at, rank, _ in shares if at == step} for step in range(6)]
    assert by_step[0] == {1} and by_step[-1] == {1, 4}


def test_a_plan_that_wants_all_waits_for_a_lost_one(tmp_path):
    plan = replace(THREE, pools={"a": "cpu", "b": Pool("b", processes=3, least=3)})
    with pytest.raises(RankLost, match="rank 2 has not answered starting ranks in time"):
        run_direct(module_of("replicas_flow").trained, plan, tmp_path, "learn", kill=("run", 1, 2), homeless={2})
    assert not events(tmp_path, "resized")


def test_one_that_fails_as_it_takes_part_is_given_up(calm, monkeypatch, tmp_path):
    real = Direct.send

    def send(self, rank, method, *args):
        if rank == 4 and method == "open":
            return Failed(None, "there is no memory", "")
        return real(self, rank, method, *args)

    monkeypatch.setattr(Direct, "send", send)
    flow, how = module_of("replicas_flow").trained, {"trajectories": 8, "trajectories_every": 1}
    _, place = run_direct(flow, LEAST, tmp_path, "learn", absent={3}, room=2, **how)
    assert place.client.pools["b"] == (1, 2)
    assert any(
        "rank 4 came to pool 'b', and could not take part: " in said and "there is no memory" in said
        for _, said in events(tmp_path, "warning")
    )
    assert tokens(tmp_path) == tokens(calm)


def test_a_resumed_run_begins_with_who_is_there(calm, tmp_path):
    flow, how = module_of("replicas_flow").trained, {"trajectories": 8, "trajectories_every": 1}
    part = {"checkpoint_every": 2, "parameters": {"learn": {"steps": 3}}}
    run_direct(flow, LEAST, tmp_path, "learn", kill=("run", 2, 2), homeless={2}, **part, **how)
    assert record(tmp_path)["replicas"] == {"b": {"ranks": 2, "planned": 3}}
    _, place = run_direct(flow, LEAST, tmp_path, "learn", absent={1, 3}, room=4, resume=True, **how)
    assert place.client.pools["b"] == (2, 4)
    assert events(tmp_path, "resized")[1][1] == "pool 'b' begins with 1 of 3 ranks"
    ledger, whole = record(tmp_path)["ledger"]["learn"], record(calm)["ledger"]["learn"]
    assert tokens(tmp_path) == tokens(calm) and ledger["rows"] == whole["rows"]


@pytest.mark.parametrize("pipeline", [INTERRUPT, WINDOW], ids=str)
def test_a_rank_that_comes_has_rows_that_leave_one_by_one(tmp_path, pipeline):
    module = module_of("overlap_flow")
    module.Witness.rows.clear()
    plan = pool_of_hf(least=1, staleness=1, **pipeline)
    how = {"parameters": {"overlap": {"steps": 5}}, "save_models": False}
    begun, real = [], Direct.send

    def send(self, rank, method, *args):
        begun.append((rank, method))
        return real(self, rank, method, *args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Direct, "send", send)
        _, place = run_direct(module.flow, plan, tmp_path, absent={1}, room=2, **how)
    new = place.client.pools["rollout"][-1]
    assert new > 3 and (new, "begin") in begun and not events(tmp_path, "lost", "recovered")
    trained = sorted({key[0] for _, batch in module.Witness.rows for key in batch.keys})
    assert trained == list(range(20))


def pool_of_hf(least: int = 0, **pipeline):
    pools = {"train": "cpu", "rollout": Pool("rollout", processes=2, least=least), "cpu": "cpu"}
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("cpu")}
    return Plan(pools, place, pipeline=Pipeline(**pipeline))
