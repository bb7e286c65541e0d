"""A policy on ranks without processes: what its engine computes is what an actor's does, and calls take threads."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, cast

from letters import build_tokenizer, model_of

import flowrl as fl
from flowrl.batch import CallInfo
from flowrl.lowering.deployment import WorkerSpec
from flowrl.runtime.distributed.protocol import Failed, Serving
from flowrl.runtime.distributed.rank_process.peers import Policy
from flowrl.runtime.distributed.rank_process.serve_policies import Policies

WAIT = 60  # seconds, far more than any of this takes


class Gone(Exception):
    """What the call of a rank raises whose process is gone."""


class Gated(fl.testing.FakeEngine):
    """A fake engine that makes no step before ``calls`` calls are in its batch; ``beside`` is which rows each step had."""

    def __init__(self, calls=1, **how):
        super().__init__(**{"vocab": 8, "stop": (), "tokenizer": build_tokenizer(), **how})
        self.opened, self.wanted, self.begun = threading.Event(), calls, 0
        self.beside = []

    def submit(self, request):
        call = super().submit(request)
        self.begun += 1
        if self.begun >= self.wanted:
            self.opened.set()
        return call

    def step(self):
        if not self.opened.wait(0.001):  # others could not join while a step is made
            self.stream.steps -= 1
            return []
        self.beside.append(sorted((row.seed, len(row.ids)) for row in self._rows.values()))
        return super().step()


class PolicyRank(Policies):
    """A rank that has the actor, and answers those that ask it."""

    def __init__(self, engine=None, cls=fl.Actor, serving=False):
        super().__init__()
        self.engine = engine or Gated()
        actor = fl.open(cls(model_of(), max_tokens=3), name="actor", engine=self.engine)
        self.workers = {("actor", serving): actor}
        self.specs = {("actor", serving): WorkerSpec("actor", serving)}


class Near:
    """Peers whose calls take a thread each. ``gone`` are ranks whose process is gone."""

    def __init__(self, ranks):
        self.ranks, self.gone, self.calls = ranks, set(), []
        self.threads = ThreadPoolExecutor(16)

    def call(self, rank, method, *args):
        self.calls.append((rank, method))
        return Answer(self.threads.submit(self._answer, rank, method, args))

    def _answer(self, rank, method, args):
        if rank not in self.gone:
            try:
                answer = getattr(self.ranks[rank], method)(*args)
            except Exception as error:
                answer = Failed.of(error)
        if rank in self.gone:
            raise Gone(f"rank {rank}")
        return answer

    def ready(self, begun, seconds):
        futures = [each.future for each in begun]
        done = wait(futures, seconds, FIRST_COMPLETED).done
        return [place for place, future in enumerate(futures) if future in done]


class Answer:
    """A call on its way."""

    def __init__(self, future: Future):
        self.future = future

    def __call__(self):
        return self.future.result(WAIT)


class EnvRank:
    """The rank of an environment, as its policy's handle needs it."""

    def __init__(self, peers):
        self.peers = peers

    def tokenizer(self, named):
        return build_tokenizer()

    def ask_all(self, calls, peers):
        answers = [peers.call(*call)() for call in calls]
        for (rank, *_), answer in zip(calls, answers, strict=True):
            if isinstance(answer, Failed):
                raise answer.raised(rank)
        return answers


def handle(peers, *ranks, version=0):
    """The handle of the policy as an environment on another rank gets it."""
    return Policy(cast("Any", EnvRank(peers)), Serving("actor", ranks or tuple(peers.ranks), version))


def rows(count=6, first=0):
    """Prompts by number, as of a call."""
    ids = fl.Column.of([[2 + i % 6, 3] for i in range(first, first + count)], dim="prompt", dtype="i32")
    number = fl.Column.of(list(range(first, first + count)), dtype="any")
    keys = [(i,) for i in range(first, first + count)]
    return fl.Batch(keys, {"prompt_ids": ids, "number": number}).with_call(CallInfo(seed=3, op="game.rollout"))


class Walk(fl.Env):
    """Three turns; says "b" to each. State: its number and the turns so far."""

    turns = 5

    def reset(self, row, seed):
        return (row["number"], 0), "a"

    def step(self, state, action):
        number, turn = state
        self.at(number, turn)
        return (number, turn + 1), "b", 1.0, turn + 1 == 3

    def at(self, number, turn):
        pass


def walk(at=lambda number, turn: None, **attributes):
    """An environment that calls ``at`` with each step."""
    made = type("Walk", (Walk,), {"at": lambda self, number, turn: at(number, turn), **attributes})
    return fl.open(made(), name="game")


def beside(*jobs):
    """What functions give that run beside each other, each in a thread; raises what one of them raises."""
    with ThreadPoolExecutor(len(jobs)) as threads:
        return [begun.result(WAIT) for begun in [threads.submit(job) for job in jobs]]
