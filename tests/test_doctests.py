"""The examples in docstrings give what they say."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import flowrl

HOME = Path(flowrl.__file__).parent
MODULES = [
    ".".join(["flowrl", *file.relative_to(HOME).with_suffix("").parts]).removesuffix(".__init__")
    for file in sorted(HOME.rglob("*.py"))
    if ">>> " in file.read_text() and not (file.parent.name == "hf" or "backends" in file.parts)
]


def test_there_are_examples():
    assert "flowrl.schedule.machine" in MODULES


@pytest.mark.parametrize("module", MODULES)
def test_examples(module):
    result = doctest.testmod(import_module(module), raise_on_error=False)
    assert result.attempted > 0 and result.failed == 0
