"""What users call by hand: what Python's help shows of it, and the options of the engines that it opens."""

from __future__ import annotations

import pydoc

import pytest

import flowrl as fl
from flowrl.errors import PlanError


def test_options_of_an_engine_are_as_in_a_plan():
    with pytest.raises(PlanError, match="'actor': vllm has no option 'contxt'") as info:
        fl.open(fl.Actor("a/model", lr=None), backend="vllm", options={"contxt": 4096})
    assert info.value.fix == "Did you mean 'context'?"
    with pytest.raises(PlanError, match="rows is a whole number from 1 up, not 0"):
        fl.open(fl.Actor("a/model", lr=None), backend="vllm", options={"rows": 0})


@pytest.mark.parametrize(
    ("what", "first"),
    [
        (fl.open, "open(worker: "),
        (fl.Flow.run, "run(self, *programs: "),
        (fl.Flow.use_model, "use_model(self, worker: "),
        (fl.data.hf, "hf(name: "),
    ],
)
def test_help_shows_the_name_that_users_write_and_the_signature(what, first):
    assert f"\n{first}" in pydoc.plain(pydoc.render_doc(what))
