"""An engine on GPUs has the KV cache that the forecast counts: what others leave it, unless the plan says a size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl.analysis.check_plan import plan_findings
from flowrl.analysis.engine_caches import cache_of
from flowrl.analysis.row_lengths import Tokens
from flowrl.analysis.search_problem import find_plan
from flowrl.analysis.study import Study
from flowrl.cli.arguments.script import load_script
from flowrl.launch import launch
from flowrl.lowering.deployment import Deployment, WorkerSpec, with_engine_options
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.roofline import Roofline
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

ALGORITHMS = Path(__file__).parents[2] / "algorithms"


def study_of(
    plan: Plan | str, model: str, *, tokens: float = 1024, rows: int = 64, runtime: str = ""
) -> tuple[Any, Study]:
    flow = load_script(str(ALGORITHMS / "grpo.py"))
    for handle in flow.handles:
        if handle.arguments.get("model") is not None:
            flow.use_model(handle.name, model)
    loaded = Plan.load(ALGORITHMS / "plans" / f"{plan}.yaml") if isinstance(plan, str) else plan
    lengths = Tokens(1024, "fixed", (float(tokens),))
    return flow, flow.study(loaded, "grpo", tokens=lengths, runtime=runtime, steps=4, prompts_per_step=rows)


def opened(study: Study) -> dict[str, Any]:
    """What a run opens the engine that generates with."""
    execution = study.execution
    return dict(with_engine_options(execution.deployments, [execution.engines])["actor", True].spec.options)


def rows_at_once(study: Study) -> int:
    work = next(work for work in study.works.values() if work.kind == "generate")
    return Roofline(study.plan.cluster).rows_at_once(work)


def saying(study: Study, options: dict[str, Any]) -> Study:
    place = study.plan.place_of("actor", "generate")
    return study.under(study.plan.placing("actor", "generate", replace(place, options=options)))


@pytest.mark.parametrize(
    ("plan", "model", "tokens", "rows"),
    [
        ("one_gpu", "qwen3-1.7b", 1024, 64),
        ("colocated_8_dp", "qwen3-8b", 4096, 512),
        ("colocated_8_dp", "qwen3-14b", 4096, 512),
        ("colocated_8_dp", "llama-3.1-8b", 8192, 512),
    ],
)
def test_a_run_has_the_cache_that_the_forecast_counts(plan, model, tokens, rows):
    study = study_of(plan, model, tokens=tokens, rows=rows)[1]
    options = opened(study)
    said = saying(study, options)
    assert options["kv_cache"] > 30 and options["rows"] >= rows_at_once(study)
    assert rows_at_once(said) == rows_at_once(study), "as if the plan had said what the engine is opened with"
    assert plan_findings(study)[0] == [] and plan_findings(said)[0] == []
    assert list(said.memory) == list(study.memory), "and it fits, with the same workers away"


def test_a_found_plan_runs_with_the_cache_of_its_forecast():
    cluster = Cluster.of("h100-80:1x2")
    flow, study = study_of(Plan(cluster=cluster), "qwen3-1.7b", tokens=4096, rows=64)
    parameters: dict[str, Any] = {"steps": 4, "prompts_per_step": 64}
    found = study.under(find_plan(study, flow.graph("grpo", **parameters), cluster, (0,)).plan)
    assert found.plan.place_of("actor", "generate").backend == "vllm" and plan_findings(found)[0] == []
    assert rows_at_once(saying(found, opened(found))) == rows_at_once(found) > 9


def of_two_pools(options: dict[str, Any], device: str = "h100-80") -> Plan:
    pools = {"train": Pool("train", devices=(0,)), "rollout": Pool("rollout", devices=(1,))}
    train = Place("train", Mesh())
    actor = {"train": train, "generate": Place("rollout", Mesh(), "vllm", options=options)}
    place = {"actor": actor, "ref": train, "reward": train}
    return Plan(pools, place, Cluster.of(f"{device}:1x2"), Pipeline())


def test_what_a_plan_says_stays():
    assert opened(study_of(of_two_pools({"kv_cache": 2.0, "rows": 8}), "qwen3-1.7b")[1]) == {"kv_cache": 2.0, "rows": 8}
    assert opened(study_of(of_two_pools({"rows": 8}), "qwen3-1.7b")[1])["rows"] == 8


def test_of_several_programs_an_engine_has_the_smallest_cache_and_the_most_rows():
    spec = WorkerSpec("actor", True, "vllm", "cuda:0", options={"compiled": True})
    programs = [{"actor": {"kv_cache": 40.0, "rows": 256}}, {}, {"actor": {"kv_cache": 50.5, "rows": 512}}]
    deployments = {("actor", True): Deployment("gpu", spec), ("actor", False): Deployment("gpu", WorkerSpec("actor"))}
    found = with_engine_options(deployments, programs)
    assert found["actor", True].spec.options == {"kv_cache": 40.0, "rows": 512, "compiled": True}
    assert found["actor", False] == deployments["actor", False]


def test_a_process_opens_its_engines_with_it_too(monkeypatch):
    monkeypatch.setattr("flowrl.launch.check_here", lambda *of, **more: None)  # this machine has no such devices
    flow, study = study_of(of_two_pools({}), "qwen3-1.7b", runtime="local")
    deployments = launch([study.execution], flow.handles, out=Path("unused")).deployments
    size = deployments["actor", True].spec.options["kv_cache"]
    assert 60 < float(size) < 70 and "kv_cache" not in deployments["actor", False].spec.options


def test_on_cpus_an_engine_takes_its_defaults_and_so_does_the_forecast():
    plain = study_of(of_two_pools({}, "cpu"), "qwen3-0.6b")[1]
    assert opened(plain) == {} and cache_of(plain, "actor") == 1 << 30
    assert rows_at_once(plain) == rows_at_once(saying(plain, {"kv_cache": 1.0, "rows": 256})) == 4
