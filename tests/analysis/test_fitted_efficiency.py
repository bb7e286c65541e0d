"""Parts of a peak that are fitted to one plan carry over to others: held against a machine whose parts are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.analysis.fitted_efficiency import fit_efficiency
from flowrl.analysis.row_lengths import Tokens
from flowrl.cli.arguments.script import load_script
from flowrl.errors import PlanError
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.calibrated_costs import Calibrated, Call, Fit
from flowrl.placement.cost.continuous_batch import Turns
from flowrl.placement.cost.efficiency import Efficiency
from flowrl.placement.cost.engine_curve import EngineCurve
from flowrl.placement.cost.roofline import Roofline
from flowrl.placement.cost.work import Workload
from flowrl.placement.plan.plan import Place, Plan, Pool
from flowrl.placement.plan.plan_file import read

ALGORITHMS = Path(__file__).parents[2] / "algorithms"
TRUE = Efficiency(train=0.31, forward=0.37, link=0.5, network=0.5, recomputation=0.0, step_s=0.004, row_s=0.02)
FIXED = Tokens(512, "fixed", (1024.0,))


def study_of(plan: str, tokens: Tokens = FIXED, driver: str = "grpo", costs=None, prompts: int = 64, model="qwen3-8b"):
    flow = load_script(str(ALGORITHMS / f"{driver}.py"))
    for handle in flow.handles:
        if handle.arguments.get("model") is not None:
            flow.use_model(handle.name, model)
    loaded = Plan.load(ALGORITHMS / "plans" / f"{plan}.yaml")
    return flow.study(loaded, driver, tokens=tokens, costs=costs, steps=8, prompts_per_step=prompts)


def measured(study, efficiency: Efficiency) -> Calibrated:
    """What a run on a machine with these efficiencies would tell of its calls."""
    costs = Roofline(study.plan.cluster, efficiency)
    works = {work.title: work for work in study.works.values() if work.kind != "none"}
    works["actor.publish"] = study.publish("actor")
    fits = {title: Fit(costs.seconds(work), error=0.02, calls=8) for title, work in works.items()}
    return Calibrated("run", fits, Fit(0.0, error=0.02))


def test_what_a_machine_reaches_is_found_again():
    study = study_of("disaggregated_16")
    found = fit_efficiency(study, measured(study, TRUE))
    for name in ("train", "forward", "network", "step_s", "row_s"):
        assert getattr(found.efficiency, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    assert all(call.off < 1e-3 for call in found.calls)
    assert found.efficiency.error == 0.02, "that of the run, where the fit itself is exact"
    assert found.efficiency.sources["train"] == "fitted to run" and "assumed" in found.efficiency.sources["memory"]
    assert "train 0.31" in found.report() and found.to_json()["efficiency"]["error"] == 0.02


@pytest.mark.parametrize("plan", ("colocated_8", "split_16", "disaggregated_64", "colocated_64"))
def test_other_plans_are_predicted_from_one_run(plan):
    """On machines of the same kind; other numbers of rows, pools, meshes, backends and nodes."""
    study = study_of("disaggregated_16")
    found = fit_efficiency(study, measured(study, TRUE)).efficiency
    for prompts in (32, 256):
        other = study_of(plan, prompts=prompts)
        cluster = other.plan.cluster
        truth = study_of(plan, prompts=prompts, costs=Roofline(cluster, TRUE)).simulate().step_seconds
        told = study_of(plan, prompts=prompts, costs=Roofline(cluster, found)).simulate().step_seconds
        assert told == pytest.approx(truth, rel=0.02)


def test_an_engines_curve_tells_a_row_from_a_step():
    """Decode, step by step: what is measured beside reading and computing is a step's, and each row's."""
    tokens = Tokens(512, "lognormal", (800.0, 0.5))
    study = study_of("disaggregated_16", tokens)
    true = Efficiency(step_s=0.006, slot_s=5e-5)
    work = next(w for w in study.works.values() if w.kind == "generate")
    costs = Roofline(study.plan.cluster, true)
    one, many = (costs.token_seconds(work, n) for n in (1, 128))
    row = (many - one) / 127
    curve = EngineCurve(prompt=1e-5, step=one - row, row=row, replicas=work.mesh.data, calls=9)
    run = measured(study, true)
    found = fit_efficiency(study, Calibrated("run", run.fits, run.step, curves={"actor.generate": curve})).efficiency
    assert found.slot_s == pytest.approx(true.slot_s, rel=0.05)
    assert found.step_s == pytest.approx(true.step_s, rel=0.05)
    assert 0 < found.prefill <= 1


def test_what_a_call_takes_whatever_its_tokens_is_no_part_of_a_peak():
    study = study_of("colocated_8")
    run = measured(study, TRUE)
    update = next(w for w in study.works.values() if w.kind == "train")
    slow = run.fits["actor.update"].base
    fits = {**run.fits, "actor.update": Fit(2.0, slow / update.load.tokens, error=0.02, calls=8)}
    found = fit_efficiency(study, Calibrated("run", fits, run.step)).efficiency
    assert found.call_s == pytest.approx(2.0 / update.minibatches / update.epochs, rel=0.02)
    assert found.train == pytest.approx(TRUE.train, rel=0.05)


def sizes_of(work, sizes=((2, 0.5), (4, 0.5), (2, 1.0), (4, 1.0), (2, 2.0), (4, 2.0))):
    """The work of an op with other numbers of rows to a prompt, and other lengths of responses."""
    load = work.load
    prompts = load.rows // load.group
    return [
        replace(work, load=Workload(prompts * group, load.prompt, load.response * longer, group=group))
        for group, longer in sizes
    ]


def called(study, work, true: Efficiency) -> Calibrated:
    """A run that called an op so: its calls, and a publish."""
    costs = Roofline(study.plan.cluster, true)
    calls = [
        Call(work.title, number, costs.seconds(each), each.load.tokens, each.load.rows)
        for number, each in enumerate(sizes_of(work))
    ]
    publish = study.publish("actor")
    fits = {work.title: Fit.of(calls), publish.title: Fit(costs.seconds(publish), calls=6)}
    return Calibrated("run", fits, Fit(0.0), calls={work.title: calls})


CPUS = """\
cluster: {device: cpu, nodes: 1, devices_per_node: RANKS}
pools: {train: {devices: "0-LAST"}, cpu: {processes: 1}}
place:
  actor:
    train:    {pool: train, mesh: {fsdp: RANKS}, backend: fsdp2}
    generate: {pool: train, mesh: {dp: RANKS}}
  ref: {pool: train, mesh: {fsdp: RANKS}, backend: fsdp2}
  reward: {pool: cpu}
"""


def study_of_cpus(ranks: int, costs=None):
    flow = load_script(str(ALGORITHMS / "grpo.py"))
    plan = read(CPUS.replace("RANKS", str(ranks)).replace("LAST", str(ranks - 1)))
    return flow.study(plan, "grpo", tokens=Tokens(24, "fixed", (64.0,)), costs=costs, steps=4, runtime="ray")


def test_sharded_weights_on_cpus_tell_the_link_and_publishes_what_they_take_besides():
    """One run on two ranks: what its updates take whatever their size is traffic, which one rank does not have."""
    true = Efficiency(train=0.6, link=0.05, network=0.05, publish_s=0.07, recomputation=0.0)
    study = study_of_cpus(2)
    update = next(w for w in study.works.values() if w.title == "actor.update")
    assert update.load.group > 1, "rows of a prompt are trained on together"
    found = fit_efficiency(study, called(study, update, true)).efficiency
    for name in ("train", "link", "network", "publish_s", "recomputation"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-3), name
    for ranks in (1, 2, 4):
        there = study_of_cpus(ranks)
        work = next(w for w in there.works.values() if w.title == "actor.update")
        told, truth = (Roofline(there.plan.cluster, each).seconds(work) for each in (found, true))
        assert told == pytest.approx(truth, rel=1e-3)


def test_updates_of_one_size_tell_no_link_and_publishes_do():
    """What is left of them is then computing: all of it is taken to be as fast as it was."""
    true = Efficiency(train=0.6, link=0.05, network=0.05, recomputation=0.0)
    study = study_of_cpus(2)
    update = next(w for w in study.works.values() if w.title == "actor.update")
    seconds = Roofline(study.plan.cluster, true).seconds(update)
    calls = [Call(update.title, n, seconds, update.load.tokens, update.load.rows) for n in range(6)]
    run = called(study, update, true)
    run = Calibrated("run", {**run.fits, update.title: Fit.of(calls)}, Fit(0.0), calls={update.title: calls})
    found = fit_efficiency(study, run).efficiency
    for name in ("train", "link", "network", "publish_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-3, abs=1e-9), name


def test_rows_that_share_their_prompt_tell_the_part_of_a_peak():
    """Calls with two and four rows to a prompt: fitted to their tokens alone they would be off."""
    true = Efficiency(train=0.6, call_s=0.05, recomputation=0.0)
    study = study_of_cpus(1)
    update = next(w for w in study.works.values() if w.title == "actor.update")
    found = fit_efficiency(study, called(study, update, true)).efficiency
    assert (found.train, found.call_s) == (pytest.approx(0.6), pytest.approx(0.05))


def test_a_machine_faster_than_its_peak_is_told_as_an_error():
    study = study_of("colocated_8")
    run = measured(study, TRUE)
    fits = {title: Fit(fit.base / 1000, error=0.02, calls=8) for title, fit in run.fits.items()}
    found = fit_efficiency(study, Calibrated("run", fits, run.step))
    assert found.efficiency.train == pytest.approx(1.0) and found.efficiency.error is not None
    assert found.efficiency.error > 1


def test_a_run_of_another_program_tells_nothing():
    with pytest.raises(PlanError, match="no call of run is one of this program"):
        fit_efficiency(study_of("colocated_8"), Calibrated("run", {"judge.score": Fit(1.0)}, Fit(0.0)))


def test_what_moves_of_memory_reach_is_found_and_simulated():
    """Workers of a pool that take turns: the way to host memory is fitted to what they took, and carries over."""
    true = Efficiency(host=0.23)
    study = study_of("colocated_8", model="qwen3-32b")
    costs = Roofline(study.plan.cluster, true)
    moves = [study.swap("gpu", who, what) for who in study.memory["gpu"].sizes for what in ("offload", "onload")]
    run = measured(study, true)
    fits = {**run.fits, **{work.title: Fit(costs.seconds(work), calls=8) for work in moves}}
    calibrated = Calibrated("run", fits, run.step)
    found = fit_efficiency(study, calibrated).efficiency
    assert found.host == pytest.approx(0.23, rel=1e-3)
    cluster = study_of("split_16").plan.cluster
    truth = study_of("split_16", model="qwen3-32b", costs=Roofline(cluster, true)).simulate()
    told = study_of("split_16", model="qwen3-32b", costs=Roofline(cluster, found)).simulate()
    assert any(bar.node == "actor.train.onload" for bar in told.bars)
    assert told.step_seconds == pytest.approx(truth.step_seconds, rel=0.02)
    slower = Fit(3.0, calls=8)
    at_once = study_of("colocated_8", model="qwen3-32b", costs=calibrated).simulate()
    moved = Calibrated("run", {**fits, "actor.train.onload": slower}, run.step)
    later = study_of("colocated_8", model="qwen3-32b", costs=moved).simulate()
    assert later.step_seconds - at_once.step_seconds == pytest.approx(3.0 - fits["actor.train.onload"].base, rel=1e-6)


@pytest.mark.parametrize("seconds", [0.0, 0.25, 4.0])
def test_what_environments_take_is_no_part_of_a_decoded_token(seconds):
    """A run of episodes tells the seconds of a token where it says how long these wait, and too many where it does not."""
    flow = load_script(str(ALGORITHMS / "gigpo.py"))
    flow.use_model("actor", "qwen3-8b")
    actor = {"train": Place("gpus", Mesh.of("fsdp=8"), "fsdp2"), "generate": Place("gpus", Mesh.of("dp=8"), "vllm")}
    pools = {"gpus": Pool("gpus", devices=tuple(range(8))), "cpu": Pool("cpu", processes=8)}
    plan = Plan(pools, {"actor": actor, "game": Place("cpu")}, Cluster.of("h100-80:1x8"))
    waits = replace(FIXED, measured_turns={"game.rollout": Turns(4, seconds)}, turns_source="run")
    study = flow.study(plan, "gigpo", tokens=waits, steps=8)
    found = fit_efficiency(study, measured(study, TRUE))
    assert found.efficiency.step_s == pytest.approx(TRUE.step_s, rel=1e-3) and all(
        call.off < 1e-3 for call in found.calls
    )
    blind = fit_efficiency(flow.study(plan, "gigpo", tokens=FIXED, steps=8), measured(study, TRUE)).efficiency
    assert blind.step_s == pytest.approx(TRUE.step_s + 3 * seconds / 1024, rel=0.02)
