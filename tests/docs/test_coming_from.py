"""The pages for users of other frameworks: programs without mistakes, names that are there, and what is not here."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
from pathlib import Path

import pytest
from page_calls import wrong_arguments

import flowrl as fl
from flowrl import rl
from flowrl.cli.arguments.options import add_common
from flowrl.cli.run import add_options
from flowrl.placement.backends import BACKENDS

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "coming_from").glob("*.md"))
TEXT = {page.stem: page.read_text() for page in PAGES}


@pytest.mark.parametrize("name", [name for name, text in TEXT.items() if "```python" in text])
def test_its_program_has_no_mistake(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", TEXT[name], re.S)
    Path("prompts.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    Path(f"{name}_program.py").write_text(code)
    report = fl.load_script(f"{name}_program.py").check()
    assert not report.errors, report.text()


@pytest.mark.parametrize("name", TEXT)
def test_names_of_flowrl_are_there(name):
    here = " ".join(row.split("|")[2] for row in TEXT[name].splitlines() if row.startswith("| `"))
    assert set(re.findall(r"\brl\.(\w+)", TEXT[name])) <= set(rl.__all__)
    assert set(re.findall(r"\bfl\.(\w+)", TEXT[name])) <= set(fl.__all__)
    for file in re.findall(r"`algorithms/(\w+\.py)", TEXT[name]):
        assert (ROOT / "algorithms" / file).exists()
    known = {p for loss in ("ppo_clip", "advantages", "gae", "group_advantages") for p in _names(getattr(rl, loss))}
    known |= {p for call in (fl.Actor.generate, fl.Actor.update, fl.Actor.__init__) for p in _names(call)}
    known |= {*fl.data.Options.__annotations__}
    known |= {"correction", "batch", "rank", "low", "high", "reads", "adds"}
    assert set(re.findall(r"`(\w+)=`", here)) <= known
    parser = argparse.ArgumentParser()
    add_options(parser)
    add_common(parser)
    flags = set(re.findall(r"`(--[\w-]+)[` ]", here))
    assert flags <= {*parser._option_string_actions}


@pytest.mark.parametrize("name", TEXT)
def test_arguments_that_it_gives_are_there(name):
    assert wrong_arguments(TEXT[name]) == []


@pytest.mark.parametrize("name", TEXT)
def test_losses_that_it_writes_can_be_made(name):
    made = [eval(code, {"rl": rl}) for code in re.findall(r"`(rl\.[^`]*)`", TEXT[name]) if _makes_a_loss(code)]
    assert len(made) >= 2
    assert {type(one) for one in made} <= {rl.Loss, rl.Correction, rl.Rejection}


@pytest.mark.parametrize("name", TEXT)
def test_old_log_probabilities_as_elsewhere(name):
    """The line that each page writes for them, with the loss beside it: no finding, and older rows are corrected for."""
    line, loss = re.findall(r"`(batch = actor.logprobs\(batch\))` before the update, and `(.*?)`", TEXT[name])[0]
    flow = fl.Flow("old")
    actor = flow.worker(fl.Actor, "Qwen/Qwen3-0.6B", lr=1e-6, max_tokens=512, name="actor")
    reward = flow.worker(fl.FunctionReward, lambda response: float(len(response)), name="reward")

    @flow.program
    def old(steps: int = 2):
        for _step, batch in flow.steps(fl.data.rows([{"prompt": "1+1="}], batch=1), steps):
            names = {"batch": rl.advantages(reward.score(actor.generate(batch, n=8))), "actor": actor}
            exec(line, names)
            actor.update(names["batch"], loss=eval(loss, {"rl": rl}))

    report = flow.check()
    assert not report.errors, report.text()
    assert eval(loss, {"rl": rl}).corrects_stale


def test_the_same_rloo_as_that_of_trl():
    """Rewards less the mean of the others, divided by nothing."""
    (code,) = re.findall(r"`(rl\.group_advantages[^`]*)`", TEXT["trl"])
    mask = fl.Column.of([[True]] * 3, "response")
    batch = fl.Batch.of([(0, 0), (0, 1), (0, 2)], rewards=[1.0, 0.0, 0.0], response_mask=mask)
    assert eval(code, {"rl": rl, "batch": batch}).advantages.to_list() == [[1.0], [-0.5], [-0.5]]


# -- what is not here --------------------------------------------------------------------------------


def test_every_page_has_a_link_to_what_is_not_here():
    assert all("(../not_here.md)" in text for text in TEXT.values())
    assert "(not_here.md)" in (ROOT / "docs" / "index.md").read_text()


def test_what_is_not_here_is_not_here():
    """Where the table of backends has what that page says is missing, the page has to change."""
    page = (ROOT / "docs" / "not_here.md").read_text()
    engines = [BACKENDS[name] for name in ("vllm", "sglang")]
    options = {o.name: o for engine in engines for o in engine.options}
    assert not any(options[name].run for name in ("fp8_weights", "fp8_cache", "speculative"))
    assert not any({"pp", "ep"} & set(engine.run_axes or engine.axes) for engine in engines)
    axes = {name: backend.run_axes or backend.axes for name, backend in BACKENDS.items() if backend.trains}
    assert "folded_ep" not in axes["megatron"]
    assert [name for name, found in axes.items() if "cp" in found] == ["megatron"]
    for word in ("fp8", "speculative", "adapters", "`pp`", "`ep`", "`folded_ep`", "`cp`", "Muon", "VLM", "R3"):
        assert word in page
    assert "muon" not in str([*inspect.signature(fl.Actor).parameters]).lower()


def _makes_a_loss(code):
    """Whether it is a call of what gives a loss or a correction, with all its arguments."""
    try:
        tree = ast.parse(code, mode="eval").body
    except SyntaxError:
        return False
    if not isinstance(tree, ast.Call) or "..." in code or "batch" in code:
        return False
    return not any(isinstance(node, ast.Name) and node.id != "rl" for node in ast.walk(tree))


def _names(fn):
    return inspect.signature(fn).parameters
