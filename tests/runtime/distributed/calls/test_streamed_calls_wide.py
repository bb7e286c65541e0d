"""What the driver does for a slice of hundreds of ranks: little for each of them, and nothing of one after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.lowering.deployment import WorkerSpec
from flowrl.runtime.distributed.calls.lineage import Recipe
from flowrl.runtime.distributed.calls.pending_calls import Sent
from flowrl.runtime.distributed.calls.streamed_calls import EngineOnRanks, StreamedCallOnRanks, _Part
from flowrl.runtime.distributed.protocol import Advanced, Blueprint, RankCall, Reply
from flowrl.runtime.distributed.rank_client import RankClient
from flowrl.runtime.distributed.rank_parts import RankParts
from flowrl.runtime.distributed.worker_group import WorkerGroup
from flowrl.runtime.values.remote_batch import Kind

RANKS, CALLS = 256, 4


class Link:
    """Ranks that answer every call that is ``over`` by now, and bring 7 bytes for each copy."""

    def __init__(self) -> None:
        self.where = {rank: {"node": str(rank // 8)} for rank in range(RANKS)}
        self.over = False
        self.said: list[str] = []

    def send(self, rank: int, method: str, *args: Any) -> Any:
        self.said.append(f"send {method}")
        return method, args

    def wait(self, begun: Any, what: str, deadline: Any = None, on_death: Any = None) -> dict[int, Any]:
        self.said += sorted({f"wait {method}" for method, _ in begun.values()})
        return {rank: self._answer(*asked) for rank, asked in begun.items()}

    def _answer(self, method: str, args: Any) -> Any:
        if method == "keep_copy":
            return 7
        _, wanted, _ = args
        kinds = {"tokens": Kind("i32", "token", (), frozenset())}
        return Advanced({n: Reply(keys=((n,),), kinds=kinds) for n in wanted} if self.over else {}, steps=1)


class Counting(EngineOnRanks):
    passes = 0

    def _unanswered(self):
        self.passes += 1
        return super()._unanswered()


def engine_of(link: Link) -> Counting:
    """The engines of as many ranks, with calls that have a part on each."""
    client = RankClient(cast("Any", link), {"rollout": range(RANKS)})
    blueprint, parts = Blueprint("actor", fl.Actor, (), {}, {}), RankParts(tuple(range(RANKS)), tuple(range(RANKS)))
    group = WorkerGroup(client, blueprint, WorkerSpec("actor", True), parts)
    engine = Counting(client, group)
    for number in range(CALLS):
        info = CallInfo(program="p", op="actor.generate")
        told = {
            r: RankCall("actor.generate", "generate", group.key, {}, info, keep=client.new_id()) for r in range(RANKS)
        }
        call = StreamedCallOnRanks.__new__(StreamedCallOnRanks)
        call.client, call.group, call.engine, call.number, call.part = client, group, engine, number, 0
        call.call = cast("Any", SimpleNamespace(joins=False, title="actor.generate", index=number, info=info))
        call._first, call._sent = None, Sent(told, {}, Recipe("actor.generate", 0, told, {}, (), ()), 0)
        call.parts = {rank: _Part(each, 0, client.new_id()) for rank, each in told.items()}
        engine.calls[number] = call
    return engine


def test_the_parts_of_calls_are_gone_through_twice_for_a_slice_however_many_ranks_there_are():
    """They were for each rank: with 512 ranks and 1,024 parts a slice of 0.05 s took 0.1 s of the driver."""
    link = Link()
    engine = engine_of(link)
    for number in (1, 2):
        engine.advance("a slice")
        assert engine.passes <= 2 * number
    assert set(engine.steps.values()) == {1} and link.said.count("send advance") == 2 * RANKS


def test_copies_of_what_a_slice_has_brought_come_beside_each_other():
    """Each was waited for before the next one was begun."""
    link = Link()
    engine = engine_of(link)
    link.over = True
    engine.advance("a slice")
    copies = [said for said in link.said if said.endswith("keep_copy")]
    count = RANKS * CALLS
    assert copies == ["send keep_copy"] * count + ["wait keep_copy"] * count
    assert engine.has_results and engine.client.traffic.between == 7 * count
    kept = [part.rank_call.keep for call in engine.calls.values() for part in call.parts.values()]
    assert None not in [engine.client.lineage.copy_of(id) for id in kept]
