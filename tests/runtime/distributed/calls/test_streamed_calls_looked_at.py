"""How far the engines of ranks are is asked, as a replay does, while the thread of their pool goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from flowrl.runtime.distributed.calls.streamed_calls import EngineOnRanks, _Part
from flowrl.runtime.distributed.executor import DistributedExecutor
from flowrl.runtime.distributed.rank_parts import RankParts


def call(*ranks: int) -> Any:
    return SimpleNamespace(parts={rank: _Part(cast("Any", None), 0) for rank in ranks})


def test_engines_are_looked_at_as_a_call_begins_and_another_rank_answers():
    """A replay failed with Python's error about a dictionary that changed, as its driver looked at what stands still."""

    def stand_in(rank: int) -> int:  # asked in the midst of a look
        number = len(engine.calls)
        engine.calls[number] = call(1)
        engine.steps.setdefault(7 + number, 1)
        return rank

    client = SimpleNamespace(epoch=0, stand_in=stand_in)
    engine = EngineOnRanks(cast("Any", client), cast("Any", SimpleNamespace(parts=RankParts((1, 2), (0, 1)))))
    engine.calls |= {0: call(1), 1: call(1)}
    executor = SimpleNamespace(_shared={"actor": engine})
    assert DistributedExecutor.engine_steps(cast("Any", executor), "actor") == {1: (0, True), 2: (0, False)}
