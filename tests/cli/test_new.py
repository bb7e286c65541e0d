"""flowrl new: projects that run where they are written, made from the shipped algorithms."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import flowrl as fl
from flowrl import shipped
from flowrl.cli import main
from flowrl.cli.arguments.options import parse
from flowrl.cli.check import add_options
from flowrl.cli.new_project.project_files import first_run, project_files

ROOT = Path(__file__).parents[2]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_project_is_checked_and_tested_as_it_says(elsewhere, capsys):
    """In processes that do not see the source tree's ``tasks``: the project brings its own."""
    assert main(["new", "grpo", "my project"]) == 0
    has, train, test = capsys.readouterr().out.splitlines()
    assert has == "my project has grpo.py, presets/grpo.py, tasks/arithmetic.py, plan.yaml, test_grpo.py"
    command, option, *words = shlex.split(train.partition("  ")[2])
    assert (command, option, words[0]) == ("flowrl", "run", "my project/grpo.py")
    words = words[: words.index("--out")]
    done = subprocess.run([sys.executable, "-m", "flowrl", "check", *words], capture_output=True, text=True)
    verdicts = [line for line in done.stdout.splitlines() if not line.startswith(" ") and line]
    assert (done.returncode, verdicts) == (0, ["warmup: fine", "grpo: fine"]), done.stdout + done.stderr
    python, *words = shlex.split(test.partition("  ")[2])
    assert python == "python"
    done = subprocess.run([sys.executable, *words, "-q"], capture_output=True, text=True)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout


def test_a_folder_that_holds_something_is_left_alone(elsewhere, capsys):
    (elsewhere / "taken").mkdir()
    assert main(["new", "sft", "taken"]) == 0
    assert main(["new", "sft", "taken"]) == 2
    assert capsys.readouterr().err == "UsageError: taken is not empty.\n  fix  Name a folder that is not there yet.\n"
    (elsewhere / "file").write_text("mine")
    assert main(["new", "sft", "file"]) == 2
    assert (elsewhere / "file").read_text() == "mine"


def test_an_unknown_algorithm_is_told_with_the_near_miss(elsewhere, capsys):
    assert main(["new", "grop", "mine"]) == 2
    assert capsys.readouterr().err.endswith("  fix  Did you mean grpo?\n") and not (elsewhere / "mine").exists()


@pytest.fixture
def written(elsewhere):
    """A project of each shipped algorithm, by name, in folders of these names."""
    flows = {name: fl.load_script(name) for name in shipped.names()}
    for name, flow in flows.items():
        for path, text in project_files(name, flow).items():
            (elsewhere / name / path).parent.mkdir(parents=True, exist_ok=True)
            (elsewhere / name / path).write_text(text)
    return flows


def test_each_algorithm_is_a_template(written, elsewhere):
    """No name is missing or left over in its files, and the words of its first run are options of its programs."""
    words = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F", elsewhere]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for name, flow in written.items():
        assert parse(flow, "check", first_run(flow), add_options).programs[-1] == flow.default_program()
        assert (elsewhere / name / "plan.yaml").exists()


@pytest.mark.nightly
def test_each_project_passes_its_own_test(written, elsewhere):
    for name in written:
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", elsewhere / name], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
