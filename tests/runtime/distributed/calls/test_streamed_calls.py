"""Runs on ranks whose steps share engines: rows leave one by one, publishes come in between, and each token says whose
it is."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from direct import Direct, run_direct
from flows import metrics, module_of
from hypothesis import given, settings
from hypothesis import strategies as st
from publish_gate import PublishGate

from flowrl.analysis.run_difference import compare_runs
from flowrl.errors import RunError
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.distributed.calls.streamed_calls import EngineOnRanks, StreamedCallOnRanks
from flowrl.runtime.distributed.executor import DistributedExecutor
from flowrl.runtime.distributed.rank_process import rank_streams
from flowrl.runtime.storage.digest_lines import read_begun
from flowrl.runtime.storage.replay_folder import prepare_replay
from flowrl.runtime.storage.replay_record import Replay


@pytest.fixture(scope="module")
def module():
    return module_of("overlap_flow")


@pytest.fixture
def module_for(module, monkeypatch):
    """The flow for an engine: vLLM has no kernel for heads of 8."""

    def find(engine: str):
        if engine != "vllm":
            return module
        monkeypatch.setitem(sys.modules, "overlap_flow", module)  # again, after this test
        found = module_of("overlap_flow")
        model = replace(found.MODEL, config={**found.MODEL.config, "hidden_size": 64})
        monkeypatch.setattr(found, "MODEL", model)
        found.flow.use_model("actor", model)
        return found

    return find


def plan(dp: int, engine: str = "hf", **pipeline) -> Plan:
    pools = {"train": "cpu", "rollout": Pool("rollout", processes=dp), "cpu": "cpu"}
    options = {"kv_cache": 0.0625, "rows": 32} if engine == "vllm" else {}
    served = Place("rollout", backend=engine, options=options)
    place = {"actor": {"train": Place("train"), "generate": served}, "reward": Place("cpu")}
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


class Gate(PublishGate):
    """Keeps the weights that were published, and how many rows ran then."""

    def __init__(self, monkeypatch) -> None:
        super().__init__(monkeypatch)
        self.published: dict[int, dict[str, torch.Tensor]] = {}
        self.inside: list[int] = []  # rows that run as a version is published, on each rank
        advance, install = EngineOnRanks.advance, DistributedExecutor.install

        def gated(engine, what):
            inside = [c.call.step for c in engine.calls.values() if any(p.answer is None for p in c.parts.values())]
            if not self.held(inside, first=0):
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
        monkeypatch.setattr(EngineOnRanks, "advance", gated)
        monkeypatch.setattr(DistributedExecutor, "install", kept)


VLLM = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm")]


@pytest.mark.parametrize(
    ("publish", "dp", "engine"),
    [
        ("interrupt", 1, "hf"),
        ("interrupt", 2, "hf"),
        ("continue", 2, "hf"),
        pytest.param("interrupt", 1, "vllm", marks=VLLM),
        pytest.param("interrupt", 2, "vllm", marks=[*VLLM, pytest.mark.nightly]),
    ],
)
def test_tokens_after_a_publish_are_those_of_the_new_weights(module_for, tmp_path, monkeypatch, publish, dp, engine):
    """With ``interrupt`` the log-probability of every token is that of a whole pass under the weights of its version:
    those before a publish are unchanged by it."""
    from flowrl.backends import open_engine
    from flowrl.workers.model_options import Build

    module, gate = module_for(engine), Gate(monkeypatch)
    outcome, place = run(module, tmp_path / "run", plan(dp, engine, staleness=1, publish=publish), steps=4)
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


@pytest.mark.parametrize(("count", "order"), [(0, "fifo"), (1, "window"), (9, "fifo"), (14, "fifo"), (12, "window")])
def test_a_rank_that_dies_costs_its_own_rows_alone(module, tmp_path, monkeypatch, count, order):
    """Those that had not ended are sampled once more, those of others go on, none is trained on twice.

    What it had answered is on another rank, too: the run does not go back.
    """
    monkeypatch.setattr(rank_streams, "SLICE", 0.0)
    made = plan(2, staleness=1, order=order, publish="interrupt")
    outcome, place = run(module, tmp_path / "run", made, kill=("advance", count, 2), steps=4)
    assert outcome.status == "done" and direct(place).restarted == [2]
    check_rows(module, 4, exchanged=order == "window")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [e["kind"] for e in events if e["kind"] in ("lost", "renewed", "recovered")] == ["lost", "renewed"]
    assert max(lags(tmp_path / "run")) <= (3 if order == "window" else 1)


def test_with_no_other_rank_the_run_goes_back_and_still_trains_every_prompt(module, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_streams, "SLICE", 0.0)
    made = plan(1, staleness=2, publish="interrupt", chunks=2)
    outcome, place = run(module, tmp_path / "run", made, kill=("advance", 12, 1), steps=4)
    assert outcome.status == "done" and direct(place).restarted
    kept = {step: batch for step, batch in module.Witness.rows}  # steps that are done again count once
    module.Witness.rows[:] = sorted(kept.items(), key=lambda item: item[0])
    check_rows(module, 4)
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(4))


@pytest.mark.parametrize(("count", "order"), [(9, "fifo"), (6, "window"), (12, "window")])
def test_a_rank_that_dies_as_it_gives_weights_to_a_lost_one_has_the_run_go_back(
    module, tmp_path, monkeypatch, count, order
):
    """With ``window`` the run hung: other groups asked the ranks that were started again of calls that these had
    never heard of."""
    monkeypatch.setattr(rank_streams, "SLICE", 0.0)
    asked, send = [], Direct.send

    def dies(ranks, rank, method, *said):
        if ranks.restarted == [2] and method == "move":
            ranks.dead.add(1)
        asked.extend([method] * (1 in ranks.dead))
        return send(ranks, rank, method, *said)

    monkeypatch.setattr(Direct, "send", dies)
    made = plan(2, staleness=1, order=order, publish="interrupt")
    outcome, place = run(module, tmp_path / "run", made, kill=("advance", count, 2), steps=4)
    assert outcome.status == "done" and direct(place).restarted == [2, 1, 2]
    assert "advance" not in asked, "nobody asks for rows of ranks that were started again and know of none"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [e["kind"] for e in events if e["kind"] in ("renewed", "recovered")] == ["recovered"]
    kept = {step: batch for step, batch in module.Witness.rows}  # steps that are done again count once
    module.Witness.rows[:] = sorted(kept.items(), key=lambda item: item[0])
    check_rows(module, 4, exchanged=order == "window")


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


@pytest.mark.parametrize(
    ("order", "publish", "engine"),
    [
        ("fifo", "interrupt", "hf"),
        ("window", "continue", "hf"),
        ("window", "drain", "hf"),
        pytest.param("fifo", "interrupt", "vllm", marks=[*VLLM, pytest.mark.nightly]),
        pytest.param("window", "interrupt", "vllm", marks=[*VLLM, pytest.mark.nightly]),
    ],
)
def test_a_run_on_ranks_is_done_again_bit_for_bit(module_for, tmp_path, order, publish, engine):
    """Each rank makes as many steps between two starts as it made, and has the groups that it had."""
    module, made = module_for(engine), plan(2, engine, staleness=2, order=order, publish=publish)
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


@pytest.mark.parametrize(
    ("dp", "engine"),
    [
        (2, "hf"),
        pytest.param(3, "hf", marks=pytest.mark.nightly),
        pytest.param(2, "vllm", marks=[*VLLM, pytest.mark.nightly]),
    ],
)
def test_a_window_exchanges_groups_of_all_ranks(module_for, tmp_path, dp, engine):
    module = module_for(engine)
    made = plan(dp, engine, staleness=2, order="window", window=0.5, publish="interrupt", chunks=2)
    _, place = run(module, tmp_path / "run", made, steps=5)
    check_rows(module, 5, exchanged=True)
    assert max(lags(tmp_path / "run")) <= 2 + 2  # W = 6 of 4 prompts a step
    rows = json.loads((tmp_path / "run" / "run.json").read_text())["ledger"]["overlap"]["rows"]
    assert rows["admitted"] == rows["trained"] == 5 * module.PROMPTS * module.GROUP
    assert {rank for rank, method in direct(place).calls if method == "begin"} == set(range(1, 1 + dp))
    assert sum(method == "begin" for _, method in direct(place).calls) == 5 * module.PROMPTS


@pytest.mark.timeout(120)
def test_a_call_that_fails_is_no_longer_waited_for(module, tmp_path, monkeypatch):
    """The others of its engine would let its result go first for ever, and the run could not end."""
    go_on, failed = StreamedCallOnRanks._go_on, []

    def fails(call):
        if not failed and call.has_answers and len(call.engine.calls) > 1:
            failed.append(call)
            raise RunError("it broke on purpose", fix="Nothing.")
        go_on(call)

    monkeypatch.setattr(rank_streams, "SLICE", 0.0)
    monkeypatch.setattr(StreamedCallOnRanks, "_go_on", fails)
    with pytest.raises(RunError, match="it broke on purpose"):
        run(module, tmp_path / "run", plan(2, staleness=1, publish="interrupt"), steps=6)
    assert failed and failed[0].number not in failed[0].engine.calls
