"""A run and a simulation of one program under one plan are given equal records, and what no runtime does is refused."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl.cli import load_script, main
from flowrl.errors import PlanError
from flowrl.lowering.scheme_of_program import scheme_of
from flowrl.placement.backends import BACKENDS
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

ROOT = Path(__file__).parents[2]


def sleeps():
    spec = importlib.util.spec_from_file_location("sleeps_flow", Path(__file__).parent / "sleeps_flow.py")
    assert spec is not None and spec.loader is not None
    found: Any = importlib.util.module_from_spec(spec)
    sys.modules["sleeps_flow"] = found
    spec.loader.exec_module(found)
    found.SECONDS = dict.fromkeys(found.SECONDS, 0.0)
    return found


MODULE = sleeps()
flow = fl.Flow("mixed")
actor = flow.worker(MODULE.Policy, name="actor")
ref = flow.worker(MODULE.Reference, name="ref")
reward = flow.worker(MODULE.Reward, name="reward")


@flow.program
def mixed(steps: int = 2, score_first: bool = True, every: int = 1, tested: bool = False):
    for step, batch in flow.steps(MODULE.Numbers(), steps):
        batch = actor.generate(batch)
        batch = ref.logprobs(reward.score(batch)) if score_first else reward.score(ref.logprobs(batch))
        if tested:
            seen = reward.score(actor.generate(flow.take(MODULE.Numbers())))
            flow.log(step, tested=float(seen.r.mean()))
        if step % every == 0:
            flow.log(step, actor.update(batch), reward=batch.r.mean())


POOLS = ("a", "b", "c")
pipelines = st.builds(Pipeline, staleness=st.integers(0, 3), chunks=st.integers(1, 4))
places = st.fixed_dictionaries(
    {
        "actor": st.fixed_dictionaries(
            {"train": st.sampled_from(POOLS).map(Place), "generate": st.sampled_from(POOLS).map(Place)}
        ),
        "ref": st.sampled_from(POOLS).map(Place),
        "reward": st.sampled_from(POOLS).map(Place),
    }
)
plans = st.builds(
    lambda place, pipeline: Plan({name: Pool(name, device="cpu") for name in POOLS}, place, pipeline=pipeline),
    places,
    pipelines,
)
programs = st.fixed_dictionaries(
    {"score_first": st.booleans(), "every": st.integers(1, 2), "tested": st.booleans(), "steps": st.integers(1, 3)}
)


class Stopped(Exception):
    """Nothing is to be started."""


@pytest.fixture
def seen(monkeypatch):
    """The records that runs were given, and the setups that state machines were made with."""
    from flowrl import prepare_run
    from flowrl.analysis import study
    from flowrl.runtime.driver import running_program as session

    found = {"executions": [], "setups": []}

    class Runner(prepare_run.Runner):
        def __init__(self, executions, executor, how):
            found["executions"] = list(executions)
            if executions[0].runtime == "ray":
                raise Stopped
            super().__init__(executions, executor, how)

    def noted(real):
        def machine(setup, **how):
            found["setups"].append(setup)
            return real(setup, **how)

        return machine

    monkeypatch.setattr(prepare_run, "Runner", Runner)
    for module in (study, session):
        monkeypatch.setattr(module, "Machine", noted(module.Machine))
    return found


@pytest.mark.parametrize("runtime", ["local", "ray"])
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(plan=plans, parameters=programs)
def test_what_is_flown_is_what_is_run(seen, tmp_path_factory, runtime, plan, parameters):
    study = flow.study(plan, runtime=runtime, **parameters)
    seen["setups"].clear()
    study.simulate()
    (flown,) = (setup for setup in seen["setups"] if setup.pools == POOLS)  # and one that only looks at the calls
    seen["setups"].clear()
    try:
        flow.run(
            out=tmp_path_factory.mktemp("run") / "run",
            plan=plan,
            runtime=runtime,
            quiet=True,
            save_models=False,
            **parameters,
        )
    except Stopped:
        assert runtime == "ray"
    (ran,) = seen["executions"]
    assert ran == study.execution and ran.scheme.setup == flown
    assert ran.scheme.setup.staleness == plan.pipeline.staleness and ran.scheme.setup.chunks == plan.pipeline.chunks
    if runtime == "local":
        assert seen["setups"][-1] == flown


def test_ranks_are_handed_calls_ahead_and_a_process_is_not():
    found = {runtime: flow.study(None, runtime=runtime).execution for runtime in ("local", "ray", "eager")}
    assert {runtime: e.scheme.setup.queue for runtime, e in found.items()} == {"local": 0, "ray": 3, "eager": 0}
    assert len({e.program for e in found.values()}) == 1 and found["local"] != found["ray"]


@pytest.mark.parametrize("runtime", ["local", "ray", "eager"])
def test_what_no_runtime_does_is_refused_by_check_and_run_alike_and_flown_with_a_note(tmp_path, capsys, runtime):
    pipeline = {"order": "window"}
    ((key, word),) = pipeline.items()
    file = tmp_path / "plan.yaml"
    file.write_text(
        "pools: {train: {device: cpu}, rollout: {device: cpu}}\n"
        "place: {actor: {train: {pool: train}, generate: {pool: rollout, engine: sglang}}}\n"
        f"pipeline: {{staleness: 1, {key}: {word}}}\n"
    )
    with pytest.raises(PlanError) as refused:
        flow.run(out=tmp_path / "run", plan=file, runtime=runtime, quiet=True)
    at, fix = refused.value.at, refused.value.fix
    assert (
        refused.value.what.startswith(f"{key}: {word}: runs with sglang have fifo") and at is not None and at.line == 3
    )
    assert fix is not None and fix.startswith("Write ") and not (tmp_path / "run").exists()
    words = [str(ROOT / "algorithms" / "grpo.py"), "--plan", str(file)]
    assert main(["check", *words]) == 1
    assert f"PlanError: {refused.value.what}" in capsys.readouterr().out
    assert main(["simulate", *words, "--steps", "2"]) == 0
    assert f"flowrl run refuses it: {key}: {word}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("publish", ["interrupt", "continue"])
def test_a_publish_into_rows_that_run_is_refused_nowhere(publish):
    pools = {"train": Pool("train", device="cpu"), "rollout": Pool("rollout", device="cpu")}
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}}
    plan = Plan(pools, place, pipeline=Pipeline(1, publish=publish))
    refused = {r: [e.what for e in flow.study(plan, runtime=r).unsupported()] for r in ("local", "eager", "ray")}
    assert refused == {"local": [], "eager": [], "ray": []}


def test_a_publish_that_an_engine_does_not_do_is_refused():
    pools = {"train": Pool("train", device="cpu"), "rollout": Pool("rollout", device="cpu")}
    place = {"actor": {"train": Place("train"), "generate": Place("rollout", backend="vllm")}}
    (refused,) = flow.study(Plan(pools, place, pipeline=Pipeline(1, publish="continue")), runtime="local").unsupported()
    assert refused.what == "publish: continue: runs with vllm have drain, interrupt alone."


@pytest.mark.parametrize("pipeline", [{"publish": "interrupt"}, {"order": "window"}, {}])
def test_rows_of_an_engine_that_ranks_split_leave_one_by_one_too(pipeline):
    """As where each rank has a whole model; what takes new weights between whole calls alone has one call at a time."""
    found = []
    for engine, mesh in (("vllm", "dp=2"), ("vllm", "tp=2"), ("sglang", "dp=2")):
        pools = {"train": Pool("train", device="cpu"), "rollout": Pool("rollout", devices=(0, 1))}
        place = {"actor": {"train": Place("train"), "generate": Place("rollout", Mesh.of(mesh), engine)}}
        plan = Plan(pools, place, cluster=Cluster.of("cpu:1x2"), pipeline=Pipeline(2, **pipeline))
        assert [e.what for e in flow.study(plan, runtime="ray").unsupported() if "vllm" in e.what] == []
        found.append("actor" in scheme_of(flow.trace(flow.default_program()), plan, flow.handles).one_by_one)
    assert found == [True, True, bool(pipeline)], "what no run has is flown all the same"


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2"])
@pytest.mark.parametrize("pipeline", [{"staleness": 1, "publish": "interrupt"}, {"staleness": 2}, {}])
def test_episodes_ask_an_engine_that_ranks_split_as_any_other(mesh, pipeline):
    """Also over publishes."""
    played = load_script(str(ROOT / "algorithms" / "tool_use.py"))
    pools = {"train": Pool("train", devices=(0,)), "rollout": Pool("rollout", devices=(1, 2)), "cpu": Pool("cpu")}
    place = {"actor": {"train": Place("train"), "generate": Place("rollout", Mesh.of(mesh), "vllm")}}
    place |= {"task": Place("cpu"), "test": Place("cpu")}
    plan = Plan(pools, place, cluster=Cluster.of("cpu:1x3"), pipeline=Pipeline(**pipeline))
    assert not list(played.study(plan, program="tool_use", runtime="ray").unsupported())


def test_weights_of_a_worker_in_another_pool_cannot_be_looked_at_on_ranks():
    followed = load_script(str(ROOT / "algorithms" / "rlhf.py"))
    pools = {"train": Pool("train", device="cpu"), "other": Pool("other", device="cpu")}
    apart, beside = (Plan(pools, {"actor": Place("train"), "average": Place(name)}) for name in ("other", "train"))
    refused = {r: list(followed.study(apart, program="rlhf", runtime=r).unsupported()) for r in ("local", "ray")}
    assert [e.what for e in refused["ray"]] == [
        "average.follow takes the weights of 'actor', which is in pool 'train'; 'average' is in pool 'other'."
    ]
    assert not refused["local"] and not list(followed.study(beside, program="rlhf", runtime="ray").unsupported())


@pytest.mark.parametrize("pipeline", [{}, {"publish": "interrupt"}])
def test_what_an_engine_does_is_read_from_its_row(monkeypatch, pipeline):
    """Of the engine that generates with weights that change; the table says it, and nothing else does."""
    pools = {"train": Pool("train", device="cpu"), "rollout": Pool("rollout", device="cpu")}
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}}
    plan = Plan(pools, place, pipeline=Pipeline(1, **pipeline))
    assert not list(flow.study(plan, runtime="local").unsupported())
    monkeypatch.setitem(BACKENDS, "hf", replace(BACKENDS["hf"], publishes=("drain",), orders=("fifo",)))
    refused = [error.what.split(" ")[0] for error in flow.study(plan, runtime="local").unsupported()]
    assert refused == [f"{key}:" for key in pipeline]


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_window_over_rows_that_do_not_leave_one_by_one_is_refused(runtime):
    pools = {"train": Pool("train", device="cpu"), "rollout": Pool("rollout", device="cpu")}
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}}
    plan = Plan(pools, place, pipeline=Pipeline(1, order="window"))
    (refused,) = flow.study(plan, runtime=runtime).unsupported()
    assert refused.what == "order: window: actor.generate keeps its rows until all have ended."
