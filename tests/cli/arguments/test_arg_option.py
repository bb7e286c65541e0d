"""``--arg WORKER.NAME=VALUE``: another argument of a worker in a command, in the record of its run, and at a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.cli.arguments.arg_option import read_argument
from flowrl.errors import UsageError


def run(script, out, *words):
    return main(["run", script, "--out", str(out), "--quiet", *words])


def metrics(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["total"] for line in lines if line["program"] == "train"]


def start(out):
    return json.loads((out / "run.json").read_text())["inputs"]["workers"]["counter: start"]


def test_a_run_and_its_resume_are_those_of_a_driver_that_says_so(evaluated_script, tmp_path, capsys):
    given, edited, evaluated = (tmp_path / name for name in ("given", "edited", "evaluated"))
    assert run(evaluated_script, given, "--steps", "2", "--arg=counter.start=1.5", "--arg", "counter.start=25e-1") == 0
    assert main(["run", str(given), "--program", "probe", "--out", str(evaluated), "--quiet"]) == 0
    resume = ["run", str(given), "--resume", "--steps", "3", "--quiet"]
    assert main([*resume, "--arg", "counter.start=3"]) == 1
    told = capsys.readouterr().err
    assert "would become another run" in told and "counter: start" in told and "--allow-changed" in told
    assert main(resume) == 0
    Path(evaluated_script).write_text(Path(evaluated_script).read_text().replace("start=1.0", "start=2.5"))
    assert run(evaluated_script, edited, "--steps", "3") == 0
    assert len(metrics(given)) == 3 and metrics(given) == metrics(edited)
    assert start(given) == start(edited) == start(evaluated) == "2.5"


@pytest.mark.parametrize("command", ["check", "graph", "plan", "simulate"])
def test_commands_that_load_nothing_take_it(evaluated_script, capsys, command):
    words = {"plan": ["--show", "--set", "pipeline.chunks=1"], "simulate": ["--steps", "1"]}.get(command, [])
    assert main([command, evaluated_script, *words, "--arg", "counter.start=7"]) == 0
    assert command != "graph" or "start=7" in capsys.readouterr().out
    assert main([command, evaluated_script, *words, "--arg", "counter.strat=7"]) == 2
    assert "Did you mean counter.start?" in capsys.readouterr().err


def test_a_config_file_has_a_list_of_them(evaluated_script, tmp_path, capsys):
    (tmp_path / "options.yaml").write_text("arg: [counter.start=7, counter.start=8]\n")
    assert main(["graph", evaluated_script, "--config", str(tmp_path / "options.yaml")]) == 0
    assert "start=8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told", "fix"),
    [
        (["--counter.start", "2e-6"], "'--counter.start' is no option here.", "Write --arg counter.start=2e-6."),
        (["--counter.start=3"], "is no option here.", "Write --arg counter.start=3."),
        (["--counter.start"], "is no option here.", "Write --arg counter.start=VALUE."),
        (["--set", "counter.start=3"], "a plan has no 'counter'.", "write --arg counter.start=3."),
        (["--arg", "countr.start=3"], "has no worker 'countr'.", "Did you mean 'counter'?"),
        (["--arg", "counter.start=x"], "Counter: start='x' is not a number.", "at   --arg counter.start=x\n"),
        (["--arg", "counter.start=[1"], "[1 is no YAML", "in quotes"),
        (["--arg", "counter.start="], "the value is empty, as of a variable of the shell", "counter.start=null"),
        (["--arg", "counter.start"], "--arg counter.start is no WORKER.NAME=VALUE.", "Write --arg actor.lr=2e-6."),
        (["--arg", "start=3"], "--arg start=3 is no WORKER.NAME=VALUE.", "Write --arg actor.lr=2e-6."),
        (["--arg", ".start=3"], "is no WORKER.NAME=VALUE.", None),
        (["--arg", "counter.=3"], "is no WORKER.NAME=VALUE.", None),
        (["--arg", "counter.a.b=3"], "'a.b' is no argument of a worker.", "Give it whole: --arg 'counter.a={b: 3}'."),
    ],
)  # fmt: skip
def test_what_is_wrong_names_the_words(evaluated_script, capsys, words, told, fix):
    assert main(["check", evaluated_script, *words]) in (1, 2)
    said = capsys.readouterr().err
    assert told in said and (fix is None or fix in said)


def test_help_has_the_arguments_once(evaluated_script, capsys):
    with pytest.raises(SystemExit):
        main(["run", evaluated_script, "--help"])
    said = capsys.readouterr().out
    assert said.count("start=1.0") == 1 and said.count("--arg WORKER.NAME=VALUE  ") == 1
    assert "arguments of workers, for --arg WORKER.NAME=VALUE:\n  counter  start=1.0\n" in said


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("level=2", ("level", 2)),
        ("letter=b", ("letter", "b")),
        ('tasks={"a": [1, true]}', ("tasks", {"a": [1, True]})),
        ("url=http://127.0.0.1:8000/v1", ("url", "http://127.0.0.1:8000/v1")),
        ("text=a=b", ("text", "a=b")),
        ("split=no", ("split", "no")),
        ("on=on", ("on", "on")),
        ("level=none", ("level", "none")),
        ("level=null", ("level", None)),
        ("v=010", ("v", "010")),
        ("t=1:30", ("t", "1:30")),
        ("q=What: now", ("q", "What: now")),
        ("q={What: now}", ("q", {"What": "now"})),
    ],
)
def test_words_for_an_environment(word, read):
    assert read_argument(word) == read


@pytest.mark.parametrize("word", ["level", "=2", "le vel=2", "a.b=2", ""])
def test_an_argument_has_a_name_and_a_value(word):
    with pytest.raises(UsageError, match="is no NAME=VALUE"):
        read_argument(word)
