"""Settings of a plan that the simulator finds worth having: those that shorten a step, accepted, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl.analysis.check_plan import plan_findings
from flowrl.analysis.plan_settings import refined
from flowrl.analysis.row_lengths import Tokens
from flowrl.analysis.search_problem import find_plan
from flowrl.analysis.study import Study
from flowrl.cli.arguments.script import load_script
from flowrl.errors import PlanError
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.given_costs import GivenCosts
from flowrl.placement.cost.roofline import Roofline
from flowrl.placement.plan.plan import Pipeline, Plan

ALGORITHMS = Path(__file__).parents[2] / "algorithms"
GIVEN = {"actor.generate": 6.0, "ref.logprobs": 2.0, "reward.score": 1.0, "actor.update": 3.0, "actor.publish": 0.5}


def study_of(
    plan: Plan | str, *, costs: Any = None, tokens: Tokens | None = None, model: str = "", **parameters: Any
) -> Study:
    flow = load_script(str(ALGORITHMS / "grpo.py"))
    for handle in flow.handles:
        if model and handle.arguments.get("model") is not None:
            flow.use_model(handle.name, model)
    loaded = Plan.load(ALGORITHMS / "plans" / f"{plan}.yaml") if isinstance(plan, str) else plan
    return flow.study(loaded, "grpo", costs=costs, tokens=tokens or Tokens(), **{"steps": 12, **parameters})


def refine(study: Study, staleness=(0, 1)):
    def simulated(plan: Plan) -> float:
        return study.under(plan).simulate().step_seconds

    return refined(study, study.plan, simulated(study.plan), staleness, simulated)


def test_chunks_are_taken_as_far_as_they_shorten_a_step():
    start = study_of("split_16", costs=GivenCosts(GIVEN))
    plain = start.under(start.plan.but(pipeline=Pipeline()))
    found = refine(plain)
    assert found.settings == ("chunks: 8",) and found.plan.pipeline.chunks == 8
    assert found.step_seconds == pytest.approx(6 + 2 / 8 + 3), "the closed form of docs/simulator.md"
    assert found.step_seconds == plain.under(found.plan).simulate().step_seconds
    assert plan_findings(plain.under(found.plan))[0] == []


def test_where_nothing_is_gained_a_plan_stays_as_it_is():
    found = refine(study_of("colocated_8", costs=GivenCosts({**GIVEN, "reward.score": 0.0})))
    assert found.settings == () and found.plan == study_of("colocated_8").plan and found.tried > 0


def test_chunks_are_no_more_than_prompts():
    start = study_of("split_16", costs=GivenCosts(GIVEN), prompts_per_step=3)
    assert refine(start.under(start.plan.but(pipeline=Pipeline()))).plan.pipeline.chunks == 2


def test_more_staleness_only_where_it_shortens_a_step():
    """One long response in a step: the more steps are open, the less it holds up."""
    start = study_of("disaggregated_cpu", costs=GivenCosts(GIVEN), tokens=Tokens(10, "lognormal", (200.0, 1.0)))
    plain = start.under(start.plan.but(pipeline=Pipeline(staleness=1)))
    found = refine(plain, (0, 1, 2, 3, 4))
    assert found.step_seconds <= plain.simulate().step_seconds
    assert found.step_seconds == plain.under(found.plan).simulate().step_seconds
    even = study_of("disaggregated_16", costs=GivenCosts(GIVEN))
    assert refine(even, (0, 1, 2, 3, 4)).plan.pipeline.staleness == even.plan.pipeline.staleness


def test_publish_modes_are_those_of_the_engine_alone():
    start = study_of("disaggregated_16", costs=GivenCosts(GIVEN), tokens=Tokens(10, "lognormal", (200.0, 1.5)))
    found = refine(start)
    assert plan_findings(start.under(found.plan))[0] == []
    assert found.plan.pipeline.publish == "interrupt", "vllm has that, split by tp too, and no continue"
    at = start.plan.place["actor"]
    served = replace(at["generate"], backend="sglang", mesh=Mesh.of("dp=8"))
    other = start.plan.but(place={**start.plan.place, "actor": {**at, "generate": served}})
    assert refine(start.under(other)).plan.pipeline.publish == "drain", "sglang takes weights between whole calls alone"


def search(model: str, cluster: str, staleness=(0,), **parameters: Any):
    flow = load_script(str(ALGORITHMS / "grpo.py"))
    for handle in flow.handles:
        if handle.arguments.get("model") is not None:
            flow.use_model(handle.name, model)
    parameters = {"steps": 6, "prompts_per_step": 64, **parameters}
    empty = Plan(cluster=Cluster.of(cluster))
    study = flow.study(empty, "grpo", tokens=Tokens(1024, "fixed", (1024.0,)), **parameters)
    return study, find_plan(study, flow.graph("grpo", **parameters), Cluster.of(cluster), staleness)


def test_what_fits_with_host_memory_alone_is_found_there():
    study, found = search("llama-34b", "h100-80:1x8")
    assert found.plan.place_of("actor").offload and "offload: true" in found.plan.to_yaml()
    assert plan_findings(study.under(found.plan))[0] == []
    assert found.step_seconds == study.under(found.plan).simulate().step_seconds
    assert found.bound is not None and found.bound <= found.step_seconds * (1 + 1e-9)
    device = replace(found.plan.place_of("actor"), offload=False)
    errors = plan_findings(study.under(found.plan.placing("actor", "train", device)))[0]
    assert errors and "GB on each device" in errors[0].what, "in the memory of the devices it does not fit"


def test_a_worker_that_only_follows_is_placed_where_the_other_trains():
    flow = load_script(str(ALGORITHMS / "rlhf.py"))
    cluster = Cluster.of("h100-80:1x4")
    parameters: dict[str, Any] = {"steps": 6, "prompts_per_step": 8}
    study = flow.study(Plan(cluster=cluster), "rlhf", **parameters)
    found = find_plan(study, flow.graph("rlhf", **parameters), cluster, (0,))
    assert found.plan.place_of("average") == found.plan.place_of("actor", "train")
    assert plan_findings(study.under(found.plan))[0] == [] and found.tried > 0


def test_what_fits_nowhere_is_still_told():
    with pytest.raises(PlanError, match=r"does not fit on h100-80:1x1|do not fit"):
        search("llama-70b", "h100-80:1x1")


def offloaded(study: Study, offload: bool) -> Study:
    place = replace(study.plan.place_of("actor", "train"), offload=offload)
    return study.under(study.plan.placing("actor", "train", place))


def test_host_memory_takes_time():
    """Each micro-batch copies the layers, the optimizer works there: never faster, and slower by a slow way."""
    tokens = Tokens(1024, "fixed", (1024.0,))
    study = study_of("colocated_8", tokens=tokens, model="qwen3-8b", prompts_per_step=64)
    node = next(n for n, w in study.works.items() if w.kind == "train")
    cluster = study.plan.cluster
    for host in (0.7, 0.01):
        costs = Roofline(cluster, replace(Roofline(cluster).efficiency, host=host))
        near, far = (costs.seconds(offloaded(study, o).works[node]) for o in (False, True))
        assert near < far
        assert far > 5 * near or host == 0.7


def test_a_cache_of_a_plan_counts_in_its_pool():
    """What a plan says beside an engine is there, whoever else is: check tells where it does not fit."""
    tokens = Tokens(1024, "fixed", (1024.0,))
    study = study_of("disaggregated_16", tokens=tokens, model="qwen3-8b", prompts_per_step=64)
    place = study.plan.place_of("actor", "generate")
    for size, fits in ((8.0, True), (60.0, True), (90.0, False)):
        said = study.plan.placing("actor", "generate", replace(place, options={"kv_cache": size}))
        errors = plan_findings(study.under(said))[0]
        assert bool(errors) != fits, (size, errors)
        assert fits or "kv cache 96.6" in errors[0].what
