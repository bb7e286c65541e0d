"""Every driver with every preset: short, without findings, drawn in every format, and it trains for three steps."""

from __future__ import annotations

import inspect
import json
import math

import pytest
from short_runs import ALGORITHMS, DRIVERS, parameters

from flowrl.cli import load_script
from flowrl.graph.draw import render

pytestmark = pytest.mark.usefixtures("one_thread", "drivers_path")

#: Workers whose weights the program of a driver changes.
TRAINED = {"reward_model": "judge", "rlhf": "actor"}
SERIAL = {"dapo"}
WITHOUT_SAMPLES = {"sft", "dpo", "reward_model"}
#: What a run tells of each step in which a policy has sampled and learned, and more of one that learns by advantages.
OF_SAMPLED = {"entropy", "repetition", "grad_norm", "response_length", "response_truncated"}
BY_ADVANTAGES = {"rollout_kl", "ratio_max", "ess", "silent_groups", "truncated"}
CLIPPED = {"clip_low", "clip_high"}


def cases():
    import sys

    sys.path.insert(0, str(ALGORITHMS))
    try:
        for name in DRIVERS:
            flow = load_script(str(ALGORITHMS / f"{name}.py"))
            for preset in flow.find_program(None).presets or [None]:
                yield pytest.param(name, preset, id=name if preset is None else f"{name}-{preset}")
    finally:
        sys.path.remove(str(ALGORITHMS))


CASES = list(cases())


def test_the_drivers_are_those_of_the_field():
    wanted = "sft reward_model dpo grpo ppo remax dapo gigpo safe_rlhf raft distillation judge online_dpo rlhf"
    assert {*wanted.split(), "tool_use", "tictactoe"} <= set(DRIVERS)


@pytest.mark.parametrize("name", DRIVERS)
def test_a_program_has_at_most_forty_lines(name):
    flow = load_script(str(ALGORITHMS / f"{name}.py"))
    for program in flow.programs.values():
        assert len(inspect.getsource(program.fn).splitlines()) <= 40


@pytest.mark.parametrize(("name", "preset"), CASES)
def test_it_has_no_findings_and_is_drawn(load_driver, name, preset):
    flow = load_driver(name)
    said = parameters(flow, preset)
    report = flow.check(**said)
    assert not report.errors, report.text()
    assert {lint.kind for lint in report.lints} <= ({"serial"} if name in SERIAL else set())
    graph = flow.graph(**said)
    lines = {(n.file, n.line) for n in graph.nodes if n.worker not in ("batch", "data")}
    assert 1 <= len(lines) <= 13
    for how in ("text", "mermaid", "json", "svg"):
        assert len(render(graph, how)) > 200


@pytest.mark.parametrize(("name", "preset"), CASES)
def test_it_trains_for_three_steps(load_driver, tmp_path, name, preset):
    flow = load_driver(name)
    name_of = flow.default_program()
    flow.run(out=tmp_path, quiet=True, save_models=False, parameters={name_of: parameters(flow, preset)})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert not [line["text"] for line in events if line["kind"] == "not kept"], (
        "a resume takes no longer with its steps"
    )
    (manifest,) = (json.loads(path.read_text()) for path in tmp_path.glob("checkpoints/*/manifest.json"))
    assert manifest["ended"] and "variables" in manifest["program"]
    numbers = [v for line in lines for v in line.values() if isinstance(v, float)]
    assert all(math.isfinite(v) for v in numbers)
    worker = TRAINED.get(name, "actor")
    norms = [line.get("grad_norm", line.get(f"{worker}/grad_norm")) for line in lines]
    assert max(norms) > 0, "no step had a gradient"
    told = [{metric.rpartition("/")[2] for metric in line} for line in lines]
    calls = [call for trail in flow.trace(**parameters(flow, preset)).trails for call in trail.calls]
    losses = [loss for call in calls if getattr(loss := call.arguments.get("loss"), "of_policy", False)]
    wanted = OF_SAMPLED if name not in WITHOUT_SAMPLES else {"grad_norm"}
    wanted = wanted | (BY_ADVANTAGES if losses else set())
    wanted = wanted | (CLIPPED if any({"ratio", "clip_fraction"} <= set(loss.reports) for loss in losses) else set())
    assert all(wanted <= metrics for metrics in told), [wanted - metrics for metrics in told]


def op_lines(flow, program=None):
    graph = flow.graph(program)
    return {n.line for n in graph.nodes if n.worker not in ("batch", "data")}


def test_safe_rlhf_is_ppo_plus_at_most_five_op_lines(load_driver):
    assert len(op_lines(load_driver("safe_rlhf"))) <= len(op_lines(load_driver("ppo"))) + 5


def test_remax_is_ppo_without_a_critic_plus_one_greedy_generate(load_driver):
    graphs = {name: load_driver(name).graph() for name in ("ppo", "remax")}
    ops = {name: sorted(f"{n.worker}.{n.op}" for n in g.nodes if n.worker != "batch") for name, g in graphs.items()}
    critics = [op for op in ops["ppo"] if op.startswith("critic.")]
    assert critics == ["critic.update", "critic.values"]
    assert ops["remax"].count("actor.generate") == ops["ppo"].count("actor.generate") + 1
    left = [op for op in ops["ppo"] if op not in (*critics, "rl.gae")]
    assert set(left) <= set(ops["remax"])
