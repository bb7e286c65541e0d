"""What is known of the workers on ranks, once the run goes back to a checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.errors import RankLost
from flowrl.lowering.deployment import WorkerSpec
from flowrl.runtime.distributed.calls.pending_calls import CallOnRanks
from flowrl.runtime.distributed.open_groups import OpenGroups
from flowrl.runtime.distributed.protocol import Blueprint, RankConfig
from flowrl.runtime.distributed.rank_client import RankClient
from flowrl.runtime.distributed.rank_parts import RankParts
from flowrl.runtime.distributed.worker_group import WorkerGroup
from flowrl.runtime.values.call import Call


class Counter(fl.Worker):
    @fl.op(updates="weights")
    def update(self) -> fl.Metrics:
        return fl.Metrics(count=1.0)


def test_an_update_that_nobody_waits_for_does_not_go_on_once_the_run_has_gone_back(tmp_path):
    """It was sent, and a restart elsewhere failed in its midst. From then on its worker had no state that a restart
    could take, and no rank took part that came."""
    sent: list[str] = []
    link = SimpleNamespace(send=lambda rank, method, *args: sent.append(method), where={})
    client = RankClient(cast("Any", link), {"train": (0,), "rollout": (1,)})
    config = RankConfig({}, cast("Any", None), cast("Any", None), str(tmp_path))
    groups = OpenGroups({}, cast("Any", link), client, {}, config, ())
    counter = WorkerGroup(
        client, Blueprint("counter", Counter, (), {}, {}), WorkerSpec("counter"), RankParts((0,), (0,))
    )
    groups.workers["counter"] = counter
    info = CallInfo(program="p", op="counter.update")
    update = CallOnRanks(client, Call(0, cast("Any", Counter.update), "counter", {}, {}, None, info), counter, {})
    assert sent == ["run"] and counter.changing

    def restart(lost: RankLost) -> Collection[int]:
        raise RankLost("rank 1 could not be renewed.", ranks=[1], inconsistent=True)

    client.restart = restart
    with pytest.raises(RankLost, match="renewed"):
        client.restart_lost(RankLost("rank 1 died.", ranks=[1]), client.epoch)
    with pytest.raises(RankLost, match="renewed"):
        update.result()
    counter.swapping = counter.installing = True
    client.forget()
    groups.forget_groups([1])
    assert groups.workers == {"counter": counter}
    assert not (counter.changing or counter.swapping or counter.installing)
