"""The shipped plans: which models each is for, that it checks and simulates with them, and what its schedule takes."""

from __future__ import annotations

import doctest
import json
import math
import re
import runpy
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flowrl.analysis.row_lengths import Tokens
from flowrl.cli import load_script, main
from flowrl.placement.backends import backend
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.cost_model import GivenCosts
from flowrl.placement.model.weight_layout import check_layout
from flowrl.placement.model.zoo import SHIPPED
from flowrl.placement.plan.plan import Pipeline, Plan
from flowrl.placement.plan.plan_file import read

pytestmark = pytest.mark.usefixtures("drivers_path")

ROOT = Path(__file__).parents[2]
PLANS = ROOT / "algorithms" / "plans"
OWN = "its own"  # the model of 1.6 million parameters that the drivers have

UP_TO_2B = (OWN, "qwen3-0.6b", "qwen3-1.7b")
UP_TO_8B = (*UP_TO_2B, "qwen3-4b", "llama-7b", "llama-3.1-8b", "qwen3-8b")
UP_TO_14B = (*UP_TO_8B, "llama-13b", "qwen3-14b")
UP_TO_30B = (*UP_TO_14B, "qwen3-30b-a3b")
UP_TO_70B = (*UP_TO_30B[1:], "qwen3-32b", "llama-34b", "llama-70b", "llama-3.1-70b")
TRAINING = frozenset({"actor.update"})
BOTH = frozenset({"actor.update", "actor.generate"})
CRITIC_TOO = frozenset({"actor.update", "critic.values"})
NO_32B: dict[str, frozenset[str]]
NO_32B = {name: TRAINING for name in ("qwen3-32b", "llama-34b", "llama-70b", "qwen3-235b-a22b")}
NO_30B = NO_32B | {"qwen3-30b-a3b": TRAINING, "qwen3-235b-a22b": BOTH}
LARGEST = {"actor.update": ("optimizer", "gradients"), "critic.values": ("optimizer",), "actor.generate": ("weights",)}
EXPERTS = ("qwen3-30b-a3b", "glm-4.5-air", "qwen3-235b-a22b", "glm-4.5")
LARGEST_MODELS = ("llama-3.1-405b", "glm-4.5", "deepseek-v3", "kimi-k2")


@dataclass(frozen=True)
class For:
    """What a plan is for: drivers, models that fit, models that do not with the turns that have no room for them.

    ``rows`` of a step, each with 1024 tokens of prompt and of response.
    """

    drivers: tuple[str, ...]
    fits: tuple[str, ...]
    too_large: dict[str, frozenset[str]] = field(default_factory=dict)
    rows: int = 512


TABLE = {
    "one_process": For(("grpo", "ppo"), (OWN,)),
    "split_cpu": For(("grpo", "ppo"), (OWN,)),
    "disaggregated_cpu": For(("grpo", "ppo"), (OWN,)),
    "ranks_2_cpu": For(("grpo",), (OWN,)),
    "ranks_4_cpu": For(("grpo",), (OWN,)),
    "ranks_megatron_cpu": For(("grpo",), (OWN,)),
    "one_gpu": For(("grpo",), UP_TO_2B, {"qwen3-4b": TRAINING, "llama-7b": TRAINING}),
    "colocated_8": For(("grpo",), UP_TO_30B, NO_32B),
    "colocated_8_dp": For(("grpo",), UP_TO_14B, {"qwen3-32b": TRAINING, "llama-34b": TRAINING}),
    "ppo_colocated_8": For(("ppo",), UP_TO_30B, NO_32B),
    "split_16": For(("grpo",), UP_TO_30B, NO_32B),
    "ppo_split_16": For(
        ("ppo",),
        UP_TO_30B,
        NO_32B | {name: CRITIC_TOO for name in ("llama-34b", "llama-70b", "qwen3-235b-a22b")},
    ),
    "disaggregated_16": For(("grpo",), UP_TO_14B, NO_30B),
    "ppo_disaggregated_16": For(("ppo",), UP_TO_14B, NO_30B),
    "colocated_64": For(("grpo",), UP_TO_70B, {"qwen3-235b-a22b": TRAINING}),
    "ppo_colocated_64": For(("ppo",), UP_TO_70B, {"qwen3-235b-a22b": TRAINING}),
    "disaggregated_64": For(("grpo",), UP_TO_70B, {"qwen3-235b-a22b": TRAINING}),
    "disaggregated_1024": For(("grpo",), EXPERTS, rows=4096),  # others have no experts to spread over ep
    "disaggregated_1024_folded": For(("grpo",), LARGEST_MODELS, rows=4096),
    "ppo_disaggregated_1024": For(("ppo",), UP_TO_70B, {"qwen3-235b-a22b": TRAINING}, rows=4096),
}
NAMES = tuple(TABLE)
FITS = [(name, driver, model) for name, said in TABLE.items() for driver in said.drivers for model in said.fits]
TOO_LARGE = [
    (name, driver, model) for name, said in TABLE.items() for driver in said.drivers for model in said.too_large
]


def plan_of(name: str, **pipeline) -> Plan:
    """A shipped plan, its pipeline line changed where there are settings."""
    plan = Plan.load(PLANS / f"{name}.yaml")
    return Plan(plan.pools, plan.place, plan.cluster, Pipeline(**pipeline)) if pipeline else plan


def study_of(plan: Plan, driver: str, model: str = OWN, *, rows: int = 0, costs=None):
    flow = load_script(str(ROOT / "algorithms" / f"{driver}.py"))
    if model == OWN:
        return flow.study(plan, costs=costs)
    for worker in ("actor", "critic"):
        if worker in [h.name for h in flow.handles]:
            flow.use_model(worker, model)
    prompts = rows // 8 if driver == "grpo" else rows
    return flow.study(plan, costs=costs, tokens=Tokens(1024, "fixed", (1024,)), prompts_per_step=prompts)


def short_of_memory(study) -> list[str]:
    found = [memory.fits(study.turns(pool)) for pool, memory in study.pool_memory.items()]
    return [error.what for error in found if error is not None]


# -- what they are ---------------------------------------------------------------------------------


def test_every_plan_is_in_the_table():
    assert {path.stem for path in PLANS.glob("*.yaml")} == set(TABLE)
    shipped = set(SHIPPED) | {OWN}
    assert all({*said.fits, *said.too_large} <= shipped for said in TABLE.values())
    assert {model for _, _, model in FITS} == shipped, "each shipped model has a plan"


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_says_whom_it_is_for_and_reads_back_as_it_is_written(name):
    path = PLANS / f"{name}.yaml"
    plan = Plan.load(path)
    assert path.read_text().startswith("# ")
    again = read(plan.to_yaml())
    assert again == plan and again.to_json() == plan.to_json()


@pytest.mark.parametrize("name", NAMES)
def test_it_places_workers_of_its_drivers_and_no_others(name):
    for driver in TABLE[name].drivers:
        flow = load_script(str(ROOT / "algorithms" / f"{driver}.py"))
        plan = Plan.load(PLANS / f"{name}.yaml")
        workers = [h.name for h in flow.handles]
        plan.check_workers(workers)
        if plan.cluster is not None:  # a worker without a place would get a replica on every device
            assert set(plan.place) == set(workers)


@pytest.mark.parametrize("name", NAMES)
def test_check_finds_no_mistake_with_the_largest_model_that_it_is_for(name, capsys):
    said = TABLE[name]
    for driver in said.drivers:
        words = ["check", str(ROOT / "algorithms" / f"{driver}.py"), "--plan", str(PLANS / f"{name}.yaml")]
        model = max(said.fits, key=size_of)
        if model != OWN:
            words += ["--model", f"actor={model}"]
            words += ["--model", f"critic={model}"] if driver == "ppo" else []
        assert main(words) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", ["ranks_2_cpu", "ranks_4_cpu", "ranks_megatron_cpu"])
def test_plans_for_ranks_have_nothing_to_remark_and_can_run_on_them(name):
    from flowrl.analysis.check_plan import plan_findings
    from flowrl.lowering.deployment import number_ranks

    flow = load_script(str(ROOT / "algorithms" / "grpo.py"))
    plan = plan_of(name)
    study = flow.study(plan)
    assert plan_findings(study) == ([], []) and study.execution.runtime == "ray"
    found = study.execution.deployments
    assert {worker for worker, _ in found} == {"actor", "ref", "reward"} and found["actor", False].spec.collective
    assert not found["actor", True].spec.collective, "a whole copy generates on each rank"
    assert sum(map(len, number_ranks(plan).values())) == sum(pool.size for pool in plan.pools.values())


def size_of(model: str) -> float:
    from flowrl.placement.model.model_shape import shape_named

    return 0.0 if model == OWN else shape_named(model).parameters


# -- which models fit ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "driver", "model"), FITS)
def test_it_fits_and_simulates(name, driver, model):
    plan = plan_of(name)
    study = study_of(plan, driver, model, rows=TABLE[name].rows)
    assert short_of_memory(study) == []
    for worker, _, place in plan.roles():
        shape = study.roles[worker].model
        if shape is not None:
            check_layout(shape, place.mesh, backend(place.backend).layout)
    simulated = study.simulate(5)
    assert simulated.steps == 5
    assert 0 < simulated.step_seconds < math.inf and simulated.makespan >= simulated.step_seconds
    assert {p.name for p in simulated.pools} == set(plan.pools)
    for pool in simulated.pools:
        assert 0 < pool.busy <= 1 + 1e-9, pool.name
        assert pool.busy * simulated.makespan + sum(pool.idle.values()) == pytest.approx(simulated.makespan)
    assert simulated.lags and min(simulated.lags) >= 0 and simulated.lag_max <= plan.pipeline.staleness
    assert simulated.cost_source == "roofline"


@pytest.mark.parametrize(("name", "driver", "model"), TOO_LARGE)
def test_where_it_does_not_fit_the_turn_and_its_largest_part_are_named(name, driver, model):
    said = TABLE[name]
    found = short_of_memory(study_of(plan_of(name), driver, model, rows=said.rows))
    turns = {what.split(": ")[1].split(" needs ")[0] for what in found}
    assert turns == said.too_large[model]
    for what in found:
        need, have = (float(part.split(" GB")[0]) for part in what.split(" needs ")[1].split(" of ", 1))
        assert need > have
        turn, parts = what.split(": ")[1].split(" needs ")[0], what.split(": ")[2]
        assert any(part in parts.split(",")[0] for part in LARGEST[turn]), "the largest part comes first"


def test_on_twice_the_devices_the_34b_fits():
    """The finding is about room, not about the model: with twice the devices it is gone."""
    small = plan_of("colocated_8")
    assert short_of_memory(study_of(small, "grpo", "llama-34b", rows=512))
    larger = read(
        (PLANS / "colocated_8.yaml")
        .read_text()
        .replace("nodes: 1", "nodes: 2")
        .replace("0-7", "0-15")
        .replace("fsdp: 8", "fsdp: 16")
        .replace("dp: 4, tp: 2", "dp: 8, tp: 2")
    )
    assert larger.place_of("actor").mesh == Mesh.of("fsdp=16")
    assert short_of_memory(study_of(larger, "grpo", "llama-34b", rows=512)) == []


# -- what their schedules take: closed forms -------------------------------------------------------

N = 10
GENERATE, SCORE, REF, UPDATE, PUBLISH, VALUES, CRITIC = 6.0, 1.0, 2.0, 3.0, 0.5, 4.0, 5.0
GRPO = {
    "actor.generate": GENERATE,
    "reward.score": SCORE,
    "ref.logprobs": REF,
    "actor.update": UPDATE,
    "actor.publish": PUBLISH,
}
PPO = {**GRPO, "critic.values": VALUES, "critic.update": CRITIC}


def flown(name: str, driver: str = "grpo", **pipeline):
    costs = GivenCosts(GRPO if driver == "grpo" else PPO)
    return study_of(plan_of(name, **pipeline), driver, costs=costs).simulate(N)


def test_in_one_process_a_step_is_the_sum_of_its_calls():
    simulated = flown("one_process")
    assert simulated.makespan == pytest.approx(N * (GENERATE + SCORE + REF + UPDATE))
    assert simulated.step_seconds == pytest.approx(simulated.makespan / N)
    assert simulated.cost_source == "given" and simulated.pools[0].busy == pytest.approx(1)


def test_colocated_is_the_sum_of_what_the_devices_do():
    """Rewards are computed beside the reference and end before it."""
    assert flown("colocated_8").makespan == pytest.approx(N * (GENERATE + REF + UPDATE))
    whole = N * (GENERATE + REF + VALUES + CRITIC + UPDATE)
    assert flown("ppo_colocated_8", "ppo").makespan == pytest.approx(whole)


def test_split_is_the_slowest_branch_of_each_stage():
    simulated = flown("ppo_split_16", "ppo")
    assert simulated.makespan == pytest.approx(N * (GENERATE + max(SCORE, REF, VALUES) + max(CRITIC, UPDATE)))
    busy = {p.name: p.busy * simulated.makespan / N for p in simulated.pools}
    assert busy == pytest.approx({"actor": GENERATE + REF + UPDATE, "critic": VALUES + CRITIC, "cpu": SCORE})


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_chunks_fill_and_drain(chunks):
    """The slower op runs through; the faster one shows with its first chunk or its last one."""
    simulated = flown("split_16", chunks=chunks)
    assert simulated.makespan == pytest.approx(N * (GENERATE + REF / chunks + UPDATE))
    slow = GivenCosts({**GRPO, "ref.logprobs": 9.0})
    simulated = study_of(plan_of("split_16", chunks=chunks), "grpo", costs=slow).simulate(N)
    assert simulated.makespan == pytest.approx(N * (GENERATE / chunks + 9.0 + UPDATE))


@pytest.mark.parametrize("chunks", [1, 4])
def test_one_step_off_generates_while_it_trains(chunks):
    """N generates in a row with a publish between, then the last rows are trained on."""
    simulated = flown("disaggregated_16", staleness=1, chunks=chunks)
    tail = REF / chunks + UPDATE
    assert simulated.makespan == pytest.approx(N * GENERATE + (N - 1) * PUBLISH + tail)
    assert simulated.step_seconds == pytest.approx(GENERATE + PUBLISH)


@pytest.mark.parametrize("staleness", [1, 4])
def test_where_training_is_slower_generation_hides_behind_it(staleness):
    simulated = flown("ppo_disaggregated_16", "ppo", staleness=staleness)
    train = REF + VALUES + CRITIC + UPDATE
    assert simulated.makespan == pytest.approx(GENERATE + N * train + PUBLISH)
    # At S=4 a later step's reference is handed to the pool before an update is ready: commits are not evenly spaced.
    assert simulated.step_seconds == pytest.approx(train, rel=0 if staleness == 1 else 0.1)
    assert simulated.lag_max == staleness


def test_one_driver_placed_five_ways_by_the_plan_alone():
    """Colocated, split, and disaggregated with staleness 0, 1 and 4: seconds of a steady step, and lag."""
    ways = {
        "colocated": flown("colocated_8"),
        "split": flown("split_16", chunks=4),
        "S=0": flown("disaggregated_16", staleness=0),
        "S=1": flown("disaggregated_16", staleness=1),
        "S=4": flown("disaggregated_16", staleness=4),
    }
    assert {way: round(s.step_seconds, 6) for way, s in ways.items()} == {
        "colocated": GENERATE + REF + UPDATE,
        "split": GENERATE + REF / 4 + UPDATE,
        "S=0": GENERATE + REF + UPDATE + PUBLISH,
        "S=1": GENERATE + PUBLISH,
        "S=4": GENERATE + PUBLISH,
    }
    assert [s.lag_max for s in ways.values()] == [0, 0, 0, 1, 1]  # the slower side sets the lag, S bounds it
    calls = {
        way: sorted((b.node, b.step) for b in s.bars if b.chunk == 0 and "publish" not in b.node)
        for way, s in ways.items()
    }
    assert all(c == calls["colocated"] for c in calls.values()), "the same calls in every way"


def test_the_plan_for_1024_devices_simulates_100_steps_in_seconds():
    begin = time.perf_counter()
    simulated = study_of(plan_of("ppo_disaggregated_1024"), "ppo", "llama-70b", rows=4096).simulate(100)
    assert simulated.steps == 100 and simulated.lag_max == 1
    assert time.perf_counter() - begin < 5


# -- the pages on them -----------------------------------------------------------------------------

DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", ["plans.md", "simulator.md"])
def test_a_page_has_what_its_commands_print(name):
    made = runpy.run_path(str(DOCS / "make_command_outputs.py"))["page"]
    text = (DOCS / name).read_text()
    assert text == made(text), "run python docs/make_command_outputs.py"
    assert text.count("```console") > 2 and "Traceback" not in text


@pytest.mark.parametrize("name", ["plans.md", "simulator.md"])
def test_python_on_a_page_gives_what_it_says(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    examples = "\n".join(re.findall(r"^```pycon\n(.*?)^```", (DOCS / name).read_text(), re.M | re.S))
    test = doctest.DocTestParser().get_doctest(examples, {}, name, name, 0)
    told: list[str] = []
    done = doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    assert done.attempted > 3 and not done.failed, "".join(told)


@pytest.mark.parametrize("name", ["plans.md", "simulator.md"])
def test_commands_of_a_page_are_commands_with_their_options(name):
    """Those of its shell blocks, which are not run here: their words are read."""
    from flowrl.cli import COMMANDS

    blocks = re.findall(r"^```sh\n(.*?)^```", (DOCS / name).read_text(), re.M | re.S)
    commands = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    assert commands
    for command in commands:
        program, verb, script, *words = shlex.split(command)
        assert program == "flowrl" and verb in COMMANDS
        assert script.startswith("runs/") or (ROOT / script).exists(), script
        plans = [words[i + 1] for i, word in enumerate(words) if word == "--plan"]
        assert all((ROOT / plan).exists() for plan in plans), plans


# -- for real --------------------------------------------------------------------------------------


def test_the_same_driver_runs_under_them_in_this_process(tmp_path):
    """S=0 gives the weights of eager; the shipped S=1 gives others, the same ones each time."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    few = {"grpo": {"steps": 3, "prompts_per_step": 2, "group_size": 2}}

    def run(out, name, runtime="local", **pipeline):
        flow = load_script(str(ROOT / "algorithms" / "grpo.py"))
        placed = plan_of(name, **pipeline)
        how = {"quiet": True, "save_models": False, "parameters": few}
        done = flow.run(out=tmp_path / out, plan=placed, runtime=runtime, **how)
        lines = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
        return done.weights_digest

    assert run("eager", "split_cpu", "eager") == run("s0", "disaggregated_cpu", staleness=0)
    assert run("s1", "disaggregated_cpu") == run("s1 again", "disaggregated_cpu", staleness=1)
    assert run("s4", "disaggregated_cpu", staleness=4)
