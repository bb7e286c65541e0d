"""Options from a file, ``--config FILE``: as if they stood in its place on the command line."""

from __future__ import annotations

import json

import pytest

from flowrl.cli import main
from flowrl.cli.arguments.options import parse
from flowrl.cli.arguments.script import load_script
from flowrl.cli.check import add_options as check_options
from flowrl.cli.run import add_options
from flowrl.errors import UsageError


@pytest.fixture
def script(evaluated_script):
    return evaluated_script


@pytest.fixture
def read(script, tmp_path):
    """Parse the words of a command, with ``FILE`` for a file of this text."""
    flow = load_script(script)
    file = tmp_path / "options.yaml"

    def parsed(text: str, *words: str, command: str = "run"):
        file.write_text(text, encoding="utf-8")
        given = [word.replace("FILE", str(file)) for word in words or ("--config", "FILE")]
        return parse(flow, command, given, add_options if command == "run" else check_options)

    return parsed


def test_a_file_says_what_words_say(script, read):
    program = load_script(script).default_program()
    text = """
# what is said on the command line, too
steps: 7
seed: 11
checkpoint_every: 5
quiet: true
no-save: false
track: [tensorboard, wandb]
"""
    found = read(text)
    words = ["--steps", "7", "--seed", "11", "--checkpoint-every", "5", "--quiet"]
    same = parse(load_script(script), "run", [*words, "--track", "tensorboard", "--track", "wandb"], add_options)
    assert found.parameters == same.parameters and found.parameters[program]["steps"] == 7
    assert vars(found.options) == vars(same.options)


def test_later_words_win_and_earlier_ones_do_not(script, read):
    program = load_script(script).default_program()
    assert read("steps: 7", "--config", "FILE", "--steps", "3").parameters[program]["steps"] == 3
    assert read("steps: 7", "--steps", "3", "--config=FILE").parameters[program]["steps"] == 7
    assert read("", "--steps", "3", "--config=FILE").parameters[program]["steps"] == 3


def test_parameters_may_stand_below_their_program(script, read):
    flow = load_script(script)
    program = flow.default_program()
    assert read(f"{program}: {{steps: 4}}").parameters[program] == {"steps": 4}
    both = read(f"program: [{program}, evaluate]\n{program}:\n  steps: 4\n")
    assert both.programs == (program, "evaluate") and both.parameters[program]["steps"] == 4


def test_what_is_for_a_run_alone_is_left_out_elsewhere(script, read):
    """One file serves check, simulate and run."""
    program = load_script(script).default_program()
    found = read("steps: 2\nkeep_last: 3\nquiet: true\n", command="check")
    assert found.parameters[program] == {"steps": 2}


@pytest.mark.parametrize(
    ("text", "line", "what", "fix"),
    [
        ("seed: 1\nstps: 3", 2, "'--stps=3' is no option here.", "Did you mean --steps?"),
        ("steps: few", 1, "argument --steps: invalid int value: 'few'.", None),
        ("seed: 0\n\nresume: true", 3, "--config: resume is for one start", "Write --resume on the command line."),
        ("allow_changed: true", 1, "--config: allow-changed is for one start", None),
        ("config: other.yaml", 1, "--config: config is for one start", None),
        ("steps: [1, 2]", 1, "--steps takes one value.", "Write steps: 2."),
        ("steps: 1\nsteps: 2", 2, "--config: steps is in line 1 too.", "Keep one of them."),
        ("keep-last: 1\nkeep_last: 2", 2, "--config: keep-last is in line 1 too.", None),
        ("evaluate: {steps: {of: 3}}", 1, "--config: evaluate.steps has values within values.", None),
        ("- steps", 1, "--config: a file has options.", "Write NAME: VALUE."),
        ("steps: : 3", 1, "--config: this is no YAML", None),
        ("runtime: moon", 1, "argument --runtime: invalid choice: 'moon'", None),
    ],
)
def test_a_mistake_is_told_with_its_line(read, tmp_path, text, line, what, fix):
    with pytest.raises(UsageError) as info:
        read(text)
    error = info.value
    assert error.what.startswith(what) and error.at is not None
    assert (error.at.file, error.at.line) == (str(tmp_path / "options.yaml"), line)
    assert fix is None or error.fix == fix


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--config", "no.yaml"), "--config: there is no file no.yaml."),
        (("--config",), "--config names no file."),
        (("--config", "--seed", "3"), "--config names no file."),
        (("--config", "."), "--config: . cannot be read"),
    ],
)
def test_a_file_that_cannot_be_had(read, words, what):
    with pytest.raises(UsageError, match=what.replace(".", r"\.")):
        read("", *words)


def test_a_run_goes_on_without_the_file(script, tmp_path, capsys):
    """What was in it is in the record of the run."""
    file, out = tmp_path / "options.yaml", tmp_path / "run"
    text = f"steps: 2\nseed: 5\nquiet: true\nno_save: true\nkeep_sampled: false\nout: {out}\n"
    file.write_text(text, encoding="utf-8")
    assert main(["run", script, "--config", str(file)]) == 0
    file.unlink()
    assert main(["run", script, "--out", str(out), "--resume", "--steps", "3"]) == 0
    record = json.loads((out / "run.json").read_text())
    assert record["seed"] == 5 and record["parameters"][0]["steps"] == 3
    begun = ["--steps=2", "--seed=5", "--quiet=true", "--no-save=true", "--keep-sampled=false", f"--out={out}"]
    assert record["arguments"] == [*begun, "--steps", "3"], "a switch that is off is a word, too"


def test_what_a_command_lacks_is_told_on_its_command_line_though_a_file_has_it(read):
    assert read("out: runs/a", command="check").words == ("--out=runs/a",)
    with pytest.raises(UsageError, match="'--out=runs/a' is no option here"):
        read("out: runs/a", "--config", "FILE", "--out=runs/a", command="check")
