"""The workers of a run on ranks: opened where the plan has them, called by the driver, started again when lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...batch import Batch
from ...errors import FlowError, RankLost, WorkerError
from ...graph.values import is_handle
from ...schedule.events import Command, Memory, Start
from ...schedule.scheme import Scheme
from ...workers.base import Engine
from ...workers.notes import Notes
from ...workers.records import Build, Model
from ...workers.tokenizer import actor_of, find_tokenizer
from ..local.executor import Declared
from ..storage import checkpoint
from ..storage.damage import damaged_files
from ..storage.disk import Checksum
from ..storage.journal import Journal
from ..transfer.meeting import forget_meetings
from ..values.call import Call
from ..values.remote_batch import Remote, RemoteColumn, rebuilt
from .calls import Asked, Calls
from .client import Link, RankClient
from .protocol import Blueprint, Named, Post, RankConfig, unopened
from .worker_group import WorkerGroup


@dataclass(frozen=True)
class Stand:
    """Where a worker is on ranks: ``Stand("train", Post("actor", backend="fsdp2", axes={"fsdp": 2}), places=(0, 1))``.

    ``places``: for each rank of the pool the part of the rows that it has.
    """

    pool: str
    post: Post
    places: tuple[int, ...]


class Ranks(Link, Protocol):
    """Processes that can be started: a :class:`~flowrl.runtime.distributed.client.Link` to them is what comes of it."""

    def start(self, config: RankConfig) -> None: ...
    def restart(self, ranks: Sequence[int]) -> None: ...
    @property
    def where(self) -> Mapping[int, Mapping[str, Any]]: ...
    def stop(self) -> None: ...
    def record(self) -> dict[str, Any]: ...


class DistributedExecutor:
    """Opens workers by name, on ranks. See :class:`flowrl.runtime.local.executor.LocalExecutor`.

    ``stands`` by worker and whether it is the copy that generates; ``pools`` the ranks of each pool. ``swapped`` are
    those, such as ``actor.train``, that make way for others of their pool between their calls.
    """

    def __init__(
        self,
        declared: Mapping[str, Declared],
        ranks: Ranks,
        *,
        stands: Mapping[tuple[str, bool], Stand],
        pools: Mapping[str, Sequence[int]],
        open_engine: Callable[[str, Build], Engine],
        open_tokenizer: Callable[[Model], Any],
        out: Path,
        seed: int = 0,
        deadline: float | None = None,
        swapped: Container[str] = (),
    ) -> None:
        self.swapped = swapped
        self.declared, self.ranks, self.stands = declared, ranks, stands
        self.client = RankClient(ranks, pools, deadline=deadline)
        self.client.renew = self._renew
        self.calls = Calls(self.client)
        self._on_loss: Callable[[RankLost], None] = lambda lost: None
        self._on_renewal: Callable[[str], None] = lambda text: None
        self.workers: dict[str, WorkerGroup] = {}
        self.servers: dict[str, WorkerGroup] = {}
        self._warn: Callable[[str], None] = lambda text: None
        self.notes = Notes()  # those of ranks are theirs
        self._joined: set[str] = set()
        self._started = False
        self._inconsistent: set[int] = set()  # ranks that were to be renewed within a program, and were not to the end
        self._tokenizers: dict[int, tuple[Any, Any]] = {}
        self.blueprints = {name: _blueprint(name, d) for name, d in declared.items()}
        self.config = RankConfig(self.blueprints, open_engine, open_tokenizer, str(out.resolve()), seed)

    @property
    def warn(self) -> Callable[[str], None]:
        return self._warn

    @warn.setter
    def warn(self, tell: Callable[[str], None]) -> None:
        self._warn = self.client.warn = tell

    # -- opening ----------------------------------------------------------------------------------------------------

    def open(self, name: str) -> WorkerGroup:
        """The worker of that name, open on its ranks."""
        if name not in self.workers:
            self.workers[name] = self._opened(name, serving=False)
        return self.workers[name]

    def open_server(self, name: str) -> WorkerGroup:
        """The copy of a worker that generates, with the weights that the trained one has when it is opened."""
        if name not in self.servers:
            trained = self.open(name)
            server = self.servers[name] = self._opened(name, serving=True)
            try:
                server.install(trained.in_use(), trained.version)
            except BaseException:
                del self.servers[name]
                raise
        return self.servers[name]

    def serving(self, name: str, shared: bool) -> bool:
        """Whether a worker generates with a copy of its own."""
        del shared
        return (name, True) in self.stands

    def start_program(self, names: Iterable[str]) -> None:
        """A program starts: optimizers begin anew, and copies of other workers take their weights."""
        names = list(names)
        for name in names:
            self.workers[name].program_starts()
        for name in names:
            of = self.blueprints[name].arguments.get("of")
            if isinstance(of, Named) and self.workers[name].is_model and self.blueprints[name].cls.copies_of:
                group = self.workers[name]
                group.install(self.open(of.name).in_use(), group.version)

    def _opened(self, name: str, *, serving: bool) -> WorkerGroup:
        stand = self.stands[name, serving]
        self._start()
        ranks = self.client.pools[stand.pool]
        self._join(stand.pool)
        group = WorkerGroup(self.client, self.blueprints[name], stand.post, ranks, stand.places)
        try:
            found = self.client.everywhere(ranks, "open", stand.post, what=f"opening {name}")
        except RankLost:
            raise
        except FlowError as error:
            error.at = error.at or self.declared[name].at
            raise
        except Exception as error:
            raise WorkerError(f"worker '{name}' could not be opened: {error}", at=self.declared[name].at) from error
        group.version = found[ranks[0]]["version"]
        group.opened(found)
        group.born = group.stamp
        for text in dict.fromkeys(text for said in found.values() for text in said["warnings"]):
            self.warn(text)
        if f"{name}.{'generate' if serving else 'train'}" in self.swapped:
            group.offload()
        return group

    def _start(self) -> None:
        if not self._started:
            self._started = True
            forget_meetings(Path(self.config.folder))
            self.ranks.start(self.config)
            self._note()

    def _note(self) -> None:
        """Write which rank is which process, for whoever looks after them: ``ranks.json``."""
        text = json.dumps({str(rank): said for rank, said in sorted(self.ranks.where.items())}, indent=1)
        (Path(self.config.folder) / "ranks.json").write_text(text)

    def _join(self, pool: str) -> None:
        """Have the ranks of a pool whose models compute together form a process group."""
        if pool in self._joined or not any(s.pool == pool and s.post.collective for s in self.stands.values()):
            return
        ranks = self.client.pools[pool]
        meeting = self.client.everywhere(ranks[:1], "meeting_point")[ranks[0]]
        seconds = (self.client.deadline or 1740.0) + 60  # the driver is the first to find that a rank hangs
        begun = self.client.begin("join_pool", {r: (len(ranks), n, meeting, seconds) for n, r in enumerate(ranks)})
        self.client.answered(begun, f"joining the ranks of pool '{pool}'")
        self._joined.add(pool)

    def tokenizer(self, said: Any) -> Any:
        """The tokenizer that ``said`` names, in the driver; None is that of the flow's actor."""
        if said is None:
            said = self.declared[actor_of({n: (d.cls, d.arguments) for n, d in self.declared.items()})]
        if id(said) not in self._tokenizers:
            if is_handle(said):
                model = unopened(self.blueprints, said.name).build().model  # type: ignore[attr-defined]
                made = self.config.open_tokenizer(model)
            else:
                made = find_tokenizer(said)
            self._tokenizers[id(said)] = (said, made)
        return self._tokenizers[id(said)][1]

    # -- running ----------------------------------------------------------------------------------------------------

    def hands(self, number: int, journal: Journal) -> RanksHands:
        """Who runs the calls of a program: the ranks, which have journals of their own."""
        del journal
        self._start()
        self.client.lineage.settled(sys.maxsize)  # steps are counted from anew
        return RanksHands(self.calls, number)

    def write_rows(self, value: Remote | RemoteColumn, file: Path) -> tuple[Mapping[str, Any], Mapping[str, Checksum]]:
        """Have rows that the program holds written into a checkpoint by a rank."""
        return self.calls.written(value, file)

    def offload_idle(self) -> None:
        """A program's calls begin: whoever takes turns is away, as its schedule takes for granted."""
        for groups, use in ((self.workers, "train"), (self.servers, "generate")):
            for name, group in groups.items():
                if f"{name}.{use}" in self.swapped:
                    group.offload()

    def taken(self, live: Mapping[int, Any]) -> Mapping[int, Any]:
        """Values of a checkpoint: ranks get the rows of them that they need with their calls."""
        return live

    def sync(self) -> None:
        """Have the disk hold the journals."""
        self.client.everywhere([r for ranks in self.client.pools.values() for r in ranks], "sync")

    def record(self) -> dict[str, Any]:
        """Bytes that moved, and where the ranks are."""
        return {
            "traffic": vars(self.client.traffic),
            "publishes": list(self.client.moves),
            "swaps": list(self.client.swaps),
            **self.ranks.record(),
        }

    def recover(self, lost: RankLost) -> bool:
        """Start the pools of the lost ranks again, where they are not alive, and have all others forget what they hold.

        The workers of other pools stay open; they take back their state from the checkpoint.
        """
        if not lost.ranks:
            return False
        pools = {self.client.pool_of(rank) for rank in {*(() if lost.alive else lost.ranks), *self._inconsistent}}
        self._inconsistent = set()
        dead = [rank for pool in pools for rank in self.client.pools[pool]]
        self._joined -= pools  # all of this is forgotten first: others may die while these are started
        self.client.forget()
        for groups in (self.workers, self.servers):
            for name, group in list(groups.items()):
                group.aside.clear()
                if group.ranks[0] in dead:
                    del groups[name]
        if dead:
            self.ranks.restart(dead)
            self._note()
        alive = [r for ranks in self.client.pools.values() for r in ranks if r not in dead]
        self.client.everywhere(alive, "forget")
        return True

    def watch(self, on_loss: Callable[[RankLost], None], on_renewal: Callable[[str], None]) -> None:
        """Whom to tell of ranks that were lost within a program, before and after they are started again; ``on_loss``
        raises it where that is too much."""
        self._on_loss, self._on_renewal = on_loss, on_renewal

    def settled(self, step: int) -> None:
        """A step is committed: its rows are not made again."""
        self.client.lineage.settled(step)

    def _renew(self, lost: RankLost) -> list[int]:
        """Start lost ranks again while the program waits, with the state that they had; which ones. RankLost where that
        state went with them: then the run has to go back to a checkpoint."""
        lost_pools = {self.client.pool_of(rank) for rank in lost.ranks}
        fallen = [
            rank
            for pool in lost_pools
            for rank in self.client.pools[pool]
            if rank in lost.ranks or pool in self._joined  # who computes together starts together
        ]
        groups = [g for g in (*self.workers.values(), *self.servers.values()) if not set(g.ranks).isdisjoint(fallen)]
        ways = [self._way_back(group, fallen) for group in groups]
        if self._inconsistent or not fallen or None in ways:
            raise lost
        self._on_loss(lost)
        try:
            self.ranks.restart(fallen)
            self._note()
            self.client.lose(fallen)
            for pool in lost_pools & self._joined:
                self._joined.discard(pool)
                self._join(pool)
            for group, way in zip(groups, ways, strict=True):
                assert way is not None, "all of them have one"
                self._open_again(group, [r for r in group.ranks if r in fallen], way)
        except Exception as error:
            again = error if isinstance(error, RankLost) else RankLost(f"ranks could not be renewed: {error}")
            again.ranks, again.inconsistent = tuple({*fallen, *again.ranks}), True
            self._inconsistent |= set(again.ranks)
            raise again from (None if again is error else error)
        self._on_renewal(f"rank{'s' if len(fallen) > 1 else ''} {', '.join(map(str, fallen))}")
        return fallen

    def _way_back(self, group: WorkerGroup, fallen: Collection[int]) -> Callable[[WorkerGroup], None] | None:
        """How ranks of a group that were started anew get the state that it has; None where nobody has it any more."""
        alive = [rank for rank in group.ranks if rank not in fallen]
        group.owed = group.installing
        if group.changing or group.swapping:
            return None
        if group.stamp == group.born or group.installing:  # as it was opened, or about to be given weights
            return lambda new: None
        if group.aside:
            return None
        if alive and group.is_model and not group.post.collective:  # each of them has all
            return lambda new: self._copied(group.part(alive), new)
        trained = self.workers.get(group.name) if group.post.serving else None
        if trained is not None and set(trained.ranks).isdisjoint(fallen):
            settled = not trained.changing and not trained.swapping and not trained.dirty
            if settled and trained.version == group.version:
                return lambda new: self._copied(trained, new)
        folder = checkpoint.latest(Path(self.config.folder) / "checkpoints")
        if folder is not None and checkpoint.load_manifest(folder)["stamps"].get(group.title) == group.stamp:
            return None if damaged_files(folder, group.title) else lambda new: new.load_state(folder, group.title)
        return None

    def _copied(self, source: WorkerGroup, new: WorkerGroup) -> None:
        new.take(source.in_use(), source.version)
        self.client.part_ways(source, new)

    def _open_again(self, group: WorkerGroup, ranks: Sequence[int], way: Callable[[WorkerGroup], None]) -> None:
        """Open a worker on ranks that were started anew, and give it its state."""
        found = self.client.everywhere(ranks, "open", group.post, what=f"opening {group.title} again")
        group.opened(found)
        new = group.part(ranks)
        new.is_away = False
        way(new)
        group.stamps |= new.stamps
        if group.is_away:
            new.offload()

    def begin_again(self) -> None:
        """Close all workers: there is no checkpoint to go back to, so all of them begin as they were made."""
        self.client.everywhere([r for ranks in self.client.pools.values() for r in ranks], "close_workers")
        self.client.forget()
        self.workers.clear()
        self.servers.clear()

    def close(self) -> None:
        """End all ranks."""
        self.workers.clear()
        self.servers.clear()
        if self._started:
            self.ranks.stop()
            self._started = False
            forget_meetings(Path(self.config.folder))


class RanksHands:
    """Has the calls of program ``number`` run on ranks: see :class:`flowrl.runtime.local.calls.Here`."""

    def __init__(self, calls: Calls, number: int) -> None:
        self.calls, self.number = calls, number

    def home(self, workers: Mapping[str, Any], scheme: Scheme) -> Container[str]:
        """The driver's thread serves no pool: it runs the program."""
        return ()

    def far(self, command: Command) -> bool:
        """Whether a call without a pool is done elsewhere: all but moves are."""
        return isinstance(command, Start)

    def swap(self, command: Start, groups: Callable[[str], WorkerGroup], memory: Mapping[str, Memory]) -> None:
        """Have workers make way for those of a call, as the schedule says; note what that freed, and the forecast."""
        for what, moves in (("offload", command.offload), ("onload", command.onload)):
            for pool, resident in moves:
                group = groups(resident)
                sizes = group.offload() if what == "offload" else group.onload()
                self.calls.client.swapped(what, pool, resident, sizes, memory[pool].sizes[resident])

    def drawn(self, batch: Batch) -> Remote:
        """Rows of a data source: each rank gets those that it needs with its call."""
        return Remote.drawn(batch)

    def readable(self, value: Any) -> Any:
        """Rows for a record, brought here."""
        return self.calls.brought(value) if isinstance(value, (Remote, RemoteColumn)) else value

    def begin(self, call: Call, chunk: int, worker: Any, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """Begin a call on the ranks of its worker, or where its rows are; what is given waits for it."""
        asked = Asked(call.op, call.title, call.info, call.index, self.number, chunk, call.at, call.into, call.edge)
        return self.calls.begun(asked, worker, arguments)


def _blueprint(name: str, said: Declared) -> Blueprint:
    def named(item: Any) -> Any:
        return Named(item.name) if is_handle(item) else item

    args, kwargs, arguments = rebuilt((said.args, dict(said.kwargs), dict(said.arguments)), named)
    return Blueprint(name, said.cls, args, kwargs, arguments)
