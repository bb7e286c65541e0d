"""Evaluations on ranks: the copy that generates is given the newest weights, and after that back what it had."""

from __future__ import annotations

import json

import pytest
from flows import module_of

from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

pytest.importorskip("ray", reason="the extra [ray] is not installed")


@pytest.fixture(scope="module")
def cluster():
    """One Ray for both runs: starting it takes seconds."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def lines(out, name, program):
    found = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in found if line["program"] == program]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_policy_goes_on_as_if_it_was_not_evaluated(cluster, tmp_path, staleness):
    module = module_of("overlap_flow")
    arithmetic = module.arithmetic

    def held_out():
        for step, batch in module.flow.steps(arithmetic.heldout(4)):
            rows = module.reward.score(module.actor.generate(batch, greedy=True))
            module.flow.log(step, score=rows.rewards.mean(), version=rows.versions.row_mean().min())

    module.flow.program(held_out)
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("train")}
    pools = {name: Pool(name, processes=1) for name in ("train", "rollout")}
    plan = Plan(pools, place, pipeline=Pipeline(staleness=staleness))
    how = {"plan": plan, "runtime": "ray", "quiet": True, "save_models": False, "parameters": {"overlap": {"steps": 3}}}
    alone = module.flow.run(out=tmp_path / "alone", **how)
    tested = module.flow.run(out=tmp_path / "tested", evaluate="held_out:2", **how)
    assert tested.weights_digest == alone.weights_digest
    assert lines(tmp_path / "tested", "digests", "overlap") == lines(tmp_path / "alone", "digests", "overlap")
    found = lines(tmp_path / "tested", "metrics", "held_out")
    assert [(line["step"], line["version"]) for line in found] == [(2, 2.0), (3, 3.0)], "with all updates so far"
