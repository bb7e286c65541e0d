"""``flowrl check`` finds chat templates that break the prefix, where the tokenizer is at hand, and loads none elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import flowrl as fl

CONFIG = {"model_type": "qwen2", "hidden_size": 32}
TEMPLATES = Path(__file__).parents[1] / "environments"
sys.path.append(str(TEMPLATES))

from chat_templates import CHATML, FORGETS, REFUSES, REWRITES, chat_tokenizer  # noqa: E402


class Chat(fl.environments.Environment):
    turns = 3

    def rows(self):
        return [{"prompt": "x"}] * 4

    def respond(self, state):
        return "more"


def look_up(word: str) -> str:
    """Find a word.

    Args:
        word: what to look for
    """
    return word


class WithTools(Chat):
    tools = (look_up,)


class Own(Chat):
    """Its constructor says which tools it has."""

    def __init__(self, *tools):
        self.tools = tools


class Asked(WithTools):
    """As of a package that has to be asked for its tools."""

    @property
    def schemas(self):
        raise AssertionError("a check asks nobody for tools")


def flow_of(tokenizer, environment=Chat, name=None, tools=()):
    flow = fl.Flow("templates")
    model = fl.Model(name, tokenizer=tokenizer) if name else fl.Model(config=CONFIG, tokenizer=tokenizer)
    actor = flow.worker(fl.Actor, model, lr=1e-5, name="actor")
    game = flow.worker(environment, *tools, name="game")

    @flow.program
    def train(steps: int = 1):
        for step, batch in flow.steps(fl.data.rows([{"prompt": "x"}] * 4, batch=2), steps):
            batch = fl.rl.group_advantages(game.rollout(batch, policy=actor, n=2))
            flow.log(step, actor.update(batch, loss=fl.rl.ppo_clip()), reward=batch.rewards.mean())

    return flow


def built(template):
    return lambda: chat_tokenizer(template)


def found(report):
    return [error.what for error in report.errors], [lint.what for lint in report.lints if lint.kind == "template"]


@pytest.mark.parametrize("environment", [Chat, WithTools])
def test_a_template_that_keeps_what_was_said_is_fine(environment):
    assert found(flow_of(built(CHATML), environment).check()) == ([], [])


@pytest.mark.parametrize(
    ("template", "environment", "said"),
    [
        (REWRITES, Chat, "writes an answer anew once messages follow it"),
        (REFUSES, WithTools, "refuses messages of tool"),
    ],
)
def test_a_template_by_which_no_turn_goes_on_is_an_error_with_its_line(template, environment, said):
    report = flow_of(built(template), environment).check()
    errors, lints = found(report)
    assert len(errors) == 1 and said in errors[0] and lints == []
    at = report.errors[0].at
    assert at is not None and "game = flow.worker(" in Path(at.file).read_text().splitlines()[at.line - 1]


def test_tools_that_a_constructor_is_given_are_known():
    errors, _ = found(flow_of(built(REFUSES), Own, tools=(look_up,)).check())
    assert len(errors) == 1 and "refuses messages of tool" in errors[0]


def test_a_template_that_drops_thoughts_is_a_remark():
    report = flow_of(built(FORGETS)).check()
    errors, lints = found(report)
    assert errors == [] and len(lints) == 1
    assert lints[0].startswith("game: the chat template of") and "breaks the prefix: turn 1 has" in lints[0]


def test_a_tokenizer_in_a_folder_is_read(tmp_path):
    chat_tokenizer(REWRITES).save_pretrained(str(tmp_path / "model"))
    errors, _ = found(flow_of(str(tmp_path / "model")).check())
    assert len(errors) == 1 and "writes an answer anew" in errors[0]
    errors, _ = found(flow_of(None, name=str(tmp_path / "model")).check())
    assert len(errors) == 1, "of the model's own folder too"


@pytest.mark.parametrize("tokenizer", ["nobody/has-this", "missing-folder"])
def test_a_tokenizer_that_would_be_fetched_is_left_to_the_run(tokenizer):
    assert found(flow_of(tokenizer).check()) == ([], [])


def test_user_code_that_fails_or_is_not_needed_is_left_to_the_run(tmp_path):
    def fails():
        raise OSError("no such disk")

    assert found(flow_of(fails).check()) == ([], [])
    assert found(flow_of(built(REWRITES), Asked).check()) == ([], [])
    (tmp_path / "empty").mkdir()
    assert found(flow_of(str(tmp_path / "empty")).check()) == ([], [])


THINKS = CHATML + "{{ enable_thinking }}"
OFF = {"enable_thinking": False}


class Quick(Chat):
    chat_template_kwargs = OFF


def test_an_argument_of_an_environment_that_is_never_read_is_an_error_told_once():
    """Of the environment, and not of its source too."""
    assert found(flow_of(built(THINKS), Quick).check()) == ([], [])
    flow = fl.Flow("quick")
    actor = flow.worker(fl.Actor, fl.Model(config=CONFIG, tokenizer=built(CHATML)), lr=1e-5, name="actor")
    game = flow.worker(Quick, name="game")

    @flow.program
    def train(steps: int = 1):
        for step, batch in flow.steps(Quick().source(batch=2), steps):
            batch = game.rollout(batch, policy=actor, n=2)
            flow.log(step, actor.update(batch, loss=fl.rl.sft()), reward=batch.rewards.mean())

    report = flow.check()
    errors, _ = found(report)
    assert len(errors) == 1 and "reads no 'enable_thinking'" in errors[0]
    assert line_of(report.errors[0]).startswith("game = flow.worker(Quick")


def line_of(error):
    return Path(error.at.file).read_text().splitlines()[error.at.line - 1].strip()


def judged(kwargs, asked=None, tokenizer=None, judge=THINKS):
    """A program whose data and question have arguments of a chat template."""
    flow = fl.Flow("judged")
    actor = flow.worker(fl.Actor, fl.Model(config=CONFIG, tokenizer=built(THINKS)), lr=1e-5, name="actor")
    judge = flow.worker(fl.Actor, fl.Model(config=CONFIG, tokenizer=built(judge)), lr=None, name="judge")
    prompts = fl.data.rows([{"prompt": "x"}], batch=1, chat=True, chat_template_kwargs=kwargs, tokenizer=tokenizer)

    @flow.program
    def train(steps: int = 1):
        for step, batch in flow.steps(fl.data.mix({"all": prompts}, batch=1), steps):
            batch = actor.generate(batch, n=2)
            said = judge.ask(batch, "{response}?", chat=True, chat_template_kwargs=asked)
            flow.log(step, actor.update(batch, loss=fl.rl.sft()), length=judge.generate(said).versions.mean())

    return flow


def test_arguments_of_data_and_questions_are_looked_at():
    assert found(judged(OFF, OFF).check()) == ([], [])
    report = judged({"thinking": 1}, {"effort": 1}).check()
    errors, _ = found(report)
    assert len(errors) == 2 and "reads no 'thinking'" in errors[0] and "reads no 'effort'" in errors[1]
    assert line_of(report.errors[0]).startswith("prompts = fl.data.rows(")
    assert line_of(report.errors[1]).startswith("said = judge.ask(")


def test_the_tokenizer_of_the_data_is_looked_at_where_it_has_one(tmp_path):
    chat_tokenizer(CHATML).save_pretrained(str(tmp_path / "folder"))
    for tokenizer in (chat_tokenizer(CHATML), built(CHATML), str(tmp_path / "folder")):
        errors, _ = found(judged({"enable_thinking": True}, tokenizer=tokenizer).check())
        assert len(errors) == 1 and "reads no 'enable_thinking'" in errors[0]
    assert found(judged({"x": True}, tokenizer="nobody/has-this").check()) == ([], []), "the run tells it"


def test_a_wrong_argument_that_a_constructor_has_set_is_told():
    class Sets(Chat):
        def __init__(self):
            self.chat_template_kwargs = {"tokenize": True}

    errors, _ = found(flow_of(built(CHATML), Sets).check())
    assert len(errors) == 1 and "has 'tokenize'" in errors[0]


def test_the_command_tells_it_with_the_line_and_loads_no_torch(tmp_path):
    (tmp_path / "driver.py").write_text(
        dedent(
            f"""
            import sys

            sys.path.insert(0, {str(TEMPLATES)!r})
            from chat_templates import REWRITES, chat_tokenizer

            import flowrl as fl


            class Chat(fl.environments.Environment):
                def rows(self):
                    return [{{"prompt": "x"}}]

                def respond(self, state):
                    return "more"


            flow = fl.Flow("driver")
            model = fl.Model(config={CONFIG!r}, tokenizer=lambda: chat_tokenizer(REWRITES))
            actor = flow.worker(fl.Actor, model, lr=1e-5)
            game = flow.worker(Chat)


            @flow.program
            def driver(steps: int = 1):
                for step, batch in flow.steps(Chat().source(batch=2), steps):
                    batch = game.rollout(batch, policy=actor)
                    flow.log(step, actor.update(batch, loss=fl.rl.sft()), reward=batch.rewards.mean())
            """
        )
    )
    command = [sys.executable, "-m", "flowrl", "check", "driver.py", "--format", "json"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    (report,) = json.loads(ran.stdout)
    told = [error for error in report["errors"] if "writes an answer anew" in json.dumps(error)]
    assert ran.returncode == 1 and len(told) == 1, ran.stderr
    assert "game = flow.worker(Chat)" in json.dumps(told[0])
