"""Where one pool samples and trains, rows that are left over stand still while a step is trained on, asleep where the
memory of the pool has no room for both, and go on under the weights that were published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import table_engine
import torch
from direct import run_direct
from flows import module_of

from flowrl.backends.continuous import ContinuousBatch
from flowrl.placement.backends import BACKENDS
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.distributed.rank_process import rank_streams
from flowrl.runtime.local.shared_engine import SharedEngine
from flowrl.schedule.events import Memory

LONG, SHORT = 12, 2  # tokens of the first prompt's rows, and of all others
#: There is room for the trained copy with the reference, or for the one that generates.
TIGHT = {"gpu": Memory(2.0, {"actor.train": 2.0, "actor.generate": 2.0})}


def plan(engine: str, ranks: int = 1, **pipeline: Any) -> Plan:
    pools = {"gpu": Pool("gpu", processes=ranks) if ranks > 1 else "cpu", "cpu": "cpu"}
    place = {"actor": Place("gpu", backend=engine), "ref": Place("gpu"), "reward": Place("cpu")}
    return Plan(pools, place, pipeline=Pipeline(staleness=1, publish="interrupt", **pipeline))


class Left:
    """The rows of the first prompt stop in their middle until a step was trained on, and its weights were published.

    ``weights`` are those of each version, ``inside`` the rows that the engine had as it fell asleep, each time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.inside: list[int] = []
        step, resume, sleep = ContinuousBatch.step, SharedEngine.resume, ContinuousBatch.fall_asleep

        def stepped(batch: Any) -> Any:
            left = {call for call, _ in batch._rows}
            stop = len(self.weights) < 2 and left == {1} and any(len(row.ids) >= 5 for row in batch._rows.values())
            return [] if stop else step(batch)

        def resumed(shared: SharedEngine, version: int, *, keep_cache: bool) -> None:
            self.weights[version] = {n: w.clone() for n, w in shared.engine.plain_weights().items()}
            resume(shared, version, keep_cache=keep_cache)

        def slept(batch: Any) -> None:
            self.inside.append(len(batch._rows))
            sleep(batch)

        def end_of(batch: Any, row: Any) -> str | None:
            return "length" if len(row.ids) >= (LONG if row.call == 1 else SHORT) else None

        monkeypatch.setattr(ContinuousBatch, "step", stepped)
        monkeypatch.setattr(SharedEngine, "resume", resumed)
        monkeypatch.setattr(ContinuousBatch, "fall_asleep", slept)
        monkeypatch.setattr(ContinuousBatch, "end_of", end_of)
        monkeypatch.setattr(table_engine.Table, "end_of", end_of)
        start = SharedEngine.__init__

        def begun(shared: SharedEngine, engine: Any, version: int) -> None:
            start(shared, engine, version)
            self.weights.setdefault(version, {n: w.clone() for n, w in engine.plain_weights().items()})

        monkeypatch.setattr(SharedEngine, "__init__", begun)


def check(module: Any, out: Path, steps: int = 4) -> dict[int, Any]:
    """The slow prompt comes a step later, all prompts once, and the ledger closes. Returns what steps have trained on."""
    batches = dict(module.Witness.rows)
    trained = {step: {key[0] for key in batch.keys} for step, batch in batches.items()}
    assert all(len(uids) == module.PROMPTS for uids in trained.values())
    assert 0 not in trained[0] and 0 in trained[1]
    rows = json.loads((out / "run.json").read_text())["ledger"]["overlap"]["rows"]
    assert rows["admitted"] == rows["trained"] == steps * module.PROMPTS * module.GROUP and not rows["live"]
    for versions in slow_rows(batches)["versions"].to_list():
        assert len(versions) == LONG and set(versions) == {0, 1} and versions == sorted(versions)
    return batches


def slow_rows(batches: dict[int, Any]) -> Any:
    return batches[1].take([place for place, key in enumerate(batches[1].keys) if key[0] == 0])


def check_weights(module: Any, batches: dict[int, Any], left: Left) -> None:
    """Each log-probability is that of a whole pass under the weights that drew the token."""
    from flowrl.backends import open_engine
    from flowrl.workers.model_options import Build

    engine, slow = open_engine("hf", Build(module.MODEL, device="cpu")), slow_rows(batches)
    for version in (0, 1):
        engine.take_weights(left.weights[version])
        apart = engine.logprobs(slow).values - slow["rollout_logprobs"].values
        assert float(apart[slow["versions"].values == version].abs().max()) < 1e-4


def test_rows_stand_still_while_their_pool_trains(tmp_path, monkeypatch):
    """In one process: an update would else wait for rows that wait for it here."""
    module, left = module_of("overlap_flow"), Left(monkeypatch)
    made = plan("hf", order="window", window=1.0)
    asked = {"overlap": {"steps": 4}}
    module.flow.run(out=tmp_path / "run", plan=made, quiet=True, save_models=False, parameters=asked)
    check_weights(module, check(module, tmp_path / "run"), left)


def test_rows_are_carried_over_the_sleep_of_their_engine(tmp_path, monkeypatch):
    """On a rank whose memory has no room for both copies: the engine falls asleep with the rows that are left."""
    monkeypatch.setattr(rank_streams, "SLICE", 0.0)
    module, left = module_of("overlap_flow"), Left(monkeypatch)
    made = plan("hf", order="window", window=1.0)
    how: dict[str, Any] = {"parameters": {"overlap": {"steps": 4}}, "memory": TIGHT, "save_models": False}
    outcome, place = run_direct(module.flow, made, tmp_path / "run", **how)
    assert outcome.status == "done"
    batches = check(module, tmp_path / "run")
    assert module.GROUP in left.inside, "the rows of the slow prompt were there as it fell asleep"
    check_weights(module, batches, left)
    swaps = [swap["resident"] for swap in place.record()["swaps"] if swap["what"] == "offload"]
    assert {"actor.train", "actor.generate"} <= set(swaps)


def test_rows_of_a_fake_engine_are_carried_over_its_sleep(tmp_path, monkeypatch):
    """The same program with an engine of a table, and no reference: nothing of it is of hf."""
    monkeypatch.setattr(rank_streams, "SLICE", 0.0)
    monkeypatch.setitem(BACKENDS, "table", table_engine.ROW)
    module, left = module_of("plain_flow"), Left(monkeypatch)
    made = Plan({"gpu": "cpu", "cpu": "cpu"}, {"actor": Place("gpu", backend="table"), "reward": Place("cpu")},
                pipeline=Pipeline(staleness=1, publish="interrupt", order="window", window=1.0))  # fmt: skip
    outcome, _ = run_direct(module.flow, made, tmp_path / "run", memory=TIGHT, save_models=False)
    assert outcome.status == "done" and module.GROUP in left.inside
    check(module, tmp_path / "run")


@pytest.mark.parametrize("order", ["fifo", "window"])
def test_a_run_whose_rows_stood_still_is_done_again_bit_for_bit(tmp_path, monkeypatch, order):
    from flowrl.analysis.run_difference import compare_runs
    from flowrl.runtime.storage.digest_lines import read_begun
    from flowrl.runtime.storage.replay_folder import prepare_replay
    from flowrl.runtime.storage.replay_record import Replay

    monkeypatch.setattr(rank_streams, "SLICE", 0.0)
    module, made = module_of("overlap_flow"), plan("hf", order=order)
    how: dict[str, Any] = {"parameters": {"overlap": {"steps": 4}}, "memory": TIGHT, "save_models": False}
    run_direct(module.flow, made, tmp_path / "run", **how)
    begun, taken = read_begun(tmp_path / "run", "overlap")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    replay = Replay(str(tmp_path / "run"), 0, begun=begun, taken=taken)
    prepare_replay(tmp_path / "run", tmp_path / "again", record, replay, 0, 0)
    run_direct(module.flow, made, tmp_path / "again", resume=True, allow_changed=True, **how)
    found = compare_runs(tmp_path / "run", tmp_path / "again")
    assert found.is_equal and found.calls


@pytest.mark.parametrize("count", [2, 5, 8])
def test_a_rank_that_dies_while_rows_stand_still_or_run_loses_none(tmp_path, monkeypatch, count):
    """The rank that samples and trains: the run goes back to its checkpoint, and each prompt is trained on once."""
    monkeypatch.setattr(rank_streams, "SLICE", 0.0)
    module, made = module_of("overlap_flow"), plan("hf", order="window", window=1.0, copies=2)
    how: dict[str, Any] = {"parameters": {"overlap": {"steps": 4}}, "memory": TIGHT, "save_models": False}
    outcome, place = run_direct(module.flow, made, tmp_path / "run", kill=("advance", count, 0), **how)
    assert outcome.status == "done" and place.ranks.restarted
    last = dict(module.Witness.rows)  # steps that are done again count once
    uids = [key[0] for batch in last.values() for key in batch.keys]
    assert len(set(uids)) == 4 * module.PROMPTS and all(uids.count(uid) == module.GROUP for uid in set(uids))
