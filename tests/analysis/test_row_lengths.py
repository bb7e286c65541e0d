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


# rows to one prompt that are alike


def of_alike(grpo, tmp_path, alike: float, *, staleness: int = 0, order: str = "fifo", seed: int = 0, steps: int = 24):
    (tmp_path / "plan.yaml").write_text(PLAN.format(staleness=staleness, order=order, publish="drain"))
    tokens = Tokens(512, "lognormal", (800.0, 1.0, 8192.0), alike=alike)
    asked = {"steps": steps, "prompts_per_step": 16, "group_size": 32}
    return grpo.study(Plan.load(tmp_path / "plan.yaml"), "grpo", tokens=tokens, seed=seed, **asked)


@pytest.mark.parametrize("alike", [0.0, 0.9])
def test_the_longest_row_of_prompts_that_are_alike_is_priced_as_it_is_flown(grpo, tmp_path, alike):
    asked = of_alike(grpo, tmp_path, alike)
    assert generate_seconds(asked) == pytest.approx(simulated(asked), rel=0.12)


def test_prompts_whose_rows_are_alike_have_a_shorter_tail_and_so_a_shorter_step(grpo, tmp_path):
    plain, alike = (of_alike(grpo, tmp_path, c) for c in (0.0, 0.9))
    assert generate_seconds(alike) < 0.9 * generate_seconds(plain)
    assert simulated(alike) < 0.9 * simulated(plain)


def test_a_window_gains_more_where_prompts_differ_as_wholes(grpo, tmp_path):
    """Groups that end early as wholes can be exchanged; where each has a long row of its own there are none."""

    def gained(alike: float) -> float:
        fifo, window = (
            of_alike(grpo, tmp_path, alike, staleness=2, order=order).simulate().makespan
            for order in ("fifo", "window")
        )
        return fifo / window

    assert gained(0.95) > gained(0.0)


def test_a_search_reckons_with_rows_that_are_alike(grpo, tmp_path):
    from flowrl.analysis.search_problem import find_plan

    cluster = Cluster.of("h100-80:1x8")
    parameters = {"steps": 12, "prompts_per_step": 16, "group_size": 32}
    graph = grpo.graph("grpo", **parameters)
    found = {}
    for alike in (0.0, 0.9):
        tokens = Tokens(512, "lognormal", (800.0, 1.0, 8192.0), alike=alike)
        asked = grpo.study(Plan(cluster=cluster), "grpo", tokens=tokens, **parameters)
        found[alike] = find_plan(asked, graph, cluster, (0,))
        flown = asked.under(found[alike].plan).simulate()
        assert found[alike].step_seconds == pytest.approx(flown.step_seconds)
    assert found[0.9].step_seconds < 0.95 * found[0.0].step_seconds


def test_a_run_tells_how_alike_its_rows_were_and_a_simulation_draws_them_so(tmp_path):
    """From the record of a run to drawn rows: the correlation that was put in comes out, whatever a step says alone."""
    import json
    from statistics import fmean

    from flowrl.analysis.measured_run import tokens_of_run
    from flowrl.placement.cost.group_correlation import correlation
    from flowrl.placement.cost.length_distribution import Lengths
    from flowrl.runtime.storage.traffic import spread

    true = Lengths(10, 4096, "lognormal", (300.0, 0.8), 0.7)
    prompts = [row // 8 for row in range(256)]
    with (tmp_path / "traffic.jsonl").open("w") as file:
        for step in range(40):
            rows = [round(length) for length in true.draw(256, str(step), 8)]
            line = {"program": "grpo", "step": step, "prompts": spread([10] * 256), "responses": spread(rows)}
            file.write(json.dumps({**line, "alike": correlation(rows, prompts)}) + "\n")
    tokens = tokens_of_run(tmp_path, "grpo")
    assert tokens.kind == "measured" and tokens.alike == pytest.approx(0.7, abs=0.03)
    again = Lengths(10, 4096, tokens.kind, tokens.numbers, tokens.alike)
    drawn = [correlation(again.draw(256, str(i), 8), prompts) or 0.0 for i in range(40)]
    assert fmean(drawn) == pytest.approx(0.7, abs=0.06)
    longest = [max(true.draw(256, f"m {i}", 8)) for i in range(400)]
    assert again.longest(256, 8) == pytest.approx(sorted(longest)[int(0.607 * 400)], rel=0.15)
