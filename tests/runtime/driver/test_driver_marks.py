"""Where columns come from holds in runs too: on ranks, and over a checkpoint."""

from __future__ import annotations

import json

import pytest
from direct import run_direct
from flows import module_of

import flowrl as fl
from flowrl import rl
from flowrl.errors import FieldError, FlowError
from flowrl.placement.plan.plan import Place, Plan, Pool

APART = Plan(
    {"train": "cpu", "rollout": Pool("rollout", processes=2), "cpu": "cpu"},
    {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("cpu")},
)


def flow_of(temperature, of_reference):
    """GRPO whose rollouts and reference are asked at temperatures that the program computes."""
    stale = module_of("stale_flow")
    flow = fl.Flow("hot")
    actor = flow.worker(fl.Actor, stale.MODEL, lr=3e-3, max_tokens=5, name="actor")
    ref = flow.worker(fl.Reference, of=actor, name="ref")
    reward = flow.worker(fl.FunctionReward, stale.digits, name="reward")

    def hot(steps: int = 3):
        before = None
        for step, batch in flow.steps(stale.arithmetic.prompts(4), steps):
            count = batch.count()
            batch = actor.generate(batch, n=3, temperature=temperature(count))
            batch = ref.logprobs(reward.score(batch), temperature=of_reference(count))
            batch = rl.group_advantages(batch)
            update = actor.update(batch if before is None else before, loss=rl.ppo_clip(kl=1e-3))
            before = batch  # trained on one step later, so that a checkpoint holds rows
            flow.log(step, update, temperature=batch.temperature.mean())

    flow.program(hot)
    return flow


def lines(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "second" not in k} for line in found]


def test_ranks_train_at_the_temperature_of_the_rows_as_one_process_does(tmp_path):
    def flow():
        return flow_of(lambda count: count * 0.1 + 0.2, lambda count: None)

    flow().run("hot", out=tmp_path / "local", quiet=True)
    run_direct(flow(), APART, tmp_path / "ranks", "hot")
    for one, other in zip(lines(tmp_path / "ranks"), lines(tmp_path / "local"), strict=True):
        assert one == {k: pytest.approx(v, rel=1e-4, abs=1e-6) if isinstance(v, float) else v for k, v in other.items()}
    assert lines(tmp_path / "local")[0]["temperature"] == pytest.approx(0.6)
    assert lines(tmp_path / "local")[0]["ratio"] == pytest.approx(1, abs=1e-5)
    assert 0 <= lines(tmp_path / "local")[0]["truncated"] <= 1


def test_ranks_refuse_what_one_process_refuses(tmp_path):
    flow = flow_of(lambda count: count * 0.1 + 0.2, lambda count: count * 0.25)
    assert not flow.check("hot").errors  # the numbers are not known there
    said = "compares log-probabilities of different kinds: 'rollout_logprobs' at temperature 0.6, 'ref_logprobs' at"
    with pytest.raises(FieldError, match=said):
        flow.run("hot", out=tmp_path / "local", quiet=True)
    with pytest.raises(FlowError, match=said) as refused:
        run_direct(flow, APART, tmp_path / "ranks", "hot")
    assert refused.value.at is not None and "actor.update(" in refused.value.at.text


def test_rows_of_a_checkpoint_know_where_they_come_from(tmp_path):
    def flow():
        return flow_of(lambda count: count * 0.1 + 0.2, lambda count: None)

    whole = flow().run("hot", out=tmp_path / "whole", quiet=True, parameters={"hot": {"steps": 4}})
    flow().run("hot", out=tmp_path / "cut", quiet=True, parameters={"hot": {"steps": 4}}, checkpoint_every=2)
    checkpoints = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    manifests = [p / "manifest.json" for p in checkpoints if (p / "manifest.json").exists()]
    assert any('"sampler", "actor"' in " ".join(m.read_text().split()) for m in manifests), "marks are kept"
    again = flow().run("hot", out=tmp_path / "cut", quiet=True, resume=True, parameters={"hot": {"steps": 4}})
    assert again.weights_digest == whole.weights_digest
