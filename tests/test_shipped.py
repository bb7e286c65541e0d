"""Shipped algorithms and plans are found by their names, from any folder."""

import json
import sys
from pathlib import Path

import pytest

import flowrl as fl
from flowrl import shipped
from flowrl.cli import main

ROOT = Path(__file__).parents[1]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_names_are_those_of_the_drivers(elsewhere):
    assert shipped.names() == sorted(p.stem for p in (ROOT / "algorithms").glob("*.py"))
    assert shipped.find_driver("grpo") == ROOT / "algorithms" / "grpo.py"
    assert shipped.find_plan("split_cpu") == ROOT / "algorithms" / "plans" / "split_cpu.yaml"
    for name in ("grop", "plans", "../algorithms/grpo", "tasks/arithmetic", "presets/grpo"):
        assert shipped.find_driver(name) is None and shipped.find_plan(name) is None


@pytest.mark.parametrize(
    "words", ["check ppo", "graph ppo", "simulate ppo --steps 2", "plan ppo --show --plan one_process"]
)
def test_commands_take_a_name_from_any_folder(elsewhere, words, capsys):
    assert main(words.split()) == 0
    out, err = capsys.readouterr()
    assert ("ppo" in out or "actor" in out) and not err


def test_a_shipped_algorithm_runs_by_name(elsewhere, capsys):
    few = "--steps 1 --prompts-per-step 2 --group-size 2 --no-save --quiet"
    assert main(f"run grpo {few} --plan split_cpu --out first".split()) == 0
    record = json.loads((elsewhere / "first" / "run.json").read_text())
    assert record["script"] == str(ROOT / "algorithms" / "grpo.py")
    assert set(record["plan"]["pools"]) == {"models", "rewards"}


def test_a_file_goes_before_a_name(elsewhere):
    lines = ["import flowrl as fl", "flow = fl.Flow('mine')", "@flow.program", "def mine(): ..."]
    (elsewhere / "grpo.py").write_text("\n".join(lines))
    assert fl.load_script("grpo.py").name == "mine"
    assert fl.load_script("grpo").name == "grpo"
    (elsewhere / "sft").mkdir()
    assert fl.load_script("sft").name == "sft"


@pytest.mark.parametrize(
    "words", ["plan --show split_cpu", "plan grpo --cluster ranks_2_cpu --steps 4", "check grpo --plan split_cpu"]
)
def test_every_command_takes_a_shipped_plan_by_name(elsewhere, words, capsys):
    assert main(words.split()) == 0
    assert fl.Plan.load("split_cpu") == fl.Plan.load(ROOT / "algorithms" / "plans" / "split_cpu.yaml")


@pytest.mark.parametrize(
    "words",
    [
        "plan --show spilt_cpu",
        "check grpo --plan spilt_cpu",
        "run grpo --plan spilt_cpu",
        "graph grpo --plan spilt_cpu",
    ],
)
def test_an_unknown_plan_is_told_with_those_that_are_there(elsewhere, words, capsys):
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert "there is no plan spilt_cpu, and no shipped plan spilt_cpu.\n  have colocated_64, " in said
    assert said.endswith("  fix  Did you mean split_cpu?\n")


def test_an_unknown_name_is_told_with_those_that_are_there(elsewhere, capsys):
    assert main(["run", "grop"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("UsageError: there is no script grop, and no shipped algorithm grop.\n  have dapo, ")
    assert said.endswith("  fix  Did you mean grpo?\n")
    assert main(["check", "zzz"]) == 2
    assert "\n  fix  Name a file, or one of these.\n" in capsys.readouterr().err
    assert main(["check", "grop.py"]) == 2
    said = f"UsageError: there is no script grop.py below {elsewhere}.\n  fix  Did you mean grpo?\n"
    assert capsys.readouterr().err == said


def test_drivers_are_modules(elsewhere, monkeypatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(ROOT / "algorithms")])
    for name in [n for n in sys.modules if n.startswith("flowrl.algorithms")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(fl, "algorithms", raising=False)
    from flowrl.algorithms import sft

    assert sft.flow.check().text() == "sft: fine"
    assert sft.__file__ == str(ROOT / "algorithms" / "sft.py")
