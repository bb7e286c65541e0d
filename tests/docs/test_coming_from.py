"""The pages for users of other frameworks: their programs have no mistakes, and every name of flowrl in them is there."""

from __future__ import annotations

import argparse
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


def _names(fn):
    return inspect.signature(fn).parameters
