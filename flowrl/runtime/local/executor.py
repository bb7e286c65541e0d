"""The workers of a run, made and opened when they are first needed, and kept from program to program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from ...errors import FlowError, RankLost, WorkerError
from ...graph.values import is_handle
from ...workers.base import Engine, Opening, Worker
from ...workers.notes import Notes
from ...workers.records import Build
from ...workers.tokenizer import actor_of, find_tokenizer
from ..driver.dispatcher import Hands
from ..storage.disk import Checksum
from ..storage.journal import Journal
from ..values.remote_batch import RemoteColumn
from .calls import Here


class Declared(Protocol):
    """A worker as the flow declares it: a handle."""

    @property
    def name(self) -> str: ...
    @property
    def cls(self) -> type[Worker]: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> Mapping[str, Any]: ...
    @property
    def arguments(self) -> Mapping[str, Any]: ...
    @property
    def at(self) -> Any: ...


@dataclass
class LocalExecutor:
    """Opens workers by name. ``devices`` says where, by worker; ``open_engine`` asks a backend."""

    declared: Mapping[str, Declared]
    open_engine: Callable[[str, Build], Engine]
    backends: Mapping[str, str] = field(default_factory=dict[str, str])
    devices: Mapping[str, str] = field(default_factory=dict[str, str])
    pools: Mapping[str, str] = field(default_factory=dict[str, str])  # of those that train, by worker
    seed: int = 0
    warn: Callable[[str], None] = lambda text: None
    workers: dict[str, Worker] = field(default_factory=dict[str, Worker])
    servers: dict[str, Worker] = field(default_factory=dict[str, Worker])  # generating copies of their own
    serving_devices: Mapping[str, str] = field(default_factory=dict[str, str])  # of those
    notes: Notes = field(default_factory=Notes)  # of the rows that user code is at
    _tokenizers: dict[int, tuple[Any, Any]] = field(default_factory=dict[int, tuple[Any, Any]])

    def open(self, name: str) -> Worker:
        """The open worker of that name."""
        if name not in self.workers:
            self.workers[name] = self._opened(name, self.devices.get(name, "auto"), serving=False)
        return self.workers[name]

    def open_server(self, name: str) -> Worker:
        """The copy of a worker that generates, with the weights that the trained one has when it is opened."""
        if name not in self.servers:
            trained = self.open(name)
            server = self._opened(name, self.serving_devices.get(name, "auto"), serving=True)
            server.install(trained.in_use(), trained.version)
            self.servers[name] = server
        return self.servers[name]

    def serving(self, name: str, shared: bool) -> bool:
        """Whether a worker generates with a copy of its own; ``shared``: the plan lets one copy do both."""
        return not shared

    def start_program(self, names: Iterable[str]) -> None:
        """A program starts: its workers' optimizers and copies begin anew."""
        for name in names:
            self.workers[name].program_starts()

    def hands(self, number: int, journal: Journal) -> Hands:
        """Who runs the calls of a program."""
        return Here(number, journal, self.warn, self.notes)

    def record(self) -> dict[str, Any]:
        """What a run should keep of where it ran."""
        return {}

    def write_rows(self, value: Any, file: Path) -> tuple[Mapping[str, Any], Mapping[str, Checksum]]:
        """Rows that lie on ranks, written by one of them: there are none in one process."""
        raise AssertionError("rows lie in this process")

    def offload_idle(self) -> None:
        """A program's calls begin: nobody takes turns in the memory of this process."""

    def taken(self, live: Mapping[int, Any]) -> Mapping[int, Any]:
        """Values of a checkpoint as this place has them: columns that ranks have written are plain ones here."""
        return {i: _plain(v) for i, v in live.items()}

    def sync(self) -> None:
        """Have the disk hold what ranks have written: here that is the run's own journal."""

    def begin_again(self) -> None:
        """Close all workers, to be made again."""
        self.close()

    def watch(self, on_loss: Callable[[RankLost], None], on_renewal: Callable[[str], None]) -> None:
        """Whom to tell of lost ranks: there are none in one process."""

    def settled(self, step: int) -> None:
        """A step is committed: nothing is kept to make its rows again."""

    def recover(self, lost: RankLost) -> bool:
        """Start again what was lost; False where nothing can be."""
        return False

    def _opened(self, name: str, device: str, *, serving: bool) -> Worker:
        said = self.declared[name]
        worker = said.cls(*said.args, **said.kwargs)
        worker.name = name
        worker.init_arguments = said.arguments
        backend = self.backends.get(name, "hf")
        opening = Opening(
            open_engine=lambda build: self.open_engine(backend, build),
            peer=lambda handle: self.open(handle.name) if is_handle(handle) else handle,
            tokenizer=self.tokenizer,
            warn=self.warn,
            apart=lambda handle: "" if self._in_one_pool(name, handle) else "it is in another pool",
            seed=self.seed,
            device=device,
            serving=serving,
            notes=self.notes,
        )
        try:
            worker.open(opening)
            worker.check_kept()
        except FlowError as error:
            error.at = error.at or said.at
            raise
        except Exception as error:
            raise WorkerError(
                f"worker '{name}' could not be opened: {type(error).__name__}: {error}", at=said.at
            ) from error
        return worker

    def _in_one_pool(self, name: str, handle: Any) -> bool:
        return is_handle(handle) and self.pools.get(handle.name) == self.pools.get(name)

    def tokenizer(self, said: Any) -> Any:
        """The tokenizer that ``said`` names: a handle, a function, a name or folder; None: the actor's."""
        if said is None:
            owner = actor_of({n: (d.cls, d.arguments) for n, d in self.declared.items()})
            return cast("Any", self.open(owner)).tokenizer
        if is_handle(said):
            return cast("Any", self.open(said.name)).tokenizer
        if id(said) not in self._tokenizers:  # kept with what named it, so that the id stays its own
            self._tokenizers[id(said)] = (said, find_tokenizer(said))
        return self._tokenizers[id(said)][1]

    def close(self) -> None:
        """Close every open worker."""
        for worker in (*self.workers.values(), *self.servers.values()):
            worker.close()
        self.workers.clear()
        self.servers.clear()


def _plain(value: Any) -> Any:
    batch = value.source.stored[0].batch if isinstance(value, RemoteColumn) else None
    return value if batch is None else batch[value.source.names[0]]
