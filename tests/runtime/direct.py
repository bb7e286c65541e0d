"""Ranks without processes: every call is done at once where it is made. What they do to rows is what Ray's do."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import cloudpickle

from flowrl.errors import RankLost
from flowrl.lowering.deployment import pools_on_ranks, stands_of
from flowrl.lowering.scheme import sampled_workers, trained_workers
from flowrl.placement.plan.plan import Plan
from flowrl.runtime.distributed.executor import DistributedExecutor
from flowrl.runtime.distributed.protocol import Failed
from flowrl.runtime.distributed.rank import Rank

LOST = object()  # the answer of a rank that is gone


class Direct:
    """``kill`` is (method, count) or (method, count, rank): that call is not answered, as its rank has died.

    Calls are counted from 0, with a rank those of that rank alone.
    """

    def __init__(self, pools, *, kill=None):
        self.pools = pools
        self.ranks: dict[int, Rank] = {}
        self.calls: list[tuple[int, str]] = []
        self.kill, self.dead, self.restarted = kill, set(), []
        self.lock = threading.RLock()
        self.threads = ThreadPoolExecutor(8)

    def start(self, config):
        self.config = config
        for pool, ranks in self.pools.items():
            for rank in ranks:
                self.ranks[rank] = Rank(rank, pool, config, self)

    def restart(self, ranks):
        for rank in ranks:
            self.dead.discard(rank)
            self.restarted.append(rank)
            self.ranks[rank] = Rank(rank, self.ranks[rank].pool, self.config, self)

    def stop(self):
        self.ranks.clear()

    @property
    def where(self):
        return {rank: {"pool": r.pool, "node": "here", "pid": 0} for rank, r in self.ranks.items()}

    def record(self):
        return {"ranks": len(self.ranks)}

    def call(self, rank, method, *args):
        answer = self.send(rank, method, *args)
        return lambda: answer

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
            if rank in self.dead:
                return LOST
            args = tuple(pickle.loads(cloudpickle.dumps(a)) if method == "run" else a for a in args)  # noqa: TID251
            try:
                return getattr(self.ranks[rank], method)(*args)
            except Exception as error:
                return Failed.of(error)

    def wait(self, begun, what, deadline=None, on_death=None):
        if dead := {*self.dead, *(r for r, a in begun.items() if a is LOST)}:
            answers = {r: a for r, a in begun.items() if r not in dead and not isinstance(a, Future)}
            raise RankLost(f"rank {min(dead)} died during {what}.", ranks=dead, answers=answers)
        return {rank: a.result() if isinstance(a, Future) else a for rank, a in begun.items()}


def place_for(flow, plan: Plan, out, *names, seed=0, parameters=None, swapped=(), **how):
    """What a run has its workers opened by."""
    from flowrl.backends import open_engine, open_tokenizer

    traces = [flow.trace(n, **(parameters or {}).get(n, {})) for n in names]
    trained = frozenset().union(*(trained_workers(t) for t in traces))
    sampled = frozenset().union(*(sampled_workers(t) for t in traces))
    stands = stands_of(flow.handles, plan, trained=trained, sampled=sampled)
    pools = pools_on_ranks(plan, {s.pool for s in stands.values()} or None)
    return DistributedExecutor(
        {h.name: h for h in flow.handles},
        Direct(pools, **how),
        stands=stands,
        pools=pools,
        open_engine=open_engine,
        open_tokenizer=open_tokenizer,
        out=out,
        seed=seed,
        swapped=swapped,
    )


def run_direct(flow, plan, out, *programs, seed=0, parameters=None, kill=None, memory=None, **settings):
    """``flow.run`` on such ranks; gives the outcome and the place."""
    from flowrl.lowering.here import scheme_here
    from flowrl.lowering.scheme import scheme_of
    from flowrl.runtime.driver.run import Runner, Settings, Stage
    from flowrl.runtime.storage.inputs import inputs_of

    given = parameters or {}
    names = programs or (flow.default_program(),)
    known = tuple(h.name for h in flow.handles)
    stages = []
    for name in names:
        traced = flow.trace(name, **given.get(name, {}))
        found = flow.find_program(name)
        scheme = scheme_here(scheme_of(traced, plan, known, memory=memory), ranks=True)
        record = flow.graph(name, **given.get(name, {})).to_json()
        stages.append(
            Stage(name, found.fn, found.arguments(given.get(name, {})), flow.workers_of(traced), record, scheme)
        )
    place = place_for(flow, plan, out, *names, seed=seed, parameters=given, kill=kill,
                      swapped={r for m in (memory or {}).values() for r in m.sizes})  # fmt: skip
    traces = [flow.trace(name, **given.get(name, {})) for name in names]
    used = [h for h in flow.handles if any(h.name in stage.workers for stage in stages)]
    inputs = inputs_of(stages, traces, used, seed=seed, plan=plan.to_json(), runtime="ray")
    how = {
        "out": out,
        "inputs": inputs,
        "runtime": "ray",
        "seed": seed,
        "quiet": True,
        "plan": plan.to_json(),
        **settings,
    }
    return Runner(stages, place, Settings(**how)).run(), place
