"""What Python's help shows of functions that users call by hand: their own names, and their signatures."""

from __future__ import annotations

import pydoc

import pytest

import flowrl as fl


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
