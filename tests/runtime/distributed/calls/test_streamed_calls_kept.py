"""A rank, or the process of its engine, is lost in the middle of long rows: they go on from the tokens that it had told."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from direct import Direct, run_direct
from flows import module_of

from flowrl.backends.hf.generation.continuous import NetBatch
from flowrl.errors import EngineLost
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.distributed.calls.streamed_calls import EngineOnRanks
from flowrl.runtime.distributed.rank_process import rank_streams

CLOSE = 1e-5


@pytest.fixture(scope="module")
def module():
    return module_of("long_rows_flow")


@pytest.fixture
def told(monkeypatch):
    """What the driver has heard of rows when a rank begins them again: by step, its rows."""
    found: list[tuple[int, int]] = []  # tokens that go on, of rows
    begin = EngineOnRanks._begin_again

    def noted(engine):
        gone = [p for _, rank, p in engine._unanswered() if engine.client.restarted_after(p.epoch, rank)]
        begin(engine)
        found.extend((sum(p.heard.unfinished), len(p.heard.unfinished)) for p in gone)

    monkeypatch.setattr(EngineOnRanks, "_begin_again", noted)
    return found


def told_at_once(monkeypatch) -> None:
    """Have ranks answer after each token, with what it is."""
    for name in ("SLICE", "TOLD_EVERY", "TOLD_TIMES"):
        monkeypatch.setattr(rank_streams, name, 0.0)


def plan(order: str = "fifo", publish: str = "interrupt", dp: int = 2, **more) -> Plan:
    pools = {"train": "cpu", "rollout": Pool("rollout", processes=dp), "cpu": "cpu"}
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("cpu")}
    return Plan(pools, place, pipeline=Pipeline(staleness=2, order=order, publish=publish, **more))


def run(module, out: Path, made: Plan, **how):
    """Returns the rows that the witness has seen, and the executor."""
    module.Witness.rows.clear()
    outcome, place = run_direct(module.flow, made, out, save_models=False, **how)
    assert outcome.status == "done"
    rows = dict(module.Witness.rows)
    assert len(rows) == module.STEPS * module.PROMPTS * module.GROUP
    account = json.loads((out / "run.json").read_text())["ledger"]["long_rows"]["rows"]
    assert account["admitted"] == account["trained"] == len(rows) and account["live"] == 0
    return rows, place


@pytest.fixture(scope="module")
def calm(module, tmp_path_factory):
    """The rows of a run that nobody disturbs."""
    return run(module, tmp_path_factory.mktemp("calm") / "run", plan())[0]


def events(out: Path, *kinds: str) -> list[dict]:
    found = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] in kinds]


def check_equal(found, wanted, close: float = CLOSE) -> None:
    """The same rows: tokens and ends, log-probabilities but for rounding; versions that rise within the bound."""
    by_key = {key: row for (_, key), row in found.items()}
    assert sorted(by_key) == sorted(key for _, key in wanted)
    for (_, key), row in wanted.items():
        now = by_key[key]
        assert (now["response_ids"], now["finished"]) == (row["response_ids"], row["finished"])
        assert now["rollout_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=close)
        assert now["versions"] == sorted(now["versions"])


@pytest.mark.parametrize(
    ("count", "order", "publish", "dp", "more"),
    [
        (2, "fifo", "interrupt", 2, {}),
        (11, "fifo", "interrupt", 2, {}),
        (15, "fifo", "interrupt", 2, {"chunks": 2}),
        (11, "fifo", "continue", 2, {}),
        (11, "window", "drain", 2, {}),
        (14, "window", "interrupt", 2, {"copies": 2}),
        (17, "fifo", "interrupt", 1, {"copies": 2}),
    ],
)
def test_rows_of_a_lost_rank_go_on_from_what_it_had_told(
    module, calm, told, tmp_path, monkeypatch, count, order, publish, dp, more
):
    told_at_once(monkeypatch)
    kill = ("advance", count, 1)
    found, place = run(module, tmp_path / "run", plan(order, publish, dp, **more), kill=kill)
    assert isinstance(place.ranks, Direct) and place.ranks.restarted == [1]
    check_equal(found, calm)
    assert not events(tmp_path / "run", "recovered")
    said = [event["text"] for event in events(tmp_path / "run", "kept")]
    assert said and told, "rows went on"
    words = [
        re.fullmatch(r"(\d+) rows? goe?s? on from (\d+) kept tokens: actor.generate of step \d on rank 1", s)
        for s in said
    ]
    assert all(words)
    assert sum(int(w[2]) for w in words if w) == sum(tokens for tokens, _ in told) > 0
    assert sum(int(w[1]) for w in words if w) == sum(rows for _, rows in told)
    assert place.client.traffic.told > 0 == place.client.traffic.payload


def test_what_was_told_is_not_sampled_again(module, calm, told, tmp_path, monkeypatch):
    """The engines make the tokens of all rows once, and besides those alone that nobody had heard of."""
    told_at_once(monkeypatch)
    made, add = [], NetBatch.step

    def counted(batch):
        before = sum(len(row.ids) for row in batch._rows.values())
        ended = add(batch)
        after = sum(len(row.ids) for row in batch._rows.values())
        made.append(after - before + sum(len(row.ids) for row in ended))
        return ended

    monkeypatch.setattr(NetBatch, "step", counted)
    found, _ = run(module, tmp_path / "run", plan(), kill=("advance", 20, 2))
    check_equal(found, calm)
    whole = sum(len(row["response_ids"]) for row in calm.values())
    assert sum(tokens for tokens, _ in told) > 0
    assert sum(made) - whole <= 3 * module.PROMPTS * module.GROUP, "what came of the last moment was not heard"


def test_an_engine_whose_process_is_gone_costs_what_its_rank_would(module, calm, told, tmp_path, monkeypatch):
    told_at_once(monkeypatch)
    steps, step = [], NetBatch.step

    def dies(batch):
        steps.append(batch)
        if len(steps) == 25:
            raise EngineLost("the process of the engine is gone, with exit status -9.")
        return step(batch)

    monkeypatch.setattr(NetBatch, "step", dies)
    found, place = run(module, tmp_path / "run", plan())
    assert isinstance(place.ranks, Direct) and len(place.ranks.restarted) == 1
    check_equal(found, calm)
    (lost,) = events(tmp_path / "run", "lost")
    assert re.search(
        r"rank [12] of pool 'rollout' has lost its engine during .*the process of the engine is gone", lost["text"]
    )
    assert events(tmp_path / "run", "kept") and told


def test_past_the_most_that_is_told_rows_go_on_from_there(module, calm, told, tmp_path, monkeypatch):
    told_at_once(monkeypatch)
    monkeypatch.setattr(rank_streams, "MOST_TOLD", 300)
    found, place = run(module, tmp_path / "run", plan(), kill=("advance", 20, 1))
    check_equal(found, calm)
    calls = module.STEPS * 2
    assert 0 < place.client.traffic.told < calls * (300 + 12 * (8 + 20))


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm")
def test_rows_of_a_vllm_that_is_killed_go_on_from_what_it_had_told(told, tmp_path, monkeypatch):
    """The process of the engine, while its rank lives: the ids are those of the undisturbed run."""
    from flowrl.backends.vllm.engine import VLLMEngine

    found = module_of("long_rows_flow")
    larger = replace(found.MODEL, config={**found.MODEL.config, "hidden_size": 64})  # vLLM has no kernel for heads of 8
    found.flow.use_model("actor", larger)
    options = {"kv_cache": 0.0625, "rows": 32}
    served = Place("rollout", backend="vllm", options=options)
    pools = {"train": "cpu", "rollout": "cpu", "cpu": "cpu"}
    place = {"actor": {"train": Place("train"), "generate": served}, "reward": Place("cpu")}
    made = Plan(pools, place, pipeline=Pipeline(staleness=2, publish="interrupt", copies=2))
    wanted, _ = run(found, tmp_path / "calm", made)
    steps, step = [], VLLMEngine.step

    def dies(engine):
        steps.append(engine)
        if len(steps) == 12:
            os.kill(engine.child.pid, signal.SIGKILL)
        time.sleep(0.01)
        return step(engine)

    monkeypatch.setattr(VLLMEngine, "step", dies)
    rows, place = run(found, tmp_path / "run", made)
    assert isinstance(place.ranks, Direct) and place.ranks.restarted == [1]
    check_equal(rows, wanted, close=1e-4)
    (lost,) = events(tmp_path / "run", "lost")
    assert "the process of vLLM is gone, with exit status -9" in lost["text"]
    assert sum(tokens for tokens, _ in told) > 0 and events(tmp_path / "run", "kept")


def test_a_whole_call_whose_engine_is_gone_is_made_again(module, tmp_path, monkeypatch):
    """At staleness 0, bit for bit: by the other replica at once, or by the rank that is there again."""
    from flowrl.backends.hf.engine import HFEngine

    def plain(dp: int) -> Plan:
        return replace(plan(dp=dp), pipeline=Pipeline())

    wanted, _ = run(module, tmp_path / "calm", plain(2))
    made, generate = [], HFEngine.generate

    def dies(engine, *asked):
        made.append(engine)
        if len(made) == 3:
            raise EngineLost("the process of the engine is gone, with exit status -9.")
        return generate(engine, *asked)

    monkeypatch.setattr(HFEngine, "generate", dies)
    found, place = run(module, tmp_path / "run", plain(2))
    assert isinstance(place.ranks, Direct) and place.ranks.restarted == [1] and found == wanted
    (lost,) = events(tmp_path / "run", "lost")
    assert "rank 1 of pool 'rollout' has lost its engine during actor.generate of step 1" in lost["text"]
    assert not events(tmp_path / "run", "kept", "recovered")
