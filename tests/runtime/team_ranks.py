"""Ranks that have an engine together, without processes: `hf` on each of two ranks, in threads, which agree as those of a
split model do."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import direct

import flowrl.backends
from flowrl.errors import RankLost
from flowrl.runtime.distributed.rank_process import rank_streams
from flowrl.runtime.distributed.rank_process.rank import Rank

#: What ranks do in the order of the driver.
TOGETHER = ("begin", "advance", "begin_again", "weights_written_in_turn", "open")


class Lanes(direct.Direct):
    """Each rank does what it is asked in a thread of its own, one after the other: ranks may wait for each other."""

    def __init__(self, pools, **how) -> None:
        super().__init__(pools, **how)
        self.lock = nullcontext()
        self.lanes = defaultdict(lambda: ThreadPoolExecutor(1))

    def call(self, rank, method, *args):
        answer = self.send(self.stand_ins.get(rank, rank), method, *args)

        def begun():
            found = answer.result() if isinstance(answer, Future) else answer
            if found is direct.LOST:
                raise ConnectionError(f"rank {rank} is gone")
            return found

        return begun

    def send(self, rank, method, *args):
        if method not in TOGETHER and (method != "run" or args[0].joins):
            return super().send(rank, method, *args)
        return self.lanes[rank].submit(super().send, rank, method, *args)

    def _expect_alive(self, begun, what):
        """Of those that are waited for: the pool that trains waits in a thread of its own."""
        answers = {rank: a.result() if isinstance(a, Future) and a.done() else a for rank, a in begun.items()}
        failed = any(isinstance(answer, direct.Failed) for answer in answers.values())
        dead = {rank for rank, answer in answers.items() if rank in self.dead or answer is direct.LOST}
        if dead := dead or (self.dead if failed else set()):  # which a rank that fails may have asked
            raise RankLost(f"rank {min(dead)} died during {what}.", ranks=dead, answers={})


class Team:
    """What two ranks agree on."""

    def __init__(self) -> None:
        self.said, self.meeting = [False, False], threading.Barrier(2)

    def any_rank(self, place: int, said: bool) -> bool:
        self.said[place] = said
        self.meeting.wait(5)
        found = any(self.said)
        self.meeting.wait(5)
        return found


def use_teams(monkeypatch, change=lambda number, engine: None):
    """Have engines of `vllm` be those of `hf`; ranks that meet are a team, anew when they open again.

    ``change`` is handed each of them, with the number of its rank.
    """
    found, opened, here, met = defaultdict(Team), Counter(), threading.local(), {}
    open_engine, open_worker = flowrl.backends.open_engine, Rank.open

    def open_on(rank, spec):
        here.number = rank.number
        return open_worker(rank, spec)

    def open_one(name, build):
        if name != "vllm":
            return open_engine(name, build)
        number = here.number
        engine = open_engine("hf", replace(build, axes={}, options={}))
        meeting, place = met[number]
        team, shards = found[meeting, opened[number]], engine.shards
        opened[number] += 1
        engine.ranks, engine.any_rank = 2, lambda said: team.any_rank(place, said)
        engine.shards = lambda: [replace(shard, main=shard.main and place == 0) for shard in shards()]
        change(number, engine)
        return engine

    def join(rank, size, place, meeting, seconds):
        assert size == 2 and seconds
        met[rank.number], opened[rank.number] = (meeting, place), 0

    monkeypatch.setattr(Rank, "open", open_on)
    monkeypatch.setattr(Rank, "join_team", join)
    monkeypatch.setattr(flowrl.backends, "open_engine", open_one)
    monkeypatch.setattr(direct, "Direct", Lanes)
    for name in ("SLICE", "TOLD_EVERY", "TOLD_TIMES"):
        monkeypatch.setattr(rank_streams, name, 0.002 if name == "SLICE" else 0.0)
