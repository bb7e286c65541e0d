"""Whether ranks are there is asked while another thread takes up ranks that arrive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra [ray] is not installed")

from flowrl.runtime.distributed.ray.rank_answers import RankAnswers


def handle(rank: int) -> Any:
    return SimpleNamespace(pull=SimpleNamespace(remote=lambda method: f"{method} {rank}"))


def test_ranks_are_asked_whether_they_are_there_as_another_one_arrives():
    """Whoever waited for an answer failed with Python's error about a dictionary that changed, and so did the run."""
    handles = {rank: handle(rank) for rank in range(3)}

    class Starting(frozenset[int]):
        def __contains__(self, rank: object) -> bool:
            handles.setdefault(7, handle(7))  # as another thread does, which waits for nobody
            return super().__contains__(rank)

    answers = RankAnswers(handles, str)
    answers.starting = Starting([1])
    assert sorted(answers._ask().answers) == ["alive 0", "alive 2"]
    answers.starting = frozenset()
    assert sorted(answers._ask().answers) == ["alive 0", "alive 1", "alive 2", "alive 7"]
