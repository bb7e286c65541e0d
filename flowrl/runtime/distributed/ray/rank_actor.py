"""The process of one rank: a Ray actor around a :class:`Rank`, with lanes of calls."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from ....workers.headway import headway
from ...transfer.rendezvous import sees
from ..protocol import Failed, RankCall, RankConfig
from ..rank_process.rank import Rank
from .group_signals import hear, overhear
from .node_network import take_network_of

#: Lanes: calls in one of them wait for each other, those in different ones do not. ``work`` is everything else.
LANES = {
    "pull": "pull",
    "give": "pull",
    "keep_copy": "light",
    "offers": "pull",
    "how": "pull",
    "respond": "serve",
    "poll": "serve",
    "abort_rows": "serve",
    "leave_policy": "serve",
    "mirror": "mirror",
    "alive": "pull",
    "headway": "pull",
    "bring": "light",
    "capture_rows": "light",
    "write_captured": "save",
    "set_aside": "move",
    "let_go": "move",
    "hold_rows": "move",
    "give_up_rows": "pull",
    "leave_rows": "move",
    "connect": "move",
    "disconnect": "pull",
    "move": "move",
    "sums": "move",
    "weights_written": "move",
}
THREADS = {
    "pull": 2,  # rows are brought to another rank while this one works
    "light": 1,  # short calls do not wait for what the workers do
    "move": 1,  # weights are on their way
    "serve": 1,  # a policy samples for environments on other ranks, which this one may be waiting for in turn
    "mirror": 1,  # what the first rank of those that split an engine does for environments is done beside it
    "save": 1,  # files of a checkpoint are written while this rank works
    "beside": 1,  # episodes of several steps are played
}


def threads_of(ranks: int, beside: int = 4) -> dict[str, int]:
    """Return the threads of each lane, in a run of so many ranks: each may play the episodes of so many calls
    ``beside`` each other, and wait twice for rows of each. Calls beyond that wait for others to end."""
    return {**THREADS, "serve": min(2 * ranks * beside + 1, 256), "beside": beside}


def lane_of(method: str, args: Sequence[Any]) -> str:
    """The lane of a call: a library's run beside those of workers, as they are short and hold up others."""
    if method == "run":
        call: RankCall = args[0]
        return "light" if call.worker is None else "beside" if call.joins else "work"
    return LANES.get(method, "work")


def _in_lane(lane: str) -> Any:
    """Return a method of an actor that calls the rank in a lane of its own."""

    @ray.method(concurrency_group=lane)
    def call(self: RankActor, method: str, *args: Any) -> Any:
        return self._called(method, args)

    return call


class RankActor:
    """One rank. ``number`` counts over the ranks of the run."""

    def __init__(self, number: int, pool: str) -> None:
        self.number, self.pool = number, pool
        self._rank: Rank | None = None
        self._sees = False  # the folder of the run
        overhear()

    @ray.method(concurrency_group="pull")
    def begin(self, config: RankConfig, handles: Mapping[int, Any]) -> dict[str, Any]:
        """Learn of the run and of the other ranks; returns where this process is, and whether it ``sees`` the run's
        folder."""
        if self._rank is None:
            host = ray.util.get_node_ip_address()
            take_network_of(host)
            self._rank = Rank(self.number, self.pool, config, _Peers({}), host=host)
            self._sees = sees(config.sign)
        self._rank.peers = _Peers(handles)
        return {"pool": self.pool, "node": self._rank.host, "pid": os.getpid(), "sees": self._sees}

    def work(self, method: str, *args: Any) -> Any:
        """Call the rank, after what was called before."""
        return self._called(method, args)

    pull = _in_lane("pull")
    light = _in_lane("light")
    move = _in_lane("move")
    serve = _in_lane("serve")
    mirror = _in_lane("mirror")
    save = _in_lane("save")
    beside = _in_lane("beside")

    def _called(self, method: str, args: Sequence[Any]) -> Any:
        if method == "alive":
            return True
        if method == "headway":
            return headway()
        hear()
        assert self._rank is not None, "a rank is told of the run first"
        try:
            return getattr(self._rank, method)(*args)
        except Exception as error:
            return Failed.of(error)


def start(handle: Any, method: str, args: Sequence[Any]) -> Any:
    """Begin a call of a rank in its lane; what it gives can be waited for."""
    return getattr(handle, lane_of(method, args)).remote(method, *args)


class _Peers:
    """Other ranks, as this one calls them."""

    def __init__(self, handles: Mapping[int, Any]) -> None:
        self._handles = handles

    def call(self, rank: int, method: str, *args: Any) -> _Begun:
        """Begin a call; what is returned waits for it."""
        return _Begun(start(self._handles[rank], method, args))

    def ready(self, begun: Sequence[Any], seconds: float) -> list[int]:
        """Return the places of calls that are over; of those that were lost too."""
        places = {each.ref: place for place, each in enumerate(begun)}
        refs = list(places)
        if ray.wait(refs, num_returns=1, timeout=seconds)[0]:
            refs = ray.wait(refs, num_returns=len(refs), timeout=0)[0]
            return [places[ref] for ref in refs]
        return []


class _Begun:
    """A call of a rank on its way."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def __call__(self) -> Any:
        return ray.get(self.ref)
