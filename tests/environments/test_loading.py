"""Environments are found by the name of a package's entry point, of a module or of a file."""

from __future__ import annotations

import sys

import pytest

import flowrl as fl
from flowrl.environments import find_environment, load_environment
from flowrl.errors import UsageError

TEXT = """
import flowrl as fl
from flowrl.environments import Environment

class Word(Environment):
    def __init__(self, level=1):
        self.level = level

class Other(fl.Env):
    pass
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package as pip installs it: a module, and the metadata that name its environment."""
    (tmp_path / "words_env.py").write_text(TEXT)
    info = tmp_path / "words_env-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: words-env\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flowrl.environments]\nword = words_env:Word\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("words_env", None)


def test_every_form_of_a_name_finds_the_class(package):
    for name in ("word", "words_env:Word", str(package / "words_env.py") + ":Word"):
        assert find_environment(name).__name__ == "Word"
        assert load_environment(name, level=3).level == 3
    assert issubclass(find_environment("words_env:Other"), fl.Env)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrod", "no environment 'wrod' among the"),
        ("words_env:Wort", "words_env has no environment 'Wort'"),
        ("words_env.more:Word", "no module 'words_env.more'"),
        ("not_there.at_all", "no module 'not_there.at_all'"),
        ("none.py:Word", "no file none.py"),
    ],
)
def test_a_name_that_leads_nowhere_is_told(package, name, said):
    with pytest.raises(UsageError, match=said):
        find_environment(name)


def test_of_several_one_has_to_be_named(package):
    with pytest.raises(UsageError, match="has 2 environments") as error:
        find_environment(str(package / "words_env.py"))
    assert error.value.have == "Other, Word"


def test_arguments_that_it_does_not_have_are_told(package):
    with pytest.raises(UsageError, match="unexpected keyword argument 'size'"):
        load_environment("word", size=3)
