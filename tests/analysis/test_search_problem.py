"""The search as ``flowrl plan`` asks it: the step that it prints is the step that the plan takes when it is simulated."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from flowrl.analysis.search_problem import corrects
from flowrl.cli import main
from flowrl.cli.arguments.script import load_script
from flowrl.graph.check_program import stale

ROOT = Path(__file__).parents[2]
DRIVERS = {
    "grpo": (),
    "ppo": ("--model", "critic=llama-7b"),
    "safe_rlhf": ("--model", "critic=llama-7b", "--model", "cost_critic=llama-7b"),
    "remax": (),
    "dapo": (),
}
SAID = ("--model", "actor=llama-7b", "--lengths", "fixed:1024", "--prompt-tokens", "512", "--steps", "12")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def asked(capsys, *words: str) -> str:
    status = main(list(words))
    out, err = capsys.readouterr()
    assert status == 0, err
    return out


CLUSTERS = ("h100-80:2x8", "a100-80:1x4", "h100-80:4x5")
#: Each driver on a cluster, and one of them on each; `make nightly` has all pairs.
PAIRS = {
    *(("grpo", cluster) for cluster in CLUSTERS),
    ("ppo", CLUSTERS[1]),
    ("safe_rlhf", CLUSTERS[1]),
    ("remax", CLUSTERS[2]),
    ("dapo", CLUSTERS[0]),
}


@pytest.mark.parametrize(
    ("driver", "cluster"),
    [pytest.param(*p, marks=[pytest.mark.nightly] * (p not in PAIRS)) for p in itertools.product(DRIVERS, CLUSTERS)],
)
def test_the_step_that_is_printed_is_the_step_that_is_simulated(capsys, tmp_path, driver, cluster):
    script, plan = f"algorithms/{driver}.py", str(tmp_path / "found.yaml")
    words = (*SAID, *DRIVERS[driver])
    record = json.loads(
        asked(capsys, "plan", script, "--cluster", cluster, *words, "--format", "json", "-o", plan).rpartition("\n\n")[
            0
        ]
    )
    flown = json.loads(asked(capsys, "simulate", script, "--plan", plan, *words, "--format", "json"))
    assert record["step_s"] == pytest.approx(flown["step_s"], rel=1e-9)
    assert record["runner_up"] is None or record["runner_up"]["margin"] >= 0


@pytest.mark.parametrize("cluster", [
    pytest.param("b200:9x72", marks=pytest.mark.nightly), "h100-80:2x3", "h100-80:4x5", "a100-80:3x7", "l40s:1x6", "h200:5x8",
])  # fmt: skip
def test_clusters_of_any_shape_are_searched(capsys, cluster):
    words = ("--model", "actor=llama-7b", "--model", "critic=llama-7b", "--lengths", "fixed:256", "--steps", "3")
    record = json.loads(asked(capsys, "plan", "algorithms/ppo.py", "--cluster", cluster, *words, "--format", "json"))
    assert record["step_s"] > 0 and record["binding"] in ("memory", "node size", "divisibility", "none", "unknown")


def test_rewards_have_a_process_for_each_device_and_no_more_than_rows(capsys):
    words = ("--model", "actor=llama-7b", "--lengths", "fixed:256", "--steps", "3", "--format", "json")
    for prompts, processes in (("64", 16), ("1", 8)):
        more = ("--cluster", "h100-80:2x8", "--prompts-per-step", prompts)
        record = json.loads(asked(capsys, "plan", "algorithms/grpo.py", *more, *words))
        assert record["plan"]["pools"]["cpu"] == {"processes": processes}


OLD = """
import flowrl as fl
from flowrl import rl

flow = fl.Flow("old")
actor = flow.worker(fl.Actor, "qwen3-0.6b", lr=1e-5)
reward = flow.worker(fl.FunctionReward, lambda response: 1.0)


@flow.program
def old(steps: int = 4, allow: bool = False):
    for step, batch in flow.steps(fl.data.rows([{"prompt": "1+1="}] * 8, batch=8), steps):
        batch = rl.group_advantages(reward.score(actor.generate(batch, n=2)))
        batch = actor.logprobs(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip(anchor="old"), allow_stale=allow))
"""


def test_no_plan_is_found_that_check_refuses_for_its_loss(capsys, tmp_path):
    script = tmp_path / "old.py"
    script.write_text(OLD)
    words = ["plan", str(script), "--cluster", "h100-80:1x2", "--lengths", "fixed:64"]
    assert main([*words, "--staleness", "0,1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ProgramError: actor.update: ") and "staleness is 1" in error
    assert f"{script}:15   flow.log(step, actor.update(batch" in error
    assert main([*words, "--staleness", "0"]) == 0
    assert main([*words, "--staleness", "1", "--allow"]) == 0


@pytest.mark.parametrize("allow", [False, True])
def test_steps_overlap_by_themselves_where_check_accepts_it(tmp_path, allow):
    script = tmp_path / "old.py"
    script.write_text(OLD)
    study = load_script(str(script)).study(None, allow=allow)
    assert corrects(study) == allow == (not stale(study.traced, 1))


def test_nothing_overlaps_where_no_update_has_rows_that_its_worker_sampled():
    assert not corrects(load_script("algorithms/sft.py").study())
    assert not corrects(load_script("algorithms/dpo.py").study())
    assert corrects(load_script("algorithms/grpo.py").study())
