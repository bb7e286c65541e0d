"""Runs on ranks whose steps share engines: rows leave one by one, publishes come in between, and each token says whose
it is."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from direct import Direct, run_direct
from flows import metrics, module_of
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.analysis.run_difference import compare_runs
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.distributed.calls.streamed_calls import EngineOnRanks
from flowrl.runtime.distributed.executor import DistributedExecutor
from flowrl.runtime.distributed.rank_process import rank_streams
from flowrl.runtime.driver.pool_threads import Pools
from flowrl.runtime.storage.digest_lines import read_begun
from flowrl.runtime.storage.replay_folder import Replay, prepare_replay
from flowrl.schedule.events import Publish, Start

BOUND = 120.0  # seconds that a test waits for another thread at most


@pytest.fixture(scope="module")
def module():
    return module_of("overlap_flow")


def plan(dp: int, **pipeline) -> Plan:
    pools = {"train": "cpu", "rollout": Pool("rollout", processes=dp), "cpu": "cpu"}
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("cpu")}
    return Plan(pools, place, pipeline=Pipeline(**pipeline))


def run(module, out: Path, made: Plan, *, kill=None, **parameters):
    module.Witness.rows.clear()
    return run_direct(module.flow, made, out, parameters={"overlap": parameters}, kill=kill, save_models=False)


def direct(place: DistributedExecutor) -> Direct:
    assert isinstance(place.ranks, Direct)
    return place.ranks


def lags(out: Path) -> list[int]:
    lines = [json.loads(line) for line in (out / "traffic.jsonl").read_text().splitlines()]
    return [int(lag) for line in lines for lag in line.get("lags", {})]


def check_rows(module, steps: int, more: bool = False, *, exchanged: bool = False) -> None:
    """Every prompt is trained on once, unless ``exchanged`` in the step that drew it; versions rise within a row."""
    uids: list[int] = []
    for _, batch in sorted(module.Witness.rows, key=lambda item: item[0]):
        keys = [key[0] for key in batch.keys]
        assert all(keys.count(uid) == module.GROUP for uid in set(keys))
        uids += sorted(set(keys))
        assert all(versions == sorted(versions) for versions in batch["versions"].to_list())
    assert exchanged or uids == sorted(uids)
    assert len(set(uids)) == len(uids) == steps * (module.PROMPTS + 2 * more)


class Gate:
    """Settles when things happen: the second call joins the first, and each later one is interrupted by the publish of
    the update before it. Whoever has the ranks sample waits until that stands in line."""

    def __init__(self, monkeypatch) -> None:
        self.published: dict[int, dict[str, torch.Tensor]] = {}
        self.inside: list[int] = []  # rows that run as a version is published, on each rank
        self.together = 0  # calls in the engines, at most
        self.steps: dict[int, int] = defaultdict(int)
        self.passed: set[int] = set()
        self.joined = threading.Event()
        self.queued: dict[int, threading.Event] = defaultdict(threading.Event)
        put, advance, install = Pools.put, EngineOnRanks.advance, DistributedExecutor.install
        starts: list[int] = []

        def noted(pools, pool, job):
            put(pools, pool, job)
            if isinstance(job.command, Publish):
                self.queued[job.command.version].set()
            elif pool == "rollout" and isinstance(job.command, Start):
                starts.append(job.command.id)
                if len(starts) == 2:
                    self.joined.set()

        def gated(engine, what):
            inside = [c.call.step for c in engine.calls.values() if any(p.answer is None for p in c.parts.values())]
            self.together = max(self.together, len(inside))
            for step in inside:
                self.steps[step] += 1
            step = max(inside)
            if len(inside) == 1 and self.steps[step] > 3 and step not in self.passed:
                self.passed.add(step)
                assert (self.queued[step] if step else self.joined).wait(BOUND), "nothing came"
            else:
                advance(engine, what)

        def kept(place, name, version, weights=None, *, keep_cache=False):
            ranks = place.ranks.ranks
            there = [ranks[r].workers[name, True].engine for r in place.servers[name].ranks]
            if not self.published:
                self.published[0] = {n: w.clone() for n, w in there[0].plain_weights().items()}
            self.inside += [len(engine.running()) for engine in there]
            moved = install(place, name, version, weights, keep_cache=keep_cache)
            self.published[version] = {n: w.clone() for n, w in there[0].plain_weights().items()}
            return moved

        monkeypatch.setattr(rank_streams, "SLICE", 0.0)
        monkeypatch.setattr(Pools, "put", noted)
        monkeypatch.setattr(EngineOnRanks, "advance", gated)
        monkeypatch.setattr(DistributedExecutor, "install", kept)


@pytest.mark.parametrize(("publish", "dp"), [("interrupt", 1), ("interrupt", 2), ("continue", 2)])
def test_tokens_after_a_publish_are_those_of_the_new_weights(module, tmp_path, monkeypatch, publish, dp):
    """With ``interrupt`` the log-probability of every token is that of a whole pass under the weights of its version:
    those before a publish are unchanged by it."""
    from flowrl.backends import open_engine
    from flowrl.workers.model_options import Build

    gate = Gate(monkeypatch)
    outcome, place = run(module, tmp_path / "run", plan(dp, staleness=1, publish=publish), steps=4)
    assert outcome.status == "done" and place.client.traffic.payload == 0
    check_rows(module, 4)
    assert sum(map(bool, gate.inside)) >= dp, "rows ran on each rank as weights were published"
    assert gate.together == 2, "calls of two open steps were in one batch"
    assert max(lags(tmp_path / "run")) <= 1

    fresh = open_engine("hf", Build(module.MODEL, device="cpu"))
    mixed, worst = 0, 0.0
    for _, batch in module.Witness.rows:
        versions, sampled = batch["versions"].values, batch["rollout_logprobs"].values
        mixed += sum(len(set(row)) > 1 for row in batch["versions"].to_list())
        for version in set(versions.tolist()):
            fresh.take_weights(gate.published[version])
            apart = (fresh.logprobs(batch).values - sampled)[versions == version].abs()
            worst = max(worst, float(apart.max()))
    assert mixed > 0, "rows have tokens of two versions"
    if publish == "interrupt":
        assert worst < 1e-4
    else:
        assert worst > 1e-4, "keys and values are those of the version before"


@pytest.mark.parametrize("count", [0, 1])
def test_a_rank_that_dies_costs_its_own_rows_alone(module, tmp_path, monkeypatch, count):
    """Before any of its rows had ended: they are sampled once more, those of others go on, none is trained on twice."""
    monkeypatch.setattr(rank_streams, "SLICE", 0.0)
    made = plan(2, staleness=1, publish="interrupt")
    outcome, place = run(module, tmp_path / "run", made, kill=("advance", count, 2), steps=4)
    assert outcome.status == "done" and direct(place).restarted == [2]
    check_rows(module, 4)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [e["kind"] for e in events if e["kind"] in ("lost", "renewed", "recovered")] == ["lost", "renewed"]
    assert max(lags(tmp_path / "run")) <= 1


def test_with_no_other_rank_the_run_goes_back_and_still_trains_every_prompt(module, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_streams, "SLICE", 0.0)
    made = plan(1, staleness=2, publish="interrupt", chunks=2)
    outcome, place = run(module, tmp_path / "run", made, kill=("advance", 12, 1), steps=4)
    assert outcome.status == "done" and direct(place).restarted
    kept = {step: batch for step, batch in module.Witness.rows}  # steps that are done again count once
    module.Witness.rows[:] = sorted(kept.items(), key=lambda item: item[0])
    check_rows(module, 4)
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(4))


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    staleness=st.integers(0, 3),
    publish=st.sampled_from(["interrupt", "continue"]),
    chunks=st.sampled_from([1, 2, 3]),
    dp=st.sampled_from([1, 2]),
    more=st.booleans(),
    look=st.booleans(),
)
def test_the_bound_holds_and_every_prompt_is_trained_on_once(
    tmp_path_factory, module, staleness, publish, chunks, dp, more, look
):
    out = tmp_path_factory.mktemp("run") / "run"
    made = plan(dp, staleness=staleness, publish=publish, chunks=chunks)
    run(module, out, made, steps=4, more=more, look=look)
    check_rows(module, 4, more)
    found = lags(out)
    assert found and max(found) <= staleness and min(found) >= 0
    for line in metrics(out):
        if "at" in line:  # an evaluation sees precisely the updates before it
            assert line["at"] == line["at_most"] == line["step"] + 1


@pytest.mark.parametrize(("order", "publish"), [("fifo", "interrupt"), ("window", "continue"), ("window", "drain")])
def test_a_run_on_ranks_is_done_again_bit_for_bit(module, tmp_path, order, publish):
    """Each rank makes as many steps between two starts as it made, and has the groups that it had."""
    made = plan(2, staleness=2, order=order, publish=publish)
    run(module, tmp_path / "run", made, steps=4)
    begun, taken = read_begun(tmp_path / "run", "overlap")
    replay = Replay(str(tmp_path / "run"), 0, begun=begun, taken=taken)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    prepare_replay(tmp_path / "run", tmp_path / "again", record, replay, 0, 0)
    how = {"resume": True, "allow_changed": True, "save_models": False}
    run_direct(module.flow, made, tmp_path / "again", parameters={"overlap": {"steps": 4}}, **how)
    found = compare_runs(tmp_path / "run", tmp_path / "again")
    assert found.is_equal and found.calls
    again, groups = read_begun(tmp_path / "again", "overlap")
    least = min(len(begun), len(again))  # publishes of the last steps are in no record
    assert again[:least] == begun[:least] and groups == taken and least > 6


@pytest.mark.parametrize("dp", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_window_exchanges_groups_of_all_ranks(module, tmp_path, dp):
    made = plan(dp, staleness=2, order="window", window=0.5, publish="interrupt", chunks=2)
    _, place = run(module, tmp_path / "run", made, steps=5)
    check_rows(module, 5, exchanged=True)
    assert max(lags(tmp_path / "run")) <= 2 + 2  # W = 6 of 4 prompts a step
    rows = json.loads((tmp_path / "run" / "run.json").read_text())["ledger"]["overlap"]["rows"]
    assert rows["admitted"] == rows["trained"] == 5 * module.PROMPTS * module.GROUP
    assert {rank for rank, method in direct(place).calls if method == "begin"} == set(range(1, 1 + dp))
    assert sum(method == "begin" for _, method in direct(place).calls) == 5 * module.PROMPTS
