"""The only rank whose rows leave one by one dies while the trainer is ahead: with copies the run does not go back."""

from __future__ import annotations

import json

import pytest
from direct import Direct, run_direct
from flows import module_of

from flowrl.placement.plan.plan import Pipeline, Place, Plan
from flowrl.runtime.distributed.rank_process import rank_streams


@pytest.mark.parametrize("count", [5, 12, 20])
def test_the_only_rank_is_given_its_weights_again(tmp_path, monkeypatch, count):
    """Rows that had not ended are sampled once more, and every prompt is trained on once."""
    monkeypatch.setattr(rank_streams, "SLICE", 0.0)
    module = module_of("overlap_flow")
    module.Witness.rows.clear()
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("cpu")}
    pipeline = Pipeline(staleness=2, publish="interrupt", copies=2)
    made = Plan({"train": "cpu", "rollout": "cpu", "cpu": "cpu"}, place, pipeline=pipeline)
    how = {"parameters": {"overlap": {"steps": 4}}, "kill": ("advance", count, 1), "save_models": False}
    outcome, there = run_direct(module.flow, made, tmp_path / "run", **how)
    assert outcome.status == "done" and isinstance(there.ranks, Direct) and there.ranks.restarted == [1]
    uids = [key[0] for _, batch in module.Witness.rows for key in batch.keys]
    assert sorted(uids) == [uid for uid in range(4 * module.PROMPTS) for _ in range(module.GROUP)]
    events = [json.loads(line)["kind"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [kind for kind in events if kind in ("lost", "renewed", "recovered")] == ["lost", "renewed"]
