"""A worker on ranks, as the driver sees it: what it tells them as weights come, or do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from flowrl.lowering.deployment import WorkerSpec
from flowrl.runtime.distributed.protocol import Blueprint
from flowrl.runtime.distributed.rank_client import RankClient
from flowrl.runtime.distributed.rank_parts import RankParts
from flowrl.runtime.distributed.worker_group import Staged, WorkerGroup
from flowrl.workers.model_worker import ModelWorker


def test_rows_are_let_go_in_turn_too_where_a_publish_fails(monkeypatch):
    """``give_up_rows`` overtakes a ``hold_rows`` that has not begun: without the second call its rows stand for ever."""
    sent: list[tuple[str, int]] = []
    link = SimpleNamespace(send=lambda rank, method, *args: sent.append((method, rank)), where={})
    client = RankClient(cast("Any", link), {"train": (0,), "rollout": (1, 2)})
    blueprint = Blueprint("actor", ModelWorker, (), {}, {})
    trained = WorkerGroup(client, blueprint, WorkerSpec("actor"), RankParts((0,), (0,)))
    serving = WorkerGroup(client, blueprint, WorkerSpec("actor", True), RankParts((1, 2), (0, 0), size=2))

    def fails(staged: Staged, version: int, *, keep_cache: bool) -> None:
        raise RuntimeError("no weights")

    monkeypatch.setattr(serving, "_given", fails)
    with pytest.raises(RuntimeError, match="no weights"):
        serving.install(trained.in_use(), 1)
    assert sent == [("give_up_rows", 1), ("give_up_rows", 2), ("leave_rows", 1), ("leave_rows", 2)]
    assert serving.stamp == 1 and not serving.installing
