"""The commands that look at plans: plan, simulate, calibrate, graph --plan; their words, formats and mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.placement.plan.plan import Plan

ROOT = Path(__file__).parents[2]
GRPO, PPO = str(ROOT / "algorithms" / "grpo.py"), str(ROOT / "algorithms" / "ppo.py")
PLAN = """\
cluster: {device: h100-80, nodes: 2, devices_per_node: 8}
pools:
  train:   {devices: "0-7"}
  rollout: {devices: "8-15"}
  cpu:     {processes: 4}
place:
  actor:
    train:    {pool: train, mesh: {fsdp: 8}, backend: fsdp2}
    generate: {pool: rollout, mesh: {dp: 4, tp: 2}, engine: vllm}
  ref:    {pool: train, mesh: {fsdp: 8}, backend: fsdp2}
  reward: {pool: cpu}
pipeline: {staleness: 1}
"""
COSTS = "{actor.generate: 6.0, actor.publish: 0.5, reward.score: 1, ref.logprobs: 2, actor.update: 3}\n"


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(PLAN)
    Path("costs.yaml").write_text(COSTS)


@pytest.fixture
def run(capsys):
    def call(*words):
        status = main([str(w) for w in words])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_simulate_in_every_format(run):
    words = ("simulate", GRPO, "--plan", "plan.yaml", "--costs", "costs.yaml", "--steps", "12")
    status, out, _ = run(*words, "--format", "json")
    record = json.loads(out)
    assert status == 0 and record["steps"] == 12 and record["step_s"] == pytest.approx(6.5)
    assert {"steps", "makespan_s", "step_s", "pools", "spans", "lag", "cost_source"} <= set(record)
    assert record["cost_source"] == "given: costs.yaml" and record["lag"]["max"] == 1
    assert set(record["spans"][0]) >= {"node", "step", "pool", "start_s", "end_s"}
    status, out, _ = run(*words)
    assert status == 0 and "a steady step takes 6.5 s" in out and "given: costs.yaml" in out
    status, out, _ = run(*words, "--format", "trace")
    assert json.loads(out)["traceEvents"]
    status, out, _ = run(*words, "--format", "html", "-o", "page/gantt.html")
    assert (status, out) == (0, "page/gantt.html\n") and "<html" in Path("page/gantt.html").read_text()


def test_simulate_without_a_plan_is_one_pool(run):
    status, out, _ = run("simulate", GRPO, "--costs", "costs.yaml", "--steps", "3", "--format", "json")
    record = json.loads(out)
    assert status == 0 and record["makespan_s"] == 3 * (6 + 1 + 2 + 3) and list(record["pools"]) == ["main"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "jsn"], "UsageError: there is no format 'jsn' of a simulation."),
        (["--lengths", "normal:3"], "UsageError: --lengths normal:3: 'normal' is no distribution."),
        (["--efficiency", "published", "--costs", "costs.yaml"], "UsageError: --costs and --efficiency both say"),
        (["--episode-turns", "4"], "UsageError: --episode-turns 4: these are no turns."),
        (["--episode-turns", "0:1.5"], "UsageError: --episode-turns 0:1.5: these are no turns."),
        (["--episode-turns", "4:-1"], "UsageError: --episode-turns 4:-1: these are no turns."),
        (["--episode-turns", "4:1.5", "--costs", "costs.yaml"], "UsageError: --episode-turns and --costs both say"),
        (["--prompt-tokens", "0"], "UsageError: --prompt-tokens 0: give 1 or more."),
        (["--program", "grpo,warmup"], "UsageError: flowrl simulate flies one program."),
    ],
)
def test_wrong_words(run, words, said):
    status, out, err = run("simulate", GRPO, "--plan", "plan.yaml", *words)
    assert status == 2 and out == "" and err.startswith(said)


SEARCHED = ("plan", "--cluster", "cpu:1x2")
SHOWN = ("plan", "--show", "--plan", "plan.yaml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*SEARCHED, "--plan", "plan.yaml"), "--plan names a plan, and --cluster searches for one."),
        ((*SEARCHED, "--set", "pipeline.chunks=2"), "--set pipeline.chunks=2 changes a plan, and --cluster searches"),
        ((*SEARCHED, "--format", "svg"), "--format svg draws a plan, and --cluster searches for one."),
        *(
            ((*shown, *words), f"{words[0].partition('=')[0]} is for the search with --cluster, and does nothing to")
            for shown in (SHOWN, ("plan", "--set", "pipeline.chunks=2"), ("plan", "--show", "--plan", "auto"))
            for words in (["--cluster", "cpu:1x2"], ["--staleness=1"], ["--explain"], ["--failures", "1,2,3"])
            if shown[1] == "--show" or words[0] != "--cluster"
        ),
        ((*SHOWN, "--prices", "prices.yaml"), "--prices is for the search with --cluster"),
        ((*SHOWN, "--costs", "costs.yaml"), "--costs is for the search with --cluster"),
        ((*SHOWN, "--lengths", "fixed:4"), "--lengths is for the search with --cluster"),
        (("graph", "--costs", "costs.yaml"), "--costs is for the times of a plan."),
        (("graph", "--lengths=fixed:4"), "--lengths is for the times of a plan."),
        (("graph", "--run", "run"), "--run is for the times of a plan."),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(run, words, said):
    status, out, err = run(words[0], GRPO, *words[1:])
    assert (status, out) == (2, "") and err.startswith(f"UsageError: {said}") and "\n  fix  " in err


def test_a_file_of_options_is_for_commands_that_have_no_use_for_some_of_them(run):
    Path("options.yaml").write_text("plan: plan.yaml\ncosts: costs.yaml\nprompts_per_step: 2\n")
    assert run("plan", GRPO, "--show", "--config", "options.yaml")[0] == 0
    status, out, _ = run("plan", GRPO, "--cluster", "cpu:1x2", "--steps", "8", "--config", "options.yaml")
    assert status == 0 and "given: costs.yaml" in out
    Path("options.yaml").write_text("costs: costs.yaml\n")
    assert run("graph", GRPO, "--config", "options.yaml")[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["check", GRPO, "--plan", "none.yaml"],
        ["plan", "--show", "none.yaml"],
        ["plan", GRPO, "--cluster", "none.yaml"],
        *(["simulate", GRPO, word, "none.yaml"] for word in ("--plan", "--costs", "--efficiency", "--run")),
        ["simulate", GRPO, "--calibrated-by", "none.yaml"],
        ["plan", GRPO, "--cluster", "cpu:1x2", "--prices", "none.yaml"],
        *([command, "none.yaml"] for command in ("calibrate", "gap", "replay", "timeline", "doctor", "show")),
        ["diff", "none.yaml", "none.yaml"],
        ["export", "none.yaml", "model"],
    ],
)
def test_what_is_not_there_is_wrong_usage_in_every_command(run, words):
    status, _, err = run(*words)
    assert status == 2 and err.startswith("UsageError: ") and "none.yaml" in err.splitlines()[0]


def test_efficiencies_of_a_file_change_what_is_predicted(run):
    Path("half.yaml").write_text("train: 0.2\nrow_s: 0.5\n")
    words = ("simulate", GRPO, "--plan", "plan.yaml", "--steps", "2", "--format", "json")
    status, out, _ = run(*words, "--efficiency", "half.yaml")
    assert status == 0 and json.loads(out)["cost_source"] == "roofline (efficiencies: half.yaml)"
    assert json.loads(out)["step_s"] > json.loads(run(*words)[1])["step_s"]
    Path("half.yaml").write_text("trian: 0.2\n")
    status, _, err = run(*words, "--efficiency", "half.yaml")
    assert status == 1 and "half.yaml:1" in err and "Did you mean 'train'?" in err


def test_a_plan_or_costs_that_do_not_fit_are_told_with_their_line(run):
    Path("plan.yaml").write_text(PLAN.replace("  ref: ", "  rev: "))
    status, _, err = run("simulate", GRPO, "--plan", "plan.yaml")
    assert status == 1 and "the plan places 'rev', which is no worker of this flow." in err and "plan.yaml:10" in err
    Path("plan.yaml").write_text(PLAN)
    Path("costs.yaml").write_text("actor.generate: 6\nactor.updat: 3\n")
    status, _, err = run("simulate", GRPO, "--plan", "plan.yaml", "--costs", "costs.yaml")
    assert status == 1 and "costs.yaml:2" in err and "Did you mean 'actor.update'?" in err


def test_one_file_of_costs_may_serve_several_drivers(run):
    Path("costs.yaml").write_text(COSTS.replace("{", "{critic.values: 3, actor.logprobs: 1, "))
    words = ("--costs", "costs.yaml", "--steps", "2", "--format", "json")
    assert run("simulate", GRPO, *words)[0] == 0
    status, out, _ = run("simulate", GRPO, "--program", "evaluate", *words)
    assert status == 0 and json.loads(out)["steps"] == 2, "a program without steps of its own is cut short"
    Path("costs.yaml").write_text("{acter.generate: 3}")
    status, _, err = run("simulate", GRPO, *words)
    assert status == 1 and "Did you mean 'actor.generate'?" in err


def test_plan_shows_who_sits_where(run):
    status, out, _ = run("plan", GRPO, "--show", "--plan", "plan.yaml")
    assert status == 0 and "actor.generate" in out and "dp=4 tp=2" in out and "node 1" in out
    assert run("plan", "--show", "plan.yaml")[0] == 0
    status, out, _ = run("plan", GRPO, "--show", "--plan", "plan.yaml", "--format", "svg")
    assert status == 0 and out.startswith("<svg")
    status, _, err = run("plan", GRPO)
    assert status == 2 and "needs a plan to show, or a cluster to search on" in err


def test_search_explains_itself_and_writes_a_plan_that_loads(run):
    words = ("plan", PPO, "--cluster", "h100-80:2x8", "--model", "actor=llama-7b", "--model", "critic=llama-7b")
    status, out, _ = run(*words, "--steps", "20", "-o", "found.yaml")
    assert status == 0 and "Bottleneck:" in out and "Runner-up:" in out and "Binding constraint:" in out
    plan = Plan.load("found.yaml")
    assert plan.cluster is not None and plan.cluster.size == 16
    status, out, _ = run(
        "simulate",
        PPO,
        "--plan",
        "found.yaml",
        "--model",
        "actor=llama-7b",
        "--model",
        "critic=llama-7b",
        "--steps",
        "2",
    )
    assert status == 0
    words = ("plan", GRPO, "--cluster", "h100-80:1x8", "--model", "actor=llama-7b", "--steps", "20")
    status, out, _ = run(*words, "--format", "json", "--staleness", "0")
    record = json.loads(out)
    assert record["plan"]["pipeline"]["staleness"] == 0 and record["step_s"] > 0 and isinstance(record["tie"], bool)


def test_search_where_nothing_fits_names_the_culprit(run):
    status, _, err = run("plan", GRPO, "--cluster", "l40s:1x1", "--model", "actor=llama-70b")
    assert status == 1 and err.startswith("PlanError:") and "actor" in err
    status, _, err = run("plan", GRPO, "--cluster", "h100:2x8")
    assert status == 1 and "there is no device 'h100'." in err and "h100-80" in err


def test_graph_with_a_plan(run):
    status, out, _ = run("graph", GRPO, "--plan", "plan.yaml", "--model", "actor=llama-7b", "--format", "json")
    record = json.loads(out)
    assert status == 0 and {p["name"] for p in record["pools"]} == {"train", "rollout", "cpu"}
    assert all({"pool", "mesh", "layout"} <= set(n) for n in record["nodes"])
    assert all({"bytes", "transport"} <= set(e) for e in record["edges"])
    for format in ("text", "mermaid", "dot", "svg", "html"):
        status, out, _ = run("graph", GRPO, "--plan", "plan.yaml", "--format", format, "--simulate", "3")
        assert status == 0 and "rollout" in out and "publish" in out, format
    assert run("graph", GRPO, "--simulate", "3")[0] == 2


def test_calibrate_a_real_run_and_simulate_with_it(run, tmp_path):
    plan = ROOT / "algorithms" / "plans" / "split_cpu.yaml"
    words = (GRPO, "--plan", plan, "--steps", "8", "--prompts-per-step", "4", "--group-size", "2")
    assert run("run", *words, "--out", "made", "--quiet", "--no-save")[0] == 0
    status, out, _ = run("calibrate", "made")
    assert status == 0 and "actor.generate" in out and "error" in out
    status, out, _ = run("simulate", *words, "--costs", "made/costs.yaml", "--format", "json")
    record = json.loads(out)
    assert status == 0 and record["cost_source"].startswith("calibrated: made (error ")
    measured = [json.loads(line)["seconds"] for line in Path("made/metrics.jsonl").read_text().splitlines()]
    assert record["step_s"] == pytest.approx(sorted(measured)[4], rel=1.0), (
        "of the same size, on a machine that is busy"
    )
    assert run("calibrate", "nowhere")[0] == 2
    status, out, _ = run("calibrate", "made", "--against", "made", "--format", "json")
    rows = {row["node"]: row for row in json.loads(out)["against"]}
    assert status == 0 and {"actor.generate", "actor.update", "ref.logprobs", "a steady step"} <= set(rows)
    assert all(row["predicted"] > 0 and row["measured"] > 0 for row in rows.values())
    status, out, _ = run("calibrate", "made", "--against", "made")
    assert status == 0 and out.splitlines()[-1].startswith("a steady step")
    assert "holds no run" in run("calibrate", "made", "--against", "nowhere")[2]


def test_looking_at_plans_loads_no_engine():
    code = (
        "import sys\n"
        "from flowrl.cli import main\n"
        f"assert main(['simulate', {GRPO!r}, '--plan', 'plan.yaml', '--steps', '3', '--model', 'actor=llama-7b']) == 0\n"
        f"assert main(['plan', {GRPO!r}, '--cluster', 'h100-80:1x8', '--model', 'actor=llama-7b', '--steps', '3']) == 0\n"
        "heavy = [m for m in ('torch', 'transformers', 'numpy', 'ray', 'vllm', 'networkx', 'scipy') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert found.returncode == 0, found.stderr
