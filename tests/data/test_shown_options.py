"""Help on a constructor of sources names every option, with the default that it has."""

from __future__ import annotations

import inspect
import pydoc
from dataclasses import fields

import pytest

import flowrl as fl
from flowrl.data.source import Options, Reading

CONSTRUCTORS = [fl.data.rows, fl.data.jsonl, fl.data.parquet, fl.data.hf, fl.data.generated]


@pytest.mark.parametrize("make", CONSTRUCTORS, ids=lambda make: make.__name__)
def test_all_options_are_there_with_their_defaults(make):
    shown = inspect.signature(make).parameters
    options = {name: p.default for name, p in shown.items() if name in Options.__annotations__}
    assert set(options) == set(Options.__annotations__) == {f.name for f in fields(Reading)}
    assert options.pop("batch") is inspect.Parameter.empty
    assert options == {name: value for name, value in vars(Reading()).items() if name != "batch"}
    assert all(shown[name].kind is inspect.Parameter.KEYWORD_ONLY for name in Options.__annotations__)
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in shown.values())


def test_help_shows_them_as_they_are_written():
    text = pydoc.render_doc(fl.data.jsonl, renderer=pydoc.TextDoc()).replace("\b", "")
    assert "batch: 'int', prompt: 'str' = 'prompt', response: 'str | None' = None" in text and "Unpack" not in text
