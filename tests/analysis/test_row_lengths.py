"""Responses of different lengths: the search, the roofline and the simulator price them by the same engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.analysis.row_lengths import Tokens
from flowrl.analysis.search_problem import problem_of
from flowrl.cli.arguments.script import load_script
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cost.roofline import Roofline
from flowrl.placement.plan.plan import Plan
from flowrl.placement.search.find_placement import search

GRPO = Path(__file__).parents[2] / "algorithms" / "grpo.py"
PLAN = """
cluster: {{device: h100-80, nodes: 2, devices_per_node: 8}}
pools: {{train: {{devices: "0-7"}}, rollout: {{devices: "8-15"}}, cpu: {{processes: 64}}}}
place:
  actor:
    train:    {{pool: train, mesh: {{fsdp: 8}}, backend: fsdp2}}
    generate: {{pool: rollout, mesh: {{dp: 4, tp: 2}}, engine: vllm}}
  ref: {{pool: train, mesh: {{fsdp: 8}}, backend: fsdp2}}
  reward: {{pool: cpu}}
pipeline: {{staleness: {staleness}, order: {order}, publish: {publish}}}
"""


@pytest.fixture(scope="module")
def grpo():
    flow = load_script(str(GRPO))
    flow.use_model("actor", "Qwen/Qwen3-8B")
    return flow


def study(grpo, tmp_path, *numbers: float, staleness: int = 0, order: str = "fifo", publish: str = "drain", rows=64):
    (tmp_path / "plan.yaml").write_text(PLAN.format(staleness=staleness, order=order, publish=publish))
    kind = "lognormal" if len(numbers) > 1 else "fixed"
    return grpo.study(
        Plan.load(tmp_path / "plan.yaml"),
        "grpo",
        tokens=Tokens(512, kind, numbers),
        steps=8,
        prompts_per_step=rows,
        group_size=8,
    )


def generate_seconds(study) -> float:
    works = [w for w in study.works.values() if w.kind == "generate"]
    return study.cost_model.seconds(works[0])


def simulated(study) -> float:
    spans = [bar for bar in study.simulate().bars if bar.node.startswith("actor.generate")]
    return sum(bar.end - bar.start for bar in spans) / len(spans)


def test_lengths_that_hardly_vary_cost_what_one_length_costs(grpo, tmp_path):
    one, all_alike = study(grpo, tmp_path, 800.0), study(grpo, tmp_path, 800.0, 0.001)
    assert generate_seconds(all_alike) == pytest.approx(generate_seconds(one), rel=0.01)
    assert simulated(all_alike) == pytest.approx(simulated(one), rel=0.01)


@pytest.mark.parametrize("sigma", [0.3, 0.8, 1.2])
def test_a_roofline_prices_a_tail_as_the_simulator_flies_it(grpo, tmp_path, sigma):
    tail = study(grpo, tmp_path, 800.0, sigma, 8192.0)
    assert generate_seconds(tail) == pytest.approx(simulated(tail), rel=0.12)


def test_a_tail_costs_more_than_its_mean_and_less_than_its_longest_row_for_all(grpo, tmp_path):
    mean, tail, longest = (study(grpo, tmp_path, *numbers) for numbers in ((800.0,), (800.0, 1.0, 8192.0), (8192.0,)))
    assert 2 * generate_seconds(mean) < generate_seconds(tail) < 0.7 * generate_seconds(longest)


def test_staleness_hides_a_tail_and_never_slows_the_schedule(grpo, tmp_path):
    steps = [study(grpo, tmp_path, 800.0, 1.2, 8192.0, staleness=s).simulate().step_seconds for s in (0, 1, 2)]
    assert steps[1] < 0.85 * steps[0] and steps[2] <= steps[1] * 1.01


def test_an_interrupt_pays_for_what_is_computed_again_and_continue_does_not(grpo, tmp_path):
    asked = {"staleness": 2, "order": "window"}
    interrupt, goes_on = (
        study(grpo, tmp_path, 800.0, 1.2, 8192.0, publish=publish, **asked).simulate().makespan
        for publish in ("interrupt", "continue")
    )
    assert goes_on < interrupt


def test_a_search_reckons_with_the_tail_that_the_simulator_flies(grpo, tmp_path):
    asked = study(grpo, tmp_path, 800.0, 1.0, 8192.0)
    cluster = Cluster.of("h100-80:1x8")
    graph = grpo.graph("grpo", steps=8, prompts_per_step=64, group_size=8)
    found = search(problem_of(asked, graph, cluster), Roofline(cluster))
    flown = grpo.study(
        found.plan,
        "grpo",
        tokens=Tokens(512, "lognormal", (800.0, 1.0, 8192.0)),
        steps=8,
        prompts_per_step=64,
        group_size=8,
    ).simulate()
    assert found.step_seconds == pytest.approx(flown.step_seconds, rel=0.12)
