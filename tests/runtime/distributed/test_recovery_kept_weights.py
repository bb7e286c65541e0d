"""The only rank that samples is lost while its trainer is ahead: its weights come from where they were set aside."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from direct import Direct, run_direct
from flows import module_of

from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.distributed.calls.pending_calls import CallOnRanks
from flowrl.runtime.distributed.executor import DistributedExecutor

ALONE = Plan({"a": "cpu", "b": Pool("b", processes=1), "c": "cpu"}, {
    "learner": {"train": Place("a"), "generate": Place("b")}, "reward": Place("c")})  # fmt: skip


@pytest.fixture
def lost_behind(monkeypatch):
    """Has rank 1 die as it is asked to generate for a step, once the trainer is ahead of its weights."""
    real = CallOnRanks.__init__

    def die(step):
        def begin(self, client, call, group, arguments):
            nonlocal step
            if call.title == "learner.generate" and call.step == step:
                step, until = None, time.monotonic() + 60
                trained = client.restart.__self__.groups.workers["learner"]
                while not (trained.dirty or trained.version > group.version) and time.monotonic() < until:
                    time.sleep(0.01)
                assert trained.dirty or trained.version > group.version
                client.link.dead.add(1)
            real(self, client, call, group, arguments)

        monkeypatch.setattr(CallOnRanks, "__init__", begin)

    return die


@pytest.mark.parametrize("step", [1, 3, 5])
@pytest.mark.parametrize("copies", [1, 2])
def test_the_only_rank_that_samples_takes_its_weights_from_where_they_were_set_aside(
    tmp_path, monkeypatch, lost_behind, step, copies
):
    """With copies the version that serves is kept by its trainer until the next one does; else the run goes back."""
    seen, close = [], DistributedExecutor.close

    def look(place):
        seen.append({rank: len(there.aside) for rank, there in sorted(place.ranks.ranks.items())})
        close(place)

    monkeypatch.setattr(DistributedExecutor, "close", look)
    plan = replace(ALONE, pipeline=Pipeline(staleness=1, copies=copies))
    flow = module_of("replicas_flow").trained
    whole, _ = run_direct(flow, plan, tmp_path / "whole", "learn")
    lost_behind(step)
    found, place = run_direct(flow, plan, tmp_path / "run", "learn", checkpoint_every=100)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert ("recovered" in kinds) == (copies == 1) and "lost" in kinds
    assert isinstance(place.ranks, Direct) and 1 in place.ranks.restarted
    assert found.weights_digest == whole.weights_digest
    assert seen == [{0: copies - 1, 1: 0, 2: 0}] * 2, "one version, where it was trained"


def test_a_version_is_kept_no_longer_than_its_trainer(tmp_path):
    """It is lost with the trainer's rank: then the run goes back, and keeps others from there on."""
    plan = replace(ALONE, pipeline=Pipeline(staleness=1, copies=2))
    flow = module_of("replicas_flow").trained
    whole, _ = run_direct(flow, plan, tmp_path / "whole", "learn")
    found, place = run_direct(flow, plan, tmp_path / "run", "learn", kill=("sums", 3, 0), checkpoint_every=1)
    assert found.weights_digest == whole.weights_digest
    assert isinstance(place.ranks, Direct) and 0 in place.ranks.restarted
