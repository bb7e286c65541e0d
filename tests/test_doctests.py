"""The examples in docstrings give what they say."""

import doctest
import inspect
from importlib import import_module
from pathlib import Path

import pytest

import flowrl as fl
from flowrl import rl
from flowrl.graph.ops.op import Op

HOME = Path(fl.__file__).parent
MODULES = [
    ".".join(["flowrl", *file.relative_to(HOME).with_suffix("").parts]).removesuffix(".__init__")
    for file in sorted(HOME.rglob("*.py"))
    if ">>> " in file.read_text() and not (file.parent.name == "hf" or "backends" in file.parts)
]


def examples(module):
    """Those of a module, also of functions that are ops or below ``fl.takes``, which doctest does not see."""
    names, finder = {"fl": fl, "rl": rl}, doctest.DocTestFinder()
    found = {test.name: test for test in finder.find(module, extraglobs=names)}
    for value in vars(module).values():
        fn = inspect.unwrap(value.fn if isinstance(value, Op) else value) if callable(value) else None
        if inspect.isfunction(fn) and fn.__module__ == module.__name__:
            found |= {t.name: t for t in finder.find(fn, f"{module.__name__}.{fn.__name__}", extraglobs=names)}
    return [test for test in found.values() if test.examples]


def test_there_are_examples():
    assert "flowrl.schedule.machine" in MODULES


@pytest.mark.parametrize("module", MODULES)
def test_examples(module):
    runner, said = doctest.DocTestRunner(), []
    for test in examples(import_module(module)):
        runner.run(test, out=said.append)
    assert runner.tries > 0 and runner.failures == 0, "".join(said)
