"""Ranks without processes: every call is done at once where it is made. What they do to rows is what Ray's do."""

from __future__ import annotations

import itertools
import pickle
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import cloudpickle

from flowrl.errors import RankLost
from flowrl.lowering.deployment import number_ranks, replicas_apart
from flowrl.lowering.lower import lower
from flowrl.placement.plan.plan import Plan
from flowrl.runtime.distributed.executor import DistributedExecutor
from flowrl.runtime.distributed.protocol import Failed
from flowrl.runtime.distributed.rank_process.rank import Rank

LOST = object()  # the answer of a rank that is gone

#: What ranks answer in lanes of their own, while they are at other calls.
BESIDE = ("poll", "abort_rows", "leave_policy", "mirror")


class Direct:
    """``kill`` is (method, count) or (method, count, rank): that call is not answered, as its rank has died.

    Calls are counted from 0, with a rank those of that rank alone. There is no room for ranks of ``homeless``, once
    they have died; those of ``absent`` are not there at the start. The first ``coming`` of all these have room when it is
    looked for ``room`` times.
    """

    def __init__(self, pools, *, kill=None, homeless=(), absent=(), room=None, coming=1):
        self.pools = pools
        self.ranks: dict[int, Rank] = {}
        self.calls: list[tuple[int, str]] = []
        self.kill, self.dead, self.restarted = kill, set(), []
        self.homeless, self.stand_ins = set(homeless), {}
        self.absent, self.room, self.coming, self.awaited = set(absent), room, coming, []
        self.numbers = itertools.count(1 + max(rank for ranks in pools.values() for rank in ranks))
        self.lock = threading.RLock()
        self.threads = ThreadPoolExecutor(8)
        self.made: list[Rank] = []  # all that there were: processes would end, these are closed

    def add(self, rank, pool):
        self.ranks[rank] = Rank(rank, pool, self.config, self)
        self.made.append(self.ranks[rank])

    def start(self, config):
        self.config = config
        for pool, ranks in self.pools.items():
            for rank in ranks:
                if rank in self.absent:
                    self.awaited.append(pool)
                else:
                    self.add(rank, pool)
        return sorted(self.absent)

    def arrived(self):
        if not self.awaited or self.room is None:
            return {}
        self.room -= 1
        if self.room > 0:
            return {}
        self.room, found = None, {}
        for _ in range(self.coming):
            rank, pool = next(self.numbers), self.awaited.pop(0)
            self.add(rank, pool)
            found[rank] = pool
        return found

    def give_up(self, rank):
        self.dead.discard(rank)
        self.awaited.append(self.ranks.pop(rank).pool)

    def restart(self, ranks, within=None):
        late = [rank for rank in ranks if rank in self.homeless and rank in self.dead]
        if late and within is None:
            raise RankLost(f"rank {late[0]} has not answered starting ranks in time.", ranks=late)
        for rank in ranks:
            if rank in late:
                continue
            self.dead.discard(rank)
            self.restarted.append(rank)
            self.add(rank, self.ranks[rank].pool)
        return late

    def take_over(self, stand_ins):
        self.stand_ins = {gone: stand_ins.get(rank, rank) for gone, rank in self.stand_ins.items()} | dict(stand_ins)
        for rank in stand_ins:
            self.awaited.append(self.ranks.pop(rank).pool)
            self.dead.discard(rank)

    def stop(self):
        self.ranks.clear()
        while self.made:
            self.made.pop().close_workers()
        self.threads.shutdown(wait=False)

    @property
    def where(self):
        return {rank: {"pool": r.pool, "node": "here", "pid": 0} for rank, r in self.ranks.items()}

    def record(self):
        return {"ranks": len(self.ranks)}

    def call(self, rank, method, *args):
        answer = self.send(self.stand_ins.get(rank, rank), method, *args)
        return lambda: answer

    def ready(self, begun, seconds):
        return list(range(len(begun)))

    def send(self, rank, method, *args):
        if method in ("connect", "move"):  # ranks meet each other in these
            return self.threads.submit(getattr(self.ranks[rank], method), *args)
        with self.lock:
            self.calls.append((rank, method))
            if self.kill is not None and method == self.kill[0] and self.kill[2:] in ((), (rank,)):
                self.kill = (method, self.kill[1] - 1, *self.kill[2:])
                if self.kill[1] < 0:
                    self.kill = None
                    self.dead.add(rank)
                    self._let_go_of_callers(rank)
            if rank in self.dead or rank not in self.ranks:
                return LOST
            if method == "write_captured":  # it is done while the rank works
                return self.threads.submit(_answered, getattr(self.ranks[rank], method), *args)
            if method == "run" and args[0].joins:  # others of the kind are beside it, and publishes
                return self.threads.submit(self._run_beside, rank, *copied(args))
        if method in BESIDE:
            asked = self.ranks[rank]
            answer = _answered(getattr(asked, method), *args)
            return answer if self.ranks.get(rank) is asked and rank not in self.dead else LOST
        with self.lock:
            args = tuple(copied(a) if method in ("run", "begin") else a for a in args)
            try:
                answer = getattr(self.ranks[rank], method)(*args)
                return copied(answer) if method == "advance" else answer
            except Exception as error:
                return Failed.of(error)

    def _let_go_of_callers(self, rank):
        """Who waits for a process is told at once that it has died."""
        if rank in self.ranks:
            for stream in filter(None, map(self.ranks[rank].stream_of, self.ranks[rank].workers)):
                stream.let_go()

    def _run_beside(self, rank, call):
        return _answered(self.ranks[rank].run, call)

    def headway(self):
        return {}

    def wait(self, begun, what, deadline=None, on_death=None):
        """As with Ray: an answer that came counts, whoever has died since; one that failed may have, as another died."""
        lost = {r for r, a in begun.items() if a is LOST or (isinstance(a, Future) and r in self.dead)}
        answers = {} if lost else {r: a.result() if isinstance(a, Future) else a for r, a in begun.items()}
        if lost or (self.dead and any(a is LOST or isinstance(a, Failed) for a in answers.values())):
            dead = {*self.dead, *lost}
            came = {r: a for r, a in begun.items() if r not in dead and not isinstance(a, Future)}
            raise RankLost(f"rank {min(dead)} died during {what}.", ranks=dead, answers=came)
        return answers


def copied(message):
    """A message as it comes out of another process."""
    return pickle.loads(cloudpickle.dumps(message))  # noqa: TID251


def _answered(method, *args):
    try:
        return method(*args)
    except Exception as error:
        return Failed.of(error)


def place_for(flow, plan: Plan, out, *names, seed=0, parameters=None, memory=None, **how):
    """What a run has its workers opened by."""
    return executor_of(lowered(flow, plan, names, parameters, memory), flow, out, seed=seed, **how)


def lowered(flow, plan: Plan, names, parameters=None, memory=None):
    """The programs of a run as ranks are given them."""
    found = []
    for name in names:
        given = (parameters or {}).get(name, {})
        program = flow.find_program(name)
        arguments = program.arguments(given)
        traced = flow.trace(name, **given)
        found.append(lower(traced, plan, flow.handles, "ray", fn=program.fn, parameters=arguments, memory=memory))
    return found


def executor_of(executions, flow, out, *, seed=0, **how):
    """What opens the workers of these programs."""
    from flowrl.backends import open_engine, open_tokenizer

    found = {key: found for execution in executions for key, found in execution.deployments.items()}
    deployments = replicas_apart(found)
    pools = number_ranks(executions[0].plan, {d.pool for d in deployments.values()} or None)
    return DistributedExecutor(
        {h.name: h for h in flow.handles},
        Direct(pools, **how),
        deployments=deployments,
        pools=pools,
        open_engine=open_engine,
        open_tokenizer=open_tokenizer,
        out=out,
        seed=seed,
        staleness=executions[0].plan.pipeline.staleness,
        copies=executions[0].plan.pipeline.copies,
        patience=executions[0].plan.pipeline.restart,
        least={name: pool.least for name, pool in executions[0].plan.pools.items() if pool.least},
        swapped=frozenset().union(*(execution.swapped for execution in executions)),
    )


def run_direct(
    flow, plan, out, *programs, seed=0, parameters=None, kill=None, homeless=(), absent=(), room=None, coming=1,
    memory=None, **settings,
):  # fmt: skip
    """``flow.run`` on such ranks; gives the outcome and the place."""
    from flowrl.runtime.driver.run_settings import Settings
    from flowrl.runtime.driver.runner import Runner
    from flowrl.runtime.storage.run_inputs import inputs_of

    given = parameters or {}
    names = programs or (flow.default_program(),)
    executions = lowered(flow, plan, names, parameters, memory)
    ranks = {"kill": kill, "homeless": homeless, "absent": absent, "room": room, "coming": coming}
    place = executor_of(executions, flow, out, seed=seed, **ranks)
    traces = [flow.trace(name, **given.get(name, {})) for name in names]
    used = [h for h in flow.handles if any(h.name in execution.workers for execution in executions)]
    inputs = inputs_of(executions, traces, used, seed=seed, plan=plan.to_json(), runtime="ray")
    how = {
        "out": out,
        "inputs": inputs,
        "runtime": "ray",
        "seed": seed,
        "quiet": True,
        "plan": plan.to_json(),
        "graphs": tuple(flow.graph(name, **given.get(name, {})).to_json() for name in names),
        **settings,
    }
    return Runner(executions, place, Settings(**how)).run(), place
