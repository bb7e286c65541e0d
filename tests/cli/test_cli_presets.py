"""Presets: values of a program's parameters under a name, in the script and on the command line."""

from __future__ import annotations

import json

import pytest

from flowrl.cli import load_script, main
from flowrl.cli.arguments.options import parse
from flowrl.errors import ProgramError, UsageError

SCRIPT = """
from functools import partial

import flowrl as fl
from flowrl import rl

rows = [{"prompt": "ab"}]
flow = fl.Flow("tiny")
actor = flow.worker(fl.Actor, MODEL)
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, lambda response: float(len(response)))
PRESETS = {"near": {"kl": 0.1}, "short": {"loss": partial(rl.reinforce, aggregate="token-sum"), "n": 2}}


@flow.program(presets=PRESETS)
def tiny(steps: int = 1, n: int = 4, kl: float = 0.0, loss=rl.ppo_clip):
    for step, batch in flow.steps(fl.data.rows(rows, batch=1), steps):
        batch = reward.score(actor.generate(batch, n=n))
        if kl:
            batch = ref.logprobs(batch)
        batch = rl.advantages(batch)
        flow.log(step, actor.update(batch, loss=loss(kl=kl)), counted=batch.count())


@flow.program
def other(steps: int = 1):
    for step, batch in flow.steps(fl.data.rows(rows, batch=1), steps):
        flow.log(step, rows=reward.score(actor.generate(batch)).count())
"""


@pytest.fixture
def script(tmp_path):
    config = {"model_type": "qwen2", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 16}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 1}
    tokenizer = """
def build_tokenizer():
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {t: i for i, t in enumerate(["<pad>", ";", "a", "b", "?"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=";")
"""
    model = f"\nMODEL = fl.Model(config={config!r}, tokenizer=build_tokenizer)\n"
    text = SCRIPT.replace("\nrows = [", f"\n{tokenizer}\n{model}\nrows = [", 1)
    path = tmp_path / "tiny.py"
    path.write_text(text)
    return path


def nodes(capsys, *words):
    assert main(["graph", *words, "--format", "json"]) == 0
    return [node["id"] for node in json.loads(capsys.readouterr().out)["nodes"]]


def test_a_preset_may_switch_an_op_on(script, capsys):
    assert "ref.logprobs" not in nodes(capsys, str(script))
    assert "ref.logprobs" in nodes(capsys, str(script), "--preset", "near")


def test_flags_win_over_the_preset(script, capsys):
    assert "ref.logprobs" not in nodes(capsys, str(script), "--preset", "near", "--kl", "0")


def test_a_worker_that_a_preset_uses_is_used(script, capsys):
    assert main(["check", str(script)]) == 0
    assert "never used" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "graph", "run"])
def test_an_unknown_preset_names_the_near_one(script, capsys, command):
    assert main([command, str(script), "--preset", "near_"]) == 2
    said = capsys.readouterr().err
    assert "program 'tiny' has no preset 'near_'." in said and "Did you mean 'near'?" in said


def test_a_program_without_presets_says_so(script, capsys):
    assert main(["check", str(script), "--program", "other", "--preset", "near"]) == 2
    assert "program 'other' has no preset 'near'." in capsys.readouterr().err


def test_of_several_programs_those_take_it_that_have_it(script, capsys):
    assert main(["check", str(script), "--program", "other,tiny", "--preset", "near"]) == 0


def test_a_preset_of_no_parameter_is_an_error_at_the_program(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(
        "import flowrl as fl\nflow = fl.Flow('p')\n\n@flow.program(presets={'a': {'stepz': 1}})\n"
        "def p(steps: int = 1):\n    pass\n"
    )
    with pytest.raises(ProgramError, match="preset 'a' gives 'stepz'") as caught:
        load_script(str(path))
    assert caught.value.at is not None and caught.value.at.line in (4, 5)
    assert caught.value.fix == "Did you mean 'steps'?"


def test_losses_have_no_flag(script, capsys):
    with pytest.raises(SystemExit):
        main(["run", str(script), "--help"])
    said = capsys.readouterr().out
    assert "--kl" in said and "near, short" in " ".join(said.split()) and "--loss" not in said


def test_a_run_records_it_and_goes_on_with_it(script, tmp_path, capsys):
    out = tmp_path / "run"
    words = [str(script), "--out", str(out), "--quiet", "--no-save"]
    assert main(["run", *words, "--preset", "short"]) == 0
    record = json.loads((out / "run.json").read_text())
    assert record["parameters"] == [{"steps": 1, "n": 2, "kl": 0.0, "loss": "reinforce(aggregate='token-sum')"}]
    assert main(["run", *words, "--resume"]) == 0
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["rows"] == 2


def test_in_python_a_preset_is_a_dict(script):
    flow = load_script(str(script))
    program = flow.find_program("tiny")
    assert program.preset("near") == {"kl": 0.1}
    assert "ref.logprobs" in [n.id for n in flow.graph(**program.preset("near")).nodes]
    with pytest.raises(UsageError):
        program.preset("far")


FLAGS = """
from collections.abc import Callable
from typing import Literal, Optional

import flowrl as fl

flow = fl.Flow("p")


@flow.program
def p(
    a: Optional[float] = None, b: None | int = None, c: Literal["x", "y"] | None = None, d: Callable | None = None,
    e: Literal["x", "y"] = "x", f: str | None = None, g=None,
):
    pass
"""


def test_optional_parameters_have_flags(tmp_path):
    path = tmp_path / "p.py"
    path.write_text(FLAGS)
    words = ["--a", "0.5", "--b", "3", "--c", "y", "--e", "y", "--f", "none", "--g", "word"]
    said = parse(load_script(str(path)), "run", words, lambda parser: None).parameters["p"]
    assert said == {"a": 0.5, "b": 3, "c": "y", "e": "y", "f": None, "g": "word"}
    assert main(["check", str(path), "--d", "1"]) == 2


def test_a_metric_that_a_loss_does_not_report_is_found_by_check(script, capsys):
    text = script.read_text().replace(
        "flow.log(step, actor.update(batch, loss=loss(kl=kl)), counted=batch.count())",
        "metrics = actor.update(batch, loss=loss())\n        flow.log(step, seen=metrics.kl)",
    )
    script.write_text(text)
    assert main(["check", str(script)]) == 1
    said = capsys.readouterr().out
    assert "the metrics of actor.update have no 'kl'." in said and "Give kl= of the loss a weight above 0." in said
