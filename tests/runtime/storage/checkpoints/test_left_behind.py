"""What a program of a chain leaves at module level is there for the next one, also where that is resumed."""

from __future__ import annotations

import importlib
import sys

import pytest
from flows import events, metrics

from flowrl.cli.arguments.script import load_script
from flowrl.errors import ResumeError

HEAD = """
import random
from collections import Counter, OrderedDict, defaultdict, deque
import numpy as np
import torch
import flowrl as fl
from small_flow import Numbers, World
from small_flow import Counter as Totals

flow = fl.Flow("twice")
counter = flow.worker(Totals, start=1.0)
"""
TAIL = """
@flow.program
def twice(steps: int = 2):
    for step, batch in flow.steps(Numbers(), steps):
        change(step)
        flow.log(step, counter.update(counter.values(batch)))


@flow.program
def after(n: int = 2):
    for step, batch in flow.steps(Numbers(), n):
        found = read()
        change(step)
        flow.log(step, counter.update(counter.values(batch), scale=0.5 + found), found=found)
"""
#: What is at module level, how the programs change it, and a number that says all of it.
KINDS = {
    "list": ("SEEN = []", "SEEN.append(len(SEEN) + 1)", "sum(SEEN)"),
    "list of lists": ("SEEN = [[0]]", "SEEN[0].append(1); SEEN.append(SEEN[0])", "sum(map(sum, SEEN))"),
    "dict": ("KNOWN = {'b': 1}", "KNOWN[len(KNOWN)] = (1.5, {'x'}); KNOWN['a'] = 2", "len(KNOWN) + KNOWN.get('a', 0)"),
    "order": ("KNOWN = {'b': 1}", "KNOWN['a'] = KNOWN.get('a', 1) + 1; KNOWN['b'] = KNOWN.pop('b')",
              "''.join(map(str, KNOWN)) == 'ab' and KNOWN['a'] or 99"),
    "set": ("NAMES = {'a'}", "NAMES.add(str(len(NAMES)))", "len(NAMES)"),
    "number": ("LEVEL = 1", "global LEVEL\n    LEVEL += 1", "LEVEL"),
    "object": ("class Curriculum:\n    top = 1\n\n    def __init__(self):\n        self.level, self.past = 1, []\n\n\n"
               "COURSE = Curriculum()",
               "COURSE.level += 1; COURSE.past.append(2); Curriculum.top *= 2; COURSE.new = 3",
               "COURSE.level + sum(COURSE.past) + Curriculum.top + getattr(COURSE, 'new', 0)"),
    "slots": ("class Point:\n    __slots__ = ('x', 'y')\n\n\nPOINT = Point()\nPOINT.x = 1", "POINT.x += 1; POINT.y = 4",
              "POINT.x + getattr(POINT, 'y', 0)"),
    "objects of a list": ("class Box:\n    pass\n\n\nONE, TWO = Box(), Box()\nBOXES = [ONE, TWO]",
                          "BOXES.reverse(); BOXES[0].n = getattr(BOXES[0], 'n', 0) + 1",
                          "10 * getattr(BOXES[0], 'n', 0) + getattr(ONE, 'n', 5)"),
    "closure": ("def made():\n    count, parts = 0, []\n\n    def up():\n        nonlocal count\n        count += 1\n"
                "        parts.append(count)\n        return count + sum(parts)\n\n    return up\n\n\nUP = made()",
                "UP()", "UP()"),
    "random": ("DICE = random.Random(3)", "DICE.random()", "DICE.random()"),
    "numpy generator": ("DICE = np.random.default_rng(3)", "DICE.random()", "DICE.random()"),
    "older numpy generator": ("DICE = np.random.RandomState(3)", "DICE.rand()", "DICE.rand()"),
    "torch generator": ("DICE = torch.Generator().manual_seed(3)", "torch.rand(1, generator=DICE)",
                        "torch.rand(1, generator=DICE).item()"),
    "shared generators": ("random.seed(1); np.random.seed(1)", "random.random(); np.random.rand()",
                          "random.random() + np.random.rand()"),
    "tensor and array": ("TABLE, ROW = torch.zeros(2), np.zeros(2)\nLAST = None",
                         "global LAST\n    TABLE.add_(1); ROW[1] += 2; LAST = torch.ones(2) * ROW[1]",
                         "TABLE.sum().item() + ROW.sum() + (0 if LAST is None else LAST.sum().item())"),
    "counters": ("C, D, O, R = Counter(), defaultdict(list), OrderedDict(), deque(maxlen=2)",
                 "C['a'] += 1; D['x'].append(1); O[len(O)] = b'x'; R.append(len(O))",
                 "C['a'] + len(D['x']) + len(D['y']) + len(O) + sum(R) + (R.maxlen or 0)"),
    "shared": ("ROWS = [{'n': 1}]\nBEST = []\nNEW = []",
               "BEST.append(ROWS[0]); ROWS[0]['n'] += 1; NEW.append([1]); NEW.append(NEW[-1]); NEW[-1].append(1)",
               "ROWS[0]['n'] + sum(b['n'] + (b is ROWS[0]) for b in BEST) + sum(map(len, NEW)) + sum(n is NEW[0] for n in NEW)"),
    "a choice of functions": ("def f():\n    return 1\n\n\ndef g():\n    return 2\n\n\nPICK = f",
                              "global PICK\n    PICK = g if PICK is f else f", "PICK()"),
}  # fmt: skip


def driver(before, change, read):
    return f"{HEAD}{before}\n\n\ndef change(step):\n    {change}\n\n\ndef read():\n    return float({read})\n\n{TAIL}"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Run a driver as a process of its own would: its module is loaded anew each time."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def go(text, out="run", *programs, **how):
        (tmp_path / "left_driver.py").write_text(text)
        sys.modules.pop("left_driver", None)
        importlib.invalidate_caches()
        flow = load_script(str(tmp_path / "left_driver.py"))
        programs = programs or ("twice", "after")
        return flow.run(*programs, out=tmp_path / out, quiet=True, save_models=False, **how)

    yield go
    sys.modules.pop("left_driver", None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_program_that_is_resumed_finds_what_the_earlier_one_left(project, tmp_path, kind):
    text = driver(*KINDS[kind])
    whole = project(text, "whole", n=4)
    project(text, n=2)
    again = project(text, n=4, resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert again.weights_digest == whole.weights_digest
    assert [event["text"] for event in events(tmp_path / "run", "changed")] == ["after: n 2 -> 4"]
    assert events(tmp_path / "run", "warning") == []


def test_of_a_program_that_is_added_later_too(project, tmp_path):
    text = driver(*KINDS["object"])
    whole = project(text, "whole")
    project(text, "run", "twice")
    again = project(text, resume=True)
    assert again.weights_digest == whole.weights_digest and metrics(tmp_path / "run") == metrics(tmp_path / "whole")


LOST = {
    "an object": ("class Best:\n    n = 1\n\n\nBEST = Best()", "global BEST\n    BEST = Best()", "BEST.n", "BEST", "a Best"),
    "rows": ("ROWS = [0]", "ROWS.append(lambda: 1)", "len(ROWS)", "ROWS", "a function"),
    "an iterator": ("LEFT = iter(range(100))\nMORE = [LEFT]", "next(MORE[0])", "next(MORE[0])", "MORE", "how far it is"),
    "much": ("TEXT = ''", "global TEXT\n    TEXT = 'x' * 2_000_000", "len(TEXT)", "TEXT", "more than a checkpoint takes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOST)
def test_what_cannot_be_written_down_is_said_and_a_resume_without_it_is_refused(project, tmp_path, kind):
    before, change, read, name, what = LOST[kind]
    text = driver(before, change, read)
    if kind == "an iterator":
        text = text.replace("next(MORE[0])", "next(MORE[0]) if fl else 0")
        with pytest.raises(Exception, match="is outside of the program"):
            project(text)
        return
    project(text)
    (warning,) = [e["text"] for e in events(tmp_path / "run", "warning") if name in e["text"]][:1]
    assert warning.startswith("'twice' leaves what no checkpoint can hold: ") and f": {what};" in warning
    assert "left_driver.py:" in warning
    with pytest.raises(ResumeError, match=f"{name} .*left_driver.py:.*{what} -> as the script makes it"):
        project(text, n=4, resume=True)
    assert project(text, n=4, resume=True, allow_changed=True).status == "done"
    assert any(what in event["text"] for event in events(tmp_path / "run", "changed"))


def test_what_is_made_when_it_is_first_needed_is_made_again_and_told(project, tmp_path):
    text = driver("class Client:\n    n = 1\n\n\nCLIENT = None",
                  "global CLIENT\n    CLIENT = CLIENT or Client()", "(CLIENT or Client()).n")  # fmt: skip
    whole = project(text, "whole", n=4)
    project(text)
    assert project(text, n=4, resume=True).weights_digest == whole.weights_digest
    assert any("CLIENT" in event["text"] for event in events(tmp_path / "run", "changed"))
