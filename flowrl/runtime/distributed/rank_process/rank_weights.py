"""The weights of the workers on one rank: described, moved, set aside, and out of the way of others."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from ....lowering.deployment import WorkerSpec
from ....workers.base import Worker
from ....workers.engine import Published, has_weights, published
from ....workers.model_worker import ModelWorker
from ....workers.weights.offloaded import sleep, wake
from ....workers.weights.weight_boxes import Shard, Sums, sums
from ...transfer.plan_moves import Moves

Key = tuple[str, bool]  # a worker, and whether it is the copy that generates
#: Of weights that were written: version, whether they were changed since, stamp, and what its engine says of them.
Written = tuple[tuple[int, bool, int], Published | None]


class Weights:
    """Base of a rank. ``routes``: planned moves by name, this rank's number in them, and its wire."""

    def __init__(self, host: str, folder: Path) -> None:
        self.host, self.folder = host, folder
        self.workers: dict[Key, Worker] = {}
        self.specs: dict[Key, WorkerSpec] = {}
        self.aside: dict[tuple[Key, int], list[Shard]] = {}
        self.routes: dict[str, tuple[Moves, int, Any]] = {}
        self._meeting: set[str] = set()  # names of moves for which ranks are being connected
        self._parted: deque[str] = deque(maxlen=100)  # the latest of which nobody wants to hear any more

    def forget_weights(self) -> None:
        """Let go of staged weights and of connections."""
        self.aside.clear()
        self._meeting.clear()
        while self.routes:
            _, (_, _, wire) = self.routes.popitem()
            if wire is not None:
                wire.close()

    def shards(self, key: Key) -> list[Shard]:
        """The live weights of a worker on this rank; none for one without a model."""
        worker = self.workers[key]
        return worker.engine.shards() if isinstance(worker, ModelWorker) and has_weights(worker.engine) else []

    def offload(self, key: Key) -> int:
        """Take weights and optimizer of a worker out of its device's memory. Returns the bytes that this frees."""
        return sleep(self.workers[key])

    def onload(self, key: Key) -> int:
        """Bring them back. Returns the bytes that this takes."""
        return wake(self.workers[key]) if key in self.workers else 0

    def set_aside(self, key: Key, number: int) -> None:
        """Copy the weights as they are now, as a version that is published while training goes on."""
        self.aside[key, number] = [
            Shard(s.name, s.shape, s.offset, s.tensor.detach().clone(), s.main) for s in self.shards(key)
        ]

    def let_go(self, key: Key, number: int) -> None:
        """Forget a version that was set aside."""
        self.aside.pop((key, number), None)

    def meeting_point(self) -> str:
        """A place in the folder of the run where ranks can meet."""
        from ...transfer.rendezvous import new_meeting

        return new_meeting(self.folder)

    def join_team(self, size: int, number: int, meeting: str, seconds: float) -> None:
        """Join the process group of the ranks with which the models here compute together."""
        import torch

        from ...transfer.rendezvous import meet
        from ...transfer.verified_groups import know_groups

        know_groups()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group(
            backend,
            store=meet(meeting, size),
            world_size=size,
            rank=number,
            timeout=timedelta(seconds=seconds),
        )

    def connect(self, name: str, moves: Moves, me: int, size: int, meeting: str | None, seconds: float) -> None:
        """Get ready for moves of weights between some ranks, of which this is number ``me``."""
        self.routes[name] = (moves, me, self._wire(name, me, size, meeting, seconds) if meeting is not None else None)
        if name in self._parted:
            self.disconnect(name)

    def _wire(self, name: str, me: int, size: int, meeting: str, seconds: float) -> Any:
        """The wire to the others, who are waited for until :meth:`disconnect` says that they do not come."""
        from ...transfer.wire import Wire

        device = next((p.device for p in self.specs.values() if p.device != "cpu"), "cpu")
        self._meeting.add(name)
        if name in self._parted:
            self._meeting.discard(name)
        try:
            how: dict[str, Any] = {"timeout": seconds, "device": device, "wanted": lambda: name in self._meeting}
            return Wire(me=me, size=size, meeting=meeting, **how)
        finally:
            self._meeting.discard(name)

    def disconnect(self, name: str) -> None:
        """Close the wire of moves that nobody makes again. Who waits for the others does so no more."""
        self._parted.append(name)
        self._meeting.discard(name)
        _, _, wire = self.routes.pop(name, (None, None, None))
        if wire is not None:
            wire.close("its other ends are not there any more")

    def move(self, route: str, source: Key, number: int | None, target: Key | None) -> Any:
        """Do this rank's part of the moves: ``source`` as it was set aside, or as it is, into ``target``; None for a
        rank that gives alone."""
        from ...transfer.execute_moves import execute

        moves, me, wire = self.routes[route]
        given: list[Shard] = []
        if source in self.workers:
            given = self.shards(source) if number is None else self.aside[source, number]
        taken = self.shards(target) if target in self.workers else []
        return execute(moves, me=me, source=given, target=taken, wire=wire)

    def sums(self, key: Key, version: int | None = None, dtypes: Mapping[str, str] | None = None) -> Sums:
        """The part of the weights' digest that is here, in the dtypes of the copy that takes them."""
        import torch

        shards = self.shards(key) if version is None else self.aside[key, version]
        if dtypes is None:
            return sums(shards)
        made: dict[str, Any] = {}
        for kind in set(dtypes.values()):
            some = [s for s in shards if dtypes.get(s.name) == kind]
            made |= sums(some, getattr(torch, kind))
        return made

    def weights_written(self, key: Key, version: int, keep_cache: bool = False) -> Written:
        """Somebody has written into the weights: they are a version now."""
        del keep_cache  # of rows that are sampled
        worker = self.workers[key]
        assert isinstance(worker, ModelWorker), "only models have weights"
        worker.engine_with_weights().weights_written()
        worker.mark_published(version)
        return (worker.version, worker.dirty, worker.stamp), published(worker)

    def save_model(self, key: Key, folder: str) -> bool:
        """Save the model as a Hugging Face folder."""
        return self.workers[key].save_model(folder)


def everybody(ready: bool) -> bool:
    """Whether all ranks that compute together say so; each of them has to ask."""
    import torch

    if not torch.distributed.is_initialized():  # a pool of one rank, or the ranks of a test
        return ready
    said = torch.tensor([ready], dtype=torch.uint8)
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN)
    return bool(said)
